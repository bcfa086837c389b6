//! Descriptors: what is opened by path, and what was held.

use super::layout::{Span, Writer};
use super::memfd::MemoryFile;
use super::{PlanError, Received, unsupported};
use crate::inotify;
use crate::objects::HeldObject;
use crate::sockets;
use kip_criu_images::codes::{kind, remap};
use kip_criu_images::fields::{
    eventpoll_file_entry, fifo_entry, file_entry, fown_entry, memfd_file_entry, memfd_inode_entry, mm_entry,
    pidfd_entry, reg_file_entry, remap_file_path_entry, unix_sk_entry,
};
use kip_criu_images::inspect::carry_descriptors;
use kip_criu_images::{Images, Message};
use std::collections::{BTreeMap, BTreeSet};

/// Least number of a descriptor of the restorer's: above what one packet's descriptors get when
/// they arrive.
const LEAST_BASE: u64 = 320;

/// open(2) flags that only matter when a file is made, or would follow the snapshot's own: O_CREAT,
/// O_EXCL, O_NOCTTY, O_TRUNC, O_CLOEXEC.
const NOT_AGAIN: u64 = 0o100 | 0o200 | 0o400 | 0o1000 | 0o2_000_000;
/// `__O_TMPFILE`.
const TMPFILE: u64 = 0o20_000_000;
pub(super) const O_RDWR: u64 = 2;
/// pidfd_open(2).
const PIDFD_NONBLOCK: u64 = 0o4000;

/// What has to be held for a plan beyond the INET sockets; empty if the tree has something open
/// that can be in no plan.
pub fn objects(images: &Images) -> Result<Vec<HeldObject>, PlanError> {
    let files = Files::read(images)?;
    let places = kip_criu_images::processes::places(images)?;
    let mut found = Vec::new();
    for (id, file) in &files.by_id {
        // Only mapped, its descriptor closed.
        let mapped = file.number(file_entry::TYPE) == kind::MEMFD || files.is_deleted(*id);
        if mapped && !places.contains_key(id) {
            continue;
        }
        match files.check(file) {
            Err(PlanError::Unsupported { .. }) => return Ok(Vec::new()),
            other => other?,
        }
        // Inotify instances are held for CRIU as well ([`crate::inotify`]); a pidfd that is held is
        // of a process that has ended. A memory file is made again.
        if matches!(file.number(file_entry::TYPE), kind::INOTIFY | kind::PIDFD | kind::MEMFD) {
            continue;
        }
        if (file.number(file_entry::TYPE) != kind::REG || files.is_deleted(*id))
            && let Some(&(pid, fd)) = places.get(id)
        {
            found.push(HeldObject { id: *id, kind: file.number(file_entry::TYPE), pid, fd });
        }
    }
    Ok(found)
}

/// A file of proc(5) that a process of the tree opens when all are there.
#[derive(Debug, Clone)]
pub(super) struct ProcessFile {
    pub(super) path: String,
    /// The process that it is about.
    pub(super) process: u64,
    pub(super) flags: u64,
    pub(super) position: u64,
}

/// The files of a tree.
#[derive(Debug)]
pub(super) struct Files<'a> {
    pub(super) images: &'a Images,
    pub(super) by_id: BTreeMap<u64, Message>,
    /// How CRIU keeps files that their path does not lead to any more, and the number of what it
    /// keeps.
    pub(super) remapped: BTreeMap<u64, (u64, u64)>,
    /// The open files of deleted files, by the number of those.
    pub(super) open_ghosts: BTreeMap<u64, Vec<u64>>,
    /// How many descriptors each file has.
    pub(super) uses: BTreeMap<u64, usize>,
    /// A descriptor is in a packet between two sockets: that of a file which is made again would be
    /// another one's.
    pub(super) in_flight: bool,
    /// Bytes of the files that the daemon makes with what they had, by the number of their inode.
    pub(super) copied: BTreeMap<u64, u64>,
    /// The memory files that take the place of others, by the same number.
    pub(super) ghosts: BTreeMap<u64, MemoryFile>,
    /// CRIU's numbers of the mounts of `/` and `/usr`.
    root: Option<u64>,
    usr: Option<u64>,
    /// The device of /proc.
    proc: Option<u64>,
    /// Memory files by the number of their inode.
    pub(super) memory: BTreeMap<u64, Message>,
    /// Those that processes run from.
    pub(super) programs: BTreeSet<u64>,
    /// Those that processes have open and do not run from.
    pub(super) open_memory: BTreeSet<u64>,
    /// Those that processes share.
    pub(super) shared: BTreeSet<u64>,
    /// Those that are open for writing.
    written: BTreeSet<u64>,
    /// Something that is handed over is bound to a place in the file system.
    pub same_files: bool,
    /// What is handed over, by its place.
    pub received: Vec<Received>,
    /// (path, flags, position, size or !0) of what is opened, by its place after those.
    opened: Vec<(String, u64, u64, u64)>,
    pub(super) places: BTreeMap<Key, usize>,
}

/// Something that gets one descriptor.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    /// An open file of the program's.
    File(u64),
    /// What a process watches its memory with.
    Device,
    /// A path, for a mapping, an executable or a directory.
    Path(String, u64),
    /// A memory file, by the number of its inode.
    Memory(u64),
    /// The same, to be read only.
    ReadOnlyMemory(u64),
}

/// A descriptor of the restorer's; [`Files::number`] says which when all are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ref {
    Received(usize),
    Opened(usize),
}

impl<'a> Files<'a> {
    pub(super) fn read(images: &'a Images) -> Result<Files<'a>, PlanError> {
        let by_id: BTreeMap<u64, Message> =
            images.entries("files.img")?.into_iter().map(|f| (f.number(file_entry::ID), f)).collect();
        let memory = images.entries_if_any("memfd.img")?;
        let memory: BTreeMap<u64, Message> =
            memory.into_iter().map(|m| (m.number(memfd_inode_entry::INODE_ID), m)).collect();
        let remapped = images.entries_if_any("remap-fpath.img")?;
        let kept =
            |r: &Message| (r.number(remap_file_path_entry::REMAP_TYPE), r.number(remap_file_path_entry::REMAP_ID));
        let remapped: BTreeMap<u64, (u64, u64)> =
            remapped.into_iter().map(|r| (r.number(remap_file_path_entry::ORIG_ID), kept(&r))).collect();
        let open = if remapped.is_empty() && memory.is_empty() {
            BTreeMap::new()
        } else {
            kip_criu_images::processes::places(images)?
        };
        let mut open_ghosts: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for id in open.keys() {
            if let Some((remap::GHOST, number)) = remapped.get(id) {
                open_ghosts.entry(*number).or_default().push(*id);
            }
        }
        let programs = programs(images, &by_id)?;
        let open_memory = open_memory(&by_id, &open)?.into_iter().filter(|inode| !programs.contains(inode)).collect();
        let mounts = sockets::mounts(images)?;
        let of = |place: &str| mounts.iter().find(|(_, at)| at.as_str() == place).map(|(id, _)| *id);
        let (received, opened, places) = (vec![Received::Plan], Vec::new(), BTreeMap::new());
        Ok(Files {
            images,
            by_id,
            remapped,
            open_ghosts,
            uses: BTreeMap::new(),
            in_flight: carry_descriptors(images)?,
            copied: BTreeMap::new(),
            ghosts: BTreeMap::new(),
            root: of("/"),
            usr: of("/usr"),
            proc: inotify::proc_device(images)?,
            memory,
            programs,
            open_memory,
            shared: BTreeSet::new(),
            written: BTreeSet::new(),
            same_files: false,
            received,
            opened,
            places,
        })
    }

    pub(super) fn file(&self, id: u64) -> Result<&Message, PlanError> {
        match self.by_id.get(&id) {
            Some(file) => Ok(file),
            None => unsupported(format!("file {id} is in no image")),
        }
    }

    pub(super) fn kind(&self, id: u64) -> u64 {
        self.by_id.get(&id).map_or(0, |f| f.number(file_entry::TYPE))
    }

    /// The entries of an epoll set.
    pub(super) fn watches(&self, id: u64) -> Result<Vec<Message>, PlanError> {
        let set = self.file(id)?.message(file_entry::EPFD)?.unwrap_or_default();
        Ok(set.messages(eventpoll_file_entry::TFD)?)
    }

    /// A pidfd: the process, by its number inside, unless that has ended and gone; and its flags.
    pub(super) fn pidfd(&self, id: u64) -> Result<(Option<u64>, u64), PlanError> {
        let pidfd = self.file(id)?.message(file_entry::PIDFD)?.unwrap_or_default();
        if pidfd.message(pidfd_entry::FOWN)?.unwrap_or_default().number(fown_entry::PID) != 0 {
            return unsupported("how a pidfd is open");
        }
        let process = u64::from(pidfd.number(pidfd_entry::NSPID) as u32);
        let flags = pidfd.number(pidfd_entry::FLAGS) & PIDFD_NONBLOCK;
        Ok(((process != u64::from(u32::MAX)).then_some(process), flags))
    }

    /// A file that proc(5) has of a process, which is there to be opened once the process is; none
    /// for any other file. One that several descriptors share cannot be opened so.
    pub(super) fn process_file(&self, id: u64) -> Result<Option<ProcessFile>, PlanError> {
        let file = self.file(id)?;
        if file.number(file_entry::TYPE) != kind::REG {
            return Ok(None);
        }
        let reg = file.message(file_entry::REG)?.unwrap_or_default();
        let path = reg.string(reg_file_entry::NAME).unwrap_or_default();
        let Some(process) = self.process_of(&path, &reg)? else { return Ok(None) };
        if self.in_flight || self.uses.get(&id) != Some(&1) {
            return unsupported(format!("the open file {path}, which several descriptors share"));
        }
        let flags = reg.number(reg_file_entry::FLAGS) & !NOT_AGAIN;
        Ok(Some(ProcessFile { path, process, flags, position: reg.number(reg_file_entry::POS) }))
    }

    /// The process that such a file is of. Those of a thread, which is there later, of pid 1, which
    /// is kip-init executed anew, and of a process that has ended, cannot be opened.
    fn process_of(&self, path: &str, reg: &Message) -> Result<Option<u64>, PlanError> {
        let number = path.strip_prefix("/proc/").and_then(|rest| rest.split('/').next()?.parse::<u64>().ok());
        let Some(process) = number else { return Ok(None) };
        let is_usual = !self.remapped.contains_key(&reg.number(reg_file_entry::ID));
        let is_of_thread = path.split('/').any(|part| part == "task");
        if process == 1 || is_of_thread || !is_usual || reg.number(reg_file_entry::EXT) != 0 {
            return unsupported(format!("the open file {path}"));
        }
        check_owner(reg).map(|()| Some(process))
    }

    /// Whether such a file can be in a plan.
    fn check(&self, file: &Message) -> Result<(), PlanError> {
        match file.number(file_entry::TYPE) {
            kind::REG => {
                let reg = file.message(file_entry::REG)?.unwrap_or_default();
                match inode_of(&reg) {
                    None if self.is_deleted(file.number(file_entry::ID)) => {
                        self.check_overlay(&reg).and_then(|()| check_owner(&reg))
                    }
                    None => match self.process_of(&reg.string(reg_file_entry::NAME).unwrap_or_default(), &reg)? {
                        Some(_) => Ok(()),
                        None => self.path(&reg).map(drop),
                    },
                    Some(_) => Ok(()),
                }
            }
            kind::UNIXSK => {
                let socket = file.message(file_entry::USK)?.unwrap_or_default();
                // Once its mount is not the tree's any more the kernel leaves where that was out of
                // the directory.
                match socket.bytes(unix_sk_entry::NAME).and_then(|name| name.first()) {
                    Some(0 | b'/') | None => Ok(()),
                    Some(_) if is_mount(self.root, socket.varint(unix_sk_entry::MNT_ID)) => Ok(()),
                    Some(_) => unsupported("a unix socket bound to a relative path that is not in /"),
                }
            }
            kind::FIFO => {
                let file = self.file(fifo_file(file)?)?;
                self.check_overlay(&file.message(file_entry::REG)?.unwrap_or_default())
            }
            kind::INOTIFY if self.watches_proc(file)? => unsupported("an inotify watch in /proc"),
            kind::PIPE
            | kind::INOTIFY
            | kind::EVENTFD
            | kind::EVENTPOLL
            | kind::SIGNALFD
            | kind::NETLINKSK
            | kind::TTY
            | kind::TIMERFD => Ok(()),
            kind::MEMFD => self.opened_memory(file).map(drop),
            kind::PIDFD => self.pidfd(file.number(file_entry::ID)).map(drop),
            other => unsupported(format!("an open file of CRIU's type {other}")),
        }
    }

    /// Whether what is watched goes with the tree's /proc.
    fn watches_proc(&self, file: &Message) -> Result<bool, PlanError> {
        Ok(inotify::watches_device(file, self.proc)?)
    }

    /// Held, it is on a mount that is not the tree's any more, and CRIU has to find it on one that
    /// is.
    fn check_overlay(&self, reg: &Message) -> Result<(), PlanError> {
        let id = reg.varint(reg_file_entry::MNT_ID);
        if is_mount(self.root, id) || is_mount(self.usr, id) {
            return Ok(());
        }
        let path = reg.string(reg_file_entry::NAME).unwrap_or_default();
        unsupported(format!("{path} in a volume, a FIFO or deleted"))
    }

    /// Whether it is a file whose last name is gone.
    fn is_deleted(&self, id: u64) -> bool {
        self.remapped.get(&id).is_some_and(|(how, _)| *how == remap::GHOST)
    }

    /// Whether it is handed over as another open file than the one that was held: a deleted FIFO,
    /// see [`Received::Deleted`]. An epoll set that was held knows the one that was.
    pub(super) fn is_reopened(&self, id: u64) -> Result<bool, PlanError> {
        let file = self.file(id)?;
        Ok(file.number(file_entry::TYPE) == kind::FIFO && self.is_deleted(fifo_file(file)?))
    }

    /// The path of a regular file, if it can be opened by it.
    fn path(&self, reg: &Message) -> Result<String, PlanError> {
        let path = reg.string(reg_file_entry::NAME).unwrap_or_default();
        if self.remapped.contains_key(&reg.number(reg_file_entry::ID)) {
            return unsupported(format!("{path}, which is deleted, is mapped or in use otherwise"));
        }
        if !path.starts_with('/') || is_of_process(&path) || reg.number(reg_file_entry::EXT) != 0 {
            return unsupported(format!("the open file {path}"));
        }
        if reg.number(reg_file_entry::FLAGS) & TMPFILE == TMPFILE {
            return unsupported(format!("how {path} is open"));
        }
        check_owner(reg).map(|()| path)
    }

    /// An open file of the program's, with the state that all descriptors of it share.
    pub(super) fn open_file(&mut self, id: u64) -> Result<Ref, PlanError> {
        let file = self.file(id)?.clone();
        self.check(&file)?;
        let key = Key::File(id);
        if self.is_reopened(id)? {
            self.same_files = true;
            return Ok(self.receive(key, Received::Deleted(id)));
        }
        if file.number(file_entry::TYPE) == kind::INOTIFY {
            self.same_files = true;
            return Ok(self.receive(key, Received::Inotify(id)));
        }
        if file.number(file_entry::TYPE) == kind::MEMFD {
            let (inode, opened) = self.opened_memory(&file)?;
            if self.open_memory.contains(&inode) {
                let memory = self.made_memory_file(id)?;
                return Ok(self.receive(key, Received::OpenMemory(memory, opened)));
            }
            if self.shared.contains(&inode) || opened.is_writable() && !self.written.insert(inode) {
                return unsupported("how a memory file is open");
            }
            let memory = self.made_memory_file(id)?;
            return Ok(self.receive(key, Received::OpenMemory(memory, opened)));
        }
        if file.number(file_entry::TYPE) != kind::REG {
            self.same_files |= has_path(&file)?;
            return Ok(self.receive(key, Received::Object(id)));
        }
        let reg = file.message(file_entry::REG)?.unwrap_or_default();
        if let Some(inode) = inode_of(&reg) {
            return Ok(self.receive(key, Received::Socket(inode)));
        }
        if self.is_deleted(id) {
            self.same_files = true;
            return Ok(self.receive(key, Received::Deleted(id)));
        }
        let path = self.path(&reg)?;
        let size = reg.varint(reg_file_entry::SIZE).unwrap_or(u64::MAX);
        let flags = reg.number(reg_file_entry::FLAGS) & !NOT_AGAIN;
        Ok(self.open(key, (path, flags, reg.number(reg_file_entry::POS), size)))
    }

    /// A file by its path alone, for a mapping, an executable or a directory.
    pub(super) fn open_path(&mut self, id: u64, writable: bool) -> Result<Ref, PlanError> {
        let file = self.file(id)?.clone();
        let is_regular = file.number(file_entry::TYPE) == kind::REG;
        let Some(reg) = file.message(file_entry::REG)?.filter(|_| is_regular) else {
            return unsupported("a mapping of something that is no regular file");
        };
        let path = self.path(&reg)?;
        let flags = if writable { O_RDWR } else { 0 };
        let size = reg.varint(reg_file_entry::SIZE).unwrap_or(u64::MAX);
        Ok(self.open(Key::Path(path.clone(), flags), (path, flags, 0, size)))
    }

    /// What a process runs.
    pub(super) fn executable(&mut self, id: u64) -> Result<Ref, PlanError> {
        if self.kind(id) == kind::MEMFD { self.own_memory_file(id) } else { self.open_path(id, false) }
    }

    /// The path of a file.
    pub(super) fn path_of(&self, id: u64) -> Result<String, PlanError> {
        let reg = self.file(id)?.message(file_entry::REG)?;
        Ok(reg.and_then(|r| r.string(reg_file_entry::NAME)).unwrap_or_default())
    }

    /// A file of the images' directory.
    pub(super) fn pages(&mut self, name: &str) -> Ref {
        self.receive(Key::Path(name.to_owned(), u64::MAX), Received::Pages(name.to_owned()))
    }

    /// The device that gives out userfaultfds.
    pub(super) fn device(&mut self) -> Ref {
        self.receive(Key::Device, Received::Device)
    }

    pub(super) fn receive(&mut self, key: Key, what: Received) -> Ref {
        let next = self.received.len();
        let place = *self.places.entry(key).or_insert(next);
        if place == next {
            self.received.push(what);
        }
        Ref::Received(place)
    }

    fn open(&mut self, key: Key, what: (String, u64, u64, u64)) -> Ref {
        let next = self.opened.len();
        let place = *self.places.entry(key).or_insert(next);
        if place == next {
            self.opened.push(what);
        }
        Ref::Opened(place)
    }

    /// Every reference must have been made by now.
    pub(super) fn number(&self, of: Ref) -> u64 {
        match of {
            Ref::Received(n) => n as u64,
            Ref::Opened(n) => (self.received.len() + n) as u64,
        }
    }

    pub(super) fn write(&self, writer: &mut Writer) -> Span {
        let items: Vec<Vec<u64>> = self
            .opened
            .iter()
            .map(|(path, flags, position, size)| vec![writer.string(path), *flags, *position, *size])
            .collect();
        writer.list(&items)
    }
}

/// The inodes of memory files that have places in tables of descriptors.
fn open_memory(files: &BTreeMap<u64, Message>, open: &BTreeMap<u64, (u32, i32)>) -> Result<BTreeSet<u64>, PlanError> {
    let mut found = BTreeSet::new();
    for file in open.keys().filter_map(|id| files.get(id)) {
        if file.number(file_entry::TYPE) == kind::MEMFD {
            found.extend(file.message(file_entry::MEMFD)?.map(|file| file.number(memfd_file_entry::INODE_ID)));
        }
    }
    Ok(found)
}

/// The inodes of memory files that processes run from.
fn programs(images: &Images, files: &BTreeMap<u64, Message>) -> Result<BTreeSet<u64>, PlanError> {
    let mut found = BTreeSet::new();
    for (_, name) in images.numbered("mm") {
        let Some(mm) = images.first(&name)? else { continue };
        let Some(file) = files.get(&mm.number(mm_entry::EXE_FILE_ID)) else { continue };
        if file.number(file_entry::TYPE) == kind::MEMFD {
            found.extend(file.message(file_entry::MEMFD)?.map(|file| file.number(memfd_file_entry::INODE_ID)));
        }
    }
    Ok(found)
}

/// Whether a mount is that one, by its number as images have it: signed, in zigzag.
fn is_mount(mount: Option<u64>, id: Option<u64>) -> bool {
    mount.is_some() && mount == id.map(|id| id >> 1)
}

/// Whether a path leads to what proc(5) says of one process, which may not be there yet when files
/// are opened.
fn is_of_process(path: &str) -> bool {
    let first = path.strip_prefix("/proc/").and_then(|rest| rest.split('/').next());
    first.is_some_and(|name| matches!(name, "self" | "thread-self") || name.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Refuses a file that has an owner, to which signals about it are sent.
fn check_owner(reg: &Message) -> Result<(), PlanError> {
    match reg.message(reg_file_entry::FOWN)?.unwrap_or_default().number(fown_entry::PID) {
        0 => Ok(()),
        _ => unsupported(format!("how {} is open", reg.string(reg_file_entry::NAME).unwrap_or_default())),
    }
}

/// The id under which the images have a FIFO's path and flags.
fn fifo_file(fifo: &Message) -> Result<u64, PlanError> {
    Ok(fifo.message(file_entry::FIFO)?.unwrap_or_default().number(fifo_entry::REGF_ID))
}

/// Whether an object is one by its place in the file system.
fn has_path(file: &Message) -> Result<bool, PlanError> {
    let socket = file.message(file_entry::USK)?.unwrap_or_default();
    let name = socket.bytes(unix_sk_entry::NAME);
    let is_named = name.and_then(|name| name.first()).is_some_and(|first| *first != 0);
    Ok(file.number(file_entry::TYPE) == kind::FIFO || is_named)
}

/// The inode of a socket that has been turned into a file: see [`crate::sockets`].
pub fn inode_of(reg: &Message) -> Option<u32> {
    reg.string(reg_file_entry::NAME)?.strip_prefix("/socket:[")?.strip_suffix(']')?.parse().ok()
}

/// A number that is above all of the program's descriptors and those that arrive together.
pub(super) fn base_above(highest: u64) -> u64 {
    (highest + 2).max(LEAST_BASE)
}
