//! A proc in an object store: the bytes of the objects that an archived generation consists of, and
//! what they mean.
//!
//! Owns the format (docs/design/2026-11-22-archive.md), the keys and the sealing, which are not
//! optional, and the pure decisions about objects: which data directory may replace a head, what
//! may be deleted. Turns local things into objects' bytes and objects' bytes, as they arrive, back.
//! Never moves an object (the store does), never looks at a process, has no thread, and no clock
//! but to see how young a file is: times are given, in Unix milliseconds or those of the boot
//! clock. Reads and writes local files for keys and the filesystem difference only.
//!
//! ```text
//! page files --memory--> page table, packs --+
//! overlay ----walk-----> tree, packs --------+--> front --> head
//! ```
//!
//! Invariants: bytes are believed only after they were authenticated; an object opens only as what
//! it was sealed as (kind, realm, proc, generation, and which writing of it); what is refused says
//! why, and damage is never mistaken for a key that was destroyed; what would be refused when it is
//! read is not written. A crash anywhere leaves packs and fronts that no head leads to, which
//! collection finds.
#![forbid(unsafe_code)]

pub mod backup;
pub mod codec;
pub mod files;
pub mod front;
pub mod gc;
pub mod head;
pub mod ids;
pub mod index;
pub mod keys;
pub mod memory;
pub mod names;
pub mod pack;
pub mod packing;
pub mod seal;
pub mod secrets;
mod stream;
pub mod table;
mod wire;

#[cfg(test)]
mod tests {
    #[test]
    fn readers_and_writers_can_move_between_threads() {
        fn is_send<T: Send>() {}
        is_send::<crate::front::read::FrontReader>();
        is_send::<crate::front::write::FrontWriter>();
        is_send::<crate::pack::PackReader<'static>>();
        is_send::<crate::pack::PackWriter>();
    }
}
