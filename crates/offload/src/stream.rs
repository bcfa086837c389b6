//! A front as it comes: what a wake cannot do without is taken by [`crate::fetch`], and then the
//! wake begins, while the pages of working sets follow into the remote page file.
//!
//! A request that waits for pages that broke off asks for them again: for pages that lie in blocks
//! too by a range, for others by the front once more. Nothing here is durable.

use crate::Archive;
use crate::account::Account;
use crate::cache::Cache;
use crate::errors::{DemandError, FetchError};
use crate::filling::Filling;
use bytes::{Buf as _, Bytes};
use futures_util::StreamExt as _;
use kip_archive::files::tree::Files;
use kip_archive::front::FrontManifest;
use kip_archive::front::read::{FrontEvent, FrontReader};
use kip_archive::ids::{KeyId, ProcId};
use kip_archive::names::FrontRef;
use kip_archive::seal::UnsealError;
use kip_store::{GetError, ObjectStream};
use kip_types::Generation;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;
use std::sync::Arc;

/// Read from the cache at once, bytes.
const PIECE: usize = 256 << 10;

/// Where a front comes from.
enum Source {
    Store(ObjectStream),
    /// The cache.
    Here(File),
}

/// A front that is read.
pub(crate) struct FrontStream {
    proc: ProcId,
    front: FrontRef,
    source: Source,
    /// The cache and the name there.
    cache: Option<Arc<Cache>>,
    object: String,
    /// What came from the store and is to be put in, if it is; that happens behind the wake.
    came: Option<Vec<Bytes>>,
    /// None if the front is only looked at.
    account: Option<Arc<Account>>,
    reader: FrontReader,
    /// Bytes that came and were not yet looked at.
    rest: Bytes,
}

impl FrontStream {
    /// What came next; `None` at its end.
    pub(crate) async fn next(&mut self) -> Result<Option<FrontEvent>, FetchError> {
        loop {
            let mut rest = &self.rest[..];
            let event = self.reader.next(&mut rest);
            let taken = self.rest.len() - rest.len();
            self.rest.advance(taken);
            if let Some(event) = self.opened(event)? {
                return Ok(Some(event));
            }
            match self.more().await? {
                Some(bytes) => self.rest = bytes,
                None => {
                    let end = self.reader.finish();
                    return self.opened(end).map(|()| None);
                }
            }
        }
    }

    /// What the generation is, which comes first.
    pub(crate) async fn manifest(&mut self) -> Result<FrontManifest, FetchError> {
        match self.next().await? {
            Some(FrontEvent::Manifest(manifest)) => Ok(*manifest),
            _ => unreachable!("a front that can be opened begins with its manifest"),
        }
    }

    /// The files that it lists, which come before all pages.
    pub(crate) async fn files(&mut self) -> Result<Files, FetchError> {
        loop {
            match self.next().await? {
                Some(FrontEvent::Files(files)) => return Ok(files),
                Some(_) => {}
                None => unreachable!("a front that is whole lists files"),
            }
        }
    }

    /// What cannot be opened is the cache's damage if it came from there.
    fn opened<T>(&self, result: Result<T, UnsealError>) -> Result<T, FetchError> {
        let (proc, front) = (self.proc, self.front);
        if let (Err(_), Some(cache), Source::Here(_)) = (&result, &self.cache, &self.source) {
            cache.damaged(&self.object, &(0..u64::MAX));
        }
        result.map_err(|source| FetchError::Open { proc, front, source })
    }

    async fn more(&mut self) -> Result<Option<Bytes>, GetError> {
        match &mut self.source {
            Source::Store(object) => {
                let Some(bytes) = object.next().await.transpose()? else { return Ok(None) };
                if let Some(came) = &mut self.came {
                    came.push(bytes.clone());
                }
                Ok(Some(bytes))
            }
            Source::Here(file) => {
                let mut bytes = Vec::with_capacity(PIECE);
                // What is cut short cannot be opened.
                let _ = file.take(PIECE as u64).read_to_end(&mut bytes);
                if let Some(account) = &self.account {
                    account.cached(bytes.len() as u64);
                }
                Ok((!bytes.is_empty()).then(|| bytes.into()))
            }
        }
    }

    /// Whether the cache had it.
    pub(crate) fn is_from_cache(&self) -> bool {
        matches!(self.source, Source::Here(_))
    }

    /// All pages that still come, to where they belong.
    async fn drain(&mut self, filling: &Filling) -> Result<(), FetchError> {
        let size = if let Source::Store(object) = &self.source { object.size() } else { 0 };
        let cache = self.cache.clone().filter(|_| self.came.is_some());
        let mut keeping = cache.as_ref().and_then(|cache| cache.begin(&self.object, 0, size));
        loop {
            let event = self.next().await?;
            let ended = event.is_none();
            if let Some(FrontEvent::SetPages { space, pages } | FrontEvent::EagerPages { space, pages }) = event {
                let put = filling.put_pages(space, &pages);
                put.map_err(|source| FetchError::Io { path: filling.path.clone(), source })?;
            }
            for bytes in self.came.iter_mut().flat_map(std::mem::take) {
                keeping = keeping.take().and_then(|mut keeping| keeping.write(&bytes).then_some(keeping));
            }
            if ended {
                break;
            }
        }
        if let Some(keeping) = keeping {
            keeping.finish();
        }
        Ok(())
    }

    /// The same beside the wake.
    pub(crate) fn follow(mut self, runtime: &tokio::runtime::Handle, filling: Arc<Filling>) {
        let own = runtime.clone();
        runtime.spawn_blocking(move || {
            let result = own.block_on(self.drain(&filling));
            filling.front_ended();
            if let Err(e) = result {
                tracing::debug!(
                    error = kip_types::chain(&e),
                    "reading a generation from the store ended early; the proc already runs"
                );
            }
        });
    }
}

/// What `archived.json` says of where a generation came from.
#[derive(serde::Deserialize)]
pub(crate) struct Origin {
    pub(crate) front: FrontRef,
    /// The keys that all of it takes.
    #[serde(default)]
    pub(crate) keys: BTreeSet<KeyId>,
}

/// Name of the remote page file of a generation that was fetched.
pub(crate) fn remote_name(generation: Generation) -> String {
    format!("g{generation}-remote")
}

/// Where a remote page file in one of a proc's directories came from, if that is still known.
pub(crate) fn origin_of(directory: &Path, name: &str) -> Option<(ProcId, Origin)> {
    let dir = directory.ancestors().take(3).find(|dir| dir.join(crate::ARCHIVED).exists())?;
    let origin: Origin = serde_json::from_slice(&std::fs::read(dir.join(crate::ARCHIVED)).ok()?).ok()?;
    let id = std::fs::read_to_string(dir.join(crate::ID)).ok()?.trim().parse().ok()?;
    (name == remote_name(origin.front.generation)).then_some((id, origin))
}

impl Archive {
    /// Begins to read a front, from the cache if that has it.
    pub(crate) async fn front_stream(
        &self,
        proc: ProcId,
        front: FrontRef,
        account: &Arc<Account>,
    ) -> Result<FrontStream, FetchError> {
        self.front_stream_for(proc, front, Some(account)).await
    }

    /// The same, for a caller that does not wake the proc: nothing of the front is counted or kept.
    pub(crate) async fn front_to_inspect(&self, proc: ProcId, front: FrontRef) -> Result<FrontStream, FetchError> {
        self.front_stream_for(proc, front, None).await
    }

    async fn front_stream_for(
        &self,
        proc: ProcId,
        front: FrontRef,
        account: Option<&Arc<Account>>,
    ) -> Result<FrontStream, FetchError> {
        let key = self.front_key(proc, front);
        let store = account.map_or(&self.store, |account| &account.store);
        let source = match self.cache.as_ref().and_then(|cache| cache.whole(key.as_str())) {
            Some(file) => Source::Here(file),
            None => Source::Store(store.get(&key).await?),
        };
        let keeps = self.cache.is_some() && account.is_some() && matches!(source, Source::Store(_));
        Ok(FrontStream {
            proc,
            front,
            source,
            cache: self.cache.clone(),
            object: key.as_str().to_owned(),
            came: keeps.then(Vec::new),
            account: account.cloned(),
            reader: FrontReader::new(self.keys(), proc, front),
            rest: Bytes::new(),
        })
    }

    /// Reads a front for the pages that did not come with it the first time; once more if what came
    /// cannot be opened. A caller that wants the same meanwhile waits for it.
    pub(crate) async fn front_again(&self, filling: &Arc<Filling>, directory: &Path) -> Result<(), DemandError> {
        let path = || filling.path.clone();
        let io_at = |source: io::Error| DemandError::Io { path: path(), source };
        loop {
            if !filling.front_lacks(&(0..filling.file.pages())).map_err(io_at)? {
                return Ok(());
            }
            if filling.front_begins(&kip_archive::front::WorkingSets::new()).map_err(io_at)? {
                break;
            }
            filling.front_came().await;
        }
        let ended = FrontEnds(filling);
        let name = filling.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (proc, Origin { front, .. }) =
            origin_of(directory, &name).ok_or_else(|| DemandError::NoFront { path: path() })?;
        let front_error = |e| DemandError::Front(Box::new(e));
        let once = async || self.front_stream(proc, front, &filling.account).await?.drain(filling).await;
        let result = match once().await {
            Err(FetchError::Open { .. }) => once().await,
            done => done,
        };
        drop(ended);
        result.map_err(front_error)
    }
}

/// Says that a front comes no more, whatever becomes of its reader.
struct FrontEnds<'a>(&'a Filling);

impl Drop for FrontEnds<'_> {
    fn drop(&mut self) {
        self.0.front_ended();
    }
}
