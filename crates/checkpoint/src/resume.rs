//! The last step of a restore of our own: gives rebuilt threads their real registers, all at once.
//!
//! Before it, a restorer has made the processes, and each of their threads waits in a futex inside
//! the restorer's own mappings, with every signal blocked; or CRIU has, and they wait in pause(2),
//! with nothing to unmap ([`crate::hold`]). [`stop`] takes them by ptrace, in this order:
//!
//! 1. every thread of every process is seized and interrupted, then all are waited for: from here
//!    nothing runs;
//! 2. per process, each thread is made to set the filters of its program's own, seccomp(2), and the
//!    first one to call munmap(2) over the restorer's mappings, through a `syscall` instruction in
//!    its vdso, the one piece of code that is certainly there and not being unmapped;
//! 3. every thread gets its floating-point registers, its general registers and its signal mask.
//!
//! [`FrozenTree::go`] then lets them run. Owns no memory image, no descriptors and no decision
//! when; reads a process's memory only for the instruction on which a thread stands. The calls of
//! step 2 pass the sandbox's filter, which the restorer has already set; those of a program do not
//! hear of them, since filters are suspended until [`FrozenTree::outlive`] where a program has any.
//!
//! ```text
//! waiting in the restorer --stop()--> Stopped --go()--> running
//!             |                          |
//!             +--error------> killed <---+-- drop, or the tracer thread's end
//! ```
//!
//! A trace belongs to a thread. The thread that calls [`stop`] must call [`FrozenTree::go`], and if
//! it ends before (a crash of the daemon is one way), the kernel kills every process: no half-made
//! tree ever runs, and the images, which nothing here touches, are as good as before. After
//! [`FrozenTree::outlive`], when the caller begins to give up what the tree takes over, the same
//! crash lets all of them run. No other thread of the daemon may wait(2) for these processes
//! meanwhile.

use crate::plan::OwnFilter;
use crate::registers::Registers;
use kip_sys::process::{Signal, pidfd_open, pidfd_send_signal};
use kip_sys::restart;
use kip_sys::trace::{self, Stop};
use rustix::io::Errno;
use std::fs;
use std::io;
use std::marker::PhantomData;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

/// A thread that waits in the restorer.
#[derive(Debug, Clone, Copy)]
pub struct Thread<'a> {
    /// Its id as we see it.
    pub tid: u32,
    /// What it is to have; none for one that keeps what it has, pid 1.
    pub registers: Option<&'a Registers>,
    /// The filters that it is made to set.
    pub filters: &'a [OwnFilter],
}

/// A process whose threads all wait in the restorer.
#[derive(Debug, Clone)]
pub struct WaitingProcess<'a> {
    /// All of them, the leader first.
    pub threads: Vec<Thread<'a>>,
    /// Address and length in bytes of the restorer's mappings in it, whole pages; length 0: nothing
    /// to unmap.
    pub unmap: (u64, u64),
    /// Address of a `syscall` instruction in its vdso: where the vdso lies in it, plus
    /// [`syscall_offset`].
    pub syscall_at: u64,
}

/// How long dropped processes may take to die before we leave them to the tracer thread's end.
const LONGEST_DEATH: Duration = Duration::from_secs(5);

/// Processes whose threads all stand still, complete. They are killed unless [`FrozenTree::go`] is
/// called.
#[derive(Debug)]
pub struct FrozenTree {
    /// Thread ids by process, the leader first; none any more once they have been let go.
    processes: Vec<Vec<u32>>,
    /// A trace belongs to this thread: not Send.
    _here: PhantomData<*const ()>,
}

/// An error with its thread and what was done to it.
fn at<'a>(tid: u32, what: &'a str) -> impl Fn(io::Error) -> io::Error + 'a {
    move |e| io::Error::new(e.kind(), format!("thread {tid}: {what}: {e}"))
}

fn strange(tid: u32, what: &str, stop: Stop) -> io::Error {
    at(tid, what)(io::Error::other(format!("it stopped for {stop:?} instead")))
}

/// Stops the threads and gives them what they are to have (see the module). On an error every
/// process is killed.
///
/// # Errors
/// The kernel's, with thread and step; InvalidInput for a process without threads or registers that
/// are not 27.
pub fn stop(processes: &[WaitingProcess<'_>]) -> io::Result<FrozenTree> {
    let ids = processes.iter().map(|p| p.threads.iter().map(|t| t.tid).collect()).collect();
    let stopped = FrozenTree { processes: ids, _here: PhantomData };
    if processes.iter().any(|p| p.threads.is_empty()) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a process without threads"));
    }
    let filters = processes.iter().flat_map(|p| &p.threads).any(|thread| !thread.filters.is_empty());
    let seize = if filters { trace::seize_unfiltered } else { trace::seize };
    for tid in stopped.threads() {
        seize(tid).map_err(at(tid, "seize"))?;
        trace::interrupt(tid).map_err(at(tid, "interrupt"))?;
    }
    // Those first of whose end others are told only after it: pid 1 and the leaders are last.
    for tid in stopped.threads().collect::<Vec<_>>().into_iter().rev() {
        until_still(tid)?;
    }
    for process in processes {
        for thread in &process.threads {
            set_filters(thread, process.syscall_at)?;
        }
    }
    unmap(processes)?;
    processes.iter().flat_map(|process| &process.threads).try_for_each(set)?;
    Ok(stopped)
}

impl FrozenTree {
    fn threads(&self) -> impl Iterator<Item = u32> + '_ {
        self.processes.iter().flatten().copied()
    }

    /// From here on a crash of ours lets the tree run: a proc that is found running under a
    /// recorded wake has been woken. Pid 1 is the last that is let outlive us: if a crash before
    /// that kills it, the kernel ends all the others with it.
    ///
    /// # Errors
    /// The kernel's, with the thread.
    pub fn outlive(&self) -> io::Result<()> {
        let threads: Vec<u32> = self.threads().collect();
        threads.into_iter().rev().try_for_each(|tid| trace::outlive(tid).map_err(at(tid, "let it outlive us")))
    }

    /// Lets every thread run, the later processes first, so that a parent finds its children
    /// running. A thread that stands on a call makes it, unless the handler of a signal runs first:
    /// [`restart`].
    ///
    /// # Errors
    /// The first that was found; the other threads were let go all the same. That a thread has
    /// ended is none: one that was let go before it may have ended their process.
    pub fn go(mut self) -> io::Result<()> {
        let mut result = Ok(());
        let threads: Vec<u32> = std::mem::take(&mut self.processes).into_iter().rev().flatten().collect();
        for tid in &threads {
            let _ = restart::leave_to_kernel(*tid, false);
        }
        for tid in threads {
            if let Err(e) = trace::detach(tid) {
                // If it has died, its parent shall learn of it.
                let _ = trace::has_ended(tid);
                if Errno::from_io_error(&e) != Some(Errno::SRCH) {
                    result = result.and(Err(at(tid, "detach")(e)));
                }
            }
        }
        result
    }
}

impl Drop for FrozenTree {
    fn drop(&mut self) {
        for leader in self.processes.iter().filter_map(|threads| threads.first()) {
            // One that is gone already needs no kill. Its id is no other's: what we trace keeps it
            // until we wait.
            if let Ok(pidfd) = pidfd_open(*leader) {
                let _ = pidfd_send_signal(pidfd.as_fd(), Signal::KILL);
            }
        }
        // Their parents see them end only once we have; in no fixed order, since pid 1 ends last of
        // its namespace and a leader last of its threads.
        let mut left: Vec<u32> = self.threads().collect();
        let until = Instant::now() + LONGEST_DEATH;
        loop {
            left.retain(|tid| !trace::has_ended(*tid).unwrap_or(true));
            if left.is_empty() || Instant::now() > until {
                break;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        if !left.is_empty() {
            tracing::error!(threads = ?left, "threads do not die");
        }
    }
}

/// Waits until an interrupted thread stands still outside of any call. Only SIGSTOP can come in
/// between; passed on, it stops the thread like the interruption, and the whole process stays
/// stopped when it is let go.
fn until_still(tid: u32) -> io::Result<()> {
    loop {
        match trace::wait_stopped(tid).map_err(at(tid, "interrupt"))? {
            Stop::Event => return Ok(()),
            Stop::Signal(signal) if signal == Signal::STOP.as_raw() => {
                trace::to_call(tid, signal).map_err(at(tid, "pass SIGSTOP on"))?;
            }
            other => return Err(strange(tid, "interrupt", other)),
        }
    }
}

/// Waits until a thread that [`trace::to_call`] let run has entered or left the call `what`.
fn until_call(tid: u32, what: &str) -> io::Result<()> {
    loop {
        let signal = match trace::wait_stopped(tid).map_err(at(tid, what))? {
            Stop::Call => return Ok(()),
            Stop::Event => 0,
            Stop::Signal(stop) if stop == Signal::STOP.as_raw() => stop,
            other => return Err(strange(tid, what, other)),
        };
        trace::to_call(tid, signal).map_err(at(tid, what))?;
    }
}

/// Indices into the general registers.
const RAX: usize = 10;
const RDX: usize = 12;
const RSI: usize = 13;
const RDI: usize = 14;
const ORIG_RAX: usize = 15;
const RIP: usize = 16;

/// A system call that a thread is made to make, through the instruction at `syscall_at`.
struct Call {
    tid: u32,
    syscall_at: u64,
    what: &'static str,
    number: u64,
    arguments: [u64; 3],
}

impl Call {
    fn begin(&self) -> io::Result<()> {
        let mut registers = trace::get_general(self.tid)?;
        registers[RIP] = self.syscall_at;
        registers[RAX] = self.number;
        [registers[RDI], registers[RSI], registers[RDX]] = self.arguments;
        // The futex that it waited in shall not begin again.
        registers[ORIG_RAX] = u64::MAX;
        trace::set_general(self.tid, &registers)?;
        trace::to_call(self.tid, 0)
    }

    fn check(&self) -> io::Result<()> {
        let after = trace::get_general(self.tid)?;
        if after[RIP] != self.syscall_at + 2 || after[ORIG_RAX] != self.number {
            return Err(io::Error::other(format!("there is no syscall instruction at {:#x}", self.syscall_at)));
        }
        match after[RAX] as i64 {
            0 => Ok(()),
            error if error < 0 => Err(io::Error::from_raw_os_error(-error as i32)),
            other => Err(io::Error::other(format!("it returned {other}"))),
        }
    }
}

/// Has threads make a call each, and checks that they did. They make them at the same time, for to
/// switch to one and back takes longer than a call.
///
/// Each runs to the call's entry and to its end rather than for one single step: a step ends with a
/// forced SIGTRAP, and because the restorer blocks every signal, the kernel would first set the
/// program's own SIGTRAP handler to the default.
fn make(calls: &[Call]) -> io::Result<()> {
    for call in calls {
        call.begin().map_err(at(call.tid, call.what))?;
    }
    for call in calls {
        until_call(call.tid, call.what)?;
        trace::to_call(call.tid, 0).map_err(at(call.tid, call.what))?;
    }
    for call in calls {
        until_call(call.tid, call.what)?;
        call.check().map_err(at(call.tid, call.what))?;
    }
    Ok(())
}

/// Makes the first thread of each process give the restorer's mappings up.
fn unmap(processes: &[WaitingProcess<'_>]) -> io::Result<()> {
    let with_mappings = processes.iter().filter(|process| process.unmap.1 > 0);
    let munmap = |process: &WaitingProcess<'_>| Call {
        tid: process.threads[0].tid,
        syscall_at: process.syscall_at,
        what: "munmap",
        number: 11,
        arguments: [process.unmap.0, process.unmap.1, 0],
    };
    make(&with_mappings.map(munmap).collect::<Vec<_>>())
}

fn set_filters(thread: &Thread<'_>, syscall_at: u64) -> io::Result<()> {
    const SET_MODE_FILTER: u64 = 1;
    thread.filters.iter().try_for_each(|filter| {
        let arguments = [SET_MODE_FILTER, filter.flags, filter.program];
        make(&[Call { tid: thread.tid, syscall_at, what: "seccomp", number: 317, arguments }])
    })
}

fn set(thread: &Thread<'_>) -> io::Result<()> {
    let (tid, Some(registers)) = (thread.tid, thread.registers) else { return Ok(()) };
    let Ok(general) = registers.general.as_slice().try_into() else {
        return Err(at(tid, "set registers")(io::Error::from(io::ErrorKind::InvalidInput)));
    };
    trace::set_floating(tid, &registers.floating).map_err(at(tid, "set floating-point registers"))?;
    trace::set_general(tid, general).map_err(at(tid, "set registers"))?;
    trace::set_signal_mask(tid, registers.blocked).map_err(at(tid, "set signal mask"))
}

/// Offset in bytes of a `syscall` instruction in this kernel's vdso, found in our own; none if
/// there is none. It is the same for every 64-bit process until the machine is started again.
pub fn syscall_offset() -> Option<u64> {
    const SYSCALL: [u8; 2] = [0x0f, 0x05];
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let range = maps.lines().find(|line| line.ends_with("[vdso]"))?.split(' ').next()?;
    let (start, end) = range.split_once('-')?;
    let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    let mut image = vec![0u8; usize::try_from(end - start).ok()?];
    fs::File::open("/proc/self/mem").ok()?.read_exact_at(&mut image, start).ok()?;
    // The whole image may be executed, and a processor decodes from where it is sent: these two
    // bytes are the instruction even if the compiler meant them as a part of another.
    image.windows(2).position(|pair| pair == SYSCALL).map(|at| at as u64)
}

#[cfg(test)]
#[path = "resume_tests.rs"]
mod tests;
