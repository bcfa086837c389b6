//! Owners of open files: the process, group or thread to which the kernel sends SIGIO or SIGURG for
//! it, fcntl(2) F_SETOWN_EX and F_SETSIG.
//!
//! A file that is held through the sleep keeps an owner that has ended. CRIU sets owners while
//! threads are yet to be made, and fails for one of these. So they are taken out of the images, and
//! the wake sets them when all of the program is there.

use kip_criu_images::fields::{
    bpfmap_file_entry, eventfd_file_entry, eventpoll_file_entry, ext_file_entry, fanotify_file_entry, fifo_entry,
    file_entry, fown_entry, inet_sk_entry, inotify_file_entry, memfd_file_entry, netlink_sk_entry, packet_sock_entry,
    pidfd_entry, pipe_entry, reg_file_entry, signalfd_entry, timerfd_entry, tty_file_entry, unix_sk_entry,
};
use kip_criu_images::processes::places;
use kip_criu_images::{CheckpointImage, CheckpointImageError, Images, Malformed};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The field of each kind of file in `file_entry`, and in that message the field of the owner.
const OWNERS: [(u32, u32); 17] = [
    (file_entry::REG, reg_file_entry::FOWN),
    (file_entry::ISK, inet_sk_entry::FOWN),
    (file_entry::PSK, packet_sock_entry::FOWN),
    (file_entry::NLSK, netlink_sk_entry::FOWN),
    (file_entry::EFD, eventfd_file_entry::FOWN),
    (file_entry::EPFD, eventpoll_file_entry::FOWN),
    (file_entry::SGFD, signalfd_entry::FOWN),
    (file_entry::TFD, timerfd_entry::FOWN),
    (file_entry::IFY, inotify_file_entry::FOWN),
    (file_entry::FFY, fanotify_file_entry::FOWN),
    (file_entry::EXT, ext_file_entry::FOWN),
    (file_entry::USK, unix_sk_entry::FOWN),
    (file_entry::PIPE, pipe_entry::FOWN),
    (file_entry::TTY, tty_file_entry::FOWN),
    (file_entry::MEMFD, memfd_file_entry::FOWN),
    (file_entry::BPF, bpfmap_file_entry::FOWN),
    (file_entry::PIDFD, pidfd_entry::FOWN),
];

/// O_ASYNC of open(2).
const ASYNC: u64 = 0o20000;

/// The receiver of the signal, as numbered inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SignalReceiver {
    /// A thread.
    Thread(u32),
    /// A process.
    Process(u32),
    /// A process group.
    Group(u32),
}

/// An open file with an owner, or with a signal of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owned {
    /// A process that has it open, as numbered inside.
    pub pid: u32,
    /// Its number there.
    pub fd: i32,
    /// Its owner, if it has one.
    pub owner: Option<SignalReceiver>,
    /// The signal; 0 is SIGIO.
    pub signal: i32,
    /// User and effective user (as numbered inside) of the process that named the owner: by these
    /// the kernel decides whether it may.
    pub by: (u32, u32),
    /// A FIFO with O_ASYNC, which is out of the images: opened with that it would send no signals,
    /// open(2).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub notifies: bool,
}

/// Takes all owners out of the images.
///
/// # Errors
/// An image is missing or damaged.
pub fn take_owners(images: &mut Images) -> Result<Vec<Owned>, CheckpointImageError> {
    let mut files = images.image("files.img")?;
    let damaged = files.damaged();
    let mut places = None;
    let mut found = Vec::new();
    let fifos = fifos(&files).map_err(&damaged)?;
    for file in &mut files.entries {
        let id = file.number(file_entry::ID);
        // Descriptors are of the FIFO, and its owner is with its file.
        let open = fifos.get(&id).copied().unwrap_or(id);
        let is_fifo = fifos.contains_key(&id);
        for (kind, number) in OWNERS {
            file.edit_messages(kind, |entry| {
                let flags = if is_fifo { entry.number(reg_file_entry::FLAGS) } else { 0 };
                let before = found.len();
                entry.edit_messages(number, |owner| {
                    let of = match (owner.number(fown_entry::PID), owner.number(fown_entry::PID_TYPE)) {
                        (0, _) => None,
                        (thread, 0) => Some(SignalReceiver::Thread(thread as u32)),
                        (group, 2) => Some(SignalReceiver::Group(group as u32)),
                        (process, _) => Some(SignalReceiver::Process(process as u32)),
                    };
                    let signal = owner.number(fown_entry::SIGNUM) as i32;
                    if of.is_none() && signal == 0 {
                        return Ok(());
                    }
                    if places.is_none() {
                        places = Some(self::places(images)?);
                    }
                    // One that is only on its way through a socket stays as it is.
                    if let Some(&(pid, fd)) = places.as_ref().and_then(|places| places.get(&open)) {
                        let by = (owner.number(fown_entry::UID) as u32, owner.number(fown_entry::EUID) as u32);
                        found.push(Owned { pid, fd, owner: of, signal, by, notifies: flags & ASYNC != 0 });
                        owner.set_varint(fown_entry::SIGNUM, 0);
                        owner.set_varint(fown_entry::PID_TYPE, 0);
                        owner.set_varint(fown_entry::PID, 0);
                    }
                    Ok::<(), Wrong>(())
                })?;
                if found.len() > before && flags & ASYNC != 0 {
                    entry.set_varint(reg_file_entry::FLAGS, flags & !ASYNC);
                }
                Ok(())
            })
            .map_err(|wrong| match wrong {
                Wrong::Image(error) => error,
                Wrong::Malformed(source) => damaged(source),
            })?;
        }
    }
    if !found.is_empty() {
        images.put(&files);
    }
    Ok(found)
}

enum Wrong {
    Image(CheckpointImageError),
    Malformed(Malformed),
}

impl From<Malformed> for Wrong {
    fn from(malformed: Malformed) -> Wrong {
        Wrong::Malformed(malformed)
    }
}

impl From<CheckpointImageError> for Wrong {
    fn from(error: CheckpointImageError) -> Wrong {
        Wrong::Image(error)
    }
}

/// The ids of FIFOs by those of their files.
fn fifos(files: &CheckpointImage) -> Result<BTreeMap<u64, u64>, Malformed> {
    let mut found = BTreeMap::new();
    for file in &files.entries {
        if let Some(fifo) = file.message(file_entry::FIFO)? {
            found.insert(fifo.number(fifo_entry::REGF_ID), file.number(file_entry::ID));
        }
    }
    Ok(found)
}
