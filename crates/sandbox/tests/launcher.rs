//! The launcher as a process: threads that share it, its death, what it leaves. Kernel test: needs
//! root.

mod harness;

use harness::{Place, UID_BASE, wait_for};
use kip_sandbox::launcher::LaunchError;
use std::os::fd::AsFd;

#[test]
fn threads_share_a_launcher() {
    let place = Place::new();
    let mut running = place.start(&["/bin/sh", "-c", "echo up; exec sleep 1000"]);
    running.wait_for_line("up");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..20).for_each(|_| drop(place.launcher.namespaces(UID_BASE, "many").unwrap())));
        }
        for _ in 0..20 {
            let (out, _) = place.exec(&running, &["echo", "hello"]).unwrap();
            assert_eq!(out, "hello\n");
        }
    });
    running.kill();
}

#[test]
fn it_ends_with_its_daemon_and_what_it_started_goes_on() {
    let mut place = Place::new();
    let mut running = place.start(&["/bin/sh", "-c", "echo up; exec sleep 1000"]);
    running.wait_for_line("up");
    let other = Place::new();
    let pid = place.launcher.pid();
    let old = std::mem::replace(&mut place.launcher, other_launcher());
    drop(old);
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    let ended = kip_sys::process::wait_for_end(running.started.pidfd.as_fd(), Some(std::time::Duration::ZERO));
    assert!(!ended.unwrap(), "the sandbox lives");
    // Another launcher takes over.
    assert_eq!(place.exec(&running, &["hostname"]).unwrap().0, "boxed\n");
    running.kill();
    drop(other);
}

fn other_launcher() -> kip_sandbox::Launcher {
    kip_sandbox::Launcher::spawn(std::path::Path::new(env!("CARGO_BIN_EXE_kip-launch"))).unwrap()
}

#[test]
fn a_dead_launcher_is_told() {
    let launcher = other_launcher();
    let pidfd = kip_sys::process::pidfd_open(launcher.pid()).unwrap();
    kip_sys::process::pidfd_send_signal(pidfd.as_fd(), kip_sys::process::Signal::KILL).unwrap();
    let error = wait_for("the end of the events", || launcher.next_event().err());
    assert!(matches!(error, LaunchError::Gone(_)), "{error}");
    let error = launcher.namespaces(UID_BASE, "dead").unwrap_err();
    assert!(matches!(error, LaunchError::Gone(_)), "{error}");
}

#[test]
fn what_is_no_launcher_and_what_is_too_long_are_told() {
    let error = kip_sandbox::Launcher::spawn(std::path::Path::new("/nonexistent")).unwrap_err();
    assert!(error.to_string().contains("/nonexistent"), "{error}");
    assert!(kip_sandbox::Launcher::spawn(std::path::Path::new("/bin/true")).is_err());
    let place = Place::new();
    let error = place.try_start(place.mounts(), &["true", &"x".repeat(200_000)], None).err().expect("too long");
    assert!(matches!(error, LaunchError::TooLong { .. }), "{error}");
    place.start(&["true", &"x".repeat(100_000)]).finish();
    let error = place.try_start(place.mounts(), &["a\0b"], None).err().expect("a NUL byte").to_string();
    assert!(error.contains("NUL"), "{error}");
    let error = place.launcher.namespaces(UID_BASE, &"h".repeat(100)).unwrap_err();
    assert!(error.to_string().contains("uts"), "{error}");
}
