//! The private swap file of one proc: numbered slots of one page each, counted references.
//!
//! What a sleep writes goes by way of the page cache and stays there for a while ([`Swap::cache`]):
//! its threads stand still until it is written, and what they touch soon after is not to wait for
//! the disk. What is more than [`MOST_CACHED`] goes past the page cache, as all does later.
//!
//! Owns the file and which slots are in use. Never knows which page lies in which slot (that is
//! [`crate::slots`]). The counts live in memory only: a pager that opens the file again counts what
//! its slot maps refer to. A crash leaves slots that no map refers to, which are free then. Nothing
//! is synced: the file is of no use once its processes are gone, and they go with the machine.

use parking_lot::Mutex;
use rustix::fs::{Advice, fadvise};
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Its name in the pager's directory of a proc.
pub const SWAP: &str = "swap";

/// The first slot number of a parked snapshot's page file: those below are this file's.
pub const PARKED: u32 = 1 << 31;

/// Bytes of a page and of a slot.
pub const PAGE: usize = 4096;

/// The most bytes of one sleep that are written by way of the page cache: more would push out what
/// other programs have there, and be no room for others until the disk has it.
const MOST_CACHED: usize = 64 << 20;
/// The same of what all have there, at least, and as a part of the machine's memory.
const LEAST_OF_ALL: usize = 256 << 20;
const PART_OF_ALL: u64 = 16;

/// So many bytes all swap files may still have there.
static ROOM_OF_ALL: LazyLock<AtomicUsize> = LazyLock::new(|| {
    let machine = rustix::system::sysinfo();
    let memory = machine.totalram.saturating_mul(machine.mem_unit.into());
    LEAST_OF_ALL.max((memory / PART_OF_ALL) as usize).into()
});

/// Takes room; false if there is not enough.
fn take(room: &AtomicUsize, bytes: usize) -> bool {
    room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |room| room.checked_sub(bytes)).is_ok()
}

/// Bytes at an address that a device accepts, whole pages.
#[derive(Debug, Default)]
pub struct Aligned {
    bytes: Vec<u8>,
    at: usize,
    length: usize,
}

impl Aligned {
    /// Zeros.
    pub fn new(length: usize) -> Self {
        let bytes = vec![0u8; length + PAGE];
        let at = bytes.as_ptr().align_offset(PAGE);
        Self { bytes, at, length }
    }
}

impl Deref for Aligned {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[self.at..self.at + self.length]
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.at..self.at + self.length]
    }
}

fn open(path: &Path, create: bool, flags: i32) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(create).truncate(create).mode(0o600).custom_flags(flags);
    options.open(path)
}

/// Opens a file past the page cache where its file system can do that, mode 0600.
pub(crate) fn open_direct(path: &Path, create: bool) -> io::Result<File> {
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    open(path, create, direct)
        .or_else(|e| if e.kind() == io::ErrorKind::InvalidInput { open(path, create, 0) } else { Err(e) })
}

/// A new file, mode 0600, what is written to which stays in the page cache as long as there is
/// room.
pub(crate) fn open_cached(path: &Path) -> io::Result<File> {
    open(path, true, 0)
}

#[derive(Debug, Default)]
struct Counts {
    /// References to each slot.
    of: Vec<u32>,
    /// Where the search for free ones begins.
    next: usize,
    used: usize,
}

/// Slots that have room in the page cache. One that is written again there takes no more: a proc
/// that sleeps again and again writes much the same.
#[derive(Debug, Default)]
struct Cached(Vec<u64>);

impl Cached {
    fn has(&self, slot: usize) -> bool {
        self.0.get(slot / 64).is_some_and(|word| word & 1 << (slot % 64) != 0)
    }

    fn set(&mut self, slot: usize, is_there: bool) {
        if self.0.len() <= slot / 64 {
            self.0.resize(slot / 64 + 1, 0);
        }
        let bit = 1 << (slot % 64);
        if is_there { self.0[slot / 64] |= bit } else { self.0[slot / 64] &= !bit }
    }
}

/// The swap file of one proc.
#[derive(Debug)]
pub struct Swap {
    file: File,
    /// The same by way of the page cache.
    cached: File,
    /// So many have asked for that and have not ended it.
    caching: AtomicUsize,
    /// Bytes that this sleep may still write that way.
    room: AtomicUsize,
    /// Bytes that it has there, of those of all.
    taken: AtomicUsize,
    in_cache: Mutex<Cached>,
    /// No slot is written while what is in the page cache is written once more.
    writing: Mutex<()>,
    counts: Mutex<Counts>,
}

impl Swap {
    /// A new, empty one.
    ///
    /// # Errors
    /// The file system's.
    pub fn create(path: &Path) -> io::Result<Self> {
        Self::with(open_direct(path, true)?, path)
    }

    /// The one of a pager that has died; all slots count as free until slot maps refer to them.
    ///
    /// # Errors
    /// The file system's.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::with(open_direct(path, false)?, path)
    }

    fn with(file: File, path: &Path) -> io::Result<Self> {
        let cached = open(path, false, 0)?;
        // What is needed together only the pager knows.
        let _ = fadvise(&cached, 0, None, Advice::Random);
        Ok(Self {
            file,
            cached,
            caching: 0.into(),
            room: 0.into(),
            taken: 0.into(),
            in_cache: Mutex::default(),
            writing: Mutex::default(),
            counts: Mutex::default(),
        })
    }

    /// From now on what is written stays in the page cache, as long as the kernel has room for it
    /// there, and is read from there.
    pub fn cache(&self) {
        self.room.store(MOST_CACHED, Ordering::Relaxed);
        self.caching.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends what one call of [`Swap::cache`] began; the last one gives the room in the page cache
    /// up, once all is on the disk: a read past the page cache would wait for that.
    ///
    /// # Errors
    /// The file system's: the disk does not take what is in the page cache, which stays there and
    /// is read from there.
    pub fn end_cache(&self) -> io::Result<()> {
        if self.caching.load(Ordering::Relaxed) == 1 && rustix::fs::fdatasync(&self.cached).is_err() {
            // The kernel takes such pages for written, and would forget them.
            self.write_past_cache()?;
        }
        if self.caching.fetch_sub(1, Ordering::Relaxed) == 1 {
            let _ = fadvise(&self.cached, 0, None, Advice::DontNeed);
            self.give_room_back();
        }
        Ok(())
    }

    /// Writes each slot that is in use from the page cache to the disk.
    fn write_past_cache(&self) -> io::Result<()> {
        const SLOTS: usize = 256;
        let mut buffer = Aligned::new(SLOTS * PAGE);
        let used: Vec<usize> = {
            let counts = self.counts();
            (0..counts.of.len()).filter(|slot| counts.of[*slot] > 0).collect()
        };
        for run in used.chunk_by(|a, b| a + 1 == *b).flat_map(|run| run.chunks(SLOTS)) {
            let _writing = self.writing.lock();
            let (at, bytes) = ((run[0] * PAGE) as u64, &mut buffer[..run.len() * PAGE]);
            self.cached.read_exact_at(bytes, at)?;
            self.file.write_all_at(bytes, at)?;
        }
        Ok(())
    }

    fn give_room_back(&self) {
        let mut there = self.in_cache.lock();
        there.0.clear();
        ROOM_OF_ALL.fetch_add(self.taken.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }

    fn now(&self) -> &File {
        if self.caching.load(Ordering::Relaxed) > 0 { &self.cached } else { &self.file }
    }

    fn counts(&self) -> parking_lot::MutexGuard<'_, Counts> {
        self.counts.lock()
    }

    /// So many free slots one behind the other, each referred to once from now on; the first of
    /// them.
    pub fn allocate(&self, count: usize) -> u32 {
        /// Slots that are tried before the file grows.
        const MOST_TRIED: usize = 1 << 16;
        let mut counts = self.counts();
        let length = counts.of.len();
        let mut found = None;
        if count > 0 && length - counts.used >= count {
            let mut run = 0;
            let from = if counts.next < length { counts.next } else { 0 };
            for slot in (from..length).chain(0..from).take(MOST_TRIED) {
                // What lies behind the last slot does not follow it.
                run = if counts.of[slot] > 0 {
                    0
                } else if slot == 0 {
                    1
                } else {
                    run + 1
                };
                if run == count {
                    found = Some(slot + 1 - count);
                    break;
                }
            }
        }
        let start = found.unwrap_or(length);
        if found.is_none() {
            counts.of.resize(length + count, 0);
        }
        counts.of[start..start + count].fill(1);
        counts.used += count;
        counts.next = start + count;
        start as u32
    }

    /// One more reference to each slot; those of a parked snapshot are not counted.
    pub fn hold(&self, slots: Range<u32>) {
        if slots.start >= PARKED {
            return;
        }
        let mut counts = self.counts();
        if counts.of.len() < slots.end as usize {
            counts.of.resize(slots.end as usize, 0);
        }
        for slot in slots {
            counts.of[slot as usize] += 1;
            counts.used += usize::from(counts.of[slot as usize] == 1);
        }
    }

    /// One reference less to each slot.
    pub fn release(&self, slots: Range<u32>) {
        if slots.start >= PARKED {
            return;
        }
        let mut counts = self.counts();
        for slot in slots {
            let count = &mut counts.of[slot as usize];
            *count = count.checked_sub(1).expect("a slot is released once for each reference");
            let free = *count == 0;
            counts.used -= usize::from(free);
        }
    }

    /// Whether a slot is referred to exactly once, so that its page may be overwritten.
    pub fn sole(&self, slot: u32) -> bool {
        self.counts().of.get(slot as usize) == Some(&1)
    }

    /// Slots in use.
    pub fn used(&self) -> usize {
        self.counts().used
    }

    /// Writes whole pages from `slot` on.
    ///
    /// # Errors
    /// The file system's; EINVAL when `bytes` is not aligned.
    pub fn write(&self, slot: u32, bytes: &[u8]) -> io::Result<()> {
        let _writing = self.writing.lock();
        let first = slot as usize;
        let file = if self.goes_to_cache(first..first + bytes.len() / PAGE) { &self.cached } else { &self.file };
        file.write_all_at(bytes, u64::from(slot) * PAGE as u64)
    }

    /// Whether slots are written by way of the page cache: there is room for those that are not
    /// there yet. What goes past it is there no more.
    fn goes_to_cache(&self, slots: Range<usize>) -> bool {
        let mut there = self.in_cache.lock();
        let new = slots.clone().filter(|slot| !there.has(*slot)).count() * PAGE;
        let is_cached = self.caching.load(Ordering::Relaxed) > 0;
        let fits = is_cached && (new == 0 || take(&self.room, new) && take(&ROOM_OF_ALL, new));
        if fits {
            self.taken.fetch_add(new, Ordering::Relaxed);
        } else {
            let gone = slots.len() * PAGE - new;
            self.taken.fetch_sub(gone, Ordering::Relaxed);
            ROOM_OF_ALL.fetch_add(gone, Ordering::Relaxed);
        }
        slots.for_each(|slot| there.set(slot, fits));
        fits
    }

    /// Reads whole pages from `slot` on.
    ///
    /// # Errors
    /// The file system's; EINVAL when `buffer` is not aligned.
    pub fn read(&self, slot: u32, buffer: &mut [u8]) -> io::Result<()> {
        self.now().read_exact_at(buffer, u64::from(slot) * PAGE as u64)
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        self.give_room_back();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_reused_when_nobody_refers_to_them() {
        let dir = tempfile::tempdir().unwrap();
        let swap = Swap::create(&dir.path().join("swap")).unwrap();
        let slots: Vec<u32> = (0..4).map(|_| swap.allocate(1)).collect();
        assert_eq!(slots, [0, 1, 2, 3]);
        swap.hold(1..3);
        assert!(swap.sole(0) && !swap.sole(1));
        swap.release(0..4);
        assert_eq!(
            (swap.used(), swap.allocate(2), swap.allocate(1), swap.allocate(1)),
            (2, 4, 0, 3),
            "only what is free, together"
        );
        assert_eq!(swap.allocate(1), 6, "it grows when it is full");
    }

    #[test]
    fn pages_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("swap");
        let mut page = Aligned::new(2 * PAGE);
        page.fill(7);
        Swap::create(&path).unwrap().write(3, &page).unwrap();
        let swap = Swap::open(&path).unwrap();
        page.fill(0);
        swap.read(3, &mut page).unwrap();
        assert!(page.iter().all(|b| *b == 7));
        // By either way it is the same file.
        swap.cache();
        page.fill(8);
        swap.write(4, &page[..PAGE]).unwrap();
        assert_eq!(swap.room.load(Ordering::Relaxed), MOST_CACHED - PAGE);
        // It is there already, in the next sleep too.
        swap.write(4, &page[..PAGE]).unwrap();
        assert_eq!(swap.room.load(Ordering::Relaxed), MOST_CACHED - PAGE);
        assert_eq!(swap.taken.load(Ordering::Relaxed), PAGE);
        // More than fits goes the other way.
        swap.room.store(PAGE / 2, Ordering::Relaxed);
        swap.write(5, &page[..PAGE]).unwrap();
        assert_eq!(swap.room.load(Ordering::Relaxed), PAGE / 2);
        page.fill(9);
        swap.write(3, &page).unwrap();
        assert_eq!(swap.taken.load(Ordering::Relaxed), 0, "of two slots one is new, and both went past it");
        page.fill(7);
        swap.write(3, &page[..PAGE]).unwrap();
        page.fill(8);
        swap.write(4, &page[..PAGE]).unwrap();
        // Should the disk not have taken what is in the page cache.
        swap.hold(3..5);
        swap.write_past_cache().unwrap();
        swap.end_cache().unwrap();
        page.fill(0);
        swap.read(3, &mut page).unwrap();
        assert!(page[..PAGE].iter().all(|b| *b == 7) && page[PAGE..].iter().all(|b| *b == 8));
        use std::os::unix::fs::PermissionsExt as _;
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    }
}
