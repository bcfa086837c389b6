//! What the kernel keeps of a thread and no image has a place for: the processors that it may run
//! on, its timer slack, its priority for disks, and what a core dump of its process would have. And
//! personalities, which CRIU writes wrong. Sources: sched_setaffinity(2),
//! PR_SET_TIMERSLACK(2const), ioprio_set(2), core(5), personality(2).

use kip_clocks::tree::Tree;
use kip_criu_images::fields::{core_entry, task_core_entry};
use kip_criu_images::{CheckpointImageError, Images, Malformed};
use kip_sys::process::{io_priority, set_io_priority};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io;

/// What a thread has set for itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadAttributes {
    /// Its id inside.
    pub thread: u32,
    /// The numbers of the processors that it may run on; none for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processors: Option<Vec<u32>>,
    /// Its timer slack, nanoseconds; none for the usual one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slack_ns: Option<u64>,
    /// Its priority for disks as ioprio_set(2) has it; none for the usual one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io_priority: Option<i32>,
    /// Of the first thread of a process: which of its memory a core dump would have,
    /// /proc/PID/coredump_filter of core(5); none for the usual.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub core_filter: Option<u32>,
}

/// Of a thread that has never set its own, nanoseconds.
const DEFAULT_SLACK_NS: u64 = 50_000;

/// Where the class is in a priority for disks, and the class that takes a capability:
/// linux/ioprio.h.
const IO_CLASS_SHIFT: i32 = 13;
const IO_CLASS_REAL_TIME: i32 = 1;

/// Timer slacks that are not the usual one, in nanoseconds, by ids inside. A read of a file for
/// each thread, and so made while the program runs.
pub fn slacks(tree: &Tree) -> BTreeMap<u32, u64> {
    let slack = |tid: &u32| fs::read_to_string(format!("/proc/{tid}/timerslack_ns")).ok()?.trim().parse::<u64>().ok();
    let all = tree.threads.iter().filter_map(|(inside, tid)| Some((*inside, slack(tid)?)));
    all.filter(|(_, ns)| *ns != DEFAULT_SLACK_NS).collect()
}

/// The threads that have something of their own. `init` is the sandbox's pid 1, which has what the
/// launcher has.
pub fn read(tree: &Tree, init: u32, slacks: &BTreeMap<u32, u64>) -> Vec<ThreadAttributes> {
    let usual = affinity(init);
    let core_filters = core_filters(tree, init);
    let one = |(inside, tid): (&u32, &u32)| {
        let own = ThreadAttributes {
            thread: *inside,
            processors: affinity(*tid).filter(|own| usual.is_some_and(|usual| *own != usual)).map(|own| numbers(&own)),
            slack_ns: slacks.get(inside).copied(),
            io_priority: io_priority(*tid).ok().filter(|priority| *priority != 0),
            core_filter: core_filters.get(tid).copied(),
        };
        (own != ThreadAttributes { thread: *inside, ..ThreadAttributes::default() }).then_some(own)
    };
    tree.threads.iter().filter_map(one).collect()
}

/// Gives them back; the threads are there and stopped. What cannot be given is logged: another
/// machine may have fewer processors.
pub fn give(tree: &Tree, all: &[ThreadAttributes]) {
    for own in all {
        let Some(tid) = tree.threads.get(&own.thread) else { continue };
        if let Err(error) = give_one(*tid, own) {
            tracing::info!(tid, %error, "a thread has not all the attributes that it had");
        }
    }
}

/// Puts personalities of processes right, personality(2): CRIU 4.2 takes the hexadecimal digits of
/// /proc/PID/personality for decimal ones.
///
/// # Errors
/// An image is missing or damaged.
pub fn mend_personalities(images: &mut Images, tree: &Tree) -> Result<(), CheckpointImageError> {
    for (inside, pid) in tree.threads.iter().filter(|(_, tid)| tree.pids.contains(tid)) {
        let text = fs::read_to_string(format!("/proc/{pid}/personality")).unwrap_or_default();
        match u64::from_str_radix(text.trim(), 16) {
            Ok(bits) if bits != 0 => set_personality(images, *inside, bits)?,
            _ => {}
        }
    }
    Ok(())
}

fn set_personality(images: &mut Images, pid: u32, bits: u64) -> Result<(), CheckpointImageError> {
    let mut image = images.image(&format!("core-{pid}.img"))?;
    let damaged = image.damaged();
    for core in &mut image.entries {
        let edited = core.edit_messages::<Malformed>(core_entry::TC, |task| {
            task.set_varint(task_core_entry::PERSONALITY, bits);
            Ok(())
        });
        edited.map_err(&damaged)?;
    }
    images.put(&image);
    Ok(())
}

fn give_one(tid: u32, own: &ThreadAttributes) -> io::Result<()> {
    let processors = own.processors.as_ref().map_or(Ok(()), |numbers| restrict(tid, numbers));
    let slack = own.slack_ns.map_or(Ok(()), |ns| fs::write(format!("/proc/{tid}/timerslack_ns"), ns.to_string()));
    // No program in a sandbox can have set that of the real-time class.
    let io_priority = own.io_priority.filter(|priority| priority >> IO_CLASS_SHIFT != IO_CLASS_REAL_TIME);
    let priority = io_priority.map_or(Ok(()), |priority| set_io_priority(tid, priority));
    let filter = own.core_filter.map_or(Ok(()), |bits| fs::write(core_filter_of(tid), format!("{bits:#x}")));
    processors.and(slack).and(priority).and(filter)
}

fn core_filter_of(pid: u32) -> String {
    format!("/proc/{pid}/coredump_filter")
}

/// By pid, of the processes whose core dumps would have something else than those of pid 1.
fn core_filters(tree: &Tree, init: u32) -> BTreeMap<u32, u32> {
    let read = |pid: u32| u32::from_str_radix(fs::read_to_string(core_filter_of(pid)).ok()?.trim(), 16).ok();
    let usual = read(init);
    let all = tree.pids.iter().filter_map(|pid| Some((*pid, read(*pid)?)));
    all.filter(|(_, bits)| usual.is_some_and(|usual| *bits != usual)).collect()
}

fn pid(tid: u32) -> Option<Pid> {
    Pid::from_raw(tid.try_into().ok()?)
}

/// The processors that a thread may run on.
fn affinity(tid: u32) -> Option<CpuSet> {
    sched_getaffinity(Some(pid(tid)?)).ok()
}

fn numbers(set: &CpuSet) -> Vec<u32> {
    (0..CpuSet::MAX_CPU).filter(|number| set.is_set(*number)).map(|number| number as u32).collect()
}

fn restrict(tid: u32, numbers: &[u32]) -> io::Result<()> {
    let mut set = CpuSet::new();
    let known = numbers.iter().map(|number| *number as usize).filter(|number| *number < CpuSet::MAX_CPU);
    known.for_each(|number| set.set(number));
    Ok(sched_setaffinity(pid(tid), &set)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    // promise parking: a thread's processors, timer slack and priority for disks come back
    // held by: this, `tests/test_attributes.py::test_what_a_thread_has_of_its_own`
    #[test]
    fn what_is_given_is_read() {
        let done = std::thread::spawn(|| {
            let tid = rustix::thread::gettid().as_raw_nonzero().get() as u32;
            let tree = Tree { pids: vec![tid], threads: [(7, tid)].into() };
            let first = numbers(&affinity(tid).unwrap())[0];
            let own = ThreadAttributes {
                thread: 7,
                processors: Some(vec![first]),
                slack_ns: Some(123_456),
                io_priority: Some(3 << 13),
                core_filter: None,
            };
            give_one(tid, &own).unwrap();
            (read(&tree, std::process::id(), &slacks(&tree)), own)
        });
        let (found, mut own) = done.join().unwrap();
        // On one processor there is no choice.
        if numbers(&affinity(std::process::id()).unwrap()).len() == 1 {
            own.processors = None;
        }
        assert_eq!(found, [own]);
    }
}
