//! Talks to `kip-restore` while it rebuilds a tree from a [`Plan`].
//!
//! The caller starts the restorer with the socket that [`Rebuild::begin`] returns, as descriptor 3;
//! everything it needs is queued there already, and it begins at [`Rebuild::go_on`]. Each process
//! and thread tells its host pid as credentials, which the kernel translates; when all have closed
//! the socket all of them are ready or dead. Crash: nothing is kept; the caller kills what there
//! is.

use crate::plan::{AREA, AREA_END, PLAN, Plan};
use crate::resume::{FrozenTree, Thread, WaitingProcess, stop, syscall_offset};
use kip_clocks::Missed;
use kip_sys::timer::TimerSignal;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg, sockopt};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Words of `struct said`.
const SAID_WORDS: usize = 5;
/// Its kinds.
const FAILED: u64 = 1;
const TASK: u64 = 2;
const THREAD: u64 = 3;
const LAZY: u64 = 4;
const ALARM: u64 = 5;
const EXPIRED: u64 = 6;
/// A restorer that says nothing for so long hangs; and so much longer for every byte that it has to
/// read.
const PATIENCE: Duration = Duration::from_secs(10);
/// The slowest disk that is waited for, bytes per second.
const SLOWEST: u64 = 50_000_000;

/// A process that stops itself does so at once.
const STOPS_WITHIN: Duration = Duration::from_secs(5);

/// Names of the restorer's steps, `enum AT_START..` in restorer.c.
const STEPS: [&str; 31] = [
    "start",
    "receive",
    "read the plan",
    "open a file",
    "find a file as it was",
    "make shared memory",
    "fork",
    "enter its process group",
    "place a descriptor",
    "enter its directory",
    "map memory",
    "read pages",
    "protect memory",
    "move the vdso",
    "describe its memory",
    "set a signal action",
    "set a limit",
    "set a timer",
    "start a thread",
    "set a thread's attribute",
    "take its credentials",
    "install its filter",
    "set a file lock",
    "watch a descriptor",
    "execute kip-init",
    "have its memory watched",
    "open a pidfd",
    "give a session its terminal",
    "make System V IPC",
    "make a ring of asynchronous I/O",
    "take its root directory",
];

/// The tree could not be rebuilt.
#[derive(Debug, thiserror::Error)]
pub enum RebuildError {
    /// The socket, or the restorer's silence.
    #[error("no word from the restorer")]
    Socket(#[source] io::Error),
    /// The restorer failed.
    #[error("the restorer could not {step} (process {process}, {place:#x})")]
    Failed {
        /// What it did.
        step: &'static str,
        /// Index of the process in the plan; -1 before there is any.
        process: i64,
        /// Address, descriptor or place in the plan.
        place: u64,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A process or thread is missing.
    #[error("process {pid} (as numbered inside) did not come up whole")]
    Missing {
        /// Which.
        pid: u32,
    },
    /// ptrace(2).
    #[error("the rebuilt processes cannot be given their registers")]
    Trace(#[source] io::Error),
    /// The plan's file.
    #[error("the plan's file cannot be opened")]
    Plan(#[source] io::Error),
}

/// What the restorer says, the host pid that it says it of, and what it gives.
struct Said {
    words: [u64; SAID_WORDS],
    pid: Option<u32>,
    fd: Option<OwnedFd>,
}

/// A rebuild under way.
#[derive(Debug)]
pub struct Rebuild<'a> {
    plan: &'a Plan,
    socket: OwnedFd,
    /// Host ids by (index of the process, number inside).
    found: BTreeMap<(u64, u32), u32>,
    watched: BTreeMap<u64, OwnedFd>,
    later: Vec<Missed>,
}

/// A process, a part of whose memory is to come.
#[derive(Debug)]
pub struct Unfilled {
    /// Its host pid.
    pub host: u32,
    /// Its number inside.
    pub inside: u32,
    /// Pages that can come: see [`crate::plan::PlannedTask::can_come`].
    pub can_come: u64,
    /// A userfaultfd of its memory.
    pub uffd: OwnedFd,
}

/// `struct packet` with so many descriptors; none are in the last one.
fn packet(plan: &Plan, descriptors: usize, came: Option<Came>) -> Vec<u8> {
    let nanos = |time: Duration| time.as_nanos() as u64;
    let (waited, taken_within) = came.map_or((0, 0), |came| (nanos(came.ago), nanos(came.taken_within)));
    let more = u64::from(descriptors > 0);
    let words = [plan.base, plan.at, plan.program.len() as u64, descriptors as u64, more, waited, taken_within];
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// What a restorer says of a periodic timer of that process, `WORD_ALARM` and `WORD_EXPIRED` in
/// plan.h.
fn read_missed(pid: u32, words: &[u64; SAID_WORDS]) -> Missed {
    let [kind, _, which, value, to] = *words;
    if kind == ALARM {
        return Missed::Interval { pid };
    }
    let (timer, signal) = (which as i32, (which >> 32) as i32);
    let thread = Some(to as u32).filter(|thread| *thread != 0);
    Missed::Posix { pid, thread, signal: TimerSignal { signal, timer, overrun: (to >> 32) as i32, value } }
}

/// What a program is woken for came by the network.
#[derive(Debug, Clone, Copy)]
pub struct Came {
    /// So long ago.
    pub ago: Duration,
    /// The program has taken it so long after it goes on.
    pub taken_within: Duration,
}

impl<'a> Rebuild<'a> {
    /// Queues the plan and the descriptors that are received after it, in the plan's order; returns
    /// the restorer's end. `bytes` is the size of the snapshot.
    pub fn begin(
        plan: &'a Plan,
        images: &Path,
        received: &[BorrowedFd<'_>],
        bytes: u64,
        came: Option<Came>,
    ) -> Result<(Rebuild<'a>, OwnedFd), RebuildError> {
        let file = File::open(images.join(PLAN)).map_err(RebuildError::Plan)?;
        let (socket, theirs) = kip_sys::fdpass::seqpacket_pair().map_err(RebuildError::Socket)?;
        let patience = PATIENCE + Duration::from_secs(bytes / SLOWEST);
        let set = sockopt::set_socket_passcred(&socket, true)
            .and_then(|()| sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(patience)));
        set.map_err(|e| RebuildError::Socket(e.into()))?;
        let all: Vec<BorrowedFd<'_>> = std::iter::once(file.as_fd()).chain(received.iter().copied()).collect();
        for chunk in all.chunks(kip_sys::fdpass::MAX_FDS) {
            let bytes = packet(plan, chunk.len(), came);
            kip_sys::fdpass::send(socket.as_fd(), &bytes, chunk).map_err(RebuildError::Socket)?;
        }
        Ok((Rebuild { plan, socket, found: BTreeMap::new(), watched: BTreeMap::new(), later: Vec::new() }, theirs))
    }

    /// Lets the restorer begin, which waits for that once it has everything: until here it cannot
    /// fail, and end.
    pub fn go_on(&self) {
        let bytes = packet(self.plan, 0, None);
        // A restorer that is gone is missed by [`Rebuild::wait`].
        let _ = kip_sys::fdpass::send(self.socket.as_fd(), &bytes, &[]);
    }

    /// Waits until every process and thread stands ready. The restorer's end must be closed here.
    /// `unfilled` is called as soon as all processes that lack memory have their mappings; they are
    /// filled with the rest meanwhile.
    ///
    /// # Errors
    /// See [`RebuildError`].
    pub fn wait(&mut self, mut unfilled: impl FnMut(Vec<Unfilled>)) -> Result<(), RebuildError> {
        let mut lacking = self.plan.tasks.values().filter(|task| task.can_come > 0).count();
        while let Some(Said { words, pid, fd }) = self.next()? {
            match (words[0], pid) {
                (LAZY, _) if fd.is_some() => {
                    self.watched.extend(fd.map(|fd| (words[1], fd)));
                    lacking = lacking.saturating_sub(1);
                    if lacking == 0 {
                        unfilled(self.unfilled()?);
                    }
                }
                (TASK, Some(host)) => {
                    let inside = words[2] as u32;
                    self.found.insert((words[1], inside), host);
                }
                (THREAD, Some(host)) => {
                    self.found.insert((words[1], words[2] as u32), host);
                }
                (ALARM | EXPIRED, _) => {
                    let task = self.plan.tasks.get(&words[1]);
                    let pid = task.ok_or(RebuildError::Socket(io::ErrorKind::InvalidData.into()))?.pid;
                    self.later.push(read_missed(pid, &words));
                }
                (FAILED, _) => {
                    return Err(RebuildError::Failed {
                        step: STEPS.get((words[2] as usize).wrapping_sub(1)).unwrap_or(&"go on"),
                        process: words[1] as i64,
                        place: words[4],
                        source: io::Error::from_raw_os_error(words[3] as i32),
                    });
                }
                _ => return Err(RebuildError::Socket(io::ErrorKind::InvalidData.into())),
            }
        }
        if lacking > 0 {
            return Err(RebuildError::Socket(io::ErrorKind::UnexpectedEof.into()));
        }
        Ok(())
    }

    /// Signals of periodic timers that came due after the packet that the program is woken for:
    /// they are to be sent when the program has had time to take that.
    pub fn later(&self) -> &[Missed] {
        &self.later
    }

    /// The processes that lack memory.
    fn unfilled(&mut self) -> Result<Vec<Unfilled>, RebuildError> {
        let mut all = Vec::new();
        for (index, task) in self.plan.tasks.iter().filter(|(_, task)| task.can_come > 0) {
            let missing = || RebuildError::Missing { pid: task.pid };
            let host = *self.found.get(&(*index, task.pid)).ok_or_else(missing)?;
            let uffd = self.watched.remove(index).ok_or_else(missing)?;
            all.push(Unfilled { host, inside: task.pid, can_come: task.can_come, uffd });
        }
        Ok(all)
    }

    /// One word; None at the end.
    fn next(&self) -> Result<Option<Said>, RebuildError> {
        let failed = |e: rustix::io::Errno| RebuildError::Socket(e.into());
        let mut bytes = [0; SAID_WORDS * 8];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1), ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let message = rustix::io::retry_on_intr(|| {
            recvmsg(&self.socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)
        })
        .map_err(failed)?;
        if message.bytes == 0 {
            return Ok(None);
        }
        if message.bytes != bytes.len() || message.flags.contains(ReturnFlags::TRUNC) {
            return Err(RebuildError::Socket(io::ErrorKind::InvalidData.into()));
        }
        let (mut pid, mut fd) = (None, None);
        for message in control.drain() {
            match message {
                RecvAncillaryMessage::ScmCredentials(c) => pid = Some(c.pid.as_raw_nonzero().get() as u32),
                RecvAncillaryMessage::ScmRights(mut fds) => fd = fds.next(),
                _ => {}
            }
        }
        let mut words = [0; SAID_WORDS];
        for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(chunk.try_into().expect("8 bytes"));
        }
        Ok(Some(Said { words, pid, fd }))
    }

    /// Waits until a process that stops itself has done so. From there a trace takes it and lets it
    /// go without starting it.
    fn until_stopped(&self, pid: u32) -> Result<(), RebuildError> {
        let is_stopped = |status: String| status.contains("\nState:\tT");
        let until = Instant::now() + STOPS_WITHIN;
        while !fs::read_to_string(format!("/proc/{pid}/status")).is_ok_and(is_stopped) {
            if Instant::now() > until {
                return Err(RebuildError::Trace(io::ErrorKind::TimedOut.into()));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    /// Takes every thread by ptrace, unmaps the restorer and gives each its registers. They run at
    /// [`FrozenTree::go`], to be called by the same thread. `init` is the host pid of pid 1, which
    /// keeps what it has.
    pub fn stop(&self, init: u32) -> Result<FrozenTree, RebuildError> {
        static OFFSET: OnceLock<Option<u64>> = OnceLock::new();
        let offset =
            OFFSET.get_or_init(syscall_offset).ok_or_else(|| RebuildError::Trace(io::ErrorKind::Unsupported.into()))?;
        let init = Thread { tid: init, registers: None, filters: &[] };
        let mut processes = vec![WaitingProcess { threads: vec![init], unmap: (0, 0), syscall_at: 0 }];
        for (index, task) in &self.plan.tasks {
            let mut threads = Vec::new();
            for thread in &task.threads {
                let missing = RebuildError::Missing { pid: thread.id };
                let tid = *self.found.get(&(*index, thread.id)).ok_or(missing)?;
                threads.push(Thread { tid, registers: Some(&thread.registers), filters: &thread.filters });
            }
            if task.stopped {
                self.until_stopped(threads[0].tid)?;
            }
            processes.push(WaitingProcess { threads, unmap: (AREA, AREA_END - AREA), syscall_at: task.vdso + offset });
        }
        stop(&processes).map_err(RebuildError::Trace)
    }
}
