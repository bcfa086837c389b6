//! A pager in a process of its own is killed at any moment; another takes up what it left, and no byte is wrong.

mod rig;

use kip_pager::memory::SpaceId;
use kip_pager::proc::{Custodian, Proc, Sets, Way};
use kip_pager::serve::Server;
use kip_pager::set::Predictor;
use kip_sys::fdpass;
use rig::{Holder, Torture, stopped};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// Gives descriptors to the test, which holds them.
struct Far;

impl Custodian for Far {
    fn hold(&self, space: SpaceId, uffd: BorrowedFd<'_>) -> io::Result<()> {
        fdpass::send(io::stdin().as_fd(), &space.to_le_bytes(), &[uffd])
    }
    fn release(&self, _: SpaceId) {}
}

/// Not a test but the pager that the tests below start and kill; without their environment it does nothing.
#[test]
fn pager_process() {
    let (Ok(pid), Ok(dir)) = (std::env::var("KIP_TEST_PID"), std::env::var("KIP_TEST_DIR")) else { return };
    let pid: u32 = pid.parse().unwrap();
    let server = Arc::new(Server::start().unwrap());
    let mut proc = Proc::create(1, dir.as_ref(), server, Arc::new(Far), Predictor::LastUse).unwrap();
    let stopped = stopped(pid);
    let pids: Vec<u32> = stopped.processes.keys().copied().collect();
    proc.deflate(&stopped, Way { drop_files: true, sets: Sets::Memory, timers: false }).unwrap();
    proc.arm(&pids, None);
    stopped.go();
    proc.rest(&pids, Duration::from_millis(50));
    fdpass::send(io::stdin().as_fd(), b"sleeps", &[]).unwrap();
    loop {
        std::thread::park();
    }
}

fn round(number: u64, letters: &str) {
    let mut torture = Torture::start(&[]);
    let pid = torture.pid;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (ours, theirs) = fdpass::seqpacket_pair().unwrap();
    let mut pager = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "pager_process"])
        .env("KIP_TEST_PID", pid.to_string())
        .env("KIP_TEST_DIR", dir.path())
        .stdin(theirs)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut held: Vec<(SpaceId, OwnedFd)> = Vec::new();
    let mut take = |until_asleep: bool| {
        while let Ok((bytes, mut fds)) = fdpass::recv(ours.as_fd(), 64) {
            match fds.pop() {
                Some(fd) => held.push((u64::from_le_bytes(bytes.try_into().unwrap()), fd)),
                None if until_asleep => break,
                None => {}
            }
        }
    };
    take(true);
    letters.chars().for_each(|letter| torture.send(letter));
    std::thread::sleep(Duration::from_micros(number * 1733 % 60_000));
    pager.kill().unwrap();
    pager.wait().unwrap();
    // All that it gave away is still in the socket.
    take(false);
    let server = Arc::new(Server::start().unwrap());
    let held = held.into_iter().collect();
    let forked = |_| Err(io::Error::other("nobody had the child's descriptor"));
    let holder = Arc::new(Holder::default());
    let mut proc = Proc::adopt(1, dir.path(), server, holder, Predictor::LastUse, held, forked).unwrap();
    for letter in letters.chars() {
        let answer = torture.receive();
        assert_eq!(answer, "ok", "round {number}, {letter}, ended: {:?}", torture.child.try_wait());
    }
    let stopped = stopped(pid);
    proc.deflate(&stopped, Way { drop_files: true, sets: Sets::None, timers: false }).unwrap();
    stopped.go();
    torture.good("cwdc");
}

#[test]
fn a_killed_pager_costs_no_byte() {
    for number in 0..30 {
        round(number, ["cwc", "dczcuc", "wwddzzwwuuc", "mcdmuc", "ddddddddddwwwwuuuuuuuc"][number as usize % 5]);
    }
}
