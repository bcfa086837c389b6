//! Threads of other processes in the hands of a tracer: their registers and their signal masks, by
//! ptrace(2); and the layout of the floating-point state that goes with them. x86_64 only.
//!
//! A trace belongs to the thread that called [`seize`], not to its process: everything else here,
//! [`wait_stopped`] too, must be called by that thread, and any other thread gets ESRCH. When it
//! ends, all that it traces is killed (PTRACE_O_EXITKILL), so a crash leaves no process half made.
//! While a thread is traced, no other thread of the tracer's process may wait for its id without
//! __WNOTHREAD: such a wait would take the stop away, even a wait that asked for ends only. A
//! traced thread that has died stays a zombie, hidden from its real parent, until [`has_ended`] has
//! seen it.

use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::io;
use std::time::{Duration, Instant};

/// Registers in a set of [`get_general`]: r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi
/// orig_rax rip cs eflags rsp ss fs_base gs_base ds es fs gs (`struct user_regs_struct`,
/// sys/user.h).
pub const GENERAL: usize = 27;

/// NT_PRSTATUS and NT_X86_XSTATE (elf.h): what PTRACE_GETREGSET calls the two sets of registers.
const GENERAL_SET: usize = 1;
const FLOATING_SET: usize = 0x202;

/// A thread that has not stopped is looked for among the dying so often.
const DYING_AFTER: Duration = Duration::from_millis(5);

/// Why a traced thread stands still.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// It was interrupted, or stands still with its whole process (PTRACE_EVENT_STOP).
    Event,
    /// It is about to enter or to leave a system call that [`to_call`] let it run to.
    Call,
    /// This signal is about to be delivered; it is lost unless it is passed on.
    Signal(i32),
}

fn id(tid: u32) -> io::Result<libc::pid_t> {
    match libc::pid_t::try_from(tid) {
        Ok(tid) if tid > 0 => Ok(tid),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{tid} is not a thread id"))),
    }
}

/// One ptrace(2) request whose arguments are numbers, not addresses in our memory.
fn request(request: libc::c_uint, tid: u32, address: usize, data: usize) -> io::Result<()> {
    let tid = id(tid)?;
    // SAFETY: for the requests of this module that come here neither argument is an address, so the
    // kernel touches none of our memory.
    match unsafe { libc::ptrace(request, tid, address, data) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Begins to trace a thread, which runs on; if the calling thread ends, its process is killed:
/// ptrace(2) PTRACE_SEIZE with PTRACE_O_EXITKILL and PTRACE_O_TRACESYSGOOD, Linux 3.8.
///
/// # Errors
/// EPERM when the thread is traced already or we may not trace it, ESRCH when there is no such
/// thread.
pub fn seize(tid: u32) -> io::Result<()> {
    let options = libc::PTRACE_O_EXITKILL | libc::PTRACE_O_TRACESYSGOOD;
    request(libc::PTRACE_SEIZE, tid, 0, options as usize)
}

/// The same, and no seccomp(2) filter of the thread is asked about any call, until [`outlive`] or
/// [`detach`]: PTRACE_O_SUSPEND_SECCOMP, Linux 4.3.
///
/// # Errors
/// As of [`seize`]; EPERM also without CAP_SYS_ADMIN or when we have a filter ourselves.
pub fn seize_unfiltered(tid: u32) -> io::Result<()> {
    let options = libc::PTRACE_O_EXITKILL | libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_SUSPEND_SECCOMP;
    request(libc::PTRACE_SEIZE, tid, 0, options as usize)
}

/// From now on the end of the calling thread lets a stopped thread run on instead of killing its
/// process: ptrace(2) PTRACE_SETOPTIONS without PTRACE_O_EXITKILL, Linux 3.8.
///
/// # Errors
/// ESRCH when it does not stand still, has died or is not ours.
pub fn outlive(tid: u32) -> io::Result<()> {
    request(libc::PTRACE_SETOPTIONS, tid, 0, libc::PTRACE_O_TRACESYSGOOD as usize)
}

/// Asks a traced thread to stop; [`wait_stopped`] tells when it has: ptrace(2) PTRACE_INTERRUPT,
/// Linux 3.4.
///
/// # Errors
/// ESRCH when it has died or is not ours.
pub fn interrupt(tid: u32) -> io::Result<()> {
    request(libc::PTRACE_INTERRUPT, tid, 0, 0)
}

/// Waits without a limit until a traced thread stands still: waitpid(2) with __WALL.
///
/// The kernel reports the death of a leader only after that of the other threads of its process,
/// and the death of pid 1 of a namespace after that of all its processes; the tracer has to wait
/// for each of these that it traces. So a thread that is dying counts as dead.
///
/// # Errors
/// ECHILD when it is not ours; ESRCH when it has died instead, or is dying.
pub fn wait_stopped(tid: u32) -> io::Result<Stop> {
    let began = Instant::now();
    let mut sought = began;
    loop {
        if let Some(stop) = poll(tid)? {
            return Ok(stop);
        }
        match began.elapsed() {
            // A stop takes some microseconds, unless the thread waits for something.
            passed if passed < Duration::from_micros(300) => std::thread::yield_now(),
            passed if passed < Duration::from_millis(10) => std::thread::sleep(Duration::from_micros(50)),
            _ => std::thread::sleep(Duration::from_micros(500)),
        }
        if sought.elapsed() > DYING_AFTER {
            sought = Instant::now();
            if is_dying(tid) {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
        }
    }
}

/// How a traced thread has stopped, if it has.
fn poll(tid: u32) -> io::Result<Option<Stop>> {
    let mut status = 0;
    // SAFETY: `status` lives through the call.
    match unsafe { libc::waitpid(id(tid)?, &mut status, libc::__WALL | libc::WNOHANG) } {
        0 => return Ok(None),
        -1 => return Err(io::Error::last_os_error()),
        _ if !libc::WIFSTOPPED(status) => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
        _ => {}
    }
    Ok(Some(match (status >> 16, libc::WSTOPSIG(status)) {
        (libc::PTRACE_EVENT_STOP, _) => Stop::Event,
        (_, signal) if signal == libc::SIGTRAP | 0x80 => Stop::Call,
        (_, signal) => Stop::Signal(signal),
    }))
}

/// Whether a thread has begun to end and not been waited for: PF_EXITING among the flags of
/// proc_pid_stat(5), include/linux/sched.h.
fn is_dying(tid: u32) -> bool {
    const EXITING: u64 = 4;
    let stat = match std::fs::read_to_string(format!("/proc/{tid}/stat")) {
        Ok(stat) => stat,
        // Too few descriptors, say, are no sign of its end.
        Err(e) => return e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH),
    };
    let flags = stat.rsplit_once(')').and_then(|(_, fields)| fields.split_whitespace().nth(6)?.parse::<u64>().ok());
    flags.is_some_and(|flags| flags & EXITING != 0)
}

/// Whether a traced thread has died, without waiting; its real parent can see that only after we
/// have. One that is not ours to wait for counts as ended: waitpid(2) with __WALL and WNOHANG.
///
/// # Errors
/// EINVAL.
pub fn has_ended(tid: u32) -> io::Result<bool> {
    let tid = id(tid)?;
    let mut status = 0;
    // SAFETY: `status` lives through the call.
    match unsafe { libc::waitpid(tid, &mut status, libc::__WALL | libc::WNOHANG) } {
        0 => Ok(false),
        -1 => match io::Error::last_os_error() {
            e if e.raw_os_error() == Some(libc::ECHILD) => Ok(true),
            e => Err(e),
        },
        _ => Ok(!libc::WIFSTOPPED(status)),
    }
}

/// Lets a stopped thread run until it enters or leaves a system call, delivering `signal` first (0:
/// none): ptrace(2) PTRACE_SYSCALL.
///
/// Prefer it to a single step for running one call. The kernel announces the end of a step by
/// forcing a SIGTRAP on the thread, and where that signal is blocked or ignored, it first sets its
/// handler back to the default, for good (`force_sig_info_to_task` in kernel/signal.c). A stop at a
/// call leaves handlers and masks alone.
///
/// # Errors
/// ESRCH when it is not stopped, has died, or is not ours.
pub fn to_call(tid: u32, signal: i32) -> io::Result<()> {
    request(libc::PTRACE_SYSCALL, tid, 0, signal as usize)
}

/// Lets a stopped thread go for good, without a signal: ptrace(2) PTRACE_DETACH.
///
/// # Errors
/// ESRCH when it is not stopped, has died, or is not ours.
pub fn detach(tid: u32) -> io::Result<()> {
    request(libc::PTRACE_DETACH, tid, 0, 0)
}

/// Where they have the code segment.
const CS: usize = 17;
/// Where they have the number of the call, or -1.
const ORIG_RAX: usize = 15;

/// Whether registers are those of a 64-bit thread.
pub fn is_64_bit(registers: &[u64; GENERAL]) -> bool {
    registers[CS] == 0x33
}

/// Whether registers are those of a 64-bit thread that stands in a call which was broken off.
pub fn in_call(registers: &[u64; GENERAL]) -> bool {
    is_64_bit(registers) && registers[ORIG_RAX] as i64 >= 0
}

/// A stopped thread's general registers, in the order of [`GENERAL`]: ptrace(2) PTRACE_GETREGSET
/// NT_PRSTATUS.
///
/// # Errors
/// ESRCH when it is not stopped, has died, or is not ours.
pub fn get_general(tid: u32) -> io::Result<[u64; GENERAL]> {
    let tid = id(tid)?;
    let mut registers = [0u64; GENERAL];
    let mut part = libc::iovec { iov_base: registers.as_mut_ptr().cast(), iov_len: size_of_val(&registers) };
    // SAFETY: `part` describes `registers`; both live through the call, and any bytes are valid
    // registers.
    match unsafe { libc::ptrace(libc::PTRACE_GETREGSET, tid, GENERAL_SET, &raw mut part) } {
        -1 => Err(io::Error::last_os_error()),
        _ if part.iov_len != size_of_val(&registers) => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
        _ => Ok(registers),
    }
}

/// Sets a stopped thread's general registers, in the order of [`GENERAL`]: ptrace(2)
/// PTRACE_SETREGSET NT_PRSTATUS. With orig_rax -1 no interrupted system call is started again.
///
/// # Errors
/// EIO for a segment selector or a base that no user program may have, ESRCH when it is not
/// stopped, has died, or is not ours.
pub fn set_general(tid: u32, registers: &[u64; GENERAL]) -> io::Result<()> {
    let tid = id(tid)?;
    let part = libc::iovec { iov_base: registers.as_ptr().cast_mut().cast(), iov_len: size_of_val(registers) };
    // SAFETY: `part` describes `registers`, which the kernel only reads here; both live through the
    // call.
    match unsafe { libc::ptrace(libc::PTRACE_SETREGSET, tid, GENERAL_SET, &raw const part) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// A stopped thread's floating-point and vector registers, [`XsaveLayout::size`] bytes: ptrace(2)
/// PTRACE_GETREGSET NT_X86_XSTATE, Linux 2.6.35.
///
/// # Errors
/// ENODEV when the processor has no XSAVE, ESRCH when it is not stopped, has died, or is not ours.
pub fn get_floating(tid: u32) -> io::Result<Vec<u8>> {
    let tid = id(tid)?;
    // The size is the processor's, at most 11 KiB so far; the kernel cuts its answer to what there
    // is.
    let mut bytes = vec![0u8; 64 * 1024];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: `part` describes `bytes`; both live through the call.
    if unsafe { libc::ptrace(libc::PTRACE_GETREGSET, tid, FLOATING_SET, &raw mut part) } == -1 {
        return Err(io::Error::last_os_error());
    }
    bytes.truncate(part.iov_len);
    Ok(bytes)
}

/// Sets a stopped thread's floating-point and vector registers from an XSAVE area in the standard
/// (not the compacted) format, exactly [`XsaveLayout::size`] bytes: ptrace(2) PTRACE_SETREGSET
/// NT_X86_XSTATE. A component whose bit in the header is clear gets its first state; the bytes 464
/// to 511 are not looked at.
///
/// # Errors
/// EFAULT for another size, EINVAL for components or bits of MXCSR that the processor does not have
/// or a header that is not zero behind its first word, ESRCH when it is not stopped, has died, or
/// is not ours.
pub fn set_floating(tid: u32, area: &[u8]) -> io::Result<()> {
    let tid = id(tid)?;
    let part = libc::iovec { iov_base: area.as_ptr().cast_mut().cast(), iov_len: area.len() };
    // SAFETY: `part` describes `area`, which the kernel only reads here; both live through the
    // call.
    match unsafe { libc::ptrace(libc::PTRACE_SETREGSET, tid, FLOATING_SET, &raw const part) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Sets which signals a stopped thread blocks, signal N as bit N - 1: ptrace(2) PTRACE_SETSIGMASK,
/// Linux 3.11. SIGKILL and SIGSTOP are left out silently.
///
/// # Errors
/// ESRCH when it is not stopped, has died, or is not ours.
pub fn set_signal_mask(tid: u32, blocked: u64) -> io::Result<()> {
    let tid = id(tid)?;
    // SAFETY: the third argument is the mask's size, and `blocked`, which the kernel only reads,
    // lives through the call.
    match unsafe { libc::ptrace(libc::PTRACE_SETSIGMASK, tid, size_of::<u64>(), &raw const blocked) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Where the processor puts what into an XSAVE area of the standard format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XsaveLayout {
    /// Bytes of the whole area.
    pub size: usize,
    /// Offset and size in bytes of each component that is switched on, by its number; the first two
    /// (x87 and SSE) lie in the first 512 bytes and are not here.
    components: [Option<(usize, usize)>; 64],
}

impl XsaveLayout {
    /// Offset and size in bytes of a component from number 2; none if it is not switched on.
    pub fn component(&self, number: usize) -> Option<(usize, usize)> {
        self.components.get(number).copied().flatten()
    }
}

/// The layout on this machine; none if there is no XSAVE. CPUID leaf 0xD and XCR0 (Intel SDM volume
/// 1, chapter 13).
#[allow(unused_unsafe, reason = "cpuid is a safe function in newer compilers only")]
pub fn xsave_layout() -> Option<XsaveLayout> {
    const OSXSAVE: u32 = 1 << 27;
    // SAFETY: every x86_64 processor has CPUID.
    if unsafe { __cpuid(1) }.ecx & OSXSAVE == 0 {
        return None;
    }
    let (low, high): (u32, u32);
    // SAFETY: OSXSAVE says that the instruction is there and allowed; it writes the two named
    // registers only.
    unsafe {
        std::arch::asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high,
            options(nomem, nostack, preserves_flags));
    }
    let on = u64::from(high) << 32 | u64::from(low);
    let mut components = [None; 64];
    for (number, component) in components.iter_mut().enumerate().skip(2) {
        if on >> number & 1 == 1 {
            // SAFETY: as above.
            let leaf = unsafe { __cpuid_count(0xd, number as u32) };
            *component = Some((leaf.ebx as usize, leaf.eax as usize));
        }
    }
    // SAFETY: as above.
    Some(XsaveLayout { size: unsafe { __cpuid_count(0xd, 0) }.ebx as usize, components })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    /// A child that waits in read(2) until its input is closed.
    fn cat() -> Child {
        let child = Command::new("/bin/cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let call = format!("/proc/{}/syscall", child.id());
        while !std::fs::read_to_string(&call).unwrap().starts_with("0 0x0 ") {
            std::thread::yield_now();
        }
        child
    }

    fn stop(tid: u32) {
        interrupt(tid).unwrap();
        assert_eq!(wait_stopped(tid).unwrap(), Stop::Event);
    }

    /// The children of a process, once it has some.
    fn children(of: u32) -> Vec<u32> {
        let path = format!("/proc/{of}/task/{of}/children");
        let read = || std::fs::read_to_string(&path).unwrap_or_default();
        while read().is_empty() {
            std::thread::yield_now();
        }
        read().split_whitespace().map(|pid| pid.parse().unwrap()).collect()
    }

    fn kill(pid: u32) {
        // SAFETY: kill(2) touches no memory of ours.
        assert_eq!(unsafe { libc::kill(pid as i32, libc::SIGKILL) }, 0);
    }

    /// The kernel tells of its end only after that of the other thread, for which only the tracer
    /// can wait.
    #[test]
    fn a_leader_that_dies_before_its_threads_are_waited_for_is_dead() {
        let script =
            "import threading, time\nthreading.Thread(target=time.sleep, args=(100,)).start()\ntime.sleep(100)";
        let mut child = Command::new("python3").args(["-c", script]).spawn().unwrap();
        let threads = || crate::status::threads(child.id()).unwrap();
        while threads().len() < 2 {
            std::thread::yield_now();
        }
        let all = threads();
        all.iter().for_each(|tid| seize(*tid).unwrap());
        kill(child.id());
        assert_eq!(wait_stopped(child.id()).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        while !all.iter().rev().all(|tid| has_ended(*tid).unwrap()) {}
        let _ = child.wait();
    }

    /// The kernel tells of its end only after that of all in its namespace.
    #[test]
    fn an_init_that_dies_before_its_children_are_waited_for_is_dead() {
        let words = ["-Urpf", "--kill-child", "sh", "-c", "sleep 100 & exec sleep 100"];
        let mut outside = Command::new("unshare").args(words).spawn().unwrap();
        let init = children(outside.id())[0];
        let child = children(init)[0];
        seize(init).unwrap();
        seize(child).unwrap();
        kill(init);
        assert_eq!(wait_stopped(init).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        while ![child, init].iter().all(|tid| has_ended(*tid).unwrap()) {}
        outside.wait().unwrap();
    }

    #[test]
    fn what_is_set_is_read_back() {
        let mut child = cat();
        let tid = child.id();
        assert_eq!(interrupt(tid).unwrap_err().raw_os_error(), Some(libc::ESRCH), "not ours yet");
        seize(tid).unwrap();
        stop(tid);
        let mut registers = get_general(tid).unwrap();
        assert_eq!(registers[15], libc::SYS_read as u64);
        assert_eq!(registers[10] as i64, -512, "a read that is to be started again");
        registers[0] = 0x1234_5678_9abc_def0;
        set_general(tid, &registers).unwrap();
        assert_eq!(get_general(tid).unwrap(), registers);

        let mut area = get_floating(tid).unwrap();
        area[160..176].copy_from_slice(b"sixteen letters.");
        area[512] |= 2;
        set_floating(tid, &area).unwrap();
        assert_eq!(get_floating(tid).unwrap(), area);
        assert_eq!(set_floating(tid, &area[..576]).unwrap_err().raw_os_error(), Some(libc::EFAULT));
        area[520] = 1;
        assert_eq!(set_floating(tid, &area).unwrap_err().raw_os_error(), Some(libc::EINVAL));

        set_signal_mask(tid, u64::MAX).unwrap();
        let status = std::fs::read_to_string(format!("/proc/{tid}/status")).unwrap();
        assert!(status.contains("SigBlk:\tfffffffffffbfeff\n"), "all but SIGKILL and SIGSTOP: {status}");
        set_signal_mask(tid, 0).unwrap();
        detach(tid).unwrap();
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success(), "it read on to the end");
    }

    #[test]
    fn a_call_stops_twice_and_a_signal_is_told() {
        let mut child = cat();
        let tid = child.id();
        seize(tid).unwrap();
        stop(tid);
        to_call(tid, 0).unwrap();
        assert_eq!(wait_stopped(tid).unwrap(), Stop::Call, "the read begins again");
        assert_eq!(get_general(tid).unwrap()[15], libc::SYS_read as u64);
        drop(child.stdin.take());
        to_call(tid, 0).unwrap();
        assert_eq!(wait_stopped(tid).unwrap(), Stop::Call);
        assert_eq!(get_general(tid).unwrap()[10], 0, "end of file");
        // SAFETY: a signal to our own child, which has not been waited for.
        assert_eq!(unsafe { libc::kill(tid as i32, libc::SIGTERM) }, 0);
        to_call(tid, 0).unwrap();
        assert_eq!(wait_stopped(tid).unwrap(), Stop::Signal(libc::SIGTERM));
        assert!(!has_ended(tid).unwrap());
        child.kill().unwrap();
        assert_eq!(wait_stopped(tid).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        assert!(has_ended(tid).unwrap());
        assert_eq!(child.wait().unwrap_err().raw_os_error(), Some(libc::ECHILD), "it has been waited for");
    }

    #[test]
    fn the_end_of_the_tracer_kills() {
        use std::os::unix::process::ExitStatusExt as _;
        let mut child = cat();
        let tid = child.id();
        std::thread::spawn(move || {
            seize(tid).unwrap();
            stop(tid);
        })
        .join()
        .unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
    }

    #[test]
    fn the_layout_is_the_kernels() {
        let mut child = cat();
        seize(child.id()).unwrap();
        stop(child.id());
        let area = get_floating(child.id());
        detach(child.id()).unwrap();
        drop(child.stdin.take());
        child.wait().unwrap();
        let Some(layout) = xsave_layout() else {
            assert_eq!(area.unwrap_err().raw_os_error(), Some(libc::ENODEV));
            return;
        };
        let area = area.unwrap();
        assert_eq!(area.len(), layout.size);
        // The kernel notes XCR0 at the start of what it keeps of the bytes 464 to 511.
        let on = u64::from_le_bytes(area[464..472].try_into().unwrap());
        for number in 2..64 {
            assert_eq!(layout.component(number).is_some(), on >> number & 1 == 1, "component {number}");
            if let Some((offset, size)) = layout.component(number) {
                assert!(offset >= 576 && offset + size <= layout.size);
            }
        }
    }
}
