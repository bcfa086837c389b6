//! userfaultfd(2): missing pages of a process, reported to the holder of the descriptor, which
//! fills them in.
//!
//! A descriptor belongs to the address space of the thread that made it, and stays with it: every
//! request below acts on that space, whichever process holds the descriptor. One for another
//! process is made by that process, from an open /dev/userfaultfd that it was given ([`NEW`] is the
//! request); it needs no privilege then, inside of whatever user namespace. When the last
//! descriptor is closed, pages that are missing silently become zeros.
//!
//! [`EventPage`] is a page of a file into which the kernel itself writes events. What a reader that
//! was killed had taken from the descriptor is still there: the kernel ends a read(2) that has
//! begun before it looks at SIGKILL. Missing from this list on purpose: UFFDIO_CONTINUE,
//! UFFDIO_MOVE, UFFDIO_POISON. Linux 6.7 for all features.

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::io;
use std::ops::{BitOr, Range};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;

/// The request that makes a descriptor out of an open /dev/userfaultfd; its argument are
/// [`NEW_FLAGS`].
pub const NEW: u64 = 0xaa00;
/// Close-on-exec and nonblocking.
pub const NEW_FLAGS: u64 = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;

const API: u64 = 0xc018_aa3f;
const REGISTER: u64 = 0xc020_aa00;
const UNREGISTER: u64 = 0x8010_aa01;
const WAKE: u64 = 0x8010_aa02;
const COPY: u64 = 0xc028_aa03;
const ZEROPAGE: u64 = 0xc020_aa04;
const WRITEPROTECT: u64 = 0xc018_aa06;

/// What a descriptor is to tell and to do (UFFD_FEATURE_*).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Features(u64);

impl Features {
    /// Returns whether a fault met write protection.
    pub const FAULT_WP: Self = Self(1);
    /// A fork gives a descriptor for the child. Setting it needs CAP_SYS_PTRACE.
    pub const FORK: Self = Self(1 << 1);
    /// mremap(2) is told.
    pub const REMAP: Self = Self(1 << 2);
    /// MADV_DONTNEED, MADV_FREE and MADV_REMOVE are told.
    pub const REMOVE: Self = Self(1 << 3);
    /// munmap(2) is told.
    pub const UNMAP: Self = Self(1 << 6);
    /// A fault's thread is told, in its own pid namespace.
    pub const THREAD_ID: Self = Self(1 << 8);
    /// Pages that were never there can be write-protected. Linux 6.4.
    pub const WP_UNPOPULATED: Self = Self(1 << 13);
    /// The kernel lifts write protection itself, silently. Linux 6.7.
    pub const WP_ASYNC: Self = Self(1 << 15);
}

impl BitOr for Features {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Which faults of a range are caught.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Catch {
    /// Pages that are not there (UFFDIO_REGISTER_MODE_MISSING).
    Missing,
    /// Writes to protected pages (UFFDIO_REGISTER_MODE_WP).
    Writes,
    /// Both.
    Both,
}

/// How [`copy`] leaves a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyMode {
    /// Write-protected: with [`Features::WP_ASYNC`], known as unwritten until it is written.
    pub protect: bool,
    /// Wakes the threads that wait for these pages.
    pub wake: bool,
}

/// Something that happened in the address space.
#[derive(Debug)]
pub enum FaultEvent {
    /// A thread waits for the page at `address`.
    Fault {
        /// Start of the page.
        address: u64,
        /// It wanted to write.
        write: bool,
        /// The page is there, but write-protected.
        protected: bool,
        /// The thread, in its own pid namespace; 0 without [`Features::THREAD_ID`].
        thread: u32,
    },
    /// The process has forked; this descriptor is the child's.
    Fork(OwnedFd),
    /// Pages were moved.
    Remap {
        /// Old address.
        from: u64,
        /// New address.
        to: u64,
        /// Bytes, of the old range.
        length: u64,
    },
    /// The content of a range is about to be given up; it stays mapped.
    Remove(Range<u64>),
    /// A range is no longer mapped.
    Unmap(Range<u64>),
}

/// What a dead reader left in an [`EventPage`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Left {
    /// See [`FaultEvent::Fault`]: the thread waits until it is woken.
    Fault,
    /// See [`FaultEvent::Fork`]: the number that the descriptor had in the reader.
    Fork(RawFd),
    /// See [`FaultEvent::Remap`].
    Remap {
        /// Old address.
        from: u64,
        /// New address.
        to: u64,
        /// Bytes.
        length: u64,
    },
    /// See [`FaultEvent::Remove`] and [`FaultEvent::Unmap`].
    Gone(Range<u64>),
}

fn request(fd: BorrowedFd<'_>, request: u64, argument: *mut u64) -> io::Result<i32> {
    // SAFETY: our callers pass an array that has the layout and at least the size that the
    // request's number says, and that lives through the call. What it points at in turn is said
    // where it is.
    match unsafe { libc::ioctl(fd.as_raw_fd(), request, argument) } {
        -1 => Err(io::Error::last_os_error()),
        n => Ok(n),
    }
}

/// Opens /dev/userfaultfd: open(2), Linux 6.1.
///
/// # Errors
/// `NotFound` on an older kernel, EACCES.
pub fn open_device() -> io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags, open};
    Ok(open("/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
}

/// A descriptor for our own address space, close-on-exec and nonblocking: ioctl(2)
/// USERFAULTFD_IOC_NEW, Linux 6.1.
///
/// # Errors
/// EMFILE, ENOTTY when `device` is none.
pub fn create(device: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: the argument is a number.
    match unsafe { libc::ioctl(device.as_raw_fd(), NEW, NEW_FLAGS) } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: the kernel has just made it for us.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
    }
}

/// How many threads wait for a page of this descriptor's, told of or not yet: its fdinfo.
///
/// # Errors
/// The kernel's, `InvalidData` where the file says nothing of it.
pub fn waiting(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
    let total = info.lines().find_map(|line| line.strip_prefix("total:")?.trim().parse().ok());
    total.ok_or(io::ErrorKind::InvalidData.into())
}

/// Sets what a new descriptor does; once: ioctl_userfaultfd(2) UFFDIO_API.
///
/// # Errors
/// EINVAL when it was done before or the kernel lacks a feature, EPERM for [`Features::FORK`]
/// without CAP_SYS_PTRACE.
pub fn api(fd: BorrowedFd<'_>, features: Features) -> io::Result<()> {
    request(fd, API, [0xaa, features.0, 0].as_mut_ptr()).map(drop)
}

/// Catches the faults of a range of whole pages, in place of those that it caught before:
/// UFFDIO_REGISTER.
///
/// # Errors
/// EINVAL for unmapped space or a mapping that is not anonymous, shared memory or huge pages, EBUSY
/// when it belongs to another descriptor, ENOMEM, ESRCH when the address space is gone.
pub fn register(fd: BorrowedFd<'_>, range: Range<u64>, catch: Catch) -> io::Result<()> {
    let mode = match catch {
        Catch::Missing => 1,
        Catch::Writes => 2,
        Catch::Both => 3,
    };
    request(fd, REGISTER, [range.start, range.end - range.start, mode, 0].as_mut_ptr()).map(drop)
}

/// Catches no more faults of a range, lifts its write protection and wakes the threads that wait
/// for it: UFFDIO_UNREGISTER.
///
/// # Errors
/// EINVAL as for [`register`], ENOMEM when the address space is gone.
pub fn unregister(fd: BorrowedFd<'_>, range: Range<u64>) -> io::Result<()> {
    request(fd, UNREGISTER, [range.start, range.end - range.start].as_mut_ptr()).map(drop)
}

/// Puts pages in, all of one mapping; returns how many bytes were, which is less than all only if
/// the error of the next page is to be had by asking again from there: UFFDIO_COPY.
///
/// # Errors
/// EEXIST when the first page is there, ENOENT when it is not registered or the range crosses
/// mappings, EAGAIN when an event must be read first, ESRCH when the address space is gone.
pub fn copy(fd: BorrowedFd<'_>, to: u64, bytes: &[u8], mode: CopyMode) -> io::Result<usize> {
    let mode = u64::from(!mode.wake) | u64::from(mode.protect) << 1;
    // The kernel reads `bytes` through the address given here, and only during the call.
    let mut argument = [to, bytes.as_ptr() as u64, bytes.len() as u64, mode, 0];
    done(request(fd, COPY, argument.as_mut_ptr()), bytes.len(), argument[4])
}

/// Maps the page of zeros, see [`copy`]: UFFDIO_ZEROPAGE. Such pages count as written.
///
/// # Errors
/// As [`copy`].
pub fn zero(fd: BorrowedFd<'_>, range: Range<u64>, wake: bool) -> io::Result<usize> {
    let length = range.end - range.start;
    let mut argument = [range.start, length, u64::from(!wake), 0];
    done(request(fd, ZEROPAGE, argument.as_mut_ptr()), length as usize, argument[3])
}

fn done(result: io::Result<i32>, all: usize, told: u64) -> io::Result<usize> {
    match result {
        Ok(_) => Ok(all),
        Err(e) => match usize::try_from(told as i64) {
            Ok(some) if some > 0 && some <= all => Ok(some),
            _ => Err(e),
        },
    }
}

/// Protects pages against writing or lifts that: UFFDIO_WRITEPROTECT.
///
/// # Errors
/// ENOENT when the range is not registered for it, EAGAIN when an event must be read first, ESRCH
/// when the address space is gone.
pub fn write_protect(fd: BorrowedFd<'_>, range: Range<u64>, protect: bool) -> io::Result<()> {
    request(fd, WRITEPROTECT, [range.start, range.end - range.start, u64::from(protect)].as_mut_ptr()).map(drop)
}

/// Lets threads that wait for pages of a range try again: UFFDIO_WAKE.
///
/// # Errors
/// EINVAL for a range that is not of whole pages.
pub fn wake(fd: BorrowedFd<'_>, range: Range<u64>) -> io::Result<()> {
    request(fd, WAKE, [range.start, range.end - range.start].as_mut_ptr()).map(drop)
}

/// Bytes of an [`EventPage`] in its file.
pub const EVENT_PAGE: usize = 4096;
/// Bytes of `struct uffd_msg`; most that one read takes.
const MESSAGE: usize = 32;
const MOST: usize = 16;

/// A page into which events are read (see the module). It counts the reads: the first word is the
/// number of the last.
#[derive(Debug)]
pub struct EventPage {
    page: NonNull<u64>,
}

// SAFETY: the mapping belongs to the value alone and to no thread.
unsafe impl Send for EventPage {}

impl EventPage {
    /// The page at `offset` of a file, which must be that long: mmap(2).
    ///
    /// # Errors
    /// ENODEV, ENOMEM.
    pub fn of_file(file: BorrowedFd<'_>, offset: u64) -> io::Result<Self> {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::POPULATE);
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let page = unsafe { mmap(std::ptr::null_mut(), EVENT_PAGE, protection, flags, file, offset)? };
        NonNull::new(page.cast()).map(|page| Self { page }).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    /// A page that no other process will see.
    ///
    /// # Errors
    /// ENOMEM.
    pub fn private() -> io::Result<Self> {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::POPULATE);
        // SAFETY: as above.
        let page = unsafe { mmap_anonymous(std::ptr::null_mut(), EVENT_PAGE, protection, flags)? };
        NonNull::new(page.cast()).map(|page| Self { page }).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    fn word(&self, index: usize) -> u64 {
        assert!(index < EVENT_PAGE / 8, "inside of the page");
        // SAFETY: inside of the mapping, aligned, and any bytes are a u64. Volatile, since a file's
        // page is not ours alone.
        unsafe { self.page.as_ptr().add(index).read_volatile() }
    }

    fn set_word(&mut self, index: usize, value: u64) {
        assert!(index < EVENT_PAGE / 8, "inside of the page");
        // SAFETY: as above.
        unsafe { self.page.as_ptr().add(index).write_volatile(value) }
    }

    fn message(&self, index: usize) -> [u64; 4] {
        [0, 1, 2, 3].map(|word| self.word((1 + index) * MESSAGE / 8 + word))
    }

    /// The number of the last read.
    pub fn reads(&self) -> u64 {
        self.word(0)
    }

    /// Takes up to 16 events, without waiting: read(2). None: there are no more.
    ///
    /// # Errors
    /// EMFILE: a fork's descriptor does not fit, and its event is still to be had.
    pub fn read(&mut self, fd: BorrowedFd<'_>) -> io::Result<Vec<FaultEvent>> {
        self.set_word(0, self.word(0) + 1);
        // SAFETY: `MOST` messages behind the first 32 bytes lie inside of the mapping, to which no
        // reference exists.
        let got = unsafe { libc::read(fd.as_raw_fd(), self.page.as_ptr().add(MESSAGE / 8).cast(), MOST * MESSAGE) };
        let Ok(got) = usize::try_from(got) else {
            let e = io::Error::last_os_error();
            return if e.kind() == io::ErrorKind::WouldBlock { Ok(Vec::new()) } else { Err(e) };
        };
        Ok((0..got / MESSAGE).filter_map(|index| self.event(index)).collect())
    }

    fn event(&self, index: usize) -> Option<FaultEvent> {
        let [kind, a, b, c] = self.message(index);
        Some(match kind & 0xff {
            0x12 => {
                FaultEvent::Fault { address: b & !0xfff, write: a & 1 != 0, protected: a & 2 != 0, thread: c as u32 }
            }
            // SAFETY: the read that our caller has just made gave us this descriptor, and this is
            // the only place that takes it up; `left` gives numbers only.
            0x13 => FaultEvent::Fork(unsafe { OwnedFd::from_raw_fd(a as u32 as RawFd) }),
            0x14 => FaultEvent::Remap { from: a, to: b, length: c },
            0x15 => FaultEvent::Remove(a..b),
            0x16 => FaultEvent::Unmap(a..b),
            _ => return None,
        })
    }

    /// Forgets the event of this index of the last read: it needs no [`EventPage::left`] any more.
    pub fn done(&mut self, index: usize) {
        assert!(index < MOST, "one read takes {MOST}");
        self.set_word((1 + index) * MESSAGE / 8, 0);
    }

    /// What the last read took and no reader has finished, with the index.
    pub fn left(&self) -> Vec<(usize, Left)> {
        let left = |index| {
            let [kind, a, b, c] = self.message(index);
            Some(match kind & 0xff {
                0x12 => Left::Fault,
                0x13 => Left::Fork(a as u32 as RawFd),
                0x14 => Left::Remap { from: a, to: b, length: c },
                0x15 | 0x16 => Left::Gone(a..b),
                _ => return None,
            })
        };
        (0..MOST).filter_map(|index| Some((index, left(index)?))).collect()
    }
}

impl Drop for EventPage {
    fn drop(&mut self) {
        // SAFETY: our own mapping, to which no reference is left.
        let _ = unsafe { munmap(self.page.as_ptr().cast(), EVENT_PAGE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{Advice, madvise};

    /// Some pages of our own, with their userfaultfd.
    fn pages(count: usize) -> (Range<u64>, OwnedFd) {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping, left to the end of the test.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), count * 4096, protection, flags) }.unwrap() as u64;
        let fd = create(open_device().unwrap().as_fd()).unwrap();
        let features = Features::REMOVE | Features::WP_ASYNC | Features::WP_UNPOPULATED | Features::FAULT_WP;
        api(fd.as_fd(), features).unwrap();
        assert!(api(fd.as_fd(), features).is_err(), "once only");
        (at..at + count as u64 * 4096, fd)
    }

    fn byte(at: u64) -> u8 {
        // SAFETY: an address inside of a mapping of the test.
        unsafe { (at as *const u8).read_volatile() }
    }

    use std::os::fd::AsFd as _;

    #[test]
    fn a_missing_page_is_told_and_filled() {
        let (range, fd) = pages(4);
        register(fd.as_fd(), range.clone(), Catch::Both).unwrap();
        let start = range.start;
        let reader = std::thread::spawn(move || byte(start + 4096));
        while waiting(fd.as_fd()).unwrap() == 0 {
            std::thread::yield_now();
        }
        let mut page = EventPage::private().unwrap();
        let events = loop {
            let events = page.read(fd.as_fd()).unwrap();
            if !events.is_empty() {
                break events;
            }
            std::thread::yield_now();
        };
        assert!(matches!(events[..], [FaultEvent::Fault { address, write: false, .. }] if address == start + 4096));
        assert_eq!(page.left(), [(0, Left::Fault)]);
        assert_eq!(waiting(fd.as_fd()).unwrap(), 1, "it is told, and waits");
        page.done(0);
        assert_eq!(page.left(), []);
        let mode = CopyMode { protect: true, wake: true };
        assert_eq!(copy(fd.as_fd(), start + 4096, &[7; 4096], mode).unwrap(), 4096);
        assert_eq!(reader.join().unwrap(), 7);
        assert_eq!(waiting(fd.as_fd()).unwrap(), 0);
        assert_eq!(copy(fd.as_fd(), start, &[7; 3 * 4096], mode).unwrap(), 4096, "up to the page that is there");
        let there = copy(fd.as_fd(), start + 4096, &[7; 4096], mode).unwrap_err();
        assert_eq!(there.raw_os_error(), Some(libc::EEXIST));
        assert_eq!(zero(fd.as_fd(), start + 2 * 4096..start + 3 * 4096, true).unwrap(), 4096);
        assert_eq!(byte(start + 2 * 4096), 0);
        let outside = copy(fd.as_fd(), range.end + (64 << 20), &[7; 4096], mode).unwrap_err();
        assert_eq!(outside.raw_os_error(), Some(libc::ENOENT));
    }

    #[test]
    fn what_is_given_up_is_told_in_the_file() {
        let (range, fd) = pages(2);
        register(fd.as_fd(), range.clone(), Catch::Both).unwrap();
        let file = tempfile();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        let mut page = EventPage::of_file(file.as_fd(), 0).unwrap();
        let (start, end) = (range.start, range.end);
        // SAFETY: there is no reference to the pages of the test.
        let other = std::thread::spawn(move || unsafe {
            madvise(start as *mut _, (end - start) as usize, Advice::LinuxDontNeed).unwrap();
        });
        while page.read(fd.as_fd()).unwrap().is_empty() {
            std::thread::yield_now();
        }
        other.join().unwrap();
        drop(page);
        let page = EventPage::of_file(file.as_fd(), 0).unwrap();
        assert_eq!(page.left(), [(0, Left::Gone(range))], "whoever comes next finds it");
        assert!(page.reads() > 0);
    }

    fn tempfile() -> OwnedFd {
        rustix::fs::memfd_create("events", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
    }

    #[test]
    fn a_scan_reports_what_was_written() {
        use crate::pagemap::{Filter, States, open, read_ranges, scan};
        let (range, fd) = pages(8);
        register(fd.as_fd(), range.clone(), Catch::Both).unwrap();
        let mode = CopyMode { protect: true, wake: true };
        copy(fd.as_fd(), range.start, &[5; 6 * 4096], mode).unwrap();
        // SAFETY: inside of the mapping of the test.
        unsafe { ((range.start + 2 * 4096) as *mut u8).write_volatile(9) };
        let report = States::PRESENT | States::WRITTEN;
        let filter = Filter { all: States::PRESENT, report, ..Filter::default() };
        let map = open(std::process::id()).unwrap();
        let found = scan(map.as_fd(), range.clone(), filter).unwrap();
        let written: Vec<_> =
            found.iter().map(|r| ((r.range.end - r.range.start) / 4096, r.states.has(States::WRITTEN))).collect();
        assert_eq!(written, [(2, false), (1, true), (3, false)]);
        let none = Filter { all: States::PRESENT, none: States::WRITTEN, report, ..Filter::default() };
        assert_eq!(scan(map.as_fd(), range.clone(), none).unwrap().len(), 2);
        let start = range.start;
        let parts = [start..start + 4096, start + 2 * 4096..start + 3 * 4096];
        let mut bytes = [0; 8192];
        assert_eq!(read_ranges(std::process::id(), &parts, &mut bytes).unwrap(), 8192);
        assert_eq!((bytes[0], bytes[4096], bytes[4097]), (5, 9, 5));
    }
}
