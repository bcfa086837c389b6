//! Snapshots on local disk: a directory per generation that is either complete, read back and
//! sealed, or nothing.
//!
//! Owns the manifest and the checks. Knows nothing of processes: what the sleeping program needs
//! besides files is an opaque part of the manifest ([`Manifest::body`]). A generation without a
//! manifest does not exist; the manifest is written last, by rename, after every other file was
//! synced and read back. Crash: at worst a directory without a manifest, which [`sweep`] removes.
//! Where the processes' memory lies, page by page, says [`pages`].
//!
//! ```text
//! gen-7.new/  --seal-->  gen-7.new/manifest.json  --rename-->  gen-7/
//! ```
#![forbid(unsafe_code)]

pub mod carry;
mod error;
mod localize;
pub mod pages;

use crate::error::io_at;
use crate::pages::{PAGE, PageFile, PageMap, Run};
pub use error::{FORMAT, SnapshotError};
use kip_types::Generation;
pub use localize::{cloned_generation, link_whole, settle, settle_cloned};
pub use pages::remote;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The manifest's file name.
pub const MANIFEST: &str = "manifest.json";
/// Logs and statistics of CRIU's, and what is derived from the rest; they are not part of a
/// generation.
const NOT_PART: [&str; 7] =
    ["dump.log", "stats-dump", "restore.log", "stats-restore", "wake.plan", pages::PAGES, MANIFEST];

/// Empty files of a generation that is elsewhere: [`leave_spare`].
const SPARE: &str = "spare";

/// What the files of a generation take on disk, bytes.
pub fn bytes_of(directory: &Path) -> u64 {
    let files = fs::read_dir(directory).into_iter().flatten().flatten();
    files.filter_map(|file| file.metadata().ok()).map(|found| found.blocks() * 512).sum()
}

/// One file of a generation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// File name.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// CRC-32 (ISO-HDLC) of the contents, of a page file that of its pages' checksums: finds
    /// damage, not malice.
    pub crc: u32,
}

/// What a generation consists of.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Manifest<B> {
    /// At most [`FORMAT`].
    pub format: u32,
    /// Its number.
    pub generation: Generation,
    /// The engine that must read it, for example `criu 4.2.1`.
    pub engine: String,
    /// `uname -r` of the machine that made it.
    pub kernel: String,
    /// Its files, but for remote page files.
    pub parts: Vec<Part>,
    /// Which of its page files are remote ones, see [`remote`]: their numbers in the page map.
    #[serde(default)]
    pub remote: Vec<u32>,
    /// What the owner of the processes needs to bring them back.
    pub body: B,
}

/// `uname -r` of this machine.
pub fn kernel() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// The directory of a generation.
pub fn path_of(dir: &Path, generation: Generation) -> PathBuf {
    dir.join(format!("gen-{generation}"))
}

/// In a proc's directory: the generation that it has from the proc that it is a clone of, and what
/// is another than in that one's memory.
const CLONED: &str = "cloned";

/// Four bytes of a process's memory that are others in a clone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPatch {
    /// The process, as numbered inside.
    pub pid: u32,
    /// Where they are.
    pub address: u64,
    /// What they are.
    pub value: u32,
}

#[derive(Debug, Serialize, Deserialize)]
struct ClonedNote {
    generation: u64,
    patches: Vec<MemoryPatch>,
}

/// Notes that a generation is another proc's, of which this one holds nothing.
///
/// # Errors
/// The file system's.
pub fn note_cloned(dir: &Path, generation: Generation, patches: &[MemoryPatch]) -> io::Result<()> {
    let note = ClonedNote { generation: generation.0, patches: patches.to_vec() };
    fs::write(dir.join(CLONED), serde_json::to_vec(&note).map_err(io::Error::other)?)
}

/// What is another in a proc's memory than in that generation; none if the proc has the generation
/// not from the proc that it is a clone of.
pub fn cloned_patches(dir: &Path, generation: Generation) -> Option<Vec<MemoryPatch>> {
    cloned_note(dir).filter(|note| note.generation == generation.0).map(|note| note.patches)
}

fn cloned_note(dir: &Path) -> Option<ClonedNote> {
    serde_json::from_slice(&fs::read(dir.join(CLONED)).ok()?).ok()
}

/// Notes that none of a proc's generations is another's any more: it starts, and counts them anew.
///
/// # Errors
/// The file system's.
pub fn forget_cloned(dir: &Path) -> io::Result<()> {
    match fs::remove_file(dir.join(CLONED)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Whether a proc has that generation from the proc that it is a clone of.
pub fn is_cloned(dir: &Path, generation: Generation) -> bool {
    cloned_patches(dir, generation).is_some()
}

/// The directory a generation grows in.
pub fn growing_path(dir: &Path, generation: Generation) -> PathBuf {
    dir.join(format!("gen-{generation}.new"))
}

/// Makes the empty directory a generation grows in; removes what an earlier try left there.
pub fn begin(dir: &Path, generation: Generation) -> Result<PathBuf, SnapshotError> {
    let path = growing_path(dir, generation);
    match fs::remove_dir_all(&path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io_at(&path)(e)),
        _ => {}
    }
    fs::create_dir(&path).map_err(io_at(&path))?;
    Ok(path)
}

/// The same for a generation that comes back from elsewhere, made of what [`leave_spare`] left: its
/// files are there already, empty. Returns their names; those that do not come are to be removed.
pub fn begin_copy(dir: &Path, generation: Generation) -> Result<(PathBuf, BTreeSet<String>), SnapshotError> {
    let path = begin(dir, generation)?;
    match fs::rename(dir.join(SPARE), &path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok((path, BTreeSet::new())),
        renamed => renamed.and_then(|()| names_in(&path)).map(|names| (path.clone(), names)).map_err(io_at(&path)),
    }
}

/// Removes a generation that is elsewhere, but leaves the files of its images, empty, to those of
/// the copy that will come. ext4 gives no new file the inode of one that was removed in the last
/// minutes, and looks at each such inode before it finds another (`recently_deleted` in the
/// kernel's fs/ext4/ialloc.c): where procs come and go, a new file takes many times as long as one
/// that is there.
pub fn leave_spare(dir: &Path, generation: Generation) -> Result<(), SnapshotError> {
    let (path, spare) = (path_of(dir, generation), dir.join(SPARE));
    let left = (|| {
        match fs::remove_dir_all(&spare) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        // From here on it is no generation.
        fs::remove_file(path.join(MANIFEST))?;
        for name in names_in(&path)? {
            let file = path.join(&name);
            let is_kept = name.ends_with(".tar") || name.ends_with(".img") && !name.starts_with("pages-");
            if is_kept && fs::symlink_metadata(&file)?.nlink() == 1 {
                File::options().write(true).truncate(true).open(&file)?;
            } else {
                fs::remove_file(&file)?;
            }
        }
        fs::rename(&path, &spare)
    })();
    left.map_err(io_at(&path))
}

fn names_in(dir: &Path) -> io::Result<BTreeSet<String>> {
    fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

/// What [`seal`] gets beside the files.
#[derive(Debug)]
pub struct Contents<B> {
    /// The engine that wrote them.
    pub engine: String,
    /// See [`Manifest::body`].
    pub body: B,
    /// Where the processes' memory lies. Checksums that are missing are filled in; files that have
    /// theirs are links to those of an earlier generation, which were read back then.
    pub pages: PageMap,
}

/// Whether a generation has to outlive the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kept {
    /// It is the only one.
    Synced,
    /// It is also elsewhere, or not needed then.
    Unsynced,
}

impl Kept {
    fn sync(self, file: &File) -> io::Result<()> {
        if self == Kept::Synced { file.sync_all() } else { Ok(()) }
    }
}

/// A generation that is complete.
#[derive(Debug)]
pub struct Sealed {
    /// Its directory.
    pub path: PathBuf,
    /// What of it is new on the disk, bytes.
    pub bytes: u64,
    /// Its page map, with all checksums.
    pub pages: PageMap,
}

/// Syncs every file of `growing`, reads each back, writes page map and manifest and gives the
/// directory its final name.
pub fn seal<B: Serialize>(
    growing: &Path,
    generation: Generation,
    contents: Contents<B>,
) -> Result<Sealed, SnapshotError> {
    seal_as(growing, generation, contents, Kept::Synced, Vec::new())
}

/// The same of what a proc goes on from at once: nothing is synced, for after a crash of the
/// machine it starts anew. Page files that have their checksums are not read back.
pub fn seal_for_now<B: Serialize>(
    growing: &Path,
    generation: Generation,
    contents: Contents<B>,
) -> Result<Sealed, SnapshotError> {
    seal_as(growing, generation, contents, Kept::Unsynced, Vec::new())
}

/// Takes a part that is another now into a generation's manifest, which is written anew: its other
/// names go on to be what they were.
///
/// # Errors
/// The file system's.
pub fn replace_part<B: Serialize>(dir: &Path, mut manifest: Manifest<B>, name: &str) -> Result<(), SnapshotError> {
    manifest.parts.retain(|part| part.name != name);
    manifest.parts.push(read_back(dir, name, Kept::Unsynced)?);
    let (path, new) = (dir.join(MANIFEST), dir.join("manifest.new"));
    let text = serde_json::to_vec(&manifest).expect("a manifest is plain data");
    fs::write(&new, text).and_then(|()| fs::rename(&new, &path)).map_err(io_at(&path))
}

/// Syncs the page files that were not of all generations in a proc's directory, so that a later one
/// that takes them over has not to wait for the disk.
pub fn sync_unsynced(dir: &Path) {
    let entries = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten();
    let name = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    for generation in entries(dir).filter(|entry| name(entry).starts_with("gen-")) {
        for file in entries(&generation.path()).filter(|entry| name(entry).ends_with(pages::UNSYNCED)) {
            let synced = File::open(file.path()).and_then(|file| file.sync_all());
            if let Err(error) = synced {
                tracing::debug!(path = %file.path().display(), %error, "a page file is not synced yet");
            }
        }
    }
}

/// The same of what is also elsewhere, in an object store, and will be fetched from there again
/// after a crash of the machine: nothing is synced, and `written` are files whose checksums were
/// taken of what was written, which are not read back.
pub fn seal_copy<B: Serialize>(
    growing: &Path,
    generation: Generation,
    contents: Contents<B>,
    written: Vec<Part>,
) -> Result<PathBuf, SnapshotError> {
    seal_as(growing, generation, contents, Kept::Unsynced, written).map(|sealed| sealed.path)
}

fn seal_as<B: Serialize>(
    growing: &Path,
    generation: Generation,
    contents: Contents<B>,
    kept: Kept,
    written: Vec<Part>,
) -> Result<Sealed, SnapshotError> {
    let Contents { engine, body, mut pages } = contents;
    let mut written: BTreeMap<String, Part> = written.into_iter().map(|part| (part.name.clone(), part)).collect();
    let mut parts = Vec::new();
    let mut bytes = 0;
    if let Some(lost) = pages.files.iter().find(|file| file.remote.is_none() && !growing.join(&file.name).exists()) {
        return Err(io_at(&growing.join(&lost.name))(io::ErrorKind::NotFound.into()));
    }
    // What comes from elsewhere when it is needed is checked when it comes.
    let mut remote: Vec<String> = pages.files.iter().filter(|f| f.remote.is_some()).flat_map(|f| f.names()).collect();
    remote.extend(remote::filled_names(growing, &pages));
    for name in part_names(growing)?.into_iter().filter(|name| !remote.contains(name)) {
        let page_file = pages.files.iter_mut().find(|file| file.name == name);
        let is_link = page_file.as_ref().is_some_and(|file| !file.sums.is_empty());
        let part = match page_file {
            Some(file) => page_part(growing, file, kept)?,
            None => written.remove(&name).map_or_else(|| read_back(growing, &name, kept), Ok)?,
        };
        bytes += if is_link { 0 } else { part.size };
        parts.push(part);
    }
    pages.save(growing)?;
    parts.push(read_back(growing, pages::PAGES, kept)?);
    let remote: Vec<u32> = (0..).zip(&pages.files).filter(|(_, f)| f.remote.is_some()).map(|(n, _)| n).collect();
    let manifest = Manifest { format: FORMAT, generation, engine, kernel: kernel(), parts, remote, body };
    let path = growing.join(MANIFEST);
    let text = serde_json::to_vec(&manifest).expect("a manifest is plain data");
    let written = File::create(&path).and_then(|mut f| f.write_all(&text).and_then(|()| kept.sync(&f)));
    written.map_err(io_at(&path))?;
    let last = growing.with_extension("");
    fs::rename(growing, &last).map_err(io_at(&last))?;
    for dir in [last.as_path(), last.parent().unwrap_or(Path::new("/"))] {
        File::open(dir).and_then(|d| kept.sync(&d)).map_err(io_at(dir))?;
    }
    Ok(Sealed { path: last, bytes, pages })
}

fn part_names(dir: &Path) -> Result<Vec<String>, SnapshotError> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(io_at(dir))? {
        let name = entry.map_err(io_at(dir))?.file_name().to_string_lossy().into_owned();
        if !NOT_PART.contains(&name.as_str()) {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// Syncs a page file and reads it back, unless that was done before.
fn page_part(dir: &Path, file: &mut PageFile, kept: Kept) -> Result<Part, SnapshotError> {
    let path = dir.join(&file.name);
    if file.sums.is_empty() {
        File::open(&path).and_then(|f| kept.sync(&f)).map_err(io_at(&path))?;
        file.sums = page_sums(&path)?;
    }
    let size = fs::metadata(&path).map_err(io_at(&path))?.len();
    Ok(Part { name: file.name.clone(), size, crc: file.sum() })
}

fn page_sums(path: &Path) -> Result<Vec<u32>, SnapshotError> {
    let mut sums = Vec::new();
    each_part(path, |bytes| sums.extend(bytes.chunks(PAGE).map(crc32fast::hash)))?;
    Ok(sums)
}

fn read_back(dir: &Path, name: &str, kept: Kept) -> Result<Part, SnapshotError> {
    let path = dir.join(name);
    File::open(&path).and_then(|f| kept.sync(&f)).map_err(io_at(&path))?;
    let (size, crc) = checksum(&path)?;
    Ok(Part { name: name.to_owned(), size, crc })
}

/// Size and checksum of a file.
fn checksum(path: &Path) -> Result<(u64, u32), SnapshotError> {
    let mut hasher = crc32fast::Hasher::new();
    let size = each_part(path, |bytes| hasher.update(bytes))?;
    Ok((size, hasher.finalize()))
}

/// Gives the bytes of a file to `each`, in parts of whole pages; tells how many there were.
fn each_part(path: &Path, mut each: impl FnMut(&[u8])) -> Result<u64, SnapshotError> {
    let mut file = File::open(path).map_err(io_at(path))?;
    let mut buffer = vec![0u8; 256 * 1024];
    let mut size = 0;
    loop {
        let mut n = 0;
        while n < buffer.len() {
            match file.read(&mut buffer[n..]).map_err(io_at(path))? {
                0 => break,
                more => n += more,
            }
        }
        if n == 0 {
            return Ok(size);
        }
        size += n as u64;
        each(&buffer[..n]);
    }
}

/// Reads the manifest of a generation; no other file is looked at.
pub fn open<B: DeserializeOwned>(path: &Path) -> Result<Manifest<B>, SnapshotError> {
    #[derive(Deserialize)]
    struct Head {
        format: u32,
    }
    let file = path.join(MANIFEST);
    let text = fs::read(&file).map_err(io_at(&file))?;
    let unreadable = |source| SnapshotError::Manifest { path: file.clone(), source };
    let head: Head = serde_json::from_slice(&text).map_err(unreadable)?;
    if head.format > FORMAT {
        return Err(SnapshotError::Newer { path: path.to_owned(), found: head.format });
    }
    serde_json::from_slice(&text).map_err(unreadable)
}

/// Compares every file with the manifest: size, then contents.
pub fn verify(path: &Path, parts: &[Part]) -> Result<(), SnapshotError> {
    let pages = page_map(path, parts)?;
    let is_page_file = |part: &&Part| pages.files.iter().any(|file| file.name == part.name);
    for part in parts.iter().filter(is_page_file) {
        let file = path.join(&part.name);
        let found = PageFile { name: part.name.clone(), sums: page_sums(&file)?, remote: None };
        if found.sum() != part.crc {
            return Err(SnapshotError::Damaged { path: file, what: "checksum" });
        }
    }
    Ok(())
}

/// Compares every file with the manifest, but of page files only some pages.
pub fn verify_some(path: &Path, parts: &[Part], pages: &[Run]) -> Result<(), SnapshotError> {
    page_map(path, parts)?.verify(path, pages)
}

/// The page map, once all other files are as they were; of page files only the size is looked at. A
/// generation of an older Kip has none.
fn page_map(path: &Path, parts: &[Part]) -> Result<PageMap, SnapshotError> {
    let map = match parts.iter().any(|part| part.name == pages::PAGES) {
        true => PageMap::load(path)?,
        false => PageMap::default(),
    };
    for part in parts {
        let file = path.join(&part.name);
        let size = fs::metadata(&file).map_err(io_at(&file))?.len();
        if size != part.size {
            return Err(SnapshotError::Damaged { path: file, what: "size" });
        }
        let good = match map.files.iter().find(|file| file.name == part.name) {
            Some(file) => file.sum() == part.crc,
            None => checksum(&file)?.1 == part.crc,
        };
        if !good {
            return Err(SnapshotError::Damaged { path: file, what: "checksum" });
        }
    }
    Ok(map)
}

/// Keeps a generation that could not be restored out of the way of later ones, for an operator to
/// look at: as `failed-gen-N`, the newest such only.
pub fn set_aside(dir: &Path, generation: Generation) -> Result<(), SnapshotError> {
    for entry in fs::read_dir(dir).map_err(io_at(dir))? {
        let entry = entry.map_err(io_at(dir))?;
        if entry.file_name().to_string_lossy().starts_with("failed-gen-") {
            fs::remove_dir_all(entry.path()).map_err(io_at(&entry.path()))?;
        }
    }
    let from = path_of(dir, generation);
    fs::rename(&from, dir.join(format!("failed-gen-{generation}"))).map_err(io_at(&from))
}

/// Removes unfinished generations, and finished ones but `keep`.
pub fn sweep(dir: &Path, keep: Option<Generation>) -> Result<(), SnapshotError> {
    let kept = keep.map(|g| format!("gen-{g}"));
    for entry in fs::read_dir(dir).map_err(io_at(dir))? {
        let entry = entry.map_err(io_at(dir))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("gen-") && Some(&name) != kept.as_ref() {
            fs::remove_dir_all(entry.path()).map_err(io_at(&entry.path()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(dir: &Path) -> (PathBuf, Manifest<String>) {
        let growing = begin(dir, Generation(3)).unwrap();
        fs::write(growing.join("pages-1.img"), vec![7u8; 100_000]).unwrap();
        fs::write(growing.join("core-1.img"), b"core").unwrap();
        fs::write(growing.join("checkpoint.tar"), b"tar").unwrap();
        let mut pages = PageMap::default();
        pages.file("pages-1.img");
        let contents = Contents { engine: "criu 4.2.1".into(), body: "body".to_owned(), pages };
        let Sealed { path, bytes, .. } = seal(&growing, Generation(3), contents).unwrap();
        assert_eq!(bytes, 100_007);
        let sums = PageMap::load(&path).unwrap().files.remove(0).sums;
        assert_eq!((sums.len(), sums[0]), (100_000usize.div_ceil(PAGE), crc32fast::hash(&[7; PAGE])));
        let manifest = open(&path).unwrap();
        (path, manifest)
    }

    // promise parking: a generation is complete and read back, every flipped bit is found
    #[test]
    fn a_sealed_generation_verifies_and_every_flipped_bit_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let (path, manifest) = made(dir.path());
        assert_eq!(manifest.body, "body");
        verify(&path, &manifest.parts).unwrap();
        let file = path.join("pages-1.img");
        let mut bytes = fs::read(&file).unwrap();
        bytes[50_000] ^= 1;
        fs::write(&file, &bytes).unwrap();
        assert!(matches!(verify(&path, &manifest.parts), Err(SnapshotError::Damaged { what: "checksum", .. })));
        fs::write(&file, &bytes[1..]).unwrap();
        assert!(matches!(verify(&path, &manifest.parts), Err(SnapshotError::Damaged { what: "size", .. })));
        fs::remove_file(&file).unwrap();
        assert!(matches!(verify(&path, &manifest.parts), Err(SnapshotError::Io { .. })));
    }

    // promise parking: of one that is archived nothing is left but empty files, of which its copy
    //   is made
    #[test]
    fn one_that_is_elsewhere_leaves_only_empty_files_and_its_copy_is_made_of_them() {
        let dir = tempfile::tempdir().unwrap();
        let (path, _) = made(dir.path());
        let inode = |path: &Path| fs::metadata(path).unwrap().ino();
        let core = inode(&path.join("core-1.img"));
        leave_spare(dir.path(), Generation(3)).unwrap();
        assert_eq!(names_in(dir.path()).unwrap(), BTreeSet::from(["spare".to_owned()]));
        let kept = ["checkpoint.tar", "core-1.img"];
        assert_eq!(names_in(&dir.path().join("spare")).unwrap(), BTreeSet::from(kept.map(str::to_owned)));
        assert_eq!(fs::metadata(dir.path().join("spare/checkpoint.tar")).unwrap().len(), 0);
        sweep(dir.path(), None).unwrap();
        let (growing, names) = begin_copy(dir.path(), Generation(3)).unwrap();
        assert_eq!((names.len(), inode(&growing.join("core-1.img"))), (2, core));
        fs::remove_dir_all(&growing).unwrap();
        assert!(begin_copy(dir.path(), Generation(3)).unwrap().1.is_empty(), "taken once");
        // One that was kept for others, by links, keeps what is in it.
        fs::remove_dir_all(&growing).unwrap();
        let (path, _) = made(dir.path());
        let elsewhere = dir.path().join("elsewhere");
        fs::hard_link(path.join("core-1.img"), &elsewhere).unwrap();
        leave_spare(dir.path(), Generation(3)).unwrap();
        assert_eq!(fs::read(&elsewhere).unwrap(), b"core");
        // Half done: the next one begins with nothing of it.
        fs::write(dir.path().join("spare/core-9.img"), b"x").unwrap();
        made(dir.path());
        leave_spare(dir.path(), Generation(3)).unwrap();
        assert_eq!(names_in(&dir.path().join("spare")).unwrap(), BTreeSet::from(kept.map(str::to_owned)));
    }

    #[test]
    fn what_a_restore_leaves_is_not_part_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let (path, manifest) = made(dir.path());
        fs::write(path.join("restore.log"), b"x").unwrap();
        verify(&path, &manifest.parts).unwrap();
        assert_eq!(manifest.parts.len(), 4, "and the page map");
    }

    #[test]
    fn unfinished_ones_are_swept_and_the_kept_one_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (path, _) = made(dir.path());
        begin(dir.path(), Generation(4)).unwrap();
        sweep(dir.path(), Some(Generation(3))).unwrap();
        assert!(path.exists() && !dir.path().join("gen-4.new").exists());
        sweep(dir.path(), None).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn what_could_not_be_restored_is_kept_aside() {
        let dir = tempfile::tempdir().unwrap();
        made(dir.path());
        set_aside(dir.path(), Generation(3)).unwrap();
        sweep(dir.path(), None).unwrap();
        assert!(dir.path().join("failed-gen-3/manifest.json").exists());
        made(dir.path());
        set_aside(dir.path(), Generation(3)).unwrap();
        assert!(dir.path().join("failed-gen-3/manifest.json").exists());
    }

    #[test]
    fn a_newer_format_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let (path, _) = made(dir.path());
        fs::write(path.join(MANIFEST), b"{\"format\": 99}").unwrap();
        assert!(matches!(open::<String>(&path), Err(SnapshotError::Newer { found: 99, .. })));
        fs::write(path.join(MANIFEST), b"{").unwrap();
        assert!(matches!(open::<String>(&path), Err(SnapshotError::Manifest { .. })));
    }

    #[test]
    fn a_generation_takes_what_its_files_do() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(bytes_of(&dir.path().join("none")), 0);
        fs::write(dir.path().join("pages"), vec![1; 100_000]).unwrap();
        assert!((100_000..200_000).contains(&bytes_of(dir.path())));
    }
}
