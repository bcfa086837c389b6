//! Owners of open files: fcntl(2) F_SETOWN_EX (Linux 2.6.32), F_SETSIG, and the signal SIGIO.

use crate::fsid::keeping_dumpable;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// fcntl.h.
const F_SETSIG: libc::c_int = 10;
const F_SETOWN_EX: libc::c_int = 15;
const OWNER_TID: libc::c_int = 0;
const OWNER_PID: libc::c_int = 1;
const OWNER_PGRP: libc::c_int = 2;
/// `si_code` of sigaction(2) that a process may send for another one and that has `si_band` and
/// `si_fd`.
const SI_SIGIO: i32 = -5;

/// To which threads the signal goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whom {
    /// One thread.
    Thread(u32),
    /// One process.
    Process(u32),
    /// A process group.
    Group(u32),
}

/// An owner and its signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// The threads that the signal goes to; none if the file has no owner.
    pub whom: Option<Whom>,
    /// The signal; 0 is SIGIO.
    pub signal: i32,
}

#[repr(C)]
struct OwnerEx {
    kind: libc::c_int,
    pid: libc::pid_t,
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Sets the owner of an open file, in place of the one before, by ids of this process's pid
/// namespace.
///
/// # Errors
/// Those of fcntl(2): ESRCH if there is no such thread, process or group, EINVAL for a bad signal.
pub fn set_owner(fd: BorrowedFd<'_>, owner: Owner) -> io::Result<()> {
    let (kind, pid) = match owner.whom {
        None => (OWNER_PID, 0),
        Some(Whom::Thread(thread)) => (OWNER_TID, thread),
        Some(Whom::Process(pid)) => (OWNER_PID, pid),
        Some(Whom::Group(group)) => (OWNER_PGRP, group),
    };
    let set = OwnerEx { kind, pid: pid as libc::pid_t };
    // SAFETY: F_SETSIG takes an int; F_SETOWN_EX reads one struct f_owner_ex, which `set` is, and
    // only during the call.
    unsafe {
        check(libc::fcntl(fd.as_raw_fd(), F_SETSIG, owner.signal))?;
        check(libc::fcntl(fd.as_raw_fd(), F_SETOWN_EX, &raw const set))?;
    }
    Ok(())
}

/// Whether the kernel sends the signal when something can be read or written: O_ASYNC of open(2).
///
/// # Errors
/// Those of fcntl(2).
pub fn notifies_owner(fd: BorrowedFd<'_>) -> io::Result<bool> {
    // SAFETY: F_GETFL takes no argument.
    let flags = unsafe { check(libc::fcntl(fd.as_raw_fd(), libc::F_GETFL))? };
    Ok(flags & libc::O_ASYNC != 0)
}

/// Sets O_ASYNC, again if it is set: the kernel sends the signal about `fd` as of the descriptor
/// `number`. Only for a file that was opened with the flag, which cannot be undone, it never does.
///
/// # Errors
/// Those of close_range(2), dup2(2) and fcntl(2).
pub fn set_async(fd: BorrowedFd<'_>, number: i32) -> io::Result<()> {
    let set = || {
        // The kernel notes the number by which the flag is set. Here it may be another file's, so
        // the thread, which ends below, has a table of its own, of which nothing above `fd` is
        // copied.
        //
        // SAFETY: plain numbers; with a table of its own the thread closes no descriptor of others.
        unsafe {
            let first = fd.as_raw_fd() as u32 + 1;
            check(libc::close_range(first, u32::MAX, libc::CLOSE_RANGE_UNSHARE as i32))?;
            check(libc::dup2(fd.as_raw_fd(), number))?;
            let flags = check(libc::fcntl(number, libc::F_GETFL))?;
            check(libc::fcntl(number, libc::F_SETFL, flags & !libc::O_ASYNC))?;
            check(libc::fcntl(number, libc::F_SETFL, flags | libc::O_ASYNC))?;
        }
        Ok(())
    };
    std::thread::scope(|scope| std::thread::Builder::new().spawn_scoped(scope, set)?.join().expect("it does not panic"))
}

/// The thread, or the process with any of its threads, that a signal is sent to, by ids of this
/// process's pid namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Told {
    /// The process.
    pub process: u32,
    /// Its thread, if the signal is for that alone.
    pub thread: Option<u32>,
}

/// Sends what the kernel would have sent when there was something to read: `signal` (0 is SIGIO)
/// about the descriptor `number` there.
///
/// # Errors
/// Those of rt_sigqueueinfo(2).
pub fn notify(told: Told, signal: i32, number: i32) -> io::Result<()> {
    let signal = if signal == 0 { libc::SIGIO } else { signal };
    let mut info = [0u8; size_of::<libc::siginfo_t>()];
    for (at, word) in [(0, signal), (8, SI_SIGIO), (16, i32::from(libc::POLLIN | libc::POLLRDNORM)), (24, number)] {
        info[at..at + 4].copy_from_slice(&word.to_le_bytes());
    }
    let Told { process, thread } = told;
    // SAFETY: `info` is a live buffer of the size of siginfo_t, only read, and only during the
    // call.
    let rc = unsafe {
        match thread {
            Some(thread) => libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, signal, info.as_ptr()),
            None => libc::syscall(libc::SYS_rt_sigqueueinfo, process, signal, info.as_ptr()),
        }
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Calls `f` by a thread of its own with that user and effective user (ids of this process's user
/// namespace), and without any capability: the kernel notes the user that sets an owner, and checks
/// at each signal whether that user may send it. All other threads of this process keep their user.
///
/// # Errors
/// Those of setresuid(2), and of `f`.
pub fn as_user<T: Send>(user: u32, effective: u32, f: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    let act = || {
        // SAFETY: plain numbers. Called by its number it changes this thread alone, which ends
        // below.
        if unsafe { libc::syscall(libc::SYS_setresuid, user, effective, effective) } != 0 {
            return Err(io::Error::last_os_error());
        }
        f()
    };
    keeping_dumpable(|| {
        std::thread::scope(|scope| {
            std::thread::Builder::new().spawn_scoped(scope, act)?.join().expect("it does not panic")
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    const F_GETSIG: libc::c_int = 11;
    const F_GETOWN_EX: libc::c_int = 16;

    fn owner(fd: BorrowedFd<'_>) -> io::Result<Owner> {
        let mut found = OwnerEx { kind: OWNER_PID, pid: 0 };
        // SAFETY: F_GETSIG takes no argument; F_GETOWN_EX writes one struct f_owner_ex, which
        // `found` is, and only during the call.
        let signal = unsafe {
            check(libc::fcntl(fd.as_raw_fd(), F_GETOWN_EX, &raw mut found))?;
            check(libc::fcntl(fd.as_raw_fd(), F_GETSIG))?
        };
        let pid = found.pid as u32;
        let whom = match (pid, found.kind) {
            (0, _) => None,
            (_, OWNER_TID) => Some(Whom::Thread(pid)),
            (_, OWNER_PGRP) => Some(Whom::Group(pid)),
            _ => Some(Whom::Process(pid)),
        };
        Ok(Owner { whom, signal })
    }

    #[test]
    fn an_owner_is_set_and_read_and_told() {
        let (here, _there) = UnixStream::pair().unwrap();
        let own = std::process::id();
        assert_eq!(owner(here.as_fd()).unwrap(), Owner { whom: None, signal: 0 });
        assert!(!notifies_owner(here.as_fd()).unwrap());
        // SAFETY: plain calls; the set is a live local, and only this thread's mask changes.
        let thread = unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigaddset(&raw mut set, libc::SIGRTMIN() + 5);
            assert_eq!(libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()), 0);
            libc::gettid() as u32
        };
        for whom in [Whom::Process(own), Whom::Thread(thread)] {
            let wanted = Owner { whom: Some(whom), signal: 40 };
            set_owner(here.as_fd(), wanted).unwrap();
            assert_eq!(owner(here.as_fd()).unwrap(), wanted);
        }
        let nobody = Owner { whom: Some(Whom::Process(0x7fff_fff0)), signal: 0 };
        assert_eq!(set_owner(here.as_fd(), nobody).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        notify(Told { process: own, thread: Some(thread) }, libc::SIGRTMIN() + 5, 17).unwrap();
        let mut info = [0u8; size_of::<libc::siginfo_t>()];
        // SAFETY: both are live locals of the types that sigwaitinfo(2) takes.
        let signal = unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigaddset(&raw mut set, libc::SIGRTMIN() + 5);
            libc::sigwaitinfo(&raw const set, (&raw mut info).cast())
        };
        assert_eq!((signal, info[24]), (libc::SIGRTMIN() + 5, 17));
    }

    #[test]
    fn a_file_sends_its_signal_with_the_number_that_it_was_given() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        let open = |flags| {
            let flags = rustix::fs::OFlags::from_bits_retain(flags as u32);
            rustix::fs::open(&path, flags, rustix::fs::Mode::empty()).unwrap()
        };
        let reader = open(libc::O_RDONLY | libc::O_NONBLOCK);
        let writer = open(libc::O_WRONLY | libc::O_NONBLOCK);
        let signal = libc::SIGRTMIN() + 6;
        // SAFETY: plain calls; the set is a live local, and only this thread's mask changes.
        let (set, thread) = unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigaddset(&raw mut set, signal);
            assert_eq!(libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()), 0);
            (set, libc::gettid() as u32)
        };
        let comes = || {
            rustix::io::write(&writer, b"x").unwrap();
            let mut info = [0u8; size_of::<libc::siginfo_t>()];
            let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: all three are live locals of the types that sigtimedwait(2) takes.
            let came = unsafe { libc::sigtimedwait(&raw const set, (&raw mut info).cast(), &raw const now) };
            (came, info[24])
        };
        set_owner(reader.as_fd(), Owner { whom: Some(Whom::Thread(thread)), signal }).unwrap();
        assert_eq!(comes().0, -1);
        for number in [200, 201] {
            set_async(reader.as_fd(), number).unwrap();
            assert!(notifies_owner(reader.as_fd()).unwrap());
            assert_eq!(comes(), (signal, number as u8));
        }
        // SAFETY: F_GETFD takes no argument.
        assert_eq!(unsafe { libc::fcntl(201, libc::F_GETFD) }, -1);
    }

    #[test]
    fn a_signal_that_a_user_may_not_send_is_refused_and_the_process_keeps_its_user() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let stranger = Told { process: child.id(), thread: None };
        let refused = as_user(12_345, 12_346, || notify(stranger, libc::SIGURG, 3)).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EPERM));
        notify(stranger, libc::SIGURG, 3).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        // SAFETY: takes and gives plain numbers.
        let seen =
            keeping_dumpable(|| unsafe { (libc::getuid(), libc::geteuid(), libc::prctl(libc::PR_GET_DUMPABLE)) });
        assert_eq!(seen, (0, 0, 1));
    }
}
