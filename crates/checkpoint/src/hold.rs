//! Threads that CRIU has made and that do not go on yet.
//!
//! CRIU lets a tree run thread by thread, and a signal that waits by then runs its handler before
//! the thread makes its call again: see [`kip_sys::restart`]. So each thread is restored in
//! pause(2) instead, with all signals blocked, by the `syscall` instruction on which it stands or
//! by one of the vdso's; [`crate::resume`] then takes it and gives it what it is to have. The
//! call's first argument is a mark, by which a tree is known that was left so.

use crate::registers::{self, Registers};
use crate::resume::syscall_offset;
use kip_criu_images::codes::{state, status};
use kip_criu_images::fields::user_x86_regs_entry::{AX, DI, IP};
use kip_criu_images::fields::{core_entry, mm_entry, pstree_entry};
use kip_criu_images::fields::{task_core_entry, thread_core_entry, thread_info_x86, vma_entry};
use kip_criu_images::processes::{has_own_filters, stopped_threads};
use kip_criu_images::{CheckpointImageError, Images, Malformed, Message};
use std::collections::{BTreeMap, BTreeSet};

/// Number of pause(2).
const PAUSE: u64 = 34;
/// Its argument, of which the kernel takes no notice.
const MARK: u64 = 0x6b69_702d_686f_6c64;

/// What the threads are to have that were changed, by their ids inside.
pub type Held = BTreeMap<u32, Registers>;

/// Changes the images of all threads but those of stopped processes; `standing`: those that stand
/// on calls. None if they are as they were: a program has filters of its own, under which it may
/// not call pause(2), a thread has registers that only CRIU can set, or one that stands on no call
/// was frozen by another kernel (`same_boot`), whose vdso is not ours.
///
/// # Errors
/// An image is missing or damaged.
pub fn hold_threads(
    images: &mut Images,
    standing: &BTreeSet<u32>,
    same_boot: bool,
) -> Result<Option<Held>, CheckpointImageError> {
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

/// A process that has ended and whose parent has not waited for it.
fn is_dead(core: &Message) -> Result<bool, Malformed> {
    Ok(core.message(core_entry::TC)?.is_some_and(|task| task.number(task_core_entry::TASK_STATE) == state::DEAD))
}

/// Where the vdso of each thread's process begins.
fn vdsos(images: &Images) -> Result<BTreeMap<u32, u64>, CheckpointImageError> {
    let mut found = BTreeMap::new();
    for process in images.entries("pstree.img")? {
        let mm = format!("mm-{}.img", process.number(pstree_entry::PID));
        let entries = images.entries_if_any(&mm)?;
        let mappings = entries.iter().map(|entry| entry.messages(mm_entry::VMAS)).collect::<Result<Vec<_>, _>>();
        let mappings = mappings.map_err(images.damaged(&mm))?;
        let vdso = mappings.iter().flatten().find(|mapping| mapping.number(vma_entry::STATUS) & status::VDSO != 0);
        for thread in process.varints(pstree_entry::THREADS).map_err(images.damaged("pstree.img"))? {
            found.extend(vdso.map(|vdso| (thread as u32, vdso.number(vma_entry::START))));
        }
    }
    Ok(found)
}

/// Has a thread call pause(2), by that instruction or the one on which it stands, with all signals
/// blocked: by its own mask, or its process's.
fn pause(core: &mut Message, instruction: Option<u64>) -> Result<(), Malformed> {
    core.edit_messages::<Malformed>(core_entry::THREAD_INFO, |info| {
        info.edit_messages::<Malformed>(thread_info_x86::GPREGS, |registers| {
            registers.set_varint(AX, PAUSE);
            registers.set_varint(DI, MARK);
            instruction.into_iter().for_each(|ip| registers.set_varint(IP, ip));
            Ok(())
        })
    })?;
    let masks =
        [(core_entry::TC, task_core_entry::BLK_SIGSET), (core_entry::THREAD_CORE, thread_core_entry::BLK_SIGSET)];
    for (message, mask) in masks {
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
