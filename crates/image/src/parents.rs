//! Directories of which a layer does not say how they are: it has files in them and no entry of
//! their own.
//!
//! Unpacked alone, such a layer has them as directories of root's, which would lie over those of
//! the layers below with their owners and modes. What is right depends on the layers below, and
//! layers are shared. So an image gets one more layer on top, made here, with only these
//! directories as they ought to be. It is made from a tar like any other and named by its digest:
//! the same layers give the same one on every machine. Builders of images hardly ever leave such an
//! entry out.

use crate::digest::Digest;
use crate::error::ImageError;
use crate::images::{ImageStore, LayerRecord};
use kip_sandbox::archive::PackedArchive;
use kip_sandbox::rootfs::OPAQUE;
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, Stat, getxattr};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// How a directory is that no layer has an entry for.
const PLAIN: (u32, u32, u32) = (0o755, 0, 0);

/// A layer to be looked into.
struct Layer {
    root: OwnedFd,
    /// The way to it for calls that take no descriptor of a path.
    files: PathBuf,
    record: LayerRecord,
}

/// What a layer has under a name.
enum There {
    /// Nothing; what is below shows.
    Nothing,
    /// Something that hides what is below.
    Hides,
    /// A directory, and whether it hides what is below.
    Directory(Box<Stat>, bool),
}

impl ImageStore {
    /// Adds a layer of ours to `layers`, lowest first, if they need one.
    ///
    /// # Errors
    /// A layer cannot be read, or ours not be written.
    pub(crate) fn add_parents(&self, reference: &str, layers: &mut Vec<Digest>) -> Result<(), ImageError> {
        let mut all = Vec::new();
        for digest in layers.iter().rev() {
            let files = self.layer_dir(digest).join("files");
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let root = rustix::fs::openat(CWD, &files, flags, Mode::empty()).map_err(ImageError::io("open", &files))?;
            all.push(Layer { root, files, record: self.layer_record(digest)? });
        }
        let implied: BTreeSet<&PathBuf> = all.iter().flat_map(|layer| &layer.record.implied).collect();
        let mut wrong = BTreeMap::new();
        for path in implied {
            let wanted = wanted(&all, path).map_err(ImageError::io("look at", path))?;
            if let Some(stat) = wanted.filter(|stat| (stat.st_mode & 0o7777, stat.st_uid, stat.st_gid) != PLAIN) {
                wrong.insert(path.clone(), stat);
            }
        }
        if wrong.is_empty() {
            return Ok(());
        }
        let tar = tar_of(&wrong).map_err(ImageError::io("write", &self.dir))?;
        let digest = Digest::of(&tar);
        self.install(reference, &digest, PackedArchive { name: Path::new("directories"), bytes: &tar[..] })?;
        layers.push(digest);
        Ok(())
    }
}

/// How the directory ought to be that the topmost layer only implies; none if that layer says it,
/// or no layer does.
fn wanted(layers: &[Layer], path: &Path) -> rustix::io::Result<Option<Box<Stat>>> {
    let mut implied = false;
    for layer in layers {
        match layer.there(path)? {
            There::Nothing => {}
            There::Hides => return Ok(None),
            There::Directory(stat, hides) if layer.record.implied.contains(path) => {
                implied = true;
                drop(stat);
                if hides {
                    return Ok(None);
                }
            }
            There::Directory(stat, _) => return Ok(implied.then_some(stat)),
        }
    }
    Ok(None)
}

impl Layer {
    fn there(&self, path: &Path) -> rustix::io::Result<There> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
        let mut hides = false;
        for above in path.ancestors().collect::<Vec<_>>().into_iter().rev().filter(|p| !p.as_os_str().is_empty()) {
            let found = match rustix::fs::openat2(&self.root, above, flags, Mode::empty(), resolve) {
                Ok(found) => rustix::fs::fstat(&found)?,
                Err(Errno::NOENT) if hides => return Ok(There::Hides),
                Err(Errno::NOENT) => return Ok(There::Nothing),
                Err(Errno::NOTDIR | Errno::LOOP) => return Ok(There::Hides),
                Err(e) => return Err(e),
            };
            if FileType::from_raw_mode(found.st_mode) != FileType::Directory {
                return Ok(There::Hides);
            }
            // No part of it is a link, as was just seen, and layers do not change.
            hides |= getxattr(self.files.join(above), OPAQUE, &mut [0u8; 8][..]).is_ok();
            if above == path {
                return Ok(There::Directory(Box::new(found), hides));
            }
        }
        Ok(There::Nothing)
    }
}

fn tar_of(directories: &BTreeMap<PathBuf, Box<Stat>>) -> std::io::Result<Vec<u8>> {
    let mut tar = tar::Builder::new(Vec::new());
    for (path, stat) in directories {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Directory);
        header.set_mode(stat.st_mode & 0o7777);
        header.set_uid(stat.st_uid.into());
        header.set_gid(stat.st_gid.into());
        header.set_mtime(0);
        header.set_size(0);
        tar.append_data(&mut header, path, std::io::empty())?;
    }
    tar.into_inner()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tar: names that end in a slash are directories of user 33, mode 2770.
    fn layer(names: &[&str]) -> Vec<u8> {
        let mut tar = tar::Builder::new(Vec::new());
        for name in names {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(if name.ends_with('/') {
                tar::EntryType::Directory
            } else {
                tar::EntryType::Regular
            });
            header.set_mode(0o2770);
            header.set_uid(33);
            header.set_gid(34);
            header.set_mtime(0);
            header.set_size(0);
            tar.append_data(&mut header, name, std::io::empty()).unwrap();
        }
        tar.into_inner().unwrap()
    }

    fn added(layers: &[&[&str]]) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        let images = ImageStore::open(dir.path()).unwrap();
        let mut digests = Vec::new();
        for names in layers {
            let tar = layer(names);
            digests.push(Digest::of(&tar));
            images
                .install("x", digests.last().unwrap(), PackedArchive { name: Path::new("x"), bytes: &tar[..] })
                .unwrap();
        }
        let (before, again) = (digests.len(), digests.clone());
        images.add_parents("x", &mut digests).unwrap();
        let Some(ours) = digests.get(before) else { return vec![] };
        let files = images.layer_dir(ours).join("files");
        let mut twice = again;
        images.add_parents("x", &mut twice).unwrap();
        assert_eq!(twice, digests, "the same for the same");
        // It says all that it has, so it needs no other.
        let mut more = digests.clone();
        images.add_parents("x", &mut more).unwrap();
        assert_eq!(more, digests);
        let mut found = Vec::new();
        let mut left = vec![PathBuf::new()];
        while let Some(at) = left.pop() {
            for entry in std::fs::read_dir(files.join(&at)).unwrap().flatten() {
                let path = at.join(entry.file_name());
                use std::os::unix::fs::MetadataExt as _;
                let meta = entry.metadata().unwrap();
                if (meta.uid(), meta.gid(), meta.mode() & 0o7777) == (33, 34, 0o2770) {
                    found.push(path.display().to_string());
                }
                left.push(path);
            }
        }
        found.sort();
        found
    }

    #[test]
    fn directories_keep_what_lower_layers_say_of_them() {
        assert_eq!(added(&[&["srv/", "srv/a"], &["srv/b"]]), ["srv"]);
        assert_eq!(added(&[&["srv/", "srv/deep/", "x/"], &["srv/deep/b"], &["srv/deep/c", "x/"]]), ["srv", "srv/deep"]);
        assert_eq!(added(&[&["srv/", "srv/a"], &["srv/", "srv/b"]]), [""; 0], "both say it");
        assert_eq!(added(&[&["srv/a"], &["srv/b"]]), [""; 0], "nobody does");
        assert_eq!(added(&[&["srv/"], &["srv/b"], &["srv/"]]), [""; 0], "the topmost does");
    }

    #[test]
    fn what_is_hidden_says_nothing() {
        assert_eq!(added(&[&["srv/"], &["srv/.wh..wh..opq", "srv/b"]]), [""; 0], "made anew");
        assert_eq!(added(&[&["srv/"], &[".wh.srv"], &["srv/b"]]), [""; 0], "deleted in between");
        assert_eq!(added(&[&["a/srv/"], &["a/.wh..wh..opq"], &["a/srv/b"]]), [""; 0], "hidden with what it was in");
        assert_eq!(added(&[&["srv/"], &["srv"], &["srv/b"]]), [""; 0], "a file in between");
    }
}
