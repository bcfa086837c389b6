//! New processes in new namespaces, and what a process does to itself between clone(2) and
//! execve(2).
//!
//! For small single-threaded launchers; nothing here but [`owner`] belongs in a process with
//! threads.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Stack of a child, bytes. The child of a shared clone runs system calls and little else.
const STACK_BYTES: usize = 256 * 1024;

/// Which resources the child of [`clone_child`] shares with its parent, and which namespaces are
/// new for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Clone {
    /// CLONE_VM and CLONE_VFORK: memory is shared and the parent stands still until the child has
    /// exec'd or ended.
    pub shared: bool,
    /// CLONE_FILES: the descriptor table is shared.
    pub files: bool,
    /// CLONE_NEWNS.
    pub new_mount: bool,
    /// CLONE_NEWPID.
    pub new_pid: bool,
    /// CLONE_NEWUSER.
    pub new_user: bool,
    /// CLONE_PARENT: the child is not ours but our parent's, which is told of its end as of ours.
    /// An init cannot do that.
    pub sibling: bool,
}

/// A child process.
#[derive(Debug)]
pub struct Child {
    /// Its pid, in the caller's pid namespace.
    pub pid: u32,
    /// Its pidfd, close-on-exec.
    pub pidfd: OwnedFd,
}

/// Runs `child` in a new process and lets that exit with what it returns: clone(2) with CLONE_PIDFD
/// (Linux 5.2).
///
/// With [`Clone::shared`] what the child writes to borrowed variables is seen by the parent
/// afterwards. A child that execs leaves whatever `child` owned undropped. Such a child may make
/// another one itself, which then has a stack of its own in the same memory: each of the three
/// stands still while the next one runs.
///
/// # Errors
/// EPERM, ENOMEM, EAGAIN (pids limit), ENOSPC (too many namespaces).
pub fn clone_child(how: Clone, child: &mut dyn FnMut() -> i32) -> io::Result<Child> {
    extern "C" fn run(argument: *mut c_void) -> c_int {
        // SAFETY: `argument` is the address of `slot` below. Without CLONE_VM it is the child's own
        // copy; with it the parent is suspended (CLONE_VFORK) and its frame alive until the child
        // has exec'd or ended, so that this is the only access at any time.
        let child = unsafe { &mut *argument.cast::<&mut dyn FnMut() -> i32>() };
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(255)
    }
    let mut flags = libc::CLONE_PIDFD | libc::SIGCHLD;
    for (wanted, flag) in [
        (how.shared, libc::CLONE_VM | libc::CLONE_VFORK),
        (how.files, libc::CLONE_FILES),
        (how.new_mount, libc::CLONE_NEWNS),
        (how.new_pid, libc::CLONE_NEWPID),
        (how.new_user, libc::CLONE_NEWUSER),
        (how.sibling, libc::CLONE_PARENT),
    ] {
        if wanted {
            flags |= flag;
        }
    }
    let mut stack = Vec::<u128>::with_capacity(STACK_BYTES / 16);
    let mut slot = child;
    let mut pidfd: c_int = -1;
    // SAFETY: the stack is STACK_BYTES long, 16-byte aligned, and grows down from its end; it and
    // `slot` live until after the call, which with CLONE_VM returns only when the child uses
    // neither any more, and without it the child has copies. `run` never unwinds. With CLONE_VM the
    // child's changes to this memory are those of an ordinary call, for the calling thread is
    // suspended. `pidfd` is written before the call returns.
    let pid = unsafe {
        libc::clone(
            run,
            stack.as_mut_ptr().cast::<u8>().add(STACK_BYTES).cast(),
            flags,
            (&raw mut slot).cast(),
            &raw mut pidfd,
        )
    };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok(Child { pid: pid as u32, pidfd })
}

/// New namespaces for the caller: unshare(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Unshare {
    /// CLONE_NEWNS, which implies a working directory and root of its own.
    pub mount: bool,
    /// CLONE_FS: a working directory and root of its own.
    pub root: bool,
    /// CLONE_NEWUTS.
    pub uts: bool,
    /// CLONE_NEWIPC.
    pub ipc: bool,
    /// CLONE_NEWNET.
    pub net: bool,
}

/// Moves the calling thread into new namespaces: unshare(2).
///
/// # Errors
/// EPERM without CAP_SYS_ADMIN, ENOSPC when there are too many.
pub fn unshare(what: Unshare) -> io::Result<()> {
    let mut flags = 0;
    for (wanted, flag) in [
        (what.mount, libc::CLONE_NEWNS),
        (what.root, libc::CLONE_FS),
        (what.uts, libc::CLONE_NEWUTS),
        (what.ipc, libc::CLONE_NEWIPC),
        (what.net, libc::CLONE_NEWNET),
    ] {
        if wanted {
            flags |= flag;
        }
    }
    // SAFETY: no pointers. CLONE_FILES, which could make descriptors of other threads vanish, is
    // never among the flags.
    let done = unsafe { libc::unshare(flags) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A list of C strings as execve(2) wants it: made in advance, so that the child need not allocate.
#[derive(Debug)]
pub struct Strings {
    /// What `pointers` point into; never changed after construction.
    strings: Vec<CString>,
    pointers: Vec<*const c_char>,
}

impl Strings {
    /// The list with its terminating null pointer.
    pub fn new(strings: Vec<CString>) -> Strings {
        let pointers = strings.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect();
        Strings { strings, pointers }
    }

    /// The strings.
    pub fn as_slice(&self) -> &[CString] {
        &self.strings
    }
}

/// Replaces the calling process by a program: execve(2). Returns only when that failed.
pub fn exec(path: &CStr, arguments: &Strings, environment: &Strings) -> io::Error {
    // SAFETY: `path` is a C string; both lists are null-terminated arrays of pointers to C strings
    // that the borrowed `Strings` own.
    unsafe { libc::execve(path.as_ptr(), arguments.pointers.as_ptr(), environment.pointers.as_ptr()) };
    io::Error::last_os_error()
}

/// As [`exec`], of an open file: execveat(2) with AT_EMPTY_PATH, Linux 3.19. Nothing that is still
/// open for writing can be executed (ETXTBSY), a script must not be close-on-exec.
pub fn exec_open(program: BorrowedFd<'_>, arguments: &Strings, environment: &Strings) -> io::Error {
    // SAFETY: the path is an empty C string; both lists are null-terminated arrays of pointers to C
    // strings that the borrowed `Strings` own.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            program.as_raw_fd(),
            c"".as_ptr(),
            arguments.pointers.as_ptr(),
            environment.pointers.as_ptr(),
            libc::AT_EMPTY_PATH,
        )
    };
    io::Error::last_os_error()
}

/// Blocks SIGCHLD and returns a descriptor, close-on-exec and nonblocking, that is readable while
/// one is pending: signalfd(2).
///
/// # Errors
/// EMFILE, ENOMEM.
pub fn child_signal_fd() -> io::Result<OwnedFd> {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises `set`, the other calls read it while it lives.
    let fd = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGCHLD);
        if libc::sigprocmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
        libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Unblocks every signal for the calling thread: sigprocmask(2). A mask survives execve(2).
///
/// # Errors
/// None that the kernel documents for these arguments.
pub fn unblock_signals() -> io::Result<()> {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises `set`, sigprocmask reads it while it lives.
    let done = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, set.as_ptr(), std::ptr::null_mut())
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Gives every signal its default effect: rt_sigaction(2). An ignored signal stays ignored across
/// execve(2), and Rust's start-up code ignores SIGPIPE. For processes with one thread: two signals
/// are libc's own, which it uses among threads and lets no program touch, but which may come to us
/// ignored.
pub fn default_signals() {
    // Of the kernel's own layout: SIG_DFL, no flags, no restorer, an empty mask.
    let action = [0_u64; 4];
    for number in 1..=64 {
        // SAFETY: `action` lives and is as large as what the kernel reads, with its mask of 8
        // bytes; the old action is not asked for. SIG_DFL installs no handler, so nothing of ours
        // can run in a signal's context. The kernel refuses the numbers for which this cannot be
        // done.
        unsafe { libc::syscall(libc::SYS_rt_sigaction, number, action.as_ptr(), std::ptr::null_mut::<u64>(), 8) };
    }
}

/// Marks every descriptor from `first` on close-on-exec: close_range(2) with CLOSE_RANGE_CLOEXEC,
/// Linux 5.11.
///
/// # Errors
/// EINVAL on an older kernel.
pub fn close_on_exec_from(first: RawFd) -> io::Result<()> {
    // SAFETY: no pointers, and nothing is closed now.
    let done = unsafe {
        libc::syscall(libc::SYS_close_range, first as libc::c_uint, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Makes `fd` appear as descriptor `number`, to be inherited by the program that is about to be
/// exec'd: dup2(2).
///
/// Whatever was `number` is closed, so only a child that is about to exec and has a descriptor
/// table of its own may do this; it leaves `number` to the next program.
///
/// # Errors
/// EBADF, EMFILE.
pub fn place(fd: BorrowedFd<'_>, number: RawFd) -> io::Result<()> {
    if fd.as_raw_fd() == number {
        // SAFETY: `fd` is open; F_SETFD takes a number.
        let done = unsafe { libc::fcntl(number, libc::F_SETFD, 0) };
        return if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    }
    // SAFETY: dup2 takes no pointers. That `number` is not owned by anything which is used before
    // the exec is the documented duty of the caller.
    let done = unsafe { libc::dup2(fd.as_raw_fd(), number) };
    if done == number { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The user namespace that a namespace belongs to: NS_GET_USERNS of ioctl_ns(2), kernel 4.9.
///
/// # Errors
/// EPERM when it is not below the caller's own; ENOTTY when it is no namespace.
pub fn owner(namespace: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    const NS_GET_USERNS: libc::Ioctl = 0xb701;
    // SAFETY: this request takes no argument and touches no memory of ours.
    let fd = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_USERNS) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us, close-on-exec; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// How many threads the calling process has: /proc/self/task, proc_pid_task(5).
///
/// # Errors
/// /proc is not mounted.
pub fn own_threads() -> io::Result<usize> {
    Ok(std::fs::read_dir("/proc/self/task")?.count())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, WaitOptions, waitpid};

    fn wait(child: &Child) -> Option<i32> {
        let pid = Pid::from_raw(child.pid as i32);
        waitpid(pid, WaitOptions::empty()).unwrap().unwrap().1.exit_status()
    }

    #[test]
    fn a_namespace_belongs_to_a_user_namespace() {
        use std::os::linux::fs::MetadataExt;
        let open = |name: &str| std::fs::File::open(format!("/proc/self/ns/{name}")).unwrap();
        let owner = std::fs::File::from(owner(std::os::fd::AsFd::as_fd(&open("ipc"))).unwrap());
        assert_eq!(owner.metadata().unwrap().st_ino(), open("user").metadata().unwrap().st_ino());
        assert!(super::owner(std::os::fd::AsFd::as_fd(&std::fs::File::open("/dev/null").unwrap())).is_err());
    }

    #[test]
    fn a_shared_child_writes_our_memory_and_an_unshared_one_does_not() {
        let mut seen = 0;
        let how = Clone { shared: true, ..Clone::default() };
        let child = clone_child(how, &mut || {
            seen = 7;
            3
        })
        .unwrap();
        assert_eq!((wait(&child), seen), (Some(3), 7));
        let child = clone_child(Clone::default(), &mut || {
            seen = 8;
            4
        })
        .unwrap();
        assert_eq!((wait(&child), seen), (Some(4), 7));
    }

    #[test]
    fn a_panic_in_the_child_stays_there() {
        let how = Clone { shared: true, ..Clone::default() };
        let child = clone_child(how, &mut || panic!("only a test")).unwrap();
        assert_eq!(wait(&child), Some(255));
    }

    #[test]
    fn exec_reports_failure_through_shared_memory_and_success_by_the_program() {
        let list = |items: &[&str]| Strings::new(items.iter().map(|s| CString::new(*s).unwrap()).collect());
        let (arguments, environment) = (list(&["sh", "-c", "exit $CODE"]), list(&["CODE=9"]));
        assert_eq!(arguments.as_slice().len(), 3);
        let how = Clone { shared: true, ..Clone::default() };
        let mut error = None;
        let child = clone_child(how, &mut || {
            error = exec(c"/nonexistent/program", &arguments, &environment).raw_os_error();
            1
        })
        .unwrap();
        assert_eq!((wait(&child), error), (Some(1), Some(libc::ENOENT)));
        let child = clone_child(how, &mut || {
            exec(c"/bin/sh", &arguments, &environment);
            1
        })
        .unwrap();
        assert_eq!(wait(&child), Some(9));
    }

    #[test]
    fn a_child_s_sibling_is_our_child_and_all_share_memory() {
        let mut seen = Vec::new();
        let mut sibling = None;
        // Its pidfd comes to us because the child has our descriptor table.
        let how = Clone { shared: true, files: true, ..Clone::default() };
        let child = clone_child(how, &mut || {
            seen.push(1);
            let how = Clone { shared: true, sibling: true, ..Clone::default() };
            let made = clone_child(how, &mut || {
                seen.push(2);
                5
            });
            seen.push(3);
            sibling = Some(made);
            4
        })
        .unwrap();
        let sibling = sibling.unwrap().unwrap();
        assert_eq!(seen, [1, 2, 3]);
        assert_eq!((wait(&sibling), wait(&child)), (Some(5), Some(4)));
    }

    #[test]
    fn an_open_file_is_executed() {
        let list = |items: &[&str]| Strings::new(items.iter().map(|s| CString::new(*s).unwrap()).collect());
        let (arguments, environment) = (list(&["sh", "-c", "exit 6"]), list(&[]));
        let how = Clone { shared: true, ..Clone::default() };
        for (path, status) in [("/bin/sh", 6), ("/dev/null", libc::EACCES)] {
            let file = std::fs::File::open(path).unwrap();
            let child = clone_child(how, &mut || {
                let error = exec_open(std::os::fd::AsFd::as_fd(&file), &arguments, &environment);
                error.raw_os_error().unwrap()
            })
            .unwrap();
            assert_eq!(wait(&child), Some(status));
        }
    }
}
