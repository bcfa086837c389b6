//! The worker behind the API's interface. API and worker do not know each other; this adapter is where they meet.

use anyhow::Context;
use kip_api::{Ending, ExecOutput, ExecSession, Feed, Service};
use kip_logs::{FOLLOW_POLL, LogReader};
use kip_types::api::{
    CarriedView, CheckRequest, CheckView, Code, CollectRequest, CollectView, ContentsView, Detail, Details,
    DownRequest, DownView, Event, EventsRequest, ExecRequest, HealthView, HistoryView, ImportRequest, Info, LogLine,
    LogStream, LogsRequest, MeterView, Moved, PARK_WITHIN_MS, ProcView, Refusal, RemoveRequest, RunRequest,
    SleepRequest, SnapshotDetails, SnapshotName, SnapshotsView, StartRequest, StopRequest, Verified, VerifyRequest,
    WakeRequest, WhyView,
};
use kip_types::backup::{BackupProgress, BackupRequest};
use kip_types::image::{ImageDetails, ImageView, ImagesCollectRequest, ImagesRemoved, PullProgress, PullRequest};
use kip_types::keys::{
    DestroyedKeyView, ExportKeysRequest, ExportedKeys, ImportKeysRequest, ImportedKeysView, KeyView,
};
use kip_types::name::ProcName;
use kip_types::volume::{VolumeName, VolumeView};
use kip_worker::{Config, Worker};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{broadcast, mpsc};

/// Items of a feed that wait for their reader.
const FEED: usize = 64;

/// The worker of this daemon.
pub struct Hosted {
    worker: Arc<Worker>,
    data: PathBuf,
}

/// Opens the worker of a data directory, whose lock the caller holds.
pub async fn open(config: Config) -> anyhow::Result<Hosted> {
    let data = config.data.clone();
    let worker = Worker::open(config).await.with_context(|| format!("cannot open {}", data.display()))?;
    Ok(Hosted { worker, data })
}

/// Where `kip-keeper` and `kip-launch` are: beside this program.
pub fn programs() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program's own path")?;
    let dir = own.parent().unwrap_or(Path::new("/")).to_owned();
    for name in ["kip-keeper", "kip-launch"] {
        anyhow::ensure!(
            dir.join(name).is_file(),
            "{name} is not in {}: install Kip's programs together",
            dir.display()
        );
    }
    Ok(dir)
}

/// Lets go of the worker: procs run on unless the API went down.
pub async fn close(hosted: Arc<Hosted>, ending: Ending) -> anyhow::Result<()> {
    if ending == Ending::Asked {
        hosted.worker.close().await;
    }
    Ok(())
}

fn line_of(line: kip_logs::LogLine) -> LogLine {
    let stream = if line.stream == kip_logs::Stream::Stderr { LogStream::Stderr } else { LogStream::Stdout };
    LogLine { at_ms: line.at_ms, stream, text: String::from_utf8_lossy(&line.text).into_owned() }
}

fn read_log(dir: &Path, which: &LogsRequest, out: &mpsc::Sender<Result<LogLine, Refusal>>) {
    let from = match (which.tail, which.since_ms) {
        (Some(lines), _) => kip_logs::From::Last(lines as usize),
        (None, Some(ms)) => kip_logs::From::Since(ms),
        (None, None) => kip_logs::From::Start,
    };
    let failed = |e: kip_logs::ReadError| Refusal::new(Code::Failed, e.to_string());
    let mut reader = match LogReader::open(dir, from) {
        Ok(reader) => reader,
        Err(e) => return drop(out.blocking_send(Err(failed(e)))),
    };
    loop {
        let lines = match reader.next_lines() {
            Ok(lines) => lines,
            Err(e) => return drop(out.blocking_send(Err(failed(e)))),
        };
        if lines.is_empty() {
            if !which.follow || reader.gone() || out.is_closed() {
                return;
            }
            std::thread::sleep(FOLLOW_POLL);
        }
        for line in lines {
            if which.since_ms.is_some_and(|ms| line.at_ms < ms) {
                continue;
            }
            if out.blocking_send(Ok(line_of(line))).is_err() {
                return;
            }
        }
    }
}

async fn carry_exec(mut from: kip_worker::ExecSession, input: mpsc::Receiver<Vec<u8>>, out: mpsc::Sender<ExecOutput>) {
    let stdin = from.stdin;
    let feed = async move {
        let mut input = input;
        while let Some(bytes) = input.recv().await {
            if stdin.send(bytes).await.is_err() {
                break;
            }
        }
    };
    tokio::spawn(feed);
    loop {
        let item = tokio::select! {
            item = from.output.recv() => item,
            // The client is gone: dropping the session ends its program.
            () = out.closed() => return,
        };
        let Some(item) = item else { return };
        let item = match item {
            kip_worker::ExecOutput::Stdout(bytes) => ExecOutput::Stdout(bytes),
            kip_worker::ExecOutput::Stderr(bytes) => ExecOutput::Stderr(bytes),
            kip_worker::ExecOutput::End(end) => ExecOutput::End(end),
        };
        if out.send(item).await.is_err() {
            return;
        }
    }
}

impl Service for Hosted {
    async fn run(&self, request: RunRequest) -> Result<ProcView, Refusal> {
        self.worker.run(request.spec, request.secrets, request.wait_ready).await
    }

    async fn validate(&self, run: RunRequest, instead_of: Vec<ProcName>) -> Result<(), Refusal> {
        self.worker.validate(run.spec, run.secrets, instead_of).await
    }

    async fn compare(&self, request: RunRequest) -> Result<ContentsView, Refusal> {
        self.worker.compare(request.spec, request.secrets).await
    }

    async fn names(&self) -> Result<Vec<ProcName>, Refusal> {
        Ok(self.worker.names())
    }

    async fn list(&self) -> Result<Vec<ProcView>, Refusal> {
        Ok(self.worker.list().await)
    }

    async fn inspect(&self, name: ProcName) -> Result<ProcView, Refusal> {
        self.worker.inspect(&name).await
    }

    async fn health(&self, name: ProcName) -> Result<HealthView, Refusal> {
        self.worker.health(&name).await
    }

    async fn details(&self, name: ProcName, of: Detail) -> Result<Details, Refusal> {
        self.worker.details(&name, of).await
    }

    async fn start(&self, name: ProcName, how: StartRequest) -> Result<ProcView, Refusal> {
        self.worker.start(&name, how.wait_ready).await
    }

    async fn stop(&self, name: ProcName, how: StopRequest) -> Result<ProcView, Refusal> {
        self.worker.stop(&name, how.grace_ms.map(Duration::from_millis)).await
    }

    async fn remove(&self, name: ProcName, how: RemoveRequest) -> Result<(), Refusal> {
        self.worker.remove(&name, how.force).await
    }

    async fn sleep(&self, name: ProcName, how: SleepRequest) -> Result<Moved, Refusal> {
        if how.to == kip_types::Tier::Hot {
            return Err(Refusal::new(Code::Invalid, format!("hot is not asleep: `kip wake {name}`")));
        }
        self.worker.sleep(&name, how.to, how.clock).await.map(|(proc, already)| Moved { proc, already })
    }

    async fn wake(&self, name: ProcName, how: WakeRequest) -> Result<Moved, Refusal> {
        self.worker.wake(&name, how.id.as_deref()).await.map(|(proc, already)| Moved { proc, already })
    }

    async fn check(&self, request: CheckRequest) -> Result<CheckView, Refusal> {
        self.worker.check(request).await
    }

    async fn meter(&self, name: ProcName, since_ms: Option<u64>) -> Result<MeterView, Refusal> {
        self.worker.meter(&name, since_ms).await
    }

    async fn meters(&self, since_ms: Option<u64>) -> Result<Vec<MeterView>, Refusal> {
        Ok(self.worker.meters(since_ms).await)
    }

    async fn history(&self) -> Result<HistoryView, Refusal> {
        Ok(self.worker.history().await)
    }

    async fn metrics(&self) -> Result<String, Refusal> {
        Ok(self.worker.metrics().await)
    }

    async fn why(&self, name: ProcName) -> Result<WhyView, Refusal> {
        self.worker.why(&name).await
    }

    async fn logs(&self, name: ProcName, which: LogsRequest) -> Result<Feed<LogLine>, Refusal> {
        let dir = self.worker.log_directory(&name)?;
        let (out, feed) = mpsc::channel(FEED);
        tokio::task::spawn_blocking(move || read_log(&dir, &which, &out));
        Ok(feed)
    }

    async fn events(&self, which: EventsRequest) -> Result<Feed<Event>, Refusal> {
        let worker = self.worker.clone();
        let (out, feed) = mpsc::channel(FEED);
        tokio::spawn(async move {
            let mut seen = which.since.unwrap_or(0);
            // Again whenever its reader is so slow that live ones were dropped: they are kept for longer than that.
            loop {
                let (kept, mut live) = worker.events(seen);
                for event in kept {
                    seen = event.id;
                    if out.send(Ok(event)).await.is_err() {
                        return;
                    }
                }
                if !which.follow {
                    return;
                }
                loop {
                    let next = tokio::select! {
                        next = live.recv() => next,
                        () = out.closed() => return,
                    };
                    match next {
                        Ok(event) => {
                            seen = event.id;
                            if out.send(Ok(event)).await.is_err() {
                                return;
                            }
                        }
                        Err(broadcast::error::RecvError::Lagged(_)) => break,
                        Err(broadcast::error::RecvError::Closed) => return,
                    }
                }
            }
        });
        Ok(feed)
    }

    async fn exec(&self, name: ProcName, request: ExecRequest) -> Result<ExecSession, Refusal> {
        let session = self.worker.exec(&name, request).await?;
        let (stdin, input) = mpsc::channel(16);
        let (out, output) = mpsc::channel(16);
        tokio::spawn(carry_exec(session, input, out));
        Ok(ExecSession { stdin, output })
    }

    async fn snapshots(&self, only: Option<ProcName>) -> Result<Vec<SnapshotsView>, Refusal> {
        self.worker.snapshots(only).await
    }

    async fn snapshot(&self, which: SnapshotName) -> Result<SnapshotDetails, Refusal> {
        self.worker.snapshot(&which).await
    }

    async fn verify(&self, request: VerifyRequest) -> Result<Feed<Verified>, Refusal> {
        let (out, feed) = mpsc::channel(FEED);
        self.worker.verify(request, out).await?;
        Ok(feed)
    }

    async fn export(&self, which: SnapshotName, file: String) -> Result<CarriedView, Refusal> {
        self.worker.export(&which, file).await
    }

    async fn import(&self, request: ImportRequest) -> Result<CarriedView, Refusal> {
        self.worker.import(request).await
    }

    async fn collect(&self, request: CollectRequest) -> Result<CollectView, Refusal> {
        self.worker.collect(request).await
    }

    async fn keys(&self) -> Result<Vec<KeyView>, Refusal> {
        self.worker.keys().await
    }

    async fn rotate_keys(&self) -> Result<KeyView, Refusal> {
        self.worker.rotate_keys().await
    }

    async fn destroy_key(&self, key: String, yes: bool) -> Result<DestroyedKeyView, Refusal> {
        self.worker.destroy_key(&key, yes).await
    }

    async fn export_keys(&self, how: ExportKeysRequest) -> Result<ExportedKeys, Refusal> {
        self.worker.export_keys(how.wrap).await
    }

    async fn import_keys(&self, what: ImportKeysRequest) -> Result<ImportedKeysView, Refusal> {
        self.worker.import_keys(what.wrap, what.bytes.0).await
    }

    async fn backup(&self, request: BackupRequest) -> Result<Feed<BackupProgress>, Refusal> {
        let (out, feed) = mpsc::channel(FEED);
        self.worker.backup(request, out);
        Ok(feed)
    }

    async fn volumes(&self) -> Result<Vec<VolumeView>, Refusal> {
        self.worker.volumes().await
    }

    async fn remove_volume(&self, name: VolumeName) -> Result<(), Refusal> {
        self.worker.remove_volume(name).await
    }

    async fn images(&self) -> Result<Vec<ImageView>, Refusal> {
        self.worker.images().await
    }

    async fn image(&self, reference: String) -> Result<ImageDetails, Refusal> {
        self.worker.image(reference).await
    }

    async fn pull_image(&self, request: PullRequest) -> Result<Feed<PullProgress>, Refusal> {
        let (out, feed) = mpsc::channel(FEED);
        self.worker.pull_image(request, out);
        Ok(feed)
    }

    async fn remove_image(&self, reference: String) -> Result<ImagesRemoved, Refusal> {
        self.worker.remove_image(reference).await
    }

    async fn collect_images(&self, request: ImagesCollectRequest) -> Result<ImagesRemoved, Refusal> {
        self.worker.collect_images(request).await
    }

    async fn info(&self) -> Result<Info, Refusal> {
        Ok(Info {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            data: self.data.display().to_string(),
            pid: std::process::id(),
            worker: self.worker.name().to_owned(),
            keeper_pid: self.worker.keeper_pid(),
            pager_pid: self.worker.pager_pid().await,
            wakes_last_minute: self.worker.wakes_last_minute(),
            room: Some(self.worker.room()),
            cache: self.worker.cache(),
        })
    }

    async fn down(&self, how: DownRequest) -> Result<DownView, Refusal> {
        if how.park {
            let within = Duration::from_millis(how.within_ms.unwrap_or(PARK_WITHIN_MS));
            let (asleep, awake) = self.worker.come_to_rest(within).await;
            self.worker.close().await;
            return Ok(DownView { ended: Vec::new(), asleep, awake });
        }
        Ok(DownView { ended: self.worker.down().await?, ..DownView::default() })
    }
}
