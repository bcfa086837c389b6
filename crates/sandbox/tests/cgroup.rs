//! Limits on real cgroups. Kernel test: needs root.

mod harness;

use harness::{Place, wait_for};
use kip_sandbox::cgroup::{CgroupError, Cgroups};
use kip_types::Limits;
use kip_types::lifecycle::Exit;
use kip_types::spec::ProcClass;
use rustix::process::{Pid, Signal, kill_process};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

// promise sandbox: cgroup limits on a hybrid machine
// held by: this, `crates/sandbox/tests/cgroup.rs::the_number_of_processes_is_limited`,
//   `crates/sandbox/tests/cgroup.rs::cpu_time_is_limited_and_counted`
#[test]
fn a_program_beyond_its_memory_is_killed() {
    let place = Place::with(&Limits { memory_bytes: Some(24 << 20), ..Limits::default() });
    let (out, exit) = place.sh("python3 -c 'x = bytearray(200 << 20)'; echo code $?");
    assert_eq!(exit, Exit::Code(0), "{out}");
    assert!(out.ends_with("code 137\n"), "{out}");
    assert!(place.cgroup.oom_kills() >= 1);
}

#[test]
fn the_number_of_processes_is_limited() {
    let place = Place::with(&Limits { pids: 10, ..Limits::default() });
    let (out, _) = place.sh("for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 1000 & done; echo all");
    assert!(out.contains("fork") && !out.contains("all"), "{out}");
}

#[test]
fn cpu_time_is_limited_and_counted() {
    let place = Place::with(&Limits { cpus: Some(0.1), ..Limits::default() });
    let mut running = place.start(&["/bin/sh", "-c", "echo up; while :; do :; done"]);
    running.wait_for_line("up");
    let (before, began) = (place.cgroup.usage().unwrap(), Instant::now());
    std::thread::sleep(Duration::from_millis(1000));
    let used = place.cgroup.usage().unwrap().cpu_ns - before.cpu_ns;
    let share = used as f64 / began.elapsed().as_nanos() as f64;
    assert!(share > 0.02 && share < 0.2, "{share}");
    assert!(before.memory_bytes > 0);
    running.kill();
}

// promise spawn: a proc of the class `be` has what the others leave of the CPUs
// held by: this, `tests/test_spawn.py::test_classes`
#[test]
fn best_effort_has_what_others_leave() {
    // More of each than there are CPUs.
    let count = std::thread::available_parallelism().unwrap().get() + 1;
    let script = format!("for i in $(seq {count}); do (while :; do :; done) & done; echo up; wait");
    // Procs of one data directory are beside each other.
    let (mut least, usual) = (Place::new(), Place::new());
    let beside = usual.cgroup.name().replace("/web", "/least");
    let limits = Limits { class: ProcClass::Be, ..Limits::default() };
    least.cgroup = Cgroups::detect().unwrap().create(&beside, &limits).unwrap();
    let mut running = [&least, &usual].map(|place| place.start(&["/bin/sh", "-c", &script]));
    running.iter_mut().for_each(|one| one.wait_for_line("up"));
    let used = || [&usual, &least].map(|place| place.cgroup.usage().unwrap().cpu_ns);
    let before = used();
    let [of_usual, of_least] = wait_for("both have run", || {
        let now = used();
        let seconds = [now[0] - before[0], now[1] - before[1]].map(|ns| ns as f64 / 1e9);
        // What the first turns of all gave hardly counts then.
        (seconds[0] > 1.0).then_some(seconds)
    });
    assert!(of_least < of_usual / 5.0, "{of_least} s beside {of_usual} s");
    // It is none any more.
    least.cgroup.set_limits(&Limits::default()).unwrap();
    let at = used()[1];
    wait_for("it has its share", || (used()[1] - at > 100_000_000).then_some(()));
    running.into_iter().for_each(|one| one.kill());
}

/// The statistics of both groups are read all the time while memory comes, which is when the kernel
/// leaves those of the upper one behind. The two readings at the end are of memory that stands
/// still.
#[test]
fn what_a_group_holds_is_not_behind() {
    const ROUNDS: usize = 60;
    const LAG: u64 = 1 << 20;
    let place = Place::new();
    let group = place.group();
    let program = format!(
        "import mmap, signal, time\ngo = {{signal.SIGUSR1}}\nsignal.pthread_sigmask(signal.SIG_BLOCK, go)\n\
         for _ in range({ROUNDS}):\n  m = mmap.mmap(-1, 30 << 20, flags=mmap.MAP_PRIVATE)\n  \
         for i in range(0, len(m), 4096): m[i] = 1\n  print('up', flush=True)\n  signal.sigwait(go)\n  m.close()\n\
         time.sleep(1000)"
    );
    let mut running = place.start(&["/usr/bin/python3", "-c", &program]);
    let came = AtomicBool::new(false);
    let (mut worst, mut most) = (0, 0);
    for _ in 0..ROUNDS {
        came.store(false, Ordering::SeqCst);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                running.wait_for_line("up");
                came.store(true, Ordering::SeqCst);
            });
            while !came.load(Ordering::SeqCst) {
                std::hint::black_box((group.held_bytes(), place.cgroup.held_bytes()));
            }
        });
        let held = group.held_within(LAG);
        let below = place.cgroup.held_bytes();
        worst = worst.max(below.saturating_sub(held));
        most = most.max(below);
        // Only now it may give its memory back.
        let pids = place.cgroup.pids().unwrap();
        let comm = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let python = pids.into_iter().find(|pid| comm(pid).starts_with("python")).unwrap();
        kill_process(Pid::from_raw(python as i32).unwrap(), Signal::USR1).unwrap();
    }
    running.kill();
    assert!(most > 30 << 20, "{most}");
    // A group's own figure may lack what the kernel gathers for each processor before it adds it
    // up.
    assert!(worst <= LAG + (512 << 10), "behind by {worst} bytes");
}

#[test]
fn everything_in_a_group_can_be_killed_and_it_can_be_found_again() {
    let place = Place::new();
    let mut running = place.start(&["/bin/sh", "-c", "for i in 1 2 3; do sleep 1000 & done; echo up; wait"]);
    running.wait_for_line("up");
    let again = Cgroups::detect().unwrap().open(place.cgroup.name());
    assert_eq!(again.pids().unwrap().len(), 5);
    again.kill(Duration::from_secs(5)).unwrap();
    assert!(again.pids().unwrap().is_empty());
    wait_for("removal", || again.remove().ok());
    again.remove().unwrap();
    assert!(again.task_files().is_err());
    assert!(again.pids().unwrap().is_empty());
}

#[test]
fn limits_can_be_changed_and_a_refused_group_leaves_nothing() {
    let cgroups = Cgroups::detect().unwrap();
    let name = format!("kip-test-limits-{}", std::process::id());
    let small = Limits { memory_bytes: Some(1000), ..Limits::default() };
    let error = cgroups.create(&format!("{name}/a"), &small).unwrap_err();
    assert!(matches!(error, CgroupError::TooSmall { .. }), "{error}");
    let limits = |mb: u64| Limits { memory_bytes: Some(mb << 20), ..Limits::default() };
    let group = cgroups.create(&format!("{name}/a"), &limits(64)).unwrap();
    group.set_limits(&limits(128)).unwrap();
    group.set_limits(&limits(32)).unwrap();
    group.set_limits(&Limits::default()).unwrap();
    cgroups.create(&format!("{name}/a"), &limits(16)).unwrap();
    cgroups.remove_all(&name).unwrap();
    cgroups.remove_all(&name).unwrap();
}

/// With very little memory either the launcher says so or init ends without a word and the group
/// counts an OOM kill; the launcher itself, whose memory the child shares for a while, lives on.
#[test]
fn too_little_memory_never_hurts_the_launcher() {
    // Python's files are in the page cache then, at the cost of this group. Else each group below
    // has to hold them, gives them up to the next page and reads them again, for minutes.
    assert_eq!(Place::new().sh("python3 -c 'x = 1'").1, Exit::Code(0));
    for kb in [1024, 1200, 1500, 2000, 3000] {
        let place = Place::with(&Limits { memory_bytes: Some(kb << 10), ..Limits::default() });
        for _ in 0..3 {
            match place.try_start(place.mounts(), &["python3", "-c", "x = bytearray(50 << 20)"], None) {
                Err(error) => eprintln!("{kb} KiB: {error}"),
                Ok(mut running) => {
                    let records: Vec<_> = std::iter::from_fn(|| running.record()).collect();
                    eprintln!("{kb} KiB: {records:?}, {} killed", place.cgroup.oom_kills());
                    assert!(place.cgroup.oom_kills() > 0 || records.len() == 1, "{records:?}");
                }
            }
        }
        // It answers.
        place.launcher.namespaces(harness::UID_BASE, "alive").unwrap();
    }
}
