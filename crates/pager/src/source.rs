//! Where a page that is missing comes from: one notion for the swap file of a proc and for the page file of a parked
//! snapshot. A slot number says which: from [`PARKED`] on it is one of the snapshot's, which nobody counts.

use crate::swap::Swap;
use std::io;

/// The first slot number of a parked snapshot's page file.
pub const PARKED: u32 = 1 << 31;

/// Pages by the number of their slots.
pub trait PageSource: Send + Sync + std::fmt::Debug {
    /// Reads whole pages from `slot` on into an aligned buffer, and nothing that cannot be trusted.
    ///
    /// # Errors
    /// The source's; the thread that waits for the page then goes on waiting.
    fn read(&self, slot: u32, buffer: &mut [u8]) -> io::Result<()>;
}

impl PageSource for Swap {
    fn read(&self, slot: u32, buffer: &mut [u8]) -> io::Result<()> {
        Swap::read(self, slot, buffer)
    }
}
