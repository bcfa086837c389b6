//! Terminals of a proc over a sleep: which are open, which sessions have them, and their file
//! system at the wake.
//!
//! The terminals themselves are held as other objects are ([`crate::park`]), each with what is in
//! its queues. Never speaks to a client.

use crate::host::Proc;
use kip_checkpoint::terminals::{self, Controlled};
use kip_clocks::tree::{self, Tree, inner_id};
use kip_records::body::Body;
use kip_sandbox::terminals::{device, mount, mounted};
use kip_sandbox::volume::Volume;
use kip_sys::status::Status;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};

/// Whether the sandbox whose pid 1 is `init` has terminals of its own.
pub(crate) fn are_there(init: u32) -> bool {
    File::open(format!("/proc/{init}/root")).is_ok_and(|root| device(root.as_fd()).is_some())
}

/// CRIU's words for the terminals that a tree has open, those that have been hung up among them.
pub(crate) fn outside(tree: &Tree) -> BTreeSet<String> {
    let all = tree.pids.iter().flat_map(|pid| {
        let open = tree::descriptors(*pid).unwrap_or_default().into_iter();
        open.filter(|(_, target)| may_be(target)).map(move |(number, _)| format!("/proc/{pid}/fd/{number}"))
    });
    let devices = all.filter_map(|path| fs::metadata(path).ok()).filter(|meta| meta.file_type().is_char_device());
    devices.filter_map(|meta| terminals::external(meta.rdev(), meta.dev())).collect()
}

/// Whether a file may be a terminal, by the target of its link in /proc: `/dev/pts/3`, `/3` where
/// its mount is held only, `/dev/tty`, `/dev/pts/ptmx`, each of them deleted or not.
fn may_be(target: &str) -> bool {
    let path = target.strip_suffix(" (deleted)").unwrap_or(target);
    let name = path.rsplit('/').next().unwrap_or_default();
    path.starts_with('/') && (matches!(name, "tty" | "ptmx") || name.bytes().all(|byte| byte.is_ascii_digit()))
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

/// The file system of a sleeper's terminals: that which is held, where some are open, else a new
/// one.
pub(crate) fn for_wake(proc: &Proc, body: &Body, held: Option<OwnedFd>) -> io::Result<Option<Volume>> {
    match (&body.terminals, held) {
        (None, _) => Ok(None),
        (Some(_), Some(held)) => Ok(Some(mounted(held))),
        (Some(_), None) => mount(proc.first_id()).map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_a_terminal_is_looked_at() {
        assert!(
            ["/dev/pts/0", "/12", "/dev/pts/3 (deleted)", "/dev/tty", "/dev/pts/ptmx", "/ptmx"].into_iter().all(may_be)
        );
        let others = ["/srv/file", "socket:[12]", "pipe:[7]", "/dev/null", "anon_inode:[eventfd]", "12", "/srv/tty0"];
        assert!(!others.into_iter().any(may_be));
    }
}
