//! Limits that processes have used up, lifted while CRIU makes calls in them, and what the images
//! say of them; and those of a proc, which are for the program, lifted while Kip does its own work
//! in its cgroup.

use crate::host::Proc;
use kip_checkpoint::set_limits;
use kip_clocks::tree::Tree;
use kip_criu_images::{CheckpointImageError, Images};
use kip_sandbox::cgroup::CgroupError;
use kip_stop::limits::Lifted;
use kip_types::{Limits, chain};
use std::time::{Duration, Instant};

/// Processes that Kip needs besides those of the program.
const SPARE_PIDS: usize = 64;
/// More than any proc has; the kernel's own limit is 4,194,304.
const MANY_PIDS: u32 = 1 << 20;
/// What Kip had in a cgroup is gone this long after it has ended.
const GONE_WITHIN: Duration = Duration::from_millis(500);

/// A proc's own limits, lifted until this is dropped: the program had filled them maybe to the last
/// process or page, and a share of a core would make Kip's work as slow as the program.
pub struct LiftedGroup<'a> {
    proc: Option<&'a Proc>,
    has_copies: bool,
}

impl<'a> LiftedGroup<'a> {
    /// For a restore of so many threads.
    ///
    /// # Errors
    /// [`CgroupError`].
    pub fn for_threads(proc: &'a Proc, threads: usize) -> Result<LiftedGroup<'a>, CgroupError> {
        let limits = &proc.spec().limits;
        let tight = threads.saturating_add(SPARE_PIDS) > limits.pids as usize;
        if limits.memory_bytes.is_none() && limits.cpus.is_none() && !tight {
            return Ok(LiftedGroup { proc: None, has_copies: false });
        }
        proc.cgroup.set_limits(&Limits { pids: MANY_PIDS, ..Limits::default() })?;
        Ok(LiftedGroup { proc: Some(proc), has_copies: false })
    }

    /// Puts all of them back but for what copies of so many processes take: themselves, and the
    /// memory that the program holds, once more.
    ///
    /// # Errors
    /// [`CgroupError`].
    pub fn for_copies(&mut self, copies: usize) -> Result<(), CgroupError> {
        let Some(proc) = self.proc else { return Ok(()) };
        self.has_copies = true;
        let limits = &proc.spec().limits;
        let memory_bytes = limits.memory_bytes.map(|bytes| bytes.saturating_add(proc.cgroup.held_bytes()));
        let pids = limits.pids.saturating_add(copies as u32);
        proc.cgroup.set_limits(&Limits { memory_bytes, pids, ..limits.clone() })
    }
}

impl Drop for LiftedGroup<'_> {
    fn drop(&mut self) {
        let Some(proc) = self.proc else { return };
        let limits = proc.spec().limits.clone();
        let (began, used) = (Instant::now(), || proc.cgroup.usage().map_or(0, |usage| usage.memory_bytes));
        // A limit below what is used ends the program (memory.max), or is refused: what copies had
        // is given back in a moment.
        while self.has_copies && limits.memory_bytes.is_some_and(|most| used() > most) && began.elapsed() < GONE_WITHIN
        {
            std::thread::sleep(Duration::from_millis(2));
        }
        let mut set = proc.cgroup.set_limits(&limits);
        if set.is_err() {
            // The program has more by now than its limit lets it: it gets no more.
            let memory_bytes = limits.memory_bytes.map(|most| most.max(used()));
            set = proc.cgroup.set_limits(&Limits { memory_bytes, ..limits });
        }
        if let Err(error) = set {
            tracing::warn!(proc = %proc.name, error = chain(&error), "limits could not be set again");
        }
    }
}

/// Lifts what the processes of a tree have nearly used up. What cannot be lifted CRIU may still do
/// without.
pub fn lift(tree: &Tree) -> Vec<(u32, Lifted)> {
    let lift = |pid: &u32| match Lifted::of(*pid, None) {
        Ok(lifted) => Some((*pid, lifted?)),
        Err(error) => {
            tracing::debug!(pid, %error, "limits stay as they are");
            None
        }
    };
    tree.pids.iter().filter_map(lift).collect()
}

/// Puts what the limits were into the images.
pub fn note(lifted: &[(u32, Lifted)], tree: &Tree, images: &mut Images) -> Result<(), CheckpointImageError> {
    for (pid, lifted) in lifted {
        let Some((inside, _)) = tree.threads.iter().find(|(_, tid)| *tid == pid) else { continue };
        let number = |limit: Option<u64>| limit.unwrap_or(u64::MAX);
        let before: Vec<_> = lifted.before().map(|(n, l)| (n, number(l.current), number(l.maximum))).collect();
        set_limits(images, *inside, &before)?;
    }
    Ok(())
}

/// What keeps CRIU from making calls in a process of a tree, if a dump failed for that.
pub fn used_up(tree: &Tree) -> Option<String> {
    tree.pids.iter().find_map(|pid| kip_stop::limits::used_up(*pid))
}
