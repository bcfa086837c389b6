//! perf_event_open(2), for one purpose.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// Opens a disabled software event of the calling thread and returns its descriptor.
///
/// While any such event is open anywhere on the machine, setting a hardware breakpoint (as CRIU
/// does in each restored task) does not wait for an RCU grace period, which takes 13 ms and more:
/// the kernel's static branch `perf_sched_events` is already on. Needs CAP_PERFMON or root; Linux
/// 2.6.31.
pub fn hold_disabled_event() -> io::Result<OwnedFd> {
    const SIZE: u32 = 128;
    const TYPE_SOFTWARE: u32 = 1;
    const COUNT_SW_DUMMY: u64 = 9;
    const DISABLED: u64 = 1;
    let mut attr = [0u64; SIZE as usize / 8];
    attr[0] = u64::from(TYPE_SOFTWARE) | u64::from(SIZE) << 32;
    attr[1] = COUNT_SW_DUMMY;
    attr[5] = DISABLED;
    const FLAG_FD_CLOEXEC: libc::c_ulong = 8;
    // SAFETY: `attr` is a readable struct perf_event_attr of the size it states and lives through
    // the call; the other arguments are integers. On success the result is a new descriptor that
    // nothing else owns.
    unsafe {
        let fd = libc::syscall(libc::SYS_perf_event_open, attr.as_ptr(), 0, -1, -1, FLAG_FD_CLOEXEC);
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd as i32)) }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn opens() {
        super::hold_disabled_event().unwrap();
    }
}
