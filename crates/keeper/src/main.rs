//! `kip-keeper DIR` makes sure that a keeper runs for the data directory, and returns when it can
//! be connected to. `kip-keeper DIR --serve` is that keeper; only the former starts it, so that it
//! is no other program's child. With `--in-place` it puts a keeper in the place of the one that
//! runs: the new one has everything before the old one ends.
#![forbid(unsafe_code)]

use anyhow::Context;
use kip_keeper::client::{KIND, take_over};
use kip_keeper::resident::{self, Seat};
use kip_keeper::run_directory::RunDirectory;
use kip_keeper::say;
use kip_keeper::server::{KeeperServer, Protection};
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    resident::main(KIND, serve, Some(succeed))
}

fn serve(dir: &Path) -> anyhow::Result<()> {
    let Some((seat, listener, protection)) = resident::sit(dir, KIND, || Ok(protect()))? else { return Ok(()) };
    say!("keeper {} serves, pid {}, {protection:?}", env!("CARGO_PKG_VERSION"), std::process::id());
    finish(seat, KeeperServer::new(listener, protection))
}

fn succeed(dir: &Path) -> anyhow::Result<()> {
    let take = |place: &RunDirectory| Ok((protect(), take_over(place)?));
    let (seat, listener, (protection, held)) = resident::succeed(dir, KIND, take)?;
    let (pid, count) = (std::process::id(), held.iter().map(|part| part.names.len()).sum::<usize>());
    say!("keeper {} serves, pid {pid}, {protection:?}, with {count} of its predecessor's", env!("CARGO_PKG_VERSION"));
    let server = KeeperServer::new(listener, protection).with_entries(held);
    finish(seat, server)
}

fn finish(seat: Seat, server: KeeperServer) -> anyhow::Result<()> {
    server.run().context("cannot wait for clients")?;
    seat.leave()?;
    say!("keeper ends as asked");
    Ok(())
}

/// What helps but may not be permitted here; `ping` tells which.
fn protect() -> Protection {
    Protection {
        memory_locked: kip_sys::process::mlockall().is_ok(),
        oom_protected: std::fs::write("/proc/self/oom_score_adj", "-900").is_ok(),
    }
}
