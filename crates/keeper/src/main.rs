//! `kip-keeper DIR` makes sure that a keeper runs for the data directory, and returns when it can be connected to.
//! `kip-keeper DIR --serve` is that keeper; only the former starts it, so that it is nobody's child.
#![forbid(unsafe_code)]

use anyhow::{Context, bail};
use kip_keeper::place::Place;
use kip_keeper::say;
use kip_keeper::server::{Protection, Server};
use kip_sys::process::Signal;
use rustix::process::{Resource, Rlimit};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// What the serving process says on its standard output when it can be connected to.
const READY: &str = "ready";
/// What it says when another keeper serves already.
const RUNNING: &str = "running";

/// All that ends a process by default, may be sent by a person, a terminal or a service manager, and must not take the
/// descriptors with it.
const IGNORED: [Signal; 8] =
    [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM, Signal::USR1, Signal::USR2, Signal::ALARM, Signal::TSTP];

fn main() -> ExitCode {
    // First of all: nothing of the daemon's may stay open in here.
    if let Err(e) = kip_sys::process::close_inherited() {
        eprintln!("kip-keeper: cannot close inherited descriptors: {e}");
        return ExitCode::FAILURE;
    }
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let result = match arguments.as_slice() {
        [dir] => start(Path::new(dir)),
        [dir, flag] if flag == "--serve" => serve(Path::new(dir)),
        _ => {
            eprintln!("usage: kip-keeper DIR [--serve]");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("kip-keeper: {e:#}");
            ExitCode::FAILURE
        }
    }
}

/// Starts the serving process and waits until it is ready.
fn start(dir: &Path) -> anyhow::Result<()> {
    let dir = std::path::absolute(dir).context("cannot tell the data directory")?;
    let log = Place::open(&dir)?.log()?;
    let log_path = dir.join("run/keeper.log");
    let own: PathBuf = std::env::current_exe().context("cannot tell the keeper's own path")?;
    let mut child = Command::new(&own)
        .arg(&dir)
        .arg("--serve")
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .with_context(|| format!("cannot start {}", own.display()))?;
    let mut line = String::new();
    let stdout = child.stdout.take().expect("it was asked for");
    BufReader::new(stdout).read_line(&mut line).context("cannot hear from the keeper")?;
    match line.trim_end() {
        READY | RUNNING => Ok(()),
        "" => bail!("the keeper ended at once; its last words are in {}", log_path.display()),
        other => bail!("the keeper said {other:?}"),
    }
}

fn serve(dir: &Path) -> anyhow::Result<()> {
    let place = Place::open(dir)?;
    let Some(_lock) = place.lock()? else {
        return announce(RUNNING);
    };
    detach()?;
    raise_nofile()?;
    let protection = protect();
    let listener = place.bind()?;
    // Whoever waited for this may have been killed meanwhile; that is no reason not to serve.
    let _ = announce(READY);
    say!("keeper {} serves, pid {}, {protection:?}", env!("CARGO_PKG_VERSION"), std::process::id());
    Server::new(listener, protection).run().context("cannot wait for clients")?;
    // Still under the lock, so this is our own socket and not a successor's.
    place.unlink().context("cannot remove the socket")?;
    say!("keeper ends as asked");
    Ok(())
}

fn announce(word: &str) -> anyhow::Result<()> {
    writeln!(std::io::stdout(), "{word}").context("nobody listens")
}

/// Leaves the daemon's session, directory and fate.
fn detach() -> anyhow::Result<()> {
    for signal in IGNORED {
        kip_sys::process::ignore_signal(signal).with_context(|| format!("cannot ignore {signal:?}"))?;
    }
    rustix::process::setsid().context("cannot make a session of its own")?;
    rustix::process::chdir("/").context("cannot go to /")?;
    Ok(())
}

/// As many open files as the hard limit allows; without that the keeper is of little use.
fn raise_nofile() -> anyhow::Result<()> {
    let maximum = rustix::process::getrlimit(Resource::Nofile).maximum;
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
        .context("cannot raise RLIMIT_NOFILE to its hard limit")
}

/// What helps but may not be permitted here; `ping` tells which.
fn protect() -> Protection {
    Protection {
        memory_locked: kip_sys::process::mlockall().is_ok(),
        oom_protected: std::fs::write("/proc/self/oom_score_adj", "-900").is_ok(),
    }
}
