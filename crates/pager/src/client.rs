//! The daemon's side of `kip-pager`. Each call makes a connection of its own, so that a long one
//! keeps no other call waiting.

mod inspect;

pub use inspect::PeekedPage;

use crate::protocol::{
    Hibernated, MAX_MESSAGE, MemoryStatus, Order, PROTOCOL, PagerAnswer, PagerEvent, PagerRequest, PagerStatus,
    Purpose, Rebuilt, Woken,
};
use crate::slots;
use kip_keeper::resident::{self, RunError};
use kip_keeper::run_directory::{RunDirectory, RunDirectoryError};
use kip_sys::fdpass;
use kip_sys::process::{pidfd_open, wait_for_end};
use parking_lot::Mutex;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The name of its files.
pub const KIND: &str = "pager";
/// Most descriptors that the pager watches for a proc.
pub const MOST_WATCHED: usize = 200;
/// How long one answer may take: much memory on a slow disk.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
/// It has ended its work when it answers; what is left is the kernel's.
const ENDS_WITHIN: Duration = Duration::from_secs(10);

/// Between two tries where the pager has no room for a request.
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// Why the pager did not do it.
#[derive(Debug, thiserror::Error)]
pub enum PagerError {
    /// The run directory.
    #[error(transparent)]
    Place(#[from] RunDirectoryError),
    /// It does not start.
    #[error(transparent)]
    Run(#[from] RunError),
    /// It has died, or does not answer.
    #[error("the pager is gone")]
    Gone(#[source] io::Error),
    /// It is of another kind.
    #[error("the pager of pid {pid} speaks protocol {theirs}, this program {PROTOCOL}: the next `kip up` replaces it")]
    Protocol {
        /// Its process id.
        pid: u32,
        /// Its protocol.
        theirs: u32,
    },
    /// It has memory of procs out in a form that this program does not know.
    #[error(
        "the pager of pid {pid} keeps memory of procs in a form that this version cannot read ({}): put the programs in place that were there \
         before, then `kip down --park`, then these again; nothing is changed",
        map.display()
    )]
    Unreadable {
        /// Its process id.
        pid: u32,
        /// The slot map.
        map: PathBuf,
    },
    /// It was to end, and has not.
    #[error("the pager of pid {pid} speaks another protocol and does not end: end it by hand, then `kip up` again")]
    DoesNotEnd {
        /// Its process id.
        pid: u32,
    },
    /// It refused.
    #[error("{0}")]
    Refused(String),
}

/// The way to the pager of a data directory.
#[derive(Debug)]
pub struct Pager {
    binary: PathBuf,
    dir: PathBuf,
    place: RunDirectory,
    rousing: Mutex<Option<OwnedFd>>,
    /// The process that answered last; 0 before that.
    answered: AtomicU32,
}

impl Pager {
    /// The pager of the data directory `dir`, whose program is `binary`. Starts nothing.
    ///
    /// # Errors
    /// The run directory's.
    pub fn new(binary: &Path, dir: &Path) -> Result<Pager, PagerError> {
        Ok(Pager {
            binary: binary.into(),
            dir: dir.into(),
            place: RunDirectory::open(dir, KIND)?,
            rousing: Mutex::default(),
            answered: AtomicU32::new(0),
        })
    }

    /// Makes sure that one runs. Returns its process, as a descriptor that is readable once it has
    /// ended, and whether it was started now.
    ///
    /// # Errors
    /// See [`PagerError`].
    pub fn ensure(&self) -> Result<(PagerStatus, OwnedFd, bool), PagerError> {
        let mut started = false;
        loop {
            match self.call(&PagerRequest::Ping) {
                Ok(PagerAnswer::Status(status)) if status.protocol != PROTOCOL => {
                    return Err(PagerError::Protocol { pid: status.pid, theirs: status.protocol });
                }
                Ok(PagerAnswer::Status(status)) => {
                    return Ok((status, pidfd_open(status.pid).map_err(PagerError::Gone)?, started));
                }
                Ok(other) => return Err(unexpected(&other)),
                Err(PagerError::Gone(_)) if !started => {
                    resident::run(&self.binary, &self.dir)?;
                    started = true;
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Ends a pager that speaks another protocol, as if it had died, but in the middle of nothing:
    /// what it has out is taken up by the next from where it lies, and a proc that was held runs
    /// on. Returns the ended pager's process id; none if there is no such pager. `any` of them:
    /// also one that speaks this protocol. It needs of the other only what no protocol may change:
    /// see [`crate::protocol`].
    ///
    /// # Errors
    /// See [`PagerError`]; the other is as it was.
    pub fn supersede(&self, any: bool) -> Result<Option<u32>, PagerError> {
        let PagerStatus { pid, protocol } = match self.call(&PagerRequest::Ping) {
            Ok(PagerAnswer::Status(status)) => status,
            Ok(other) => return Err(unexpected(&other)),
            Err(PagerError::Gone(_)) => return Ok(None),
            Err(e) => return Err(e),
        };
        if protocol == PROTOCOL && !any {
            return Ok(None);
        }
        if let Some(map) = slots::unreadable(&self.dir.join("procs")) {
            return Err(PagerError::Unreadable { pid, map });
        }
        let pidfd = pidfd_open(pid).map_err(PagerError::Gone)?;
        self.quit()?;
        match wait_for_end(pidfd.as_fd(), Some(ENDS_WITHIN)) {
            Ok(true) => Ok(Some(pid)),
            _ => Err(PagerError::DoesNotEnd { pid }),
        }
    }

    /// The process that serves.
    ///
    /// # Errors
    /// See [`PagerError`].
    pub fn pid(&self) -> Result<u32, PagerError> {
        match self.call(&PagerRequest::Ping)? {
            PagerAnswer::Status(status) => Ok(status.pid),
            other => Err(unexpected(&other)),
        }
    }

    /// The process that serves, without a question to it if it is the one that answered last: it
    /// may be busy, or stopped.
    ///
    /// # Errors
    /// See [`PagerError`].
    pub fn known_pid(&self) -> Result<u32, PagerError> {
        let known = self.answered.load(Ordering::Relaxed);
        let comm = std::fs::read_to_string(format!("/proc/{known}/comm")).unwrap_or_default();
        let name = self.binary.file_name().unwrap_or_default().as_encoded_bytes();
        // The kernel keeps 15 bytes of it.
        let is_it = known != 0 && comm.trim_end().as_bytes() == &name[..name.len().min(15)];
        if is_it { Ok(known) } else { self.pid() }
    }

    fn ask(&self, request: &PagerRequest, fds: &[BorrowedFd<'_>]) -> io::Result<(OwnedFd, PagerAnswer)> {
        let socket = self.place.connect(ANSWER_TIMEOUT)?;
        let bytes = serde_json::to_vec(request).expect("requests are plain data");
        fdpass::send(socket.as_fd(), &bytes, fds)?;
        let (bytes, _) = fdpass::recv(socket.as_fd(), MAX_MESSAGE)?;
        let answer = serde_json::from_slice(&bytes)?;
        Ok((socket, answer))
    }

    fn call(&self, request: &PagerRequest) -> Result<PagerAnswer, PagerError> {
        self.call_with(request, &[])
    }

    fn call_with(&self, request: &PagerRequest, fds: &[BorrowedFd<'_>]) -> Result<PagerAnswer, PagerError> {
        let until = Instant::now() + ANSWER_TIMEOUT;
        loop {
            match self.ask(request, fds).map_err(PagerError::Gone)?.1 {
                PagerAnswer::Refused { message } => return Err(PagerError::Refused(message)),
                // A program that stays awake loses nothing; one that is to wake waits.
                PagerAnswer::Busy { message } if matches!(request, PagerRequest::Hibernate(_)) => {
                    return Err(PagerError::Refused(message));
                }
                PagerAnswer::Busy { message } if Instant::now() >= until => {
                    return Err(PagerError::Gone(io::Error::new(io::ErrorKind::TimedOut, message)));
                }
                PagerAnswer::Busy { .. } => std::thread::sleep(BUSY_PAUSE),
                answer => {
                    if let PagerAnswer::Status(status) = &answer {
                        self.answered.store(status.pid, Ordering::Relaxed);
                    }
                    return Ok(answer);
                }
            }
        }
    }

    fn done(&self, request: &PagerRequest) -> Result<(), PagerError> {
        match self.call(request)? {
            PagerAnswer::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// How many bytes all working sets may take in memory.
    ///
    /// # Errors
    /// See [`PagerError`].
    pub fn budget(&self, bytes: usize) -> Result<(), PagerError> {
        self.done(&PagerRequest::Budget { bytes })
    }

    /// Takes a proc's memory out. `watch` are the descriptors of the order, at most
    /// [`MOST_WATCHED`].
    ///
    /// # Errors
    /// See [`PagerError`]; its processes run on. After `Gone` it is not known what was done: ask
    /// the next pager.
    pub fn hibernate(&self, order: Order, watch: &[BorrowedFd<'_>]) -> Result<Hibernated, PagerError> {
        match self.call_with(&PagerRequest::Hibernate(order), watch)? {
            PagerAnswer::Hibernated(done) => Ok(done),
            other => Err(unexpected(&other)),
        }
    }

    /// Installs the working set for this purpose and lets held threads go.
    ///
    /// # Errors
    /// See [`PagerError`].
    pub fn wake(&self, name: &str, purpose: Purpose) -> Result<Woken, PagerError> {
        match self.call(&PagerRequest::Wake { name: name.into(), purpose })? {
            PagerAnswer::Woken(done) => Ok(done),
            other => Err(unexpected(&other)),
        }
    }

    /// Takes up a proc that was rebuilt without a part of its memory; `descriptors` are its
    /// processes' in their order, and those of [`Rebuilt::copied`].
    ///
    /// # Errors
    /// See [`PagerError`]; its processes must be killed then.
    pub fn inflate(&self, rebuilt: Rebuilt, descriptors: &[BorrowedFd<'_>]) -> Result<Woken, PagerError> {
        match self.call_with(&PagerRequest::Inflate(rebuilt), descriptors)? {
            PagerAnswer::Woken(done) => Ok(done),
            other => Err(unexpected(&other)),
        }
    }

    /// Wakes a held proc without waiting for it; [`PagerEvents`] tell when it runs.
    ///
    /// # Errors
    /// See [`PagerError`].
    pub fn rouse(&self, name: &str, purpose: Purpose) -> Result<(), PagerError> {
        let bytes =
            serde_json::to_vec(&PagerRequest::Rouse { name: name.into(), purpose }).expect("requests are plain data");
        let mut connection = self.rousing.lock();
        let sent = connection.as_ref().is_some_and(|socket| fdpass::send(socket.as_fd(), &bytes, &[]).is_ok());
        if !sent {
            let socket = self.place.connect(ANSWER_TIMEOUT).map_err(PagerError::Gone)?;
            fdpass::send(socket.as_fd(), &bytes, &[]).map_err(PagerError::Gone)?;
            *connection = Some(socket);
        }
        Ok(())
    }

    /// Restores all memory and forgets the proc, which runs on.
    ///
    /// # Errors
    /// See [`PagerError`]; nothing is lost.
    pub fn restore(&self, name: &str) -> Result<(), PagerError> {
        self.done(&PagerRequest::Restore { name: name.into() })
    }

    /// Makes a proc ready for being parked. Tells whether anything of it may be out.
    ///
    /// # Errors
    /// See [`PagerError`]; nothing is lost.
    pub fn prepare_parking(&self, name: &str) -> Result<bool, PagerError> {
        match self.call(&PagerRequest::PrepareParking { name: name.into() })? {
            PagerAnswer::ParkingPrepared { known } => Ok(known),
            other => Err(unexpected(&other)),
        }
    }

    /// Has it written into a file where everything lies that may be out.
    ///
    /// # Errors
    /// See [`PagerError`]; nothing is lost.
    pub fn account(&self, name: &str, file: &Path) -> Result<(), PagerError> {
        self.done(&PagerRequest::Account { name: name.into(), file: file.into() })
    }

    /// The proc's processes have ended.
    ///
    /// # Errors
    /// See [`PagerError`].
    pub fn forget(&self, name: &str) -> Result<(), PagerError> {
        self.done(&PagerRequest::Forget { name: name.into() })
    }

    /// All memory is in the page files that copies held for a proc.
    ///
    /// # Errors
    /// See [`PagerError`].
    pub fn copied(&self, name: &str) -> Result<(), PagerError> {
        self.done(&PagerRequest::Copied { name: name.into() })
    }

    /// Takes up what a dead pager served.
    ///
    /// # Errors
    /// See [`PagerError`]; its processes wait at missing pages.
    pub fn adopt(&self, name: &str, number: u32, directory: &Path) -> Result<(), PagerError> {
        self.done(&PagerRequest::Adopt { name: name.into(), number, directory: directory.into() })
    }

    /// What the pager has of a proc.
    ///
    /// # Errors
    /// See [`PagerError`].
    pub fn inspect(&self, name: &str) -> Result<MemoryStatus, PagerError> {
        match self.call(&PagerRequest::Inspect { name: name.into() })? {
            PagerAnswer::MemoryStatus(status) => Ok(status),
            other => Err(unexpected(&other)),
        }
    }

    /// Puts all descriptors into the keeper, which is new.
    ///
    /// # Errors
    /// See [`PagerError`].
    pub fn mirror(&self) -> Result<(), PagerError> {
        self.done(&PagerRequest::Mirror)
    }

    /// What happens from now on.
    ///
    /// # Errors
    /// See [`PagerError`].
    pub fn follow(&self) -> Result<PagerEvents, PagerError> {
        let (socket, answer) = self.ask(&PagerRequest::Follow, &[]).map_err(PagerError::Gone)?;
        match answer {
            PagerAnswer::Done => {
                let never =
                    rustix::net::sockopt::set_socket_timeout(&socket, rustix::net::sockopt::Timeout::Recv, None);
                never.map_err(|e| PagerError::Gone(e.into()))?;
                Ok(PagerEvents(socket))
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Ends it, if one runs, as soon as it is in the middle of nothing. What it holds by ptrace
    /// runs on then.
    ///
    /// # Errors
    /// See [`PagerError`].
    pub fn quit(&self) -> Result<(), PagerError> {
        match self.done(&PagerRequest::Quit) {
            Err(PagerError::Gone(_)) => Ok(()),
            other => other,
        }
    }
}

fn unexpected(answer: &PagerAnswer) -> PagerError {
    PagerError::Gone(io::Error::new(io::ErrorKind::InvalidData, format!("an answer of the wrong kind: {answer:?}")))
}

/// What happens at the pager.
#[derive(Debug)]
pub struct PagerEvents(OwnedFd);

impl PagerEvents {
    /// Waits for the next.
    ///
    /// # Errors
    /// The pager has ended.
    pub fn next(&self) -> io::Result<PagerEvent> {
        let (bytes, _) = fdpass::recv(self.0.as_fd(), MAX_MESSAGE)?;
        Ok(serde_json::from_slice(&bytes)?)
    }
}
