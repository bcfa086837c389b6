//! Takes a snapshot of a process tree with a helper.
//!
//! The caller has a step just before CRIU's freeze, while the tree runs, one when it stands still,
//! and one at the end, [`Stage::Frozen`]: there the images are complete and every task is in a
//! ptrace stop. If the last says yes CRIU kills the tree, if no (or if anything failed) the tree
//! runs on. A crash of ours in the middle makes CRIU's socket close; it then resumes the tree.

use crate::helper::{Helper, HelperError, HelperOrder};
use crate::rpc::{CriuCall, CriuRequest, Opts};
use kip_clocks::Now;
use kip_criu_images::CheckpointImage;
use kip_criu_images::fields::{dump_stats_entry, stats_entry};
use rustix::fs::{AtFlags, MemfdFlags, Mode, OFlags};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// CRIU's network_lock value for "leave the network alone".
pub(crate) const LOCK_SKIP: i32 = 3;
/// Name of CRIU's log in the images' directory.
pub const DUMP_LOG: &str = "dump.log";

/// What to dump.
#[derive(Debug)]
pub struct DumpRequest<'a> {
    /// Host pid of the tree's root, pid 1 of its pid namespace.
    pub pid: u32,
    /// Existing empty directory for the images.
    pub images: &'a Path,
    /// Namespaces that are held elsewhere and not to be dumped, with their CLONE_NEW* types.
    pub namespaces: &'a [(i32, BorrowedFd<'a>)],
    /// Mount points inside that come from outside, with the key the restore names them by.
    pub external_mounts: &'a [(String, String)],
    /// What else comes from outside, in CRIU's words for it: `tty[DEVICE:FILE SYSTEM]`.
    pub external: &'a BTreeSet<String>,
    /// Largest deleted file kept in the images, bytes.
    pub ghost_limit: u32,
    /// Memory that processes do not share is left out: copies are to hold it ([`Helper::hold`]).
    pub leaves_memory: bool,
}

/// A step of the caller's.
#[derive(Debug, Clone, Copy)]
pub enum Stage<'a> {
    /// The tree runs, and stands still about a millisecond later. The first helper of a template
    /// that was just started takes tens of milliseconds to come here.
    Running,
    /// Every task is in a ptrace stop, and CRIU has not run any code of its own in it yet.
    Still,
    /// Images are complete, and nothing runs.
    Frozen(&'a Log),
}

/// A finished dump.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dumped {
    /// The tree stood still this long, microseconds, as CRIU measured it.
    pub frozen_us: u64,
}

/// The dump failed or was called off; the tree runs on.
#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    /// The helper.
    #[error(transparent)]
    Helper(#[from] HelperError),
    /// CRIU said no.
    #[error("CRIU cannot take a snapshot: {}", causes.join("; "))]
    Refused {
        /// Its error messages, the first is the nearest to the cause.
        causes: Vec<String>,
        /// The disk of the images is full, or the quota is.
        no_room: bool,
    },
    /// The caller's step said no.
    #[error("the snapshot was called off")]
    CalledOff,
    /// The images' directory cannot be opened.
    #[error("the directory of the images cannot be opened")]
    Images(#[source] io::Error),
}

/// Dumps; `step` is called once at each [`Stage`], and calls the dump off by saying no.
pub fn dump(
    helper: &Helper,
    request: &DumpRequest<'_>,
    step: &mut dyn FnMut(Stage<'_>) -> bool,
) -> Result<Dumped, DumpError> {
    // By descriptor: the caller's step may rename it.
    let directory = File::open(request.images).map_err(DumpError::Images)?;
    let mut orders: Vec<_> = request.namespaces.iter().map(|(kind, fd)| (HelperOrder::SetNs(*kind), *fd)).collect();
    orders.extend(request.leaves_memory.then_some((HelperOrder::LeaveMemory, directory.as_fd())));
    helper.prepare(&orders)?;
    let mounts = request.external_mounts.iter().map(|(at, key)| format!("mnt[{at}]:{key}"));
    let opts = Opts {
        images_dir_fd: -1,
        images_dir: Some(request.images.to_string_lossy().into_owned()),
        pid: Some(request.pid as i32),
        tcp_established: Some(true),
        tcp_skip_in_flight: Some(true),
        file_locks: Some(true),
        link_remap: Some(true),
        ghost_limit: Some(request.ghost_limit),
        manage_cgroups_mode: Some(0),
        network_lock: Some(LOCK_SKIP),
        notify_scripts: Some(true),
        log_level: Some(LOG_STEPS),
        log_file: Some(DUMP_LOG.to_owned()),
        external: mounts.chain(request.external.iter().cloned()).collect(),
        ..Opts::default()
    };
    let call = CriuRequest { kind: CriuCall::Dump as i32, opts: Some(opts), notify_success: None };
    let (mut agreed, mut log) = (None, Log::new(request.images).map_err(DumpError::Images)?);
    let response = helper.call(&call, &mut |stage, _| match stage {
        "pre-dump" => {
            log.compare_clocks();
            step(Stage::Running)
        }
        // CRIU asks for files from outside, which come with the request, when it has seized all.
        "query-ext-files" => step(Stage::Still),
        "post-dump" => {
            log.compare_clocks();
            // Cgroups are left alone, but with this image in place a restore starts a process for
            // them all the same.
            let _ = std::fs::remove_file(request.images.join("cgroup.img"));
            *agreed.insert(step(Stage::Frozen(&log)))
        }
        _ => true,
    });
    // The link leads nowhere any more when this returns.
    let _ = rustix::fs::unlinkat(&directory, DUMP_LOG, AtFlags::empty());
    if !response.as_ref().is_ok_and(|response| response.success) {
        log.keep(&directory);
    }
    let response = response?;
    match (response.success, agreed) {
        (true, _) => {}
        (false, Some(false)) => return Err(DumpError::CalledOff),
        (false, _) => {
            let causes = causes(&log.lines(), response.cr_errmsg);
            return Err(DumpError::Refused { causes, no_room: has_no_room(&directory) });
        }
    }
    Ok(Dumped { frozen_us: frozen_us(&directory) })
}

/// Whether nothing can be written any more into the directory of a dump that failed: CRIU says of
/// each error only what it was at.
fn has_no_room(directory: &File) -> bool {
    // More than may have become free by what CRIU has removed.
    const TRIED: usize = 256 << 10;
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let tried = rustix::fs::openat(directory, ".", flags, Mode::RUSR | Mode::WUSR).map_err(io::Error::from);
    let written = tried.and_then(|file| File::from(file).write_all(&vec![1; TRIED]));
    written.is_err_and(|e| matches!(e.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded))
}

/// CRIU's log of a dump, which says when CRIU read what. It is in memory: it is long, and the disk
/// may be full.
#[derive(Debug)]
pub struct Log {
    file: File,
    compared: Vec<Compared>,
}

/// The machine's clocks and the stamps of a log, which are by CLOCK_REALTIME, at one moment,
/// nanoseconds.
#[derive(Debug, Clone, Copy)]
struct Compared {
    /// How far CLOCK_MONOTONIC is ahead of the stamps, or less.
    monotonic: i64,
    /// How far CLOCK_REALTIME is ahead of CLOCK_MONOTONIC.
    realtime: i64,
}

/// How often both clocks are read.
const READINGS: usize = 3;
/// What CLOCK_REALTIME may be ahead differently, nanoseconds, though it was not set: the processor
/// may have been taken away between two clocks.
const READ_WITHIN_NS: i64 = 2_000_000;

impl Log {
    /// To be written by CRIU under its name in the images' directory.
    fn new(images: &Path) -> io::Result<Log> {
        let file = File::from(rustix::fs::memfd_create(DUMP_LOG, MemfdFlags::CLOEXEC)?);
        let place = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        std::os::unix::fs::symlink(place, images.join(DUMP_LOG))?;
        Ok(Log { file, compared: Vec::new() })
    }

    /// Leaves it in the images' directory, as well as the disk lets.
    fn keep(&self, directory: &File) {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
        if let Ok(file) = rustix::fs::openat(directory, DUMP_LOG, flags, Mode::RUSR | Mode::WUSR) {
            let _ = File::from(file).write_all(self.lines().as_bytes());
        }
    }

    /// Compares clocks, while CRIU waits for an answer: what it logged last is older than this
    /// moment.
    fn compare_clocks(&mut self) {
        let lines = self.lines();
        // Of a few readings the one in which the processor was not taken away between two clocks.
        let read = || (Now::read(), Now::read());
        let gap = |(one, two): &(Now, Now)| two.monotonic_ns - one.monotonic_ns;
        let (now, _) = (0..READINGS).map(|_| read()).min_by_key(gap).expect("some");
        if let Some(last) = lines.lines().rev().find_map(stamp_ns) {
            let monotonic = now.monotonic_ns.saturating_sub(last);
            self.compared.push(Compared { monotonic, realtime: now.realtime_ns.saturating_sub(now.monotonic_ns) });
        }
    }

    /// Whether CLOCK_REALTIME was set meanwhile: stamps and the times of files are by two clocks
    /// then.
    pub fn clock_was_set(&self) -> bool {
        let ahead = || self.compared.iter().map(|compared| compared.realtime);
        ahead().max().zip(ahead().min()).is_some_and(|(most, least)| most.saturating_sub(least) > READ_WITHIN_NS)
    }

    /// How far CLOCK_MONOTONIC is ahead of the stamps, rather too much than too little; none before
    /// the first comparison.
    fn ahead_ns(&self) -> Option<i64> {
        let ahead = self.compared.iter().map(|compared| compared.monotonic);
        if self.clock_was_set() { ahead.max() } else { ahead.min() }
    }

    fn lines(&self) -> String {
        let mut bytes = Vec::new();
        let mut chunk = [0; 16 << 10];
        while let Ok(count @ 1..) = self.file.read_at(&mut chunk, bytes.len() as u64) {
            bytes.extend_from_slice(&chunk[..count]);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// When CRIU had just read the timers of each process (by host pid), never before, nanoseconds
    /// of CLOCK_MONOTONIC. Empty if the log does not say.
    pub fn timers_read(&self) -> BTreeMap<u32, i64> {
        let Some(ahead_ns) = self.ahead_ns() else { return BTreeMap::new() };
        let read = |line: &str| {
            let pid = line.split_once(TIMERS_ARE_READ)?.1.split_once(')')?.0.parse().ok()?;
            Some((pid, stamp_ns(line)?.saturating_add(ahead_ns)))
        };
        self.lines().lines().filter_map(read).collect()
    }

    /// When each thread (by host id) stood still, or a little later, nanoseconds of
    /// CLOCK_MONOTONIC. Empty if the log does not say.
    pub fn still(&self) -> BTreeMap<u32, i64> {
        let Some(ahead_ns) = self.ahead_ns() else { return BTreeMap::new() };
        still(&self.lines()).into_iter().map(|(tid, ns)| (tid, ns.saturating_add(ahead_ns))).collect()
    }
}

/// When threads stood still, by the stamps of a log's lines: a process's first thread as its line
/// says, another one by the line that follows.
fn still(lines: &str) -> Vec<(u32, i64)> {
    let (mut found, mut stopping) = (Vec::new(), None);
    for line in lines.lines() {
        let Some(ns) = stamp_ns(line) else { continue };
        found.extend(stopping.take().map(|tid| (tid, ns)));
        let number = |text: Option<&str>| text?.trim().parse().ok();
        if let Some((_, rest)) = line.split_once(IS_SEIZED) {
            found.extend(number(rest.split(',').next()).map(|tid| (tid, ns)));
        } else if let Some((_, rest)) = line.split_once(IS_BEING_SEIZED) {
            stopping = number(rest.split(' ').nth(1));
        }
    }
    found
}

/// The time at the beginning of a line of CRIU's log, nanoseconds since CRIU began it.
fn stamp_ns(line: &str) -> Option<i64> {
    let (seconds, micros) = line.strip_prefix('(')?.split_once(')')?.0.split_once('.')?;
    // Six digits, the last of which is left out from 100 s on.
    let unit = 10i64.checked_pow(9u32.checked_sub(micros.len() as u32)?)?;
    let fraction = micros.parse::<u32>().ok()?;
    let seconds = i64::from(seconds.parse::<u32>().ok()?) * 1_000_000_000;
    seconds.checked_add(i64::from(fraction).checked_mul(unit)?)
}

/// How long the tree stood still, from CRIU's statistics; 0 if there are none.
fn frozen_us(directory: &File) -> u64 {
    let path = PathBuf::from(format!("/proc/self/fd/{}/stats-dump", directory.as_raw_fd()));
    let stats = CheckpointImage::read(&path).ok().and_then(|i| i.entries.into_iter().next());
    let dump = stats.and_then(|e| e.message(stats_entry::DUMP).ok().flatten());
    dump.map_or(0, |d| d.number(dump_stats_entry::FROZEN_TIME))
}

/// CRIU's log level for warnings and errors.
pub(crate) const LOG_ERRORS: i32 = 2;
/// CRIU's log level for its steps besides.
const LOG_STEPS: i32 = 3;
/// What CRIU logs for a process right after it has read its timers.
const TIMERS_ARE_READ: &str = "Dumping core (pid: ";

/// What CRIU logs for a process whose first thread stands still, and for another thread that it is
/// about to stop.
const IS_SEIZED: &str = "Seized task ";
const IS_BEING_SEIZED: &str = "Seizing ";

/// Messages that CRIU calls errors and that are no cause: it cannot raise its own limit here, and
/// what follows a failure.
const NOT_CAUSES: [&str; 4] =
    ["FAILED", "Can't setup RLIMIT_NOFILE", "Unable to detach from", "Killing processes because"];

/// The cause of a refusal if a process has threads but its first, which may be because the process
/// is ending.
pub const WITHOUT_FIRST_THREAD: &str =
    "the first thread of a process has ended while others of it go on, pthread_exit(3)";

/// CRIU's words for a refusal, and the same refusal in words of the program's owner.
const WORDS: [(&str, &str); 5] = [
    ("Zombies with threads", WITHOUT_FIRST_THREAD),
    ("PIDFD_THREAD", "an open descriptor of a thread, pidfd_open(2) with PIDFD_THREAD"),
    ("is not a part of process tree", "an open descriptor of a process, pidfd_open(2), that is none of its own"),
    (
        "/runtime doesn't have a proper root mount",
        "/run/kip, in which the runtime socket is mounted, has another name: give it its own again",
    ),
    ("on an in-flight socket", "a connection to a listening unix socket that waits to be accepted"),
];

/// The error messages of a CRIU log, without their source positions, in order.
pub(crate) fn causes(log: &str, message: Option<String>) -> Vec<String> {
    let mut found: Vec<String> = log
        .lines()
        .filter_map(|line| {
            let at = line.find("Error (")?;
            let rest = &line[at..];
            let said = rest.split_once("): ")?.1.trim();
            let known = WORDS.iter().find(|(theirs, _)| said.contains(theirs));
            Some(known.map_or(said, |(_, ours)| ours).to_owned())
        })
        .filter(|m| !NOT_CAUSES.iter().any(|n| m.contains(n)))
        .collect();
    found.dedup();
    if found.is_empty() {
        found.push(message.unwrap_or_else(|| "no reason was logged".to_owned()));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn stamps_of_lines() {
        assert_eq!(stamp_ns("(00.012345) Dumping core (pid: 7)"), Some(12_345_000));
        assert_eq!(stamp_ns("(123.01234) x"), Some(123_012_340_000));
        for line in ["", "Error", "(x.1) y", "(1) y", "(00.0123456789) y"] {
            assert_eq!(stamp_ns(line), None, "{line}");
        }
    }

    // promise waking: when a thread was interrupted, CRIU's log says
    #[test]
    fn the_log_says_when_threads_stood_still() {
        let lines = "(00.000001) Seized task 7, state 1\n(00.000002) \tSeizing 7's 8 thread\n(00.000005) Collected 7 in 1 state\n\
            (00.000006) Seized task 9, state 1\n(00.000007) \tSeizing 9's 10 thread\n(00.000008) \tSeizing 9's 11 thread\n";
        assert_eq!(still(lines), [(7, 1_000), (8, 5_000), (9, 6_000), (10, 8_000)], "11 may not stand still yet");
    }

    /// The log is rather believed to be later than it is.
    #[test]
    fn the_log_says_when_timers_were_read() {
        let scratch = tempfile::tempdir().unwrap();
        let mut log = Log::new(scratch.path()).unwrap();
        let path = scratch.path().join(DUMP_LOG);
        assert_eq!(log.timers_read(), BTreeMap::new());
        let before = Now::read().monotonic_ns;
        std::fs::write(&path, "(00.000000) begun\nno stamp\n").unwrap();
        log.compare_clocks();
        let after = Now::read().monotonic_ns;
        std::thread::sleep(Duration::from_millis(30));
        let lines = "(00.000000) begun\n(00.010000) Dumping core (pid: 12)\n(00.020000) Dumping core (pid: 345)\n";
        std::fs::write(&path, lines).unwrap();
        log.compare_clocks();
        let read = log.timers_read();
        assert_eq!(read.keys().copied().collect::<Vec<_>>(), [12, 345]);
        assert_eq!(read[&345] - read[&12], 10_000_000);
        assert!(
            (before..=after).contains(&(read[&12] - 10_000_000)),
            "the comparison that was nearer to a line counts"
        );
        assert!(!log.clock_was_set());
        std::fs::remove_file(&path).unwrap();
        log.keep(&File::open(scratch.path()).unwrap());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), lines);
    }

    // promise waking: a machine whose clock is set while a snapshot is taken ends no wait early
    #[test]
    fn a_clock_that_is_set_meanwhile_makes_nothing_look_older() {
        const SET_BY: i64 = 350_000_000;
        let scratch = tempfile::tempdir().unwrap();
        for set_by in [-SET_BY, SET_BY] {
            // By the stamps of before and of after: it is not known which of them a line has.
            let compared = [(1_000_000_000, 0), (1_000_000_000 - set_by, set_by)];
            let mut log = Log::new(scratch.path()).unwrap();
            log.file.write_all(b"(00.010000) Seized task 7, state 1\n").unwrap();
            log.compared = compared.map(|(monotonic, realtime)| Compared { monotonic, realtime }).to_vec();
            assert!(log.clock_was_set());
            let latest = compared[0].0.max(compared[1].0);
            assert_eq!(log.still(), BTreeMap::from([(7, latest + 10_000_000)]));
            std::fs::remove_file(scratch.path().join(DUMP_LOG)).unwrap();
        }
    }
}
