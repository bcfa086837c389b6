//! Tests of [`super`]: faults beside changes of the mappings that come with the same read.

use super::*;
use crate::swap::Swap;
use kip_sys::process::{pidfd_getfd, pidfd_open};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

/// The pages of the program's mapping.
const PAGES: u64 = 16;
/// A test waits so long for what the kernel does at once.
const LONGEST: Duration = Duration::from_secs(10);

/// A parked snapshot of sevens, on a disk that answers only once a thread of the program goes on.
#[derive(Debug, Default)]
struct Slow {
    until: Mutex<Option<Thread>>,
}

impl PageSource for Slow {
    fn read(&self, _slot: u32, buffer: &mut [u8]) -> io::Result<()> {
        if let Some(thread) = self.until.lock().as_ref() {
            assert!(wait_until(|| !thread.stands_still()), "a thread of the program is stuck");
        }
        buffer.fill(7);
        Ok(())
    }
}

/// A thread of the program.
#[derive(Debug)]
struct Thread(String);

impl Thread {
    /// Whether it waits in the kernel for an event to be read or a page to come.
    fn stands_still(&self) -> bool {
        std::fs::read_to_string(&self.0).is_ok_and(|wchan| wchan.contains("userfault"))
    }
}

/// False if that has not come within [`LONGEST`].
fn wait_until(mut done: impl FnMut() -> bool) -> bool {
    let begun = Instant::now();
    while !done() {
        if begun.elapsed() > LONGEST {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

/// The program of `tests/beside.c`, whose pages are all missing and hold sevens.
struct Rig {
    child: Child,
    /// The lines that it prints; closed when it has ended.
    answers: Receiver<String>,
    memory: Memory,
    slow: Arc<Slow>,
    start: u64,
    to: u64,
    _directory: tempfile::TempDir,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Rig {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/beside.c");
        let program = directory.path().join("beside");
        assert!(Command::new("gcc").args(["-pthread", "-o"]).arg(&program).arg(source).status().unwrap().success());
        let mut child = Command::new(&program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (tell, answers) = channel();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| tell.send(line)));
        let first = answers.recv_timeout(LONGEST).unwrap();
        let numbers: Vec<u64> = first.split(' ').map(|word| word.parse().unwrap()).collect();
        let [fd, start, to] = numbers[..] else { panic!("the program has no userfaultfd") };
        let uffd = pidfd_getfd(pidfd_open(child.id()).unwrap().as_fd(), fd as i32).unwrap();
        let swap = Arc::new(Swap::create(&directory.path().join("swap")).unwrap());
        let path = directory.path().join("map");
        let mut map = SlotMap::create(&path, swap, Runs::default(), Some(child.id()), &Arc::default()).unwrap();
        map.change(&[Change::Set(start..start + PAGES * PAGE64, PARKED)]).unwrap();
        let slow = Arc::new(Slow::default());
        let memory = Memory::new(1, uffd, map, Some(slow.clone()));
        memory.state().read_ahead = true;
        Self { child, answers, memory, slow, start, to, _directory: directory }
    }

    /// Has a thread of the program do something.
    fn order(&mut self, order: &str) -> Thread {
        self.child.stdin.as_mut().unwrap().write_all(format!("{order}\n").as_bytes()).unwrap();
        let begun = self.answers.recv_timeout(LONGEST).unwrap();
        let tid = begun.strip_prefix("begin ").expect("a thread has begun");
        Thread(format!("/proc/{}/task/{tid}/wchan", self.child.id()))
    }

    /// The same, and waits until that thread waits for this pager.
    fn begin(&mut self, order: &str) -> Thread {
        let thread = self.order(order);
        assert!(wait_until(|| thread.stands_still()), "{order}: nothing waits for the pager");
        thread
    }

    /// Serves until `count` threads have printed what came of it.
    fn serve(&mut self, count: usize) -> Vec<String> {
        let mut printed = Vec::new();
        let served = wait_until(|| {
            self.memory.serve(&mut |_, _| Ok(())).unwrap();
            printed.extend(self.answers.try_iter());
            printed.len() >= count
        });
        assert!(served, "{count} threads were to print, these did: {printed:?}");
        printed
    }

    fn page(&self, index: u64) -> u64 {
        self.start + index * PAGE64
    }
}

// promise hibernation: memory that a thread gives up while another's page is read from the disk
//   is zeros from then on, also where that read covers it
#[test]
fn what_is_given_up_beside_a_fault_does_not_come_back() {
    let mut rig = Rig::new();
    let _reader = rig.begin(&format!("r {}", rig.page(0)));
    let remover = rig.begin(&format!("d {} {}", rig.page(1), 4 * PAGE));
    *rig.slow.until.lock() = Some(remover);
    let mut values = rig.serve(2);
    values.sort();
    assert_eq!(values, ["0", "7"]);
    for (index, value) in [(1, "0"), (4, "0"), (5, "7")] {
        rig.order(&format!("r {}", rig.page(index)));
        assert_eq!(rig.serve(1), [value], "page {index}");
    }
}

// promise hibernation: memory that a thread moves while another waits for it holds at its new
//   place what it held
#[test]
fn what_is_moved_beside_a_fault_holds_what_it_held() {
    let mut rig = Rig::new();
    let _first = rig.begin(&format!("r {}", rig.page(8)));
    // The pages are moved before the kernel says so. It says two things, the move and that nothing
    // is at the old place; the disk cannot wait for the mover, which waits for both to be read.
    let _mover = rig.begin(&format!("m {} {} {}", rig.start, rig.to, 4 * PAGE));
    let _second = rig.begin(&format!("r {}", rig.to + PAGE64));
    let mut values = rig.serve(3);
    values.sort();
    assert_eq!(values, ["0", "7", "7"]);
}
