//! A running process taken in hand: its threads stopped one by one without waiting, and system
//! calls made by one of them. ptrace(2), x86_64 only; the rules of [`crate::trace`] about the
//! tracing thread hold here too.
//!
//! What a thread sees of it: nothing. A call that the interruption broke off with one of the
//! kernel's restart codes is restarted by the kernel itself, because the last stop before it runs
//! on is always one where it does so. A call that ended with a plain EINTR (epoll_wait, a receive
//! with SO_RCVTIMEO, semop) is put back by [`mend`].
//!
//! Unlike [`crate::trace::seize`], [`seize`] lets the threads run on when the tracer dies: their
//! registers are their own, or, while a [`Hand`] holds one, lead back to them ([`crate::stub`]).
//! Only where its process must not run on without us ([`Hand::survives`]) does the tracer's death
//! kill it.

use crate::restart;
use crate::rseq;
use crate::stub::{self, Stub};
use crate::trace::{self, GENERAL, Stop};
pub use crate::trace::{in_call, is_64_bit};
use std::cell::Cell;
use std::io;
use std::time::{Duration, Instant};

const RAX: usize = 10;
const ORIG_RAX: usize = 15;
const RIP: usize = 16;
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
/// EPERM when the thread is traced already or we may not trace it, ESRCH.
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
pub enum StopStatus {
    /// Not yet anything.
    Runs,
    /// It stands still.
    Stopped(Stop),
    /// It has ended.
    Ended,
}

/// Reports whether a traced thread stands still, without waiting: waitpid(2) with __WALL and
/// WNOHANG.
///
/// # Errors
/// EINVAL. A thread that is not ours counts as ended.
pub fn poll_stop(tid: u32) -> io::Result<StopStatus> {
    let mut status = 0;
    // SAFETY: `status` lives through the call.
    match unsafe { libc::waitpid(number(tid)?, &mut status, libc::__WALL | libc::WNOHANG) } {
        0 => return Ok(StopStatus::Runs),
        -1 => {
            let e = io::Error::last_os_error();
            return if e.raw_os_error() == Some(libc::ECHILD) { Ok(StopStatus::Ended) } else { Err(e) };
        }
        _ if !libc::WIFSTOPPED(status) => return Ok(StopStatus::Ended),
        _ => {}
    }
    Ok(StopStatus::Stopped(match (status >> 16, libc::WSTOPSIG(status)) {
        (libc::PTRACE_EVENT_STOP, _) => Stop::Event,
        (_, signal) if signal == libc::SIGTRAP | 0x80 => Stop::Call,
        (_, signal) => Stop::Signal(signal),
    }))
}

/// Waits until a traced thread stands still, at most until `until`; signals on the way are
/// delivered.
///
/// # Errors
/// `TimedOut`; ESRCH when it has ended.
pub fn until_stopped(tid: u32, until: Instant) -> io::Result<Stop> {
    let began = Instant::now();
    loop {
        match poll_stop(tid)? {
            StopStatus::Stopped(Stop::Signal(signal)) => run(tid, signal)?,
            StopStatus::Stopped(stop) => return Ok(stop),
            StopStatus::Ended => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
            StopStatus::Runs if Instant::now() > until => return Err(io::ErrorKind::TimedOut.into()),
            // A stop takes some microseconds, unless the thread waits for something.
            StopStatus::Runs if began.elapsed() < Duration::from_micros(300) => std::thread::yield_now(),
            StopStatus::Runs => std::thread::sleep(Duration::from_micros(50)),
        }
    }
}

/// Puts a stopped thread back onto a call that ended with EINTR because of the stop; tells which
/// call that was.
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

/// The signals that a stopped thread blocks, signal N as bit N - 1: ptrace(2) PTRACE_GETSIGMASK,
/// Linux 3.11.
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

/// How far a thread is with a call of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// With none: it stands still.
    Still,
    /// It runs up to the call.
    Entering,
    /// It stands where the call begins.
    Entered,
    /// It is in the call.
    Inside,
}

/// A stopped thread that makes calls for us. Dropped without [`Hand::give_back`], it is given back
/// all the same, however long that takes: a thread must never run on with registers of ours.
#[derive(Debug)]
pub struct Hand {
    tid: u32,
    saved: [u64; GENERAL],
    blocked: u64,
    syscall_at: u64,
    /// Where it goes on by itself if we die.
    stub: Option<Stub>,
    phase: Cell<Phase>,
    given_back: bool,
}

impl Hand {
    /// Takes a thread that stands in an event stop, of a process whose vdso begins at `vdso`. Its
    /// seccomp filters are suspended. If it stands in a critical section of rseq(2), it is taken to
    /// have been interrupted there, and goes on where that section says.
    ///
    /// # Errors
    /// The kernel's; `Unsupported` for a 32-bit thread or a vdso without calls; EPERM when we lack
    /// CAP_SYS_ADMIN or have a filter ourselves. The thread is as it was.
    pub fn take(tid: u32, vdso: u64) -> io::Result<Self> {
        let mut saved = trace::get_general(tid)?;
        if !is_64_bit(&saved) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, format!("thread {tid} runs 32-bit code")));
        }
        if let Some(abort) = rseq::abort_of(tid, saved[RIP])? {
            saved[RIP] = abort;
        }
        let blocked = signal_mask(tid)?;
        let stub = Stub::write(tid, vdso, &going_on(&saved), blocked);
        let no_call = || io::Error::new(io::ErrorKind::Unsupported, "the vdso has no syscall instruction");
        let syscall_at = match stub {
            Some(stub) => stub.call,
            None => vdso + stub::syscall_offset().ok_or_else(no_call)?,
        };
        let phase = Cell::new(Phase::Still);
        let hand = Self { tid, saved, blocked, syscall_at, stub, phase, given_back: false };
        // In this order: whenever we die the thread has its own mask, or is where it gets it back.
        if let Some(stub) = stub {
            trace::set_general(tid, &hand.standing_at(stub.back()))?;
        }
        hand.survives(true)?;
        trace::set_signal_mask(tid, u64::MAX)?;
        Ok(hand)
    }

    /// Whether its process survives our death from now on. Without a stub ([`crate::stub`]) it
    /// never does. The thread must stand still.
    ///
    /// # Errors
    /// ESRCH.
    pub fn survives(&self, survives: bool) -> io::Result<()> {
        let kill = if survives && self.stub.is_some() { 0 } else { libc::PTRACE_O_EXITKILL };
        request(libc::PTRACE_SETOPTIONS, self.tid, (SYSGOOD | libc::PTRACE_O_SUSPEND_SECCOMP | kill) as usize)
    }

    /// Its own registers, but there, and in no call.
    fn standing_at(&self, at: u64) -> [u64; GENERAL] {
        let mut registers = self.saved;
        registers[RIP] = at;
        registers[ORIG_RAX] = u64::MAX;
        registers
    }

    /// Makes one call.
    ///
    /// # Errors
    /// The call's own; ESRCH when the thread was killed; `TimedOut` when it did not return in time:
    /// it may still be made, until the hand is used again or given back.
    pub fn call(&self, call: i64, arguments: &[u64]) -> io::Result<u64> {
        self.enter(arguments)?;
        self.leave(call, Some(LONGEST_CALL))
    }

    /// Brings the thread to the beginning of a call with these arguments, which [`Hand::leave`]
    /// makes. Unless it does, and if we die before, the thread makes none but getpid(2).
    ///
    /// # Errors
    /// ESRCH when the thread was killed; `TimedOut` when it does not come to run.
    pub fn enter(&self, arguments: &[u64]) -> io::Result<()> {
        self.be_still()?;
        let mut registers = self.standing_at(self.syscall_at);
        registers[RAX] = libc::SYS_getpid as u64;
        for (index, register) in ARGUMENTS.into_iter().enumerate() {
            registers[register] = arguments.get(index).copied().unwrap_or(0);
        }
        trace::set_general(self.tid, &registers)?;
        self.phase.set(Phase::Entering);
        self.step(Some(LONGEST_CALL))?;
        self.phase.set(Phase::Entered);
        Ok(())
    }

    /// Makes this call where one was entered, waiting without a limit if there is none.
    ///
    /// # Errors
    /// As [`Hand::call`].
    pub fn leave(&self, call: i64, limit: Option<Duration>) -> io::Result<u64> {
        let mut registers = trace::get_general(self.tid)?;
        if registers[RIP] != self.syscall_at + 2 || registers[ORIG_RAX] != libc::SYS_getpid as u64 {
            return Err(io::Error::other(format!("there is no syscall instruction at {:#x}", self.syscall_at)));
        }
        registers[ORIG_RAX] = call as u64;
        trace::set_general(self.tid, &registers)?;
        self.phase.set(Phase::Inside);
        self.step(limit)?;
        self.phase.set(Phase::Still);
        let after = trace::get_general(self.tid)?;
        match after[RAX] as i64 {
            error @ -4095..=-1 => Err(io::Error::from_raw_os_error(-error as i32)),
            _ => Ok(after[RAX]),
        }
    }

    fn step(&self, limit: Option<Duration>) -> io::Result<()> {
        let until = limit.map(|limit| Instant::now() + limit);
        loop {
            trace::to_call(self.tid, 0)?;
            let stop = match until {
                Some(until) => until_stopped(self.tid, until).map_err(|e| self.late(e))?,
                None => trace::wait_stopped(self.tid)?,
            };
            // All signals are blocked, so what else stops it is an interruption.
            if stop == Stop::Call {
                return Ok(());
            }
        }
    }

    fn late(&self, error: io::Error) -> io::Error {
        if error.kind() != io::ErrorKind::TimedOut {
            return error;
        }
        let seconds = LONGEST_CALL.as_secs();
        let what = format!(
            "thread {} did not come through a call of ours within {seconds} s: it gets no processor time, or the kernel no memory",
            self.tid
        );
        io::Error::new(error.kind(), what)
    }

    /// Waits until a thread that runs for us stands still, without a limit. A call that it has not
    /// begun is not made.
    fn be_still(&self) -> io::Result<()> {
        let phase = self.phase.get();
        let mut at_the_beginning = phase == Phase::Entered;
        if matches!(phase, Phase::Entering | Phase::Inside) {
            trace::interrupt(self.tid)?;
            loop {
                match trace::wait_stopped(self.tid)? {
                    Stop::Call => {
                        at_the_beginning = phase == Phase::Entering;
                        break;
                    }
                    Stop::Event => break,
                    Stop::Signal(_) => run(self.tid, 0)?,
                }
            }
        }
        if at_the_beginning {
            // With no number the kernel makes no call.
            let nowhere = self.stub.map_or(self.syscall_at + 2, Stub::back);
            trace::set_general(self.tid, &self.standing_at(nowhere))?;
            self.phase.set(Phase::Inside);
            self.step(None)?;
        }
        self.phase.set(Phase::Still);
        Ok(())
    }

    fn restore(&mut self) -> io::Result<()> {
        self.given_back = true;
        self.be_still()?;
        // The mask first, see `take`.
        trace::set_signal_mask(self.tid, self.blocked)?;
        trace::set_general(self.tid, &self.saved)?;
        request(libc::PTRACE_SETOPTIONS, self.tid, SYSGOOD as usize)?;
        // Behind our last call it would go on with a restart code as its call's result: it must
        // come to a stop where the kernel looks for those.
        trace::interrupt(self.tid)?;
        let mut signal = 0;
        loop {
            run(self.tid, signal)?;
            signal = match trace::wait_stopped(self.tid)? {
                Stop::Event => return Ok(()),
                Stop::Call => 0,
                Stop::Signal(signal) => {
                    // It is delivered before the call would begin anew.
                    restart::leave_to_kernel(self.tid, false)?;
                    signal
                }
            };
        }
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

/// The registers that a thread which stands in a broken-off call goes on with where the kernel does
/// not begin that call anew: it makes the call once more itself.
fn going_on(registers: &[u64; GENERAL]) -> [u64; GENERAL] {
    const RESTART_SYSCALL: u64 = 219;
    let mut registers = *registers;
    let call = match registers[RAX] as i64 {
        _ if !in_call(&registers) => None,
        -514..=-512 => Some(registers[ORIG_RAX]),
        -516 => Some(RESTART_SYSCALL),
        _ => None,
    };
    if let Some(call) = call {
        registers[RAX] = call;
        registers[RIP] -= 2;
    }
    registers
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

    fn take(tid: u32) -> Hand {
        Hand::take(tid, stub::vdso_of(tid).unwrap()).unwrap()
    }

    fn stop(tid: u32) {
        seize(tid).unwrap();
        trace::interrupt(tid).unwrap();
        assert_eq!(until_stopped(tid, Instant::now() + Duration::from_secs(5)).unwrap(), Stop::Event);
    }

    fn blocked(tid: u32) -> String {
        let status = std::fs::read_to_string(format!("/proc/{tid}/status")).unwrap();
        status.lines().find(|line| line.starts_with("SigBlk:")).unwrap().to_owned()
    }

    #[test]
    fn a_thread_makes_calls_for_us_and_reads_on() {
        let mut child = cat();
        let tid = child.id();
        seize(tid).unwrap();
        assert_eq!(poll_stop(tid).unwrap(), StopStatus::Runs);
        trace::interrupt(tid).unwrap();
        let until = Instant::now() + Duration::from_secs(5);
        assert_eq!(until_stopped(tid, until).unwrap(), Stop::Event);
        assert_eq!(mend(tid).unwrap(), None, "the kernel restarts a read by itself");
        let before = (trace::get_general(tid).unwrap(), signal_mask(tid).unwrap());
        let hand = take(tid);
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

    // promise hibernation: a thread that makes calls for the pager gets back to its own, with its
    //   mask, when the pager ends at any moment of one, and when a call does not return in time
    // held by: this, `kip_sys::inject::tests::a_call_that_is_not_begun_in_time_is_not_made`
    /// The tracer's end at every moment of a call: before it, where it begins, in it (it is still
    /// to run when the tracer ends), and after it. Each time the thread must be back in its read,
    /// with its own mask.
    #[test]
    fn the_end_of_the_tracer_in_a_call_gives_the_thread_back() {
        for moment in 0..5 {
            let mut child = cat();
            let tid = child.id();
            std::thread::spawn(move || {
                stop(tid);
                let hand = take(tid);
                assert!(hand.stub.is_some(), "the vdso has room");
                match moment {
                    0 => {}
                    1 => hand.enter(&[]).unwrap(),
                    2 => {
                        hand.enter(&[]).unwrap();
                        hand.leave(libc::SYS_getppid, None).unwrap();
                        hand.enter(&[]).unwrap();
                        trace::to_call(tid, 0).unwrap();
                    }
                    3 => drop(hand.call(libc::SYS_getpid, &[]).unwrap()),
                    _ => {
                        hand.enter(&[]).unwrap();
                        assert_eq!(hand.call(libc::SYS_getpid, &[]).unwrap(), u64::from(tid), "another one instead");
                    }
                }
                std::mem::forget(hand);
            })
            .join()
            .unwrap();
            let reads = || std::fs::read_to_string(format!("/proc/{tid}/syscall")).unwrap().starts_with("0 0x0 ");
            while !reads() {
                assert!(child.try_wait().unwrap().is_none(), "it has ended, moment {moment}");
                std::thread::yield_now();
            }
            assert_eq!(blocked(tid), "SigBlk:\t0000000000000000", "moment {moment}");
            drop(child.stdin.take());
            assert!(child.wait().unwrap().success(), "moment {moment}");
        }
    }

    #[test]
    fn where_it_must_not_survive_it_does_not() {
        use std::os::unix::process::ExitStatusExt as _;
        let mut child = cat();
        let tid = child.id();
        std::thread::spawn(move || {
            stop(tid);
            let hand = take(tid);
            hand.survives(false).unwrap();
            std::mem::forget(hand);
        })
        .join()
        .unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
    }

    /// A thread that gets no processor is given back whole, in the end: the call that it was to
    /// make is not made.
    #[test]
    fn a_call_that_is_not_begun_in_time_is_not_made() {
        let mut child = cat();
        let tid = child.id();
        stop(tid);
        let before = (trace::get_general(tid).unwrap(), signal_mask(tid).unwrap());
        for phase in [Phase::Entering, Phase::Inside] {
            let hand = take(tid);
            if phase == Phase::Inside {
                hand.enter(&[]).unwrap();
            } else {
                let mut registers = hand.standing_at(hand.syscall_at);
                registers[RAX] = libc::SYS_exit_group as u64;
                trace::set_general(tid, &registers).unwrap();
            }
            // As after a time-out: it runs and nothing is known of it.
            trace::to_call(tid, 0).unwrap();
            hand.phase.set(phase);
            drop(hand);
            assert_eq!((trace::get_general(tid).unwrap(), signal_mask(tid).unwrap()), before, "{phase:?}");
        }
        trace::detach(tid).unwrap();
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
    }
}
