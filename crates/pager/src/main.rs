//! `kip-pager DIR` makes sure that a pager runs for the data directory, and returns when it can be
//! connected to. `kip-pager DIR --serve` is that pager; only the former starts it, so that it is no
//! other program's child.
#![forbid(unsafe_code)]

use anyhow::Context;
use kip_keeper::{Keeper, resident};
use kip_pager::client::KIND;
use kip_pager::service::Service;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    resident::main(KIND, serve, None)
}

fn serve(dir: &Path) -> anyhow::Result<()> {
    // Most threads hold a proc and do nothing else: they need no memory of their own.
    kip_sys::process::share_arenas(2);
    let filter = tracing_subscriber::EnvFilter::new("info");
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).with_env_filter(filter).init();
    let prepared = resident::sit(dir, KIND, || {
        // It only helps. Memory is not locked: the stacks of threads that hold procs would be,
        // whole.
        let _ = std::fs::write("/proc/self/oom_score_adj", "-900");
        let own = std::env::current_exe().context("cannot tell its own path")?;
        let keeper = Keeper::connect_or_spawn(&own.with_file_name("kip-keeper"), dir)?;
        Ok(Service::new(keeper, dir)?)
    })?;
    let Some((seat, listener, service)) = prepared else { return Ok(()) };
    kip_sys::ran::watch().context("cannot watch the clocks of the CPUs")?;
    tracing::info!(pid = std::process::id(), version = env!("CARGO_PKG_VERSION"), "the pager serves");
    service.run(&listener).context("cannot wait for clients")?;
    seat.leave()?;
    tracing::info!("the pager ends as asked");
    Ok(())
}
