//! A running process taken in hand: its threads stopped one by one without waiting, and system calls made by one of
//! them. ptrace(2), x86_64 only; the rules of [`crate::trace`] about the tracing thread hold here too.
//!
//! What a thread sees of it: nothing. A call that the interruption broke off with one of the kernel's restart codes is
//! restarted by the kernel itself, because the last stop before it runs on is always one where it does so. A call that
//! ended with a plain EINTR (epoll_wait, a receive with SO_RCVTIMEO, semop) is put back by [`mend`].
//!
//! Unlike [`crate::trace::seize`], [`seize`] lets the threads run on when the tracer dies: their registers are always
//! their own. Only while a [`Hand`] holds one, whose registers are ours then, the tracer's death kills its process:
//! better that than running on anywhere.

use crate::trace::{self, GENERAL, Stop};
use std::io;
use std::time::{Duration, Instant};

const RAX: usize = 10;
const ORIG_RAX: usize = 15;
const RIP: usize = 16;
const CS: usize = 17;
/// The call's arguments: rdi rsi rdx r10 r8 r9.
const ARGUMENTS: [usize; 6] = [14, 13, 12, 7, 9, 8];
const SYSGOOD: i32 = libc::PTRACE_O_TRACESYSGOOD;
/// Longest time that one of our calls may take.
const LONGEST_CALL: Duration = Duration::from_secs(20);

fn number(tid: u32) -> io::Result<libc::pid_t> {
    libc::pid_t::try_from(tid).map_err(|_| io::ErrorKind::InvalidInput.into())
}

fn request(request: libc::c_uint, tid: u32, data: usize) -> io::Result<()> {
    // SAFETY: our callers use requests whose arguments are numbers.
    match unsafe { libc::ptrace(request, number(tid)?, 0usize, data) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Begins to trace a thread, which runs on, and would if we died: ptrace(2) PTRACE_SEIZE.
///
/// # Errors
/// EPERM when somebody traces it already or we may not, ESRCH.
pub fn seize(tid: u32) -> io::Result<()> {
    request(libc::PTRACE_SEIZE, tid, SYSGOOD as usize)
}

/// Lets a stopped thread run, delivering `signal` first (0: none): ptrace(2) PTRACE_CONT.
///
/// # Errors
/// ESRCH when it is not stopped, has died, or is not ours.
pub fn run(tid: u32, signal: i32) -> io::Result<()> {
    request(libc::PTRACE_CONT, tid, signal as usize)
}

/// What became of a thread that was told to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// Not yet anything.
    Runs,
    /// It stands still.
    Stopped(Stop),
    /// It has ended.
    Ended,
}

/// Looks whether a traced thread stands still, without waiting: waitpid(2) with __WALL and WNOHANG.
///
/// # Errors
/// EINVAL. A thread that is not ours counts as ended.
pub fn look(tid: u32) -> io::Result<Found> {
    let mut status = 0;
    // SAFETY: `status` lives through the call.
    match unsafe { libc::waitpid(number(tid)?, &mut status, libc::__WALL | libc::WNOHANG) } {
        0 => return Ok(Found::Runs),
        -1 => {
            let e = io::Error::last_os_error();
            return if e.raw_os_error() == Some(libc::ECHILD) { Ok(Found::Ended) } else { Err(e) };
        }
        _ if !libc::WIFSTOPPED(status) => return Ok(Found::Ended),
        _ => {}
    }
    Ok(Found::Stopped(match (status >> 16, libc::WSTOPSIG(status)) {
        (libc::PTRACE_EVENT_STOP, _) => Stop::Event,
        (_, signal) if signal == libc::SIGTRAP | 0x80 => Stop::Call,
        (_, signal) => Stop::Signal(signal),
    }))
}

/// Waits until a traced thread stands still, at most until `until`; signals on the way are delivered.
///
/// # Errors
/// `TimedOut`; ESRCH when it has ended.
pub fn until_stopped(tid: u32, until: Instant) -> io::Result<Stop> {
    let began = Instant::now();
    loop {
        match look(tid)? {
            Found::Stopped(Stop::Signal(signal)) => run(tid, signal)?,
            Found::Stopped(stop) => return Ok(stop),
            Found::Ended => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
            Found::Runs if Instant::now() > until => return Err(io::ErrorKind::TimedOut.into()),
            // A stop takes some microseconds, unless the thread waits for something.
            Found::Runs if began.elapsed() < Duration::from_micros(300) => std::thread::yield_now(),
            Found::Runs => std::thread::sleep(Duration::from_micros(50)),
        }
    }
}

/// Whether registers are those of a 64-bit thread.
pub fn is_64_bit(registers: &[u64; GENERAL]) -> bool {
    registers[CS] == 0x33
}

/// Whether registers are those of a 64-bit thread that stands in a call which was broken off.
pub fn in_call(registers: &[u64; GENERAL]) -> bool {
    is_64_bit(registers) && registers[ORIG_RAX] as i64 >= 0
}

/// Puts a stopped thread back onto a call that ended with EINTR because of the stop; tells which call that was.
///
/// # Errors
/// ESRCH when it is not stopped, has died, or is not ours.
pub fn mend(tid: u32) -> io::Result<Option<u64>> {
    let mut registers = trace::get_general(tid)?;
    let broken = in_call(&registers) && registers[RAX] as i64 == -i64::from(libc::EINTR);
    if broken {
        registers[RAX] = registers[ORIG_RAX];
        registers[RIP] -= 2;
        trace::set_general(tid, &registers)?;
    }
    Ok(broken.then_some(registers[ORIG_RAX]))
}

/// Undoes [`mend`]: the call ends with EINTR after all, since a signal has come.
///
/// # Errors
/// As [`mend`].
pub fn unmend(tid: u32) -> io::Result<()> {
    let mut registers = trace::get_general(tid)?;
    if in_call(&registers) && registers[RAX] == registers[ORIG_RAX] {
        registers[RAX] = -i64::from(libc::EINTR) as u64;
        registers[RIP] += 2;
        trace::set_general(tid, &registers)?;
    }
    Ok(())
}

/// The signals that a stopped thread blocks, signal N as bit N - 1: ptrace(2) PTRACE_GETSIGMASK, Linux 3.11.
///
/// # Errors
/// ESRCH when it is not stopped, has died, or is not ours.
pub fn signal_mask(tid: u32) -> io::Result<u64> {
    let mut blocked = 0u64;
    // SAFETY: the third argument is the mask's size, and `blocked` lives through the call.
    match unsafe { libc::ptrace(libc::PTRACE_GETSIGMASK, number(tid)?, size_of::<u64>(), &raw mut blocked) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(blocked),
    }
}

/// A stopped thread that makes calls for us. Dropped without [`Hand::give_back`], it is given back all the same.
#[derive(Debug)]
pub struct Hand {
    tid: u32,
    saved: [u64; GENERAL],
    blocked: u64,
    syscall_at: u64,
    given_back: bool,
}

impl Hand {
    /// Takes a thread that stands in an event stop, outside of any critical section of rseq(2) at best. `syscall_at` is
    /// the address of a `syscall` instruction in it. Its seccomp filters are suspended.
    ///
    /// # Errors
    /// The kernel's; `Unsupported` for a 32-bit thread; EPERM when we lack CAP_SYS_ADMIN or have a filter ourselves.
    pub fn take(tid: u32, syscall_at: u64) -> io::Result<Self> {
        let saved = trace::get_general(tid)?;
        if saved[CS] != 0x33 {
            return Err(io::Error::new(io::ErrorKind::Unsupported, format!("thread {tid} runs 32-bit code")));
        }
        let blocked = signal_mask(tid)?;
        let options = SYSGOOD | libc::PTRACE_O_EXITKILL | libc::PTRACE_O_SUSPEND_SECCOMP;
        request(libc::PTRACE_SETOPTIONS, tid, options as usize)?;
        let hand = Self { tid, saved, blocked, syscall_at, given_back: false };
        trace::set_signal_mask(tid, u64::MAX)?;
        Ok(hand)
    }

    /// Makes one call.
    ///
    /// # Errors
    /// The call's own; ESRCH when the thread was killed; `TimedOut`.
    pub fn call(&self, call: i64, arguments: &[u64]) -> io::Result<u64> {
        let mut registers = self.saved;
        registers[RAX] = call as u64;
        registers[RIP] = self.syscall_at;
        registers[ORIG_RAX] = u64::MAX;
        for (index, register) in ARGUMENTS.into_iter().enumerate() {
            registers[register] = arguments.get(index).copied().unwrap_or(0);
        }
        trace::set_general(self.tid, &registers)?;
        self.step()?;
        self.step()?;
        let after = trace::get_general(self.tid)?;
        if after[RIP] != self.syscall_at + 2 {
            return Err(io::Error::other(format!("there is no syscall instruction at {:#x}", self.syscall_at)));
        }
        match after[RAX] as i64 {
            error @ -4095..=-1 => Err(io::Error::from_raw_os_error(-error as i32)),
            _ => Ok(after[RAX]),
        }
    }

    fn step(&self) -> io::Result<()> {
        let until = Instant::now() + LONGEST_CALL;
        loop {
            trace::to_call(self.tid, 0)?;
            // All signals are blocked, so what else stops it is an interruption.
            if until_stopped(self.tid, until)? == Stop::Call {
                return Ok(());
            }
        }
    }

    fn restore(&mut self) -> io::Result<()> {
        self.given_back = true;
        trace::set_general(self.tid, &self.saved)?;
        // Behind our last call it would go on with a restart code as its call's result: it must come to a stop where the
        // kernel looks for those.
        trace::interrupt(self.tid)?;
        run(self.tid, 0)?;
        while until_stopped(self.tid, Instant::now() + LONGEST_CALL)? != Stop::Event {
            run(self.tid, 0)?;
        }
        trace::set_signal_mask(self.tid, self.blocked)?;
        request(libc::PTRACE_SETOPTIONS, self.tid, SYSGOOD as usize)
    }

    /// Gives the thread its registers and mask back; it stands in an event stop as before.
    ///
    /// # Errors
    /// The kernel's.
    pub fn give_back(mut self) -> io::Result<()> {
        self.restore()
    }
}

impl Drop for Hand {
    fn drop(&mut self) {
        if !self.given_back {
            // What fails here fails because the thread has died.
            let _ = self.restore();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    /// A child that waits in read(2) until its input is closed.
    fn cat() -> Child {
        let child = Command::new("/bin/cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        while !std::fs::read_to_string(format!("/proc/{}/syscall", child.id())).unwrap().starts_with("0 0x0 ") {
            std::thread::yield_now();
        }
        child
    }

    fn syscall_at(pid: u32) -> u64 {
        use std::os::unix::fs::FileExt as _;
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        let line = maps.lines().find(|line| line.ends_with("[vdso]")).unwrap();
        let start = u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
        let mut image = [0u8; 4096];
        let memory = std::fs::File::open(format!("/proc/{pid}/mem")).unwrap();
        memory.read_exact_at(&mut image, start).unwrap();
        start + image.windows(2).position(|pair| pair == [0x0f, 0x05]).unwrap() as u64
    }

    #[test]
    fn a_thread_makes_calls_for_us_and_reads_on() {
        let mut child = cat();
        let tid = child.id();
        seize(tid).unwrap();
        assert_eq!(look(tid).unwrap(), Found::Runs);
        trace::interrupt(tid).unwrap();
        let until = Instant::now() + Duration::from_secs(5);
        assert_eq!(until_stopped(tid, until).unwrap(), Stop::Event);
        assert_eq!(mend(tid).unwrap(), None, "the kernel restarts a read by itself");
        let before = (trace::get_general(tid).unwrap(), signal_mask(tid).unwrap());
        let hand = Hand::take(tid, syscall_at(tid)).unwrap();
        assert_eq!(hand.call(libc::SYS_getpid, &[]).unwrap(), u64::from(tid));
        let error = hand.call(libc::SYS_close, &[9999]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
        hand.give_back().unwrap();
        assert_eq!((trace::get_general(tid).unwrap(), signal_mask(tid).unwrap()), before);
        trace::detach(tid).unwrap();
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
    }

    #[test]
    fn the_end_of_the_tracer_lets_it_run_on() {
        let mut child = cat();
        let tid = child.id();
        std::thread::spawn(move || {
            seize(tid).unwrap();
            trace::interrupt(tid).unwrap();
            until_stopped(tid, Instant::now() + Duration::from_secs(5)).unwrap();
        })
        .join()
        .unwrap();
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
    }
}
