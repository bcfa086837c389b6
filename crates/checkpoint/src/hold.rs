//! Threads that CRIU has made and that do not go on yet.
//!
//! CRIU lets a tree run thread by thread, and a signal that waits by then runs its handler before the thread makes its call again:
//! see [`kip_sys::restart`]. So each thread is restored in pause(2) instead, with all signals blocked, by the `syscall` instruction
//! on which it stands or by one of the vdso's; [`crate::resume`] then takes it and gives it what it is to have. The call's first
//! argument is a mark, by which a tree is known that was left so.

use crate::codes::status;
use crate::image::ImageError;
use crate::images::Images;
use crate::registers::{self, Registers};
use crate::resume::syscall_offset;
use crate::wire::{Malformed, Message, Value};
use std::collections::{BTreeMap, BTreeSet};

/// Number of pause(2).
const PAUSE: u64 = 34;
/// Its argument, of which the kernel takes no notice.
const MARK: u64 = 0x6b69_702d_686f_6c64;

// Fields of CRIU's x86 register message.
const AX: u32 = 11;
const DI: u32 = 15;
const IP: u32 = 17;

/// What the threads are to have that were changed, by their ids inside.
pub type Held = BTreeMap<u32, Registers>;

/// Changes the images of all threads but those of stopped processes; `standing`: those that stand on calls. None if they are as they
/// were: a program has filters of its own, under which it may not call pause(2), a thread has registers that only CRIU can set, or one
/// that stands on no call was frozen by another kernel (`same_boot`), whose vdso is not ours.
///
/// # Errors
/// An image is missing or damaged.
pub fn hold(images: &mut Images, standing: &BTreeSet<u32>, same_boot: bool) -> Result<Option<Held>, ImageError> {
    if has_own_filters(images)? {
        return Ok(None);
    }
    let (stopped, vdsos) = (stopped_threads(images)?, vdsos(images)?);
    let (mut held, mut changed) = (Held::new(), Vec::new());
    for (thread, name) in images.numbered("core").into_iter().filter(|(thread, _)| !stopped.contains(thread)) {
        let mut image = images.image(&name)?;
        let damaged = image.damaged();
        for core in &mut image.entries {
            if is_dead(core).map_err(&damaged)? {
                continue;
            }
            let instruction = match standing.contains(&thread) {
                true => None,
                false => match (vdsos.get(&thread), syscall_offset()) {
                    (Some(vdso), Some(offset)) if same_boot => Some(vdso + offset),
                    _ => return Ok(None),
                },
            };
            let Some(registers) = registers::read(core).map_err(&damaged)? else { return Ok(None) };
            held.insert(thread, registers);
            pause(core, instruction).map_err(&damaged)?;
        }
        changed.push(image);
    }
    changed.iter().for_each(|image| images.put(image));
    Ok(Some(held))
}

/// A process that has ended and whose parent has not been told.
fn is_dead(core: &Message) -> Result<bool, Malformed> {
    const DEAD: u64 = 2;
    Ok(core.message(3)?.is_some_and(|task| task.number(1) == DEAD))
}

/// Where the vdso of each thread's process begins.
fn vdsos(images: &Images) -> Result<BTreeMap<u32, u64>, ImageError> {
    let mut found = BTreeMap::new();
    for process in images.entries("pstree.img")? {
        let mm = format!("mm-{}.img", process.number(1));
        let entries = images.entries_if_any(&mm)?;
        let mappings = entries.iter().map(|entry| entry.messages(14)).collect::<Result<Vec<_>, _>>();
        let mappings = mappings.map_err(images.damaged(&mm))?;
        let vdso = mappings.iter().flatten().find(|mapping| mapping.number(7) & status::VDSO != 0);
        for thread in process.varints(5).map_err(images.damaged("pstree.img"))? {
            found.extend(vdso.map(|vdso| (thread as u32, vdso.number(1))));
        }
    }
    Ok(found)
}

/// Threads of stopped processes, signal(7): wherever they stand, they do not want to go on.
pub fn stopped_threads(images: &Images) -> Result<BTreeSet<u32>, ImageError> {
    const STOPPED: u64 = 3;
    let mut stopped = BTreeSet::new();
    for (pid, name) in images.numbered("core") {
        for core in images.entries(&name)? {
            let task = core.message(3).map_err(images.damaged(&name))?;
            if task.is_some_and(|t| t.number(1) == STOPPED) {
                stopped.insert(pid);
            }
        }
    }
    if stopped.is_empty() {
        return Ok(stopped);
    }
    for process in images.entries("pstree.img")? {
        if stopped.contains(&(process.number(1) as u32)) {
            stopped.extend(process.0.iter().filter_map(|(n, v)| match v {
                Value::Varint(thread) if *n == 5 => Some(*thread as u32),
                _ => None,
            }));
        }
    }
    Ok(stopped)
}

/// Whether any program has filters besides its sandbox's, seccomp(2).
pub(crate) fn has_own_filters(images: &Images) -> Result<bool, ImageError> {
    let mut own = false;
    for entry in images.entries_if_any("seccomp.img")? {
        let filters = entry.messages(1).map_err(images.damaged("seccomp.img"))?;
        own |= filters.iter().any(|filter| filter.varint(2).is_some());
    }
    Ok(own)
}

/// Has a thread call pause(2), by that instruction or the one on which it stands, with all signals blocked: by its own mask, or its
/// process's.
fn pause(core: &mut Message, instruction: Option<u64>) -> Result<(), Malformed> {
    core.edit_messages::<Malformed>(2, |info| {
        info.edit_messages::<Malformed>(2, |registers| {
            registers.set_varint(AX, PAUSE);
            registers.set_varint(DI, MARK);
            instruction.into_iter().for_each(|ip| registers.set_varint(IP, ip));
            Ok(())
        })
    })?;
    for (message, mask) in [(3, 5), (5, 6)] {
        core.edit_messages::<Malformed>(message, |of| {
            if of.varint(mask).is_some() {
                of.set_varint(mask, u64::MAX);
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Whether a thread of this process was held and never let go: proc_pid_syscall(5).
pub fn is_held(pid: u32) -> bool {
    let begins = format!("{PAUSE} {MARK:#x} ");
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
    tasks
        .into_iter()
        .flatten()
        .flatten()
        .any(|task| std::fs::read_to_string(task.path().join("syscall")).is_ok_and(|call| call.starts_with(&begins)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::testing::add;

    #[test]
    fn a_program_with_filters_of_its_own_is_left_to_criu() {
        let mut images = Images::default();
        let filter = |prev: Option<u64>| {
            let mut filter = Message::default();
            filter.set_bytes(1, vec![0; 8]);
            prev.into_iter().for_each(|prev| filter.set_varint(2, prev));
            filter.encode()
        };
        for (filters, own) in [(vec![filter(None)], false), (vec![filter(None), filter(Some(0))], true)] {
            let entry = Message(filters.into_iter().map(|filter| (1, Value::Bytes(filter))).collect());
            add(&mut images, "seccomp.img", &[entry]);
            assert_eq!(has_own_filters(&images).unwrap(), own);
        }
    }
}
