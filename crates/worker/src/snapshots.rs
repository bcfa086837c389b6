//! `kip snapshot`: what the worker does for it with the store of its realm and with what lies on
//! the local disk.

use crate::worker::Worker;
use async_trait::async_trait;
use kip_engine::blocking::blocking;
use kip_offload::Archive;
use kip_offload::collect::{self, CollectError};
use kip_offload::find::{self, Local, StoredGeneration, ToVerify};
use kip_offload::import::ImportError;
use kip_offload::verify;
use kip_service::{Feed, SnapshotService, feed};
use kip_sys::clock::now_ms;
use kip_types::ProcName;
use kip_types::api::{
    CarriedView, Code, CollectRequest, CollectView, EventKind, ImportRequest, Refusal, SnapshotDetails, SnapshotName,
    SnapshotsView, Verified, VerifyRequest,
};
use kip_types::chain;
use std::error::Error;
use std::sync::Arc;

fn failed(what: &str, e: &dyn Error) -> Refusal {
    Refusal::new(Code::Failed, format!("{what}: {}", chain(e)))
}

impl Worker {
    fn archive(&self) -> Result<Arc<Archive>, Refusal> {
        let none = || Refusal::new(Code::State, "there is no store: `kip up --store URL` gives one");
        self.machine.archive.clone().ok_or_else(none)
    }

    fn on_disk(&self) -> Vec<Local> {
        let procs = self.machine.live_procs();
        procs.iter().map(|proc| Local { name: proc.name.clone(), dir: proc.dir.clone() }).collect()
    }

    async fn meant(&self, which: &SnapshotName, all: bool, local: &[Local]) -> Result<ToVerify, Refusal> {
        let one = local.iter().filter(|one| one.name.as_str() == which.proc);
        let mut disk: Vec<_> = one.flat_map(Local::each).collect();
        disk.retain(|(_, generation)| which.generation.is_none_or(|asked| asked == *generation));
        let found = match &self.machine.archive {
            None => Err(Refusal::new(Code::Unknown, format!("there is no snapshot {which} on the local disk"))),
            Some(archive) if all && which.generation.is_none() => {
                let head = archive.head_of(which, local).await;
                head.map(|head| head.fronts().map(|front| StoredGeneration { head: head.clone(), front }).collect())
            }
            Some(archive) => archive.find(which, local).await.map(|found| vec![found]),
        };
        let stored = match found {
            Err(e) if matches!(e.code, Code::Unknown | Code::State) && !disk.is_empty() => Vec::new(),
            found => found?,
        };
        Ok(ToVerify { stored, local: disk, ..ToVerify::default() })
    }

    async fn everything(&self, local: Vec<Local>) -> Result<ToVerify, Refusal> {
        let stored = match &self.machine.archive {
            None => ToVerify::default(),
            Some(archive) => archive.all_kept().await.map_err(|e| failed("nothing was verified", &e))?,
        };
        Ok(ToVerify { local: local.iter().flat_map(Local::each).collect(), ..stored })
    }
}

#[async_trait]
impl SnapshotService for Worker {
    async fn snapshots(&self, only: Option<ProcName>) -> Result<Vec<SnapshotsView>, Refusal> {
        let local = self.on_disk();
        match &self.machine.archive {
            Some(archive) => archive
                .list(only.as_ref(), &local)
                .await
                .map_err(|e| failed("the store's snapshots cannot be listed", &e)),
            None => Ok(blocking(move || find::all_local(only.as_ref(), &local)).await),
        }
    }

    async fn snapshot(&self, which: SnapshotName) -> Result<SnapshotDetails, Refusal> {
        let archive = self.archive()?;
        let found = archive.find(&which, &self.on_disk()).await?;
        archive.show(&found).await.map_err(|e| failed(&format!("{which} cannot be read"), &e))
    }

    async fn verify(&self, request: VerifyRequest) -> Result<Feed<Verified>, Refusal> {
        let local = self.on_disk();
        let what = match &request.which {
            Some(which) => self.meant(which, request.all, &local).await?,
            None if request.all => self.everything(local).await?,
            None => return Err(Refusal::new(Code::Invalid, "which snapshots? Write NAME, NAME@GENERATION or --all")),
        };
        let archive = self.machine.archive.clone();
        let (out, feed) = feed();
        tokio::spawn(async move { verify::verify(archive.as_deref(), what, out).await });
        Ok(feed)
    }

    async fn export(&self, which: SnapshotName, file: String) -> Result<CarriedView, Refusal> {
        let archive = self.archive()?;
        let found = archive.find(&which, &self.on_disk()).await?;
        let exported = blocking(move || archive.export(&found, &file)).await;
        exported.map_err(|e| match e.source() {
            None => Refusal::new(Code::Invalid, format!("{which} is not exported: {e}")),
            Some(_) => failed(&format!("{which} is not exported"), &e),
        })
    }

    async fn import(&self, request: ImportRequest) -> Result<CarriedView, Refusal> {
        let (archive, local) = (self.archive()?, self.on_disk());
        let (what, events) = (format!("{} is not imported", request.file), Arc::clone(&self.machine));
        let refused = move |e| match e {
            ImportError::Refused(refusal) => Refusal { message: format!("{what}: {}", refusal.message), ..refusal },
            e => failed(&what, &e),
        };
        let view = blocking(move || archive.import(&request, &local, now_ms).map_err(refused)).await?;
        let detail = format!("generation {} from {}", view.generation, view.file);
        events.events.emit(Some(&view.name), EventKind::Imported, detail);
        Ok(view)
    }

    async fn collect(&self, request: CollectRequest) -> Result<CollectView, Refusal> {
        let collected = self.archive()?.collect(&request, now_ms).await;
        let view = collected.map_err(|e| match e {
            CollectError::UnderWay | CollectError::Busy(_) | CollectError::Overtaken => {
                Refusal::new(Code::State, e.to_string())
            }
            e => failed("the store is not collected", &e),
        })?;
        if !view.dry_run && !view.deleted.is_empty() {
            self.machine.events.emit(None, EventKind::Collected, collect::summary(&view));
        }
        Ok(view)
    }
}
