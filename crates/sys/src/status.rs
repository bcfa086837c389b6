//! What the kernel says of a process or a thread: proc_pid_status(5), proc_pid_stat(5),
//! proc_pid_task(5).
//!
//! Owns the reading of these files for all crates, and judges nothing. An id may have been given to
//! another process between two readings: see [`crate::process`].

use crate::kernel_file;
use std::fs;
use std::io;

/// The status of a process, or of a thread, at the moment of the reading.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status(String);

impl Status {
    /// Reads the status of a process, or of a thread by its id.
    ///
    /// # Errors
    /// `NotFound` or ESRCH when it has ended.
    pub fn read(id: u32) -> io::Result<Status> {
        // A name may have any bytes in it.
        kernel_file::read(format!("/proc/{id}/status"))
            .map(|bytes| Status(String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// What stands behind `name`, which ends with a colon.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.0.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
    }

    /// The first number of a field, of memory KiB; none if it is not there.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.field(name)?.split_ascii_whitespace().next()?.parse().ok()
    }

    fn state(&self) -> Option<char> {
        self.field("State:")?.chars().next()
    }

    /// It runs, or would if a processor had time for it.
    pub fn is_runnable(&self) -> bool {
        self.state() == Some('R')
    }

    /// It runs, or waits in a way that no signal ends: for a disk, say.
    pub fn is_busy(&self) -> bool {
        matches!(self.state(), Some('R' | 'D'))
    }

    /// It waits for something, and a signal can end that.
    pub fn is_asleep(&self) -> bool {
        self.state() == Some('S')
    }

    /// A signal has stopped it: it is not about to do anything, wherever it stands.
    pub fn is_halted(&self) -> bool {
        self.state() == Some('T')
    }

    /// It stands still for a tracer, ptrace(2).
    pub fn is_traced(&self) -> bool {
        self.state() == Some('t')
    }

    /// It has ended, and its parent has yet to wait for it.
    pub fn is_zombie(&self) -> bool {
        self.state() == Some('Z')
    }

    /// Its id in the innermost pid namespace that it is in, and in how many namespaces it has one.
    pub fn inner_id(&self) -> Option<(u32, usize)> {
        let ids = self.field("NSpid:")?.split_ascii_whitespace();
        ids.clone().next_back()?.parse().ok().map(|id| (id, ids.count()))
    }

    /// The id of its process group in that namespace.
    pub fn inner_group(&self) -> Option<u32> {
        self.field("NSpgid:")?.split_ascii_whitespace().next_back()?.parse().ok()
    }

    /// The id of its process.
    pub fn process(&self) -> Option<u32> {
        self.field("Tgid:")?.parse().ok()
    }

    /// A mask of signals: signal N as bit N - 1.
    pub fn signals(&self, name: &str) -> u64 {
        self.field(name).and_then(|mask| u64::from_str_radix(mask, 16).ok()).unwrap_or(0)
    }

    /// How often it has left a processor to wait; that one was taken away from it does not count.
    pub fn waits(&self) -> Option<u64> {
        self.number("voluntary_ctxt_switches:")
    }

    /// How often it has left a processor.
    pub fn switches(&self) -> Option<u64> {
        Some(self.waits()? + self.number("nonvoluntary_ctxt_switches:")?)
    }
}

impl From<&str> for Status {
    fn from(text: &str) -> Status {
        Status(text.to_owned())
    }
}

/// The ids of a process's threads.
///
/// # Errors
/// `NotFound` when it has ended.
pub fn threads(pid: u32) -> io::Result<Vec<u32>> {
    let ids = fs::read_dir(format!("/proc/{pid}/task"))?;
    Ok(ids.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect())
}

/// Whether a process is the pid 1 of a pid namespace.
pub fn is_init(pid: u32) -> bool {
    Status::read(pid).is_ok_and(|status| status.inner_id().is_some_and(|(id, _)| id == 1))
}

/// Whether a thread is gone, is a leader that has called pthread_exit, or belongs to a process that
/// its parent has yet to wait for.
pub fn has_ended(pid: u32, tid: u32) -> bool {
    let Ok(stat) = kernel_file::read(format!("/proc/{pid}/task/{tid}/stat")) else { return true };
    String::from_utf8_lossy(&stat)
        .rsplit(')')
        .next()
        .is_some_and(|rest| rest.starts_with(" Z") || rest.starts_with(" X"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_told_by_their_whole_names() {
        let text = "Name:\tcat\nState:\tS (sleeping)\nTgid:\t40\nNSpid:\t40\t7\nVmSize:\t  1024 kB\n\
                    ShdPnd:\t0000000000002000\nvoluntary_ctxt_switches:\t7\nnonvoluntary_ctxt_switches:\t2\n";
        let status = Status::from(text);
        assert_eq!((status.process(), status.inner_id()), (Some(40), Some((7, 2))));
        assert_eq!((status.number("VmSize:"), status.number("VmLck:")), (Some(1024), None));
        assert_eq!((status.signals("ShdPnd:"), status.signals("SigPnd:")), (1 << 13, 0));
        assert_eq!((status.waits(), status.switches()), (Some(7), Some(9)));
        assert!(status.is_asleep() && !status.is_halted() && !status.is_runnable() && !status.is_zombie());
        assert!(Status::from(text.replace('S', "T").replace("Ttate", "State").as_str()).is_halted());
    }

    #[test]
    fn this_thread_runs_and_is_no_pid_1() {
        let own = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let status = Status::read(own).unwrap();
        assert!(status.is_runnable() && status.process() == Some(std::process::id()));
        assert!(threads(std::process::id()).unwrap().contains(&own));
        assert!(!has_ended(std::process::id(), own) && has_ended(u32::MAX, u32::MAX));
    }
}
