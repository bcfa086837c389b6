//! How one missing page is filled: which pages are read with it, and from where.

use super::{Filled, Memory, MemoryState, PAGE64, PARKED_AHEAD, TICK_AHEAD, fill, read, readable, with_buffer};
use crate::ahead::Streams;
use crate::stored::{Buffers, Page};
use crate::swap::{PAGE, PARKED};
use kip_sys::uffd;
use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd as _;

/// Pages that one fault of an awake program fetches at least, as far as their slots follow each
/// other; see [`crate::ahead`].
const READ_AHEAD: usize = 8;

/// Pages that were read for a tick and are at hand until the next one, at most: 8 MiB.
const MOST_FOR_TICK: usize = 2048;

/// Pages of zeros that a fault in memory that was never used fetches at least.
const ZERO_AHEAD: usize = 32;

impl Memory {
    /// Fills the page at `address`, and those beside it that lie beside it in the source too: the
    /// more, the longer faults have followed each other there.
    pub(super) fn fetch(&self, state: &mut MemoryState, address: u64, write: bool) -> io::Result<Filled> {
        let uffd = self.uffd.as_fd();
        let Some((slot, end)) = state.map.runs().get(address) else {
            if state.read_ahead {
                // Memory that is used for the first time: the kernel gives the pages behind it by
                // itself then.
                let (window, _) = state.streams.window(address, ZERO_AHEAD);
                let most = address + window as u64 * PAGE64;
                let end = state.map.runs().next_from(address).map_or(most, |next| next.min(most));
                if uffd::zero(uffd, address..end, true).is_ok() {
                    state.streams.went(address..end);
                    return Ok(Filled::All);
                }
            }
            return fill(uffd, address, &[0; PAGE], !write);
        };
        if let Some((held, bytes)) = state.at_hand.get(&address)
            && *held == slot
        {
            let filled = match bytes {
                Some(bytes) => fill(uffd, address, bytes, true),
                None => with_buffer(1, |buffer| {
                    read(&state.map, state.parked.as_deref(), slot, buffer)?;
                    fill(uffd, address, buffer, true)
                }),
            };
            if filled.is_ok() {
                state.at_hand.remove(&address);
                state.since.probed += usize::from(state.ticking.is_none());
            }
            return filled;
        }
        if state.ticking.is_some() && slot < PARKED {
            if state.at_hand.len() > MOST_FOR_TICK {
                state.at_hand = HashMap::new();
            }
            if let Some(filled) = self.fill_from_set(state, address, slot) {
                return filled;
            }
            let place = (address / PAGE64) as usize % TICK_AHEAD;
            let (start, first, before) = state.map.runs().before(address, place + 1).expect("it has a slot");
            let behind = (TICK_AHEAD - place).min(((end - address) / PAGE64) as usize);
            let filled = self.fetch_for_tick(state, address, (start, first), before - 1 + behind);
            // If one beside it cannot be read: it alone.
            return filled.or_else(|_| self.fetch_for_tick(state, address, (address, slot), 1));
        }
        if slot >= PARKED && readable(state, slot, 1) == 0 {
            // It is asked for alone: what else is fetched with it is not ours to say.
            return with_buffer(1, |buffer| {
                read(&state.map, state.parked.as_deref(), slot, buffer)?;
                fill(uffd, address, buffer, true)
            });
        }
        let (window, down) = match (state.read_ahead, slot >= PARKED) {
            (false, _) => (1, false),
            (true, false) => state.streams.window(address, READ_AHEAD),
            (true, true) => state.streams.window(address, PARKED_AHEAD),
        };
        let most = window.min(((end - address) / PAGE64) as usize);
        let behind = (address, slot, if slot >= PARKED { readable(state, slot, most).max(1) } else { most });
        let before = state.map.runs().before(address, window).filter(|_| down);
        let before = before.filter(|(_, slot, pages)| *slot < PARKED || readable(state, *slot, *pages) == *pages);
        let (start, slot, pages) = before.unwrap_or(behind);
        let filled = with_buffer(pages, |buffer| {
            read(&state.map, state.parked.as_deref(), slot, buffer)?;
            fill(uffd, start, buffer, true)
        });
        let filled = match filled {
            // One of the neighbours cannot be read: no fault has asked for that one.
            Err(_) if pages > 1 => {
                state.streams = Streams::default();
                let (_, slot, _) = behind;
                return with_buffer(1, |buffer| {
                    read(&state.map, state.parked.as_deref(), slot, buffer)?;
                    fill(uffd, address, buffer, true)
                });
            }
            other => other?,
        };
        if let Some(parked) = state.parked.as_deref().filter(|_| slot >= PARKED) {
            // Neighbours only once they have followed each other: else no fault has shown that they
            // are needed.
            match window > PARKED_AHEAD {
                true => parked.needed(slot, pages),
                false => parked.needed(behind.1, 1),
            }
        }
        let fetched = start..start + pages as u64 * PAGE64;
        state.since.ahead.extend(fetched.clone().step_by(PAGE).filter(|page| *page != address));
        if state.read_ahead {
            state.streams.went(fetched);
        }
        Ok(filled)
    }

    /// Fills a page that a tick touches from the set that is armed, if that has it in memory; the
    /// pages that are kept with it are at hand for a moment.
    fn fill_from_set(&self, state: &mut MemoryState, address: u64, slot: u32) -> Option<io::Result<Filled>> {
        let set = state.armed.as_ref()?;
        let block = set.block_in_memory(address, slot)?;
        let mut found = None;
        let take = |pages: &[Page], bytes: &[u8]| {
            for (page, bytes) in pages.iter().zip(bytes.chunks_exact(PAGE)) {
                if page.address == address {
                    found = Some(fill(self.uffd.as_fd(), address, bytes, true));
                } else {
                    state.at_hand.insert(page.address, (page.slot, Some(bytes.into())));
                }
            }
            Ok(true)
        };
        // One that is damaged lies in the swap file as well.
        set.each(block..block + 1, &mut Buffers::default(), take).ok()?;
        found
    }

    /// Fills a page that a tick touches, alone, for what it does not touch is to stay out. Those
    /// beside it, `pages` in all from an address and its slot on, are read with it and are at hand
    /// for a moment: a tick whose pages are not known yet would wait for the disk for each.
    fn fetch_for_tick(
        &self,
        state: &mut MemoryState,
        address: u64,
        from: (u64, u32),
        pages: usize,
    ) -> io::Result<Filled> {
        with_buffer(pages, |buffer| {
            read(&state.map, None, from.1, buffer)?;
            for (n, bytes) in (0..).zip(buffer.chunks_exact(PAGE)) {
                state.at_hand.insert(from.0 + u64::from(n) * PAGE64, (from.1 + n, Some(bytes.into())));
            }
            state.at_hand.remove(&address);
            let at = (address - from.0) as usize;
            fill(self.uffd.as_fd(), address, &buffer[at..at + PAGE], true)
        })
    }
}
