//! Other processes by pidfd, their descriptors, their memory and their identity; and what a
//! resident process sets for itself once (subreaper, locked memory, ignored signals).
//!
//! A pid alone may be reused at any moment. Hold a pidfd, or compare [`start_time`] before and
//! after.

use rustix::mm::MlockAllFlags;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

pub use rustix::process::Signal;

fn pid_of(pid: u32) -> io::Result<Pid> {
    i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, format!("{pid} is not a process id")))
}

/// A descriptor for a process, close-on-exec: pidfd_open(2), Linux 5.3. It becomes readable when
/// the process ends.
///
/// # Errors
/// ESRCH when there is no such process (or only a thread has that id), EMFILE.
pub fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    Ok(rustix::process::pidfd_open(pid_of(pid)?, PidfdFlags::empty())?)
}

/// A duplicate of descriptor `number` of the process, close-on-exec, sharing its open file
/// description: pidfd_getfd(2), Linux 5.6. Needs PTRACE_MODE_ATTACH_REALCREDS over the process.
///
/// # Errors
/// EBADF when the process has no such descriptor, ESRCH when it has ended, EPERM, EMFILE.
pub fn pidfd_getfd(pidfd: BorrowedFd<'_>, number: RawFd) -> io::Result<OwnedFd> {
    Ok(rustix::process::pidfd_getfd(pidfd, number, PidfdGetfdFlags::empty())?)
}

/// Signals the process, never another that has taken its id: pidfd_send_signal(2), Linux 5.1.
///
/// # Errors
/// ESRCH when it has ended and been waited for, EPERM.
pub fn pidfd_send_signal(pidfd: BorrowedFd<'_>, signal: Signal) -> io::Result<()> {
    Ok(rustix::process::pidfd_send_signal(pidfd, signal)?)
}

/// Sends a signal to one thread, which must not be able to end meanwhile (its number could be
/// another's then): tkill(2).
///
/// # Errors
/// ESRCH, EPERM.
pub fn send_thread_signal(tid: u32, signal: Signal) -> io::Result<()> {
    // SAFETY: the call takes two numbers.
    match unsafe { libc::syscall(libc::SYS_tkill, tid, signal.as_raw()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The same with any signal from 1 to 64: rustix has names only for the first 31.
///
/// # Errors
/// EINVAL for another number, ESRCH when it has ended and been waited for, EPERM.
pub fn pidfd_send_signal_number(pidfd: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    let none = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: the third argument may be null, and the kernel reads no other memory.
    let sent = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, none, 0) };
    if sent == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A thread's priority for disks: ioprio_get(2). 0 if it has set none.
///
/// # Errors
/// ESRCH.
pub fn io_priority(tid: u32) -> io::Result<i32> {
    const ONE: libc::c_int = 1; // IOPRIO_WHO_PROCESS
    // SAFETY: the call takes two numbers.
    match unsafe { libc::syscall(libc::SYS_ioprio_get, ONE, tid) } {
        -1 => Err(io::Error::last_os_error()),
        priority => Ok(priority as i32),
    }
}

/// Sets it: ioprio_set(2).
///
/// # Errors
/// ESRCH, EINVAL, EPERM.
pub fn set_io_priority(tid: u32, priority: i32) -> io::Result<()> {
    const ONE: libc::c_int = 1; // IOPRIO_WHO_PROCESS
    // SAFETY: the call takes three numbers.
    match unsafe { libc::syscall(libc::SYS_ioprio_set, ONE, tid, priority) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Kills the process and the others of its group, of which it is the leader: pidfd_send_signal(2)
/// with PIDFD_SIGNAL_PROCESS_GROUP, Linux 6.9; on older kernels the process alone.
///
/// # Errors
/// ESRCH when it has ended and been waited for, EPERM.
pub fn pidfd_kill_group(pidfd: BorrowedFd<'_>) -> io::Result<()> {
    const PROCESS_GROUP: u32 = 1 << 2;
    let none = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: the third argument may be null, and the kernel reads no other memory.
    let sent =
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), libc::SIGKILL, none, PROCESS_GROUP) };
    match io::Error::last_os_error() {
        _ if sent == 0 => Ok(()),
        e if e.raw_os_error() == Some(libc::EINVAL) => pidfd_send_signal(pidfd, Signal::KILL),
        e => Err(e),
    }
}

/// Waits up to `timeout` for the process to end (none waits for ever) and tells whether it has:
/// poll(2) on a pidfd, Linux 5.3. A zombie has ended. Zero only looks.
///
/// # Errors
/// ENOMEM.
pub fn wait_for_end(pidfd: BorrowedFd<'_>, timeout: Option<Duration>) -> io::Result<bool> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let until = timeout.map(|t| std::time::Instant::now() + t);
    loop {
        let left = until.map(|u| u.saturating_duration_since(std::time::Instant::now()));
        let left = left.map(|l| Timespec { tv_sec: l.as_secs() as i64, tv_nsec: i64::from(l.subsec_nanos()) });
        match poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], left.as_ref()) {
            Ok(n) => return Ok(n > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

enum Direction {
    Read,
    Write,
}

fn transfer(pid: u32, address: u64, local: libc::iovec, direction: Direction) -> io::Result<()> {
    if local.iov_len == 0 {
        return Ok(());
    }
    let pid = pid_of(pid)?.as_raw_nonzero().get();
    let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: local.iov_len };
    // SAFETY: `local` and `remote` are single valid iovecs that live through the call. `local`
    // describes memory borrowed by our callers for that time, mutably when it is written to.
    // `remote` is only an address in the other process, which the kernel checks there.
    let done = unsafe {
        match direction {
            Direction::Read => libc::process_vm_readv(pid, &local, 1, &remote, 1, 0),
            Direction::Write => libc::process_vm_writev(pid, &local, 1, &remote, 1, 0),
        }
    };
    match usize::try_from(done) {
        Err(_) => Err(io::Error::last_os_error()),
        Ok(n) if n == local.iov_len => Ok(()),
        // The kernel stops at the first page that it cannot reach.
        Ok(_) => Err(io::Error::from_raw_os_error(libc::EFAULT)),
    }
}

/// Reads `buffer.len()` bytes at `address` of the process: process_vm_readv(2), Linux 3.2. Does not
/// stop it. Must not be used on pages that a userfaultfd has taken away.
///
/// # Errors
/// EFAULT when not all of the range is mapped and readable (the buffer is then partly written),
/// ESRCH, EPERM.
pub fn read_memory(pid: u32, address: u64, buffer: &mut [u8]) -> io::Result<()> {
    let local = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    transfer(pid, address, local, Direction::Read)
}

/// Writes `bytes` at `address` of the process: process_vm_writev(2), Linux 3.2. Honours the
/// mapping's protection, so program text cannot be written this way. The process sees a torn write
/// unless it is stopped.
///
/// # Errors
/// EFAULT when not all of the range is mapped and writable (a prefix may have been written), ESRCH,
/// EPERM.
pub fn write_memory(pid: u32, address: u64, bytes: &[u8]) -> io::Result<()> {
    let local = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    transfer(pid, address, local, Direction::Write)
}

/// Gives advice about ranges of the process's memory: process_madvise(2), Linux 5.10, as
/// madvise(2). Stops at the first range that is no longer mapped.
///
/// # Errors
/// ESRCH, EPERM, EINVAL for advice that the kernel does not take about others.
pub fn advise(pidfd: BorrowedFd<'_>, ranges: &[std::ops::Range<u64>], advice: i32) -> io::Result<()> {
    for chunk in ranges.chunks(libc::UIO_MAXIOV as usize) {
        let vector = |range: &std::ops::Range<u64>| libc::iovec {
            iov_base: range.start as *mut libc::c_void,
            iov_len: (range.end - range.start) as usize,
        };
        let vectors: Vec<libc::iovec> = chunk.iter().map(vector).collect();
        // SAFETY: `vectors` lives through the call, which reads it only; the addresses in it are
        // the other process's, where the kernel checks them.
        let done = unsafe {
            libc::syscall(libc::SYS_process_madvise, pidfd.as_raw_fd(), vectors.as_ptr(), vectors.len(), advice, 0)
        };
        if done < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// When the process started, in clock ticks (1/100 s) since boot: proc_pid_stat(5), field 22.
/// Together with its pid it names the process beyond doubt within one boot.
///
/// # Errors
/// `NotFound` when there is no such process; `InvalidData` when the file cannot be understood.
pub fn start_time(pid: u32) -> io::Result<u64> {
    let path = format!("/proc/{pid}/stat");
    let stat = std::fs::read(&path).map_err(|e| match e.raw_os_error() {
        // The process ended between open and read.
        Some(libc::ESRCH) => io::ErrorKind::NotFound.into(),
        _ => e,
    })?;
    start_time_in(&stat).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("{path} has no field 22")))
}

/// Field 2 is the program's name in parentheses and may hold spaces, parentheses and any bytes, so
/// count from the last.
fn start_time_in(stat: &[u8]) -> Option<u64> {
    let end_of_name = stat.iter().rposition(|b| *b == b')')?;
    let rest = std::str::from_utf8(&stat[end_of_name + 1..]).ok()?;
    rest.split_ascii_whitespace().nth(22 - 3)?.parse().ok()
}

/// Whether two descriptors share one open file description: kcmp(2) with KCMP_FILE, Linux 3.5,
/// CONFIG_KCMP. Needs PTRACE_MODE_READ_REALCREDS over both processes.
///
/// # Errors
/// EBADF, ESRCH, EPERM.
pub fn same_open_file(pid_a: u32, fd_a: RawFd, pid_b: u32, fd_b: RawFd) -> io::Result<bool> {
    const KCMP_FILE: libc::c_int = 0;
    let (a, b) = (pid_of(pid_a)?.as_raw_nonzero().get(), pid_of(pid_b)?.as_raw_nonzero().get());
    // SAFETY: kcmp takes no pointers, only numbers.
    let order =
        unsafe { libc::syscall(libc::SYS_kcmp, a, b, KCMP_FILE, libc::c_long::from(fd_a), libc::c_long::from(fd_b)) };
    if order < 0 { Err(io::Error::last_os_error()) } else { Ok(order == 0) }
}

/// Whether two descriptors of this process share one open file description, see [`same_open_file`].
///
/// # Errors
/// EPERM where kcmp is filtered.
pub fn same_open_file_here(a: BorrowedFd<'_>, b: BorrowedFd<'_>) -> io::Result<bool> {
    let own = std::process::id();
    same_open_file(own, a.as_raw_fd(), own, b.as_raw_fd())
}

/// Makes this process the parent of orphaned descendants (or no longer): prctl(2)
/// PR_SET_CHILD_SUBREAPER, Linux 3.4. It then has to wait for them.
///
/// # Errors
/// None in practice.
pub fn set_child_subreaper(on: bool) -> io::Result<()> {
    Ok(rustix::process::set_child_subreaper(on.then(rustix::process::getpid))?)
}

/// Has the C library's allocator share so many arenas among all threads: mallopt(3), M_ARENA_MAX.
/// By itself it makes eight for each processor, and each stays as large as it ever was. To be
/// called before there are threads. It only helps.
pub fn share_arenas(most: i32) {
    // SAFETY: takes two numbers and changes the allocator's own settings, under its own lock.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, most) };
}

/// Does work with another real user id in this thread alone, the effective one staying as it is:
/// setresuid(2) by the system call itself. What the kernel counts by user is that user's then.
/// Where this process may not have that id the work is done all the same.
pub fn as_real_user<T>(uid: u32, work: impl FnOnce() -> T) -> T {
    const SAME: libc::c_long = -1;
    let set = |uid: u32| {
        // SAFETY: takes three numbers and changes this thread's own ids; effective and saved ones
        // stay.
        unsafe { libc::syscall(libc::SYS_setresuid, libc::c_long::from(uid), SAME, SAME) == 0 }
    };
    let before = rustix::process::getuid().as_raw();
    let changed = set(uid);
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    if changed {
        assert!(set(before), "a thread may have its own real user id back");
    }
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Has the C library's allocator give memory of so many bytes and more its own mapping, which goes
/// back to the kernel when it is freed: mallopt(3), M_MMAP_THRESHOLD. By itself it raises that
/// bound, up to 32 MiB, to the largest piece that was ever freed, and keeps what lies between. It
/// only helps.
pub fn map_large_memory(from: i32) {
    // SAFETY: takes two numbers and changes the allocator's own settings, under its own lock.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, from) };
}

/// Gives free memory of the C library's allocator back to the kernel where that has become more by
/// `most` bytes since the last time, whose result `last` is (0 the first time): mallinfo2(3),
/// malloc_trim(3). The threads that allocate wait meanwhile, some milliseconds for each 100 MB.
/// Returns how much is free: what was given back counts as free as well.
pub fn release_free_memory(most: usize, last: usize) -> usize {
    // SAFETY: reads the allocator's own counters, under its own lock.
    let free = || unsafe { libc::mallinfo2() }.fordblks;
    let now = free();
    if now <= last.saturating_add(most) {
        return now.min(last);
    }
    // SAFETY: changes nothing that is allocated.
    unsafe { libc::malloc_trim(0) };
    free()
}

/// Keeps every page of this process in memory from the moment it is first touched: mlockall(2) with
/// MCL_ONFAULT, Linux 4.4. Untouched pages cost nothing.
///
/// # Errors
/// ENOMEM or EPERM beyond RLIMIT_MEMLOCK without CAP_IPC_LOCK.
pub fn mlockall() -> io::Result<()> {
    Ok(rustix::mm::mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT)?)
}

/// Sets a limit of this process by the kernel's number of the resource, setrlimit(2); the largest
/// number is no limit.
///
/// # Errors
/// EINVAL for a resource that there is not, EPERM for a hard limit above that of now without
/// CAP_SYS_RESOURCE.
pub fn set_limit(resource: u32, soft: u64, hard: u64) -> io::Result<()> {
    const ALL: [Resource; 16] = [
        Resource::Cpu,
        Resource::Fsize,
        Resource::Data,
        Resource::Stack,
        Resource::Core,
        Resource::Rss,
        Resource::Nproc,
        Resource::Nofile,
        Resource::Memlock,
        Resource::As,
        Resource::Locks,
        Resource::Sigpending,
        Resource::Msgqueue,
        Resource::Nice,
        Resource::Rtprio,
        Resource::Rttime,
    ];
    let resource = usize::try_from(resource).ok().and_then(|at| ALL.get(at)).ok_or(rustix::io::Errno::INVAL)?;
    let value = |value: u64| (value != u64::MAX).then_some(value);
    Ok(setrlimit(*resource, Rlimit { current: value(soft), maximum: value(hard) })?)
}

/// What RLIMIT_NOFILE was before [`raise_nofile`].
static NOFILE_BEFORE: std::sync::OnceLock<Rlimit> = std::sync::OnceLock::new();

/// Lets this process, and what it starts, have as many open files as the machine allows:
/// setrlimit(2) up to fs.nr_open, which needs CAP_SYS_RESOURCE; without that up to the hard limit.
///
/// # Errors
/// None in practice.
pub fn raise_nofile() -> io::Result<()> {
    let before = getrlimit(Resource::Nofile);
    NOFILE_BEFORE.get_or_init(|| before);
    let most = std::fs::read_to_string("/proc/sys/fs/nr_open").ok().and_then(|text| text.trim().parse().ok());
    let all = |most| Rlimit { current: most, maximum: most };
    match setrlimit(Resource::Nofile, all(most.or(before.maximum))) {
        Ok(()) => Ok(()),
        Err(_) => Ok(setrlimit(Resource::Nofile, all(before.maximum))?),
    }
}

/// Gives another process, and what it will start, the RLIMIT_NOFILE that this one had before it
/// raised its own: programs look at every number below it. prlimit(2).
///
/// # Errors
/// ESRCH.
pub fn usual_nofile(pid: u32) -> io::Result<()> {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    match NOFILE_BEFORE.get() {
        Some(before) => Ok(rustix::process::prlimit(Some(pid), Resource::Nofile, *before).map(drop)?),
        None => Ok(()),
    }
}

/// Makes this process, and what it execs, ignore the signal: signal(2) with SIG_IGN.
///
/// # Errors
/// EINVAL for SIGKILL and SIGSTOP.
pub fn ignore_signal(signal: Signal) -> io::Result<()> {
    // SAFETY: SIG_IGN installs no code of ours, so there is nothing that could run at the wrong
    // moment.
    let old = unsafe { libc::signal(signal.as_raw(), libc::SIG_IGN) };
    if old == libc::SIG_ERR { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Closes every descriptor from 3 upwards that this process inherited: close_range(2), Linux 5.9.
///
/// # Panics
/// When called a second time. It is the first statement of a `main`: a descriptor that the program
/// opened before it would be closed under its owner.
///
/// # Errors
/// None in practice.
pub fn close_inherited() -> io::Result<()> {
    static CALLED: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
    assert!(!CALLED.swap(true, std::sync::atomic::Ordering::SeqCst), "close_inherited is for the start of main only");
    // SAFETY: takes no pointers. By contract nothing in this process owns a descriptor above 2 yet.
    let result = unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::process::{Child, Command, Stdio};

    /// A child that waits for its standard input to end, and is reaped whatever the test does.
    struct Waiter(Child);
    impl Waiter {
        fn start() -> Waiter {
            Waiter(Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap())
        }
        fn pid(&self) -> u32 {
            self.0.id()
        }
    }
    impl Drop for Waiter {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// Runs the named test again in a process of its own, where it sees `--include-ignored`.
    fn alone(name: &str) -> bool {
        if std::env::args().any(|a| a == "--include-ignored") {
            return true;
        }
        let status = Command::new(std::env::current_exe().unwrap())
            .args([&format!("process::tests::{name}"), "--exact", "--include-ignored"])
            .status()
            .unwrap();
        assert!(status.success());
        false
    }

    #[test]
    fn a_pidfd_signals_and_reports_the_end() {
        let child = Waiter::start();
        let pidfd = pidfd_open(child.pid()).unwrap();
        assert!(!wait_for_end(pidfd.as_fd(), Some(Duration::ZERO)).unwrap());
        pidfd_send_signal(pidfd.as_fd(), Signal::KILL).unwrap();
        assert!(wait_for_end(pidfd.as_fd(), Some(Duration::from_secs(10))).unwrap());
        drop(child);
        assert_eq!(pidfd_send_signal(pidfd.as_fd(), Signal::KILL).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        assert_eq!(pidfd_open(0).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(pidfd_open(0x7fff_fff0).unwrap_err().raw_os_error(), Some(libc::ESRCH));
    }

    #[test]
    fn a_descriptor_is_taken_out_of_another_process() {
        let mut child = Waiter::start();
        let pidfd = pidfd_open(child.pid()).unwrap();
        let stdin = pidfd_getfd(pidfd.as_fd(), 0).unwrap();
        let own = std::process::id();
        assert!(same_open_file(own, stdin.as_raw_fd(), child.pid(), 0).unwrap());
        assert!(!same_open_file(own, stdin.as_raw_fd(), child.pid(), 1).unwrap());
        let twin = stdin.try_clone().unwrap();
        assert!(same_open_file_here(stdin.as_fd(), twin.as_fd()).unwrap());
        assert_eq!(pidfd_getfd(pidfd.as_fd(), 99).unwrap_err().raw_os_error(), Some(libc::EBADF));
        // The child's end of the pipe lives on in us, so what is written after its death is not
        // lost.
        let mut writer = child.0.stdin.take().unwrap();
        child.0.kill().unwrap();
        child.0.wait().unwrap();
        std::io::Write::write_all(&mut writer, b"for cat").unwrap();
        drop(writer);
        let mut left = String::new();
        std::fs::File::from(stdin).read_to_string(&mut left).unwrap();
        assert_eq!(left, "for cat");
        assert_eq!(pidfd_getfd(pidfd.as_fd(), 0).unwrap_err().raw_os_error(), Some(libc::ESRCH));
    }

    #[test]
    fn memory_of_another_process_is_read_and_written() {
        let child = Waiter::start();
        // Until it reads, its exec may still be moving the stack.
        let call = || std::fs::read_to_string(format!("/proc/{}/syscall", child.pid())).unwrap_or_default();
        while !call().starts_with("0 0x0 ") {
            std::thread::yield_now();
        }
        // The stack holds the arguments: "cat" is at the end of /proc/PID/cmdline's range.
        let find_stack = || {
            let maps = std::fs::read_to_string(format!("/proc/{}/maps", child.pid())).unwrap();
            let line = maps.lines().find(|l| l.ends_with("[stack]"))?.to_owned();
            let (start, end) = line.split(' ').next()?.split_once('-')?;
            Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
        };
        let (start, end) = find_stack().unwrap();
        let mut stack = vec![0; (end - start) as usize];
        read_memory(child.pid(), start, &mut stack).unwrap();
        let needle = b"cat\0";
        let at = stack.windows(needle.len()).rposition(|w| w == needle).expect("argv is on the stack") as u64;
        write_memory(child.pid(), start + at, b"dog").unwrap();
        let mut back = [0; 4];
        read_memory(child.pid(), start + at, &mut back).unwrap();
        assert_eq!(&back, b"dog\0");
        // A range that runs out of the stack is refused as a whole.
        let mut beyond = vec![0; 16];
        assert_eq!(read_memory(child.pid(), end - 8, &mut beyond).unwrap_err().raw_os_error(), Some(libc::EFAULT));
        assert_eq!(write_memory(child.pid(), 0, b"x").unwrap_err().raw_os_error(), Some(libc::EFAULT));
        read_memory(child.pid(), 0, &mut []).unwrap();
    }

    #[test]
    fn start_times_are_read() {
        let first = Waiter::start();
        let started = start_time(first.pid()).unwrap();
        assert_eq!(start_time(first.pid()).unwrap(), started);
        let own = start_time(std::process::id()).unwrap();
        let boot = std::fs::read_to_string("/proc/uptime").unwrap();
        let up: f64 = boot.split(' ').next().unwrap().parse().unwrap();
        assert!(own <= started && started as f64 / 100.0 <= up + 1.0, "{own} {started} {up}");
        assert_eq!(start_time(0x7fff_fff0).unwrap_err().kind(), io::ErrorKind::NotFound);
        let odd = b"7 (a) (b ) c) S 1 7 7 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 4711 0 0";
        assert_eq!(start_time_in(odd), Some(4711));
        assert_eq!(start_time_in(b"7 (a) S 1"), None);
        assert_eq!(start_time_in(b""), None);
    }

    #[test]
    fn locked_memory_counts() {
        if !alone("locked_memory_counts") {
            return;
        }
        mlockall().expect("the tests run as root");
        let page = vec![1_u8; 1 << 20];
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let locked = status.lines().find_map(|l| l.strip_prefix("VmLck:")).unwrap();
        let kb: u64 = locked.trim().trim_end_matches(" kB").parse().unwrap();
        assert!(kb >= 1024, "{kb} kB locked with {} bytes allocated", page.len());
    }

    #[test]
    fn an_ignored_signal_does_not_kill() {
        if !alone("an_ignored_signal_does_not_kill") {
            return;
        }
        ignore_signal(Signal::TERM).unwrap();
        let own = pidfd_open(std::process::id()).unwrap();
        pidfd_send_signal(own.as_fd(), Signal::TERM).unwrap();
        assert_eq!(ignore_signal(Signal::KILL).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }

    #[test]
    fn limits_are_set_by_their_numbers() {
        let before = getrlimit(Resource::Core);
        set_limit(4, 0, before.maximum.unwrap_or(u64::MAX)).unwrap();
        assert_eq!(getrlimit(Resource::Core), Rlimit { current: Some(0), maximum: before.maximum });
        setrlimit(Resource::Core, before).unwrap();
        assert_eq!(set_limit(16, 0, 0).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        let error = set_limit(7, 2, 1).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "a soft limit above the hard one");
    }

    #[test]
    fn a_subreaper_inherits_orphans() {
        if !alone("a_subreaper_inherits_orphans") {
            return;
        }
        set_child_subreaper(true).unwrap();
        let shell = Command::new("sh").args(["-c", "sleep 100 >/dev/null 2>&1 & echo $!"]).output().unwrap();
        let orphan: u32 = String::from_utf8(shell.stdout).unwrap().trim().parse().unwrap();
        let status = std::fs::read_to_string(format!("/proc/{orphan}/status")).unwrap();
        let parent = status.lines().find_map(|l| l.strip_prefix("PPid:")).unwrap().trim().to_owned();
        let pidfd = pidfd_open(orphan).unwrap();
        pidfd_send_signal(pidfd.as_fd(), Signal::KILL).unwrap();
        assert!(wait_for_end(pidfd.as_fd(), None).unwrap());
        let pid = rustix::process::Pid::from_raw(orphan as i32);
        rustix::process::waitpid(pid, rustix::process::WaitOptions::empty()).unwrap();
        set_child_subreaper(false).unwrap();
        assert_eq!(parent, std::process::id().to_string());
    }
}
