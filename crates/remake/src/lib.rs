//! What is held for a plan beside sockets, made anew from the images where it is lost: in a clone,
//! after a reboot, in another data directory.
//!
//! Pipes and unix sockets with what was in them, eventfds, signalfds, and epoll sets of all these
//! and of the sockets that the caller has made anew; deleted files that are open. FIFOs, terminals
//! and timerfds are CRIU's to make. Never looks at a process.

#![forbid(unsafe_code)]

mod deleted;
mod failure;
mod note;
mod place;
mod unix;

pub use deleted::KEPT_FLAGS;
pub use failure::RemakeError;
pub use note::{MadeAlready, ObjectNote};

use failure::{errno, system, with_status};

use kip_checkpoint::plan::inode_of;
use kip_criu_images::codes::kind;
use kip_criu_images::fields::{
    eventfd_file_entry, eventpoll_file_entry, eventpoll_tfd_entry, file_entry, fown_entry, pipe_data_entry, pipe_entry,
    reg_file_entry, signalfd_entry,
};
use kip_criu_images::processes::{FileTable, tables};
use kip_criu_images::{Images, Message};
use kip_sys::watch::{self, WatchedFile};
use rustix::event::{EventfdFlags, epoll};
use rustix::fs::{Gid, Mode, OFlags, Uid};
use rustix::pipe::PipeFlags;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

/// `F_SETPIPE_SZ` is not called for this, the size of a new pipe.
const PIPE_BYTES: u64 = 64 << 10;
/// Open files by their ids in the images.
pub type Remade = BTreeMap<u64, Arc<OwnedFd>>;

/// Makes the open files with these ids.
///
/// # Errors
/// See [`RemakeError`]; what was made is closed again.
pub fn remake(images: &Images, wanted: &[u64], around: &impl MadeAlready) -> Result<Remade, RemakeError> {
    let files = images.entries("files.img")?;
    let files: BTreeMap<u64, Message> = files.into_iter().map(|file| (file.number(file_entry::ID), file)).collect();
    let tables = tables(images)?;
    let mut maker = Maker { images, files, tables, around, pipes: BTreeMap::new(), made: Remade::new() };
    let sockets = unix::sockets(images, &maker.files, &maker.tables, wanted, around)?;
    let files = deleted::files(images, &maker.files, wanted, around)?;
    maker.made.extend(sockets.into_iter().chain(files).map(|(id, made)| (id, Arc::new(made))));
    maker.fill_pipes(wanted)?;
    for id in wanted {
        if !maker.made.contains_key(id) {
            let made = maker.make(*id)?;
            maker.made.insert(*id, Arc::new(made));
        }
    }
    // When all are there: a set may have another in it.
    for id in wanted {
        maker.watch(*id)?;
    }
    Ok(maker.made)
}

struct Maker<'a, A> {
    images: &'a Images,
    files: BTreeMap<u64, Message>,
    tables: Vec<FileTable>,
    around: &'a A,
    /// Both ends of the tree's own pipes, by CRIU's number.
    pipes: BTreeMap<u64, [OwnedFd; 2]>,
    made: Remade,
}

impl<A: MadeAlready> Maker<'_, A> {
    fn file(&self, id: u64) -> Result<&Message, RemakeError> {
        self.files.get(&id).ok_or(RemakeError::Unsupported("a file that is in no image"))
    }

    /// The part of a file's entry that is of its kind.
    fn part(&self, id: u64, field: u32, owner: u32) -> Result<Message, RemakeError> {
        let part = self.file(id)?.message(field)?.unwrap_or_default();
        match part.message(owner)?.unwrap_or_default().number(fown_entry::PID) {
            0 => Ok(part),
            _ => Err(RemakeError::Unsupported("an open file with an owner")),
        }
    }

    /// The pipes of these files that are not from outside, with what was in them.
    fn fill_pipes(&mut self, wanted: &[u64]) -> Result<(), RemakeError> {
        for id in wanted {
            if self.file(*id)?.number(file_entry::TYPE) != kind::PIPE {
                continue;
            }
            let pipe = self.part(*id, file_entry::PIPE, pipe_entry::FOWN)?.number(pipe_entry::PIPE_ID);
            if self.around.pipe(pipe).is_none() && !self.pipes.contains_key(&pipe) {
                let (reader, writer) =
                    rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map_err(errno("a pipe"))?;
                self.pipes.insert(pipe, [reader, writer]);
            }
        }
        let Some(mut mixed) = self.images.mixed("pipes-data.img")? else { return Ok(()) };
        while let Some(entry) = mixed.entry()? {
            let contents = mixed.contents(entry.number(pipe_data_entry::BYTES) as usize)?;
            let Some([_, writer]) = self.pipes.get(&entry.number(pipe_data_entry::PIPE_ID)) else { continue };
            let size = entry.varint(pipe_data_entry::SIZE).unwrap_or(PIPE_BYTES);
            if size != PIPE_BYTES {
                rustix::pipe::fcntl_setpipe_size(writer, size as usize).map_err(errno("a pipe of that size"))?;
            }
            let mut left = contents;
            while !left.is_empty() {
                let written = rustix::io::write(writer, left).map_err(errno("what was in a pipe"))?;
                left = &left[written..];
            }
        }
        Ok(())
    }

    fn make(&self, id: u64) -> Result<OwnedFd, RemakeError> {
        match self.file(id)?.number(file_entry::TYPE) {
            kind::PIPE => self.pipe_end(id),
            kind::EVENTFD => {
                let part = self.part(id, file_entry::EFD, eventfd_file_entry::FOWN)?;
                let mut kind = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
                kind.set(EventfdFlags::SEMAPHORE, self.around.noted(id).semaphore);
                let made = rustix::event::eventfd(0, kind).map_err(errno("an eventfd"))?;
                let count = part.number(eventfd_file_entry::COUNTER);
                if count > 0 {
                    rustix::io::write(&made, &count.to_ne_bytes()).map_err(errno("the count of an eventfd"))?;
                }
                with_status(made, part.number(eventfd_file_entry::FLAGS))
            }
            kind::SIGNALFD => {
                let part = self.part(id, file_entry::SGFD, signalfd_entry::FOWN)?;
                let made = watch::signalfd(part.number(signalfd_entry::SIGMASK)).map_err(system("a signalfd"))?;
                with_status(made, part.number(signalfd_entry::FLAGS))
            }
            kind::EVENTPOLL => {
                self.part(id, file_entry::EPFD, eventpoll_file_entry::FOWN)?;
                epoll::create(epoll::CreateFlags::CLOEXEC).map_err(errno("an epoll set"))
            }
            kind::FIFO => Err(RemakeError::Unsupported("a FIFO")),
            kind::TTY => Err(RemakeError::Unsupported("a terminal")),
            kind::TIMERFD => Err(RemakeError::Unsupported("a timerfd")),
            kind::NETLINKSK => Err(RemakeError::Unsupported("a netlink socket")),
            _ => Err(RemakeError::Unsupported("an open file of a rare kind")),
        }
    }

    fn pipe_end(&self, id: u64) -> Result<OwnedFd, RemakeError> {
        let part = self.part(id, file_entry::PIPE, pipe_entry::FOWN)?;
        let pipe = part.number(pipe_entry::PIPE_ID);
        let outside = self.around.pipe(pipe);
        let any = match (&outside, self.pipes.get(&pipe)) {
            (Some(outside), _) => outside.as_raw_fd(),
            (None, Some([reader, _])) => reader.as_raw_fd(),
            (None, None) => return Err(RemakeError::Unsupported("a pipe from outside")),
        };
        let flags = OFlags::from_bits_retain(part.number(pipe_entry::FLAGS) as u32);
        let way = flags & OFlags::RWMODE;
        let path = format!("/proc/self/fd/{any}");
        // An end without the other one would be waited for.
        let end = rustix::fs::open(path, way | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())
            .map_err(errno("an end of a pipe"))?;
        let (root, (user, group)) = (self.around.root(), self.around.noted(id).owner);
        rustix::fs::fchown(&end, Some(Uid::from_raw(root + user)), Some(Gid::from_raw(root + group)))
            .map_err(errno("a pipe's owner"))?;
        with_status(end, part.number(pipe_entry::FLAGS))
    }

    /// Puts into an epoll set what was in it.
    fn watch(&self, id: u64) -> Result<(), RemakeError> {
        if self.file(id)?.number(file_entry::TYPE) != kind::EVENTPOLL {
            return Ok(());
        }
        let entries =
            self.part(id, file_entry::EPFD, eventpoll_file_entry::FOWN)?.messages(eventpoll_file_entry::TFD)?;
        let tables: Vec<&FileTable> = self.tables.iter().filter(|t| t.files.values().any(|file| *file == id)).collect();
        let found = entries.iter().map(|entry| {
            let number = entry.number(eventpoll_tfd_entry::TFD) as i32;
            Ok((self.watched(&tables, number)?, number, entry))
        });
        let found = found.collect::<Result<Vec<_>, RemakeError>>()?;
        let watches: Vec<WatchedFile<'_>> = found
            .iter()
            .map(|(fd, number, entry)| WatchedFile {
                fd: fd.as_fd(),
                number: *number,
                events: entry.number(eventpoll_tfd_entry::EVENTS) as u32,
                data: entry.number(eventpoll_tfd_entry::DATA),
            })
            .collect();
        watch::watch(self.made[&id].as_fd(), &watches).map_err(system("what an epoll set watches"))
    }

    /// The file that a set has by that number: that of the processes which have the set.
    fn watched(&self, of_set: &[&FileTable], number: i32) -> Result<Arc<OwnedFd>, RemakeError> {
        const UNKNOWN: RemakeError =
            RemakeError::Unsupported("an epoll set with a file that its processes do not have");
        let ids: BTreeSet<u64> = of_set.iter().filter_map(|table| table.files.get(&number).copied()).collect();
        let ids: Vec<u64> = ids.into_iter().collect();
        let [id] = ids[..] else { return Err(UNKNOWN) };
        if let Some(made) = self.made.get(&id) {
            return Ok(Arc::clone(made));
        }
        let reg = self.file(id)?.message(file_entry::REG)?.unwrap_or_default();
        debug_assert!(reg.number(reg_file_entry::ID) == id || reg.0.is_empty());
        inode_of(&reg).and_then(|inode| self.around.socket(inode)).ok_or(UNKNOWN)
    }
}
