//! Turns the images of a snapshot into the plan by which `kip-restore` rebuilds the tree without
//! CRIU.
//!
//! The plan is made after a dump, ahead of the wake, and only of what both sides know well:
//! [`compile`] says [`PlanError::Unsupported`] about everything else, and CRIU then restores as it
//! always could. What the kernel can keep without a process (sockets, pipes, epoll sets, eventfds,
//! timerfds) is not rebuilt but held open through the sleep ([`objects`]) and handed back.
//! Everything in memory and on disk comes from the same images that CRIU reads.
//!
//! A plan is a derived file: it belongs to one generation on one boot of one kernel, carries its
//! own checksum, and can be thrown away at any time. Its layout is that of the structures in
//! crates/sandbox/restorer/restorer.c.

mod deleted;
mod family;
mod files;
mod filters;
mod inherit;
mod layout;
mod memfd;
pub(crate) mod memory;
mod memory_files;
mod of_processes;
mod settings;
mod system_v;
mod tasks;

pub use crate::objects::HeldObject;
pub use files::inode_of;
pub use files::objects;
pub use layout::{AREA, AREA_END, RESTORER_STACK};
pub use memfd::{MemoryFile, MemoryFiles, Opened, Piece};

use crate::registers::Registers;
use crate::terminals::Controlled;
use kip_clocks::Clocks;
use kip_criu_images::{CheckpointImageError, Images, Malformed};
use kip_snapshot::pages::PageMap;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;

/// Name of the file in the images' directory.
pub const PLAN: &str = "wake.plan";
/// First word of the file; its last byte counts what changed, the restorer's addresses too.
const MAGIC: u64 = u64::from_le_bytes(*b"KIPPLANE");
/// Magic, checksum, length of the description.
const HEAD_BYTES: usize = 24;

/// What the wake hands to the restorer, in this order, after the plan itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Received {
    /// The plan.
    Plan,
    /// This file of the images' directory, read-only.
    Pages(String),
    /// The held object with this file id of the images.
    Object(u64),
    /// The held file or FIFO with this file id, which has no name any more, opened once more.
    Deleted(u64),
    /// The held inotify instance with this file id.
    Inotify(u64),
    /// The held INET socket with this inode.
    Socket(u32),
    /// /dev/userfaultfd.
    Device,
    /// A memory file, made from the images.
    Memory(MemoryFile),
    /// The same, as the program has it open by a descriptor.
    OpenMemory(MemoryFile, Opened),
}

/// A thread that will report itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedThread {
    /// Number inside.
    pub id: u32,
    /// What it goes on with.
    pub registers: Registers,
    /// Filters of its program's own, in the order in which they are set.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub filters: Vec<OwnFilter>,
}

/// A system call filter that a thread is made to set once nothing else is left to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnFilter {
    /// Address of its `struct sock_fprog` in the plan, where that lies in the process.
    pub program: u64,
    /// As seccomp(2) takes them.
    pub flags: u64,
}

/// A process that will report itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedTask {
    /// Number inside.
    pub pid: u32,
    /// Where its vdso will be.
    pub vdso: u64,
    /// Its threads, the leader first.
    pub threads: Vec<PlannedThread>,
    /// Pages in those mappings of it that are filled after it runs, for which it makes a
    /// userfaultfd; 0 if there are none. A few of them are there before, see [`Plan::eager`].
    #[serde(default)]
    pub can_come: u64,
    /// A signal has stopped it, and it stays so.
    #[serde(default)]
    pub stopped: bool,
    /// Inodes of the INET sockets that it has open.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub sockets: BTreeSet<u32>,
}

/// A plan and what the daemon needs to carry it out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// What is handed over.
    pub received: Vec<Received>,
    /// The tree without pid 1, by the index that the restorer calls each by.
    pub tasks: BTreeMap<u64, PlannedTask>,
    /// Number of the first descriptor of the restorer's own.
    pub base: u64,
    /// Some of what is held is bound to the proc's files: it takes the same filesystems as before.
    #[serde(default)]
    pub same_files: bool,
    /// What of the page files is read, as number of the file, first page and pages, if some is left
    /// out; else all is.
    #[serde(default)]
    pub eager: Vec<(u32, u32, u32)>,
    /// For the restorer.
    #[serde(skip)]
    pub program: Vec<u8>,
    /// Where that is in the plan's file.
    #[serde(skip)]
    pub at: u64,
}

/// No plan can be made; CRIU has to restore.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The tree has something that only CRIU can restore.
    #[error("{what}")]
    Unsupported {
        /// What.
        what: String,
    },
    /// An image.
    #[error(transparent)]
    Image(#[from] CheckpointImageError),
    /// A message in an image.
    #[error("an image is damaged")]
    Damaged(#[from] Malformed),
    /// The plan was made by a Kip that writes them differently.
    #[error("the plan is of another version")]
    OtherVersion,
    /// The plan's own file.
    #[error("the plan cannot be read or written")]
    File(#[source] io::Error),
}

/// For `?` on what is not supported.
fn unsupported<T>(what: impl Into<String>) -> Result<T, PlanError> {
    Err(PlanError::Unsupported { what: what.into() })
}

/// What a plan is made for.
#[derive(Debug, Clone, Copy)]
pub struct Wish<'a> {
    /// When CRIU read the timers of each process, and what the program's clock was then.
    pub clocks: &'a Clocks,
    /// Stopped processes of which their parents have not learned by wait(2).
    pub unreported: &'a [u32],
    /// The sessions that have a terminal.
    pub terminals: &'a [Controlled],
    /// Where the memory lies.
    pub pages: &'a PageMap,
    /// So many bytes of memory that can come later do so; 0: whatever can, also in small trees.
    pub lazy_from: u64,
    /// The path inside of kip-init, which becomes pid 1.
    pub init: &'a str,
    /// The process that it waits for.
    pub program: u32,
}

/// Makes the plan.
pub fn compile(images: &Images, wish: &Wish<'_>) -> Result<Plan, PlanError> {
    let mut writer = layout::Writer::new();
    let mut files = files::Files::read(images)?;
    let tree = tasks::read(images)?;
    let tasks::Written { planned, program, eager } = tasks::write(&mut writer, &mut files, images, &tree, wish)?;
    let eager = eager.iter().map(|run| (run.file, run.first, run.pages)).collect();
    let files::Files { received, same_files, .. } = files;
    if program.bytes.len() as u64 > layout::PLAN_MOST {
        return unsupported("a plan of more than 256 MiB, of messages in queues for one");
    }
    Ok(Plan { received, tasks: planned, base: program.base, same_files, eager, program: program.bytes, at: 0 })
}

impl Plan {
    /// Numbers inside of the processes that have none of these sockets open; of none if no process
    /// has.
    pub fn without(&self, sockets: &BTreeSet<u32>) -> BTreeSet<u32> {
        let (without, with): (Vec<_>, Vec<_>) = self.tasks.values().partition(|task| task.sockets.is_disjoint(sockets));
        if with.is_empty() { BTreeSet::new() } else { without.into_iter().map(|task| task.pid).collect() }
    }

    /// Whether memory is left out.
    pub fn is_lazy(&self) -> bool {
        self.tasks.values().any(|task| task.can_come > 0)
    }

    /// Writes [`PLAN`]: a head, a description in JSON and, at a page boundary, the restorer's part.
    pub fn save(&self, images: &Path) -> Result<(), PlanError> {
        let text = serde_json::to_vec(self).expect("numbers and strings");
        let mut rest = text.clone();
        rest.resize((HEAD_BYTES + text.len()).next_multiple_of(layout::PAGE) - HEAD_BYTES, 0);
        rest.extend_from_slice(&self.program);
        let mut bytes = Vec::with_capacity(HEAD_BYTES + rest.len());
        for word in [MAGIC, u64::from(crc32fast::hash(&rest)), text.len() as u64] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(&rest);
        let path = images.join(PLAN);
        let temporary = images.join("wake.plan.new");
        fs::write(&temporary, bytes).and_then(|()| fs::rename(&temporary, &path)).map_err(PlanError::File)
    }

    /// Reads it back; None if there is none.
    pub fn load(images: &Path) -> Result<Option<Plan>, PlanError> {
        let bytes = match fs::read(images.join(PLAN)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(PlanError::File)?,
        };
        let damaged = || PlanError::File(io::ErrorKind::InvalidData.into());
        let word = |n: usize| -> Option<u64> {
            Some(u64::from_le_bytes(bytes.get(8 * n..8 * n + 8)?.try_into().expect("8 bytes")))
        };
        if word(0).is_some_and(|magic| magic != MAGIC && (magic ^ MAGIC) << 8 == 0) {
            return Err(PlanError::OtherVersion);
        }
        let (Some(MAGIC), Some(crc), Some(length)) = (word(0), word(1), word(2)) else { return Err(damaged()) };
        let rest = &bytes[HEAD_BYTES..];
        if u64::from(crc32fast::hash(rest)) != crc {
            return Err(damaged());
        }
        let length = usize::try_from(length).map_err(|_| damaged())?;
        let text = rest.get(..length).ok_or_else(damaged)?;
        let mut plan: Plan = serde_json::from_slice(text).map_err(|_| damaged())?;
        let at = (HEAD_BYTES + length).next_multiple_of(layout::PAGE);
        plan.program = bytes.get(at..).ok_or_else(damaged)?.to_vec();
        plan.at = at as u64;
        Ok(Some(plan))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        let registers =
            Registers { general: (0..27).collect(), floating: vec![0, 0, 7, 0, 0, 0, 0, 0, 0, 9], blocked: 4 };
        let task = PlannedTask {
            pid: 2,
            vdso: 0x7000,
            threads: vec![PlannedThread { id: 2, registers, filters: vec![OwnFilter { program: 8, flags: 1 }] }],
            can_come: 3,
            stopped: true,
            sockets: BTreeSet::from([9]),
        };
        Plan {
            received: vec![
                Received::Plan,
                Received::Pages("pages-2.img".into()),
                Received::Object(7),
                Received::Socket(9),
            ],
            tasks: BTreeMap::from([(1, task)]),
            base: 320,
            same_files: true,
            eager: vec![(0, 1, 2)],
            program: (0..9000u32).map(|n| n as u8).collect(),
            at: 4096,
        }
    }

    #[test]
    fn a_saved_plan_is_read_back_and_every_flipped_bit_is_found() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Plan::load(dir.path()).unwrap(), None);
        plan().save(dir.path()).unwrap();
        assert_eq!(Plan::load(dir.path()).unwrap(), Some(plan()));
        let good = fs::read(dir.path().join(PLAN)).unwrap();
        for at in (0..16).chain((24..good.len()).step_by(97)) {
            let mut bad = good.clone();
            bad[at] ^= 16;
            fs::write(dir.path().join(PLAN), bad).unwrap();
            assert!(Plan::load(dir.path()).is_err(), "byte {at}");
        }
        fs::write(dir.path().join(PLAN), &good[..good.len() - 1]).unwrap();
        assert!(Plan::load(dir.path()).is_err(), "cut short");
    }
}
