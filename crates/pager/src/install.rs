//! Installs a working set: all of it before the program runs, by all processors. To let the program run earlier, beside the
//! installing of the rest, was tried: the two take longer together than one after the other, for they wait for each other in
//! the kernel.
//!
//! What cannot be installed comes by faults.

use crate::memory::{AtHand, Filled, Memory, State, fill};
use crate::slots::Runs;
use crate::stored::{BLOCK, Buffers, Page};
use crate::swap::PAGE;
use rayon::{ThreadPool, ThreadPoolBuilder};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Instant;

const PAGE64: u64 = PAGE as u64;

/// Fewer blocks are not worth another thread.
const LEAST: usize = 320 / BLOCK;

const STACK: usize = 256 << 10;

/// What one thread has done.
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
            installed.at_hand.push((page.address, (page.slot, bytes)));
        }
    }
    Ok(Filled::All)
}

/// Threads of the pool that nobody has reserved. An install that waits for a job which waits for another install's would
/// stand still with it.
static FREE: OnceLock<AtomicUsize> = OnceLock::new();

/// Threads that stand ready: to start one takes as long as to install forty pages.
pub(crate) fn pool() -> &'static ThreadPool {
    static POOL: OnceLock<ThreadPool> = OnceLock::new();
    POOL.get_or_init(|| {
        // Asked of a thread that is bound to one processor the answer would be one.
        let mut every = CpuSet::new();
        (0..CpuSet::MAX_CPU).for_each(|cpu| every.set(cpu));
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        FREE.get_or_init(|| threads.into());
        let pool = ThreadPoolBuilder::new().num_threads(threads).thread_name(|number| format!("install-{number}"));
        let unbound = move |_| {
            let _ = sched_setaffinity(None, &every);
        };
        pool.stack_size(STACK).start_handler(unbound).build().expect("threads can be started")
    })
}

/// Helpers for some blocks, reserved: none with little work, else one for each further processor, as far as they are free.
struct Helpers(usize);

impl Helpers {
    fn reserve(blocks: usize) -> Self {
        let wanted = pool().current_num_threads().min(blocks / LEAST).saturating_sub(1);
        let Some(free) = FREE.get().filter(|_| wanted > 0) else { return Self(0) };
        let mut got = 0;
        let take = |free: usize| {
            got = wanted.min(free);
            Some(free - got)
        };
        let _ = free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        Self(got)
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        if let Some(free) = FREE.get() {
            free.fetch_add(self.0, Ordering::Relaxed);
        }
    }
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
        let mut portions = Vec::new();
        let mut start = 0;
        while start < count {
            let blocks = start..count.min(start + set.at_once(start));
            start = blocks.end;
            portions.push(blocks);
        }
        let next = AtomicUsize::new(0);
        let some = || {
            let (mut all, mut buffers) = (Installed::default(), Buffers::default());
            while let Some(blocks) = portions.get(next.fetch_add(1, Ordering::Relaxed)) {
                let mut filled = Filled::All;
                let done = set.each(blocks.clone(), &mut buffers, |pages, bytes| {
                    filled = install_pages(uffd, runs, pages, bytes, bits, &mut all)?;
                    Ok(filled == Filled::All)
                });
                if let Err(error) = &done {
                    tracing::warn!(space = self.id, %error, "a working set is not installed whole, its pages come one by one");
                }
                if done.is_err() || filled != Filled::All {
                    break;
                }
            }
            all
        };
        let results = Mutex::new(Vec::new());
        let add = |installed| results.lock().expect("adding does not panic").push(installed);
        let helpers = Helpers::reserve(count);
        if helpers.0 == 0 {
            add(some());
        } else {
            pool().in_place_scope(|scope| {
                scope.spawn(|_| {
                    // What is kept in memory, or else the first portion, is somebody else's meanwhile.
                    let on_disk = portions.partition_point(|blocks| !set.on_disk(blocks.start)).max(1);
                    set.begin(&portions[on_disk..]);
                    add(some());
                });
                (1..helpers.0).for_each(|_| scope.spawn(|_| add(some())));
                add(some());
            });
        }
        if helpers.0 > 0 {
            // To give up what was read takes time as well.
            pool().spawn(move || drop(set));
        }
        let results = results.into_inner().expect("adding does not panic");
        for Installed { pages, at_hand } in results {
            state.since.installed += pages.len();
            state.since.set.extend(pages);
            state.at_hand.extend(at_hand);
        }
        state.since.woke = Some((began, began.elapsed().as_micros() as u64));
    }
}
