//! Whole processes brought to a stop, all of their threads, and let go again without having
//! noticed.
//!
//! A thread that waits for a missing page stops only when the page has come, so faults must be
//! served by other threads meanwhile. Traces belong to the calling thread: [`Stopped`] cannot leave
//! it, and if the thread ends, everything runs on. A thread that does not stop in time (it waits in
//! vfork(2), or for a device) makes [`stop`] give up and let all go.

use crate::timeouts;
use kip_sys::armed::Armed;
use kip_sys::ends::End;
use kip_sys::inject::{self, Hand};
use kip_sys::restart;
use kip_sys::shortened;
use kip_sys::status::{Status, has_ended, is_init, threads};
use kip_sys::stub::vdso_of;
use kip_sys::trace::{self, Stop};
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::marker::PhantomData;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long to wait before each further try to find processes quiescent.
const QUIESCENT_AFTER: [Duration; 4] =
    [Duration::from_millis(1), Duration::from_millis(2), Duration::from_millis(5), Duration::from_millis(10)];

/// How long to wait for threads that are to be let go and have not stopped yet. One that waits in
/// vfork(2), or for a device, does not.
const LET_GO_WITHIN: Duration = Duration::from_secs(1);
/// How much longer to wait for one that only needs a processor: it will stop.
const PROCESSOR_WITHIN: Duration = Duration::from_secs(5);

/// How long to wait until sockets have their own time-outs back: as long as their threads take to
/// be in their calls again.
const GIVEN_BACK_WITHIN: Duration = Duration::from_millis(50);
/// Between looks.
const GIVEN_BACK_EVERY: Duration = Duration::from_micros(500);

/// Why processes do not stop.
#[derive(Debug, thiserror::Error)]
pub enum StopError {
    /// A thread cannot be traced or looked at.
    #[error("thread {tid} of process {pid} cannot be stopped")]
    Thread {
        /// Its process.
        pid: u32,
        /// Itself.
        tid: u32,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The processes cannot be listed.
    #[error("the processes to stop cannot be listed")]
    List(#[source] io::Error),
    /// New threads or processes came faster than they were stopped, or the processors had no time
    /// for it.
    #[error("its threads could not be stopped in time: new ones came all the while, or the processors are too busy")]
    Unstable,
}

/// A process all of whose threads stand still.
#[derive(Debug)]
pub struct StoppedProcess {
    /// Its id.
    pub pid: u32,
    /// Its threads.
    pub threads: Vec<u32>,
    /// Those that were put back onto a call that had ended with EINTR.
    mended: Vec<u32>,
    /// When the calls of those end that have a relative time-out which the kernel does not update.
    ends: HashMap<u32, End>,
    /// The signal of its interval timer waited before, and nothing took it.
    pub alarmed: bool,
}

/// Processes that stand still; dropped, they run on.
#[derive(Debug)]
pub struct Stopped {
    /// By id.
    pub processes: BTreeMap<u32, StoppedProcess>,
    /// When the first of them may have been stopped.
    pub began: Instant,
    /// Threads that waited in a call with a relative time-out, and since when.
    since: timeouts::Since,
    /// How often each thread that slept before had left a processor by then.
    slept: HashMap<u32, u64>,
    /// Threads that a signal had stopped before, signal(7).
    halted: HashSet<u32>,
    /// Threads that were asked to stop, of which it is not known yet that they have.
    asked: HashSet<u32>,
    /// When all of them had stopped: what is reckoned from here is never early. None while some may
    /// run.
    at: Option<Instant>,
    /// When the packet came for which they are let go, nanoseconds of CLOCK_MONOTONIC.
    packet_ns: Option<i64>,
    /// Threads that give sockets their own time-outs back.
    giving: Vec<JoinHandle<()>>,
    _here: PhantomData<*const ()>,
}

/// Whether a process could not be looked at because it is no more.
pub fn ended(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || Errno::from_io_error(error) == Some(Errno::SRCH)
}

/// Stops all threads of all processes that `list` tells, until nothing new comes. Processes that
/// end are left out.
///
/// # Errors
/// See [`StopError`]; all run on then.
pub fn stop(mut list: impl FnMut() -> io::Result<Vec<u32>>, until: Instant) -> Result<Stopped, StopError> {
    let mut stopped = Stopped::none();
    let before = list().map_err(StopError::List)?;
    let alarmed: Vec<u32> = before.iter().copied().filter(|pid| is_alarmed(*pid)).collect();
    (stopped.slept, stopped.halted) = sleepers(&before);
    stopped.since = timeouts::since(&before);
    loop {
        let mut fresh = Vec::new();
        for pid in list().map_err(StopError::List)? {
            // A process that has just ended has no threads.
            for tid in threads(pid).unwrap_or_default() {
                let process = stopped
                    .processes
                    .entry(pid)
                    .or_insert_with(|| StoppedProcess { alarmed: alarmed.contains(&pid), ..StoppedProcess::of(pid) });
                if !process.threads.contains(&tid) && seize(pid, tid)? {
                    process.threads.push(tid);
                    stopped.asked.insert(tid);
                    fresh.push((pid, tid));
                }
            }
        }
        if fresh.is_empty() {
            stopped.processes.retain(|_, process| !process.threads.is_empty());
            stopped.at = Some(Instant::now());
            return Ok(stopped);
        }
        if Instant::now() > until {
            return Err(StopError::Unstable);
        }
        for (pid, tid) in fresh {
            stopped.wait(pid, tid, until, None).map_err(|source| StopError::Thread { pid, tid, source })?;
        }
    }
}

/// Looks for threads of which the kernel does not say since when they wait, because it moved them
/// to another CPU while they were about to sleep. Each is stopped and let go alone, so that its
/// timer is the one that is gone; its call goes on with a record of its end. Faults must be served
/// by other threads.
///
/// # Errors
/// See [`StopError`]; all run on.
pub fn find_ends(pids: &[u32], until: Instant) -> Result<(), StopError> {
    find_ends_of(pids, until, kip_sys::ran::is_undated)
}

/// Gives each wait that ends by a time-out a record of its end ([`kip_sys::ends`]). A call that is
/// broken off from outside and begun anew, as by a dump that is called off, takes the whole time
/// again; with a record the next stop has it end when it would have ended. So it is to be called
/// before and after. A program with system call filters of its own keeps its calls as they are.
///
/// # Errors
/// See [`StopError`]; all run on.
pub fn note_ends(pids: &[u32], until: Instant) -> Result<(), StopError> {
    let pids: Vec<u32> = pids.iter().copied().filter(|pid| !timeouts::has_own_filters(*pid)).collect();
    let stopped = stop(|| Ok(pids.clone()), until)?;
    stopped.go_and_give_back(GIVEN_BACK_WITHIN);
    Ok(())
}

fn find_ends_of(pids: &[u32], until: Instant, is_unknown: impl Fn(u32) -> bool) -> Result<(), StopError> {
    for pid in pids {
        for tid in threads(*pid).unwrap_or_default().into_iter().filter(|tid| is_unknown(*tid)) {
            let mut stopped = Stopped::none();
            let before = timeouts::before(tid);
            stopped.since.extend(before.map(|before| (tid, before)));
            let armed = Armed::now();
            if seize(*pid, tid)? {
                let process = StoppedProcess { threads: vec![tid], ..StoppedProcess::of(*pid) };
                stopped.processes.insert(*pid, process);
                stopped.asked.insert(tid);
                let failed = |source| StopError::Thread { pid: *pid, tid, source };
                stopped.wait(*pid, tid, until, Some(&armed)).map_err(failed)?;
            }
        }
    }
    Ok(())
}

/// As [`stop`], but tries again for a moment while not all of them were quiescent. Reports whether
/// they are now.
///
/// # Errors
/// As [`stop`].
pub fn stop_quiescent(
    mut list: impl FnMut() -> io::Result<Vec<u32>>,
    within: Duration,
) -> Result<(Stopped, bool), StopError> {
    for pause in QUIESCENT_AFTER {
        let stopped = stop(&mut list, Instant::now() + within)?;
        if stopped.was_quiescent() {
            return Ok((stopped, true));
        }
        stopped.go();
        std::thread::sleep(pause);
    }
    let stopped = stop(&mut list, Instant::now() + within)?;
    let quiescent = stopped.was_quiescent();
    Ok((stopped, quiescent))
}

/// Threads that sleep or are stopped by a signal, and how often each has left a processor; and
/// which of them are stopped.
fn sleepers(pids: &[u32]) -> (HashMap<u32, u64>, HashSet<u32>) {
    let (mut slept, mut halted) = (HashMap::new(), HashSet::new());
    for tid in pids.iter().flat_map(|pid| threads(*pid).unwrap_or_default()) {
        let status = Status::read(tid).unwrap_or_default();
        if let Some(left) = status.switches().filter(|_| status.is_asleep() || status.is_halted()) {
            slept.insert(tid, left);
            halted.extend(status.is_halted().then_some(tid));
        }
    }
    (slept, halted)
}

/// Whether a stopped thread that slept when it had left a processor so often has run for nothing
/// but to stop since.
fn slept_through(before: Option<&u64>, tid: u32) -> bool {
    let now = || Status::read(tid).ok()?.switches();
    before.is_some_and(|before| now().is_some_and(|now| now <= before + 1))
}

/// Whether a stopped thread that had waited so often before has waited for nothing since but in its
/// stop. On a busy machine the processor may have been taken away from it on the way.
fn waited_no_more(tid: u32, before: u64) -> bool {
    Status::read(tid).is_ok_and(|status| status.waits().is_some_and(|now| now <= before + 1))
}

/// Whether the signal of a process's interval timer waits: SIGALRM.
fn is_alarmed(pid: u32) -> bool {
    const ALARM: u64 = 1 << 13;
    Status::read(pid).is_ok_and(|status| status.signals("ShdPnd:") & ALARM != 0)
}

/// Begins to stop a thread; not so if it has ended.
fn seize(pid: u32, tid: u32) -> Result<bool, StopError> {
    // A thread that is just ending is refused like one that another process traces, for some
    // microseconds.
    let until = Instant::now() + std::time::Duration::from_millis(20);
    loop {
        match inject::seize(tid).and_then(|()| trace::interrupt(tid)) {
            Ok(()) => return Ok(true),
            Err(e) if ended(&e) || has_ended(pid, tid) => return Ok(false),
            Err(source) if Instant::now() > until => return Err(StopError::Thread { pid, tid, source }),
            Err(_) => std::thread::yield_now(),
        }
    }
}

impl Stopped {
    fn none() -> Stopped {
        let now = Instant::now();
        Stopped {
            processes: BTreeMap::new(),
            began: now,
            since: timeouts::Since::new(),
            slept: HashMap::new(),
            halted: HashSet::new(),
            asked: HashSet::new(),
            at: None,
            packet_ns: None,
            giving: Vec::new(),
            _here: PhantomData,
        }
    }

    /// Waits until a thread that was asked to stop has. `armed`: see [`timeouts::end`].
    fn wait(&mut self, pid: u32, tid: u32, until: Instant, armed: Option<&Armed>) -> io::Result<()> {
        let process = self.processes.get_mut(&pid).expect("its threads have just been added");
        let result = loop {
            match inject::until_stopped(tid, until) {
                Ok(Stop::Event) => break inject::mend(tid),
                Ok(_) => inject::run(tid, 0)?,
                Err(e) => break Err(e),
            }
        };
        match result {
            Ok(mended) => {
                self.asked.remove(&tid);
                let before = self.since.get(&tid).filter(|before| waited_no_more(tid, before.waits)).copied();
                // What fails here fails because it has died, or has no time-out that the kernel
                // could read.
                if let Ok(Some(end)) = timeouts::end(tid, mended.is_some(), before, armed) {
                    process.ends.insert(tid, end);
                    if mended.is_some() {
                        // At once: if we die it does not wait its whole time anew.
                        let _ = timeouts::begin_anew(tid, end, None);
                    }
                }
                process.mended.extend(mended.map(|_| tid));
            }
            Err(e) if ended(&e) => {
                self.asked.remove(&tid);
                process.threads.retain(|t| *t != tid);
            }
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// Whether all of it slept, in calls that go on, or was stopped by a signal, and nothing has
    /// run but to stop. Of any other thread the pager cannot tell what it was about to do: it may
    /// have made what another waits for, between the stops of the two.
    pub fn was_quiescent(&self) -> bool {
        self.processes.values().flat_map(|process| &process.threads).all(|tid| {
            slept_through(self.slept.get(tid), *tid)
                && (self.halted.contains(tid)
                    || trace::get_general(*tid).is_ok_and(|registers| inject::in_call(&registers)))
        })
    }

    /// Whether no thread has run but to stop since each of them had left a processor so often:
    /// `slept`, by thread. A thread that `slept` does not know has run.
    pub fn slept_since(&self, slept: &HashMap<u32, u64>) -> bool {
        self.processes.values().flat_map(|process| &process.threads).all(|tid| slept_through(slept.get(tid), *tid))
    }

    /// Looks after processes that have been killed: no other process may, as long as we trace them.
    pub fn bury(&mut self) {
        for process in self.processes.values_mut() {
            process.threads.retain(|tid| !matches!(inject::poll_stop(*tid), Ok(inject::StopStatus::Ended)));
        }
        self.processes.retain(|_, process| !process.threads.is_empty());
    }

    /// Those whose ends have to be watched so that none is missed: all but pid 1 of a sandbox, with
    /// whose end the kernel kills the others; pid 1 only when no other process is left.
    pub fn mortal(&self) -> Vec<u32> {
        let others: Vec<u32> = self.processes.keys().filter(|pid| !is_init(**pid)).copied().collect();
        if others.is_empty() { self.processes.keys().copied().collect() } else { others }
    }

    /// Lets all run.
    pub fn go(self) {}

    /// Lets all run, and waits until the sockets in whose calls threads stood have their own
    /// time-outs back, but for `within` at most.
    fn go_and_give_back(mut self, within: Duration) {
        self.release();
        let until = Instant::now() + within;
        while self.giving.iter().any(|thread| !thread.is_finished()) && Instant::now() < until {
            std::thread::sleep(GIVEN_BACK_EVERY);
        }
    }

    /// Lets them go for a packet that came then.
    pub fn go_for_packet(mut self, came: Instant) {
        self.packet_ns = Some(kip_sys::ran::monotonic_ns() - came.elapsed().as_nanos() as i64);
    }

    /// Has a stopped thread go on with the call that it stood in, or end it. What fails here fails
    /// because it has died.
    fn make_ready(&self, process: &StoppedProcess, tid: u32) {
        let mended = process.mended.contains(&tid);
        match process.ends.get(&tid) {
            Some(end) => drop(timeouts::begin_anew(tid, *end, self.packet_ns)),
            None if mended => {}
            None => {
                let _ = timeouts::make_again(tid);
                let ns = self.at.map_or(0, |at| at.elapsed().as_nanos() as i64);
                let _ = timeouts::stood_still(process.pid, tid, ns);
            }
        }
        let _ = restart::leave_to_kernel(tid, mended);
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        if self.asked.is_empty() {
            return self.release();
        }
        let asked = self.take_asked();
        self.release();
        // The stop was given up before these had stopped: each has to be put back onto its call
        // like all others.
        self.processes = asked;
        let all = self.processes.values().flat_map(|process| process.threads.iter().map(|tid| (process.pid, *tid)));
        let until = Instant::now() + LET_GO_WITHIN;
        for (pid, tid) in all.collect::<Vec<_>>() {
            let late = self.wait(pid, tid, until, None).is_err_and(|error| error.kind() == io::ErrorKind::TimedOut);
            if late && Status::read(tid).is_ok_and(|status| status.is_runnable()) {
                let _ = self.wait(pid, tid, until + PROCESSOR_WITHIN, None);
            }
        }
        self.release();
    }
}

impl Stopped {
    /// Takes out the threads that were asked to stop and may not have.
    fn take_asked(&mut self) -> BTreeMap<u32, StoppedProcess> {
        let mut taken = BTreeMap::new();
        for (pid, process) in &mut self.processes {
            let (threads, stopped): (Vec<u32>, _) = process.threads.iter().partition(|tid| self.asked.contains(tid));
            process.threads = stopped;
            if !threads.is_empty() {
                taken.insert(*pid, StoppedProcess { threads, ..StoppedProcess::of(*pid) });
            }
        }
        taken
    }

    /// Lets all threads go that are listed.
    fn release(&mut self) {
        let mut until = None;
        let processes = std::mem::take(&mut self.processes);
        let mut ends: Vec<(u32, End)> = processes.values().flat_map(|process| process.ends.clone()).collect();
        // What is left is reckoned when the pages that this needs are there: one that is brought in
        // between makes the wait longer.
        ends.iter().for_each(|(tid, _)| timeouts::fetch_for_call(*tid));
        // Before any of them runs; of those that share one, the last to end is the one that it must
        // not be too short for.
        ends.sort_by_key(|(_, end)| end.at_ns);
        let mut shortened = HashMap::new();
        for (tid, end) in ends {
            if let Ok(Some(one)) = timeouts::shorten_socket(tid, end) {
                shortened.insert(one.shares(), one);
            }
        }
        for process in processes.into_values() {
            for &tid in &process.threads {
                self.make_ready(&process, tid);
                if trace::detach(tid).is_err() {
                    let_go(tid, *until.get_or_insert_with(|| Instant::now() + LET_GO_WITHIN));
                }
            }
        }
        let complain =
            |error: &io::Error| tracing::warn!(%error, "a socket keeps a time-out that was meant for one call");
        let giving = shortened::give_back(shortened.into_values().collect(), complain);
        self.giving.extend(giving);
    }
}

/// A thread that has not stopped yet, or has died. One that gets no processor for so long is let go
/// when our thread ends.
fn let_go(tid: u32, until: Instant) {
    while let Ok(found) = inject::poll_stop(tid) {
        match found {
            inject::StopStatus::Ended => return,
            inject::StopStatus::Stopped(_) if trace::detach(tid).is_ok() => return,
            _ if Instant::now() > until => {
                return tracing::info!(tid, "a thread that has not stopped yet is let go later");
            }
            _ => std::thread::yield_now(),
        }
    }
}

impl StoppedProcess {
    fn of(pid: u32) -> StoppedProcess {
        StoppedProcess { pid, threads: Vec::new(), mended: Vec::new(), ends: HashMap::new(), alarmed: false }
    }

    /// A thread that makes calls for us: one that stands in a call if there is one, for it is in no
    /// critical section of rseq(2), which it would have to leave by its abort address.
    ///
    /// # Errors
    /// As [`Hand::take`].
    pub fn hand(&self) -> io::Result<Hand> {
        let vdso = vdso_of(self.pid)?;
        let idle = |tid: &&u32| trace::get_general(**tid).is_ok_and(|registers| inject::in_call(&registers));
        let first = self.threads.iter().find(idle).into_iter().chain(&self.threads);
        let mut last = io::Error::from(Errno::SRCH);
        for tid in first {
            match Hand::take(*tid, vdso) {
                Ok(hand) => return Ok(hand),
                // Another may still live.
                Err(e) => last = e,
            }
        }
        Err(last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    /// A wait of 2 s, which is looked for when a part of it has passed, and of which only its timer
    /// tells when it began.
    #[test]
    fn a_wait_whose_beginning_is_not_known_ends_when_its_timer_says() {
        let waits = [
            "select.poll().poll(2000)",
            "select.epoll().poll(2)",
            "signal.sigtimedwait([signal.SIGUSR1], 2)",
            "time.sleep(2)",
            "select.select([], [], [], 2)",
        ];
        let start = |wait: &str| {
            let script = format!(
                "import select, signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n\
                 began = time.monotonic()\n{wait}\nprint(time.monotonic() - began)"
            );
            Command::new("python3").args(["-c", &script]).stdout(Stdio::piped()).spawn().unwrap()
        };
        let programs: Vec<_> = waits.iter().map(|wait| (wait, start(wait))).collect();
        let until = Instant::now() + Duration::from_secs(20);
        while !programs.iter().all(|(_, program)| waits_in_one(program.id())) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        // The second time the record says it.
        for _ in 0..2 {
            std::thread::sleep(Duration::from_millis(500));
            let pids: Vec<u32> = programs.iter().map(|(_, program)| program.id()).collect();
            find_ends_of(&pids, until, |_| true).unwrap();
        }
        for (wait, program) in programs {
            let said = program.wait_with_output().unwrap().stdout;
            let took: f64 = String::from_utf8(said).unwrap().trim().parse().unwrap();
            // Begun anew it takes half a second longer.
            assert!((2.0..2.4).contains(&took), "{wait} takes {took} s");
        }
    }

    #[test]
    fn a_thread_that_has_run_since_the_look_did_not_sleep() {
        let mut program = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let pid = program.id();
        let until = Instant::now() + Duration::from_secs(20);
        // Not in its libraries any more, but in read(2).
        while std::fs::read_to_string(format!("/proc/{pid}/syscall")).is_ok_and(|call| !call.starts_with("0 0x0 "))
            && Instant::now() < until
        {
            std::thread::sleep(Duration::from_millis(5));
        }
        let slept = sleepers(&[pid]).0;
        let stopped = || stop(|| Ok(vec![pid]), Instant::now() + Duration::from_secs(5)).unwrap();
        let first = stopped();
        assert!(first.was_quiescent() && first.slept_since(&slept), "it ran only to stop");
        assert!(!first.slept_since(&HashMap::new()), "of a thread that is not known nothing is");
        first.go();
        std::thread::sleep(Duration::from_millis(50));
        let second = stopped();
        assert!(second.was_quiescent() && !second.slept_since(&slept), "it waits for something else, maybe");
        second.go();
        drop(program.stdin.take());
        assert!(program.wait().unwrap().success());
    }

    // promise waking: a stop that is given up because the machine is busy ends no wait early
    #[test]
    fn a_stop_that_is_given_up_takes_nothing_off_a_wait() {
        const LOOK: Duration = Duration::from_millis(300);
        let script = "import select, time\nbegan = time.monotonic()\nselect.select([], [], [], 2)\nprint(time.monotonic() - began)";
        let program = Command::new("python3").args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        while !waits_in_one(program.id()) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        // Its time is over by the second look.
        let list = || {
            std::thread::sleep(LOOK);
            Ok(vec![program.id()])
        };
        assert!(matches!(stop(list, Instant::now() + LOOK), Err(StopError::Unstable)));
        let said = program.wait_with_output().unwrap().stdout;
        let took: f64 = String::from_utf8(said).unwrap().trim().parse().unwrap();
        assert!((2.0..2.4).contains(&took), "2 s take {took} s");
    }

    /// select, poll, rt_sigtimedwait, clock_nanosleep, epoll_wait, pselect6, epoll_pwait.
    fn waits_in_one(pid: u32) -> bool {
        let text = std::fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap_or_default();
        ["23 ", "7 ", "128 ", "230 ", "232 ", "270 ", "281 "].iter().any(|call| text.starts_with(call))
    }
}
