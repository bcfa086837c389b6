//! Another block of ids for the files of a directory, in place: a restored data directory on a
//! machine where its numbers are another's.
//!
//! No other process may use the directory meanwhile. A shift that stopped half way can be done
//! again: the blocks must not overlap.

use super::restore::IdShift;
use rustix::fs::{AtFlags, Gid, Mode, Uid, XattrFlags};
use rustix::io::Errno;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Longest value of an attribute that is looked at, bytes: an access list of thousands.
const VALUE_MAX: usize = 64 << 10;

/// Moves owners, and ids in capabilities and access lists, of all that is below `root` and of that
/// itself. Others' stay. How many entries were changed.
///
/// # Errors
/// The file system's, with the path.
pub fn shift(root: &Path, shift: IdShift) -> io::Result<u64> {
    let at = |path: &Path, e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
    let (mut changed, mut left) = (0, vec![root.to_owned()]);
    // A program's directories may lie deeper in each other than a stack reaches.
    while let Some(path) = left.pop() {
        let metadata = fs::symlink_metadata(&path).map_err(|e| at(&path, e))?;
        changed += u64::from(one(&path, &metadata, shift).map_err(|e| at(&path, e))?);
        if metadata.is_dir() {
            for entry in fs::read_dir(&path).map_err(|e| at(&path, e))? {
                left.push(entry.map_err(|e| at(&path, e))?.path());
            }
        }
    }
    Ok(changed)
}

fn one(path: &Path, metadata: &Metadata, shift: IdShift) -> io::Result<bool> {
    let ids = shift.own();
    let to = |id: u32| ids.has(id).then(|| shift.id(id));
    let (uid, gid) = (to(metadata.uid()), to(metadata.gid()));
    // A change of owner takes capabilities away.
    let mut attributes = Vec::new();
    if !metadata.is_symlink() {
        for name in ["security.capability", "system.posix_acl_access", "system.posix_acl_default"] {
            let mut value = vec![0; VALUE_MAX];
            match rustix::fs::lgetxattr(path, name, &mut value[..]) {
                Ok(length) => attributes.push((name, value[..length].to_vec())),
                Err(Errno::NODATA | Errno::OPNOTSUPP) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
    if uid.is_none() && gid.is_none() && attributes.is_empty() {
        return Ok(false);
    }
    let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
    rustix::fs::chownat(rustix::fs::CWD, path, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
    if !metadata.is_symlink() {
        // And set-user-id bits.
        rustix::fs::chmod(path, Mode::from_raw_mode(metadata.mode() & 0o7777))?;
    }
    for (name, value) in attributes {
        rustix::fs::lsetxattr(path, name, &shift.xattr(name.as_bytes(), &value), XattrFlags::empty())?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt as _, chown, lchown, symlink};

    #[test]
    fn owners_move_and_modes_and_others_stay() {
        if !rustix::process::geteuid().is_root() {
            panic!("this test gives files to others: run it as root");
        }
        let dir = tempfile::tempdir().unwrap();
        let (file, link, other) = (dir.path().join("file"), dir.path().join("sub/link"), dir.path().join("other"));
        fs::create_dir(dir.path().join("sub")).unwrap();
        fs::write(&file, "x").unwrap();
        fs::write(&other, "x").unwrap();
        symlink("/nowhere", &link).unwrap();
        chown(&file, Some(1_000_005), Some(1_000_006)).unwrap();
        lchown(&link, Some(1_000_007), None).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o4755)).unwrap();
        let mut capability = vec![1, 0, 0, 3];
        capability.resize(20, 0);
        capability.extend(1_000_000u32.to_le_bytes());
        rustix::fs::lsetxattr(&file, "security.capability", &capability, XattrFlags::empty()).unwrap();
        let shift = IdShift { from: 1_000_000, to: 2_000_000, count: 65_536 };
        for changed in [2, 1] {
            // A file that has a capability is written again.
            assert_eq!(super::shift(dir.path(), shift).unwrap(), changed);
        }
        let now = fs::metadata(&file).unwrap();
        assert_eq!((now.uid(), now.gid(), now.mode() & 0o7777), (2_000_005, 2_000_006, 0o4755));
        assert_eq!(fs::symlink_metadata(&link).unwrap().uid(), 2_000_007);
        assert_eq!(fs::metadata(&other).unwrap().uid(), 0);
        let mut value = [0; 24];
        rustix::fs::lgetxattr(&file, "security.capability", &mut value[..]).unwrap();
        assert_eq!(u32::from_le_bytes(value[20..].try_into().unwrap()), 2_000_000);
    }
}
