//! Installs a working set: all of it before the program runs, by all processors. To let the program run earlier, beside the
//! installing of the rest, was tried: the two take longer together than one after the other, for they wait for each other in
//! the kernel.
//!
//! What cannot be installed comes by faults.

use crate::memory::{AtHand, Filled, Memory, State, fill};
use crate::slots::Runs;
use crate::stored::{BLOCK, Page};
use crate::swap::{Aligned, PAGE};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::Instant;

const PAGE64: u64 = PAGE as u64;

/// Fewer blocks are not worth another thread.
const LEAST: usize = 320 / BLOCK;

/// What became of a block.
#[derive(Default)]
struct Installed {
    pages: Vec<u64>,
    at_hand: Vec<(u64, AtHand)>,
}

/// Installs those of some pages that missing pages still hold, run by run, and gives back those that are held back.
fn install_pages(
    uffd: BorrowedFd<'_>,
    runs: &Runs,
    pages: &[Page],
    bytes: &[u8],
    bits: u8,
) -> io::Result<(Installed, Filled)> {
    let mut installed = Installed::default();
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
                other => return Ok((installed, other)),
            }
            installed.pages.extend(pages[run.clone()].iter().map(|page| page.address));
        }
        run = if good { index..index + 1 } else { 0..0 };
        if let Some(page) = page.filter(|page| page.kinds & bits == 0) {
            let bytes = bytes[index * PAGE..(index + 1) * PAGE].into();
            installed.at_hand.push((page.address, (page.slot, bytes)));
        }
    }
    Ok((installed, Filled::All))
}

impl Memory {
    /// Installs the armed set. From here on the program counts as awake.
    pub fn install(&self, state: &mut State) {
        let began = Instant::now();
        let Some(set) = state.armed.take() else { return };
        state.since.set_pages = set.len();
        state.read_ahead = true;
        let (count, bits) = (set.blocks(), set.bits(&state.since.kind));
        let (uffd, runs) = (self.uffd.as_fd(), state.map.runs());
        let one = |blocks: Range<usize>, buffer: &mut Aligned| {
            let bytes = set.bytes(blocks.clone(), buffer)?;
            install_pages(uffd, runs, set.pages(blocks), bytes, bits)
        };
        let work = |part: Range<usize>| {
            let (mut all, mut buffer) = (Installed::default(), Aligned::default());
            let mut start = part.start;
            while start < part.end {
                let blocks = start..part.end.min(start + set.at_once(start));
                start = blocks.end;
                match one(blocks, &mut buffer) {
                    Ok((done, filled)) => {
                        all.pages.extend(done.pages);
                        all.at_hand.extend(done.at_hand);
                        if filled != Filled::All {
                            break;
                        }
                    }
                    Err(error) => {
                        tracing::warn!(space = self.id, %error, "a working set is not installed whole, its pages come one by one");
                        break;
                    }
                }
            }
            all
        };
        let mut results = Vec::new();
        let parts = std::thread::available_parallelism().map_or(1, usize::from).min(count / LEAST).max(1);
        let part = |number: usize| number * count / parts..(number + 1) * count / parts;
        std::thread::scope(|scope| {
            let elsewhere = |number| {
                let (work, part) = (&work, part(number));
                scope.spawn(move || {
                    // It inherits the processor that its maker is bound to.
                    let _ = sched_setaffinity(None, &every_processor());
                    work(part)
                })
            };
            let others: Vec<_> = (1..parts).map(elsewhere).collect();
            results.push(work(part(0)));
            results.extend(others.into_iter().map(|other| other.join().expect("installing does not panic")));
        });
        for Installed { pages, at_hand } in results {
            state.since.installed += pages.len();
            state.since.set.extend(pages);
            state.at_hand.extend(at_hand);
        }
        state.since.woke = Some((began, began.elapsed().as_micros() as u64));
    }
}

fn every_processor() -> CpuSet {
    let mut all = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|cpu| all.set(cpu));
    all
}
