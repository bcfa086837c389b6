//! What a generation's manifest says beyond its files: what a sleeper needs of the kernel and of
//! the machine to wake.

use kip_checkpoint::Owned;
use kip_checkpoint::attributes::ThreadAttributes;
use kip_checkpoint::terminals::Controlled;
use kip_clocks::{Boot, Clocks};
use kip_net::custody::SavedOptions;
use kip_net::renewal::Recipe;
use kip_remake::ObjectNote;
use kip_types::suspend::SuspendedBy;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A socket of a sleeper.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SleepingSocket {
    /// Inode; also its key in the fd store.
    pub inode: u32,
    /// Its options as the program set them.
    pub options: SavedOptions,
    /// How to make it again if it is lost.
    #[serde(default)]
    pub recipe: Option<Recipe>,
}

/// What the images take for granted of the place where they were made: what has to be moved in
/// another one.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ImagesHome {
    /// First host id of the proc's block of ids.
    pub first_id: u32,
    /// Clocks are those of this boot.
    pub boot: Boot,
    /// CRIU's keys of its pipes, by the keys of the fd store.
    pub pipes: BTreeMap<String, String>,
    /// The machine's name.
    #[serde(default)]
    pub machine: String,
}

/// What a generation's manifest says beyond its files.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Body {
    /// Time.
    pub clocks: Clocks,
    /// INET sockets, held.
    pub sockets: Vec<SleepingSocket>,
    /// Masked paths, mounts from outside.
    pub masks: Vec<String>,
    /// Base files that are mapped or open.
    pub pins: Vec<Pin>,
    /// The IPC namespace is in the images: it has System V memory that is mapped.
    pub own_ipc: bool,
    /// Where it was made; none in generations of a Kip before 0.2.
    #[serde(default)]
    pub home: Option<ImagesHome>,
    /// Volumes, mounted in this order.
    #[serde(default)]
    pub volumes: Vec<Slept>,
    /// inotify instances, held.
    #[serde(default)]
    pub inotify: Vec<SleepingInotify>,
    /// By which word its clock stands; none if it goes on.
    #[serde(default)]
    pub suspended: Option<SuspendedBy>,
    /// Stopped processes (by id inside) of which their parents have not learned.
    #[serde(default, rename = "untold")]
    pub unreported: Vec<u32>,
    /// Owners of open files.
    #[serde(default)]
    pub owned: Vec<Owned>,
    /// Its terminals; none in generations of a Kip that gave it no devpts.
    #[serde(default)]
    pub terminals: Option<SleepingTerminals>,
    /// File systems in memory; none in generations of a Kip that gave it none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tmpfs: Vec<SleptTmpfs>,
    /// Mount points at and below `/sys`, in their order; none in generations of a Kip that gave it
    /// no `/sys`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sys: Vec<String>,
    /// Threads with attributes of their own that no image has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attributes: Vec<ThreadAttributes>,
    /// What no image has of pipes and eventfds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub objects: Vec<ObjectNote>,
    /// How many threads it has; 0 in generations before format 3, where each has an image file.
    #[serde(default)]
    pub threads: usize,
}

impl Body {
    /// The volumes without which it does not wake, and where they are.
    pub fn pinned_by(&self) -> Vec<String> {
        let machine = self.home.as_ref().map_or("", |home| home.machine.as_str());
        let line = |v: &Slept| format!("{} at {} on machine {machine}", v.path.display(), v.target);
        self.volumes.iter().map(line).collect()
    }

    /// Its clocks as they are in this boot of the machine.
    pub fn clocks_now(&self) -> Clocks {
        match (&self.home, Boot::read()) {
            (Some(home), Ok(now)) => self.clocks.clone().moved(&home.boot, &now),
            _ => self.clocks.clone(),
        }
    }
}

/// The terminals of a sleeper.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SleepingTerminals {
    /// Of which sessions each is the controlling terminal.
    pub controlled: Vec<Controlled>,
}

/// A volume of a sleeper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slept {
    /// Where it is on the host.
    pub path: PathBuf,
    /// Where its spec has it.
    pub target: String,
    /// Where that was: links inside are resolved.
    pub point: String,
    /// Of its root.
    pub inode: u64,
    /// Of secrets: the user and group inside that they belong to. They are made anew, so nothing
    /// else of them is compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<(u32, u32)>,
    /// What it had open or mapped in it.
    pub files: Vec<SleptFile>,
}

/// A file system in memory of a sleeper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SleptTmpfs {
    /// Where its spec has it.
    pub target: String,
    /// Where that was: links inside are resolved.
    pub point: String,
    /// The file of the generation that has what was in it; none if nothing was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

/// A file of a volume that a sleeper has open or mapped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SleptFile {
    /// Below the volume's root; empty for that itself.
    pub path: String,
    /// Number of the file, inode(7).
    pub inode: u64,
    /// Length, bytes.
    pub size: u64,
    /// Time of its last change, nanoseconds since the epoch.
    pub mtime_ns: i64,
    /// The same of its making, by which a file is told from an older one with its inode; 0 where
    /// the file system has none.
    pub born_ns: i64,
    /// The sleeper may change what is in it already.
    pub rewrites: bool,
}

/// An inotify instance of a sleeper.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SleepingInotify {
    /// Its file id in the images; also its key in the fd store.
    pub id: u64,
    /// Bytes of events of which the program knows.
    pub queued: u32,
    /// The end of the program's processes may be an event for it.
    pub sees_sleep: bool,
}

/// What identified a base file when it was pinned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    /// Path on the host and inside, below /usr; or that of the sandbox's own init inside.
    pub path: String,
    /// What the file was known by.
    pub id: PinId,
}

/// What a base file is known by. On disk it is a list of its four numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(u64, u64, u64, i64)", into = "(u64, u64, u64, i64)")]
pub struct PinId {
    /// Device; of init 0.
    pub dev: u64,
    /// Inode; of init 0.
    pub ino: u64,
    /// Size, bytes.
    pub size: u64,
    /// Modification time in nanoseconds since the epoch; of init the CRC-32 of its bytes.
    pub stamp: i64,
}

impl From<(u64, u64, u64, i64)> for PinId {
    fn from(numbers: (u64, u64, u64, i64)) -> PinId {
        let (dev, ino, size, stamp) = numbers;
        PinId { dev, ino, size, stamp }
    }
}

impl From<PinId> for (u64, u64, u64, i64) {
    fn from(id: PinId) -> Self {
        (id.dev, id.ino, id.size, id.stamp)
    }
}
