//! Whether the own clock of a proc, CLOCK_MONOTONIC, stands while the proc is parked, and by which
//! word.
//!
//! The owner's word (`--clock`, or the request to sleep) counts always; without one a profile
//! ([`kip_types::profile`]) counts where every process is the profile's and no connection is open,
//! for a peer may wait for a timer. Reads only; what is read here of a program that runs may be
//! another a moment later: the park asks again with the program frozen.

use crate::host::Proc;
use kip_clocks::tree;
use kip_net::diag::Diag;
use kip_types::profile::{self, Process, Profile};
use kip_types::spec::Clock;
use kip_types::suspend::SuspendedBy;
use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};

/// The word for a sleep of a proc with these processes (host ids, pid 1 of the sandbox first), by
/// its own `clock`. `once`: its owner asks for this sleep, and may say what its clock does.
/// `connected` tells whether a connection is open.
pub fn word(
    clock: Clock,
    once: Option<Option<Clock>>,
    pids: &[u32],
    connected: impl FnOnce() -> bool,
) -> Option<SuspendedBy> {
    match (once, clock) {
        (Some(Some(Clock::Suspend)), _) | (Some(None), Clock::Auto) => Some(SuspendedBy::Once),
        (Some(Some(Clock::Continue)), _) | (_, Clock::Continue) => None,
        (_, Clock::Suspend) => Some(SuspendedBy::Owner),
        (_, Clock::Auto) => {
            profile_of(pids).filter(|_| !connected()).map(|profile| SuspendedBy::Profile(profile.name.to_owned()))
        }
    }
}

/// The word for a proc that runs or is hibernated, were it parked now. Reads files of its
/// processes: not for a task's own thread.
pub fn suspends(proc: &Proc) -> Option<SuspendedBy> {
    let pids = tree::inside(&proc.cgroup.pids().ok()?);
    word(proc.spec().timing.clock, None, &pids, || is_connected(&pids))
}

/// The profile of all these processes but the first, which is pid 1 of the sandbox.
pub fn profile_of(pids: &[u32]) -> Option<&'static Profile> {
    // One that ends meanwhile cannot be told from one that hides.
    let processes: Option<Vec<_>> = pids.iter().skip(1).map(|pid| process(*pid)).collect();
    profile::of(&processes?)
}

fn process(pid: u32) -> Option<Process> {
    let program = fs::read_link(format!("/proc/{pid}/exe")).ok()?.to_string_lossy().into_owned();
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let arguments = line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
    Some(Process { program, arguments })
}

/// Whether a TCP connection of theirs is open. What cannot be told is one.
fn is_connected(pids: &[u32]) -> bool {
    let Some(namespace) = pids.first().and_then(|pid| File::open(format!("/proc/{pid}/ns/net")).ok()) else {
        return true;
    };
    let connections = Diag::open_in(namespace.as_fd()).and_then(|diag| diag.connections());
    connections.map_or(true, |connections| !connections.is_empty())
}

/// Whether that is a socket with a peer.
pub fn is_connection(fd: &OwnedFd) -> bool {
    let is_stream = rustix::net::sockopt::socket_type(fd).is_ok_and(|kind| kind == rustix::net::SocketType::STREAM);
    is_stream && rustix::net::getpeername(fd).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owner_s_word_goes_before_a_profile_s() {
        let says = |clock, once| word(clock, once, &[], || panic!("there is no profile to ask it for"));
        assert_eq!(says(Clock::Suspend, None), Some(SuspendedBy::Owner));
        assert_eq!(says(Clock::Auto, None), None, "no process is no program's");
        assert_eq!(says(Clock::Auto, Some(None)), Some(SuspendedBy::Once));
        assert_eq!(says(Clock::Continue, Some(None)), None);
        assert_eq!(says(Clock::Suspend, Some(Some(Clock::Continue))), None, "for one sleep");
        assert_eq!(says(Clock::Continue, Some(Some(Clock::Suspend))), Some(SuspendedBy::Once));
        assert_eq!(says(Clock::Auto, Some(Some(Clock::Auto))), None);
        assert_eq!(says(Clock::Suspend, Some(Some(Clock::Auto))), Some(SuspendedBy::Owner));
    }
}
