//! Where a page that is missing comes from: one notion for the swap file of a proc and for the page
//! file of a parked snapshot. A slot number says which: from [`crate::swap::PARKED`] on it is one
//! of the snapshot's, of which the slot map keeps no count.

use crate::swap::Swap;
use std::io;

/// Pages by the number of their slots.
pub trait PageSource: Send + Sync + std::fmt::Debug {
    /// Reads whole pages from `slot` on into an aligned buffer, and nothing that cannot be trusted.
    ///
    /// # Errors
    /// The source's; the thread that waits for the page then goes on waiting.
    fn read(&self, slot: u32, buffer: &mut [u8]) -> io::Result<()>;

    /// How many of some pages, from `slot` on, can be read without waiting for a store.
    fn readable(&self, _slot: u32, pages: usize) -> usize {
        pages
    }

    /// Faults needed these pages, or will: they follow each other. For the program that fetches
    /// more of them.
    fn needed(&self, _slot: u32, _pages: usize) {}
}

impl PageSource for Swap {
    fn read(&self, slot: u32, buffer: &mut [u8]) -> io::Result<()> {
        Swap::read(self, slot, buffer)
    }
}
