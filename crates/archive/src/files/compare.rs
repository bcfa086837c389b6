//! Tells two directories apart by everything that archiving promises to keep. For tests and for
//! checking a restore; reads all contents, follows no link, and expects no process to write.

use rustix::fs::SeekFrom;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

/// What is below a directory, a line for each name: kind, mode, owner, time, attributes, content,
/// holes, links.
///
/// # Errors
/// The file system's.
pub fn listing(root: &Path) -> io::Result<BTreeMap<PathBuf, String>> {
    let mut lines = BTreeMap::new();
    let mut first_names: BTreeMap<(u64, u64), PathBuf> = BTreeMap::new();
    let mut left = vec![root.to_owned()];
    while let Some(path) = left.pop() {
        let meta = fs::symlink_metadata(&path)?;
        let name = path.strip_prefix(root).expect("it is below").to_owned();
        if meta.is_dir() {
            let mut below = fs::read_dir(&path)?.map(|e| e.map(|e| e.path())).collect::<io::Result<Vec<_>>>()?;
            below.sort_by(|a, b| b.cmp(a));
            left.extend(below);
        }
        let times = (meta.mtime(), meta.mtime_nsec());
        let owner = (meta.uid(), meta.gid());
        let mut line = format!("{:o} {owner:?} {times:?} {:?}", meta.mode(), xattrs(&path)?);
        if !meta.is_dir() && meta.nlink() > 1 {
            let first = first_names.entry((meta.dev(), meta.ino())).or_insert_with(|| name.clone());
            line += &format!(" links {} first {first:?}", meta.nlink());
        }
        let kind = meta.file_type();
        if kind.is_symlink() {
            line += &format!(" to {:?}", fs::read_link(&path)?);
        } else if kind.is_char_device() || kind.is_block_device() {
            line += &format!(" device {}", meta.rdev());
        } else if kind.is_file() {
            let mut file = File::open(&path)?;
            let mut hasher = blake3::Hasher::new();
            io::copy(&mut file, &mut hasher)?;
            line += &format!(" size {} {} data {:?}", meta.size(), hasher.finalize(), segments(&file, meta.size())?);
        }
        lines.insert(name, line);
    }
    Ok(lines)
}

/// The names in which two directories differ, and how.
///
/// # Errors
/// The file system's.
pub fn differences(a: &Path, b: &Path) -> io::Result<Vec<String>> {
    let (a, b) = (listing(a)?, listing(b)?);
    let names: std::collections::BTreeSet<&PathBuf> = a.keys().chain(b.keys()).collect();
    let differs = |name: &&&PathBuf| a.get(**name) != b.get(**name);
    let line = |name: &PathBuf| format!("{name:?}: {:?} is not {:?}", a.get(name), b.get(name));
    Ok(names.iter().filter(differs).map(|name| line(name)).collect())
}

fn xattrs(path: &Path) -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut list = vec![0u8; 1 << 16];
    let length = match rustix::fs::llistxattr(path, &mut list[..]) {
        Err(rustix::io::Errno::NOTSUP) => 0,
        length => length?,
    };
    let mut found = Vec::new();
    for name in list[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let mut value = vec![0u8; 1 << 16];
        let length = rustix::fs::lgetxattr(path, name, &mut value[..])?;
        value.truncate(length);
        found.push((String::from_utf8_lossy(name).into_owned(), value));
    }
    found.sort();
    Ok(found)
}

fn segments(file: &File, size: u64) -> io::Result<Vec<(u64, u64)>> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < size {
        let data = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Err(rustix::io::Errno::NXIO) => break,
            data => data?,
        };
        at = rustix::fs::seek(file, SeekFrom::Hole(data))?;
        found.push((data, at));
    }
    Ok(found)
}
