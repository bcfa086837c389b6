//! Memory of a stopped process for calls that are made in it, and the numbers of these calls.

use kip_sys::inject::Hand;
use std::io;

/// Numbers of system calls, x86_64.
pub mod call {
    /// mmap(2)
    pub const MMAP: i64 = 9;
    /// mprotect(2)
    pub const MPROTECT: i64 = 10;
    /// munmap(2)
    pub const MUNMAP: i64 = 11;
    /// ioctl(2)
    pub const IOCTL: i64 = 16;
    /// mremap(2)
    pub const MREMAP: i64 = 25;
    /// getitimer(2)
    pub const GETITIMER: i64 = 36;
    /// socket(2)
    pub const SOCKET: i64 = 41;
    /// recvmsg(2)
    pub const RECVMSG: i64 = 47;
    /// close(2)
    pub const CLOSE: i64 = 3;
    /// timer_gettime(2)
    pub const TIMER_GETTIME: i64 = 224;
    /// process_madvise(2)
    pub const PROCESS_MADVISE: i64 = 440;
}

/// Some pages of a stopped process that are ours until it goes on.
#[derive(Debug)]
pub struct Scratch {
    /// Where they lie.
    pub at: u64,
    length: u64,
}

impl Scratch {
    /// New pages, readable and writable.
    ///
    /// # Errors
    /// ENOMEM, and the errors of the injection.
    pub fn map(hand: &Hand, length: u64) -> io::Result<Self> {
        let (protection, flags) = (1 | 2, 0x2 | 0x20);
        let at = hand.call(call::MMAP, &[0, length, protection, flags, u64::MAX, 0])?;
        Ok(Self { at, length })
    }

    /// Bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Gives them up.
    ///
    /// # Errors
    /// Those of the injection.
    pub fn unmap(self, hand: &Hand) -> io::Result<()> {
        hand.call(call::MUNMAP, &[self.at, self.length]).map(drop)
    }
}
