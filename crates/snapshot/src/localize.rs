//! A generation of which pages were elsewhere, made one that has all: of a store, for another proc,
//! to which what is in the store does not belong, or of copies of another proc's processes, once
//! all has come.

use crate::error::io_at;
use crate::pages::remote::{self, RemoteFile};
use crate::pages::{self, PAGE, PageFile, PageMap};
use crate::{Kept, MANIFEST, Manifest, SnapshotError, cloned_note, open, page_part, path_of, read_back};
use kip_types::Generation;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// Pages that are copied at once.
const CHUNK: u32 = 256;

/// Gives the generation in `from` a second directory, `to`, which is there and has nothing: files
/// get a second name, and pages of remote page files are copied, all of which have come.
///
/// # Errors
/// The file system's; a page has not come, or is damaged.
pub fn link_whole(from: &Path, to: &Path) -> Result<(), SnapshotError> {
    let mut map = match PageMap::load(from) {
        Ok(map) => map,
        // A generation of an older Kip has none.
        Err(SnapshotError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => PageMap::default(),
        Err(e) => return Err(e),
    };
    let remote: Vec<String> = map.files.iter().filter(|file| file.remote.is_some()).flat_map(PageFile::names).collect();
    // A plan knows of its pages where they were.
    let made_anew = |name: &str| !remote.is_empty() && [MANIFEST, pages::PAGES, "wake.plan"].contains(&name);
    for entry in fs::read_dir(from).map_err(io_at(from))? {
        let entry = entry.map_err(io_at(from))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !remote.contains(&name) && !made_anew(&name) {
            let link = to.join(entry.file_name());
            fs::hard_link(entry.path(), &link).map_err(io_at(&link))?;
        }
    }
    if remote.is_empty() {
        return Ok(());
    }
    let mut manifest: Manifest<serde_json::Value> = open(from)?;
    manifest.parts.retain(|part| part.name != pages::PAGES);
    for file in map.files.iter_mut().filter(|file| file.remote.is_some()) {
        copy_pages(from, to, file)?;
        *file = PageFile { name: file.name.clone(), ..PageFile::default() };
        manifest.parts.push(page_part(to, file, Kept::Synced)?);
    }
    map.save(to)?;
    manifest.parts.push(read_back(to, pages::PAGES, Kept::Synced)?);
    manifest.remote = Vec::new();
    let path = to.join(MANIFEST);
    let text = serde_json::to_vec(&manifest).expect("a manifest is plain data");
    let written = File::create(&path).and_then(|mut file| file.write_all(&text).and_then(|()| file.sync_all()));
    written.map_err(io_at(&path))
}

/// What is zeros stays a hole.
fn copy_pages(from: &Path, to: &Path, file: &PageFile) -> Result<(), SnapshotError> {
    let remote = RemoteFile::open(from, file)?;
    let path = to.join(&file.name);
    let copy = File::create_new(&path).map_err(io_at(&path))?;
    copy.set_len(u64::from(remote.pages()) * PAGE as u64).map_err(io_at(&path))?;
    let mut buffer = vec![0; CHUNK as usize * PAGE];
    for first in (0..remote.pages()).step_by(CHUNK as usize) {
        let bytes = &mut buffer[..CHUNK.min(remote.pages() - first) as usize * PAGE];
        remote.read(first, bytes).map_err(io_at(&from.join(&file.name)))?;
        for (number, page) in
            (u64::from(first)..).zip(bytes.chunks(PAGE)).filter(|(_, page)| page.iter().any(|b| *b != 0))
        {
            copy.write_all_at(page, number * PAGE as u64).map_err(io_at(&path))?;
        }
    }
    Ok(())
}

/// Makes a generation whose page files were filled, all of which have come, one like any other.
///
/// # Errors
/// The file system's; `Damaged` if a page has not come.
pub fn settle(dir: &Path) -> Result<(), SnapshotError> {
    if !remote::may_be_filled(dir) {
        return Ok(());
    }
    let mut map = PageMap::load(dir)?;
    let has_marks = |file: &&mut PageFile| file.remote.is_none() && dir.join(marks_of(file)).exists();
    let mut filled = Vec::new();
    let mut manifest: Manifest<serde_json::Value> = open(dir)?;
    manifest.parts.retain(|part| part.name != pages::PAGES);
    for file in map.files.iter_mut().filter(has_marks) {
        let path = dir.join(&file.name);
        // An earlier try may have come so far.
        file.sums = Vec::new();
        let found = RemoteFile::find(dir, file)?;
        let sums = found.map_or(Ok(None), |found| found.sums()).map_err(io_at(&path))?;
        file.sums = sums.ok_or(SnapshotError::Damaged { path, what: "number of pages" })?;
        manifest.parts.retain(|part| part.name != file.name);
        manifest.parts.push(page_part(dir, file, Kept::Unsynced)?);
        filled.push(marks_of(file));
    }
    // Under other names first: those that they have may be names of another generation's files.
    let new = |name: &str| dir.join(format!("{name}.new"));
    map.save_as(&new(pages::PAGES))?;
    let part = read_back(dir, &format!("{}.new", pages::PAGES), Kept::Unsynced)?;
    manifest.parts.push(crate::Part { name: pages::PAGES.to_owned(), ..part });
    let text = serde_json::to_vec(&manifest).expect("a manifest is plain data");
    fs::write(new(MANIFEST), text).map_err(io_at(dir))?;
    let settled = [pages::PAGES, MANIFEST].into_iter().try_for_each(|name| fs::rename(new(name), dir.join(name)));
    settled.and_then(|()| filled.iter().try_for_each(|name| fs::remove_file(dir.join(name)))).map_err(io_at(dir))
}

/// The file that says which pages of a page file are here.
fn marks_of(file: &PageFile) -> String {
    format!("{}{}", file.name, remote::HERE)
}

/// Settles the generation that a proc has from the proc that it is a clone of ([`settle`]).
///
/// # Errors
/// The file system's: it may have been parked or removed meanwhile. `Damaged` if a page has not
/// come.
pub fn settle_cloned(dir: &Path) -> Result<(), SnapshotError> {
    cloned_generation(dir).map_or(Ok(()), |generation| settle(&generation))
}

/// Where the generation is that a clone in `dir` was made with.
pub fn cloned_generation(dir: &Path) -> Option<PathBuf> {
    cloned_note(dir).map(|note| path_of(dir, Generation(note.generation)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::{PAGES, UNSYNCED};
    use crate::pages::{ProcessPages, Run};
    use crate::remote::may_be_filled;
    use crate::{Contents, begin, seal, seal_copy, verify};
    use kip_types::Generation;

    #[test]
    fn what_was_remote_is_whole_and_needs_no_store() {
        let dir = tempfile::tempdir().unwrap();
        let generation = Generation(1);
        let growing = begin(dir.path(), generation).unwrap();
        let remote = RemoteFile::create(&growing, "g1-remote", 5).unwrap();
        fs::write(growing.join("g1-remote.table"), b"of a store").unwrap();
        fs::write(growing.join("checkpoint.tar"), b"images").unwrap();
        let mut map = PageMap::default();
        let file = map.file("g1-remote");
        map.files[0].remote = Some(5);
        let runs = vec![Run { start: 0x1000, pages: 5, file, first: 0 }];
        map.processes.insert(1, ProcessPages { runs, ..ProcessPages::default() });
        let contents = Contents { engine: "e".to_owned(), body: "body", pages: map };
        let path = seal_copy(&growing, generation, contents, Vec::new()).unwrap();
        remote.put(0, &[7; 2 * PAGE]).unwrap();
        remote.put_zeros(2, 2).unwrap();
        let copy = dir.path().join("copy");
        fs::create_dir(&copy).unwrap();
        assert!(link_whole(&path, &copy).is_err(), "page 4 has not come");
        fs::remove_dir_all(&copy).unwrap();
        fs::create_dir(&copy).unwrap();
        remote.put(4, &[9; PAGE]).unwrap();
        link_whole(&path, &copy).unwrap();
        let manifest = open::<String>(&copy).unwrap();
        assert!(manifest.body == "body" && manifest.remote.is_empty());
        verify(&copy, &manifest.parts).unwrap();
        assert!(!copy.join("g1-remote.table").exists() && !copy.join("g1-remote.here").exists());
        let bytes = fs::read(copy.join("g1-remote")).unwrap();
        assert_eq!([bytes[0], bytes[PAGE], bytes[2 * PAGE], bytes[4 * PAGE]], [7, 7, 0, 9]);
        let sealed = PageMap::load(&copy).unwrap();
        assert!(sealed.files[0].remote.is_none() && sealed.processes[&1].runs[0].pages == 5);
        // One that has nothing in a store is linked as it is.
        let growing = begin(dir.path(), Generation(2)).unwrap();
        fs::write(growing.join("checkpoint.tar"), b"images").unwrap();
        let contents = Contents { engine: "e".to_owned(), body: "body", pages: PageMap::default() };
        let whole = seal(&growing, Generation(2), contents).unwrap().path;
        let other = dir.path().join("other");
        fs::create_dir(&other).unwrap();
        link_whole(&whole, &other).unwrap();
        assert_eq!(fs::read(whole.join(MANIFEST)).unwrap(), fs::read(other.join(MANIFEST)).unwrap());
    }

    /// Of a clone that runs while its memory is copied.
    #[test]
    fn one_that_was_filled_is_like_any_other_once_all_has_come() {
        let dir = tempfile::tempdir().unwrap();
        let growing = crate::begin(dir.path(), Generation(3)).unwrap();
        let name = format!("g3-memory{UNSYNCED}");
        let filled = RemoteFile::create(&growing, &name, 3).unwrap();
        let mut map = PageMap::default();
        let runs = vec![Run { start: 0x1000, pages: 3, file: map.file(&name), first: 0 }];
        map.processes.insert(2, ProcessPages { runs: runs.clone(), sets: Vec::new() });
        let contents = crate::Contents { engine: String::new(), body: "body", pages: map };
        let path = crate::seal_for_now(&growing, Generation(3), contents).unwrap().path;
        crate::note_cloned(dir.path(), Generation(3), &[]).unwrap();
        let parts = || crate::open::<String>(&path).unwrap().parts;
        assert_eq!(parts().iter().map(|part| part.name.as_str()).collect::<Vec<_>>(), [PAGES]);
        filled.put(0, &[7; 2 * PAGE]).unwrap();
        assert!(crate::verify_some(&path, &parts(), &runs).is_err(), "a page is missing");
        assert!(crate::settle_cloned(dir.path()).is_err() && may_be_filled(&path));
        filled.put(2, &[8; PAGE]).unwrap();
        crate::verify_some(&path, &parts(), &runs).unwrap();
        crate::settle_cloned(dir.path()).unwrap();
        assert!(!may_be_filled(&path));
        assert_eq!(PageMap::load(&path).unwrap().files[0].sums, filled.sums().unwrap().unwrap());
        crate::verify(&path, &parts()).unwrap();
        fs::write(path.join(&name), vec![7; 3 * PAGE]).unwrap();
        assert!(crate::verify(&path, &parts()).is_err(), "its last page is damaged");
        crate::settle_cloned(dir.path()).unwrap();
    }
}
