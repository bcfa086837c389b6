//! Tests of [`super`] on a program of their own, this test binary started anew, and on `cat`. Never
//! on a sandbox.

use super::*;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Names in the child's environment how many threads it shall have; without it [`child`] does
/// nothing.
const THREADS: &str = "KIP_TEST_THREADS";
const PAGE: u64 = 4096;

/// Not a test but the program that the tests below take apart: says where it has pages that it will
/// not use again, starts threads that wait for ever and gives each line of its input back. The
/// harness has one thread more.
#[test]
fn child() {
    let Some(threads) = std::env::var(THREADS).ok().and_then(|n| n.parse::<usize>().ok()) else { return };
    let spare = vec![1u8; 8 << 20];
    for _ in 2..threads {
        std::thread::spawn(|| {
            loop {
                std::thread::park();
            }
        });
    }
    // Not println: the harness would keep it.
    let mut out = io::stdout();
    writeln!(out, "KIP {:x}", (spare.as_ptr() as u64).next_multiple_of(PAGE) + PAGE).unwrap();
    for line in io::stdin().lines() {
        writeln!(out, "{}", line.unwrap()).unwrap();
    }
    // Its pages are not there any more.
    std::mem::forget(spare);
}

struct Subject {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    spare: u64,
    tids: Vec<u32>,
}

impl Subject {
    /// This program with so many threads, at least two.
    fn start(threads: usize) -> Subject {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "resume::tests::child", "--nocapture", "--test-threads=1"]);
        let mut subject = Subject::spawn(command.env(THREADS, threads.to_string()));
        subject.spare = u64::from_str_radix(&subject.line(), 16).unwrap();
        let tasks = fs::read_dir(format!("/proc/{}/task", subject.child.id())).unwrap();
        subject.tids = tasks.map(|t| t.unwrap().file_name().into_string().unwrap().parse().unwrap()).collect();
        subject.tids.sort_unstable();
        assert_eq!((subject.tids.len(), subject.tids[0]), (threads, subject.child.id()));
        subject
    }

    /// A cat with one thread, ignoring SIGTRAP. Its spare pages are not there to begin with; munmap
    /// takes that, too.
    fn cat() -> Subject {
        let mut subject = Subject::spawn(Command::new("/bin/sh").args(["-c", "trap '' TRAP; exec cat"]));
        subject.answers();
        subject.spare = PAGE;
        subject
    }

    fn spawn(command: &mut Command) -> Subject {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Subject { tids: vec![child.id()], child, input, output, spare: 0 }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "it has ended");
            // The harness writes the test's name in front, without an end of line.
            if let Some((_, said)) = line.split_once("KIP ") {
                return said.trim_end().to_owned();
            }
        }
    }

    fn answers(&mut self) {
        self.input.write_all(b"KIP are you there?\n").unwrap();
        assert_eq!(self.line(), "are you there?");
    }

    fn ends_well(mut self) {
        self.answers();
        drop(self.input);
        assert!(self.child.wait().unwrap().success());
    }

    fn maps(&self) -> String {
        fs::read_to_string(format!("/proc/{}/maps", self.child.id())).unwrap()
    }

    fn mapped(&self, address: u64) -> bool {
        self.maps().lines().any(|line| {
            let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
            (u64::from_str_radix(start, 16).unwrap()..u64::from_str_radix(end, 16).unwrap()).contains(&address)
        })
    }

    fn syscall_at(&self) -> u64 {
        let maps = self.maps();
        let vdso = maps.lines().find(|line| line.ends_with("[vdso]")).unwrap();
        u64::from_str_radix(vdso.split('-').next().unwrap(), 16).unwrap() + syscall_offset().unwrap()
    }

    fn status(&self, tid: u32, key: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/task/{tid}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(":\t")).unwrap().to_owned();
        u64::from_str_radix(&line, 16).unwrap()
    }

    fn process<'a>(&self, registers: &'a [Registers], unmap: (u64, u64)) -> WaitingProcess<'a> {
        let threads = self
            .tids
            .iter()
            .zip(registers)
            .map(|(tid, registers)| Thread { tid: *tid, registers: Some(registers), filters: &[] })
            .collect();
        WaitingProcess { threads, unmap, syscall_at: self.syscall_at() }
    }

    /// Each thread's registers as an image would have them: an interrupted call begins again.
    fn registers(&self) -> Vec<Registers> {
        for tid in &self.tids {
            trace::seize(*tid).unwrap();
            trace::interrupt(*tid).unwrap();
            until_still(*tid).unwrap();
        }
        let read = |tid: &u32| {
            let mut general = trace::get_general(*tid).unwrap().to_vec();
            assert!((-516..=-512).contains(&(general[RAX] as i64)), "it is not in a call: {general:x?}");
            general[RIP] -= 2;
            general[RAX] = general[ORIG_RAX];
            general[ORIG_RAX] = u64::MAX;
            Registers { general, floating: trace::get_floating(*tid).unwrap(), blocked: self.status(*tid, "SigBlk") }
        };
        let all = self.tids.iter().map(read).collect();
        self.tids.iter().for_each(|tid| trace::detach(*tid).unwrap());
        all
    }

    /// Waits until every thread waits in a system call.
    fn wait_until_in_calls(&self) {
        let waits = |tid: &u32| {
            let call = fs::read_to_string(format!("/proc/{}/task/{tid}/syscall", self.child.id())).unwrap();
            call.starts_with("0 ") || call.starts_with("202 ")
        };
        while !self.tids.iter().all(waits) {
            std::thread::yield_now();
        }
    }
}

// promise waking: registers arrive whole; the restorer leaves no mapping behind; a crash before the
//   end leaves no half-made tree
// held by: this, `kip_checkpoint::resume::tests::what_cannot_be_finished_dies`,
//   `tests/test_recovery.py::test_killed_at_step`
#[test]
fn everything_arrives_and_the_program_goes_on() {
    let mut subject = Subject::start(2);
    subject.wait_until_in_calls();
    let mut registers = subject.registers();
    subject.answers();
    subject.wait_until_in_calls();
    let usr1 = 1 << 9;
    for (n, r) in registers.iter_mut().enumerate() {
        r.floating[160 + 15 * 16..160 + 16 * 16].copy_from_slice(&[n as u8 + 1; 16]);
        r.floating[512] |= 2;
        r.blocked |= usr1;
    }
    let unmap = (subject.spare, 1024 * PAGE);
    assert!(subject.mapped(unmap.0) && subject.mapped(unmap.0 + unmap.1 - PAGE));
    let stopped = stop(&[subject.process(&registers, unmap)]).unwrap();
    assert!(!subject.mapped(unmap.0) && !subject.mapped(unmap.0 + unmap.1 - PAGE));
    assert!(subject.mapped(unmap.0 - PAGE) && subject.mapped(unmap.0 + unmap.1), "no page more");
    for tid in &subject.tids {
        assert_eq!(subject.status(*tid, "SigBlk") & usr1, usr1);
    }
    stopped.go().unwrap();
    subject.wait_until_in_calls();
    let after = subject.registers();
    for (n, r) in after.iter().enumerate() {
        assert_eq!(r.floating[160 + 15 * 16..160 + 16 * 16], [n as u8 + 1; 16]);
        assert_eq!(r.general, registers[n].general);
        assert_eq!(r.blocked, registers[n].blocked);
    }
    subject.ends_well();
}

#[test]
fn a_trap_stays_ignored_and_blocked_signals_stay_blocked() {
    let subject = Subject::cat();
    subject.wait_until_in_calls();
    let trap = 1 << 4;
    assert_eq!(subject.status(subject.tids[0], "SigIgn") & trap, trap);
    let mut registers = subject.registers();
    registers[0].blocked = u64::MAX;
    // The second time with every signal blocked, as the restorer has them.
    for _ in 0..2 {
        stop(&[subject.process(&registers, (subject.spare, PAGE))]).unwrap().go().unwrap();
        assert_eq!(subject.status(subject.tids[0], "SigIgn") & trap, trap);
        assert_eq!(subject.status(subject.tids[0], "SigBlk") & trap, trap);
        subject.wait_until_in_calls();
    }
    subject.ends_well();
}

/// As one whose other thread was let go before it, and has ended their process.
#[test]
fn a_thread_that_has_ended_is_no_failure() {
    let mut subject = Subject::start(2);
    subject.wait_until_in_calls();
    let registers = subject.registers();
    let stopped = stop(&[subject.process(&registers, (subject.spare, PAGE))]).unwrap();
    subject.child.kill().unwrap();
    while !subject.tids.iter().all(|tid| kip_sys::status::has_ended(subject.child.id(), *tid)) {
        std::thread::yield_now();
    }
    stopped.go().unwrap();
    subject.child.wait().unwrap();
}

#[test]
fn a_process_that_is_stopped_stays_so() {
    let subject = Subject::start(2);
    subject.wait_until_in_calls();
    let registers = subject.registers();
    let state = |wanted: &str| {
        for tid in &subject.tids {
            let path = format!("/proc/{tid}/status");
            while !fs::read_to_string(&path).unwrap().contains(&format!("State:\t{wanted}")) {
                std::thread::yield_now();
            }
        }
    };
    subject.wait_until_in_calls();
    let pidfd = pidfd_open(subject.child.id()).unwrap();
    pidfd_send_signal(pidfd.as_fd(), Signal::STOP).unwrap();
    state("T (stopped)");
    let stopped = stop(&[subject.process(&registers, (subject.spare, PAGE))]).unwrap();
    assert!(!subject.mapped(subject.spare));
    stopped.go().unwrap();
    state("T (stopped)");
    pidfd_send_signal(pidfd.as_fd(), Signal::CONT).unwrap();
    subject.ends_well();
}

/// Whatever is not let go is dead and visible as such to its parent.
fn is_killed(mut subject: Subject) {
    drop(subject.input);
    let mut rest = String::new();
    let error = subject.output.read_line(&mut rest);
    assert_eq!((error.unwrap(), rest.as_str()), (0, ""), "it still spoke");
    // We are its parent and its tracer: the tracer has waited for it.
    assert!(subject.child.try_wait().is_err());
}

#[test]
fn what_is_dropped_dies() {
    let subject = Subject::start(3);
    subject.wait_until_in_calls();
    let registers = subject.registers();
    drop(stop(&[subject.process(&registers, (subject.spare, PAGE))]).unwrap());
    is_killed(subject);
}

#[test]
fn what_cannot_be_finished_dies() {
    let subject = Subject::start(2);
    subject.wait_until_in_calls();
    let registers = subject.registers();
    let error = stop(&[subject.process(&registers, (subject.spare + 1, PAGE))]).unwrap_err().to_string();
    assert!(error.contains("munmap: Invalid argument"), "{error}");
    is_killed(subject);

    let subject = Subject::cat();
    subject.wait_until_in_calls();
    let registers = subject.registers();
    let mut process = subject.process(&registers, (subject.spare, PAGE));
    process.syscall_at = subject.spare + PAGE;
    let error = stop(&[process]).unwrap_err().to_string();
    assert!(error.contains("Signal(11)"), "no pages to execute: {error}");
    is_killed(subject);

    let subject = Subject::cat();
    subject.wait_until_in_calls();
    let mut registers = subject.registers();
    registers[0].floating.pop();
    assert!(stop(&[subject.process(&registers, (subject.spare, PAGE))]).is_err());
    is_killed(subject);
}

#[test]
fn a_thread_of_another_tracer_is_refused() {
    let subject = Subject::cat();
    subject.wait_until_in_calls();
    let registers = subject.registers();
    trace::seize(subject.tids[0]).unwrap();
    std::thread::scope(|scope| {
        let refused = scope.spawn(|| stop(&[subject.process(&registers, (subject.spare, PAGE))]).map(drop));
        assert_eq!(refused.join().unwrap().unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    });
    is_killed(subject);
}

/// Prints what `stop` and `go` cost:
/// `cargo test --release -p kip-checkpoint cost_of -- --nocapture`.
#[test]
fn cost_of_stop_and_go() {
    for threads in [1, 30] {
        let subject = if threads == 1 { Subject::cat() } else { Subject::start(threads) };
        subject.wait_until_in_calls();
        let registers = subject.registers();
        let (mut stops, mut goes) = (Vec::new(), Vec::new());
        for n in 0..200 {
            subject.wait_until_in_calls();
            let process = subject.process(&registers, (subject.spare + if threads == 1 { 0 } else { n * PAGE }, PAGE));
            let begin = Instant::now();
            let stopped = stop(&[process]).unwrap();
            let middle = Instant::now();
            stopped.go().unwrap();
            goes.push(middle.elapsed().as_nanos() as f64 / 1000.0);
            stops.push((middle - begin).as_nanos() as f64 / 1000.0);
        }
        let show = |name: &str, mut all: Vec<f64>| {
            all.sort_by(f64::total_cmp);
            let [low, mid, high] = [all[20], all[100], all[180]];
            println!("{threads} threads, {name}: median {mid:.0} us (10% {low:.0}, 90% {high:.0})");
        };
        show("stop", stops);
        show("go", goes);
        subject.ends_well();
    }
}
