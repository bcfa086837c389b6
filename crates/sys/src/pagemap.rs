//! Which pages of a process are there, and in what state: ioctl PAGEMAP_SCAN on /proc/PID/pagemap;
//! and reading many ranges of its memory at once. Linux 6.7.

use std::io;
use std::ops::{BitOr, Range};
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

const SCAN: u64 = 0xc060_6610;
const WP_MATCHING: u64 = 1;
/// Regions that one call reports.
const MOST: usize = 512;

/// States of a page (PAGE_IS_*).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct States(u64);

impl States {
    /// Its mapping is registered for asynchronous write protection.
    pub const TRACKED: Self = Self(1);
    /// Not write-protected by a userfaultfd.
    pub const WRITTEN: Self = Self(1 << 1);
    /// A page of a file or of shared memory.
    pub const FILE: Self = Self(1 << 2);
    /// In memory.
    pub const PRESENT: Self = Self(1 << 3);
    /// In the machine's swap.
    pub const SWAPPED: Self = Self(1 << 4);
    /// The shared page of zeros.
    pub const ZERO: Self = Self(1 << 5);
    /// Part of a huge page.
    pub const HUGE: Self = Self(1 << 6);
    /// A guard (MADV_GUARD_INSTALL): whatever touches it gets SIGSEGV. Such a page counts as
    /// [`Self::SWAPPED`] too. See [`guards`].
    pub const GUARD: Self = Self(1 << 8);

    /// Whether all of `other` hold.
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for States {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Neighbouring pages of one state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    /// Addresses.
    pub range: Range<u64>,
    /// What was asked for and holds.
    pub states: States,
}

/// Which pages [`scan`] is to report.
#[derive(Debug, Clone, Copy, Default)]
pub struct Filter {
    /// All of these hold.
    pub all: States,
    /// None of these holds.
    pub none: States,
    /// One of these holds; empty: of no matter.
    pub any: States,
    /// These are told of each.
    pub report: States,
    /// Write-protects the pages that it reports, at the same moment (PM_SCAN_WP_MATCHING).
    pub protect: bool,
}

/// Opens /proc/PID/pagemap for [`scan`].
///
/// # Errors
/// `NotFound`, EACCES.
pub fn open(pid: u32) -> io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags, open};
    Ok(open(format!("/proc/{pid}/pagemap"), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// All addresses at which a process may have memory.
pub const WHOLE: Range<u64> = 4096..(1 << 47) - 4096;

/// The pages of a process in a range that pass the filter: see [`scan`].
///
/// # Errors
/// Those of [`open`] and [`scan`].
pub fn of(pid: u32, range: Range<u64>, filter: Filter) -> io::Result<Vec<Region>> {
    scan(open(pid)?.as_fd(), range, filter)
}

/// Pages of a process in a range that are in memory or in the machine's swap.
///
/// # Errors
/// As [`of`].
pub fn present(pid: u32, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let filter = Filter { any: States::PRESENT | States::SWAPPED, report: States::PRESENT, ..Filter::default() };
    Ok(of(pid, range, filter)?.into_iter().map(|region| region.range).collect())
}

/// The pages of a range that pass the filter: ioctl(2) PAGEMAP_SCAN, as often as it takes to get to
/// the end.
///
/// # Errors
/// EINVAL for a range that is not of whole pages, EPERM for `protect` where mappings are not
/// registered, ESRCH.
pub fn scan(pagemap: BorrowedFd<'_>, range: Range<u64>, filter: Filter) -> io::Result<Vec<Region>> {
    let mut found = Vec::new();
    let mut regions = [[0u64; 3]; MOST];
    let mut start = range.start;
    while start < range.end {
        let mut argument = [
            96,
            if filter.protect { WP_MATCHING } else { 0 },
            start,
            range.end,
            0,
            regions.as_mut_ptr() as u64,
            MOST as u64,
            0,
            filter.none.0,
            filter.all.0 | filter.none.0,
            filter.any.0,
            filter.report.0,
        ];
        // SAFETY: the argument has the size that its first word and the request's number say; the
        // vector that it names has room for `MOST` regions; both live through the call.
        let count = match unsafe { libc::ioctl(pagemap.as_raw_fd(), SCAN, argument.as_mut_ptr()) } {
            -1 => return Err(io::Error::last_os_error()),
            n => n as usize,
        };
        let told = regions.iter().take(count);
        found.extend(told.map(|[start, end, states]| Region { range: *start..*end, states: States(*states) }));
        // The word behind the end says how far it came.
        start = if argument[4] > start { argument[4] } else { range.end };
    }
    Ok(found)
}

/// [`States::GUARD`], if the kernel tells guards: Linux 6.15. It has had them since 6.13.
pub fn guards() -> States {
    static TOLD: OnceLock<bool> = OnceLock::new();
    let told = TOLD.get_or_init(|| {
        let filter = Filter { any: States::GUARD, report: States::GUARD, ..Filter::default() };
        open(std::process::id()).and_then(|own| scan(own.as_fd(), 4096..8192, filter)).is_ok()
    });
    if *told { States::GUARD } else { States::default() }
}

/// Reads ranges one behind the other into `buffer`, as much of the list as one call takes; returns
/// the bytes: process_vm_readv(2), Linux 3.2. Must not be used on pages that a userfaultfd has
/// taken away.
///
/// # Errors
/// EFAULT when the first range is not readable, ESRCH, EPERM.
pub fn read_ranges(pid: u32, ranges: &[Range<u64>], buffer: &mut [u8]) -> io::Result<usize> {
    let Ok(pid) = libc::pid_t::try_from(pid) else { return Err(io::ErrorKind::InvalidInput.into()) };
    let part =
        |r: &Range<u64>| libc::iovec { iov_base: r.start as *mut libc::c_void, iov_len: (r.end - r.start) as usize };
    let remote: Vec<libc::iovec> = ranges.iter().take(1024).map(part).collect();
    let local = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: `local` describes `buffer`, which we may write to; `remote` holds addresses of the
    // other process, which the kernel checks there; both live through the call.
    let done = unsafe { libc::process_vm_readv(pid, &local, 1, remote.as_ptr(), remote.len() as libc::c_ulong, 0) };
    usize::try_from(done).map_err(|_| io::Error::last_os_error())
}
