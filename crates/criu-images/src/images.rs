//! The images of one checkpoint in memory: read once, changed there, written once.
//!
//! CRIU writes a file for each of some twenty kinds of things, and for each process and thread. Kip
//! reads them when the program stands still, changes them here and keeps them as one file,
//! [`CHECKPOINT`], an uncompressed tar archive. Memory and the contents of deleted files stay files
//! of their own beside it ([`APART`]): they are long, and pages of them are read one by one. A
//! generation of an older Kip has all images as files; it is read as well. Source of the names:
//! CRIU's documentation, "Images".

use crate::file::{CheckpointImage, CheckpointImageError, Mixed};
use crate::wire::{Malformed, Message};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The file that has the images.
pub const CHECKPOINT: &str = "checkpoint.tar";
/// How names of images begin that stay files: pages, contents of deleted files and of file systems
/// in memory. Those that have been taken over from an earlier generation have its number before
/// that, `g7-`.
const APART: [&str; 3] = ["pages-", "ghost-file-", "tmpfs-"];
/// How the names of all images end.
const IMAGE: &str = ".img";

/// The images of a tree.
#[derive(Debug, Clone, Default)]
pub struct Images {
    /// Where those are that stay files.
    directory: PathBuf,
    files: BTreeMap<String, File>,
    /// Those that stay files.
    apart: BTreeSet<String>,
}

/// An image.
#[derive(Debug, Clone, Default)]
struct File {
    bytes: Vec<u8>,
    /// When CRIU made it and when it wrote it last, as far as the file system says.
    made: Option<SystemTime>,
    written: Option<SystemTime>,
}

impl File {
    fn of(bytes: Vec<u8>) -> File {
        File { bytes, made: None, written: None }
    }
}

impl Images {
    /// The images of a generation, or those that CRIU has just written into a directory.
    ///
    /// # Errors
    /// The file system's; the archive is damaged, or has names that are no images'.
    pub fn read(directory: &Path) -> Result<Images, CheckpointImageError> {
        let mut images = Images { directory: directory.to_owned(), ..Images::default() };
        let mut archive = None;
        for entry in fs::read_dir(directory).map_err(at(directory))? {
            let entry = entry.map_err(at(directory))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name == CHECKPOINT {
                archive = Some(fs::read(entry.path()).map_err(at(&entry.path()))?);
            } else if is_apart(&name) {
                images.apart.insert(name);
            } else if name.ends_with(IMAGE) {
                let read = fs::read(entry.path()).and_then(|bytes| Ok((bytes, entry.metadata()?)));
                let (bytes, found) = read.map_err(at(&entry.path()))?;
                images.files.insert(name, File { bytes, made: found.created().ok(), written: found.modified().ok() });
            }
        }
        archive.map_or(Ok(()), |archive| images.unpack(&archive))?;
        Ok(images)
    }

    /// The images among files that have come from elsewhere.
    ///
    /// # Errors
    /// The archive is damaged, or has names that are no images'.
    pub fn of_files(files: BTreeMap<String, Vec<u8>>) -> Result<Images, CheckpointImageError> {
        let mut images = Images::default();
        let mut archive = None;
        for (name, bytes) in files {
            match name.as_str() {
                CHECKPOINT => archive = Some(bytes),
                _ => drop(images.files.insert(name, File::of(bytes))),
            }
        }
        archive.map_or(Ok(()), |archive| images.unpack(&archive))?;
        Ok(images)
    }

    fn unpack(&mut self, archive: &[u8]) -> Result<(), CheckpointImageError> {
        let read = || -> io::Result<BTreeMap<String, File>> {
            let mut files = BTreeMap::new();
            for entry in tar::Archive::new(archive).entries()? {
                let entry = entry?;
                let name = entry.path()?.to_string_lossy().into_owned();
                let size = entry.size();
                // It may have been in a store, and CRIU's images get these names in a directory.
                if name.contains('/') || !name.ends_with(IMAGE) || is_apart(&name) || files.contains_key(&name) {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, format!("{name:?} in it is no image")));
                }
                // A sparse one may say that it is longer than any memory.
                if !entry.header().entry_type().is_file() || size > archive.len() as u64 {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, format!("{name:?} in it is no plain file")));
                }
                let mut bytes = Vec::with_capacity(size as usize);
                entry.take(size).read_to_end(&mut bytes)?;
                files.insert(name, File::of(bytes));
            }
            Ok(files)
        };
        let files = read().map_err(at(&self.path_of(CHECKPOINT)))?;
        // Of two that differ one reader would see the one, and the next the other.
        if let Some(name) = self.files.keys().next() {
            let twice = io::Error::new(io::ErrorKind::InvalidData, format!("{name} lies beside it"));
            return Err(at(&self.path_of(CHECKPOINT))(twice));
        }
        self.files = files;
        Ok(())
    }

    /// The bytes of [`CHECKPOINT`].
    pub fn pack(&self) -> Vec<u8> {
        let mut archive = tar::Builder::new(Vec::new());
        for (name, File { bytes, .. }) in &self.files {
            let mut header = tar::Header::new_ustar();
            header.set_size(bytes.len() as u64);
            header.set_mode(0o600);
            archive.append_data(&mut header, name, bytes.as_slice()).expect("a short name, into memory");
        }
        archive.into_inner().expect("into memory")
    }

    /// Writes [`CHECKPOINT`] into a directory, whose images it replaces; not synced.
    ///
    /// # Errors
    /// The file system's.
    pub fn save(&self, directory: &Path) -> Result<(), CheckpointImageError> {
        let path = directory.join(CHECKPOINT);
        fs::write(&path, self.pack()).map_err(at(&path))?;
        for entry in fs::read_dir(directory).map_err(at(directory))? {
            let entry = entry.map_err(at(directory))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.ends_with(IMAGE) && !is_apart(&name) {
                fs::remove_file(entry.path()).map_err(at(&entry.path()))?;
            }
        }
        Ok(())
    }

    /// Writes all images as files for CRIU into a directory; those that stay files anyway become
    /// links to what they are, unless there is one of that name.
    ///
    /// # Errors
    /// The file system's.
    pub fn lay_out(&self, directory: &Path) -> Result<(), CheckpointImageError> {
        for (name, file) in &self.files {
            let path = directory.join(name);
            fs::write(&path, &file.bytes).map_err(at(&path))?;
        }
        for name in &self.apart {
            let path = directory.join(name);
            match fs::hard_link(self.directory.join(name), &path) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(at(&path)(e)),
                _ => {}
            }
        }
        Ok(())
    }

    /// Where the images are that stay files.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Notes where those are now that stay files.
    pub fn set_directory(&mut self, directory: PathBuf) {
        self.directory = directory;
    }

    /// Names of all images.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.files.keys().chain(&self.apart).map(String::as_str)
    }

    /// When CRIU made an image.
    pub fn made(&self, name: &str) -> Option<SystemTime> {
        self.files.get(name)?.made
    }

    /// When CRIU wrote an image last.
    pub fn written(&self, name: &str) -> Option<SystemTime> {
        self.files.get(name)?.written
    }

    /// The bytes of an image.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        Some(&self.files.get(name)?.bytes)
    }

    /// An image.
    ///
    /// # Errors
    /// There is none of that name; it is damaged.
    pub fn image(&self, name: &str) -> Result<CheckpointImage, CheckpointImageError> {
        let path = self.path_of(name);
        let file = self.files.get(name).ok_or_else(|| at(&path)(io::ErrorKind::NotFound.into()))?;
        CheckpointImage::parse(&path, &file.bytes).map_err(self.damaged(name))
    }

    /// The entries of an image.
    ///
    /// # Errors
    /// There is none of that name; it is damaged.
    pub fn entries(&self, name: &str) -> Result<Vec<Message>, CheckpointImageError> {
        Ok(self.image(name)?.entries)
    }

    /// The entries of an image, none where there is no such image.
    ///
    /// # Errors
    /// It is damaged.
    pub fn entries_if_any(&self, name: &str) -> Result<Vec<Message>, CheckpointImageError> {
        if self.files.contains_key(name) { self.entries(name) } else { Ok(Vec::new()) }
    }

    /// The first entry of an image in which contents without a form may follow.
    ///
    /// # Errors
    /// There is none of that name; what is there is no entry.
    pub fn first(&self, name: &str) -> Result<Option<Message>, CheckpointImageError> {
        match self.files.get(name) {
            Some(file) => CheckpointImage::first(&self.path_of(name), &file.bytes),
            None => CheckpointImage::first_of_file(&self.path_of(name)),
        }
    }

    /// An image in which contents without a form follow entries; none where there is no such image.
    ///
    /// # Errors
    /// It is damaged.
    pub fn mixed(&self, name: &str) -> Result<Option<Mixed<'_>>, CheckpointImageError> {
        self.files.get(name).map(|file| Mixed::new(&file.bytes)).transpose().map_err(self.damaged(name))
    }

    /// The images whose name is `PREFIX-NUMBER.img`, by that number.
    pub fn numbered(&self, prefix: &str) -> Vec<(u32, String)> {
        let number = |name: &str| name.strip_prefix(prefix)?.strip_prefix('-')?.strip_suffix(IMAGE)?.parse().ok();
        let mut found: Vec<_> = self.names().filter_map(|name| Some((number(name)?, name.to_owned()))).collect();
        found.sort();
        found
    }

    /// How many threads the tree has, those of ended processes included.
    pub fn threads(&self) -> usize {
        self.numbered("core").len()
    }

    /// Puts a changed image in place of the one of its name.
    pub fn put(&mut self, image: &CheckpointImage) {
        let name = image.path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        self.files.entry(name).or_default().bytes = image.encode();
    }

    /// Puts an image of these entries in place of the one of its name: for tests, its magic number
    /// is none of CRIU's.
    pub fn put_entries(&mut self, name: &str, entries: &[Message]) {
        self.put(&CheckpointImage::new(name.into(), entries.to_vec()));
    }

    /// Puts bytes in place of the image of that name.
    #[cfg(test)]
    pub(crate) fn put_bytes(&mut self, name: &str, bytes: Vec<u8>) {
        self.files.insert(name.to_owned(), File::of(bytes));
    }

    /// Takes an image out.
    pub fn remove(&mut self, name: &str) {
        self.files.remove(name);
    }

    /// What an error of an image becomes.
    pub fn damaged(&self, name: &str) -> impl Fn(Malformed) -> CheckpointImageError + use<> {
        let path = self.path_of(name);
        move |source| CheckpointImageError::Damaged { path: path.clone(), source }
    }

    fn path_of(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }
}

fn is_apart(name: &str) -> bool {
    let begins = |name: &str| APART.iter().any(|prefix| name.starts_with(prefix));
    let number =
        |text: &str| text.strip_prefix('g').is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()));
    let own = name.split_once('-').filter(|(first, _)| number(first)).map_or(name, |(_, own)| own);
    own.ends_with(IMAGE) && begins(own)
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> CheckpointImageError + use<> {
    let path = path.to_owned();
    move |source| CheckpointImageError::Io { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::FieldValue;

    fn entry(number: u64) -> Message {
        Message(vec![(1, FieldValue::Varint(number))])
    }

    // promise parking: the images of a generation are one file, and those of an older Kip are read
    // as well
    #[test]
    fn images_are_read_from_files_kept_as_one_and_laid_out_again() {
        let (criu, kept, again) =
            (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut made = Images::default();
        made.put_entries("core-7.img", &[entry(3)]);
        made.put_entries("core-12.img", &[entry(4), entry(5)]);
        made.put_entries("files.img", &[]);
        made.put_entries("timens-0.img", &[entry(6)]);
        made.lay_out(criu.path()).unwrap();
        for name in ["pages-1.img", "ghost-file-1.img", "g12-pages-3.img", "dump.log", "stats-dump"] {
            fs::write(criu.path().join(name), name).unwrap();
        }
        let mut images = Images::read(criu.path()).unwrap();
        assert_eq!(
            images.names().collect::<Vec<_>>(),
            [
                "core-12.img",
                "core-7.img",
                "files.img",
                "timens-0.img",
                "g12-pages-3.img",
                "ghost-file-1.img",
                "pages-1.img"
            ]
        );
        assert_eq!(images.numbered("core"), [(7, "core-7.img".to_owned()), (12, "core-12.img".to_owned())]);
        assert!(images.made("files.img").is_some() && images.written("core-7.img").is_some());
        let mut core = images.image("core-7.img").unwrap();
        core.entries.push(entry(9));
        images.put(&core);
        images.remove("timens-0.img");
        images.save(criu.path()).unwrap();
        let left: BTreeSet<_> = fs::read_dir(criu.path()).unwrap().map(|file| file.unwrap().file_name()).collect();
        assert_eq!(
            left,
            ["checkpoint.tar", "dump.log", "g12-pages-3.img", "ghost-file-1.img", "pages-1.img", "stats-dump"]
                .map(Into::into)
                .into()
        );
        let read = Images::read(criu.path()).unwrap();
        assert_eq!(read.entries("core-7.img").unwrap(), [entry(3), entry(9)]);
        assert_eq!(read.entries("core-12.img").unwrap(), [entry(4), entry(5)]);
        assert_eq!(read.entries_if_any("core-8.img").unwrap(), []);
        assert!(matches!(read.entries("core-8.img"), Err(CheckpointImageError::Io { .. })));
        read.lay_out(again.path()).unwrap();
        assert_eq!(fs::read(again.path().join("pages-1.img")).unwrap(), b"pages-1.img");
        let old = Images::read(again.path()).unwrap();
        assert_eq!(old.names().collect::<Vec<_>>(), read.names().collect::<Vec<_>>());
        // The same bytes give the same archive.
        old.save(kept.path()).unwrap();
        assert_eq!(fs::read(kept.path().join(CHECKPOINT)).unwrap(), fs::read(criu.path().join(CHECKPOINT)).unwrap());
    }

    #[test]
    fn a_damaged_archive_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let mut made = Images::default();
        made.put_entries("core-7.img", &[entry(3)]);
        made.save(directory.path()).unwrap();
        let path = directory.path().join(CHECKPOINT);
        let mut bytes = fs::read(&path).unwrap();
        // In the head's checksum.
        bytes[150] ^= 1;
        fs::write(&path, bytes).unwrap();
        assert!(matches!(Images::read(directory.path()), Err(CheckpointImageError::Io { path: at, .. }) if at == path));
    }

    /// An archive with entries that a writer of Kip never makes.
    fn archive(entries: &[(&str, tar::EntryType)]) -> Vec<u8> {
        let mut archive = tar::Builder::new(Vec::new());
        for (name, kind) in entries {
            let mut header = tar::Header::new_gnu();
            header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
            header.set_entry_type(*kind);
            header.set_size(0);
            if *kind == tar::EntryType::GNUSparse {
                // One hole of 2 GiB.
                let gnu = header.as_gnu_mut().unwrap();
                gnu.realsize.copy_from_slice(b"20000000000\0");
                gnu.sparse[0].offset.copy_from_slice(b"20000000000\0");
                gnu.sparse[0].numbytes.copy_from_slice(b"00000000000\0");
            }
            header.set_cksum();
            archive.append(&header, &[][..]).unwrap();
        }
        archive.into_inner().unwrap()
    }

    #[test]
    fn what_is_no_plain_file_or_comes_twice_is_refused() {
        use tar::EntryType as SystemVKind;
        let name = "core-7.img";
        let bad: [&[(&str, SystemVKind)]; 4] = [
            &[(name, SystemVKind::Symlink)],
            &[(name, SystemVKind::Directory)],
            &[(name, SystemVKind::GNUSparse)],
            &[(name, SystemVKind::Regular), (name, SystemVKind::Regular)],
        ];
        let read = |files: &[(&str, Vec<u8>)]| {
            Images::of_files(files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.clone())).collect())
        };
        for entries in bad {
            assert!(
                matches!(read(&[(CHECKPOINT, archive(entries))]), Err(CheckpointImageError::Io { .. })),
                "{entries:?}"
            );
        }
        let good = archive(&[(name, SystemVKind::Regular)]);
        assert!(read(&[(CHECKPOINT, good.clone())]).is_ok());
        // As a file of its own beside the archive, wherever the files come from.
        assert!(matches!(
            read(&[(CHECKPOINT, good.clone()), ("files.img", vec![1])]),
            Err(CheckpointImageError::Io { .. })
        ));
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join(CHECKPOINT), good).unwrap();
        fs::write(directory.path().join("files.img"), [1]).unwrap();
        assert!(matches!(Images::read(directory.path()), Err(CheckpointImageError::Io { .. })));
    }

    #[test]
    fn an_archive_with_names_that_are_no_images_is_refused() {
        for name in ["../core-7.img", "a/core-7.img", "core-7", "wake.plan", "pages-1.img"] {
            let mut archive = tar::Builder::new(Vec::new());
            let mut header = tar::Header::new_ustar();
            header.as_ustar_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
            header.set_size(0);
            header.set_cksum();
            archive.append(&header, &[][..]).unwrap();
            let refused = Images::of_files([(CHECKPOINT.to_owned(), archive.into_inner().unwrap())].into());
            assert!(matches!(refused, Err(CheckpointImageError::Io { .. })), "{name}");
        }
    }
}
