//! What a checkpoint says of its process tree.

use crate::codes::state;
use crate::fields::{
    core_entry, fdinfo_entry, pstree_entry, seccomp_entry, seccomp_filter, task_core_entry, task_kobj_ids_entry,
};
use crate::{CheckpointImageError, FieldValue, Images, Message};
use std::collections::{BTreeMap, BTreeSet};

/// Threads of stopped processes, signal(7): wherever they stand, they do not want to go on.
///
/// # Errors
/// An image is missing or damaged.
pub fn stopped_threads(images: &Images) -> Result<BTreeSet<u32>, CheckpointImageError> {
    let mut stopped = BTreeSet::new();
    for (pid, name) in images.numbered("core") {
        for core in images.entries(&name)? {
            let task = core.message(core_entry::TC).map_err(images.damaged(&name))?;
            if task.is_some_and(|t| t.number(task_core_entry::TASK_STATE) == state::STOPPED) {
                stopped.insert(pid);
            }
        }
    }
    if stopped.is_empty() {
        return Ok(stopped);
    }
    for process in images.entries("pstree.img")? {
        if stopped.contains(&(process.number(pstree_entry::PID) as u32)) {
            stopped.extend(process.0.iter().filter_map(|(n, v)| match v {
                FieldValue::Varint(thread) if *n == pstree_entry::THREADS => Some(*thread as u32),
                _ => None,
            }));
        }
    }
    Ok(stopped)
}

/// Whether any program has filters besides its sandbox's, seccomp(2).
///
/// # Errors
/// An image is missing or damaged.
pub fn has_own_filters(images: &Images) -> Result<bool, CheckpointImageError> {
    let mut own = false;
    for entry in images.entries_if_any("seccomp.img")? {
        let filters = entry.messages(seccomp_entry::SECCOMP_FILTERS).map_err(images.damaged("seccomp.img"))?;
        own |= filters.iter().any(|filter| filter.varint(seccomp_filter::PREV).is_some());
    }
    Ok(own)
}

/// The filters of a thread as they are set, the oldest first, from the one that the thread's image
/// names: what CRIU calls the previous one of a filter is the one that it sets after that. None if
/// one is missing, or they lead in a circle.
pub fn filter_chain(filters: &[Message], first: u64) -> Option<Vec<&Message>> {
    let mut chain: Vec<&Message> = Vec::new();
    let mut next = Some(first);
    while let Some(index) = next {
        let filter = filters.get(usize::try_from(index).ok()?).filter(|_| chain.len() < filters.len())?;
        next = filter.varint(seccomp_filter::PREV);
        chain.push(filter);
    }
    Some(chain)
}

/// A table of open files: the files' ids by their descriptors.
#[derive(Debug)]
pub struct FileTable {
    /// One of the processes that have it, as numbered inside.
    pub pid: u32,
    /// Ids by descriptors.
    pub files: BTreeMap<i32, u64>,
}

/// All of them.
///
/// # Errors
/// An image is missing or damaged.
pub fn tables(images: &Images) -> Result<Vec<FileTable>, CheckpointImageError> {
    let mut tables: BTreeMap<u64, u32> = BTreeMap::new();
    for (pid, name) in images.numbered("ids") {
        for ids in images.entries(&name)? {
            tables.entry(ids.number(task_kobj_ids_entry::FILES_ID)).or_insert(pid);
        }
    }
    let mut found = Vec::new();
    for (table, name) in images.numbered("fdinfo") {
        let Some(&pid) = tables.get(&u64::from(table)) else { continue };
        let descriptors = images.entries(&name)?;
        let place = |d: &Message| (d.number(fdinfo_entry::FD) as i32, d.number(fdinfo_entry::ID));
        found.push(FileTable { pid, files: descriptors.iter().map(place).collect() });
    }
    Ok(found)
}

/// One place where each file is open, (pid inside, descriptor number) by the file's id.
///
/// # Errors
/// An image is missing or damaged.
pub fn places(images: &Images) -> Result<BTreeMap<u64, (u32, i32)>, CheckpointImageError> {
    let mut places = BTreeMap::new();
    for FileTable { pid, files } in tables(images)? {
        for (fd, id) in files {
            places.entry(id).or_insert((pid, fd));
        }
    }
    Ok(places)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_besides_the_sandbox_s_are_the_program_s_own() {
        let mut images = Images::default();
        let filter = |prev: Option<u64>| {
            let mut filter = Message::default();
            filter.set_bytes(seccomp_filter::FILTER, vec![0; 8]);
            prev.into_iter().for_each(|prev| filter.set_varint(seccomp_filter::PREV, prev));
            filter.encode()
        };
        for (filters, own) in [(vec![filter(None)], false), (vec![filter(None), filter(Some(0))], true)] {
            let filters = filters.into_iter().map(|filter| (seccomp_entry::SECCOMP_FILTERS, FieldValue::Bytes(filter)));
            let entry = Message(filters.collect());
            images.put_entries("seccomp.img", &[entry]);
            assert_eq!(has_own_filters(&images).unwrap(), own);
        }
    }
}
