//! Puts right pages that another process touched from outside while they were neither there nor
//! watched.
//!
//! A process that reads /proc/PID/cmdline, say, makes the kernel put its page of zeros where the
//! arguments are missing, and once that is there no fault asks for what the page held. Between
//! dropping, or mapping anew, and watching the pager cannot keep others from that. So the thread
//! that dropped or mapped looks for such pages once they are watched and before the program runs.
//!
//! Such a page is told from one that holds zeros by its slot: [`crate::memory`] gives pages of
//! zeros only to what has none.

use crate::slots::Runs;
use crate::swap::{Aligned, PAGE};
use kip_sys::pagemap::{self, Filter, States};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

/// What is fetched from a store has not come after this: the store is gone.
const FETCHED_WITHIN: Duration = Duration::from_secs(30);

/// Mends a process that does not run, all of whose memory is watched. Returns how many pages.
///
/// # Errors
/// The kernel's or the source's: the process must not run.
pub(crate) fn mend(pid: u32, runs: &Runs, read: impl Fn(u32, &mut [u8]) -> io::Result<()>) -> io::Result<usize> {
    let filter = Filter { any: States::ZERO, report: States::ZERO, ..Filter::default() };
    let zeros = pagemap::of(pid, pagemap::WHOLE, filter)?;
    let touched: Vec<_> = zeros.iter().flat_map(|region| runs.inside(&region.range)).collect();
    let mended = put_back(pid, &touched, runs, read)?;
    if mended > 0 {
        tracing::debug!(pid, pages = mended, "pages that were touched from outside are put back");
    }
    Ok(mended)
}

/// Writes what the runs say of them into pages that are there, or not watched. Returns how many.
///
/// # Errors
/// As [`mend`].
pub(crate) fn put_back(
    pid: u32,
    ranges: &[Range<u64>],
    runs: &Runs,
    read: impl Fn(u32, &mut [u8]) -> io::Result<()>,
) -> io::Result<usize> {
    let pages: Vec<_> = ranges
        .iter()
        .flat_map(|range| runs.inside(range))
        .flat_map(|part| part.step_by(PAGE))
        .filter_map(|address| Some((address, runs.get(address)?.0)))
        .collect();
    if pages.is_empty() {
        return Ok(0);
    }
    let file = std::fs::OpenOptions::new().write(true).open(format!("/proc/{pid}/mem"))?;
    let mut bytes = Aligned::new(PAGE);
    let began = Instant::now();
    for (address, slot) in &pages {
        loop {
            match read(*slot, &mut bytes) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && began.elapsed() < FETCHED_WITHIN => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                other => break other?,
            }
        }
        file.write_all_at(&bytes, *address)?;
    }
    Ok(pages.len())
}
