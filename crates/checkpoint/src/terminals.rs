//! Terminals in a snapshot: held through the sleep, and given back to their sessions at the wake.
//!
//! The kernel keeps a terminal with its queues, settings and size as long as a descriptor of it is
//! held, so a plan takes them over as other objects. For CRIU each is one from outside,
//! `tty[DEVICE:FILE SYSTEM]`: it then neither empties its queues nor misses the other side, which
//! may be a client's. What is lost with the processes is which session has it, and which group of
//! that is in the foreground. CRIU restores no such tree. Sources: criu/tty.c of CRIU 4.2,
//! ioctl_tty(2).

use kip_criu_images::codes::kind;
use kip_criu_images::fields::{file_entry, tty_file_entry, tty_info_entry};
use kip_criu_images::{CheckpointImageError, Images};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;

/// The numbers of the devices `/dev/ptmx` and `/dev/tty`, in the kernel's user encoding.
const MASTER: u64 = 0x502;
const OWN: u64 = 0x500;
/// open(2) flags.
const ACCESS: u64 = 3;
const WRITE_ONLY: u64 = 1;
/// Major numbers of slaves: UNIX98_PTY_SLAVE_MAJOR in linux/major.h, eight of them.
const SLAVES: Range<u32> = 136..144;

/// A session with a controlling terminal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Controlled {
    /// The process that leads it, by its number inside.
    pub session: u32,
    /// The device number of the terminal.
    pub device: u64,
    /// The group in the foreground, by its number inside; none if it has ended.
    pub foreground: Option<u32>,
}

/// CRIU's word for a terminal from outside, by the numbers of the device and of its file system.
/// None if the device is no terminal.
pub fn external(device: u64, dev: u64) -> Option<String> {
    let is_terminal = matches!(device, MASTER | OWN) || SLAVES.contains(&rustix::fs::major(device));
    is_terminal.then(|| format!("tty[{device:x}:{dev:x}]"))
}

/// The slaves that a tree has open for reading: the id of one file of each, by device number.
///
/// # Errors
/// An image is missing or damaged.
pub fn slaves(images: &Images) -> Result<BTreeMap<u64, u64>, CheckpointImageError> {
    let infos = images.entries_if_any("tty-info.img")?;
    let device_of: BTreeMap<u64, u64> =
        infos.iter().map(|info| (info.number(tty_info_entry::ID), info.number(tty_info_entry::RDEV))).collect();
    let mut found = BTreeMap::new();
    for file in images.entries("files.img")?.iter().filter(|file| file.number(file_entry::TYPE) == kind::TTY) {
        let damaged = images.damaged("files.img");
        let tty = file.message(file_entry::TTY).map_err(damaged)?.unwrap_or_default();
        if let Some(device) = device_of.get(&tty.number(tty_file_entry::TTY_INFO_ID))
            && SLAVES.contains(&rustix::fs::major(*device))
            // The kernel gives a session no terminal by a file that is open for writing only.
            && tty.number(tty_file_entry::FLAGS) & ACCESS != WRITE_ONLY
        {
            found.entry(*device).or_insert_with(|| file.number(file_entry::ID));
        }
    }
    Ok(found)
}
