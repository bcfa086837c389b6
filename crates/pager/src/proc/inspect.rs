//! Inspection of a proc's memory, which changes nothing and wakes no proc: where what is paged out
//! lies, and single pages.
//!
//! Only the pager can do that: another process that reads a page that is out by /proc/PID/mem, or
//! by /proc/PID/cmdline, touches it. While the pager inspects nothing is taken out and nothing is
//! parked, for the proc's place in the table is locked.

use super::PagedProc;
use crate::slots::Runs;
use crate::source::PageSource as _;
use crate::space::{self, SpaceKind};
use crate::swap::{Aligned, PAGE, SWAP};
use kip_snapshot::pages::{PageFile, PageMap, ProcessPages, Run};
use kip_sys::pagemap::{self, Filter, States};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

/// What was found of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peeked<'a> {
    /// Its bytes.
    Here,
    /// Its bytes come from a store: this page of this file of the proc's parked generation.
    Away {
        /// The file's name.
        file: &'a str,
        /// The page's number in it.
        page: u32,
    },
}

impl std::fmt::Debug for PagedProc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Proc").field("directory", &self.family.directory).finish_non_exhaustive()
    }
}

impl PagedProc {
    /// The files that pages may lie in, as in the proc's directory, and the number of the swap
    /// file.
    pub(super) fn files(&self) -> (PageMap, u32) {
        let mut map = PageMap::default();
        for file in self.family.parked.iter().flat_map(|parked| parked.files()) {
            map.files.push(PageFile { name: format!("{}/{}", super::PARKED, file.name), ..file });
        }
        let swap = map.file(SWAP);
        (map, swap)
    }

    /// What missing pages hold, as runs in [`PagedProc::files`].
    ///
    /// # Errors
    /// `InvalidData` if a slot is in no file.
    pub(super) fn runs_in(&self, runs: &Runs, swap: u32) -> io::Result<Vec<Run>> {
        let mut found = Vec::new();
        for (range, slot) in runs.iter() {
            let pages = ((range.end - range.start) / PAGE as u64) as u32;
            let place = match &self.family.parked {
                Some(parked) if slot >= crate::swap::PARKED => {
                    parked.place(slot).map(|(file, first)| (file as u32, first))
                }
                _ => Some((swap, slot)),
            };
            let (file, first) = place.ok_or(io::ErrorKind::InvalidData)?;
            found.push(Run { start: range.start, pages, file, first });
        }
        Ok(found)
    }

    /// What each page holds if it is missing, by host pid: whether it is missing is another
    /// question.
    ///
    /// # Errors
    /// As [`PagedProc::runs_in`].
    pub fn chart(&self) -> io::Result<PageMap> {
        let (mut map, swap) = self.files();
        for (pid, known) in &self.known {
            let memory = self.family.spaces().get(&known.id).map(|member| member.memory.clone());
            let Some(memory) = memory else { continue };
            let runs = self.runs_in(memory.state().map.runs(), swap)?;
            map.processes.insert(*pid, ProcessPages { runs, sets: Vec::new() });
        }
        Ok(map)
    }

    /// Reads the page at an address of a process.
    ///
    /// # Errors
    /// The kernel's or the source's; `Unsupported` of a child that was forked a moment ago.
    pub fn peek(&self, pid: u32, address: u64, bytes: &mut [u8; PAGE]) -> io::Result<Peeked<'_>> {
        let memory = self.memory(pid);
        let slot_of = |runs: &Runs| runs.get(address).map(|(slot, _)| slot);
        let slot = memory.as_ref().and_then(|memory| slot_of(memory.state().map.runs()));
        let there = states(pid, address)?;
        match slot {
            // A page of zeros that has a slot is there because another process touched it from
            // outside: [`crate::mend`].
            Some(slot) if there.is_none_or(|states| states.has(States::ZERO)) => self.peek_slot(slot, bytes),
            _ if there.is_some() => read_there(pid, address, bytes),
            _ if memory.is_none() && self.family.spaces().values().any(|member| member.pid.is_none()) => {
                Err(io::Error::new(io::ErrorKind::Unsupported, "it was forked a moment ago"))
            }
            _ => read_missing(pid, address, bytes),
        }
    }

    fn peek_slot(&self, slot: u32, bytes: &mut [u8; PAGE]) -> io::Result<Peeked<'_>> {
        let mut page = Aligned::new(PAGE);
        match &self.family.parked {
            Some(parked) if slot >= crate::swap::PARKED => {
                if let Some((file, page)) = parked.away(slot)? {
                    return Ok(Peeked::Away { file, page });
                }
                parked.read(slot, &mut page)?;
            }
            _ => self.family.swap.read(slot, &mut page)?,
        }
        bytes.copy_from_slice(&page);
        Ok(Peeked::Here)
    }
}

/// Reads the page at an address of a process of which nothing was ever out.
///
/// # Errors
/// The kernel's.
pub fn peek_whole(pid: u32, address: u64, bytes: &mut [u8; PAGE]) -> io::Result<Peeked<'static>> {
    if states(pid, address)?.is_some() { read_there(pid, address, bytes) } else { read_missing(pid, address, bytes) }
}

/// How a page is there; none if it is not.
fn states(pid: u32, address: u64) -> io::Result<Option<States>> {
    let any = States::PRESENT | States::SWAPPED;
    let filter = Filter { any, report: any | States::ZERO, ..Filter::default() };
    let found = pagemap::of(pid, address..address + PAGE as u64, filter)?;
    Ok(found.first().map(|region| region.states))
}

fn read_there(pid: u32, address: u64, bytes: &mut [u8; PAGE]) -> io::Result<Peeked<'static>> {
    File::open(format!("/proc/{pid}/mem"))?.read_exact_at(bytes, address)?;
    Ok(Peeked::Here)
}

/// What was never touched: zeros, or as the file has it, of which nothing is ever watched.
fn read_missing(pid: u32, address: u64, bytes: &mut [u8; PAGE]) -> io::Result<Peeked<'static>> {
    let mapping = space::mappings(pid)?.into_iter().find(|mapping| mapping.range.contains(&address));
    match mapping.map(|mapping| mapping.kind) {
        None => Err(io::Error::new(io::ErrorKind::NotFound, format!("nothing is mapped at {address:x}"))),
        Some(SpaceKind::Anonymous | SpaceKind::Left(_)) => {
            bytes.fill(0);
            Ok(Peeked::Here)
        }
        Some(SpaceKind::File | SpaceKind::Kernel) => read_there(pid, address, bytes),
    }
}
