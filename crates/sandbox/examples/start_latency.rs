//! Measures how long a sandbox takes from the request to the program's first instructions, as a
//! start and with a restorer as its pid 1, and what it is made of.
//!
//! `cargo run --release --example start_latency -p kip-sandbox [SAMPLES]`, as root. Prints a table
//! in microseconds; the raw samples go to the file named by the second argument, as JSON.
#![forbid(unsafe_code)]

use kip_sandbox::base::Base;
use kip_sandbox::cgroup::Cgroups;
use kip_sandbox::launcher::{Launcher, Namespaces, SandboxExec, SandboxRestore, SandboxStart, environment};
use kip_sandbox::restorer;
use kip_sandbox::rootfs::{Mounts, RootfsSpec};
use kip_types::Limits;
use kip_types::spec::{FilterKind, RootKind};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::time::{ClockId, clock_gettime};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

const UID_BASE: u32 = 0x3f10_0000;

/// The first thing it does is to read the clock; then it writes what it read.
const PROGRAM: &str = r#"
static long call(long n, long a, long b, long c) {
    long r;
    __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    return r;
}
void _start(void) {
    long t[2];
    call(228, 1, (long)t, 0);
    call(1, OUT, (long)t, sizeof t);
    call(231, 0, 0, 0);
}
"#;

fn now_ns() -> i64 {
    let t = clock_gettime(ClockId::Monotonic);
    t.tv_sec * 1_000_000_000 + t.tv_nsec
}

struct Bench {
    launcher: Launcher,
    namespaces: Namespaces,
    net: OwnedFd,
    cgroup: Vec<OwnedFd>,
    command: Vec<String>,
    env: Vec<String>,
}

impl Bench {
    /// From the request to the program's clock, and to the answer; nanoseconds.
    fn start(&self, mounts: Mounts) -> (i64, i64) {
        let (out, out_in) = pipe_with(PipeFlags::CLOEXEC).expect("pipe");
        let (status, status_in) = pipe_with(PipeFlags::CLOEXEC).expect("pipe");
        let began = now_ns();
        let started = self
            .launcher
            .start(SandboxStart {
                hostname: "boxed",
                root: RootKind::default(),
                filter: FilterKind::default(),
                command: &self.command,
                env: &self.env,
                workdir: None,
                directories: &[],
                read_only: false,
                allow_setuid: false,
                capabilities: kip_types::spec::capabilities(&[], &[]),
                ids: None,
                limits: &[],
                exec_only: false,
                mounts,
                namespaces: &self.namespaces,
                net: self.net.as_fd(),
                cgroup: &self.cgroup,
                stdin: None,
                stdout: out_in.as_fd(),
                stderr: out_in.as_fd(),
                status: status_in.as_fd(),
            })
            .expect("it starts");
        let answered = now_ns();
        drop((out_in, status_in));
        let first = read_clock(out);
        let mut records = Vec::new();
        File::from(status).read_to_end(&mut records).expect("status pipe");
        kip_sys::process::wait_for_end(started.pidfd.as_fd(), None).expect("poll");
        (first - began, answered - began)
    }

    /// As [`Bench::start`], of a restorer that writes its clock.
    fn restore(&self, mounts: Mounts, program: &OwnedFd) -> (i64, i64) {
        let (out, out_in) = pipe_with(PipeFlags::CLOEXEC).expect("pipe");
        let began = now_ns();
        let Namespaces { user, uts, ipc } = &self.namespaces;
        let request = SandboxRestore {
            root: RootKind::default(),
            mounts,
            user: user.as_fd(),
            net: self.net.as_fd(),
            uts: uts.as_fd(),
            ipc: Some(ipc.as_fd()),
            time: None,
            control: out_in.as_fd(),
            program: program.as_fd(),
            cgroup: &self.cgroup,
        };
        let started = self.launcher.restore(request).expect("it starts");
        let answered = now_ns();
        drop(out_in);
        let first = read_clock(out);
        kip_sys::process::wait_for_end(started.pidfd.as_fd(), None).expect("poll");
        (first - began, answered - began)
    }

    fn exec(&self, init: &OwnedFd) -> i64 {
        let (out, out_in) = pipe_with(PipeFlags::CLOEXEC).expect("pipe");
        let began = now_ns();
        let request = SandboxExec {
            filter: FilterKind::default(),
            init: init.as_fd(),
            own_time: false,
            command: &self.command,
            env: &self.env,
            workdir: None,
            allow_setuid: false,
            capabilities: kip_types::spec::capabilities(&[], &[]),
            ids: None,
            limits: &[],
            cgroup: &self.cgroup,
            stdin: out.as_fd(),
            stdout: out_in.as_fd(),
            stderr: out_in.as_fd(),
        };
        let executing = self.launcher.exec(request).expect("it runs");
        drop(out_in);
        let first = read_clock(out);
        kip_sys::process::wait_for_end(executing.pidfd.as_fd(), None).expect("poll");
        while self.launcher.next_event().expect("alive").is_some() {}
        first - began
    }
}

fn read_clock(out: OwnedFd) -> i64 {
    let mut bytes = [0; 16];
    File::from(out).read_exact(&mut bytes).expect("the program writes its clock");
    let word = |at: usize| i64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    word(0) * 1_000_000_000 + word(8)
}

/// A program that writes its clock to this descriptor.
fn compile(into: &Path, out: i32, flags: &str) {
    let source = into.with_extension("c");
    std::fs::write(&source, PROGRAM).expect("write");
    let mut cc = std::process::Command::new("cc");
    cc.args(flags.split_whitespace()).arg(format!("-DOUT={out}")).arg("-o").arg(into).arg(&source);
    assert!(cc.status().expect("cc").success());
    std::fs::remove_file(source).expect("remove");
}

fn net_namespace() -> OwnedFd {
    let make = || {
        kip_sys::ns::unshare(kip_sys::ns::Unshare { net: true, ..Default::default() }).expect("root");
        File::open("/proc/thread-self/ns/net").expect("proc").into()
    };
    std::thread::spawn(make).join().expect("no panic")
}

fn launcher_path() -> PathBuf {
    let own = std::env::current_exe().expect("proc");
    own.parent().and_then(Path::parent).expect("target/PROFILE/examples").join("kip-launch")
}

fn main() {
    let samples: usize = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(200);
    let dir = PathBuf::from(format!("/tmp/kip-bench-{}", std::process::id()));
    let layer = dir.join("layer");
    std::fs::create_dir_all(layer.join("srv")).expect("create");
    compile(&layer.join("srv/first"), 1, "-Os -nostdlib -static -fno-stack-protector -fno-pie -no-pie");
    compile(&dir.join("restorer"), restorer::CONTROL_FD, restorer::COMPILER_FLAGS);
    let restorer = File::open(dir.join("restorer")).expect("compiled").into();
    let base = Base::prepare(&dir.join("base")).expect("base");
    let launcher = Launcher::spawn(&launcher_path()).expect("build kip-launch first: cargo build --release");
    let cgroups = Cgroups::detect().expect("cgroups");
    let group = format!("kip-bench-{}", std::process::id());
    let mut all: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
    let mut note = |what, ns| all.entry(what).or_default().push(ns);
    let spec = |n: usize| RootfsSpec {
        kind: RootKind::default(),
        base: base.root.clone(),
        layer: Some(layer.clone()),
        pins: None,
        image: None,
        dir: dir.join(format!("proc-{n}")),
        uid_base: UID_BASE,
        hostname: "bench".into(),
        hosts: String::new(),
        resolv_conf: None,
    };
    let cgroup = cgroups.create(&format!("{group}/web"), &Limits::default()).expect("cgroup");
    let bench = Bench {
        namespaces: launcher.namespaces(UID_BASE, "bench").expect("namespaces"),
        net: net_namespace(),
        cgroup: cgroup.task_files().expect("cgroup"),
        command: vec!["/srv/first".into()],
        env: environment("bench", &BTreeMap::new()),
        launcher,
    };
    let kept = spec(samples).mount(&bench.launcher, bench.namespaces.user.as_fd()).expect("mounts");
    let mut sleeper = Bench { command: vec!["sleep".into(), "1000".into()], env: bench.env.clone(), ..bench };
    let init = start_sleeper(&sleeper, kept.duplicate().expect("Linux 6.15"));
    sleeper.command = vec!["/srv/first".into()];
    let bench = sleeper;
    for n in 0..samples {
        let (first, answered) = bench.start(kept.duplicate().expect("Linux 6.15"));
        note("start: request to first instruction", first);
        note("start: request to answer", answered);
        let (first, answered) = bench.restore(kept.duplicate().expect("Linux 6.15"), &restorer);
        note("restore: request to first instruction", first);
        note("restore: request to answer", answered);
        note("exec: request to first instruction", bench.exec(&init));
        let began = now_ns();
        let spare = bench.launcher.namespaces(UID_BASE, "bench").expect("namespaces");
        note("prepare: user, uts and ipc namespaces", now_ns() - began);
        drop(spare);
        let began = now_ns();
        let mounts = spec(n).mount(&bench.launcher, bench.namespaces.user.as_fd()).expect("mounts");
        note("prepare: directories and both overlays", now_ns() - began);
        drop(mounts);
        let began = now_ns();
        let spare = cgroups.create(&format!("{group}/spare"), &Limits::default()).expect("cgroup");
        note("prepare: cgroup with limits", now_ns() - began);
        spare.remove().expect("empty");
    }
    kip_sys::process::pidfd_send_signal(init.as_fd(), kip_sys::process::Signal::KILL).expect("it runs");
    kip_sys::process::wait_for_end(init.as_fd(), None).expect("poll");
    cgroups.remove_all(&group).expect("empty");
    drop((bench, kept));
    std::fs::remove_dir_all(&dir).expect("remove");
    report(&all);
}

fn start_sleeper(bench: &Bench, mounts: Mounts) -> OwnedFd {
    let (status, status_in) = pipe_with(PipeFlags::CLOEXEC).expect("pipe");
    let null = File::options().write(true).open("/dev/null").expect("open");
    let request = SandboxStart {
        hostname: "boxed",
        root: RootKind::default(),
        filter: FilterKind::default(),
        command: &bench.command,
        env: &bench.env,
        workdir: None,
        directories: &[],
        read_only: false,
        allow_setuid: false,
        capabilities: kip_types::spec::capabilities(&[], &[]),
        ids: None,
        limits: &[],
        exec_only: false,
        mounts,
        namespaces: &bench.namespaces,
        net: bench.net.as_fd(),
        cgroup: &bench.cgroup,
        stdin: None,
        stdout: null.as_fd(),
        stderr: null.as_fd(),
        status: status_in.as_fd(),
    };
    let started = bench.launcher.start(request).expect("it starts");
    File::from(status).read_exact(&mut [0; 8]).expect("it runs");
    started.pidfd
}

fn report(all: &BTreeMap<&str, Vec<i64>>) {
    println!("{:42} {:>8} {:>8} {:>8} {:>6}", "microseconds", "p10", "p50", "p99", "n");
    for (what, samples) in all {
        let mut sorted = samples.clone();
        sorted.sort_unstable();
        let at = |q: usize| sorted[(sorted.len() - 1) * q / 100] / 1000;
        println!("{what:42} {:>8} {:>8} {:>8} {:>6}", at(10), at(50), at(99), sorted.len());
    }
    if let Some(file) = std::env::args().nth(2) {
        std::fs::write(&file, serde_json::to_vec(all).expect("numbers")).expect("write");
    }
}
