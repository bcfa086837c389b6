//! What a restorer finds as pid 1 of a sandbox, told by one of the test's own (`report.c`). Kernel
//! test: needs root.

mod harness;

use harness::{Place, Running, wait_for};
use kip_sandbox::init::{InitRecord, RECORD_BYTES};
use kip_sandbox::launcher::{LaunchError, SandboxRestore, Started};
use kip_sandbox::rootfs::Mounts;
use kip_sandbox::{Step, restorer};
use kip_sys::fdpass;
use kip_types::lifecycle::Exit;
use rustix::fs::AtFlags;
use rustix::io::Errno;
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Compiles `report.c` with the flags of the real restorer.
fn reporter(place: &Place) -> OwnedFd {
    let path = place.dir.path().join("report");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/report.c");
    let status = Command::new("cc")
        .args(restorer::COMPILER_FLAGS.split_whitespace())
        .arg("-o")
        .arg(&path)
        .arg(source)
        .status()
        .expect("a C compiler");
    assert!(status.success());
    File::open(&path).unwrap().into()
}

struct Restored {
    started: Started,
    control: OwnedFd,
    told: HashMap<String, String>,
}

impl Restored {
    /// Starts the reporter and hears it out.
    fn start(place: &Place, program: &OwnedFd) -> Restored {
        Self::start_on(place, place.mounts(), program)
    }

    fn start_on(place: &Place, mounts: Mounts, program: &OwnedFd) -> Restored {
        Self::start_as(place, mounts, program, |_| {})
    }

    fn start_as(
        place: &Place,
        mounts: Mounts,
        program: &OwnedFd,
        change: impl FnOnce(&mut SandboxRestore<'_>),
    ) -> Restored {
        let (control, theirs) = fdpass::seqpacket_pair().unwrap();
        let cgroup = place.cgroup.task_files().unwrap();
        let mut request = place.restore_request(mounts, &theirs, program, &cgroup);
        change(&mut request);
        let started = place.launcher.restore(request).unwrap();
        drop(theirs);
        let mut told = HashMap::new();
        loop {
            let (bytes, _) = fdpass::recv(control.as_fd(), fdpass::MAX_BYTES).unwrap();
            let text = String::from_utf8(bytes).unwrap();
            let (name, rest) = text.split_once('\n').unwrap();
            if name == "done" {
                return Restored { started, control, told };
            }
            told.insert(name.to_owned(), rest.to_owned());
        }
    }

    fn number(&self, name: &str) -> i64 {
        self.told[name].parse().unwrap()
    }

    fn status(&self, key: &str) -> &str {
        let line = self.told["/proc/self/status"].lines().find_map(|l| l.strip_prefix(&format!("{key}:")));
        line.unwrap_or_else(|| panic!("no {key}")).trim()
    }

    fn end(self) {
        drop(self.control);
        assert!(kip_sys::process::wait_for_end(self.started.pidfd.as_fd(), Some(Duration::from_secs(10))).unwrap());
    }
}

/// The lines of a mountinfo without numbers of mounts, devices and groups: proc_pid_mountinfo(5).
fn shape(mountinfo: &str) -> Vec<String> {
    let one = |line: &str| line.split(' ').skip(3).collect::<Vec<_>>().join(" ");
    mountinfo.lines().map(one).collect()
}

#[test]
fn a_restorer_is_pid_1_with_every_capability() {
    let place = Place::new();
    let program = reporter(&place);
    let restored = Restored::start(&place, &program);
    assert_eq!(restored.told["argv"], "kip-restore");
    let number = |name| restored.number(name);
    assert_eq!((number("arguments"), number("environment"), number("pid")), (1, 0, 1));
    assert_eq!((number("uid"), number("gid")), (0, 0));
    let last: u32 = std::fs::read_to_string("/proc/sys/kernel/cap_last_cap").unwrap().trim().parse().unwrap();
    for key in ["CapEff", "CapPrm", "CapBnd"] {
        let set = u64::from_str_radix(restored.status(key), 16).unwrap();
        assert_eq!(set, (2 << last) - 1, "{key}");
    }
    for (key, wanted) in [
        ("Uid", "0\t0\t0\t0"),
        ("Gid", "0\t0\t0\t0"),
        ("Groups", ""),
        ("NoNewPrivs", "0"),
        ("Seccomp", "0"),
        ("SigBlk", "0000000000000000"),
        ("SigIgn", "0000000000000000"),
        ("NSpid", "1"),
        ("NSsid", "1"),
        ("Umask", "0022"),
    ] {
        assert_eq!(restored.status(key), wanted, "{key}");
    }
    assert_eq!((number("chosen"), number("ended")), (77, 3 << 8), "clone3 with a pid of its choice");
    let at = restorer::ADDRESS as i64..(restorer::ADDRESS + (1 << 20)) as i64;
    assert!(at.contains(&number("code")) && at.contains(&number("data")));
    assert!(place.cgroup.pids().unwrap().contains(&restored.started.init_pid));
    assert_eq!(place.cgroup.pids().unwrap().len(), 1, "only pid 1 is in the cgroup");
    restored.end();
}

// promise waking: the restorer has the sandbox's own user namespace and nothing of the host's
// held by: this,
//   `crates/sandbox/tests/restore.rs::namespaces_are_those_given_and_the_new_ones_belong_to_the_user_namespace`
#[test]
fn it_finds_the_mounts_of_a_start_and_nothing_of_the_host_or_the_launcher() {
    let before = harness::host_mounts();
    let place = Place::new();
    let kept = place.mounts();
    let mut running = place.start_on(kept.duplicate().unwrap(), &["/bin/sh", "-c", "echo up; exec sleep 1000"]);
    running.wait_for_line("up");
    let mountinfo = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
    let of_a_start = shape(&mountinfo(running.started.init_pid));
    running.kill();
    let restored = Restored::start_on(&place, kept, &reporter(&place));
    assert_eq!(shape(&restored.told["/proc/self/mountinfo"]), of_a_start);
    assert_eq!(shape(&mountinfo(restored.started.init_pid)), of_a_start);
    assert!(of_a_start.len() > 4, "/, /usr, /proc and masks: {of_a_start:?}");
    let names = restored.told["/proc"].lines().map(|l| l.split(' ').next().unwrap());
    let pids: Vec<_> = names.filter(|n| n.bytes().all(|b| b.is_ascii_digit())).collect();
    assert_eq!(pids, ["1"]);
    let mut fds: Vec<_> = restored.told["/proc/self/fd"].lines().filter(|l| !l.starts_with('.')).collect();
    fds.sort_unstable();
    assert_eq!(fds[..3], ["0 /dev/null", "1 /dev/null", "2 /dev/null"]);
    assert!(fds[3].starts_with("3 socket:") && fds[4] == "4 /proc/1/fd", "{fds:?}");
    assert_eq!(fds.len(), 5, "{fds:?}");
    // Its null device is the sandbox's, on the sandbox's root.
    let null = std::fs::read_to_string(format!("/proc/{}/fdinfo/0", restored.started.init_pid)).unwrap();
    let id = null.lines().find_map(|l| l.strip_prefix("mnt_id:")).unwrap().trim();
    let root = mountinfo(restored.started.init_pid).lines().next().unwrap().to_owned();
    assert_eq!(root.split(' ').next(), Some(id), "{root}");
    assert_eq!(harness::host_mounts(), before, "nothing appears in the host's namespace");
    restored.end();
}

#[test]
fn namespaces_are_those_given_and_the_new_ones_belong_to_the_user_namespace() {
    let place = Place::new();
    let program = reporter(&place);
    let restored = Restored::start(&place, &program);
    let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
    let open = |name: &str| -> OwnedFd {
        File::open(format!("/proc/{}/ns/{name}", restored.started.init_pid)).unwrap().into()
    };
    for (name, given) in [
        ("user", &place.namespaces.user),
        ("uts", &place.namespaces.uts),
        ("ipc", &place.namespaces.ipc),
        ("net", &place.net),
    ] {
        assert_eq!(inode(&open(name)), inode(given), "{name}");
    }
    // lsns(8) knows the ioctl: the owner's inode.
    let owner = |restored: &Restored, kind: &str| {
        let pid = restored.started.init_pid.to_string();
        let out = Command::new("lsns").args(["-n", "-t", kind, "-o", "ONS", "-p", &pid]).output().unwrap();
        String::from_utf8(out.stdout).unwrap().trim().to_owned()
    };
    let user = inode(&place.namespaces.user).to_string();
    for kind in ["pid", "mnt"] {
        assert_eq!(owner(&restored, kind), user, "{kind}");
    }
    restored.end();
    // One whose System V IPC is in the snapshot has an empty ipc namespace.
    let restored = Restored::start_as(&place, place.mounts(), &program, |request| request.ipc = None);
    let ipc: OwnedFd = File::open(format!("/proc/{}/ns/ipc", restored.started.init_pid)).unwrap().into();
    assert_ne!(inode(&ipc), inode(&place.namespaces.ipc));
    assert_eq!(owner(&restored, "ipc"), user);
    restored.end();
}

#[test]
fn a_broken_null_device_is_no_obstacle() {
    let place = Place::new();
    place.sh("rm /dev/null; ln -s /etc/hostname /dev/null");
    let restored = Restored::start(&place, &reporter(&place));
    let mut fds: Vec<_> = restored.told["/proc/self/fd"].lines().filter(|l| !l.starts_with('.')).collect();
    fds.sort_unstable();
    assert!(fds.len() == 2 && fds[0] == "0 /proc/1/fd" && fds[1].starts_with("3 socket:"), "{fds:?}");
    restored.end();
}

#[test]
fn a_restorer_can_become_init_of_a_program_that_is_there() {
    let place = Place::new();
    let restored = Restored::start(&place, &reporter(&place));
    fdpass::send(restored.control.as_fd(), b"init", &[]).unwrap();
    let cmdline = format!("/proc/{}/cmdline", restored.started.init_pid);
    let resumes = |line: &[u8]| line.starts_with(b"kip-init\0--resume\0");
    wait_for("init", || resumes(&std::fs::read(&cmdline).unwrap()).then_some(()));
    let null = || File::open("/dev/null").unwrap();
    let Restored { started, control, .. } = restored;
    let running = Running { started, stdout: null(), status: null() };
    let script = "cat /proc/1/comm; grep CapEff /proc/self/status; ls /proc/1/fd";
    let (out, exit) = place.exec(&running, &["sh", "-c", script]).unwrap();
    assert_eq!((out.as_str(), exit), ("init\nCapEff:\t00000000a00405fb\n0\n1\n2\n3\n", Exit::Code(0)));
    fdpass::send(control.as_fd(), b"x", &[]).unwrap();
    assert_eq!(first_record(&control), InitRecord::Ended(Exit::Code(9)), "no record of a start before it");
    assert!(kip_sys::process::wait_for_end(running.started.pidfd.as_fd(), Some(Duration::from_secs(10))).unwrap());
}

#[test]
fn init_finds_a_program_that_had_ended_before() {
    let place = Place::new();
    let restored = Restored::start(&place, &reporter(&place));
    fdpass::send(restored.control.as_fd(), b"zombie", &[]).unwrap();
    assert_eq!(first_record(&restored.control), InitRecord::Ended(Exit::Code(9)));
    restored.end();
}

fn first_record(socket: &OwnedFd) -> InitRecord {
    let (bytes, _) = fdpass::recv(socket.as_fd(), RECORD_BYTES).unwrap();
    InitRecord::parse(&bytes.try_into().unwrap()).unwrap()
}

#[test]
fn init_that_is_to_resume_nothing_says_so() {
    let place = Place::new();
    let status = |arguments: &str| {
        let script = format!("exec -a kip-init /.kip/init {arguments} 3>/tmp/told");
        place.start(&["bash", "-c", &script]).finish().1
    };
    assert_eq!(status("--resume 77"), Exit::Code(127));
    assert_eq!(place.sh("tr '\\0\\n\\003' . < /tmp/told").0, "E.......");
    assert_eq!(status("--resume 7x"), Exit::Code(2));
    assert_eq!(status("--resume"), Exit::Code(2));
    assert_eq!(status("--resume 1 2"), Exit::Code(127), "a working directory that is not there");
}

#[test]
fn what_fails_is_told_and_leaves_no_process() {
    let place = Place::new();
    let program = reporter(&place);
    let (_control, theirs) = fdpass::seqpacket_pair().unwrap();
    let cgroup = place.cgroup.task_files().unwrap();
    let wrong: OwnedFd = File::open("/dev/null").unwrap().into();
    let text: OwnedFd = File::open("/etc/passwd").unwrap().into();
    let request = |program| place.restore_request(place.mounts(), &theirs, program, &cgroup);
    let check = |result: Result<Started, LaunchError>, step, errno: Errno| {
        let Err(LaunchError::Failed(failure)) = result else { panic!("{step:?}: {result:?}") };
        assert_eq!((failure.step, failure.errno), (step, errno.raw_os_error()), "{failure}");
        wait_for("the end of every child", || children(place.launcher.pid()).is_empty().then_some(()));
        assert!(place.cgroup.pids().unwrap().is_empty());
    };
    let open_files = || std::fs::read_dir(format!("/proc/{}/fd", place.launcher.pid())).unwrap().count();
    let before = open_files();
    let restore = |request| place.launcher.restore(request);
    check(restore(request(&text)), Step::Restorer, Errno::ACCESS);
    check(restore(request(&wrong)), Step::Restorer, Errno::ACCESS);
    let mut other = request(&program);
    other.net = wrong.as_fd();
    check(restore(other), Step::Namespaces, Errno::INVAL);
    let mut other = request(&program);
    other.user = place.net.as_fd();
    check(restore(other), Step::UserNamespace, Errno::INVAL);
    let mut other = request(&program);
    let files = [wrong.try_clone().unwrap()];
    other.cgroup = &files;
    check(restore(other), Step::Cgroup, Errno::BADF);
    let mut other = request(&program);
    other.mounts.root = wrong.try_clone().unwrap();
    check(restore(other), Step::Root, Errno::INVAL);
    let writing: OwnedFd = File::options().append(true).open(place.dir.path().join("report")).unwrap().into();
    check(restore(request(&program)), Step::Restorer, Errno::TXTBSY);
    drop(writing);
    for (name, step) in [("proc", Step::Proc), ("usr", Step::Usr)] {
        let tricked = Place::new();
        let mut other = request(&program);
        other.mounts = tricked.mounts();
        rustix::fs::unlinkat(&other.mounts.root, name, AtFlags::REMOVEDIR).unwrap();
        rustix::fs::symlinkat("/tmp", &other.mounts.root, name).unwrap();
        check(restore(other), step, Errno::NOTDIR);
    }
    Restored::start(&place, &program).end();
    wait_for("the launcher keeps nothing", || (open_files() == before).then_some(()));
    assert_eq!(place.sh("exit 5").1, Exit::Code(5), "the launcher goes on");
}

#[test]
fn memory_is_a_program_too() {
    let place = Place::new();
    let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
    let memory = rustix::fs::memfd_create("kip-restore", flags).unwrap();
    std::io::copy(&mut File::from(reporter(&place)), &mut File::from(memory.try_clone().unwrap())).unwrap();
    Restored::start(&place, &memory).end();
}

/// Processes whose parent it is, ended ones included.
fn children(parent: u32) -> Vec<String> {
    let of = |pid: &str| {
        let stat = std::fs::read_to_string(Path::new("/proc").join(pid).join("stat")).ok()?;
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse::<u32>().ok()
    };
    let names = std::fs::read_dir("/proc").unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    names.filter(|pid| pid.bytes().all(|b| b.is_ascii_digit()) && of(pid) == Some(parent)).collect()
}

#[test]
fn held_mounts_keep_what_is_bound_to_a_path_of_a_sandbox_that_is_gone() {
    let place = Place::new();
    let command =
        "exec python3 -c \"import socket, time; s = socket.socket(socket.AF_UNIX); s.bind('/srv/here'); s.listen()
print('up', flush=True); time.sleep(1000)\"";
    let mut running = place.start(&["/bin/sh", "-c", command]);
    running.wait_for_line("up");
    let program = std::fs::read_dir("/proc").unwrap().flatten().find_map(|entry| {
        let status = std::fs::read_to_string(entry.path().join("status")).ok()?;
        let parent = status.lines().find_map(|l| l.strip_prefix("PPid:"))?.trim().parse().ok();
        (parent == Some(running.started.init_pid)).then(|| entry.file_name().into_string().unwrap().parse().unwrap())
    });
    let program = kip_sys::process::pidfd_open(program.unwrap()).unwrap();
    let held = kip_sys::process::pidfd_getfd(program.as_fd(), 3).unwrap();
    let mut kept = place.launcher.copy_mounts(running.started.pidfd.as_fd(), &[]).unwrap().files;
    running.kill();
    let try_connect = "import socket; socket.socket(socket.AF_UNIX).connect('/srv/here'); print('met')";
    // As often as one likes, from a start and from a restore alike.
    for _ in 0..2 {
        let mut running = place.start_on(kept, &["/bin/sh", "-c", "echo up; exec sleep 1000"]);
        running.wait_for_line("up");
        assert_eq!(place.exec(&running, &["python3", "-c", try_connect]).unwrap().0, "met\n");
        kept = place.launcher.copy_mounts(running.started.pidfd.as_fd(), &[]).unwrap().files;
        running.kill();
    }
    let restored = Restored::start_on(&place, kept, &reporter(&place));
    kept = place.launcher.copy_mounts(restored.started.pidfd.as_fd(), &[]).unwrap().files;
    restored.end();
    assert!(place.spec.mount(&place.launcher, place.namespaces.user.as_fd()).is_err(), "one filesystem at a time");
    drop((kept, held));
    // The socket is gone with its last holder: its file is there, and no listener behind it.
    let mut running = place.start(&["/bin/sh", "-c", "echo up; exec sleep 1000"]);
    running.wait_for_line("up");
    let script = format!("try:\n  {try_connect}\nexcept ConnectionRefusedError: print('refused')");
    assert_eq!(place.exec(&running, &["python3", "-c", &script]).unwrap().0, "refused\n");
    running.kill();
}
