//! Terminals of a proc over a sleep: which are open, which sessions have them, and their file system at the wake.
//!
//! The terminals themselves are held as other objects are ([`crate::park`]), each with what is in its queues. Never speaks to a client.

use crate::fd_store::key;
use crate::host::Proc;
use crate::tree::{Tree, inner_id};
use kip_checkpoint::terminals::{self, Controlled};
use kip_criu_images::{ImageError, Images};
use kip_records::body::Body;
use kip_sandbox::terminals::{TARGET, device, mount, mounted};
use kip_sandbox::volume::Volume;
use kip_sys::status::Status;
use kip_types::chain;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

/// The numbers of the terminals that are open in the sandbox whose pid 1 is `init`; none if it has no devpts.
pub(crate) fn numbers(init: u32) -> Option<Vec<u32>> {
    let root = File::open(format!("/proc/{init}/root")).ok()?;
    device(root.as_fd())?;
    let names = fs::read_dir(format!("/proc/{init}/root{TARGET}")).ok()?.flatten();
    Some(names.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

/// What CRIU is told of these terminals of the sandbox.
pub(crate) fn outside(init: u32, numbers: &[u32]) -> Vec<String> {
    let device_of = |path: &str| fs::metadata(format!("/proc/{init}/root{path}")).map(|meta| meta.dev());
    match (numbers, device_of(TARGET), device_of("/dev/tty")) {
        ([], ..) | (_, Err(_), _) => Vec::new(),
        (numbers, Ok(dev), own) => terminals::external(numbers, dev, own.unwrap_or(dev)),
    }
}

/// The sessions of a tree that have a terminal: fields 5 to 8 of proc_pid_stat(5).
pub(crate) fn controlled(tree: &Tree) -> Vec<Controlled> {
    let stat = |pid: u32| -> Option<[i64; 4]> {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut words = text.rsplit_once(')')?.1.split_whitespace().skip(2).map(|word| word.parse().ok());
        Some([words.next()??, words.next()??, words.next()??, words.next()??])
    };
    let all: Vec<_> = tree.pids.iter().filter_map(|pid| Some((*pid, stat(*pid)?))).collect();
    let one = |(pid, [_, session, device, foreground]): &(u32, [i64; 4])| {
        if *session != i64::from(*pid) || *device == 0 {
            return None;
        }
        let inside = inner_id(*pid)?;
        let in_front = all.iter().find(|(_, [group, ..])| group == foreground);
        let foreground = in_front.and_then(|(pid, _)| Status::read(*pid).ok()?.inner_group());
        Some(Controlled { session: inside, device: *device as u64, foreground })
    };
    all.iter().filter_map(one).collect()
}

/// The held objects that are terminals of sessions.
pub(crate) fn of_sessions(images: &Images, controlled: &[Controlled]) -> Result<Vec<String>, ImageError> {
    if controlled.is_empty() {
        return Ok(Vec::new());
    }
    let slaves = terminals::slaves(images)?;
    let ids = controlled.iter().filter_map(|session| slaves.get(&session.device));
    Ok(ids.map(|id| format!("{}{id}", key::OBJECT)).collect())
}

/// Takes held terminals from the sessions that have them, just before these end: otherwise they would be hung up.
pub(crate) fn release(proc: &Proc, keys: &[String]) {
    let held: Vec<_> = keys.iter().filter_map(|key| proc.fd_store.get(key)).collect();
    if held.is_empty() {
        return;
    }
    let fds: Vec<_> = held.iter().map(|fd| fd.as_fd()).collect();
    if let Err(e) = proc.shared.launcher().release_terminals(&fds) {
        tracing::warn!(proc = %proc.name, error = chain(&e), "its terminals are hung up by this sleep");
    }
}

/// The file system of a sleeper's terminals: that which is held, where some are open, else a new one.
pub(crate) fn for_wake(proc: &Proc, body: &Body, held: Option<OwnedFd>) -> io::Result<Option<Volume>> {
    match (&body.terminals, held) {
        (None, _) => Ok(None),
        (Some(_), Some(held)) => Ok(Some(mounted(held))),
        (Some(_), None) => mount(proc.first_id()).map(Some),
    }
}
