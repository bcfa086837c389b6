//! What a proc's program writes to a terminal of its own, for the log and for the clients that are
//! attached.
//!
//! One task of the daemon reads the terminal ([`Console::follow`]). Daemon and keeper hold the
//! client's side of it as long as the proc is not stopped, so a client that goes, or a daemon that
//! is killed, hangs nothing up; and the terminal outlives a sleep as all do. Never speaks to a
//! client itself.

use crate::pty::{read, read_now, resize, watched};
use kip_types::api::TerminalSize;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, mpsc as threads};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;
use tokio::sync::{broadcast, oneshot, watch};

/// So much of what a program has written is kept for the next client, bytes.
const RECENT: usize = 64 << 10;
/// Pieces that a client may be behind; more are lost to it.
const BEHIND: usize = 256;
/// How long the last output of a program may take to be in its log.
const LAST_WITHIN: Duration = Duration::from_secs(1);

/// The size of a terminal that has had no client yet.
const FIRST_SIZE: TerminalSize = TerminalSize { rows: 24, columns: 80 };

/// Clients of a proc's console.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Clients {
    /// Those that are attached.
    pub now: usize,
    /// All that ever were.
    pub ever: usize,
}

/// What a program has written, for its clients.
#[derive(Debug, Clone)]
pub enum OutputPiece {
    /// Never none.
    Bytes(Arc<[u8]>),
    /// No process has the terminal open any more.
    HungUp,
}

/// A task that reads a terminal.
#[derive(Debug)]
struct Follower {
    master: Arc<OwnedFd>,
    end: oneshot::Sender<threads::Sender<()>>,
}

#[derive(Debug)]
struct Output {
    recent: VecDeque<u8>,
    pieces: broadcast::Sender<OutputPiece>,
    follower: Option<Follower>,
}

/// That of one proc.
#[derive(Debug)]
pub struct Console {
    output: Arc<Mutex<Output>>,
    clients: watch::Sender<Clients>,
    size: Mutex<TerminalSize>,
}

impl Default for Console {
    fn default() -> Console {
        let output = Output { recent: VecDeque::new(), pieces: broadcast::channel(BEHIND).0, follower: None };
        let clients = watch::channel(Clients::default()).0;
        Console { output: Arc::new(Mutex::new(output)), clients, size: Mutex::new(FIRST_SIZE) }
    }
}

impl Console {
    /// How many are attached.
    pub fn clients(&self) -> watch::Receiver<Clients> {
        self.clients.subscribe()
    }

    /// Forgets what an earlier run has written; a new terminal has the size that the last client of
    /// an earlier one gave.
    pub fn begin(&self, master: impl AsFd) -> io::Result<()> {
        self.output.lock().recent.clear();
        resize(master, *self.size.lock())
    }

    /// A client's terminal has another size: the program's gets it too, and each that comes after
    /// it.
    ///
    /// # Errors
    /// ioctl(2).
    pub fn resize(&self, master: impl AsFd, size: TerminalSize) -> io::Result<()> {
        *self.size.lock() = size;
        resize(master, size)
    }

    /// Reads the terminal whose client's side is `master` from now on, and writes its lines to
    /// `log`, a pipe. To be called in a runtime.
    ///
    /// # Errors
    /// Neither can be watched.
    pub fn follow(&self, master: Arc<OwnedFd>, log: OwnedFd) -> io::Result<()> {
        let mut output = self.output.lock();
        let followed = output.follower.as_ref();
        if followed.is_some_and(|other| Arc::ptr_eq(&other.master, &master) && !other.end.is_closed()) {
            return Ok(());
        }
        let (terminal, log) = (watched(master.try_clone()?)?, pipe::Sender::from_owned_fd(log)?);
        let (end, ended) = oneshot::channel();
        output.follower = Some(Follower { master, end });
        tokio::spawn(relay(Arc::clone(&self.output), terminal, log, ended));
        Ok(())
    }

    /// A client is attached until what this returns is dropped.
    pub fn seat(self: &Arc<Console>) -> ClientSeat {
        self.clients.send_modify(|clients| {
            clients.now += 1;
            clients.ever += 1;
        });
        ClientSeat(Arc::clone(self))
    }

    /// Has what the program wrote last in its log, and reads its terminal no longer. Blocking.
    pub fn finish(&self) {
        let Some(follower) = self.output.lock().follower.take() else { return };
        let (done, wait) = threads::channel();
        if follower.end.send(done).is_ok() {
            let _ = wait.recv_timeout(LAST_WITHIN);
        }
    }

    /// What was written so far, if that is wanted, and all that comes.
    pub fn subscribe(&self, since_start: bool) -> (Vec<u8>, broadcast::Receiver<OutputPiece>) {
        let output = self.output.lock();
        let before = if since_start { output.recent.iter().copied().collect() } else { Vec::new() };
        (before, output.pieces.subscribe())
    }
}

/// A client that is attached.
#[derive(Debug)]
pub struct ClientSeat(Arc<Console>);

impl Drop for ClientSeat {
    fn drop(&mut self) {
        self.0.clients.send_modify(|clients| clients.now -= 1);
    }
}

impl Output {
    fn add(&mut self, bytes: &[u8]) {
        self.recent.extend(bytes);
        let over = self.recent.len().saturating_sub(RECENT);
        self.recent.drain(..over);
        // Without a client no receiver has it.
        let _ = self.pieces.send(OutputPiece::Bytes(bytes.into()));
    }
}

/// Until the terminal is hung up, or the proc has ended.
async fn relay(
    output: Arc<Mutex<Output>>,
    terminal: AsyncFd<OwnedFd>,
    mut log: pipe::Sender,
    mut end: oneshot::Receiver<threads::Sender<()>>,
) {
    let mut lines = Lines::default();
    let done = loop {
        tokio::select! {
            read = read(&terminal) => {
                let Some(bytes) = read else { break None };
                output.lock().add(&bytes);
                // The pump takes it out as fast as the disk does; a program that is not read waits
                // meanwhile, as on a pipe.
                let _ = log.write_all(&lines.of(&bytes)).await;
            }
            done = &mut end => break done.ok(),
        }
    };
    while let Some(bytes) = done.as_ref().and_then(|_| read_now(terminal.get_ref())) {
        output.lock().add(&bytes);
        let _ = log.write_all(&lines.of(&bytes)).await;
    }
    let _ = output.lock().pieces.send(OutputPiece::HungUp);
    if let Some(done) = done {
        let _ = done.send(());
    }
}

/// Lines of a terminal end with a carriage return and a newline, those of a log with a newline.
#[derive(Debug, Default)]
struct Lines {
    returned: bool,
}

impl Lines {
    fn of(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut lines = Vec::with_capacity(bytes.len() + 1);
        for byte in bytes {
            if std::mem::take(&mut self.returned) && *byte != b'\n' {
                lines.push(b'\r');
            }
            match byte {
                b'\r' => self.returned = true,
                byte => lines.push(*byte),
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_log_end_with_a_newline_however_they_are_cut() {
        let mut lines = Lines::default();
        let pieces: [&[u8]; 4] = [b"one\r", b"\ntwo\r\n", b"50%\r100%\r", b"x\n\n"];
        let text: Vec<u8> = pieces.iter().flat_map(|piece| lines.of(piece)).collect();
        assert_eq!(text, b"one\ntwo\n50%\r100%\rx\n\n");
    }

    #[test]
    fn the_last_of_a_terminal_is_kept() {
        let console = Console::default();
        let mut output = console.output.lock();
        output.add(&vec![b'a'; RECENT]);
        output.add(b"bc");
        drop(output);
        let (before, mut pieces) = console.subscribe(true);
        assert_eq!((before.len(), &before[RECENT - 3..]), (RECENT, &b"abc"[..]));
        console.output.lock().add(b"d");
        assert!(matches!(pieces.try_recv(), Ok(OutputPiece::Bytes(bytes)) if &*bytes == b"d"));
        assert!(console.subscribe(false).0.is_empty());
    }
}
