//! Turns written pages of private file mappings into private memory, in place: only that can be
//! watched by a userfaultfd.
//!
//! New memory is filled beside the old and then moved over it in one call, so the process is whole
//! at every moment. What it can notice is that the file's name is gone from its maps there.

use crate::space::{Mapping, SpaceKind, mappings};
use crate::swap::PAGE;
use kip_stop::call;
use kip_sys::inject::Hand;
use kip_sys::pagemap::{self, Filter, Region, States};
use kip_sys::process::{read_memory, write_memory};
use std::io;
use std::ops::Range;

/// Pages between written ones that are turned too rather than splitting a mapping once more.
const GAP: u64 = 16 * PAGE as u64;

/// The written ranges of file mappings, with their protection.
fn written(mappings: &[Mapping], regions: &[Region]) -> Vec<(Range<u64>, u64)> {
    let mut found: Vec<(Range<u64>, u64)> = Vec::new();
    for mapping in mappings.iter().filter(|m| m.kind == SpaceKind::File && m.protection & 1 != 0) {
        let first = found.len();
        let private = |states: States| !states.has(States::FILE) && !states.has(States::GUARD);
        for range in within(&mapping.range, regions).filter(|(_, s)| private(*s)).map(|(range, _)| range) {
            match found[first..].last_mut() {
                Some((last, _)) if range.start - last.end <= GAP => last.end = range.end,
                _ => found.push((range, mapping.protection)),
            }
        }
    }
    found
}

/// The parts of regions that lie in a range.
pub fn within<'a>(range: &Range<u64>, regions: &'a [Region]) -> impl Iterator<Item = (Range<u64>, States)> + 'a {
    let first = regions.partition_point(|region| region.range.end <= range.start);
    let (start, end) = (range.start, range.end);
    let inside = regions[first..].iter().take_while(move |region| region.range.start < end);
    inside.map(move |region| (region.range.start.max(start)..region.range.end.min(end), region.states))
}

/// Turns all written pages of file mappings of a stopped process; tells how many ranges that were.
///
/// # Errors
/// The process cannot be looked at. A range that cannot be turned stays in memory.
pub fn all(pid: u32, hand: &Hand) -> io::Result<usize> {
    let maps = mappings(pid)?;
    // Pages that are the file's have nothing to be turned, and they are most.
    let filter = Filter {
        any: States::PRESENT | States::SWAPPED,
        report: States::PRESENT | States::SWAPPED | States::FILE | pagemap::guards(),
        ..Filter::default()
    };
    let regions = pagemap::of(pid, pagemap::WHOLE, filter)?;
    let mut turned = 0;
    for (range, protection) in written(&maps, &regions) {
        match turn(pid, hand, &range, protection) {
            Ok(()) => turned += 1,
            Err(error) => tracing::warn!(pid, ?range, %error, "a written file mapping stays in memory"),
        }
    }
    Ok(turned)
}

/// Turns one range.
///
/// # Errors
/// The kernel's; the range is then as it was.
fn turn(pid: u32, hand: &Hand, range: &Range<u64>, protection: u64) -> io::Result<()> {
    const PRIVATE_ANONYMOUS: u64 = 0x2 | 0x20;
    const MAYMOVE_FIXED: u64 = 1 | 2;
    let length = range.end - range.start;
    let mut bytes = vec![0; length as usize];
    read_memory(pid, range.start, &mut bytes)?;
    let beside = hand.call(call::MMAP, &[0, length, 1 | 2, PRIVATE_ANONYMOUS, u64::MAX, 0])?;
    let moved = write_memory(pid, beside, &bytes)
        .and_then(|()| match protection {
            3 => Ok(0),
            other => hand.call(call::MPROTECT, &[beside, length, other]),
        })
        .and_then(|_| hand.call(call::MREMAP, &[beside, length, length, MAYMOVE_FIXED, range.start]));
    if moved.is_err() {
        hand.call(call::MUNMAP, &[beside, length])?;
    }
    moved.map(drop)
}
