//! What a checkpoint holds, for people: its processes, their open files, the map of their memory.
//!
//! Owns the model that an inspection of running processes fills, too. Reads images, from a
//! directory or from anywhere else, and never a page of memory. What it does not know it leaves out
//! rather than refuse: an inspection is no judgement; Kip's policy for images is.

mod files;
mod memory;

pub use files::{FileKind, OpenFile, UnixState, carry_descriptors};
pub use memory::{MappedRange, MappingKind};

use crate::codes::state;
use crate::fields::{core_entry, creds_entry, fs_entry, mm_entry, pstree_entry};
use crate::fields::{task_core_entry, task_kobj_ids_entry, thread_core_entry};
use crate::file::CheckpointImageError;
use crate::images::{CHECKPOINT, Images};
use crate::wire::Message;
use files::Files;
use std::ops::Range;

/// Names of images that an inspection reads.
const NAMES: [&str; 5] = ["pstree.img", "files.img", "memfd.img", "remap-fpath.img", "sk-queues.img"];
const PREFIXES: [&str; 6] = ["core-", "mm-", "ids-", "fs-", "fdinfo-", "pagemap-shmem-"];

/// Whether an inspection reads a file of that name: that of all images, or, of an older Kip's
/// generation, one of these.
pub fn is_wanted(name: &str) -> bool {
    let is_image = PREFIXES.iter().any(|prefix| name.starts_with(prefix)) && name.ends_with(".img");
    name == CHECKPOINT || NAMES.contains(&name) || is_image
}

/// The only entry of an image, an empty one where there is none.
fn one(images: &Images, name: &str) -> Result<Message, CheckpointImageError> {
    Ok(images.entries_if_any(name)?.into_iter().next().unwrap_or_default())
}

/// Where a process has its arguments and its environment: proc_pid_stat(5), prctl(2) PR_SET_MM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StringRanges {
    /// Arguments.
    pub arguments: Range<u64>,
    /// Environment.
    pub environment: Range<u64>,
}

/// A process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageProcess {
    /// Its number inside.
    pub pid: u32,
    /// Its parent's, 0 for none.
    pub parent: u32,
    /// Its name.
    pub name: String,
    /// It has ended, and its parent has not asked yet.
    pub ended: bool,
    /// Effective user and group, as numbered inside.
    pub user: (u32, u32),
    /// Path of its program.
    pub program: String,
    /// Its working directory.
    pub directory: String,
    /// Where its arguments are.
    pub strings: StringRanges,
    /// By descriptor.
    pub files: Vec<OpenFile>,
    /// By address.
    pub mappings: Vec<MappedRange>,
}

/// All processes, by number.
///
/// # Errors
/// An image is damaged. One that is missing is as if it were empty.
pub fn processes(images: &Images) -> Result<Vec<ImageProcess>, CheckpointImageError> {
    let files = Files::read(images)?;
    let mut found = Vec::new();
    for task in images.entries_if_any("pstree.img")? {
        found.push(process(images, &files, &task)?);
    }
    found.sort_by_key(|process| process.pid);
    Ok(found)
}

fn process(images: &Images, files: &Files, task: &Message) -> Result<ImageProcess, CheckpointImageError> {
    let pid = task.number(pstree_entry::PID) as u32;
    let name = format!("core-{pid}.img");
    let core = one(images, &name)?;
    let common = core.message(core_entry::TC).map_err(images.damaged(&name))?.unwrap_or_default();
    let thread = core.message(core_entry::THREAD_CORE).map_err(images.damaged(&name))?.unwrap_or_default();
    let creds = thread.message(thread_core_entry::CREDS).map_err(images.damaged(&name))?.unwrap_or_default();
    let mut process = ImageProcess {
        pid,
        parent: task.number(pstree_entry::PPID) as u32,
        name: common.string(task_core_entry::COMM).unwrap_or_default().trim_end_matches('\0').to_owned(),
        ended: common.number(task_core_entry::TASK_STATE) == state::DEAD,
        user: (creds.number(creds_entry::EUID) as u32, creds.number(creds_entry::EGID) as u32),
        ..ImageProcess::default()
    };
    if process.ended {
        return Ok(process);
    }
    let mm_name = format!("mm-{pid}.img");
    let mm = one(images, &mm_name)?;
    process.strings = StringRanges {
        arguments: mm.number(mm_entry::MM_ARG_START)..mm.number(mm_entry::MM_ARG_END),
        environment: mm.number(mm_entry::MM_ENV_START)..mm.number(mm_entry::MM_ENV_END),
    };
    process.program = files.path_of(mm.number(mm_entry::EXE_FILE_ID));
    process.directory = files.path_of(one(images, &format!("fs-{pid}.img"))?.number(fs_entry::CWD_ID));
    process.mappings = memory::mappings(images, files, &mm).map_err(images.damaged(&mm_name))?;
    let table = one(images, &format!("ids-{pid}.img"))?.number(task_kobj_ids_entry::FILES_ID);
    for entry in images.entries_if_any(&format!("fdinfo-{table}.img"))? {
        process.files.extend(files.open(&entry));
    }
    process.files.sort_by_key(|file| file.fd);
    Ok(process)
}

#[cfg(test)]
#[path = "inspect_tests.rs"]
mod tests;
