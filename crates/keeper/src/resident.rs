//! A program of ours that serves a data directory and is no other program's child, so that it
//! outlives the one that needed it first.
//!
//! `PROGRAM DIR` makes sure that one runs and returns when it can be connected to;
//! `PROGRAM DIR --serve` is that one, and only the former starts it. With `--in-place` it takes the
//! place of one that runs, and before that ends all that it has. Owns this dance, and leaving the
//! starter's session and fate; the files are [`RunDirectory`]'s.

use crate::run_directory::RunDirectory;
use anyhow::{Context, bail};
use kip_sys::process::Signal;
use rustix::fs::FlockOperation;
use rustix::process::{Resource, Rlimit};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// Takes the place of one that runs.
const IN_PLACE: &str = "--in-place";

/// What the serving process says on its standard output when it can be connected to.
const READY: &str = "ready";
/// What it says when another serves already.
const RUNNING: &str = "running";

/// All that ends a process by default, may be sent by a person, a terminal or a service manager,
/// and must not end this one.
const IGNORED: [Signal; 8] =
    [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM, Signal::USR1, Signal::USR2, Signal::ALARM, Signal::TSTP];

/// Why no resident program could be started.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The program could not be run.
    #[error("cannot run {binary}")]
    Run {
        /// Which.
        binary: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The program ran and failed.
    #[error("{binary} did not start: {message}")]
    Failed {
        /// Which.
        binary: PathBuf,
        /// What it said.
        message: String,
    },
}

/// Runs `binary`, which makes sure that one runs for the data directory `dir`.
///
/// # Errors
/// See [`RunError`].
pub fn run(binary: &Path, dir: &Path) -> Result<(), RunError> {
    run_with(binary, dir, None, Stdio::null())
}

/// Runs `binary`, which puts one of itself in the place of the one that runs for the data directory
/// `dir`. `turn` is [`RunDirectory::turn`]'s there. Nothing is in the caller's hands meanwhile: it
/// may be killed.
///
/// # Errors
/// See [`RunError`]; the other may have ended nevertheless.
pub fn run_in_place(binary: &Path, dir: &Path, turn: OwnedFd) -> Result<(), RunError> {
    run_with(binary, dir, Some(IN_PLACE), turn.into())
}

fn run_with(binary: &Path, dir: &Path, how: Option<&str>, stdin: Stdio) -> Result<(), RunError> {
    let output = Command::new(binary)
        .arg(dir)
        .args(how)
        .stdin(stdin)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .output()
        .map_err(|source| RunError::Run { binary: binary.to_owned(), source })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    let message = if said.is_empty() { output.status.to_string() } else { said };
    Err(RunError::Failed { binary: binary.to_owned(), message })
}

/// The right to serve.
#[derive(Debug)]
pub struct Seat {
    place: RunDirectory,
    _lock: File,
}

impl Seat {
    /// Gives it up in order.
    ///
    /// # Errors
    /// The socket cannot be removed.
    pub fn leave(self) -> anyhow::Result<()> {
        // Still under the lock, so this is our own socket and not a successor's.
        self.place.unlink().context("cannot remove the socket")
    }
}

/// How one begins to serve a data directory.
pub type Serve = fn(&Path) -> anyhow::Result<()>;

/// The `main` of a resident program: starts one, or calls `serve`; or `succeed`, if it can take
/// another's place.
pub fn main(kind: &'static str, serve: Serve, succeed: Option<Serve>) -> ExitCode {
    // First of all: nothing of the daemon's may stay open in here.
    if let Err(e) = kip_sys::process::close_inherited() {
        eprintln!("kip-{kind}: cannot close inherited descriptors: {e}");
        return ExitCode::FAILURE;
    }
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let result = match (arguments.as_slice(), succeed) {
        ([dir], _) => start(Path::new(dir), kind, None),
        ([dir, how], Some(_)) if how == IN_PLACE => start(Path::new(dir), kind, Some(IN_PLACE)),
        ([dir, flag], _) if flag == "--serve" => serve(Path::new(dir)),
        ([dir, flag, how], Some(succeed)) if flag == "--serve" && how == IN_PLACE => succeed(Path::new(dir)),
        (_, succeed) => {
            let how = if succeed.is_some() { " [--in-place]" } else { "" };
            eprintln!("usage: kip-{kind} DIR [--serve]{how}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("kip-{kind}: {e:#}");
            ExitCode::FAILURE
        }
    }
}

/// Starts the serving process and waits until it is ready.
fn start(dir: &Path, kind: &'static str, how: Option<&str>) -> anyhow::Result<()> {
    let dir = std::path::absolute(dir).context("cannot tell the data directory")?;
    let place = RunDirectory::open(&dir, kind)?;
    let log = place.log()?;
    let own: PathBuf = std::env::current_exe().context("cannot tell its own path")?;
    let mut child = Command::new(&own)
        .arg(&dir)
        .arg("--serve")
        .args(how)
        .env_clear()
        .current_dir("/")
        // The turn, of one that takes another's place.
        .stdin(if how.is_some() { Stdio::inherit() } else { Stdio::null() })
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .with_context(|| format!("cannot start {}", own.display()))?;
    let mut line = String::new();
    let stdout = child.stdout.take().expect("it was asked for");
    BufReader::new(stdout).read_line(&mut line).context("cannot hear from it")?;
    match line.trim_end() {
        READY | RUNNING => Ok(()),
        "" => bail!("it ended at once; its last words are in {}", place.log_path().display()),
        other => bail!("it said {other:?}"),
    }
}

/// Becomes the one that serves, on the listening socket that is returned; none if another does.
/// `prepare` runs before a client can connect.
///
/// # Errors
/// The kernel's or the file system's.
pub fn sit<T>(
    dir: &Path,
    kind: &'static str,
    prepare: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<Option<(Seat, OwnedFd, T)>> {
    let place = RunDirectory::open(dir, kind)?;
    let turn = place.turn()?;
    let Some(lock) = place.lock()? else {
        announce(RUNNING)?;
        return Ok(None);
    };
    drop(turn);
    detach()?;
    raise_nofile()?;
    let prepared = prepare()?;
    let listener = place.bind()?;
    // The starter that waited for this may have been killed meanwhile; that is no reason not to
    // serve.
    let _ = announce(READY);
    Ok(Some((Seat { place, _lock: lock }, listener, prepared)))
}

/// Becomes the one that serves in the place of another. Our turn comes as the standard input.
/// `take` is to take what the other has, and then to end it.
///
/// # Errors
/// The kernel's or the file system's; those of `take`.
pub fn succeed<T>(
    dir: &Path,
    kind: &'static str,
    take: impl FnOnce(&RunDirectory) -> anyhow::Result<T>,
) -> anyhow::Result<(Seat, OwnedFd, T)> {
    let place = RunDirectory::open(dir, kind)?;
    detach()?;
    raise_nofile()?;
    let taken = take(&place)?;
    let lock = place.lock()?.context("another one has taken the place")?;
    let listener = place.bind()?;
    // The starter's descriptors are duplicates of ours.
    rustix::fs::flock(io::stdin(), FlockOperation::Unlock).context("cannot give others their turn")?;
    let _ = announce(READY);
    Ok((Seat { place, _lock: lock }, listener, taken))
}

fn announce(word: &str) -> anyhow::Result<()> {
    writeln!(std::io::stdout(), "{word}").context("no program listens")
}

/// Leaves the starter's session, directory and fate.
fn detach() -> anyhow::Result<()> {
    for signal in IGNORED {
        kip_sys::process::ignore_signal(signal).with_context(|| format!("cannot ignore {signal:?}"))?;
    }
    rustix::process::setsid().context("cannot make a session of its own")?;
    rustix::process::chdir("/").context("cannot go to /")?;
    Ok(())
}

/// As many open files as the hard limit allows; without that it is of little use.
fn raise_nofile() -> anyhow::Result<()> {
    let maximum = rustix::process::getrlimit(Resource::Nofile).maximum;
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
        .context("cannot raise RLIMIT_NOFILE to its hard limit")
}
