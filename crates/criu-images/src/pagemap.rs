//! Entries of pagemap images, `pagemap_entry` of pagemap.proto: which pages of a memory CRIU has.
//!
//! Never reads a page.

use crate::fields::pagemap_entry;
use crate::wire::Message;

/// A flag of an entry: an earlier dump has the pages.
pub const IN_PARENT: u64 = 1;
/// A flag of an entry: the page file has the pages.
pub const PRESENT: u64 = 4;

/// How many pages an entry is of.
pub fn pages_of(entry: &Message) -> u64 {
    let pages = entry.varint(pagemap_entry::NR_PAGES).filter(|n| *n != 0);
    pages.unwrap_or_else(|| entry.number(pagemap_entry::COMPAT_NR_PAGES))
}
