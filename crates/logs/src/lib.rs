//! Output of procs: their own terminals ([`console`], [`pty`]) and the log.
//!
//! The log pump is one thread that reads the standard output and error of every proc of the machine
//! and writes them, line by line, to `DIR/procs/NAME/logs/current`.
//!
//! Owns the log files (`file`) and their reading (`reader`). Never blocks a program for longer than
//! a write to disk takes, never ends the daemon: what cannot be written is counted and said in the
//! log as soon as that works again.
//!
//! Invariants: output is looked at with tee(2), written, and only then taken out of the pipe.
//! Daemon and keeper hold the pipes, each open at both ends, so a killed daemon loses nothing; what
//! it had written but not taken yet, one batch of at most 64 KiB, is written again by the next. A
//! line without its end is left in the pipe for [`HOLD_BACK`] at most and then written as it is.
//! One pump at a time reads a pipe and writes a directory.
//!
//! A record is `<unix ms> <stream> <text>\n`, where the stream is `o` or `e`, `O` or `E` for a
//! piece whose line goes on in the next record of that stream, and `k` for a remark of Kip's own.
//! Joining the texts of a stream, with a newline after each small letter, gives the program's
//! bytes.
#![forbid(unsafe_code)]

pub mod console;
mod file;
pub mod pty;
mod reader;
mod record;
#[cfg(test)]
mod tests;

pub use file::Rotation;
pub use reader::{FOLLOW_POLL, From, LogReader, ReadError};
pub use record::{LogRecord, Stream};

use file::LogFile;
use record::encode;
use rustix::event::{EventfdFlags, Timespec, epoll};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Longest text of one record, bytes; longer lines are split, and those longer than half of it may
/// be.
pub const MAX_TEXT: usize = 64 * 1024;

/// How long a line may wait for its end.
pub const HOLD_BACK: Duration = Duration::from_millis(200);

/// Most bytes looked at at once. The scratch pipe of tee(2) has room for as many (pipe(7)).
const BATCH_BYTES: usize = MAX_TEXT;
/// A line that has filled this much of its pipe is not waited for, or the program would be
/// throttled.
const CROWDED_BYTES: usize = BATCH_BYTES / 2;
const EVENTS: usize = 64;
/// The epoll token of the command queue; inputs have smaller ones.
const COMMANDS: u64 = u64::MAX;

/// Why the pump did not do it.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The thread could not be started.
    #[error("cannot start the log pump")]
    Start(#[source] io::Error),
    /// The log directory cannot be made or written to.
    #[error("cannot write logs to {path}")]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A stream cannot be watched.
    #[error("cannot read the output of {name}")]
    Watch {
        /// Whose.
        name: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// No such proc.
    #[error("the log pump has no {name}")]
    Unknown {
        /// The name.
        name: String,
    },
    /// The thread has ended.
    #[error("the log pump has ended")]
    Ended,
}

/// What a new proc brings.
struct Adding {
    name: String,
    inputs: [Input; 2],
    file: LogFile,
}

enum Command {
    Add(Box<Adding>, SyncSender<Result<(), LogError>>),
    Flush(String, SyncSender<Result<(), LogError>>),
    Remark(String, String, SyncSender<Result<(), LogError>>),
    Remove(String, SyncSender<Result<(), LogError>>),
    Stop,
}

/// The pump. Its calls wait for the thread, which may be busy with one write to disk. Dropped, it
/// leaves what it has not written in the pipes.
#[derive(Debug)]
pub struct LogPump {
    commands: Sender<Command>,
    bell: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl LogPump {
    /// Starts the thread.
    ///
    /// # Errors
    /// [`LogError::Start`].
    pub fn start() -> Result<LogPump, LogError> {
        let started = || -> io::Result<LogPump> {
            let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            epoll::add(&epoll, &bell, epoll::EventData::new_u64(COMMANDS), epoll::EventFlags::IN)?;
            let scratch = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
            rustix::pipe::fcntl_setpipe_size(&scratch.1, BATCH_BYTES)?;
            let (commands, queue) = channel();
            let pump = Pump::new(epoll, bell.try_clone()?, scratch, queue);
            let thread = std::thread::Builder::new().name("logs".to_owned()).spawn(move || pump.run())?;
            Ok(LogPump { commands, bell, thread: Some(thread) })
        };
        started().map_err(LogError::Start)
    }

    /// Reads a proc's pipes (anything else is refused) from now on. A proc of that name that the
    /// pump has already is removed first.
    ///
    /// # Errors
    /// [`LogError`]; the descriptors are let go then.
    pub fn add(
        &self,
        name: &str,
        stdout: impl Into<Arc<OwnedFd>>,
        stderr: impl Into<Arc<OwnedFd>>,
        directory: &Path,
        rotation: Rotation,
    ) -> Result<(), LogError> {
        let failed = |source| LogError::Directory { path: directory.to_owned(), source };
        let file = LogFile::open(directory, rotation).map_err(failed)?;
        let inputs = [Input::new(stdout.into(), Stream::Stdout), Input::new(stderr.into(), Stream::Stderr)];
        let adding = Box::new(Adding { name: name.to_owned(), inputs, file });
        self.call(|reply| Command::Add(adding, reply))
    }

    /// Waits until all that the proc has written so far is in its log: for a program that has
    /// ended.
    ///
    /// # Errors
    /// [`LogError::Unknown`], [`LogError::Ended`].
    pub fn flush(&self, name: &str) -> Result<(), LogError> {
        self.call(|reply| Command::Flush(name.to_owned(), reply))
    }

    /// Flushes, and writes a line of Kip's own about the proc.
    ///
    /// # Errors
    /// As [`LogPump::flush`].
    pub fn remark(&self, name: &str, text: &str) -> Result<(), LogError> {
        self.call(|reply| Command::Remark(name.to_owned(), text.replace('\n', " "), reply))
    }

    /// Flushes and lets go of the proc.
    ///
    /// # Errors
    /// As [`LogPump::flush`].
    pub fn remove(&self, name: &str) -> Result<(), LogError> {
        self.call(|reply| Command::Remove(name.to_owned(), reply))
    }

    fn call(&self, command: impl FnOnce(SyncSender<Result<(), LogError>>) -> Command) -> Result<(), LogError> {
        let (reply, answer) = sync_channel(1);
        self.send(command(reply))?;
        answer.recv().map_err(|_| LogError::Ended)?
    }

    fn send(&self, command: Command) -> Result<(), LogError> {
        self.commands.send(command).map_err(|_| LogError::Ended)?;
        // The only failure is a counter at its limit, and then the bell rings already.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
        Ok(())
    }
}

impl Drop for LogPump {
    fn drop(&mut self) {
        let _ = self.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// One of a proc's two streams.
#[derive(Debug)]
struct Input {
    fd: Arc<OwnedFd>,
    stream: Stream,
    /// No process has the write end any more, or reading failed.
    ended: bool,
    /// It is in the queue of those to serve.
    queued: bool,
    /// When the line whose start is in the pipe is written without its end.
    deadline: Option<Instant>,
}

impl Input {
    fn new(fd: Arc<OwnedFd>, stream: Stream) -> Input {
        Input { fd, stream, ended: false, queued: false, deadline: None }
    }

    fn is_pipe(&self) -> io::Result<bool> {
        Ok(rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(&self.fd)?.st_mode).is_fifo())
    }
}

/// Cuts output into records. An unfinished last line is left unless `all` are wanted. Returns how
/// many bytes were used.
fn cut(bytes: &[u8], all: bool, now_ms: u64, stream: Stream, records: &mut Vec<u8>) -> usize {
    let lines = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
    let used = if all { bytes.len() } else { lines };
    for chunk in bytes[..used].split_inclusive(|b| *b == b'\n') {
        match chunk.strip_suffix(b"\n") {
            Some(line) => encode(records, now_ms, stream, true, line),
            None => encode(records, now_ms, stream, false, chunk),
        }
    }
    used
}

struct ProcLog {
    name: String,
    inputs: [Input; 2],
    file: LogFile,
}

/// The thread's state. An input's token is its proc's id times two, plus its index.
struct Pump {
    epoll: OwnedFd,
    bell: OwnedFd,
    commands: Receiver<Command>,
    procs: HashMap<u64, ProcLog>,
    ids: HashMap<String, u64>,
    next_id: u64,
    /// Tokens of inputs with output that was not looked at; each once, in turn.
    queue: VecDeque<u64>,
    deadlines: BTreeSet<(Instant, u64)>,
    scratch: (OwnedFd, OwnedFd),
    buffer: Vec<u8>,
    records: Vec<u8>,
}

/// Whether to wait for the end of a last line.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Last {
    Wait,
    Take,
}

impl Pump {
    fn new(epoll: OwnedFd, bell: OwnedFd, scratch: (OwnedFd, OwnedFd), commands: Receiver<Command>) -> Pump {
        Pump {
            epoll,
            bell,
            commands,
            procs: HashMap::new(),
            ids: HashMap::new(),
            next_id: 0,
            queue: VecDeque::new(),
            deadlines: BTreeSet::new(),
            scratch,
            buffer: vec![0; BATCH_BYTES],
            records: Vec::new(),
        }
    }

    fn run(mut self) {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(EVENTS);
        loop {
            events.clear();
            let timeout = self.timeout();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => {
                    tracing::error!(error = %e, "the log pump cannot wait for output and ends");
                    return;
                }
            }
            for event in &events {
                match event.data.u64() {
                    COMMANDS => {
                        if !self.obey() {
                            return;
                        }
                    }
                    token => self.enqueue(token),
                }
            }
            for _ in 0..self.queue.len() {
                self.serve_next();
            }
            self.serve_overdue();
        }
    }

    fn timeout(&self) -> Option<Timespec> {
        if !self.queue.is_empty() {
            return Some(timespec(Duration::ZERO));
        }
        self.deadlines.first().map(|(at, _)| timespec(at.saturating_duration_since(Instant::now())))
    }

    /// Obeys the commands there are. False when the thread shall end.
    fn obey(&mut self) -> bool {
        let _ = rustix::io::read(&self.bell, &mut [0_u8; 8]);
        while let Ok(command) = self.commands.try_recv() {
            // The caller may have gone away meanwhile.
            let _ = match command {
                Command::Add(adding, reply) => reply.send(self.add(*adding)),
                Command::Flush(name, reply) => reply.send(self.flush(&name).map(|_| ())),
                Command::Remark(name, text, reply) => reply.send(self.remark(&name, &text)),
                Command::Remove(name, reply) => reply.send(self.remove(&name)),
                Command::Stop => return false,
            };
        }
        true
    }

    fn add(&mut self, adding: Adding) -> Result<(), LogError> {
        if self.ids.contains_key(&adding.name) {
            self.remove(&adding.name)?;
        }
        let id = self.next_id;
        self.next_id += 1;
        for (index, input) in adding.inputs.iter().enumerate() {
            if let Err(source) = self.watch(input, id * 2 + index as u64) {
                self.unwatch(&adding.inputs[..index]);
                return Err(LogError::Watch { name: adding.name, source });
            }
        }
        self.ids.insert(adding.name.clone(), id);
        self.procs.insert(id, ProcLog { name: adding.name, inputs: adding.inputs, file: adding.file });
        Ok(())
    }

    /// Edge-triggered, because the start of a line may stay in the pipe for a while.
    fn watch(&self, input: &Input, token: u64) -> io::Result<()> {
        if !input.is_pipe()? {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a pipe"));
        }
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        Ok(epoll::add(&self.epoll, &input.fd, epoll::EventData::new_u64(token), flags)?)
    }

    /// Must precede every close: the keeper holds the same open files, and an epoll registration
    /// lives as long as those.
    fn unwatch(&self, inputs: &[Input]) {
        for input in inputs.iter().filter(|i| !i.ended) {
            if let Err(e) = epoll::delete(&self.epoll, &input.fd) {
                tracing::error!(error = %e, "a log stream stays watched");
            }
        }
    }

    fn flush(&mut self, name: &str) -> Result<u64, LogError> {
        let id = *self.ids.get(name).ok_or_else(|| LogError::Unknown { name: name.to_owned() })?;
        for token in [id * 2, id * 2 + 1] {
            // What is in the pipe now, not what a busy program adds meanwhile.
            let mut left = self.input(token).map_or(0, |input| rustix::io::ioctl_fionread(&input.fd).unwrap_or(0));
            while left > 0 {
                match self.serve(token, Last::Take) {
                    0 => break,
                    taken => left = left.saturating_sub(taken as u64),
                }
            }
        }
        Ok(id)
    }

    fn remark(&mut self, name: &str, text: &str) -> Result<(), LogError> {
        let id = self.flush(name)?;
        let mut record = Vec::new();
        encode(&mut record, now_ms(), Stream::Kip, true, text.as_bytes());
        if let Some(proc) = self.procs.get_mut(&id) {
            proc.file.append(&record);
        }
        Ok(())
    }

    fn remove(&mut self, name: &str) -> Result<(), LogError> {
        let id = self.flush(name)?;
        self.ids.remove(name);
        if let Some(proc) = self.procs.remove(&id) {
            self.unwatch(&proc.inputs);
            for (index, input) in proc.inputs.iter().enumerate() {
                if let Some(deadline) = input.deadline {
                    self.deadlines.remove(&(deadline, id * 2 + index as u64));
                }
            }
        }
        Ok(())
    }

    fn input(&mut self, token: u64) -> Option<&mut Input> {
        let proc = self.procs.get_mut(&(token / 2))?;
        Some(&mut proc.inputs[(token % 2) as usize]).filter(|input| !input.ended)
    }

    fn enqueue(&mut self, token: u64) {
        // An event of a proc that was removed a moment ago finds none.
        if let Some(input) = self.input(token).filter(|input| !input.queued) {
            input.queued = true;
            self.queue.push_back(token);
        }
    }

    fn serve_next(&mut self) {
        let Some(token) = self.queue.pop_front() else { return };
        let Some(input) = self.input(token) else { return };
        input.queued = false;
        if self.serve(token, Last::Wait) > 0 {
            // There may be more, of which no event will tell.
            self.enqueue(token);
        }
    }

    fn serve_overdue(&mut self) {
        let now = Instant::now();
        while let Some((_, token)) = self.deadlines.first().copied().filter(|(at, _)| *at <= now) {
            self.deadlines.pop_first();
            let Some(input) = self.input(token) else { continue };
            input.deadline = None;
            self.serve(token, Last::Take);
            self.enqueue(token);
        }
    }

    /// Reads what is in the pipe, writes its records and takes as much out. Returns how many bytes
    /// that were.
    fn serve(&mut self, token: u64, last: Last) -> usize {
        let Some(proc) = self.procs.get_mut(&(token / 2)) else { return 0 };
        let input = &mut proc.inputs[(token % 2) as usize];
        let seen = match peek(&input.fd, &self.scratch, &mut self.buffer) {
            Ok(Some(0)) => {
                self.end(token);
                return 0;
            }
            Ok(seen) => seen.unwrap_or(0),
            Err(e) => {
                tracing::error!(proc = proc.name, error = %e, "cannot read a log stream any more");
                self.end(token);
                return 0;
            }
        };
        self.records.clear();
        let bytes = &self.buffer[..seen];
        let mut used = cut(bytes, last == Last::Take, now_ms(), input.stream, &mut self.records);
        if used == 0 && seen >= CROWDED_BYTES {
            used = cut(bytes, true, now_ms(), input.stream, &mut self.records);
        }
        proc.file.append(&self.records);
        if let Err(e) = take(&input.fd, &mut self.buffer[..used]) {
            tracing::error!(proc = proc.name, error = %e, "cannot read a log stream any more");
            self.end(token);
            return 0;
        }
        self.set_deadline(token, used, seen - used);
        used
    }

    /// A line of which `left` bytes are in the pipe has until its deadline, which is a new one when
    /// another was taken out before it.
    fn set_deadline(&mut self, token: u64, used: usize, left: usize) {
        let Some(input) = self.input(token) else { return };
        let keep = left > 0 && used == 0 && input.deadline.is_some();
        if keep {
            return;
        }
        let new = (left > 0).then(|| Instant::now() + HOLD_BACK);
        let old = std::mem::replace(&mut input.deadline, new);
        if let Some(old) = old {
            self.deadlines.remove(&(old, token));
        }
        if let Some(new) = new {
            self.deadlines.insert((new, token));
        }
    }

    fn end(&mut self, token: u64) {
        self.set_deadline(token, 0, 0);
        let Some(proc) = self.procs.get_mut(&(token / 2)) else { return };
        let input = &mut proc.inputs[(token % 2) as usize];
        input.ended = true;
        let _ = epoll::delete(&self.epoll, &input.fd);
    }
}

/// Copies what is in the pipe without taking it out, tee(2). None when there is nothing, zero at
/// the end.
fn peek(pipe: &OwnedFd, scratch: &(OwnedFd, OwnedFd), buffer: &mut [u8]) -> io::Result<Option<usize>> {
    use rustix::pipe::{SpliceFlags, tee};
    let copied = match rustix::io::retry_on_intr(|| tee(pipe, &scratch.1, buffer.len(), SpliceFlags::NONBLOCK)) {
        Ok(copied) => copied,
        Err(rustix::io::Errno::AGAIN) => return Ok(None),
        Err(e) => return Err(e.into()),
    };
    take(&scratch.0, &mut buffer[..copied])?;
    Ok(Some(copied))
}

/// Takes as many bytes out of a pipe that is known to have them.
fn take(pipe: &OwnedFd, mut buffer: &mut [u8]) -> io::Result<()> {
    while !buffer.is_empty() {
        match rustix::io::retry_on_intr(|| rustix::io::read(pipe, &mut *buffer))? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => buffer = &mut buffer[n..],
        }
    }
    Ok(())
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs() as i64, tv_nsec: i64::from(duration.subsec_nanos()) }
}
