//! A worker in memory, for tests of the API and of the command line. Its procs are only records;
//! what they do depends on their names and commands:
//!
//! * a proc whose name begins with `slow` is changed only when [`Fake::gate`] gives a permit;
//! * inspecting `code-<code>` is refused with that code;
//! * `exec` knows the programs `cat`, `count`, `exit N`, `err`, `deaf` and `missing`.
#![allow(dead_code, reason = "each test binary that includes this uses another part")]

mod files;
mod kept;
mod spawner;
mod tree;

use async_trait::async_trait;
use kip_api::{Api, ApiServices, ApiSocket, DataLock, Ending, Tokens};
use kip_service::{ExecInput, ExecOutput, ExecSession, Feed, NodeService, ProcService, TrialService};
use kip_types::api::clone::{CloneAdvice, CloneMethod, CloneRequest, ClonesView};
use kip_types::api::*;
use kip_types::backup::{BackupProgress, BackupRequest};
use kip_types::lifecycle::{Generation, StateName, Tier};
use kip_types::{name::ProcName, spec::Timing};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinHandle;

pub use spawner::FakeSpawner;
pub use tree::FakeTree;

/// The worker.
pub struct Fake {
    pub procs: Mutex<BTreeMap<ProcName, ProcView>>,
    /// Lets changes of slow procs happen.
    pub gate: Semaphore,
    /// Changes of slow procs that were begun.
    pub begun: AtomicUsize,
    /// Feeds and execs whose receiver is still there.
    pub open: Arc<AtomicUsize>,
    /// The last request of each kind that has settings, as Debug text.
    pub heard: Mutex<Vec<String>>,
}

impl Default for Fake {
    fn default() -> Self {
        let (procs, heard) = (Mutex::default(), Mutex::default());
        Fake { procs, gate: Semaphore::new(0), begun: AtomicUsize::new(0), open: Arc::default(), heard }
    }
}

/// An API before a [`Fake`], on a socket below `data`.
pub struct Served {
    pub fake: Arc<Fake>,
    stop: Option<oneshot::Sender<()>>,
    pub ended: JoinHandle<Ending>,
}

/// Serves a new fake worker.
pub async fn serve(data: &std::path::Path) -> Served {
    let lock = DataLock::take(data, None).unwrap();
    let mut socket = ApiSocket::bind(&lock, None).unwrap();
    let fake = Arc::new(Fake::default());
    let defaults = Timing { idle_ms: 111, park_after_ms: 222, ..Timing::default() };
    let (tree, spawner) = (Arc::new(FakeTree::default()), Arc::new(FakeSpawner));
    let services = ApiServices { service: fake.clone(), tree, spawner };
    let api = Api::new(services, defaults, Tokens::open(&lock).unwrap());
    let (stop, stopped) = oneshot::channel();
    let ended = tokio::spawn(async move {
        let ending = api.serve(&mut socket, None, async { drop(stopped.await) }).await.unwrap();
        drop((socket, lock));
        ending
    });
    Served { fake, stop: Some(stop), ended }
}

impl Served {
    /// Asks the API to end.
    pub fn stop(&mut self) {
        drop(self.stop.take());
    }
}

/// Waits until `condition` holds.
pub async fn until(what: &str, condition: impl Fn() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(20), waiting).await.unwrap_or_else(|_| panic!("never: {what}"));
}

fn unknown(name: &ProcName) -> Refusal {
    Refusal::new(Code::Unknown, format!("there is no proc {name}"))
}

fn view(request: &RunRequest, number: u16) -> ProcView {
    let ports = request.spec.ports.iter().zip(0u16..).map(|(port, n)| PortView {
        proto: port.proto,
        port: port.port,
        addr: [10, 213, 0, 1].into(),
        host_addr: port.host_addr.unwrap_or([0, 0, 0, 0].into()),
        host_port: Some(port.host_port.unwrap_or(32768 + 16 * number + n)),
    });
    ProcView {
        name: request.spec.name.clone(),
        realm: request.spec.realm.clone(),
        state: StateName::Running,
        tier: Some(Tier::Hot),
        worker: "fake".into(),
        generation: Generation(0),
        ports: ports.collect(),
        pids: vec![4000 + u32::from(number), 5000],
        memory: MemoryView { rss_bytes: 5 << 20, pss_bytes: 3 << 20, ..MemoryView::default() },
        saved_bytes: None,
        does_not_answer: false,
        disk_bytes: None,
        last_sleep: None,
        last_wake: None,
        exit: None,
        exit_code: None,
        out_of_memory: false,
        idle_ms: Some(1500),
        next_timer_ms: None,
        cpu_us: Some(1000),
        wakes: 0,
        restarts: 0,
        started_at_ms: None,
        next_start_ms: None,
        ready: None,
        probes: Vec::new(),
        spec: request.spec.clone(),
    }
}

impl Fake {
    fn hear(&self, what: impl std::fmt::Debug) {
        self.heard.lock().push(format!("{what:?}"));
    }

    async fn pass(&self, name: &ProcName) {
        if name.as_str().starts_with("slow") {
            self.begun.fetch_add(1, Ordering::SeqCst);
            self.gate.acquire().await.unwrap().forget();
        }
    }

    fn change<T>(&self, name: &ProcName, how: impl FnOnce(&mut ProcView) -> T) -> Result<T, Refusal> {
        self.procs.lock().get_mut(name).map(how).ok_or_else(|| unknown(name))
    }

    /// Sends `items`; when following, more every few milliseconds until no client listens.
    fn feed<T: Send + 'static>(&self, items: Vec<Result<T, Refusal>>, more: Option<fn(u64) -> T>) -> Feed<T> {
        let (sender, feed) = mpsc::channel(4);
        let open = self.open.clone();
        open.fetch_add(1, Ordering::SeqCst);
        tokio::spawn(async move {
            for item in items {
                let _ = sender.send(item).await;
            }
            if let Some(more) = more {
                let _ = sender.send(Ok(more(9))).await;
                sender.closed().await;
            }
            open.fetch_sub(1, Ordering::SeqCst);
        });
        feed
    }
}

#[async_trait]
impl ProcService for Fake {
    async fn run(&self, request: RunRequest) -> Result<ProcView, Refusal> {
        self.hear(&request);
        assert_eq!(request.left_open, LeftOpen::default(), "a worker sees nothing left open");
        self.pass(&request.spec.name).await;
        let mut procs = self.procs.lock();
        if procs.contains_key(&request.spec.name) {
            return Err(Refusal::new(Code::Taken, format!("there is a proc {} already", request.spec.name)));
        }
        let taken: Vec<_> =
            procs.values().flat_map(|p| p.ports.iter().filter_map(|p| Some((p.proto, p.host_port?)))).collect();
        let wanted = request.spec.ports.iter().filter_map(|p| Some((p.proto, p.host_port?)));
        for (proto, port) in wanted {
            if taken.contains(&(proto, port)) {
                return Err(Refusal::new(Code::Taken, format!("{proto} port {port} is taken")));
            }
        }
        let view = view(&request, procs.len() as u16);
        procs.insert(view.name.clone(), view.clone());
        Ok(view)
    }

    async fn names(&self) -> Result<Vec<ProcName>, Refusal> {
        Ok(self.procs.lock().keys().cloned().collect())
    }

    async fn list(&self) -> Result<Vec<ProcView>, Refusal> {
        Ok(self.procs.lock().values().cloned().collect())
    }

    async fn inspect(&self, name: ProcName) -> Result<ProcView, Refusal> {
        if let Some(code) = name.as_str().strip_prefix("code-") {
            let code = serde_json::from_value(code.into()).unwrap();
            return Err(Refusal::new(code, format!("refused with {code:?}")));
        }
        assert!(name.as_str() != "panic", "this test wants it");
        self.change(&name, |view| view.clone())
    }

    async fn health(&self, name: ProcName) -> Result<HealthView, Refusal> {
        self.change(&name, |view| HealthView {
            name: name.clone(),
            state: view.state,
            tier: view.tier,
            available: view.tier.is_some(),
            reason: None,
            probes: Vec::new(),
        })
    }

    async fn details(&self, name: ProcName, of: Detail) -> Result<Details, Refusal> {
        let (generation, tier) = self.change(&name, |view| (view.generation, view.tier.unwrap_or(Tier::Hot)))?;
        let inspected = Inspected { name, tier, generation };
        Ok(match of {
            Detail::Files => {
                let own = OwnFilesView { complete: true, ..OwnFilesView::default() };
                Details::Files(FilesView { inspected, processes: Vec::new(), own })
            }
            Detail::Env => Details::Env(EnvView { inspected, processes: Vec::new() }),
            Detail::Sockets => Details::Sockets(SocketsView { inspected, sockets: Vec::new() }),
            Detail::Maps => Details::Maps(MapsView { inspected, processes: Vec::new() }),
        })
    }

    async fn why(&self, name: ProcName) -> Result<WhyView, Refusal> {
        self.change(&name, |view| WhyView {
            name: name.clone(),
            state: view.state,
            awake_because: vec!["a request 2 s ago".into()],
            activity: Some(ActivityKind::Traffic),
            quiet_ms: Some(2000),
            parks_after_ms: Some(333),
            seen: None,
            cannot_sleep: vec!["descriptor 7 of pid 12 is an io_uring".into()],
            cannot_sleep_at_ms: None,
            next_wake: None,
            clock: None,
            last_sleep: view.last_sleep.clone(),
            last_wake: view.last_wake.clone(),
            taken_over_by: None,
            fell_back: None,
            clone: None,
            pinned_by: Vec::new(),
            egress_refused: Vec::new(),
        })
    }

    async fn meter(&self, name: ProcName, since_ms: Option<u64>) -> Result<MeterView, Refusal> {
        let all = self.meters(since_ms).await?;
        all.into_iter().find(|meter| meter.name == name).ok_or_else(|| unknown(&name))
    }

    async fn meters(&self, since_ms: Option<u64>) -> Result<Vec<MeterView>, Refusal> {
        let used = TierMeterView {
            tier: Tier::Hot,
            time_us: 5_000_000,
            byte_seconds: 1e9,
            cpu_us: 7,
            connections: 2,
            datagrams: 0,
        };
        let meter = |view: &ProcView| MeterView {
            name: view.name.clone(),
            state: view.state,
            tier: view.tier,
            from_ms: since_ms.unwrap_or(1),
            to_ms: 2000,
            held_bytes: 1 << 20,
            tiers: vec![used],
            cpu_us: 250_000,
            connections: 3,
            datagrams: 0,
            oom_kills: 0,
            wakes: vec![WakesView { from: Tier::Parked, trigger: "tcp".into(), count: 2 }],
        };
        Ok(self.procs.lock().values().map(meter).collect())
    }

    async fn logs(&self, name: ProcName, which: LogsRequest) -> Result<Feed<LogLine>, Refusal> {
        self.hear(&which);
        self.change(&name, |_| ())?;
        let line = |n: u64| LogLine { at_ms: n, stream: LogStream::Stdout, text: format!("line {n}") };
        let mut items: Vec<_> = (0..1000).map(|n| Ok(line(n))).collect();
        if name.as_str() == "unreadable" {
            items.push(Err(Refusal::new(Code::Failed, "the log's disk is gone")));
        }
        let items = items.split_off(items.len().saturating_sub(which.tail.unwrap_or(u64::MAX) as usize));
        Ok(self.feed(items, which.follow.then_some(line)))
    }

    async fn start(&self, name: ProcName, _: StartRequest) -> Result<ProcView, Refusal> {
        assert!(name.as_str() != "panic", "this test wants it");
        self.change(&name, |view| {
            if view.state != StateName::Stopped {
                return Err(Refusal::new(Code::State, format!("{name} is {}: it cannot be started", view.state)));
            }
            (view.state, view.tier) = (StateName::Running, Some(Tier::Hot));
            (view.exit, view.exit_code) = (None, None);
            Ok(view.clone())
        })?
    }

    async fn stop(&self, name: ProcName, how: StopRequest) -> Result<ProcView, Refusal> {
        self.hear(&how);
        self.change(&name, |view| {
            (view.state, view.tier) = (StateName::Stopped, None);
            (view.exit, view.exit_code) = (Some("signal 15".into()), Some(143));
            (view.idle_ms, view.pids) = (None, vec![]);
            view.clone()
        })
    }

    async fn update(&self, name: ProcName, change: UpdateRequest) -> Result<ProcView, Refusal> {
        self.hear(&change);
        self.change(&name, |view| {
            change.apply(&mut view.spec);
            view.clone()
        })
    }

    async fn replace(&self, request: RunRequest) -> Result<ProcView, Refusal> {
        self.hear(&request);
        self.change(&request.spec.name.clone(), |view| {
            view.spec = request.spec.clone();
            view.clone()
        })
    }

    async fn clone_proc(&self, name: ProcName, request: CloneRequest) -> Result<ClonesView, Refusal> {
        self.hear(&request);
        let mut procs = self.procs.lock();
        let source = procs.get(&name).cloned();
        let source = source.ok_or_else(|| Refusal::new(Code::Unknown, format!("there is no proc {name}")))?;
        let clone = ProcView { name: request.name.unwrap_or_else(|| format!("{name}-1").parse().unwrap()), ..source };
        procs.insert(clone.name.clone(), clone.clone());
        Ok(ClonesView {
            clones: vec![clone],
            method: request.method,
            why: None,
            still_us: 0,
            total_us: 1,
            notes: Vec::new(),
        })
    }

    async fn clone_advice(&self, name: ProcName) -> Result<CloneAdvice, Refusal> {
        let (method, why) = (CloneMethod::Hot, "it has nothing to read again".to_owned());
        let (has_template, memory_bytes, limit_bytes, reread_bytes_per_s) = (false, 5, None, Some(0));
        let better = None;
        Ok(CloneAdvice { name, method, why, better, has_template, memory_bytes, limit_bytes, reread_bytes_per_s })
    }

    async fn rename(&self, name: ProcName, request: RenameRequest) -> Result<ProcView, Refusal> {
        self.hear(&request);
        let mut procs = self.procs.lock();
        if procs.contains_key(&request.name) {
            return Err(Refusal::new(Code::Taken, format!("a proc named {} exists already", request.name)));
        }
        let unknown = || Refusal::new(Code::Unknown, format!("there is no proc {name}"));
        let view = procs.remove(&name).ok_or_else(unknown)?;
        let view = ProcView { name: request.name.clone(), ..view };
        procs.insert(request.name, view.clone());
        Ok(view)
    }

    async fn signal(&self, name: ProcName, request: SignalRequest) -> Result<(), Refusal> {
        self.hear(&request);
        self.change(&name, |_| ())
    }

    async fn remove(&self, name: ProcName, how: RemoveRequest) -> Result<(), Refusal> {
        let state = self.change(&name, |view| view.state)?;
        if state != StateName::Stopped && !how.force {
            return Err(Refusal::new(Code::State, format!("{name} is {state}: stop it first or use --force")));
        }
        self.procs.lock().remove(&name);
        Ok(())
    }

    async fn sleep(&self, name: ProcName, how: SleepRequest) -> Result<Moved, Refusal> {
        self.pass(&name).await;
        self.change(&name, |view| {
            let already = view.tier == Some(how.to);
            (view.state, view.tier, view.idle_ms) = (StateName::Parked, Some(how.to), None);
            view.generation = view.generation.next();
            view.memory = MemoryView::default();
            view.last_sleep = Some(SleepView {
                own_bytes: Some(4 << 20),
                left_bytes: Default::default(),
                held: false,
                to: how.to,
                frozen_us: 9000,
                total_us: 21_000,
                bytes_written: 3 << 20,
                memory_bytes: Some(5 << 20),
                suspended: None,
                cause: None,
                at_ms: 1000,
            });
            Moved { proc: view.clone(), already }
        })
    }

    async fn wake(&self, name: ProcName, how: WakeRequest) -> Result<Moved, Refusal> {
        self.hear(&how);
        self.change(&name, |view| {
            let already = view.tier == Some(Tier::Hot);
            (view.state, view.tier, view.idle_ms) = (StateName::Running, Some(Tier::Hot), Some(0));
            let step = |name: &str, us| StepView { name: name.into(), us };
            let steps = vec![step("helper", 400), step("restore", 6100), step("resume", 1000)];
            let (trigger, from) = ("kip wake".into(), Tier::Parked);
            view.last_wake = Some(WakeView { trigger, from, total_us: 7500, steps, at_ms: 2000, fetched: None });
            Moved { proc: view.clone(), already }
        })
    }

    async fn attach(&self, name: ProcName, _: AttachRequest) -> Result<ExecSession, Refusal> {
        let echo = ExecRequest { command: vec!["cat".into()], ..ExecRequest::default() };
        self.exec(name, echo).await
    }

    async fn exec(&self, name: ProcName, request: ExecRequest) -> Result<ExecSession, Refusal> {
        self.change(&name, |_| ())?;
        let (sends, input) = mpsc::channel(4);
        let (sender, output) = mpsc::channel(4);
        let open = self.open.clone();
        open.fetch_add(1, Ordering::SeqCst);
        tokio::spawn(async move {
            tokio::select! {
                () = program(request, input, &sender) => {}
                () = sender.closed() => {}
            }
            open.fetch_sub(1, Ordering::SeqCst);
        });
        Ok(ExecSession { input: sends, output })
    }
}

#[async_trait]
impl TrialService for Fake {
    async fn check(&self, request: CheckRequest) -> Result<CheckView, Refusal> {
        let refused = Vec::new();
        let step = CheckStep {
            step: CheckOperation::Sleep,
            tier: Some(request.to),
            us: Some(900),
            bytes: Some(4096),
            refused,
        };
        let untried = CheckVerdict { answer: CheckAnswer::Untried, because: vec!["not here".to_owned()] };
        let (moves, clones) = (untried.clone(), untried);
        Ok(CheckView { steps: vec![step], sleeps: true, untried: vec![], moves, clones, pinned: vec![] })
    }

    async fn validate(&self, _: RunRequest, _: Vec<ProcName>) -> Result<(), Refusal> {
        Ok(())
    }

    async fn compare(&self, _: RunRequest) -> Result<ContentsView, Refusal> {
        Ok(ContentsView::default())
    }
}

#[async_trait]
impl NodeService for Fake {
    async fn info(&self) -> Result<Info, Refusal> {
        Ok(Info {
            version: "0".into(),
            data: "/fake".into(),
            pid: std::process::id(),
            worker: "fake".into(),
            keeper_pid: 1,
            pager_pid: 2,
            wakes_last_minute: 0,
            room: None,
            cache: None,
        })
    }

    async fn history(&self) -> Result<HistoryView, Refusal> {
        let hot = self.procs.lock().len() as u32;
        Ok(HistoryView { every_ms: 10_000, samples: vec![HistorySample { hot, ..HistorySample::default() }] })
    }

    async fn metrics(&self) -> Result<String, Refusal> {
        Ok(format!("# HELP kip_procs Procs.\n# TYPE kip_procs gauge\nkip_procs {}\n", self.procs.lock().len()))
    }

    async fn events(&self, which: EventsRequest) -> Result<Feed<Event>, Refusal> {
        let event = |at_ms| Event {
            id: at_ms,
            at_ms,
            name: "web".parse().ok(),
            kind: EventKind::Parked,
            detail: "idle".into(),
        };
        let ready =
            Event { id: 1, at_ms: 1_763_760_825_123, name: None, kind: EventKind::Ready, detail: "pid 7".into() };
        Ok(self.feed(vec![Ok(ready), Ok(event(1_763_760_826_000))], which.follow.then_some(event)))
    }

    async fn backup(&self, request: BackupRequest) -> Result<Feed<BackupProgress>, Refusal> {
        self.hear(&request);
        let (file, left_out) = (request.file, vec![]);
        let end = BackupProgress::End { file, procs: 0, volumes: 0, left_out, bytes: 1, file_bytes: 2 };
        Ok(self.feed(vec![Ok(BackupProgress::At { part: "images".into(), bytes: 1 }), Ok(end)], None))
    }

    async fn down(&self, _: DownRequest) -> Result<DownView, Refusal> {
        let ended = std::mem::take(&mut *self.procs.lock());
        Ok(DownView { ended: ended.into_keys().collect(), ..DownView::default() })
    }
}

async fn program(request: ExecRequest, mut input: mpsc::Receiver<ExecInput>, sender: &mpsc::Sender<ExecOutput>) {
    let mut end = ExecEnd { code: 0, refusal: None };
    match request.command[0].as_str() {
        "cat" => {
            while let Some(item) = input.recv().await {
                let bytes = match item {
                    ExecInput::Bytes(bytes) => bytes,
                    ExecInput::Size(TerminalSize { rows, columns }) => format!("{rows}x{columns}").into(),
                };
                let _ = sender.send(ExecOutput::Stdout(bytes)).await;
            }
        }
        "count" => {
            let mut count = 0;
            while let Some(item) = input.recv().await {
                if let ExecInput::Bytes(bytes) = item {
                    count += bytes.len();
                }
            }
            let _ = sender.send(ExecOutput::Stdout(format!("{count}\n").into())).await;
        }
        "zeros" => {
            // Larger than one frame may be.
            let _ = sender.send(ExecOutput::Stdout(vec![b'0'; FRAME_MAX * 2 + 7])).await;
        }
        "endless" => while sender.send(ExecOutput::Stdout(vec![b'y'; 4096])).await.is_ok() {},
        "err" => {
            let env = format!("{:?}\n", request.env);
            let _ = sender.send(ExecOutput::Stderr(env.into())).await;
        }
        "deaf" => std::future::pending().await,
        "exit" => end.code = request.command[1].parse().unwrap(),
        missing => end.refusal = Some(Refusal::new(Code::Invalid, format!("{missing} was not found in the proc"))),
    }
    let _ = sender.send(ExecOutput::End(end)).await;
}

/// A request to run `command` under `name`.
pub fn request(name: &str, command: &[&str]) -> RunRequest {
    serde_json::from_value(serde_json::json!({ "spec": { "name": name, "command": command } })).unwrap()
}

/// The same with one TCP port.
pub fn with_port(mut request: RunRequest, port: u16, host_port: Option<u16>) -> RunRequest {
    let port = serde_json::json!({ "proto": "tcp", "port": port, "host_port": host_port });
    request.spec.ports = vec![serde_json::from_value(port).unwrap()];
    request
}
