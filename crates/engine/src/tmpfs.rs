//! File systems in memory of a proc (`/dev/shm`, `--tmpfs`): each is made empty at a start, and has
//! after a sleep what it had before.
//!
//! Parking writes what is in one into the generation, for the generation may have to outlive the
//! machine or wake elsewhere. In memory it stays besides only if it is little, or if an inotify
//! instance watches something there: then its mount is held as those of `/` and `/usr` are, and a
//! native restore finds every inode where it was. Of any other the wake makes a new one and has it
//! filled in the proc's own cgroup ([`kip_sandbox::launcher::Launcher::fill`]). An empty one costs
//! a sleeper nothing.
//!
//! Crash: what is held is held by daemon and keeper; what a failed wake used up is made again of
//! the generation.

use crate::fd_store::key;
use crate::host::Proc;
use kip_records::body::SleptTmpfs;
use kip_sandbox::cgroup::CgroupError;
use kip_sandbox::launcher::LaunchError;
use kip_sandbox::volume::{self, Volume};
use kip_types::spec::{MOST_TMPFS, RootKind, SECRETS, Tmpfs};
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, StatxFlags};
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// So much of all of them together may stay in memory while the proc is parked, and so many files:
/// each takes about 1 KiB of the kernel's.
const HELD_BYTES: u64 = 1 << 20;
const HELD_FILES: u64 = 256;

/// It cannot fall asleep with its file systems in memory as they are.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each is what it means")]
pub enum UnfitTmpfs {
    #[error("its processes cannot be read")]
    Processes(#[source] io::Error),
    #[error(
        "the file system in memory at {target} is not there any more: a directory above it was moved; start it anew"
    )]
    Moved { target: String },
    #[error("what is in memory at {target} cannot be written into the snapshot")]
    Write {
        target: String,
        #[source]
        source: io::Error,
    },
}

/// Its file systems in memory cannot be made for a wake.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each is what it means")]
pub enum TmpfsLost {
    #[error("a file system in memory cannot be made for {target}")]
    Make {
        target: String,
        #[source]
        source: io::Error,
    },
    #[error("the cgroup of the proc cannot be joined")]
    Cgroup(#[from] CgroupError),
    #[error("what was in memory at {target} cannot be brought back")]
    Fill {
        target: String,
        #[source]
        source: LaunchError,
    },
    #[error("{} cannot be read", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// One of a running proc.
#[derive(Debug)]
pub(crate) struct Running {
    of: Tmpfs,
    /// Where it is mounted, links resolved.
    pub(crate) point: String,
    root: OwnedFd,
    device: u64,
}

/// What the spec asks for, that at /dev/shm first.
fn wanted(proc: &Proc) -> impl Iterator<Item = Tmpfs> {
    let spec = proc.spec();
    let shm = (spec.sandbox.root() == RootKind::Writable).then(|| Tmpfs::shm(spec.shm_bytes));
    shm.into_iter().chain(spec.tmpfs.clone())
}

/// CRIU's key of the mount with that number.
pub fn key_of(number: usize) -> String {
    format!("memory-{number}")
}

/// Those of a start, detached.
///
/// # Errors
/// The kernel's.
pub(crate) fn for_start(proc: &Proc) -> io::Result<Vec<Volume>> {
    wanted(proc).map(|one| make(proc, &one, &one.target)).collect()
}

fn make(proc: &Proc, of: &Tmpfs, target: &str) -> io::Result<Volume> {
    volume::tmpfs(of, target, (proc.first_id() + of.uid, proc.first_id() + of.gid))
}

/// All mounts of a proc in the order in which they are attached: those that lie within others come
/// later, and secrets last, for a link may lead one of the others to where they are.
pub(crate) fn in_order(in_memory: Vec<Volume>, volumes: Vec<Volume>) -> Vec<Volume> {
    let mut all = in_memory;
    all.extend(volumes);
    all.sort_by_key(|mount| (mount.target == SECRETS, mount.target.matches('/').count()));
    all
}

/// Those that a running proc has: none where an older Kip has started it.
pub(crate) fn read(proc: &Proc, init: u32) -> Result<Vec<Running>, UnfitTmpfs> {
    let text = std::fs::read_to_string(format!("/proc/{init}/mountinfo")).map_err(UnfitTmpfs::Processes)?;
    let mounts: Vec<(u64, &str)> = text.lines().filter_map(mount_of).collect();
    if mounts.is_empty() {
        return Ok(Vec::new());
    }
    let root = File::open(format!("/proc/{init}/root")).map_err(UnfitTmpfs::Processes)?;
    let mut found: Vec<Running> = Vec::new();
    for of in wanted(proc) {
        let moved = || UnfitTmpfs::Moved { target: of.target.clone() };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let there =
            kip_sys::within::open(&root, &of.target, flags, ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS);
        let there = there.map_err(|_| moved())?;
        let mask = StatxFlags::MNT_ID | StatxFlags::BASIC_STATS;
        let stat = rustix::fs::statx(&there, "", AtFlags::EMPTY_PATH, mask).map_err(|_| moved())?;
        let (_, point) = mounts.iter().find(|(id, _)| *id == stat.stx_mnt_id).ok_or_else(moved)?;
        if found.iter().any(|other| other.point == *point) {
            return Err(moved());
        }
        let device = rustix::fs::fstat(&there).map_err(|_| moved())?.st_dev;
        found.push(Running { point: (*point).to_owned(), of, root: there, device });
    }
    Ok(found)
}

/// Number and place of a file system in memory that Kip has made writable, by a line of
/// proc_pid_mountinfo(5).
fn mount_of(line: &str) -> Option<(u64, &str)> {
    let (own, kind) = line.split_once(" - ")?;
    let mut words = own.split(' ');
    let (id, point, options) = (words.next()?.parse().ok()?, words.nth(3)?, words.next()?);
    (kind.starts_with("tmpfs kip ") && options.starts_with("rw")).then_some((id, point))
}

/// The file of a generation that has what was in one.
fn file_of(number: usize) -> String {
    format!("memory-{number}.files")
}

/// What the manifest says of them, and what is to be held, with its keys.
pub(crate) type Saved = (Vec<SleptTmpfs>, Vec<(String, OwnedFd)>);

/// Writes what is in them into a generation, with the tree frozen, and says which of `copies`,
/// other mounts of them, are to be held. `watched` are the devices that inotify instances watch, as
/// the kernel counts them.
pub(crate) fn save(
    proc: &Proc,
    all: &[Running],
    growing: &Path,
    copies: Vec<OwnedFd>,
    watched: &BTreeSet<u64>,
) -> Result<Saved, UnfitTmpfs> {
    let (mut slept, mut held) = (Vec::new(), Vec::new());
    let mut copies = copies.into_iter();
    let (mut bytes_left, mut files_left) = (HELD_BYTES, HELD_FILES);
    for (number, one) in all.iter().enumerate() {
        let copy = copies.next();
        let unwritten = |source: io::Error| UnfitTmpfs::Write { target: one.of.target.clone(), source };
        let used = rustix::fs::fstatvfs(&one.root).map_err(|e| unwritten(e.into()))?;
        let bytes = (used.f_blocks - used.f_bfree) * used.f_frsize;
        let is_empty = is_as_made(proc, one).map_err(unwritten)?;
        let device = u64::from(rustix::fs::major(one.device)) << 20 | u64::from(rustix::fs::minor(one.device));
        if !is_empty {
            let out = File::create(growing.join(file_of(number))).map_err(unwritten)?;
            kip_files::whole::write(one.root.as_fd(), &out, proc.first_id()).map_err(unwritten)?;
        }
        let files = used.f_files - used.f_ffree;
        let is_little = (!is_empty || bytes > 0) && bytes <= bytes_left && files <= files_left;
        if is_little {
            (bytes_left, files_left) = (bytes_left - bytes, files_left - files);
        }
        let stays = is_little || watched.contains(&device);
        if let Some(copy) = copy.filter(|_| stays) {
            held.push((key_in_store(number), copy));
        }
        slept.push(SleptTmpfs {
            target: one.of.target.clone(),
            point: one.point.clone(),
            file: (!is_empty).then(|| file_of(number)),
        });
    }
    Ok((slept, held))
}

fn key_in_store(number: usize) -> String {
    format!("{}{number}", key::TMPFS)
}

/// Nothing is in it, and its root has the owner and the mode that it was made with.
fn is_as_made(proc: &Proc, one: &Running) -> io::Result<bool> {
    let stat = rustix::fs::fstat(&one.root)?;
    let owner = (proc.first_id() + one.of.uid, proc.first_id() + one.of.gid);
    if (stat.st_mode & 0o7777, (stat.st_uid, stat.st_gid)) != (one.of.mode, owner) {
        return Ok(false);
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let again = rustix::fs::openat(&one.root, ".", flags, Mode::empty())?;
    let mut names = rustix::fs::Dir::new(again)?;
    Ok(names.all(|entry| entry.is_ok_and(|entry| matches!(entry.file_name().to_bytes(), b"." | b".."))))
}

/// Whether all that had something in them are held as they were: without that nothing is handed
/// over that is bound to a file in one.
pub(crate) fn are_held(proc: &Proc, slept: &[SleptTmpfs]) -> bool {
    let is_held = |number: usize| proc.fd_store.get(&key_in_store(number)).is_some();
    slept.iter().enumerate().all(|(number, one)| one.file.is_none() || is_held(number))
}

/// Places and keys of those that are held.
pub(crate) fn held(proc: &Proc, slept: &[SleptTmpfs]) -> Vec<(String, String)> {
    let all = slept.iter().enumerate().map(|(number, one)| (one.point.clone(), key_in_store(number)));
    all.filter(|(_, key)| proc.fd_store.get(key).is_some()).collect()
}

/// Those of a wake, detached, where the sleeper had them, with what was in them in this generation.
///
/// # Errors
/// They are not as they were.
pub(crate) fn for_wake(proc: &Proc, generation: &Path, slept: &[SleptTmpfs]) -> Result<Vec<Volume>, TmpfsLost> {
    let mut mounts = Vec::new();
    for (number, one) in slept.iter().enumerate().take(MOST_TMPFS + 1) {
        let unmade = |source: io::Error| TmpfsLost::Make { target: one.target.clone(), source };
        // What its spec says, not the manifest: that may have been in a store.
        let of = wanted(proc).find(|of| of.target == one.target);
        let of = of.ok_or_else(|| unmade(io::Error::other("the proc's spec has none there")))?;
        if let Some(held) = proc.fd_store.get(&key_in_store(number)) {
            let (fd, inode) = (held.try_clone().map_err(unmade)?, 1);
            mounts.push(Volume { fd, target: one.point.clone(), is_dir: true, inode });
            continue;
        }
        let mount = make(proc, &of, &one.point).map_err(unmade)?;
        if one.file.is_some() {
            let path = generation.join(file_of(number));
            let contents = File::open(&path).map_err(|source| TmpfsLost::Read { path, source })?;
            let cgroup = proc.cgroup.task_files()?;
            let filled = proc.shared.launcher().fill(mount.fd.as_fd(), contents.as_fd(), proc.first_id(), &cgroup);
            filled.map_err(|source| TmpfsLost::Fill { target: one.target.clone(), source })?;
        }
        mounts.push(mount);
    }
    Ok(mounts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_those_that_kip_has_made_writable_count() {
        let line = |options: &str, kind: &str| format!("77 41 0:35 / /run {options},nosuid - {kind} kip rw,size=64k\n");
        assert_eq!(mount_of(&line("rw", "tmpfs")), Some((77, "/run")));
        assert_eq!(mount_of(&line("ro", "tmpfs")), None, "secrets");
        assert_eq!(mount_of(&line("rw", "overlay")), None);
        assert_eq!(mount_of("77 41 0:35 / /run rw - tmpfs none rw\n"), None);
    }
}
