//! A sandbox for tests: real mounts, namespaces and cgroups in a temporary directory, gone
//! afterwards.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use kip_sandbox::base::Base;
use kip_sandbox::cgroup::{Cgroup, Cgroups};
use kip_sandbox::init::{InitRecord, RECORD_BYTES};
use kip_sandbox::launcher::{
    LaunchError, Launcher, Namespaces, SandboxExec, SandboxRestore, SandboxStart, Started, environment,
};
use kip_sandbox::rootfs::{Mounts, RootfsSpec};
use kip_types::Limits;
use kip_types::lifecycle::Exit;
use kip_types::spec::{FilterKind, RootKind};
use rustix::fs::{Mode, OFlags};
use rustix::pipe::{PipeFlags, pipe_with};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

pub const UID_BASE: u32 = 0x3f00_0000;
static COUNT: AtomicU32 = AtomicU32::new(0);

/// Everything a proc needs but its processes.
pub struct Place {
    pub dir: tempfile::TempDir,
    pub launcher: Launcher,
    pub spec: RootfsSpec,
    pub namespaces: Namespaces,
    pub net: OwnedFd,
    pub cgroups: Cgroups,
    pub cgroup: Cgroup,
    group: String,
    pub allow_setuid: bool,
    /// Programs are only looked at.
    pub exec_only: bool,
}

impl Place {
    pub fn new() -> Place {
        Self::with(&Limits::default())
    }

    pub fn with(limits: &Limits) -> Place {
        let dir = tempfile::tempdir().unwrap();
        let launcher = Launcher::spawn(Path::new(env!("CARGO_BIN_EXE_kip-launch"))).unwrap();
        let base = Base::prepare(&dir.path().join("base")).unwrap();
        let namespaces = launcher.namespaces(UID_BASE, "boxed").unwrap();
        let spec = RootfsSpec {
            kind: RootKind::default(),
            base: base.root,
            layer: None,
            pins: None,
            image: None,
            dir: dir.path().join("proc"),
            uid_base: UID_BASE,
            hostname: "boxed".into(),
            hosts: String::new(),
            resolv_conf: None,
        };
        let cgroups = Cgroups::detect().unwrap();
        let group = format!("kip-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let cgroup = cgroups.create(&format!("{group}/web"), limits).unwrap();
        Place {
            dir,
            launcher,
            spec,
            namespaces,
            net: new_net(),
            cgroups,
            cgroup,
            group,
            allow_setuid: false,
            exec_only: false,
        }
    }

    pub fn mounts(&self) -> Mounts {
        self.spec.mount(&self.launcher, self.namespaces.user.as_fd()).unwrap()
    }

    pub fn start(&self, command: &[&str]) -> Running {
        self.start_on(self.mounts(), command)
    }

    pub fn start_on(&self, mounts: Mounts, command: &[&str]) -> Running {
        self.try_start(mounts, command, None).unwrap()
    }

    pub fn try_start(&self, mounts: Mounts, command: &[&str], workdir: Option<&str>) -> Result<Running, LaunchError> {
        let (stdout, stdout_in) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let (status, status_in) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let started = self.launcher.start(SandboxStart {
            hostname: "boxed",
            root: RootKind::default(),
            filter: FilterKind::default(),
            command: &strings(command),
            env: &environment("boxed", &Default::default()),
            workdir,
            directories: &[],
            read_only: false,
            allow_setuid: self.allow_setuid,
            capabilities: kip_types::spec::capabilities(&[], &[]),
            ids: None,
            limits: &[],
            exec_only: self.exec_only,
            mounts,
            namespaces: &self.namespaces,
            net: self.net.as_fd(),
            cgroup: &self.cgroup.task_files().unwrap(),
            stdin: None,
            stdout: stdout_in.as_fd(),
            stderr: stdout_in.as_fd(),
            status: status_in.as_fd(),
        })?;
        Ok(Running { started, stdout: stdout.into(), status: status.into() })
    }

    /// What a restore of this place asks for.
    pub fn restore_request<'a>(
        &'a self,
        mounts: Mounts,
        control: &'a OwnedFd,
        program: &'a OwnedFd,
        cgroup: &'a [OwnedFd],
    ) -> SandboxRestore<'a> {
        SandboxRestore {
            root: RootKind::default(),
            mounts,
            user: self.namespaces.user.as_fd(),
            net: self.net.as_fd(),
            uts: self.namespaces.uts.as_fd(),
            ipc: Some(self.namespaces.ipc.as_fd()),
            time: None,
            control: control.as_fd(),
            program: program.as_fd(),
            cgroup,
        }
    }

    /// The group above the one of this place.
    pub fn group(&self) -> Cgroup {
        self.cgroups.open(&self.group)
    }

    /// Runs a shell command to its end: output and exit.
    pub fn sh(&self, script: &str) -> (String, Exit) {
        self.start(&["/bin/sh", "-c", script]).finish()
    }

    /// Runs a command in the sandbox to its end.
    pub fn exec(&self, running: &Running, command: &[&str]) -> Result<(String, Exit), LaunchError> {
        let (mut stdout, stdout_in) = pipe_with(PipeFlags::CLOEXEC).map(|(r, w)| (File::from(r), w)).unwrap();
        let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let executing = self.launcher.exec(SandboxExec {
            filter: FilterKind::default(),
            init: running.started.pidfd.as_fd(),
            own_time: false,
            command: &strings(command),
            env: &environment("boxed", &Default::default()),
            workdir: None,
            allow_setuid: self.allow_setuid,
            capabilities: kip_types::spec::capabilities(&[], &[]),
            ids: None,
            limits: &[],
            cgroup: &self.cgroup.task_files().unwrap(),
            stdin: null.as_fd(),
            stdout: stdout_in.as_fd(),
            stderr: stdout_in.as_fd(),
        })?;
        drop(stdout_in);
        let mut text = String::new();
        stdout.read_to_string(&mut text).unwrap();
        let ended = wait_for("the end of the exec", || self.launcher.next_event().unwrap());
        assert_eq!(ended.id, executing.id);
        Ok((text, ended.exit))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.cgroups.remove_all(&self.group).unwrap();
    }
}

pub struct Running {
    pub started: Started,
    pub stdout: File,
    pub status: File,
}

impl Running {
    pub fn record(&mut self) -> Option<InitRecord> {
        let mut bytes = [0; RECORD_BYTES];
        self.status.read_exact(&mut bytes).ok()?;
        Some(InitRecord::parse(&bytes).expect("a record of ours"))
    }

    /// Reads output until the line is there.
    pub fn wait_for_line(&mut self, line: &str) {
        let mut text = Vec::new();
        let mut byte = [0];
        while !text.ends_with(format!("{line}\n").as_bytes()) {
            let n = self.stdout.read(&mut byte).unwrap();
            assert_eq!(n, 1, "the output ended without {line:?}: {:?}", String::from_utf8_lossy(&text));
            text.push(byte[0]);
        }
    }

    pub fn finish(mut self) -> (String, Exit) {
        let mut text = String::new();
        self.stdout.read_to_string(&mut text).unwrap();
        assert!(matches!(self.record(), Some(InitRecord::Running { .. })), "output {text:?}");
        let Some(InitRecord::Ended(exit)) = self.record() else { panic!("no end; output {text:?}") };
        assert!(kip_sys::process::wait_for_end(self.started.pidfd.as_fd(), Some(Duration::from_secs(10))).unwrap());
        (text, exit)
    }

    pub fn kill(self) {
        kip_sys::process::pidfd_send_signal(self.started.pidfd.as_fd(), kip_sys::process::Signal::KILL).unwrap();
        assert!(kip_sys::process::wait_for_end(self.started.pidfd.as_fd(), Some(Duration::from_secs(10))).unwrap());
    }
}

pub fn strings(words: &[&str]) -> Vec<String> {
    words.iter().map(|w| w.to_string()).collect()
}

/// A network namespace with nothing in it. Only the thread that makes it enters it.
pub fn new_net() -> OwnedFd {
    std::thread::spawn(|| {
        kip_sys::ns::unshare(kip_sys::ns::Unshare { net: true, ..Default::default() }).unwrap();
        File::open("/proc/thread-self/ns/net").unwrap().into()
    })
    .join()
    .unwrap()
}

pub fn wait_for<T>(what: &str, mut find: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        if let Some(found) = find() {
            return found;
        }
        assert!(Instant::now() < until, "{what} did not come");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// How many mounts the host has, but for disks in files, which other tests mount meanwhile.
pub fn host_mounts() -> usize {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts.lines().filter(|line| !line.contains(" /dev/loop")).count()
}

pub fn path(dir: &tempfile::TempDir, name: &str) -> PathBuf {
    dir.path().join(name)
}
