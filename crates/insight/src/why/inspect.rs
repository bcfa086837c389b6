//! Inspection of a running proc: its threads' CPU time within a second, its sockets, its timers.
//!
//! Only what cannot wait for the program: /proc without the program's memory, and sock_diag without
//! `tcp_info`, for which the kernel takes the socket's lock. Nothing is read from a socket, and the
//! one fdinfo that is opened is a timerfd's, whose lock is held for instructions only. Between
//! finding a timerfd and reading about it the program may put an epoll set in its place, whose
//! fdinfo can wait: for this the caller inspects on a thread that it can do without.

use super::flows::{Flow, Flows};
use kip_clocks::Now;
use kip_clocks::tree;
use kip_clocks::{IN_MS, POINTED};
use kip_net::diag::{Diag, DiagError, SocketInfo, TcpState};
use kip_sys::status::Status;
use kip_types::Protocol;
use kip_types::api::{ProgramView, SeenView, SocketState, SocketView, ThreadView, TimerView};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long threads are watched.
const WATCH: Duration = Duration::from_secs(1);
/// Most of each kind in one answer.
const MOST_THREADS: usize = 32;
const MOST_SOCKETS: usize = 256;
const MOST_TIMERS: usize = 64;

/// What an inspection needs to know beforehand.
pub(super) struct Subject {
    /// Host ids of its processes.
    pub(super) pids: Vec<u32>,
    /// Its network namespace.
    pub(super) netns: Option<OwnedFd>,
    /// Its addresses there.
    pub(super) addresses: [IpAddr; 2],
}

/// A process as it was found.
struct FoundProcess {
    pid: u32,
    view: ProgramView,
    /// Host id of its parent; 0 if that is not visible.
    parent: u32,
}

/// Inspects. Takes [`WATCH`].
pub(super) fn inspect(subject: &Subject) -> Result<SeenView, DiagError> {
    let begin = Instant::now();
    let before = cpu_times(&subject.pids);
    let programs: Vec<FoundProcess> = subject.pids.iter().filter_map(|pid| program(*pid)).collect();
    std::thread::sleep(WATCH.saturating_sub(begin.elapsed()));
    let threads = threads(&programs, &before);
    let watched_us = begin.elapsed().as_micros() as u64;
    // Afterwards, so that what came while the threads were watched is among them.
    let timers = timers(&programs);
    let mut sockets = match &subject.netns {
        Some(netns) => sockets(&Diag::open_in(netns.as_fd())?, subject, &programs)?,
        None => Vec::new(),
    };
    sockets.sort_by_key(|s| (s.packet_ms.unwrap_or(u64::MAX), s.unread == 0 && s.unsent == 0));
    let sockets_in_all = sockets.len();
    sockets.truncate(MOST_SOCKETS);
    let execs = execs(&programs);
    Ok(SeenView { watched_us, threads, sockets, sockets_in_all, timers, execs })
}

fn comm(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim_end_matches('\n').to_owned())
}

fn program(pid: u32) -> Option<FoundProcess> {
    let status = Status::read(pid).ok()?;
    let view = ProgramView { name: comm(&format!("/proc/{pid}/comm"))?, pid: status.inner_id()?.0 };
    Some(FoundProcess { pid, view, parent: status.field("PPid:")?.parse().ok()? })
}

/// Programs under exec are children of none of the proc's processes, as pid 1 is.
fn execs(programs: &[FoundProcess]) -> Vec<ProgramView> {
    let inside = |parent: u32| programs.iter().any(|p| p.pid == parent);
    programs.iter().filter(|p| p.view.pid != 1 && !inside(p.parent)).map(|p| p.view.clone()).collect()
}

/// Host ids of a process's threads.
fn threads_of(pid: u32) -> Vec<u32> {
    kip_sys::status::threads(pid).unwrap_or_default()
}

/// First field of a thread's schedstat: nanoseconds on a CPU.
fn cpu_ns(pid: u32, tid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{tid}/schedstat")).ok()?;
    text.split_ascii_whitespace().next()?.parse().ok()
}

/// By host id.
fn cpu_times(pids: &[u32]) -> HashMap<u32, u64> {
    let threads = pids.iter().flat_map(|pid| threads_of(*pid).into_iter().map(|tid| (*pid, tid)));
    threads.filter_map(|(pid, tid)| Some((tid, cpu_ns(pid, tid)?))).collect()
}

/// Those that ran since `before`. A thread that is new since then ran for all it has.
fn threads(programs: &[FoundProcess], before: &HashMap<u32, u64>) -> Vec<ThreadView> {
    let mut found = Vec::new();
    for process in programs {
        for tid in threads_of(process.pid) {
            let at = format!("/proc/{}/task/{tid}", process.pid);
            let ran = |now: u64| now.saturating_sub(before.get(&tid).copied().unwrap_or(0)) / 1000;
            let Some(cpu_us) = cpu_ns(process.pid, tid).map(ran).filter(|us| *us > 0) else { continue };
            let inside = Status::read(tid).ok().and_then(|status| status.inner_id());
            let (Some(name), Some((inside, _))) = (comm(&format!("{at}/comm")), inside) else { continue };
            found.push(ThreadView { name, tid: inside, program: process.view.clone(), cpu_us });
        }
    }
    found.sort_by_key(|t| std::cmp::Reverse(t.cpu_us));
    found.truncate(MOST_THREADS);
    found
}

/// The programs that have a socket open, by its inode. Reading the link does not touch the socket.
fn owners(programs: &[FoundProcess]) -> BTreeMap<u64, Vec<ProgramView>> {
    let mut owners: BTreeMap<u64, Vec<ProgramView>> = BTreeMap::new();
    for process in programs {
        for (_, target) in tree::descriptors(process.pid).unwrap_or_default() {
            let Some(inode) = tree::socket_inode(&target) else { continue };
            let known = owners.entry(u64::from(inode)).or_default();
            if known.last() != Some(&process.view) {
                known.push(process.view.clone());
            }
        }
    }
    owners
}

fn sockets(diag: &Diag, subject: &Subject, programs: &[FoundProcess]) -> Result<Vec<SocketView>, DiagError> {
    let flows = Flows::read(&subject.addresses);
    let owners = owners(programs);
    let mut found = Vec::new();
    for info in diag.connections()?.into_iter().chain(diag.listeners()?) {
        if info.state != TcpState::Listen || info.receive_queue > 0 {
            found.push(tcp(&info, &flows));
            found.last_mut().expect("just pushed").programs = owners.get(&info.inode).cloned().unwrap_or_default();
        }
    }
    for info in diag.udp()? {
        for mut view in udp(&info, &flows, &subject.addresses) {
            view.programs = owners.get(&info.inode).cloned().unwrap_or_default();
            found.push(view);
        }
    }
    Ok(found)
}

/// An IPv4 address that an IPv6 socket has, as an IPv4 one.
pub(crate) fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

fn tcp(info: &SocketInfo, flows: &Flows) -> SocketView {
    let (local, peer) = (plain(info.local), plain(info.peer));
    let listens = info.state == TcpState::Listen;
    let queued = info.receive_queue > 0 || info.send_queue > 0;
    let flow = if listens { None } else { flows.between(Protocol::Tcp, local, peer) };
    SocketView {
        proto: Protocol::Tcp,
        state: state_of(info.state),
        local,
        peer: (!listens).then_some(peer),
        client: flow.and_then(|f| f.client(local.ip())),
        unread: info.receive_queue,
        unsent: if listens { 0 } else { info.send_queue },
        packet_ms: flow.and_then(|f| flows.packet_ms(f, queued)),
        programs: Vec::new(),
    }
}

pub(crate) fn state_of(state: TcpState) -> SocketState {
    match state {
        TcpState::Established => SocketState::Established,
        TcpState::CloseWait => SocketState::CloseWait,
        TcpState::FinWait1 | TcpState::FinWait2 => SocketState::FinWait,
        TcpState::SynSent => SocketState::SynSent,
        TcpState::Listen => SocketState::Listen,
        _ => SocketState::Closing,
    }
}

/// One for each flow of the socket; one without a peer if it has something queued and no flow is
/// known.
fn udp(info: &SocketInfo, flows: &Flows, addresses: &[IpAddr]) -> Vec<SocketView> {
    let (local, peer) = (plain(info.local), plain(info.peer));
    let of_this = |flow: &&Flow| {
        flow.proto == Protocol::Udp
            && addresses.iter().filter_map(|own| flow.inside(*own)).any(|(mine, other)| {
                let same = mine.port() == local.port() && (local.ip().is_unspecified() || mine.ip() == local.ip());
                same && (peer.port() == 0 || other == peer)
            })
    };
    let view = |flow: Option<&Flow>| {
        let ends = flow.and_then(|f| addresses.iter().find_map(|own| f.inside(*own)));
        SocketView {
            proto: Protocol::Udp,
            state: SocketState::Flow,
            local: ends.map_or(local, |(mine, _)| mine),
            peer: ends.map(|(_, other)| other).or((peer.port() != 0).then_some(peer)),
            client: flow.zip(ends).and_then(|(f, (mine, _))| f.client(mine.ip())),
            unread: info.receive_queue,
            unsent: info.send_queue,
            packet_ms: flow.and_then(|f| flows.packet_ms(f, false)),
            programs: Vec::new(),
        }
    };
    let mut found: Vec<SocketView> = flows.all.iter().filter(of_this).map(|f| view(Some(f))).collect();
    if found.is_empty() && (info.receive_queue > 0 || info.send_queue > 0 || peer.port() != 0) {
        found.push(view(None));
    }
    found
}

fn timers(programs: &[FoundProcess]) -> Vec<TimerView> {
    let mut found = Vec::new();
    for process in programs {
        timerfds(process, &mut found);
        let text = fs::read_to_string(format!("/proc/{}/timers", process.pid)).unwrap_or_default();
        found.extend(text.lines().filter(|l| l.starts_with("ID:")).map(|_| TimerView {
            kind: "POSIX timer".to_owned(),
            program: process.view.clone(),
            tid: None,
            due_ms: None,
            every_ms: None,
        }));
        for tid in threads_of(process.pid) {
            found.extend(call_time_out(process, tid));
        }
    }
    found.sort_by_key(|t| t.due_ms.unwrap_or(u64::MAX));
    found.truncate(MOST_TIMERS);
    found
}

fn timerfds(process: &FoundProcess, found: &mut Vec<TimerView>) {
    for (fd, target) in tree::descriptors(process.pid).unwrap_or_default() {
        if target != "anon_inode:[timerfd]" {
            continue;
        }
        let text = fs::read_to_string(format!("/proc/{}/fdinfo/{fd}", process.pid)).unwrap_or_default();
        if let Some((due_ms, every_ms)) = timerfd(&text) {
            let (kind, program) = ("timerfd".to_owned(), process.view.clone());
            found.push(TimerView { kind, program, tid: None, due_ms: Some(due_ms), every_ms });
        }
    }
}

/// What is left and the period, milliseconds, of a timerfd that is set: proc_pid_fdinfo(5).
fn timerfd(text: &str) -> Option<(u64, Option<u64>)> {
    let ms = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name))?;
        let (s, ns) = value.trim().strip_prefix('(')?.strip_suffix(')')?.split_once(", ")?;
        let ns = s.parse::<u64>().ok()? * 1_000_000_000 + ns.parse::<u64>().ok()?;
        Some(ns.div_ceil(1_000_000))
    };
    let left = ms("it_value:").filter(|left| *left > 0)?;
    Some((left, ms("it_interval:").filter(|every| *every > 0)))
}

/// The time-out that a thread's call has, if it waits in one that has any.
fn call_time_out(process: &FoundProcess, tid: u32) -> Option<TimerView> {
    let call @ [number, arguments @ ..] = &tree::waits_in(tid)?;
    let (name, all_ms) = time_out_of(*number, arguments)?;
    let waited_ms = |since_ns: i64| (Now::read().monotonic_ns - since_ns).max(0) as u64 / 1_000_000;
    let read = |at: u64, bytes: &mut [u8]| kip_sys::process::read_memory(tid, at, bytes).is_ok();
    let due_ms = match kip_sys::ends::of(call, &read) {
        Some(end) => Some((end.at_ns - Now::read().monotonic_ns).max(0) as u64 / 1_000_000),
        None => all_ms.and_then(|all| Some(all.saturating_sub(waited_ms(tree::last_ran(tid)?)))),
    };
    let (inside, _) = Status::read(tid).ok()?.inner_id()?;
    let kind = format!("time-out of {name}");
    Some(TimerView { kind, program: process.view.clone(), tid: Some(inside), due_ms, every_ms: None })
}

/// The call's name and its whole time-out, milliseconds, where that is in a register; none for a
/// call without one.
fn time_out_of(number: u64, arguments: &[u64]) -> Option<(&'static str, Option<u64>)> {
    if let Some((_, name, n)) = IN_MS.iter().find(|(nr, ..)| *nr == number) {
        // An int, negative for ever: the register's upper half may hold anything.
        return Some((name, Some(u64::try_from(arguments[*n] as u32 as i32).ok()?)));
    }
    let (_, name, n) = POINTED.iter().find(|(nr, ..)| *nr == number)?;
    // FUTEX_WAKE and the like do not wait, so a waiting futex without a pointer has no time-out.
    (arguments[*n] != 0).then_some((name, None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timerfds_report_what_is_left() {
        let text = "pos:\t0\nclockid: 1\nticks: 0\nsettime flags: 01\nit_value: (4, 999500001)\nit_interval: (60, 0)\n";
        assert_eq!(timerfd(text), Some((5000, Some(60_000))));
        assert_eq!(timerfd(&text.replace("(4, 999500001)", "(0, 0)")), None, "it is not set");
    }

    #[test]
    fn time_outs_of_calls_are_told_where_they_are_in_a_register() {
        let arguments = [5, 0x7ffe, 64, 10_000, 0, 8, 0];
        assert_eq!(time_out_of(232, &arguments), Some(("epoll_wait", Some(10_000))));
        let forever = [5, 0x7ffe, 64, u64::from(u32::MAX), 0, 8, 0];
        assert_eq!(time_out_of(232, &forever), None);
        assert_eq!(time_out_of(230, &[1, 0, 0x7ffe_0000, 0, 0, 0, 0]), Some(("clock_nanosleep", None)));
        assert_eq!(time_out_of(202, &[0x7ffe, 0, 0, 0, 0, 0, 0]), None);
        assert_eq!(time_out_of(0, &arguments), None);
    }

    /// This test's own threads, one of which burns CPU.
    #[test]
    fn the_thread_that_works_is_named() {
        let stop = std::sync::atomic::AtomicBool::new(false);
        let seen = std::thread::scope(|scope| {
            let busy = || {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            };
            std::thread::Builder::new().name("burner".to_owned()).spawn_scoped(scope, busy).unwrap();
            let addresses = [[127, 0, 0, 1].into(), [127, 0, 0, 2].into()];
            let seen = inspect(&Subject { pids: vec![std::process::id()], netns: None, addresses });
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            seen.unwrap()
        });
        let burner = seen.threads.iter().find(|t| t.name == "burner").expect("it is among them");
        // How much of a processor it gets is the machine's business.
        assert!((1..=seen.watched_us + 50_000).contains(&burner.cpu_us), "{burner:?}");
        assert!(seen.watched_us >= 1_000_000);
    }
}
