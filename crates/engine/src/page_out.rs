//! What is left where the pager cannot take out a program's memory, for example because another
//! process traces the program: its private memory is given to the kernel's own swap. The memory
//! comes back by itself, page by page, and the proc stays in the tier hot.

use kip_sys::process::{advise, pidfd_open};
use std::fmt;
use std::fs;
use std::ops::Range;
use std::os::fd::AsFd;

/// MADV_PAGEOUT of process_madvise(2), Linux 5.10.
const PAGEOUT: i32 = 21;

/// What became of it; displayed for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PagedOut {
    /// So many bytes more are in the kernel's swap.
    Bytes(u64),
    /// There is no swap, or it is full. That is not why the pager could not take it out, so it is
    /// not told.
    NoSwap,
}

impl fmt::Display for PagedOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PagedOut::Bytes(bytes) => write!(f, "{} KiB of it went to the machine's swap instead", bytes >> 10),
            PagedOut::NoSwap => f.write_str("its memory stays in RAM"),
        }
    }
}

/// Gives the private memory of processes to the kernel's swap, program text and other files' pages
/// excepted.
pub fn page_out(pids: &[u32]) -> PagedOut {
    if field("/proc/meminfo", "SwapFree:") == 0 {
        return PagedOut::NoSwap;
    }
    let swapped = || pids.iter().map(|pid| field(&format!("/proc/{pid}/status"), "VmSwap:")).sum::<u64>();
    let before = swapped();
    for pid in pids {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        let ranges: Vec<Range<u64>> = maps.lines().filter_map(private).collect();
        let done = pidfd_open(*pid).and_then(|pidfd| advise(pidfd.as_fd(), &ranges, PAGEOUT));
        if let Err(error) = done {
            tracing::debug!(pid, %error, "memory is not given to swap");
        }
    }
    PagedOut::Bytes(swapped().saturating_sub(before) << 10)
}

/// A number, KiB, of a file of the kind of proc_pid_status(5); 0 if it is not there.
fn field(path: &str, name: &str) -> u64 {
    let text = fs::read_to_string(path).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// The range of a line of maps that is of private memory and no file's.
fn private(line: &str) -> Option<Range<u64>> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let permissions = fields.next()?.as_bytes();
    let (inode, path) = (fields.nth(2)?, fields.next().unwrap_or(""));
    let kernels = path.starts_with("[v");
    let ours = permissions.first() == Some(&b'r') && permissions.get(3) == Some(&b'p') && inode == "0" && !kernels;
    ours.then_some(u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_private_memory_that_is_no_files_is_given() {
        assert_eq!(private("1000-3000 rw-p 00000000 00:00 0 [heap]"), Some(0x1000..0x3000));
        assert_eq!(private("1000-3000 r-xp 00000000 00:00 0 [vdso]"), None);
        assert_eq!(private("1000-3000 rw-s 00000000 00:01 12 /dev/zero (deleted)"), None);
        assert_eq!(private("1000-3000 rw-p 00000000 fe:00 12 /usr/bin/a"), None);
    }

    #[test]
    fn it_says_what_became_of_it() {
        let stays = PagedOut::NoSwap.to_string();
        assert_eq!(stays, "its memory stays in RAM", "the machine is not what stands in the way");
        assert!(PagedOut::Bytes(8192).to_string().starts_with("8 KiB"));
        let expected = field("/proc/meminfo", "SwapFree:") > 0;
        assert_eq!(matches!(page_out(&[]), PagedOut::Bytes(_)), expected);
    }
}
