//! Installs a working set: all of it before the program runs, by all processors. To let the program
//! run earlier, beside the installing of the rest, was tried: the two take longer together than one
//! after the other, for they wait for each other in the kernel.
//!
//! What cannot be installed comes by faults.

use crate::crew::crew;
use crate::memory::{AtHand, Filled, Memory, MemoryState, fill};
use crate::slots::Runs;
use crate::stored::{BLOCK, Buffers, Page};
use crate::swap::PAGE;
use parking_lot::Mutex;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

const PAGE64: u64 = PAGE as u64;

/// Fewer blocks are not worth another thread.
const LEAST: usize = 320 / BLOCK;

/// What one thread has done.
#[derive(Default)]
struct Installed {
    pages: Vec<u64>,
    at_hand: Vec<(u64, AtHand)>,
}

/// Installs those of some pages that missing pages still hold, run by run, and gives back those
/// that are held back.
fn install_pages(
    uffd: BorrowedFd<'_>,
    runs: &Runs,
    pages: &[Page],
    bytes: &[u8],
    bits: u8,
    installed: &mut Installed,
) -> io::Result<Filled> {
    let valid =
        |page: &Page| page.kinds & bits != 0 && runs.get(page.address).is_some_and(|(slot, _)| slot == page.slot);
    let mut run: Range<usize> = 0..0;
    for index in 0..=pages.len() {
        let page = pages.get(index);
        let good = page.is_some_and(valid);
        let follows = good && !run.is_empty() && pages[run.end - 1].address + PAGE64 == pages[index].address;
        if follows {
            run.end = index + 1;
            continue;
        }
        if !run.is_empty() {
            match fill(uffd, pages[run.start].address, &bytes[run.start * PAGE..run.end * PAGE], true)? {
                Filled::All => {}
                other => return Ok(other),
            }
            installed.pages.extend(pages[run.clone()].iter().map(|page| page.address));
        }
        run = if good { index..index + 1 } else { 0..0 };
        if let Some(page) = page.filter(|page| page.kinds & bits == 0) {
            let bytes = bytes[index * PAGE..(index + 1) * PAGE].into();
            installed.at_hand.push((page.address, (page.slot, Some(bytes))));
        }
    }
    Ok(Filled::All)
}

impl Memory {
    /// Installs the armed set. From here on the program counts as awake.
    pub fn install(&self, state: &mut MemoryState) {
        let began = Instant::now();
        let Some(set) = state.armed.take() else { return };
        state.since.set_pages = set.len();
        state.read_ahead = true;
        let (count, bits) = (set.blocks(), set.bits(&state.since.kind));
        let (uffd, runs) = (self.uffd.as_fd(), state.map.runs());
        let mut portions = Vec::new();
        let mut start = 0;
        while start < count {
            let blocks = start..count.min(start + set.at_once(start));
            start = blocks.end;
            portions.push(blocks);
        }
        let next = AtomicUsize::new(0);
        let results = Mutex::new(Vec::new());
        let some = |number| {
            if number == 1 {
                // Another thread installs what is kept in memory, or else the first portion,
                // meanwhile.
                let on_disk = portions.partition_point(|blocks| !set.on_disk(blocks.start)).max(1);
                set.begin(&portions[on_disk..]);
            }
            let (mut all, mut buffers) = (Installed::default(), Buffers::default());
            while let Some(blocks) = portions.get(next.fetch_add(1, Ordering::Relaxed)) {
                let mut filled = Filled::All;
                let done = set.each(blocks.clone(), &mut buffers, |pages, bytes| {
                    filled = install_pages(uffd, runs, pages, bytes, bits, &mut all)?;
                    Ok(filled == Filled::All)
                });
                if done.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock) {
                    tracing::debug!(
                        space = self.id,
                        "a working set does not come, its pages are waited for one by one"
                    );
                } else if let Err(error) = &done {
                    tracing::warn!(space = self.id, %error, "a working set is not installed whole, its pages come one by one");
                }
                if done.is_err() || filled != Filled::All {
                    break;
                }
            }
            results.lock().push(all);
        };
        let held_back = set.held_back().iter().map(|(address, slot)| (*address, (*slot, None)));
        state.at_hand.extend(held_back);
        if crew().share(count / LEAST, some) > 1 {
            // To give up what was read takes time as well.
            crew().drop_later(set);
        }
        let results = results.into_inner();
        for Installed { pages, at_hand } in results {
            state.since.installed += pages.len();
            state.since.set.extend(pages);
            state.at_hand.extend(at_hand);
        }
        state.since.woke = Some((began, began.elapsed().as_micros() as u64));
    }
}
