//! A generation of which pages were in a store, made one that needs no store: for another proc, to
//! which what is in the store does not belong.

use crate::error::io_at;
use crate::pages::remote::RemoteFile;
use crate::pages::{self, PAGE, PageFile, PageMap};
use crate::{Kept, MANIFEST, Manifest, SnapshotError, open, page_part, read_back};
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::{ProcessPages, Run};
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
}
