//! What a tree is, out of its images, for people: its processes, what they have open, their memory's map.
//!
//! Owns the model that a look at running processes fills, too. Reads what it is given, from a directory or from anywhere else,
//! and never a page of memory. Numbers of fields are those of CRIU's `images/*.proto`. What it does not know it leaves out
//! rather than refuse: a look is no judgement, that is [`crate::policy`].

mod files;
mod memory;

pub use files::{FileKind, OpenFile, UnixState};
pub use memory::{Mapping, What};

use crate::image::{Image, ImageError};
use crate::wire::{Malformed, Message};
use files::Files;
use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// `task_state` of a zombie.
const DEAD: u64 = 2;
/// What an image is called that is needed here.
const NAMES: [&str; 5] = ["pstree.img", "files.img", "memfd.img", "remap-fpath.img", "sk-queues.img"];
const PREFIXES: [&str; 6] = ["core-", "mm-", "ids-", "fs-", "fdinfo-", "pagemap-shmem-"];

/// Images of a generation that say what is to be shown, by name.
#[derive(Debug, Clone, Default)]
pub struct Images(BTreeMap<String, Vec<u8>>);

impl Images {
    /// Whether an image of that name is needed.
    pub fn wants(name: &str) -> bool {
        NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix)) && name.ends_with(".img")
    }

    /// Adds bytes behind those of that name.
    pub fn append(&mut self, name: &str, bytes: &[u8]) {
        self.0.entry(name.to_owned()).or_default().extend_from_slice(bytes);
    }

    /// Those of a directory.
    ///
    /// # Errors
    /// The file system's.
    pub fn read(dir: &Path) -> Result<Images, ImageError> {
        let at = |path: &Path| {
            let path = path.to_owned();
            move |source| ImageError::Io { path, source }
        };
        let mut images = Images::default();
        for entry in fs::read_dir(dir).map_err(at(dir))? {
            let path = entry.map_err(at(dir))?.path();
            if let Some(name) = path.file_name().and_then(|name| name.to_str()).filter(|name| Images::wants(name)) {
                images.append(name, &fs::read(&path).map_err(at(&path))?);
            }
        }
        Ok(images)
    }

    /// The entries of an image; none if there is no such image.
    fn entries(&self, name: &str) -> Result<Vec<Message>, ImageError> {
        let Some(bytes) = self.0.get(name) else { return Ok(Vec::new()) };
        Ok(Image::parse(Path::new(name), bytes).map_err(damaged(name))?.entries)
    }

    fn one(&self, name: &str) -> Result<Message, ImageError> {
        Ok(self.entries(name)?.into_iter().next().unwrap_or_default())
    }
}

fn damaged(name: &str) -> impl FnOnce(Malformed) -> ImageError + '_ {
    move |source| ImageError::Damaged { path: PathBuf::from(name), source }
}

/// Where a process has its arguments and its environment: proc_pid_stat(5), prctl(2) PR_SET_MM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Strings {
    /// Arguments.
    pub arguments: Range<u64>,
    /// Environment.
    pub environment: Range<u64>,
}

/// A process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Process {
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
    pub strings: Strings,
    /// By descriptor.
    pub files: Vec<OpenFile>,
    /// By address.
    pub mappings: Vec<Mapping>,
}

/// All processes, by number.
///
/// # Errors
/// An image is damaged. One that is missing is as if it were empty.
pub fn look(images: &Images) -> Result<Vec<Process>, ImageError> {
    let files = Files::read(images)?;
    let mut found = Vec::new();
    for task in images.entries("pstree.img")? {
        found.push(process(images, &files, &task)?);
    }
    found.sort_by_key(|process| process.pid);
    Ok(found)
}

fn process(images: &Images, files: &Files, task: &Message) -> Result<Process, ImageError> {
    let pid = task.number(1) as u32;
    let name = format!("core-{pid}.img");
    let core = images.one(&name)?;
    let common = core.message(3).map_err(damaged(&name))?.unwrap_or_default();
    let thread = core.message(5).map_err(damaged(&name))?.unwrap_or_default();
    let creds = thread.message(10).map_err(damaged(&name))?.unwrap_or_default();
    let mut process = Process {
        pid,
        parent: task.number(2) as u32,
        name: common.string(6).unwrap_or_default().trim_end_matches('\0').to_owned(),
        ended: common.number(1) == DEAD,
        user: (creds.number(3) as u32, creds.number(4) as u32),
        ..Process::default()
    };
    if process.ended {
        return Ok(process);
    }
    let mm_name = format!("mm-{pid}.img");
    let mm = images.one(&mm_name)?;
    process.strings = Strings { arguments: mm.number(8)..mm.number(9), environment: mm.number(10)..mm.number(11) };
    process.program = files.path_of(mm.number(12));
    process.directory = files.path_of(images.one(&format!("fs-{pid}.img"))?.number(1));
    process.mappings = memory::mappings(images, files, &mm).map_err(damaged(&mm_name))?;
    let table = images.one(&format!("ids-{pid}.img"))?.number(2);
    for entry in images.entries(&format!("fdinfo-{table}.img"))? {
        process.files.extend(files.open(&entry));
    }
    process.files.sort_by_key(|file| file.fd);
    Ok(process)
}

#[cfg(test)]
#[path = "look_tests.rs"]
mod tests;
