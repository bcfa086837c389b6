//! A front as it comes: what a wake cannot do without is taken by [`super::fetch`], and then the wake begins, while the pages of
//! working sets follow into the remote page file.
//!
//! What breaks off is asked for again by who waits for it: pages that lie in blocks too by a range, others by the front once
//! more. Nothing here is durable.

use super::demand::{DemandError, Filling};
use super::{Archive, FetchError};
use bytes::{Buf as _, Bytes};
use futures_util::StreamExt as _;
use kip_archive::front::read::{Event, FrontReader};
use kip_archive::ids::{KeyId, ProcId};
use kip_archive::names::FrontRef;
use kip_store::Object;
use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// A front that is read.
pub(super) struct FrontStream {
    proc: ProcId,
    front: FrontRef,
    object: Object,
    reader: FrontReader,
    /// Bytes that came and were not yet looked at.
    rest: Bytes,
}

impl FrontStream {
    /// What came next; `None` at its end.
    pub(super) async fn next(&mut self) -> Result<Option<Event>, FetchError> {
        let (proc, front) = (self.proc, self.front);
        let opened = |source| FetchError::Open { proc, front, source };
        loop {
            let mut rest = &self.rest[..];
            let event = self.reader.next(&mut rest).map_err(opened)?;
            let taken = self.rest.len() - rest.len();
            self.rest.advance(taken);
            if event.is_some() {
                return Ok(event);
            }
            match self.object.next().await {
                Some(bytes) => self.rest = bytes?,
                None => return self.reader.finish().map_err(opened).map(|()| None),
            }
        }
    }

    /// All pages that still come, to where they belong.
    async fn drain(&mut self, filling: &Filling) -> Result<(), FetchError> {
        while let Some(event) = self.next().await? {
            if let Event::SetPages { space, pages } | Event::EagerPages { space, pages } = event {
                let put = filling.put_pages(space, &pages);
                put.map_err(|source| FetchError::Io { path: filling.path.clone(), source })?;
            }
        }
        Ok(())
    }

    /// The same beside the wake.
    pub(super) fn follow(mut self, runtime: &tokio::runtime::Handle, filling: Arc<Filling>) {
        let own = runtime.clone();
        runtime.spawn_blocking(move || {
            let result = own.block_on(self.drain(&filling));
            filling.front_ended();
            if let Err(e) = result {
                tracing::debug!(error = crate::task::chain(&e), "a front broke off behind a wake");
            }
        });
    }
}

/// What `archived.json` says of where a generation came from.
#[derive(serde::Deserialize)]
pub(super) struct Origin {
    pub(super) front: FrontRef,
    /// The keys that all of it takes.
    #[serde(default)]
    pub(super) keys: BTreeSet<KeyId>,
}

/// Where a remote page file in one of a proc's directories came from, if that is still known.
pub(super) fn origin_of(directory: &Path, name: &str) -> Option<(ProcId, Origin)> {
    let dir = directory.ancestors().take(3).find(|dir| dir.join(crate::task::ARCHIVED).exists())?;
    let origin: Origin = serde_json::from_slice(&std::fs::read(dir.join(crate::task::ARCHIVED)).ok()?).ok()?;
    let id = std::fs::read_to_string(dir.join(super::ID)).ok()?.trim().parse().ok()?;
    (name == super::fetch::remote_name(origin.front.generation)).then_some((id, origin))
}

impl Archive {
    /// Begins to read a front.
    pub(super) async fn front_stream(&self, proc: ProcId, front: FrontRef) -> Result<FrontStream, FetchError> {
        let object = self.store.get(&self.front_key(proc, front)).await?;
        let reader = FrontReader::new(self.keys(), proc, front);
        Ok(FrontStream { proc, front, object, reader, rest: Bytes::new() })
    }

    /// Reads a front for the pages that did not come with it the first time; once more if what came cannot be opened. Whoever
    /// wants the same meanwhile waits for it.
    pub(super) async fn front_again(&self, filling: &Arc<Filling>, directory: &Path) -> Result<(), DemandError> {
        let path = || filling.path.clone();
        let io_at = |source: io::Error| DemandError::Io { path: path(), source };
        loop {
            if !filling.front_lacks(&(0..filling.file.pages())).map_err(io_at)? {
                return Ok(());
            }
            if filling.front_begins(&kip_archive::front::Sets::new()).map_err(io_at)? {
                break;
            }
            filling.front_came().await;
        }
        let ended = FrontEnds(filling);
        let name = filling.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (proc, Origin { front, .. }) =
            origin_of(directory, &name).ok_or_else(|| DemandError::NoFront { path: path() })?;
        let front_error = |e| DemandError::Front(Box::new(e));
        let once = async || self.front_stream(proc, front).await?.drain(filling).await;
        let result = match once().await {
            Err(FetchError::Open { .. }) => once().await,
            done => done,
        };
        drop(ended);
        result.map_err(front_error)
    }
}

/// Says that a front comes no more, whatever becomes of who read it.
struct FrontEnds<'a>(&'a Filling);

impl Drop for FrontEnds<'_> {
    fn drop(&mut self) {
        self.0.front_ended();
    }
}
