//! What the tests share: the program of torture.c, a custodian, and a proc around them.
#![allow(dead_code, reason = "each test file uses a part")]

use kip_pager::Predictor;
use kip_pager::Server;
use kip_pager::SpaceId;
use kip_pager::proc::{Custodian, PagedProc, Sets, Way};
use kip_stop::{Stopped, stop};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Holds descriptors in this process, and remembers reports of damage.
#[derive(Default)]
pub struct Holder(pub Mutex<HashMap<SpaceId, OwnedFd>>, pub Mutex<Vec<String>>);

impl Custodian for Holder {
    fn hold(&self, spaces: &[(SpaceId, BorrowedFd<'_>)]) -> io::Result<()> {
        for (space, uffd) in spaces {
            self.0.lock().insert(*space, uffd.try_clone_to_owned()?);
        }
        Ok(())
    }
    fn release(&self, space: SpaceId) {
        self.0.lock().remove(&space);
    }
    fn damaged(&self, error: &io::Error) {
        self.1.lock().push(error.to_string());
    }
}

pub fn program() -> PathBuf {
    static BUILT: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    BUILT.get_or_init(|| built("torture")).clone()
}

/// The program NAME.c of the tests, built.
pub fn built(name: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/{name}.c"));
    let to = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    let gcc = Command::new("gcc").args(["-O1", "-pthread", "-o"]).arg(&to).arg(source).status().unwrap();
    assert!(gcc.success());
    to
}

/// A running torture program.
pub struct Torture {
    pub child: Child,
    answers: BufReader<ChildStdout>,
    /// Its id, which is not the child's when it was started by way of others.
    pub pid: u32,
}

impl Torture {
    pub fn start(arguments: &[&str]) -> Self {
        Self::by(Command::new(program()).args(arguments))
    }

    pub fn by(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        let mut torture = Self { pid: child.id(), child, answers };
        assert_eq!(torture.answer(), "ready");
        torture
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    pub fn order(&mut self, letter: char) -> String {
        self.send(letter);
        self.answer()
    }

    pub fn send(&mut self, letter: char) {
        self.child.stdin.as_mut().unwrap().write_all(format!("{letter}\n").as_bytes()).unwrap();
    }

    pub fn receive(&mut self) -> String {
        self.answer()
    }

    #[track_caller]
    pub fn good(&mut self, letters: &str) {
        for letter in letters.chars() {
            assert_eq!(self.order(letter), "ok", "after {letter}");
        }
    }
}

impl Drop for Torture {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A process and all below it.
pub fn tree(pid: u32) -> io::Result<Vec<u32>> {
    let mut pids = vec![pid];
    let mut next = 0;
    while let Some(pid) = pids.get(next).copied() {
        next += 1;
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        for task in tasks.flatten() {
            let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            pids.extend(children.split_ascii_whitespace().filter_map(|child| child.parse::<u32>().ok()));
        }
    }
    Ok(pids)
}

pub fn stopped(pid: u32) -> Stopped {
    stop(|| tree(pid), Instant::now() + Duration::from_secs(5)).unwrap()
}

pub struct Rig {
    pub dir: tempfile::TempDir,
    pub holder: Arc<Holder>,
    pub proc: PagedProc,
}

impl Rig {
    pub fn new() -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let holder = Arc::new(Holder::default());
        let server = Arc::new(Server::start().unwrap());
        let proc = PagedProc::create(1, dir.path(), server, holder.clone(), Predictor::LastUse).unwrap();
        Self { dir, holder, proc }
    }

    /// All the way down; armed if there are sets. Returns resident bytes.
    pub fn sleep(&mut self, pid: u32, sets: Sets) -> u64 {
        comes_to_rest(pid);
        let stopped = stopped(pid);
        let pids: Vec<u32> = stopped.processes.keys().copied().collect();
        self.proc.deflate(&stopped, Way { drop_files: true, ticks: false, sets, timers: false }).unwrap();
        self.proc.arm(&pids, None, None);
        stopped.go();
        self.proc.wait_until_quiescent(&pids, Duration::from_millis(100));
        rss(pid)
    }
}

/// Its last answer came before it waits for the next order.
pub fn comes_to_rest(pid: u32) {
    while !std::fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap().starts_with("0 ") {
        std::thread::yield_now();
    }
}

pub fn rss(pid: u32) -> u64 {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}
