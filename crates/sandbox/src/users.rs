//! The user that a program runs as: names of users and groups as the proc's own files know them.
//!
//! The files are the tenant's, so they are opened within its root (openat2(2), RESOLVE_IN_ROOT),
//! only if they are regular files, and read up to a bound.

use crate::init::MOST_GROUPS;
use crate::protocol::ProgramIds;
use rustix::fs::{FileType, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::BorrowedFd;

/// Most bytes of /etc/passwd and /etc/group that are read.
const MOST_BYTES: u64 = 4 << 20;
/// Ids that a proc has: 0 to this.
const LAST_ID: u32 = 65_535;

/// A user that a program can run as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Its ids.
    pub ids: ProgramIds,
    /// Its home directory, where the files know it.
    pub home: Option<String>,
}

/// There is no such user.
#[derive(Debug, thiserror::Error)]
pub enum UserError {
    /// No name of the proc's files, and no number.
    #[error("there is no {kind} {name:?} in the proc's {file}")]
    Unknown {
        /// User or group.
        kind: &'static str,
        /// As it was asked for.
        name: String,
        /// Where it was looked for.
        file: &'static str,
    },
    /// A number that no proc has.
    #[error("id {0} is none of a proc's, which has 0 to 65535")]
    TooLarge(u64),
    /// The files cannot be read.
    #[error("could not read the proc's {file}")]
    Io {
        /// Which.
        file: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Finds `USER[:GROUP]`, names or numbers, in the files below `root`. Without a group it is the
/// user's own with its supplementary ones, and a number that the files do not know gets group 0.
///
/// # Errors
/// See [`UserError`].
pub fn find(root: BorrowedFd<'_>, wanted: &str) -> Result<User, UserError> {
    let (name, group) = match wanted.split_once(':') {
        Some((name, group)) => (name, Some(group).filter(|g| !g.is_empty())),
        None => (wanted, None),
    };
    let name = if name.is_empty() { "0" } else { name };
    let passwd = read(root, "etc/passwd", "/etc/passwd")?;
    let number = name.parse::<u64>().ok();
    let lines = || passwd.lines().map(|line| line.split(':').collect::<Vec<_>>()).filter(|f| f.len() >= 6);
    let id = |text: &str| text.parse::<u64>().ok();
    let entry = lines().find(|f| f[0] == name).or_else(|| number.and_then(|n| lines().find(|f| id(f[2]) == Some(n))));
    let unknown = |kind, name: &str, file| UserError::Unknown { kind, name: name.to_owned(), file };
    let (uid, own_group, home) = match &entry {
        Some(f) => (id(f[2]), id(f[3]), Some(f[5].to_owned()).filter(|h| !h.is_empty())),
        None => (number, Some(0), None),
    };
    let uid = checked(uid.ok_or_else(|| unknown("user", name, "/etc/passwd"))?)?;
    let groups = read(root, "etc/group", "/etc/group")?;
    let groups: Vec<Vec<&str>> =
        groups.lines().map(|line| line.split(':').collect()).filter(|f: &Vec<&str>| f.len() >= 3).collect();
    if let Some(group) = group {
        let by_name = groups.iter().find(|f| f[0] == group).and_then(|f| id(f[2]));
        let gid = by_name.or_else(|| id(group)).ok_or_else(|| unknown("group", group, "/etc/group"))?;
        return Ok(User { ids: ProgramIds { uid, gid: checked(gid)?, groups: vec![] }, home });
    }
    let gid = checked(own_group.unwrap_or(0))?;
    let user_name = entry.as_ref().map(|f| f[0]);
    let member = |f: &&Vec<&str>| f.get(3).is_some_and(|all| all.split(',').any(|m| Some(m) == user_name));
    let mut more = Vec::new();
    for group in groups.iter().filter(member).filter_map(|f| id(f[2])) {
        let group = checked(group)?;
        if group != gid && !more.contains(&group) && more.len() < MOST_GROUPS {
            more.push(group);
        }
    }
    Ok(User { ids: ProgramIds { uid, gid, groups: more }, home })
}

fn checked(id: u64) -> Result<u32, UserError> {
    u32::try_from(id).ok().filter(|id| *id <= LAST_ID).ok_or(UserError::TooLarge(id))
}

/// A small file of the tenant's; empty where there is none.
fn read(root: BorrowedFd<'_>, path: &str, file: &'static str) -> Result<String, UserError> {
    let failed = |source: io::Error| UserError::Io { file, source };
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let opened = match kip_sys::within::open(root, path, flags, resolve) {
        Err(Errno::NOENT) => return Ok(String::new()),
        other => other.map_err(|e| failed(e.into()))?,
    };
    let stat = rustix::fs::fstat(&opened).map_err(|e| failed(e.into()))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file")));
    }
    let mut bytes = Vec::new();
    File::from(opened).take(MOST_BYTES).read_to_end(&mut bytes).map_err(failed)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::fd::AsFd;

    fn ids(root: &tempfile::TempDir, wanted: &str) -> Result<(u32, u32, Vec<u32>), String> {
        let dir = File::open(root.path()).unwrap();
        match find(dir.as_fd(), wanted) {
            Ok(user) => Ok((user.ids.uid, user.ids.gid, user.ids.groups)),
            Err(e) => Err(e.to_string()),
        }
    }

    #[test]
    fn users_and_groups_are_the_proc_s_own() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("etc")).unwrap();
        fs::write(root.path().join("etc/passwd"), "root:x:0:0::/root:/bin/sh\nweb:x:33:34::/srv:/bin/false\n").unwrap();
        fs::write(root.path().join("etc/group"), "root:x:0:\nweb:x:34:\nlog:x:40:web,root\n").unwrap();
        assert_eq!(ids(&root, "web"), Ok((33, 34, vec![40])));
        assert_eq!(ids(&root, "33"), Ok((33, 34, vec![40])));
        assert_eq!(ids(&root, "web:log"), Ok((33, 40, vec![])));
        assert_eq!(ids(&root, "1000"), Ok((1000, 0, vec![])));
        assert_eq!(ids(&root, "1000:1001"), Ok((1000, 1001, vec![])));
        assert!(ids(&root, "www").unwrap_err().contains("no user \"www\""));
        assert!(ids(&root, "web:www").unwrap_err().contains("no group \"www\""));
        assert!(ids(&root, "70000").unwrap_err().contains("70000"));
        let dir = File::open(root.path()).unwrap();
        assert_eq!(find(dir.as_fd(), "web").unwrap().home.as_deref(), Some("/srv"));
    }

    #[test]
    fn the_files_are_read_within_the_root_only() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("etc")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", root.path().join("etc/passwd")).unwrap();
        assert!(ids(&root, "root").is_err(), "a loop inside, not the host's file");
        fs::remove_file(root.path().join("etc/passwd")).unwrap();
        assert!(ids(&root, "root").unwrap_err().contains("no user"));
        assert_eq!(ids(&root, "5:6"), Ok((5, 6, vec![])), "numbers need no files");
        fs::create_dir(root.path().join("etc/passwd")).unwrap();
        assert!(ids(&root, "root").unwrap_err().contains("passwd"));
    }
}
