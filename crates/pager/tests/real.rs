//! Real processes whose memory is taken out and comes back, checked page by page by themselves.

mod rig;

use kip_pager::Bell;
use kip_pager::Change;
use kip_pager::proc::{Peeked, Sets, Way};
use rig::{Rig, Torture, comes_to_rest, rss, stopped, tree};
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

// promise H4: memory comes back by faults, or by one read of the working set
// held by: this, `crates/pager/tests/real.rs::all_comes_back_with_sets`
// promise hibernation: every page is as it was: brought back by faults only, by sets in memory, in
//   the page cache, on disk
// held by: this, `crates/pager/tests/real.rs::all_comes_back_with_sets`
#[test]
fn all_comes_back_by_faults() {
    let mut torture = Torture::start(&[]);
    let mut rig = Rig::new();
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", torture.pid)).unwrap().count();
    let before = descriptors();
    let hot = rss(torture.pid);
    let asleep = rig.sleep(torture.pid, Sets::None);
    assert!(asleep < hot / 20, "{asleep} of {hot} bytes are still there");
    assert_eq!(descriptors(), before);
    torture.good("cscc");
    let stopped = stopped(torture.pid);
    let report =
        rig.proc.deflate(&stopped, Way { drop_files: true, ticks: false, sets: Sets::None, timers: false }).unwrap();
    stopped.go();
    let written = report[&torture.pid].written_pages;
    assert!((4096 / 7..1000).contains(&written), "only what was written is: {written}");
    torture.good("c");
}

#[test]
fn all_comes_back_with_sets() {
    for sets in [Sets::Memory, Sets::Cached(usize::MAX), Sets::Disk] {
        let mut torture = Torture::start(&[]);
        let mut rig = Rig::new();
        rig.sleep(torture.pid, sets);
        torture.good("wnc");
        for _ in 0..4 {
            rig.sleep(torture.pid, sets);
            torture.good("n");
            let memory = rig.proc.memory(torture.pid).unwrap();
            assert!(memory.state().since.installed > 1000, "{:?}", memory.state().since.installed);
            torture.good("wcdcucmczc");
        }
    }
}

// promise hibernation: processes held at their calls, trees, children forked while their parent was
//   out
// held by: this, `crates/pager/tests/real.rs::children_sleep_with_their_parents`
#[test]
fn held_processes_come_back_complete() {
    let mut torture = Torture::start(&["threads"]);
    let mut rig = Rig::new();
    rig.sleep(torture.pid, Sets::Memory);
    torture.good("wc");
    let stopped = stopped(torture.pid);
    rig.proc.deflate(&stopped, Way { drop_files: true, ticks: false, sets: Sets::Memory, timers: false }).unwrap();
    let asleep = rss(torture.pid);
    assert!(asleep <= 64 << 10, "{asleep}");
    torture.send('c');
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert!(rss(torture.pid) <= asleep, "it is held");
    rig.proc.wake(&[torture.pid], "");
    // How much of it is installed, and not held back, depends on what came by faults the last time.
    let memory = rig.proc.memory(torture.pid).unwrap();
    let (set, installed) = {
        let state = memory.state();
        (state.since.set_pages, state.since.installed)
    };
    assert!(set > 1000 && installed > 100, "{installed} of {set}");
    assert!(rss(torture.pid) > asleep + (installed as u64 / 2) * 4096);
    stopped.go();
    assert_eq!(torture.receive(), "ok");
    torture.good("io");
}

// promise hibernation: a program that is at work, or gets something to do, while it is put to sleep
//   is awake at once, with its set, and counts as woken; a call that begins anew wakes no proc
/// What the kernel reads for calls that begin anew is no wake; a program that has something to do
/// when it is let go is awake at once, with its set, and not asleep with much of its memory.
#[test]
fn only_who_has_something_to_do_is_awake_when_let_go() {
    let mut torture = Torture::start(&["patient", "threads"]);
    let mut rig = Rig::new();
    rig.sleep(torture.pid, Sets::Memory);
    torture.good("wc");
    let way = Way { drop_files: true, ticks: false, sets: Sets::Memory, timers: false };
    for round in 0..8 {
        let busy = round % 2 == 1;
        let rings = Arc::new(AtomicUsize::new(0));
        let ring = Arc::clone(&rings);
        let bell = Bell(Arc::new(move || {
            ring.fetch_add(1, Ordering::SeqCst);
        }));
        comes_to_rest(torture.pid);
        let stopped = stopped(torture.pid);
        rig.proc.deflate(&stopped, way).unwrap();
        if busy {
            torture.send('c');
        }
        rig.proc.arm(&[torture.pid], Some(&bell), None);
        stopped.go();
        rig.proc.wait_until_quiescent(&[torture.pid], Duration::from_secs(5));
        assert_eq!(rings.load(Ordering::SeqCst), usize::from(busy), "round {round}");
        match busy {
            true => assert_eq!(torture.receive(), "ok"),
            false => {
                assert!(rss(torture.pid) < 1 << 20, "{}", rss(torture.pid));
                torture.good("c");
                assert_eq!(rings.load(Ordering::SeqCst), 1, "the first that it touches for a client");
            }
        }
        let memory = rig.proc.memory(torture.pid).unwrap();
        let since = &memory.state().since;
        // How much of it is installed, and not held back, depends on what came by faults before.
        assert!(since.set_pages > 1000 && since.installed > 100, "{} of {}", since.installed, since.set_pages);
    }
    torture.good("io");
}

// promise hibernation: a tick waits for no disk if its pages are in a working set in memory
#[test]
fn a_tick_waits_for_no_disk_if_the_set_is_in_memory() {
    const SUMS_UP: &str = "
import os
pages = bytearray(b'x' * (200 * 4096))
while os.read(0, 1):
    os.write(1, b'%d\\n' % sum(pages[::4096]))
";
    let mut command = Command::new("unshare");
    command.args(["--net", "python3", "-c", SUMS_UP]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let pid = child.id();
    let mut answers = BufReader::new(child.stdout.take().unwrap());
    let mut good = || {
        child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
        let mut line = String::new();
        answers.read_line(&mut line).unwrap();
        assert_eq!(line, "24000\n");
    };
    good();
    let mut rig = Rig::new();
    for _ in 0..3 {
        rig.sleep(pid, Sets::Memory);
        good();
    }
    comes_to_rest(pid);
    let stopped = stopped(pid);
    let way = Way { drop_files: true, ticks: true, sets: Sets::Memory, timers: false };
    rig.proc.deflate(&stopped, way).unwrap();
    let swap = std::fs::OpenOptions::new().write(true).open(rig.dir.path().join("swap")).unwrap();
    assert!(swap.metadata().unwrap().len() > 200 * 4096);
    // Nothing can be read from there any more.
    swap.set_len(0).unwrap();
    rig.proc.arm(&[pid], None, Some((usize::MAX, Some(0))));
    stopped.go();
    rig.proc.wait_until_quiescent(&[pid], Duration::from_secs(5));
    good();
    let memory = rig.proc.memory(pid).unwrap();
    assert!(memory.state().since.faults.len() >= 200, "page by page");
    assert_eq!(memory.state().since.installed, 0, "it was a tick");
    assert_eq!(*rig.holder.1.lock(), [""; 0]);
    child.kill().unwrap();
    child.wait().unwrap();
}

// promise hibernation: no thread sees EINTR
#[test]
fn no_thread_sees_eintr() {
    let mut torture = Torture::start(&["threads"]);
    let mut rig = Rig::new();
    for round in 0..16 {
        std::thread::sleep(std::time::Duration::from_millis(round * 7 % 23));
        rig.sleep(torture.pid, if round % 2 == 0 { Sets::None } else { Sets::Memory });
        torture.good("c");
    }
    torture.good("io");
}

// promise hibernation: mremap, munmap, madvise, brk, exec while out; random sequences
// held by: this, `crates/pager/tests/real.rs::random_sequences_lose_nothing`
#[test]
fn what_the_program_does_to_its_mappings_is_followed() {
    let mut torture = Torture::start(&[]);
    let mut rig = Rig::new();
    for letters in ["dc", "uc", "mc", "zc", "bc", "fc", "xc", "wfdmuc", "mmdumzfc", "fffc"] {
        rig.sleep(torture.pid, Sets::None);
        torture.good(letters);
        rig.sleep(torture.pid, Sets::Memory);
        torture.good(letters);
    }
    rig.proc.sweep();
    assert_eq!(rig.proc.spaces().len(), 1, "children that have ended are forgotten");
}

#[test]
fn children_sleep_with_their_parents() {
    let mut torture = Torture::start(&[]);
    let mut rig = Rig::new();
    rig.sleep(torture.pid, Sets::None);
    // Born while all of the memory is away.
    torture.good("F");
    assert_eq!(tree(torture.pid).unwrap().len(), 2);
    let used = rig.proc.swap().used();
    for letters in ["Cc", "sCWc", "Cdc", "WCWCuc", "mCc"] {
        rig.sleep(torture.pid, Sets::Memory);
        torture.good(letters);
    }
    assert_eq!(rig.proc.spaces().iter().filter(|(_, pid)| pid.is_some()).count(), 2);
    assert!(rig.proc.swap().used() < used * 2, "what neither has written is there once");
}

// promise hibernation: a child that is forked while all memory comes back has all of its own, and
//   its service
/// Between the last look for children and the end of all service.
#[test]
fn nobody_is_left_without_service_who_is_born_while_all_comes_back() {
    for round in 0..16 {
        let mut torture = Torture::start(&[]);
        let mut rig = Rig::new();
        rig.sleep(torture.pid, Sets::None);
        torture.send('B');
        std::thread::sleep(Duration::from_micros(round * 150));
        rig.proc.restore_all().unwrap();
        let Rig { proc, holder, .. } = rig;
        drop(proc);
        assert!(holder.0.lock().is_empty(), "round {round}: somebody's memory is held and nobody serves it");
        assert_eq!(torture.receive(), "ok", "round {round}");
    }
}

// promise hibernation: user, mount and pid namespaces of its own, ids without privilege, a filter
//   that kills
#[test]
fn a_sandbox_that_forbids_all_of_it_is_no_obstacle() {
    let user = ["-U", "-m", "-p", "-f", "--map-user=65534", "--kill-child"];
    let mut torture = Torture::by(Command::new("unshare").args(user).arg(rig::program()).arg("filter"));
    torture.pid = *tree(torture.pid).unwrap().last().unwrap();
    let mut rig = Rig::new();
    for letters in ["c", "wfc", "dmuc"] {
        let asleep = rig.sleep(torture.pid, Sets::Memory);
        assert!(asleep < 200 << 10, "{asleep}");
        torture.good(letters);
    }
}

/// Any order of everything, the same for a seed (KIP_SEED).
#[test]
fn random_sequences_lose_nothing() {
    let mut seed: u64 = std::env::var("KIP_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    let mut next = |below: usize| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) as usize % below
    };
    let mut torture = Torture::start(&["threads"]);
    let mut rig = Rig::new();
    for step in 0..120 {
        match next(6) {
            0 | 1 => {
                let _ =
                    rig.sleep(torture.pid, [Sets::Memory, Sets::Cached(usize::MAX), Sets::Disk, Sets::None][next(4)]);
            }
            _ => {
                let letter = ['w', 'd', 'u', 'm', 'z', 'b', 'f', 's', 'F', 'C', 'W', 'c'][next(12)];
                assert_eq!(torture.order(letter), "ok", "step {step}: {letter}");
            }
        }
    }
    torture.good("cCio");
}

/// Reads a page of an anonymous mapping that cannot be taken out, so that the kernel's page of
/// zeros is there.
const READS_ZEROS: &str = "
import ctypes, os, sys
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
at = libc.mmap(None, 4096, 1, 0x22, -1, 0)
assert libc.mlock(ctypes.c_void_p(at), 4096) == 0 and ctypes.string_at(at, 1) == bytes(1)
os.write(1, b'%d\\n' % at)
while os.read(0, 1):
    os.write(1, b'ran\\n')
";

#[test]
fn who_cannot_be_given_back_what_it_had_never_runs_again() {
    let mut command = Command::new("python3");
    command.args(["-c", READS_ZEROS]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut answers = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    answers.read_line(&mut line).unwrap();
    let at: u64 = line.trim().parse().unwrap();
    let mut rig = Rig::new();
    rig.sleep(child.id(), Sets::None);
    child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
    line.clear();
    answers.read_line(&mut line).unwrap();
    assert_eq!(line, "ran\n");
    // As if it had been out, in a place behind the end of the swap file; what is written now finds
    // room before that.
    let memory = rig.proc.memory(child.id()).unwrap();
    let (room, slot) = (rig.proc.swap().allocate(4096), rig.proc.swap().allocate(1));
    rig.proc.swap().release(room..room + 4096);
    memory.state().map.change(&[Change::Set(at..at + 4096, slot)]).unwrap();
    let stopped = stopped(child.id());
    let refused = rig
        .proc
        .deflate(&stopped, Way { drop_files: true, ticks: false, sets: Sets::None, timers: false })
        .unwrap_err();
    stopped.go();
    let told = rig.holder.1.lock().join("; ");
    assert!(
        told.contains("that was touched from outside while it was taken out cannot be put back"),
        "{told}, {refused:?}"
    );
    child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
    let state = || std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
    let begun = Instant::now();
    while !state().contains(") T ") && begun.elapsed() < Duration::from_secs(5) {
        std::thread::yield_now();
    }
    assert!(state().contains(") T "), "{}", state());
    child.kill().unwrap();
    child.wait().unwrap();
    line.clear();
    answers.read_line(&mut line).unwrap();
    assert_eq!(line, "", "it has not run");
}

/// Page by page: an inspection of what is out gets what the program had there, and nothing comes
/// back for that.
#[test]
fn an_inspection_fetches_nothing() {
    let mut torture = Torture::start(&["a", "few", "arguments"]);
    let mut rig = Rig::new();
    let pid = torture.pid;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let arguments: u64 =
        stat.rsplit(')').next().unwrap().split_ascii_whitespace().nth(48 - 3).unwrap().parse().unwrap();
    let cmdline = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap();
    let in_page = |bytes: &[u8; 4096]| {
        let at = (arguments & 0xfff) as usize;
        bytes[at..(at + cmdline.len()).min(4096)].to_vec()
    };
    let mut bytes = [0; 4096];
    let peek =
        |rig: &Rig, bytes: &mut [u8; 4096]| rig.proc.peek(pid, arguments & !0xfff, bytes).map(|p| p == Peeked::Here);
    assert!(rig.proc.chart().unwrap().processes.is_empty(), "nothing was ever out");
    assert!(peek(&rig, &mut bytes).unwrap());
    assert!(cmdline.starts_with(&in_page(&bytes)));
    for sets in [Sets::None, Sets::Memory] {
        let asleep = rig.sleep(pid, sets);
        let faults = |rig: &Rig| rig.proc.memory(pid).unwrap().state().since.faults.len();
        let before = faults(&rig);
        let chart = rig.proc.chart().unwrap();
        let runs = &chart.processes[&pid].runs;
        assert!(!runs.iter().any(|run| (run.start..run.end()).contains(&arguments)), "they are never out");
        assert!(runs.iter().all(|run| chart.files[run.file as usize].name == "swap"));
        assert_eq!(std::fs::read(format!("/proc/{pid}/cmdline")).unwrap(), cmdline);
        bytes.fill(0);
        assert!(peek(&rig, &mut bytes).unwrap());
        assert!(cmdline.starts_with(&in_page(&bytes)) && !in_page(&bytes).is_empty());
        for run in runs {
            assert_eq!(rig.proc.peek(pid, run.start, &mut bytes).unwrap(), Peeked::Here);
        }
        assert_eq!(rss(pid), asleep, "nothing came back");
        assert_eq!(faults(&rig), before);
        assert!(rig.proc.peek(pid, 0x1000, &mut bytes).is_err(), "nothing is mapped there");
        torture.good("wc");
        assert!(peek(&rig, &mut bytes).unwrap());
        assert!(cmdline.starts_with(&in_page(&bytes)), "or there again");
    }
}
