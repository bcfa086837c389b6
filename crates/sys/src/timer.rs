//! Timers of other processes: what a timerfd has left and unread, setting it to that again, and the
//! signal of a POSIX timer sent in its place.

use rustix::time::{Itimerspec, TimerfdTimerFlags, Timespec, timerfd_gettime, timerfd_settime};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// `ioctl` that sets a timerfd's unread expirations (linux/timerfd.h, kernel 3.17,
/// CONFIG_CHECKPOINT_RESTORE).
const TFD_IOC_SET_TICKS: libc::c_ulong = 0x4008_5400;
/// Nanoseconds in a second.
const SECOND: i64 = 1_000_000_000;

/// Whether timer_create(2) can be told the number that a timer had before: prctl(2)
/// PR_TIMER_CREATE_RESTORE_IDS, Linux 6.16.
pub fn can_choose_timer_ids() -> bool {
    const PR_TIMER_CREATE_RESTORE_IDS: libc::c_int = 77;
    const GET: libc::c_ulong = 2;
    const NONE: libc::c_ulong = 0;
    // SAFETY: prctl takes no pointer here; GET changes nothing.
    unsafe { libc::prctl(PR_TIMER_CREATE_RESTORE_IDS, GET, NONE, NONE, NONE) >= 0 }
}

/// A timerfd at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimerfdState {
    /// Until it expires next, nanoseconds; 0 if it is not armed.
    pub left_ns: i64,
    /// Its interval, nanoseconds; 0 if it expires once.
    pub every_ns: i64,
    /// Expirations that no process has read.
    pub unread: u64,
    /// It was set with TFD_TIMER_ABSTIME.
    pub absolute: bool,
    /// It was set with TFD_TIMER_CANCEL_ON_SET.
    pub cancel_on_set: bool,
}

/// How a timerfd's time is to be understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimerSetting {
    /// From now on, nanoseconds; 0 disarms.
    Relative(i64),
    /// On the timer's own clock, nanoseconds.
    Absolute {
        /// When.
        at_ns: i64,
        /// A read is to fail with ECANCELED when the real-time clock was set.
        cancel_on_set: bool,
    },
}

/// Reads a timerfd without consuming anything: timerfd_gettime(2), proc_pid_fdinfo(5); Linux 3.17.
///
/// # Errors
/// EINVAL when it is no timerfd, `InvalidData` when its fdinfo cannot be understood.
pub fn timerfd_state(fd: BorrowedFd<'_>) -> io::Result<TimerfdState> {
    // First, because it also counts what a periodic timer has missed.
    let time = timerfd_gettime(fd)?;
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
    let (unread, flags) = unread_and_flags(&info).ok_or(io::ErrorKind::InvalidData)?;
    let ns = |t: Timespec| t.tv_sec.saturating_mul(SECOND).saturating_add(t.tv_nsec);
    Ok(TimerfdState {
        left_ns: ns(time.it_value),
        every_ns: ns(time.it_interval),
        unread,
        absolute: flags & 1 != 0,
        cancel_on_set: flags & 2 != 0,
    })
}

fn unread_and_flags(info: &str) -> Option<(u64, u32)> {
    let field = |name: &str| info.lines().find_map(|l| l.strip_prefix(name)).map(str::trim);
    Some((field("ticks:")?.parse().ok()?, u32::from_str_radix(field("settime flags:")?, 8).ok()?))
}

/// Sets a timerfd, which forgets unread expirations: timerfd_settime(2), Linux 2.6.25
/// (`cancel_on_set` 3.0).
///
/// # Errors
/// EINVAL for negative times.
pub fn set_timerfd(fd: BorrowedFd<'_>, value: TimerSetting, every_ns: i64) -> io::Result<()> {
    let (at, flags) = match value {
        TimerSetting::Relative(ns) => (ns, TimerfdTimerFlags::empty()),
        TimerSetting::Absolute { at_ns, cancel_on_set: false } => (at_ns, TimerfdTimerFlags::ABSTIME),
        TimerSetting::Absolute { at_ns, cancel_on_set: true } => {
            (at_ns, TimerfdTimerFlags::ABSTIME | TimerfdTimerFlags::CANCEL_ON_SET)
        }
    };
    let span = |ns: i64| Timespec { tv_sec: ns / SECOND, tv_nsec: ns % SECOND };
    timerfd_settime(fd, flags, &Itimerspec { it_interval: span(every_ns), it_value: span(at) })?;
    Ok(())
}

/// Sets the number of a timerfd's unread expirations, which must not be 0: ioctl_tfd(2)
/// `TFD_IOC_SET_TICKS`, Linux 3.17.
///
/// # Errors
/// EINVAL for 0, ENOTTY without CONFIG_CHECKPOINT_RESTORE.
pub fn set_timerfd_unread(fd: BorrowedFd<'_>, ticks: u64) -> io::Result<()> {
    // SAFETY: `ticks` is a live local u64, which is what this ioctl reads, only during the call.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), TFD_IOC_SET_TICKS, &raw const ticks) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The signal of a POSIX timer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimerSignal {
    /// Signal number.
    pub signal: i32,
    /// `si_timerid`.
    pub timer: i32,
    /// `si_overrun`: expirations beyond the first.
    pub overrun: i32,
    /// `si_value`.
    pub value: u64,
}

impl TimerSignal {
    /// siginfo_t as the kernel has it.
    pub fn bytes(&self) -> Vec<u8> {
        let words = [self.signal, 0, libc::SI_TIMER, 0, self.timer, self.overrun];
        padded(words.iter().flat_map(|w| w.to_le_bytes()).chain(self.value.to_le_bytes()))
    }
}

/// siginfo_t of a signal that the kernel sends for no process: SI_KERNEL of sigaction(2).
pub fn kernel_signal_bytes(signal: i32) -> Vec<u8> {
    padded([signal, 0, libc::SI_KERNEL].iter().flat_map(|w| w.to_le_bytes()))
}

fn padded(bytes: impl Iterator<Item = u8>) -> Vec<u8> {
    let mut all: Vec<u8> = bytes.collect();
    all.resize(size_of::<libc::siginfo_t>(), 0);
    all
}

/// Queues what a POSIX timer would send, for the process, or for one of its threads:
/// rt_sigqueueinfo(2), rt_tgsigqueueinfo(2), Linux 2.6.31.
///
/// # Errors
/// ESRCH, EPERM, EINVAL for a bad signal, EAGAIN when RLIMIT_SIGPENDING of its user is reached.
pub fn send_timer_signal(pid: u32, thread: Option<u32>, what: TimerSignal) -> io::Result<()> {
    let info = what.bytes();
    // SAFETY: `info` is a live buffer of the size of siginfo_t, only read, and only during the
    // call.
    let rc = unsafe {
        match thread {
            None => libc::syscall(libc::SYS_rt_sigqueueinfo, pid, what.signal, info.as_ptr()),
            Some(thread) => libc::syscall(libc::SYS_rt_tgsigqueueinfo, pid, thread, what.signal, info.as_ptr()),
        }
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::time::{ClockId, TimerfdClockId, TimerfdFlags, clock_gettime, timerfd_create};
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::time::Duration;

    fn now() -> i64 {
        let t = clock_gettime(ClockId::Monotonic);
        t.tv_sec * SECOND + t.tv_nsec
    }

    fn read(fd: &std::os::fd::OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        std::fs::File::from(fd.try_clone().unwrap()).read_exact(&mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    }

    #[test]
    fn a_timerfd_is_read_and_set() {
        let fd = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK).unwrap();
        let unarmed = TimerfdState { left_ns: 0, every_ns: 0, unread: 0, absolute: false, cancel_on_set: false };
        assert_eq!(timerfd_state(fd.as_fd()).unwrap(), unarmed);
        // Set to a time in the past it has all the ticks since then, and its phase.
        let every = 50_000_000;
        let begin = now() - 10 * every - every / 2;
        let value = TimerSetting::Absolute { at_ns: begin, cancel_on_set: false };
        set_timerfd(fd.as_fd(), value, every).unwrap();
        std::thread::sleep(Duration::from_millis(1));
        // Read within a millisecond, so that the time of the reading is known.
        let (state, read_at) = (0..1000)
            .map(|_| (now(), timerfd_state(fd.as_fd()).unwrap(), now()))
            .find(|(before, _, after)| after - before < 1_000_000)
            .map(|(_, state, after)| (state, after))
            .expect("one of a thousand is not interrupted");
        let passed = (read_at - begin) / every + 1;
        assert!(passed - 1 <= state.unread as i64 && state.unread as i64 <= passed, "{state:?} {passed}");
        assert!(state.absolute && !state.cancel_on_set && state.every_ns == every);
        let off = (read_at + state.left_ns - begin) % every;
        assert!(off < 5_000_000 || every - off < 5_000_000, "off phase by {off} ns");
        // Looking consumes nothing; setting the count is what a read gives.
        set_timerfd(fd.as_fd(), TimerSetting::Relative(60 * SECOND), 0).unwrap();
        assert_eq!(timerfd_state(fd.as_fd()).unwrap().unread, 0);
        set_timerfd_unread(fd.as_fd(), 41).unwrap();
        assert_eq!(timerfd_state(fd.as_fd()).unwrap().unread, 41);
        assert_eq!(read(&fd), 41);
        assert_eq!(set_timerfd_unread(fd.as_fd(), 0).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        let left = timerfd_state(fd.as_fd()).unwrap().left_ns;
        assert!((50 * SECOND..=60 * SECOND).contains(&left), "{left}");
        set_timerfd(fd.as_fd(), TimerSetting::Relative(0), 0).unwrap();
        assert_eq!(timerfd_state(fd.as_fd()).unwrap(), unarmed);
    }

    #[test]
    fn a_cancelled_clock_is_remembered() {
        let fd = timerfd_create(TimerfdClockId::Realtime, TimerfdFlags::NONBLOCK).unwrap();
        let at_ns = clock_gettime(ClockId::Realtime).tv_sec * SECOND + 60 * SECOND;
        set_timerfd(fd.as_fd(), TimerSetting::Absolute { at_ns, cancel_on_set: true }, 0).unwrap();
        let state = timerfd_state(fd.as_fd()).unwrap();
        assert!(state.absolute && state.cancel_on_set, "{state:?}");
        let not_a_timer = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(timerfd_state(not_a_timer.as_fd()).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }

    #[test]
    fn a_timer_s_signal_arrives_with_its_account() {
        let own = std::process::id();
        let what = TimerSignal { signal: libc::SIGRTMIN() + 3, timer: 7, overrun: 4, value: 0xfeed };
        // SAFETY: plain data, for which all zeros is a value; every pointer is to a live local.
        let (thread, info) = unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigaddset(&raw mut set, what.signal);
            assert_eq!(libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()), 0);
            let thread = libc::gettid() as u32;
            send_timer_signal(own, Some(thread), what).unwrap();
            let mut info = [0u8; size_of::<libc::siginfo_t>()];
            assert_eq!(libc::sigwaitinfo(&raw const set, (&raw mut info).cast()), what.signal);
            (thread, info)
        };
        assert_eq!(info.as_slice(), what.bytes());
        let bad = TimerSignal { signal: 99, ..what };
        assert_eq!(send_timer_signal(own, Some(thread), bad).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        assert_eq!(send_timer_signal(0x7fff_fff0, None, what).unwrap_err().raw_os_error(), Some(libc::ESRCH));
    }
}
