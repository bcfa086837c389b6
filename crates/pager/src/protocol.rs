//! The messages between the daemon and `kip-pager`: JSON, one message a packet, on
//! `DIR/run/pager.sock`.
//!
//! A connection carries one request and its answer at a time; several connections are served at
//! once. One that asked to [`PagerRequest::Follow`] gets [`PagerEvent`]s from then on.
//!
//! For good, in every protocol, stay as they are: [`PagerRequest::Ping`] with its [`PagerStatus`],
//! and [`PagerRequest::Quit`] with [`PagerAnswer::Done`]: by these a daemon of any other version
//! puts its own pager in place ([`crate::client::Pager::supersede`]). What is out passes from one
//! to the other by the slot maps, whose form has a number of its own.

use crate::deflate::Deflated;
pub use kip_stop::timers::Timer;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Changes with every change of these messages.
pub const PROTOCOL: u32 = 10;
/// Most bytes of a message.
pub const MAX_MESSAGE: usize = 64 * 1024;
/// Most pages of a [`Peek`]: an answer has a line for each.
pub const MOST_PEEKED: usize = 256;

/// What a proc's memory is to be taken out with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The proc.
    pub name: String,
    /// Its own number among all of this pager's.
    pub number: u32,
    /// A directory for its swap file and slot maps, which need not exist.
    pub directory: PathBuf,
    /// The cgroup.procs file that lists its processes.
    pub processes: PathBuf,
    /// Told again with [`PagerEvent::Woke`], so that an old one is known as such.
    pub turn: u64,
    /// Its threads stand still until [`PagerRequest::Wake`]; otherwise the first that gets what it
    /// waits for wakes it.
    pub hold: bool,
    /// With [`Order::hold`]: all of its threads when the client began to look what they wait for.
    /// They are held only if none has run since then, for the client knows of no wait that began
    /// later.
    #[serde(default)]
    pub slept: Vec<Sleeper>,
    /// Pages that one tick of a program that ticks in place may bring back; 0 for a program that
    /// does not tick.
    pub patience: usize,
    /// The working set is kept and installed at the wake; otherwise every page comes by a fault.
    pub prefetch: bool,
    /// Clean pages of files are dropped too.
    pub drop_files: bool,
    /// What wakes it while it is held: one for each descriptor that comes with the order. The first
    /// that is readable wakes it, and all are closed here before it runs.
    pub watch: Vec<Purpose>,
}

/// A thread that slept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sleeper {
    /// Its id.
    pub tid: u32,
    /// How often it had left a processor by then.
    pub switches: u64,
}

/// What a wake is for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Purpose {
    /// Wakes of the same name have a working set of their own.
    pub set: String,
    /// A packet has come, before which no time-out ends that passes during the wake.
    pub packet: bool,
}

/// A proc that was rebuilt from a generation without a part of its memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rebuilt {
    /// The proc.
    pub name: String,
    /// As in [`Order`].
    pub number: u32,
    /// As in [`Order`].
    pub directory: PathBuf,
    /// Directory of the generation.
    pub generation: PathBuf,
    /// Host pid, number inside and pages that can come of each process, in the order of their
    /// descriptors.
    pub processes: Vec<(u32, u32, u64)>,
    /// The working set is installed; otherwise every page comes by a fault.
    pub prefetch: bool,
    /// As in [`Purpose`].
    pub set: String,
    /// Numbers inside of the processes whose working sets wait until they touch their memory: they
    /// have no part in what the proc is woken for.
    #[serde(default)]
    pub later: BTreeSet<u32>,
    /// The name of a page file of the generation whose pages copies of another proc's processes may
    /// still hold. Behind the userfaultfds come a file with the table of those pages
    /// ([`kip_snapshot::pages::copied::CopiedPages::table`]) and the memory of each copy.
    #[serde(default)]
    pub copied: Option<String>,
}

/// Pages that the daemon wants to see.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peek {
    /// The proc.
    pub name: String,
    /// As in [`Order`].
    pub processes: PathBuf,
    /// Host pid and address of each, at most [`MOST_PEEKED`].
    pub pages: Vec<(u32, u64)>,
}

/// What is found out about the waits of a program that runs, or done with them, for which its
/// threads stand still for a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Survey {
    /// The end of each wait of which the kernel does not say when it began:
    /// [`kip_stop::find_ends`].
    Ends,
    /// Each wait that ends by a time-out gets a record of its end: [`kip_stop::note_ends`].
    Records,
    /// The armed POSIX and interval timers.
    Timers,
}

/// What the daemon asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "lowercase")]
pub enum PagerRequest {
    /// Asks for the pager's [`PagerStatus`].
    Ping,
    /// How many bytes all working sets may take in memory; beyond that they are on disk.
    Budget {
        /// Bytes.
        bytes: usize,
    },
    /// Takes a proc's memory out.
    Hibernate(Order),
    /// Installs the working set and lets held threads go.
    Wake {
        /// The proc.
        name: String,
        /// What for.
        purpose: Purpose,
    },
    /// Wakes a held proc, without an answer: [`PagerEvent::Woke`] tells when it runs. The fastest
    /// way.
    Rouse {
        /// The proc.
        name: String,
        /// What for.
        purpose: Purpose,
    },
    /// Restores all memory and forgets the proc, which runs on.
    Restore {
        /// The proc.
        name: String,
    },
    /// Takes up a proc that was rebuilt without a part of its memory, and installs its working set.
    /// Each process comes with its userfaultfd; none of them runs yet.
    Inflate(Rebuilt),
    /// The proc's processes have ended: gives up what was kept for them.
    Forget {
        /// The proc.
        name: String,
    },
    /// All memory is in the page files that copies held for a proc: see [`Rebuilt::copied`].
    Copied {
        /// The proc.
        name: String,
    },
    /// Takes up a proc that a dead pager served, with the descriptors that the keeper has.
    Adopt {
        /// The proc.
        name: String,
        /// As in [`Order`].
        number: u32,
        /// As in [`Order`].
        directory: PathBuf,
    },
    /// The proc is about to be parked: lets held threads go, and nothing is a wake any more. What
    /// is out is served on.
    #[serde(rename = "settle")]
    PrepareParking {
        /// The proc.
        name: String,
    },
    /// Writes where everything lies that may be out into this file, a page map by host pid. All
    /// processes stand still.
    Account {
        /// The proc.
        name: String,
        /// The file, made anew.
        file: PathBuf,
    },
    /// Writes what missing pages hold, as [`PagerRequest::Account`], into the file that comes with
    /// it. Changes nothing.
    Chart {
        /// The proc.
        name: String,
    },
    /// Writes pages one behind the other into the file that comes with the request. Wakes no proc.
    Peek(Peek),
    /// Stops the threads of a proc that runs for a moment: see [`Survey`].
    Survey {
        /// The proc.
        name: String,
        /// As in [`Order`].
        processes: PathBuf,
        /// What for.
        survey: Survey,
    },
    /// Asks for the proc's [`MemoryStatus`].
    #[serde(rename = "look")]
    Inspect {
        /// The proc.
        name: String,
    },
    /// Puts all descriptors into the keeper, which is new.
    Mirror,
    /// Reports on this connection what happens.
    Follow,
    /// Ends the pager once nothing is under way.
    Quit,
}

/// The pager that serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagerStatus {
    /// Its process id.
    pub pid: u32,
    /// Its [`PROTOCOL`].
    pub protocol: u32,
}

impl PagerStatus {
    /// The status of this process.
    pub fn own() -> PagerStatus {
        PagerStatus { pid: std::process::id(), protocol: PROTOCOL }
    }
}

/// A finished [`PagerRequest::Hibernate`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hibernated {
    /// Its threads stood still so long, microseconds.
    pub frozen_us: u64,
    /// Pages that were there and are gone.
    pub dropped_pages: u64,
    /// Bytes written to the swap file.
    pub written_bytes: u64,
    /// Bytes of memory that the sets take from others.
    pub set_bytes: u64,
    /// Bytes that they may have in memory, the page cache included.
    #[serde(default)]
    pub kept_bytes: u64,
    /// Bytes that were left in memory, by the reason's word.
    pub left: BTreeMap<String, u64>,
    /// Armed timers, if it is held.
    pub timers: Vec<Timer>,
    /// Its threads are held. A program that was at work, or has been since the client looked at it,
    /// is not held although the order said so: it goes on at once.
    pub held: bool,
}

impl Hibernated {
    /// Adds what was done with one process.
    pub(crate) fn add(&mut self, one: &Deflated) {
        self.dropped_pages += one.dropped_pages;
        self.written_bytes += one.written_pages * crate::swap::PAGE as u64;
        self.set_bytes += one.set_bytes as u64;
        self.kept_bytes += one.kept_bytes as u64;
        for (reason, bytes) in one.left.iter().filter(|(_, bytes)| **bytes > 0) {
            *self.left.entry(reason.word().to_owned()).or_default() += bytes;
        }
        self.timers.extend(&one.timers);
    }
}

/// What the pager has of a proc.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryStatus {
    /// It is known here: some of its memory may be out.
    pub known: bool,
    /// It sleeps: what is out has not been touched since it was taken out.
    pub asleep: bool,
    /// Its threads are held.
    pub held: bool,
    /// It ticks in place: what its ticks touch is no wake.
    #[serde(default)]
    pub ticks: bool,
    /// Bytes in the swap file.
    pub swap_bytes: u64,
    /// Pages that came back by faults since the last sleep, and pages that were installed ahead.
    pub faults: u64,
    /// Pages that were installed ahead.
    pub installed: u64,
    /// Pages of the working set: of the next wake while it sleeps, else of the last.
    pub set_pages: u64,
    /// Bytes of memory that the sets take from others.
    pub set_bytes: u64,
}

/// A finished [`PagerRequest::Wake`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Woken {
    /// Installing took so long, microseconds.
    pub install_us: u64,
    /// Until all threads were let go, microseconds.
    pub total_us: u64,
    /// Pages installed.
    pub pages: u64,
    /// By a tick that needed more pages than ticks may.
    #[serde(default)]
    pub long_tick: bool,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "lowercase")]
pub enum PagerAnswer {
    /// To [`PagerRequest::Ping`].
    Status(PagerStatus),
    /// To [`PagerRequest::Hibernate`].
    Hibernated(Hibernated),
    /// To [`PagerRequest::Wake`] and [`PagerRequest::Inflate`].
    Woken(Woken),
    /// To [`PagerRequest::Survey`].
    Surveyed {
        /// The timers, if they were asked for.
        timers: Vec<Timer>,
    },
    /// To [`PagerRequest::Inspect`].
    #[serde(rename = "look")]
    MemoryStatus(MemoryStatus),
    /// To [`PagerRequest::Chart`].
    Charted {
        /// If not, nothing is out, and the file is empty.
        known: bool,
    },
    /// To [`PagerRequest::Peek`]: of which pages there are only zeros in the file.
    Peeked {
        /// Those that come from a store: place in the request, file in `parked` of the proc's
        /// directory, page.
        away: Vec<(u32, String, u32)>,
        /// Those that cannot be read: place in the request, and why.
        unread: Vec<(u32, String)>,
    },
    /// To [`PagerRequest::PrepareParking`]: whether the proc is known.
    #[serde(rename = "settled")]
    ParkingPrepared {
        /// If not, nothing is out.
        known: bool,
    },
    /// To everything else.
    Done,
    /// Nothing was done: there is no descriptor or thread for the request now.
    Busy {
        /// Why, one line.
        message: String,
    },
    /// It was not done.
    Refused {
        /// One line: what, and why.
        message: String,
    },
}

/// What happens by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum PagerEvent {
    /// A proc has touched what was out, or was roused.
    Woke {
        /// The proc.
        name: String,
        /// As in its [`Order`].
        number: u32,
        /// As in its [`Order`].
        turn: u64,
        /// From the first fault or the order on.
        woken: Woken,
        /// The place of that of its [`Order::watch`] that it was, if it was one.
        by: Option<usize>,
    },
    /// A page that a proc waits for is damaged where it lies: the proc must be ended.
    Damaged {
        /// The proc.
        name: String,
        /// As in its [`Order`].
        number: u32,
        /// Which page, and of what.
        message: String,
    },
    /// A proc waits for pages of a remote page file that are not here: [`kip_snapshot::remote`].
    /// Told once a second as long as a thread waits.
    Missing {
        /// The proc.
        name: String,
        /// As in its [`Order`].
        number: u32,
        /// Which of the files in `parked` of the proc's directory.
        file: String,
        /// The first page.
        first: u32,
        /// How many.
        pages: u32,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Other versions say these as they are written here.
    #[test]
    fn what_every_version_understands_never_changes() {
        let said = |text: &str| serde_json::from_str::<PagerRequest>(text).unwrap();
        assert_eq!((said(r#"{"do":"ping"}"#), said(r#"{"do":"quit"}"#)), (PagerRequest::Ping, PagerRequest::Quit));
        let status = PagerAnswer::Status(PagerStatus { pid: 7, protocol: 5 });
        assert_eq!(serde_json::to_string(&status).unwrap(), r#"{"is":"status","pid":7,"protocol":5}"#);
        assert_eq!(serde_json::to_string(&PagerAnswer::Done).unwrap(), r#"{"is":"done"}"#);
    }
}
