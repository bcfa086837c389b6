//! Brings a process tree back from its images with a helper.
//!
//! The caller is asked at every [`Stage`]. Whatever fails up to [`Stage::Restored`] kills what was
//! restored and leaves images and held descriptors as they were; at [`Stage::Resuming`] the caller
//! patches memory and lets go what the tree has taken over, or has the threads held
//! ([`crate::hold`]) and does so afterwards.

use crate::dump::{LOCK_SKIP, LOG_ERRORS, causes};
use crate::helper::{Helper, HelperError, HelperOrder, ORDERS_PER_MESSAGE, ROOT, USR, volume_place};
use crate::rpc::{CriuCall, CriuRequest, InheritFd, Opts};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::Duration;

/// Name of CRIU's log in the images' directory.
pub const RESTORE_LOG: &str = "restore.log";
/// Inherited descriptors get numbers from here on in the helper: above all at which one message's
/// descriptors can arrive, which are the lowest that a helper that waits has free.
const FIRST_INHERITED: i32 = 512;
const _: () = assert!(FIRST_INHERITED as usize >= 2 * ORDERS_PER_MESSAGE);

/// What to restore.
#[derive(Debug)]
pub struct RestoreRequest<'a> {
    /// The images.
    pub images: &'a Path,
    /// All that they are, bytes: so much longer CRIU may be silent.
    pub bytes: u64,
    /// Held namespaces to stand in, with their CLONE_NEW* types.
    pub namespaces: &'a [(i32, BorrowedFd<'a>)],
    /// `tasks` or `cgroup.procs` files to join.
    pub cgroups: &'a [BorrowedFd<'a>],
    /// Detached mount of the root.
    pub root: BorrowedFd<'a>,
    /// Detached mount of /usr.
    pub usr: BorrowedFd<'a>,
    /// The volumes.
    pub volumes: &'a [RestoredVolume<'a>],
    /// Mounts from outside, key and path in the helper. `usr` is added by this function under the
    /// key `usr`.
    pub external_mounts: &'a [(String, String)],
    /// Descriptors for the restored processes to take over, by CRIU's key, for example
    /// `socket:[7]`.
    pub inherit: &'a [(String, BorrowedFd<'a>)],
}

/// A volume, as the images have it.
#[derive(Debug)]
pub struct RestoredVolume<'a> {
    /// The key of its mount.
    pub key: String,
    /// Detached mount of it.
    pub fd: BorrowedFd<'a>,
    /// A directory; else a file.
    pub is_dir: bool,
}

/// CRIU that says nothing for so long hangs; and so much longer for every byte that it has to read.
const PATIENCE: Duration = Duration::from_secs(20);
/// The slowest disk that is waited for, bytes per second.
const SLOWEST: u64 = 50_000_000;

/// The restore failed; nothing of it is left, unless the helper did, whose tree is the caller's to
/// end.
#[derive(Debug, thiserror::Error)]
pub enum CriuRestoreError {
    /// The helper.
    #[error(transparent)]
    Helper(#[from] HelperError),
    /// CRIU said no.
    #[error("CRIU cannot restore the snapshot: {}", causes.join("; "))]
    Refused {
        /// Its error messages.
        causes: Vec<String>,
    },
}

/// How far a restore is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// The root of the tree exists, with this host pid, in its namespaces.
    Created(u32),
    /// Every task has its memory and descriptors. The last stage at which the answer counts: false
    /// kills the tree.
    Restored,
    /// Every task has its registers and stands still at its first instruction; the images are no
    /// longer needed.
    Resuming,
}

/// Restores; returns the host pid of the tree's root. `stage` is called at every [`Stage`], once
/// each.
pub fn restore(
    helper: Helper,
    request: &RestoreRequest<'_>,
    stage: &mut dyn FnMut(Stage) -> bool,
) -> Result<u32, CriuRestoreError> {
    helper.be_patient(PATIENCE + Duration::from_secs(request.bytes / SLOWEST))?;
    let mut orders: Vec<(HelperOrder, BorrowedFd<'_>)> =
        request.cgroups.iter().map(|fd| (HelperOrder::Cgroup, *fd)).collect();
    orders.push((HelperOrder::MountRoot, request.root));
    orders.push((HelperOrder::MountUsr, request.usr));
    let volumes: Vec<_> = (0..).zip(request.volumes).collect();
    orders.extend(volumes.iter().map(|(n, volume)| (HelperOrder::MountVolume(*n), volume.fd)));
    let mut inherit_fd = Vec::new();
    for (n, (key, fd)) in (FIRST_INHERITED..).zip(request.inherit) {
        orders.push((HelperOrder::Dup(n), *fd));
        inherit_fd.push(InheritFd { key: key.clone(), fd: n });
    }
    orders.extend(request.namespaces.iter().map(|(kind, fd)| (HelperOrder::SetNs(*kind), *fd)));
    helper.prepare(&orders)?;
    let mut external: Vec<String> =
        request.external_mounts.iter().map(|(key, path)| format!("mnt[{key}]:{path}")).collect();
    external.push(format!("mnt[usr]:{USR}"));
    external.extend(volumes.iter().map(|(n, v)| format!("mnt[{}]:{}", v.key, volume_place(*n, v.is_dir))));
    let opts = Opts {
        images_dir_fd: -1,
        images_dir: Some(request.images.to_string_lossy().into_owned()),
        root: Some(ROOT.to_owned()),
        tcp_established: Some(true),
        file_locks: Some(true),
        link_remap: Some(true),
        manage_cgroups_mode: Some(0),
        network_lock: Some(LOCK_SKIP),
        notify_scripts: Some(true),
        skip_file_rwx_check: Some(true),
        log_level: Some(LOG_ERRORS),
        log_file: Some(RESTORE_LOG.to_owned()),
        inherit_fd,
        external,
        ..Opts::default()
    };
    let call = CriuRequest { kind: CriuCall::Restore as i32, opts: Some(opts), notify_success: None };
    let response = helper.call(&call, &mut |name, pid| match name {
        "setup-namespaces" => stage(Stage::Created(pid.unwrap_or(0) as u32)),
        "post-restore" => stage(Stage::Restored),
        "pre-resume" => stage(Stage::Resuming),
        _ => true,
    })?;
    // It ends on its own; waiting for that is not part of a wake.
    std::thread::spawn(move || drop(helper));
    if !response.success {
        let log = std::fs::read(request.images.join(RESTORE_LOG)).unwrap_or_default();
        return Err(CriuRestoreError::Refused { causes: causes(&String::from_utf8_lossy(&log), response.cr_errmsg) });
    }
    Ok(response.restore.map_or(0, |r| r.pid) as u32)
}
