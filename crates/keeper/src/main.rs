//! `kip-keeper DIR` makes sure that a keeper runs for the data directory, and returns when it can be connected to.
//! `kip-keeper DIR --serve` is that keeper; only the former starts it, so that it is nobody's child.
#![forbid(unsafe_code)]

use anyhow::Context;
use kip_keeper::client::KIND;
use kip_keeper::resident;
use kip_keeper::say;
use kip_keeper::server::{Protection, Server};
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    resident::main(KIND, serve)
}

fn serve(dir: &Path) -> anyhow::Result<()> {
    let Some((seat, listener, protection)) = resident::sit(dir, KIND, || Ok(protect()))? else { return Ok(()) };
    say!("keeper {} serves, pid {}, {protection:?}", env!("CARGO_PKG_VERSION"), std::process::id());
    Server::new(listener, protection).run().context("cannot wait for clients")?;
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
