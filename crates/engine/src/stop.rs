//! Ends a proc and lets go what it used. Every step may be repeated: recovery calls the same
//! functions.

use crate::blocking::blocking;
use crate::exits::reported_exit;
use crate::fd_store::key;
use crate::host::Host;
use crate::host::Proc;
use kip_clocks::tree::Tree;
use kip_net::Slot;
use kip_sys::fault;
use kip_sys::status::Status;
use kip_types::State;
use kip_types::api::{Code, Refusal};
use kip_types::chain;
use kip_types::lifecycle::Exit;
use kip_types::runtime::{LEASES, ended_leases};
use kip_types::spec::parse_signal;
use rustix::process::Signal;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;
use std::time::Duration;

/// What becomes of rules and links of a proc that ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkFate {
    /// They are removed.
    Removed,
    /// They are removed, but its ports on the host stay its own: it is to be started again.
    Reserved,
    /// They stay until another proc has them, or it is started again: it stands aside.
    Kept,
    /// Many procs end: the caller removes their rules and links together, [`remove_networks`]. One
    /// by one each removal waits for the kernel's other processors several times, and for all other
    /// removals.
    Left,
}

impl NetworkFate {
    /// Of a proc that ended and is recorded as that.
    pub fn after(state: &State) -> NetworkFate {
        if matches!(state, State::Restarting { .. }) { NetworkFate::Reserved } else { NetworkFate::Removed }
    }
}

/// How long killed processes may take to be gone.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the other processes of a proc may outlive its program.
const JUST_ENDED: Duration = Duration::from_secs(1);
/// Slots in one message to the kernel.
const NETWORKS_AT_ONCE: usize = 128;

impl Proc {
    /// Waits until the cgroup has no process; false if that takes too long.
    pub fn wait_until_empty(&self, patience: Duration) -> bool {
        let until = std::time::Instant::now() + patience;
        loop {
            match self.cgroup.pids() {
                Ok(pids) if pids.is_empty() => return true,
                Err(_) => return true,
                _ if std::time::Instant::now() > until => return false,
                _ => std::thread::sleep(Duration::from_micros(500)),
            }
        }
    }
}

/// Ends the program: SIGTERM or what its spec has instead, then, after `grace`, SIGKILL to
/// everything. Returns how it ended, by itself perhaps; none if it was not running.
pub async fn end(proc: &Arc<Proc>, program: u32, grace: Duration) -> Option<Exit> {
    let proc = Arc::clone(proc);
    blocking(move || {
        let pids = proc.cgroup.pids().unwrap_or_default();
        let tree = Tree::read(&pids);
        let ran = !tree.pids.is_empty();
        let asked = proc.spec().stop_signal.as_deref().and_then(|text| parse_signal(text).ok());
        let signal = asked.unwrap_or(Signal::TERM.as_raw());
        if !grace.is_zero() {
            let host = tree.threads.get(&program).copied();
            // A shell that is typed at ignores SIGTERM, but not that its terminal is hung up:
            // systemd has SendSIGHUP for it.
            let ignores =
                |host: u32| Status::read(host).is_ok_and(|status| status.signals("SigIgn:") >> (signal - 1) & 1 == 1);
            let hang_up = (proc.spec().terminal && host.is_some_and(ignores)).then_some(Signal::HUP.as_raw());
            let told = host.and_then(|host| kip_sys::process::pidfd_open(host).ok());
            let told = told.is_some_and(|pidfd| {
                let send = |signal| kip_sys::process::pidfd_send_signal_number(pidfd.as_fd(), signal).is_ok();
                let first = send(signal);
                first | hang_up.is_some_and(send)
            });
            // One that has ended by itself just now: pid 1 is about to say how, and ends too.
            proc.wait_until_empty(if told { grace } else { grace.min(JUST_ENDED) });
        }
        if let Err(e) = proc.cgroup.kill(PATIENCE) {
            tracing::warn!(proc = %proc.name, error = chain(&e), "processes could not be ended");
        }
        reported_exit(&proc).or(ran.then_some(Exit::Signal(9)))
    })
    .await
}

/// Sends a signal to the program, whose pid inside is `program`. Its children are left alone.
///
/// # Errors
/// It is not there, or pidfd_send_signal(2).
pub fn signal(proc: &Proc, program: u32, number: i32) -> io::Result<()> {
    let host = || -> io::Result<u32> {
        let tree = Tree::read(&proc.cgroup.pids().map_err(io::Error::other)?);
        Ok(tree.threads.get(&program).copied().ok_or(io::ErrorKind::NotFound)?)
    };
    let found = host()?;
    let pidfd = kip_sys::process::pidfd_open(found)?;
    // The number was the program's when that was opened, and no other process's.
    if host()? != found {
        return Err(io::ErrorKind::NotFound.into());
    }
    kip_sys::process::pidfd_send_signal_number(pidfd.as_fd(), number)
}

/// Removes rules and links that were left by procs that ended.
pub fn remove_networks(machine: &Host, slots: &[Slot]) -> Result<(), Refusal> {
    let failed = |what: &str, e: &dyn std::error::Error| {
        Refusal::new(Code::Failed, format!("{what} of procs that have ended cannot be removed: {}", chain(e)))
    };
    for some in slots.chunks(NETWORKS_AT_ONCE) {
        machine.nat.unpublish(some).map_err(|e| failed("port forwarding", &e))?;
        machine.pool.release(some).map_err(|e| failed("network links", &e))?;
    }
    Ok(())
}

/// Lets go everything but name, files and logs: processes, cgroup, network, ports, descriptors.
pub async fn release(proc: &Arc<Proc>, network: NetworkFate) {
    let proc = Arc::clone(proc);
    blocking(move || {
        let warn = |what: &str, e: &dyn std::error::Error| {
            tracing::warn!(proc = %proc.name, what, error = chain(e), "something of a stopped proc is left");
        };
        if let Err(e) = proc.cgroup.kill(PATIENCE) {
            warn("processes", &e);
        }
        crate::hibernate::forget(&proc);
        proc.resolver.end();
        proc.console.finish();
        let _ = proc.shared.logs.remove(proc.key.as_str());
        let goes = matches!(network, NetworkFate::Removed | NetworkFate::Reserved);
        if goes && let Err(e) = proc.shared.nat.unpublish(&[proc.slot]) {
            warn("port forwarding", &e);
        }
        fault::reach("remove-network");
        // A program may have sent its end of a connection over itself, so that the daemon's never
        // reads an end: what serves it, and what waits in it, goes with the proc all the same.
        for socket in proc.fd_store.keys(key::RUNTIME).iter().filter_map(|key| proc.fd_store.get(key)) {
            let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
        }
        let let_go: &[&str] = match network {
            NetworkFate::Reserved | NetworkFate::Kept => &[key::IO, key::DNS, key::RUNTIME, key::ASLEEP],
            NetworkFate::Removed | NetworkFate::Left => &key::ALL_UP,
        };
        for prefix in let_go {
            if let Err(e) = proc.fd_store.drop_prefix(prefix) {
                warn("descriptors", &e);
            }
        }
        // They end with the program, whatever comes after it; only now no connection of the program
        // adds one.
        let leases = proc.dir.join(LEASES);
        if let Ok(found) = std::fs::metadata(&leases) {
            let _ = std::fs::rename(leases, proc.dir.join(ended_leases(found.ino())));
        }
        if goes && let Err(e) = proc.shared.pool.release(&[proc.slot]) {
            warn("network link", &e);
        }
        // The last word of a counter that goes with it.
        proc.sample_cpu();
        match proc.cgroup.remove() {
            Ok(()) => proc.meter.without_cgroup(),
            Err(e) => warn("cgroup", &e),
        }
    })
    .await;
}

/// Removes the proc whole; its slot is free again.
pub async fn remove(proc: &Arc<Proc>) -> Result<(), Refusal> {
    fault::reach("remove-intent");
    release(proc, NetworkFate::Removed).await;
    let proc = Arc::clone(proc);
    blocking(move || {
        if let Err(e) = proc.fd_store.drop_prefix(key::PROBE) {
            tracing::warn!(proc = %proc.name, error = chain(&e), "the keeper did not let the ports of its probes go");
        }
        fault::reach("remove-files");
        proc.files.wait_until_unused();
        proc.shared.records.remove(&proc.key).and_then(kip_records::record::Trash::delete).map_err(|e| {
            Refusal::new(Code::Failed, format!("the files of {} cannot be removed: {}", proc.name, chain(&e)))
        })?;
        proc.shared.strike(proc.slot);
        Ok(())
    })
    .await
}
