//! The files of a proc that are not its base's: what its overlays have above.
//!
//! Lists entries and never follows or opens one. While the program runs they change under the walk:
//! what goes meanwhile is left out.

use kip_types::api::{OwnFileKind, OwnFileView, OwnFilesView};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

/// Where they are in the proc's directory, and what that is inside.
const ROOTS: [(&str, &str); 2] = [("upper/root", ""), ("upper/usr", "/usr")];
/// A directory that hides the base's: in the overlays' own namespace, or in a user's.
const OPAQUE: [&str; 2] = ["trusted.overlay.opaque", "user.overlay.opaque"];

/// They cannot be listed.
#[derive(Debug, thiserror::Error)]
#[error("its own files cannot be listed: {path}")]
pub(super) struct OwnError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

struct Walk {
    view: OwnFilesView,
    left: usize,
}

/// Lists them.
pub(super) fn read(dir: &Path) -> Result<OwnFilesView, OwnError> {
    read_most(dir, OwnFilesView::MOST_WALKED)
}

fn read_most(dir: &Path, most: usize) -> Result<OwnFilesView, OwnError> {
    let mut walk = Walk { view: OwnFilesView { complete: true, ..OwnFilesView::default() }, left: most };
    for (root, inside) in ROOTS {
        let path = dir.join(root);
        if path.is_dir() {
            walk.directory(&path, inside)?;
        }
    }
    Ok(walk.view)
}

impl Walk {
    fn directory(&mut self, path: &Path, inside: &str) -> Result<(), OwnError> {
        let failed = |source| OwnError { path: path.to_owned(), source };
        let entries = match fs::read_dir(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other.map_err(failed)?,
        };
        // By name, so that the first ones are the first ones.
        let mut names: BTreeMap<OsString, Metadata> = BTreeMap::new();
        for entry in entries {
            if self.left == 0 {
                self.view.complete = false;
                break;
            }
            self.left -= 1;
            let entry = entry.map_err(failed)?;
            if let Ok(found) = entry.metadata() {
                names.insert(entry.file_name(), found);
            }
        }
        for (name, found) in names {
            let (path, inside) = (path.join(&name), format!("{inside}/{}", name.to_string_lossy()));
            if found.is_dir() {
                if is_opaque(&path) {
                    self.add(inside.clone(), OwnFileKind::Replaced, 0);
                }
                self.directory(&path, &inside)?;
                continue;
            }
            let kind = found.file_type();
            let is_deletion = kind.is_char_device() && found.rdev() == 0;
            self.view.deleted += u64::from(is_deletion);
            let kind = match () {
                () if is_deletion => OwnFileKind::Deleted,
                () if kind.is_file() => OwnFileKind::File,
                () if kind.is_symlink() => OwnFileKind::Link,
                () if kind.is_fifo() => OwnFileKind::Fifo,
                () if kind.is_socket() => OwnFileKind::Socket,
                () => OwnFileKind::Device,
            };
            self.add(inside, kind, if kind == OwnFileKind::File { found.len() } else { 0 });
        }
        Ok(())
    }

    fn add(&mut self, path: String, kind: OwnFileKind, bytes: u64) {
        self.view.files += 1;
        self.view.bytes += bytes;
        if self.view.entries.len() < OwnFilesView::MOST_LISTED {
            self.view.entries.push(OwnFileView { path, kind, bytes });
        }
    }
}

fn is_opaque(path: &Path) -> bool {
    let mut value = [0; 1];
    OPAQUE.iter().any(|name| rustix::fs::lgetxattr(path, *name, &mut value).is_ok_and(|n| value[..n] == *b"y"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    // promise command-line: own files that differ from the base: deletions and replaced directories
    //   too; bounds are said
    // held by: this, `kip_insight::inspect::own::tests::what_goes_beyond_the_bounds_is_said`
    #[test]
    fn files_deletions_and_replaced_directories_are_listed() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()).unwrap(), OwnFilesView { complete: true, ..OwnFilesView::default() });
        let (root, usr) = (dir.path().join("upper/root"), dir.path().join("upper/usr"));
        fs::create_dir_all(root.join("var/lib")).unwrap();
        fs::create_dir_all(usr.join("share/doc")).unwrap();
        fs::write(root.join("var/lib/state"), b"12345").unwrap();
        symlink("/nowhere", root.join("var/link")).unwrap();
        rustix::fs::lsetxattr(usr.join("share/doc"), OPAQUE[0], b"y", rustix::fs::XattrFlags::empty()).unwrap();
        let (kind, mode) = (rustix::fs::FileType::CharacterDevice, rustix::fs::Mode::empty());
        rustix::fs::mknodat(rustix::fs::CWD, usr.join("share/gone"), kind, mode, 0).unwrap();
        let view = read(dir.path()).unwrap();
        let seen: Vec<_> = view.entries.iter().map(|e| (e.path.as_str(), <&str>::from(e.kind), e.bytes)).collect();
        let expected = [
            ("/var/lib/state", "file", 5),
            ("/var/link", "link", 0),
            ("/usr/share/doc", "replaced", 0),
            ("/usr/share/gone", "deleted", 0),
        ];
        assert_eq!(seen, expected);
        assert_eq!((view.files, view.bytes, view.deleted, view.complete), (4, 5, 1, true));
    }

    #[test]
    fn what_goes_beyond_the_bounds_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("upper/root");
        fs::create_dir_all(&root).unwrap();
        (0..OwnFilesView::MOST_LISTED + 5).for_each(|n| fs::write(root.join(n.to_string()), b"1").unwrap());
        let view = read(dir.path()).unwrap();
        assert_eq!((view.entries.len(), view.files, view.complete), (200, 205, true));
        let view = read_most(dir.path(), 50).unwrap();
        assert_eq!((view.entries.len(), view.files, view.complete), (50, 50, false));
    }
}
