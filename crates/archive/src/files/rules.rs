//! What the files of a proc may be. Checked when a directory is archived, so that nothing is stored
//! that could not come back, and again when it is restored, for then any program may have made the
//! list.
//!
//! Owns the lists of devices and extended attributes; what is in none is refused. Reads no file.

use super::tree::{Entry, Node};

/// Devices that a proc's own `/dev` may have (Documentation/admin-guide/devices.txt): null, zero,
/// full, random, urandom, tty, console, ptmx; 0:0 is an overlay's whiteout.
const DEVICES: [(u32, u32); 9] = [(0, 0), (1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 1), (5, 2)];
/// Overlay's attributes (Documentation/filesystems/overlayfs.rst) that say something of the
/// directory itself.
const OVERLAY: [&[u8]; 2] = [b"opaque", b"redirect"];
/// Those that are only true on the machine and file system that made them: the overlay makes them
/// anew.
const BOUND: [&[u8]; 4] = [b"origin", b"nlink", b"uuid", b"impure"];

/// What to do with a device that is in no list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strays {
    /// It is an error.
    Refuse,
    /// It is left out, and named in the result.
    Skip,
}

/// A proc's block of user and group ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ids {
    /// The first.
    pub first: u32,
    /// How many.
    pub count: u32,
}

impl Ids {
    pub(crate) fn has(&self, id: u32) -> bool {
        id.checked_sub(self.first).is_some_and(|index| index < self.count)
    }
}

/// What a file of a proc may not be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Stray {
    /// A device of the machine.
    #[error("is the device {major}:{minor}, which no proc has")]
    Device {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// It belongs to another user or group.
    #[error(
        "belongs to the user or group {id}, which is not one of the proc's own, {first} and the {count} from there on"
    )]
    Owner {
        /// Whose it is.
        id: u32,
        /// The first of the proc's.
        first: u32,
        /// How many it has.
        count: u32,
    },
    /// An attribute that tells the kernel something unchecked, or that is not well formed.
    #[error("has the extended attribute {name:?}, which a proc's files may not have, or not with this value")]
    Attribute {
        /// Which.
        name: String,
    },
}

/// Whether a file may be a proc's, but for its being a device ([`check_device`]).
pub(crate) fn check(entry: &Entry, ids: Ids) -> Result<(), Stray> {
    let attributes = &entry.attributes;
    let owner = |id| Stray::Owner { id, first: ids.first, count: ids.count };
    if let Some(id) = [attributes.uid, attributes.gid].into_iter().find(|id| !ids.has(*id)) {
        return Err(owner(id));
    }
    for (name, value) in &attributes.xattrs {
        let bad = || Stray::Attribute { name: String::from_utf8_lossy(name).into_owned() };
        match ids_in(name, value) {
            Some(found) => match found.into_iter().find(|id| !ids.has(*id)) {
                Some(id) => return Err(owner(id)),
                None => continue,
            },
            None if is_allowed(name, value) => {}
            None => return Err(bad()),
        }
    }
    Ok(())
}

/// Whether it is no device, or one of those that every proc may have.
pub(crate) fn check_device(node: &Node) -> Result<(), Stray> {
    match *node {
        Node::Char { major, minor } if !DEVICES.contains(&(major, minor)) => Err(Stray::Device { major, minor }),
        Node::Block { major, minor } => Err(Stray::Device { major, minor }),
        _ => Ok(()),
    }
}

fn overlay(name: &[u8]) -> Option<&[u8]> {
    name.strip_prefix(b"trusted.overlay.").or_else(|| name.strip_prefix(b"user.overlay."))
}

/// An attribute that is left out when a directory is archived.
pub(crate) fn is_bound_to_machine(name: &[u8]) -> bool {
    overlay(name).is_some_and(|kind| BOUND.contains(&kind))
}

fn is_allowed(name: &[u8], value: &[u8]) -> bool {
    match overlay(name) {
        Some(b"opaque") => value == b"y",
        Some(kind) => OVERLAY.contains(&kind),
        None => name.starts_with(b"user."),
    }
}

/// The ids in file capabilities of revision 3 (linux/capability.h, vfs_ns_cap_data) and in access
/// control lists (linux/posix_acl_xattr.h); none if it is neither of them, or not well formed.
fn ids_in(name: &[u8], value: &[u8]) -> Option<Vec<u32>> {
    let places = id_places(name, value)?;
    let id = |at: usize| u32::from_le_bytes(value[at..at + 4].try_into().expect("4 bytes"));
    Some(places.into_iter().map(id).collect())
}

/// Where in an attribute's value ids are, each of 4 bytes.
pub(crate) fn id_places(name: &[u8], value: &[u8]) -> Option<Vec<usize>> {
    const REVISION_3: u8 = 3;
    const NAMED: [u16; 2] = [0x02, 0x08];
    match name {
        b"security.capability" if value.len() == 24 && value[3] == REVISION_3 => Some(vec![20]),
        b"system.posix_acl_access" | b"system.posix_acl_default" if value.len() % 8 == 4 => {
            let named = |at: &usize| NAMED.contains(&u16::from_le_bytes([value[*at], value[at + 1]]));
            Some((4..value.len()).step_by(8).filter(named).map(|at| at + 4).collect())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::tree::Attributes;

    const IDS: Ids = Ids { first: 1000, count: 10 };

    fn with(name: &[u8], value: &[u8]) -> Result<(), Stray> {
        let xattrs = vec![(name.to_vec(), value.to_vec())];
        let attributes = Attributes { uid: 1000, gid: 1009, xattrs, ..Attributes::default() };
        check(&Entry { parent: 0, name: b"a".to_vec(), attributes, node: Node::Fifo }, IDS)
    }

    fn capability(revision: u8, root: u32) -> Vec<u8> {
        let mut value = vec![1, 0, 0, revision];
        value.resize(20, 0);
        value.extend(root.to_le_bytes());
        value
    }

    fn acl(tag: u16, id: u32) -> Vec<u8> {
        [&[2, 0, 0, 0][..], &tag.to_le_bytes(), &[6, 0], &id.to_le_bytes()].concat()
    }

    #[test]
    fn what_is_listed_is_allowed_and_nothing_else() {
        let capability = |revision, root| with(b"security.capability", &capability(revision, root));
        assert_eq!(capability(3, 1000), Ok(()));
        assert!(matches!(capability(3, 0), Err(Stray::Owner { id: 0, .. })), "the machine's root");
        assert!(matches!(capability(2, 1000), Err(Stray::Attribute { .. })));
        assert!(matches!(with(b"security.capability", &[1; 20]), Err(Stray::Attribute { .. })));
        assert_eq!(with(b"system.posix_acl_access", &acl(0x02, 1009)), Ok(()));
        assert_eq!(with(b"system.posix_acl_default", &acl(0x01, u32::MAX)), Ok(()), "the owner's entry has no id");
        assert!(matches!(with(b"system.posix_acl_access", &acl(0x08, 1010)), Err(Stray::Owner { id: 1010, .. })));
        assert!(matches!(with(b"system.posix_acl_access", b"short"), Err(Stray::Attribute { .. })));
        for good in [&b"user.x"[..], b"user.overlay.opaque", b"trusted.overlay.opaque", b"trusted.overlay.redirect"] {
            assert_eq!(with(good, b"y"), Ok(()));
        }
        assert!(with(b"trusted.overlay.opaque", b"x").is_err());
        let bad = [
            &b"trusted.overlay.metacopy"[..],
            b"user.overlay.metacopy",
            b"trusted.overlay.origin",
            b"trusted.overlay.overlay.opaque",
            b"trusted.other",
            b"security.selinux",
            b"security.ima",
            b"system.nfs4_acl",
            b"other",
        ];
        for name in bad {
            let told = with(name, b"y").unwrap_err().to_string();
            assert!(told.contains(std::str::from_utf8(name).unwrap()), "{told}");
        }
        for (name, is) in [("origin", true), ("nlink", true), ("uuid", true), ("impure", true), ("metacopy", false)] {
            assert_eq!(is_bound_to_machine(format!("trusted.overlay.{name}").as_bytes()), is);
            assert_eq!(is_bound_to_machine(format!("user.overlay.{name}").as_bytes()), is);
        }
        assert!(!is_bound_to_machine(b"user.origin"));
    }

    #[test]
    fn devices_are_whiteouts_and_the_ordinary_ones() {
        for (major, minor) in [(0, 0), (1, 3), (1, 9), (5, 2)] {
            assert_eq!(check_device(&Node::Char { major, minor }), Ok(()));
            assert!(check_device(&Node::Block { major, minor }).is_err());
        }
        for (major, minor) in [(1, 1), (1, 2), (1, 4), (5, 3), (10, 229), (0, 1)] {
            let told = check_device(&Node::Char { major, minor }).unwrap_err().to_string();
            assert_eq!(told, format!("is the device {major}:{minor}, which no proc has"));
        }
        assert_eq!(check_device(&Node::Socket), Ok(()));
    }
}
