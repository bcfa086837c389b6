//! Takes a snapshot of a process tree with a helper.
//!
//! The caller has a step just before CRIU's freeze, while the tree runs, and one at the end of it, [`Stage::Frozen`]: there the
//! images are complete and every task is in a ptrace stop. If the latter says yes CRIU kills the tree, if no (or if anything
//! failed) the tree runs on. A crash of ours in the middle makes CRIU's socket close; it then resumes the tree.

use crate::helper::{Helper, HelperError, Order};
use crate::image::Image;
use crate::rpc::{Kind, Opts, Request};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
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
    /// Largest deleted file kept in the images, bytes.
    pub ghost_limit: u32,
}

/// A step of the caller's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// The tree runs, and stands still about a millisecond later. A helper that was just started takes tens of milliseconds to
    /// come here.
    Running,
    /// Images are complete, and nothing runs.
    Frozen,
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
    },
    /// The caller's step said no.
    #[error("the snapshot was called off")]
    CalledOff,
    /// The images' directory cannot be opened.
    #[error("the directory of the images")]
    Images(#[source] io::Error),
}

/// Dumps; `step` is called once at each [`Stage`], and calls the dump off by saying no.
pub fn dump(
    helper: Helper,
    request: &DumpRequest<'_>,
    step: &mut dyn FnMut(Stage) -> bool,
) -> Result<Dumped, DumpError> {
    let orders: Vec<_> = request.namespaces.iter().map(|(kind, fd)| (Order::SetNs(*kind), *fd)).collect();
    helper.prepare(&orders)?;
    // By descriptor: the caller's step may rename it.
    let directory = File::open(request.images).map_err(DumpError::Images)?;
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
        log_level: Some(log_level()),
        log_file: Some(DUMP_LOG.to_owned()),
        external: request.external_mounts.iter().map(|(at, key)| format!("mnt[{at}]:{key}")).collect(),
        ..Opts::default()
    };
    let call = Request { kind: Kind::Dump as i32, opts: Some(opts), notify_success: None };
    let mut settled = None;
    let response = helper.call(&call, &mut |stage, _| match stage {
        "pre-dump" => step(Stage::Running),
        "post-dump" => {
            // Cgroups are left alone, but with this image in place a restore starts a process for them all the same.
            let _ = std::fs::remove_file(request.images.join("cgroup.img"));
            *settled.insert(step(Stage::Frozen))
        }
        _ => true,
    })?;
    match (response.success, settled) {
        (true, _) => {}
        (false, Some(false)) => return Err(DumpError::CalledOff),
        (false, _) => {
            return Err(DumpError::Refused { causes: causes(&request.images.join(DUMP_LOG), response.cr_errmsg) });
        }
    }
    Ok(Dumped { frozen_us: frozen_us(&directory) })
}

/// How long the tree stood still, from CRIU's statistics; 0 if there are none.
fn frozen_us(directory: &File) -> u64 {
    let path = PathBuf::from(format!("/proc/self/fd/{}/stats-dump", directory.as_raw_fd()));
    let stats = Image::read(&path).ok().and_then(|i| i.entries.into_iter().next());
    stats.and_then(|e| e.message(1).ok().flatten()).map_or(0, |d| d.number(2))
}

/// 2 is warnings and errors; 4 everything, in debug builds of the crate's own tests only.
pub(crate) fn log_level() -> i32 {
    2
}

/// Messages that CRIU calls errors and that are no cause: it cannot raise its own limit here, and what follows a failure.
const NOT_CAUSES: [&str; 4] =
    ["FAILED", "Can't setup RLIMIT_NOFILE", "Unable to detach from", "Killing processes because"];

/// CRIU's words for a refusal, and the same refusal in words of the program's owner.
const WORDS: [(&str, &str); 3] = [
    ("Zombies with threads", "the first thread of a process has ended while others of it go on, pthread_exit(3)"),
    ("PIDFD_THREAD", "an open descriptor of a thread, pidfd_open(2) with PIDFD_THREAD"),
    ("is not a part of process tree", "an open descriptor of a process, pidfd_open(2), that is none of its own"),
];

/// The error messages of a CRIU log, without their source positions, in order.
pub(crate) fn causes(log: &Path, message: Option<String>) -> Vec<String> {
    let text = std::fs::read(log).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default();
    let mut found: Vec<String> = text
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
