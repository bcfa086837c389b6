//! A pager in a process of its own is killed at any moment; another takes up what it left, and no
//! byte is wrong.

mod rig;

use kip_pager::Predictor;
use kip_pager::Server;
use kip_pager::SpaceId;
use kip_pager::fault::{self, How};
use kip_pager::proc::{Custodian, PagedProc, Sets, Way};
use kip_sys::fdpass;
use rig::{Holder, Torture, stopped};
use rustix::process::{Pid, Signal, kill_process};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// Gives descriptors to the test, which holds them.
struct Far;

impl Custodian for Far {
    fn hold(&self, spaces: &[(SpaceId, BorrowedFd<'_>)]) -> io::Result<()> {
        let send = |(space, uffd): &(SpaceId, _)| fdpass::send(io::stdin().as_fd(), &space.to_le_bytes(), &[*uffd]);
        spaces.iter().try_for_each(send)
    }
    fn release(&self, _: SpaceId) {}
}

/// Not a test but the pager that the tests below start and kill; without their environment it does
/// nothing.
#[test]
fn pager_process() {
    let (Ok(pid), Ok(dir)) = (std::env::var("KIP_TEST_PID"), std::env::var("KIP_TEST_DIR")) else { return };
    let pid: u32 = pid.parse().unwrap();
    let server = Arc::new(Server::start().unwrap());
    let mut proc = PagedProc::create(1, dir.as_ref(), server, Arc::new(Far), Predictor::LastUse).unwrap();
    let fault = std::env::var("KIP_TEST_FAULT").ok();
    if let Some((step, how)) = fault.as_deref().and_then(|fault| fault.split_once(' ')) {
        let how = [How::Kill, How::Stop, How::Fail].into_iter().find(|known| format!("{known:?}") == how).unwrap();
        assert!(fault::arm(step, how));
    }
    let stopped = stopped(pid);
    let pids: Vec<u32> = stopped.processes.keys().copied().collect();
    let deflated = proc.deflate(&stopped, Way { drop_files: true, ticks: false, sets: Sets::Memory, timers: false });
    assert_eq!(deflated.is_err(), fault.is_some_and(|fault| fault.ends_with("Fail")), "{deflated:?}");
    proc.arm(&pids, None, None);
    stopped.go();
    proc.wait_until_quiescent(&pids, Duration::from_millis(50));
    fdpass::send(io::stdin().as_fd(), b"sleeps", &[]).unwrap();
    loop {
        std::thread::park();
    }
}

/// A pager that takes a program's memory out, and what it gave away so far.
struct Pager {
    child: Child,
    socket: OwnedFd,
    held: Vec<(SpaceId, OwnedFd)>,
}

impl Pager {
    fn start(pid: u32, dir: &Path, fault: &[String]) -> Pager {
        let (socket, theirs) = fdpass::seqpacket_pair().unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "pager_process"])
            .env("KIP_TEST_PID", pid.to_string())
            .env("KIP_TEST_DIR", dir)
            .envs(fault.iter().map(|fault| ("KIP_TEST_FAULT", fault)))
            .stdin(theirs)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Pager { child, socket, held: Vec::new() }
    }

    /// Until the program sleeps, or the pager is gone. Returns whether it sleeps.
    fn take(&mut self, until_asleep: bool) -> bool {
        while let Ok((bytes, mut fds)) = fdpass::recv(self.socket.as_fd(), 64) {
            match fds.pop() {
                Some(fd) => self.held.push((u64::from_le_bytes(bytes.try_into().unwrap()), fd)),
                None if until_asleep => return !bytes.is_empty(),
                None if bytes.is_empty() => return false,
                None => {}
            }
        }
        false
    }

    /// The next pager, which takes up what this one, that is dead, has left.
    fn successor(mut self, dir: &Path) -> PagedProc {
        self.child.wait().unwrap();
        // All that it gave away is still in the socket.
        self.take(false);
        let server = Arc::new(Server::start().unwrap());
        let forked = |_| Err(io::Error::other("nobody had the child's descriptor"));
        let holder = Arc::new(Holder::default());
        PagedProc::adopt(1, dir, server, holder, Predictor::LastUse, self.held, forked).unwrap()
    }
}

fn round(number: u64, letters: &str) {
    let mut torture = Torture::start(&[]);
    let pid = torture.pid;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut pager = Pager::start(pid, dir.path(), &[]);
    assert!(pager.take(true));
    letters.chars().for_each(|letter| torture.send(letter));
    std::thread::sleep(Duration::from_micros(number * 1733 % 60_000));
    pager.child.kill().unwrap();
    let mut proc = pager.successor(dir.path());
    for letter in letters.chars() {
        let answer = torture.receive();
        assert_eq!(answer, "ok", "round {number}, {letter}, ended: {:?}", torture.child.try_wait());
    }
    let stopped = stopped(pid);
    proc.deflate(&stopped, Way { drop_files: true, ticks: false, sets: Sets::None, timers: false }).unwrap();
    stopped.go();
    torture.good("cwdc");
}

// promise hibernation: a pager that is killed costs no byte, another takes up
#[test]
fn a_killed_pager_costs_no_byte() {
    for number in 0..30 {
        round(number, ["cwc", "dczcuc", "wwddzzwwuuc", "mcdmuc", "ddddddddddwwwwuuuuuuuc"][number as usize % 5]);
    }
}

// promise hibernation: a hibernation whose pager is killed or stopped, or fails, at any step leaves
//   the program as it was, but where its memory is being dropped: there the pager's death is the
//   program's
// held by: this, `kip_sys::inject::tests::where_it_must_not_survive_it_does_not`
/// A hibernation that fails at any of its steps, in each way, costs the program nothing: it goes
/// on, and sleeps the next time. Where its memory is just being dropped, and only there, the
/// pager's death is its own.
#[test]
fn a_hibernation_that_fails_at_a_step_costs_nothing() {
    for step in fault::STEPS {
        for how in [How::Kill, How::Stop, How::Fail] {
            let what = format!("{step} {how:?}");
            let mut torture = Torture::start(&[]);
            torture.good("cwd");
            let pid = torture.pid;
            rig::comes_to_rest(pid);
            let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let mut pager = Pager::start(pid, dir.path(), std::slice::from_ref(&what));
            if how == How::Stop {
                let stat = format!("/proc/{}/stat", pager.child.id());
                while !std::fs::read_to_string(&stat).unwrap().contains(") T ") {
                    std::thread::yield_now();
                }
                // However long the pager stands still, the time limits of all steps pass without
                // harm.
                std::thread::sleep(Duration::from_millis(200));
                kill_process(Pid::from_child(&pager.child), Signal::CONT).unwrap();
            }
            assert_eq!(pager.take(true), how != How::Kill, "{what}");
            if how == How::Kill && fault::DEADLY.contains(step) {
                assert_eq!(torture.child.wait().unwrap().signal(), Some(Signal::KILL.as_raw()), "{what}");
                pager.child.wait().unwrap();
                continue;
            }
            if how != How::Kill {
                torture.good("wdc");
                pager.child.kill().unwrap();
            }
            let mut proc = pager.successor(dir.path());
            for letter in "wdcmuc".chars() {
                assert_eq!(torture.order(letter), "ok", "{what}, {letter}: {:?}", torture.child.try_wait());
            }
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            assert!(status.contains("SigBlk:\t0000000000000000\n"), "{what}: {status}");
            let stopped = stopped(pid);
            proc.deflate(&stopped, Way { drop_files: true, ticks: false, sets: Sets::None, timers: false }).unwrap();
            stopped.go();
            torture.good("cwdc");
        }
    }
}
