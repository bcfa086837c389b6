//! The bytes of a plan: 64-bit words and what they point at.

/// Addresses from here on are the restorer's: AREA in plan.h, which says why there.
pub const AREA: u64 = 0x4a00_0000_0000;
/// Up to here.
pub const AREA_END: u64 = 0x4a10_0000_0000;
/// Mapped in every process that is being rebuilt: MAIN_STACK in restorer.c.
pub const RESTORER_STACK: u64 = AREA + 0x100_0000;
/// Where the plan lies in every process that is being rebuilt: PLAN in plan.h.
pub(super) const PLAN_AT: u64 = AREA + 0x1000_0000;
/// Most bytes of a plan: from PLAN to VDSO in plan.h.
pub(super) const PLAN_MOST: u64 = 0x1000_0000;
/// Where pid 1 makes shared memory: SHARED in restorer.c.
pub(super) const SHARED: u64 = AREA + 0x1_0000_0000;
/// Page size.
pub(super) const PAGE: usize = 4096;
/// First word of the restorer's part.
const MAGIC: u64 = 0x4e_414c_5050_494b;
/// Words of `struct plan`.
const HEAD_WORDS: usize = 19;

/// The restorer's part, as it grows.
#[derive(Debug)]
pub(super) struct Writer {
    bytes: Vec<u8>,
}

/// Finished.
#[derive(Debug)]
pub(super) struct Program {
    pub bytes: Vec<u8>,
    pub base: u64,
}

/// `struct span`: a place and a number of things there.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Span(pub u64, pub u64);

impl Writer {
    pub(super) fn new() -> Writer {
        Writer { bytes: vec![0; HEAD_WORDS * 8] }
    }

    /// Puts words at the end and says where.
    pub(super) fn words(&mut self, words: &[u64]) -> u64 {
        let at = self.align();
        for word in words {
            self.bytes.extend_from_slice(&word.to_le_bytes());
        }
        at
    }

    /// Puts bytes at the end and says where.
    pub(super) fn bytes(&mut self, bytes: &[u8]) -> u64 {
        let at = self.align();
        self.bytes.extend_from_slice(bytes);
        at
    }

    /// Puts a string with its end at the end and says where.
    pub(super) fn string(&mut self, text: &str) -> u64 {
        let at = self.bytes(text.as_bytes());
        self.bytes.push(0);
        at
    }

    /// A list of structures of words.
    pub(super) fn list(&mut self, items: &[Vec<u64>]) -> Span {
        let words: Vec<u64> = items.iter().flatten().copied().collect();
        Span(self.words(&words), items.len() as u64)
    }

    fn align(&mut self) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
        self.bytes.len() as u64
    }

    /// Fills in the head.
    pub(super) fn finish(mut self, base: u64, spans: [Span; 7], init: u64, init_argument: u64) -> Program {
        self.align();
        let [files, shared, tasks, vdso, terminals, settings, objects] = spans;
        let head = [
            MAGIC,
            self.bytes.len() as u64,
            base,
            files.0,
            files.1,
            shared.0,
            shared.1,
            tasks.0,
            tasks.1,
            vdso.0,
            vdso.1,
            terminals.0,
            terminals.1,
            settings.0,
            settings.1,
            objects.0,
            objects.1,
            init,
            init_argument,
        ];
        for (place, word) in self.bytes.chunks_exact_mut(8).zip(head) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        Program { bytes: self.bytes, base }
    }
}
