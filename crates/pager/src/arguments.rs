//! The pages of a process's arguments and environment, which stay where they are while the rest is
//! out.
//!
//! Another process may read /proc/PID/cmdline and environ at any time (ps, pgrep), and the kernel
//! gives such a reader nothing where a page is missing: it does not wait for a page that a
//! userfaultfd has to bring. A process without arguments looks like one of the kernel's.

use crate::memory::Memory;
use crate::swap::{PAGE, PARKED};
use kip_sys::pagemap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

const PAGE64: u64 = PAGE as u64;

/// The whole pages with both: proc_pid_stat(5), fields 48 to 51. Empty if there are none.
///
/// # Errors
/// `NotFound` or ESRCH when the process has ended.
pub(crate) fn pages(pid: u32) -> io::Result<Range<u64>> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    Ok(in_stat(&stat).unwrap_or(0..0))
}

fn in_stat(stat: &str) -> Option<Range<u64>> {
    let mut fields = stat.rsplit(')').next()?.split_ascii_whitespace().skip(48 - 3);
    let mut next = || fields.next()?.parse::<u64>().ok();
    let (arguments, arguments_end, environment, environment_end) = (next()?, next()?, next()?, next()?);
    let start = [arguments, environment].into_iter().filter(|at| *at > 0).min()?;
    let end = arguments_end.max(environment_end);
    (start < end).then_some(start & !(PAGE64 - 1)..end.next_multiple_of(PAGE64))
}

/// Fetches them where they are missing and can be read at once. Returns whether all are there now.
///
/// # Errors
/// The kernel's or the source's.
pub(crate) fn fetch(pid: u32, memory: &Memory) -> io::Result<bool> {
    let pages = pages(pid)?;
    if pages.is_empty() {
        return Ok(true);
    }
    let there = pagemap::present(pid, pages.clone())?;
    let at_once = {
        let state = memory.state();
        let out = state.map.runs().inside(&pages).into_iter().flat_map(|part| part.step_by(PAGE));
        let missing = out.filter(|page| !there.iter().any(|range| range.contains(page)));
        let here = |page| match (state.map.runs().get(page), state.parked.as_deref()) {
            (Some((slot, _)), Some(parked)) if slot >= PARKED => parked.readable(slot, 1) > 0,
            _ => true,
        };
        missing.into_iter().all(here)
    };
    if at_once {
        memory.restore_range(pages, &there)?;
    }
    Ok(at_once)
}

/// Fetches them; those that have to come from a store are fetched later, by a thread of its own: no
/// wake waits for them.
pub(crate) fn fetch_soon(pid: u32, memory: &Arc<Memory>) {
    const STACK: usize = 128 << 10;
    let space = Arc::clone(memory);
    let later = move || {
        let restored = pages(pid).and_then(|pages| space.restore_range(pages, &[]));
        restored.unwrap_or_else(|error| tracing::debug!(pid, %error, "arguments stay out"));
    };
    let begun = match fetch(pid, memory) {
        Ok(true) => Ok(()),
        Ok(false) => std::thread::Builder::new().name("arguments".into()).stack_size(STACK).spawn(later).map(drop),
        Err(e) => Err(e),
    };
    begun.unwrap_or_else(|error| tracing::debug!(pid, %error, "arguments stay out"));
}

/// What of a range does not lie in another.
pub(crate) fn without(range: &Range<u64>, kept: &Range<u64>) -> Vec<Range<u64>> {
    if kept.is_empty() {
        return vec![range.clone()];
    }
    let parts = [range.start..range.end.min(kept.start), range.start.max(kept.end)..range.end];
    parts.into_iter().filter(|part| part.start < part.end).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pages_of_both_are_told() {
        let stat = |fields: &str| format!("7 (a ) b) S {}{fields} 0\n", "1 ".repeat(48 - 4));
        assert_eq!(in_stat(&stat("4100 4200 4200 8300")), Some(4096..12288));
        assert_eq!(in_stat(&stat("4100 4200 0 0")), Some(4096..8192));
        assert_eq!(in_stat(&stat("0 0 0 0")), None, "one of the kernel's");
        assert_eq!(in_stat("7 (ended"), None);
        let own = std::fs::read("/proc/self/cmdline").unwrap();
        let pages = pages(std::process::id()).unwrap();
        assert!(pages.end - pages.start >= own.len() as u64 && pages.start.is_multiple_of(PAGE64));
    }

    #[test]
    fn what_is_kept_is_cut_out() {
        let cut = |start: u64, end: u64| {
            without(&(start..end), &(25..55)).iter().map(|part| (part.start, part.end)).collect::<Vec<_>>()
        };
        assert_eq!(cut(0, 10), [(0, 10)]);
        assert_eq!(cut(20, 60), [(20, 25), (55, 60)]);
        assert_eq!((cut(20, 40), cut(50, 60)), (vec![(20, 25)], vec![(55, 60)]));
        assert_eq!(cut(30, 40), []);
        assert_eq!(without(&(10..40), &(0..0)).into_iter().next(), Some(10..40), "nothing is kept");
    }
}
