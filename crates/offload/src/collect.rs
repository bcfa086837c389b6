//! Collection of what nothing in the store leads to any more: docs/design/2026-11-22-archive.md,
//! "Collection".
//!
//! Owns the order of steps; `kip_archive::gc` decides what may be deleted, and its `Collection`, a
//! reference that is changed by compare-and-swap only, which data directory may collect. A crash
//! between any two steps leaves a lease that is one's own, and candidates that the next run goes on
//! from.
//!
//! ```text
//! lease taken -> marked -> candidates stored -> deleted, one by one -> lease given back
//! ```
//!
//! A wait that is shorter than the usual one would not protect an upload meanwhile. So such a
//! collection and the uploads of this daemon exclude each other; another's upload looks once more
//! before it publishes ([`Archive::begin_writing`]).

use crate::survey::{SummaryError, Survey};
use crate::{Archive, HeadFailure};
use futures_util::StreamExt as _;
use kip_archive::gc::{Busy, Candidates, Collection, CollectionError, DatedObject, GRACE_MS, Mark, Object, plan};
use kip_archive::head::Head;
use kip_archive::ids::{PackId, ProcId};
use kip_archive::names::{FrontRef, ObjectName};
use kip_store::{Key, ReadReferenceError, StoreFailure, SwapError, Version};
use kip_sys::fault;
use kip_types::api::{CollectRequest, CollectView, UnusedView};
use kip_types::chain;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Objects that are deleted at once.
const AT_ONCE: usize = 8;
/// Nothing is begun to be deleted when so little of the lease is left, milliseconds: a deletion
/// takes up to two minutes.
const MARGIN_MS: u64 = 3 * 60 * 1000;
/// Another data directory that collects or stores is waited for as long.
const LEASED_WITHIN: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });
/// It is looked for that often whether another data directory has ended.
const LOOKS_AGAIN: Duration = Duration::from_millis(20);
/// How often a daemon collects by itself, milliseconds; a quarter more or less, so that not all
/// come at once.
pub const EVERY_MS: u64 = 3600 * 1000;

/// Nothing more is deleted; what was deleted before was of no use.
#[allow(missing_docs, reason = "the text of each is what it means")]
#[derive(Debug, thiserror::Error)]
pub enum CollectError {
    #[error("a collection is under way here, or an upload that none may undo: wait until it has ended")]
    UnderWay,
    #[error(transparent)]
    Busy(#[from] Busy),
    #[error("another collector took over while this one looked: try again")]
    Overtaken,
    #[error(transparent)]
    Noted(#[from] CollectionError),
    #[error(transparent)]
    Read(#[from] ReadReferenceError),
    #[error(transparent)]
    Swap(SwapError),
    #[error(transparent)]
    Store(#[from] StoreFailure),
    #[error("nothing is collected, for it is not known what the head of proc {proc} leads to")]
    Head {
        proc: ProcId,
        #[source]
        source: HeadFailure,
    },
    #[error("nothing is collected, for it is not known what {object} leads to")]
    Front {
        object: String,
        #[source]
        source: SummaryError,
    },
}

impl From<SwapError> for CollectError {
    fn from(e: SwapError) -> CollectError {
        match e {
            SwapError::Conflict { .. } | SwapError::Superseded { .. } => CollectError::Overtaken,
            other => CollectError::Swap(other),
        }
    }
}

impl Archive {
    fn collection_key(&self) -> Key {
        Archive::key(&ObjectName::Collection { realm: self.realm.clone() })
    }

    /// What collectors have noted, and which version of it that is.
    pub(crate) async fn collection(&self) -> Result<(Collection, Option<Version>), CollectError> {
        let key = self.collection_key();
        match self.store.read_reference(&key).await? {
            None => Ok((Collection::default(), None)),
            Some((bytes, version)) => Ok((Collection::decode(key.as_str(), &bytes)?, Some(version))),
        }
    }

    /// Deletes what was found unused by an earlier collection, `grace_ms` ago at least, and still
    /// is; notes what is unused now.
    pub async fn collect(&self, request: &CollectRequest, now_ms: fn() -> u64) -> Result<CollectView, CollectError> {
        let _one_at_a_time = self.collecting.try_lock().map_err(|_| CollectError::UnderWay)?;
        let short = request.grace_ms < GRACE_MS && !request.dry_run;
        let _nobody_stores = if short { Some(self.storing.write().await) } else { None };
        let (noted, leased) = match request.dry_run {
            true => (self.collection().await?.0, None),
            false => {
                let (begun, version) = self.lease_within(LEASED_WITHIN, request.grace_ms, now_ms).await?;
                (begun.clone(), Some((begun, version)))
            }
        };
        let began_ms = now_ms();
        let marked = self.survey_and_mark().await;
        if let (Err(_), Some((begun, version))) = (&marked, &leased) {
            // If not even that can be noted, the lease ends by itself.
            let _ = self.note(&begun.end(now_ms()), Some(version)).await;
        }
        let (survey, live) = marked?;
        let mark = Mark { began_ms, live: &live, stored: &survey.stored };
        let planned = plan(&mark, &noted.candidates, request.grace_ms);
        fault::reach("gc-marked");
        let (mut candidates, mut deleted) = (planned.candidates, planned.delete.clone());
        if let Some((begun, version)) = leased {
            let found = begun.found(candidates.clone(), now_ms());
            let version = self.note(&found, Some(&version)).await?;
            fault::reach("gc-candidates");
            deleted = self.delete(&planned.delete, &found, now_ms).await?;
            let ended = found.end(now_ms());
            // The collector that took over meanwhile has noted the same and more.
            match self.note(&ended, Some(&version)).await {
                Ok(_) => candidates = ended.candidates,
                Err(CollectError::Overtaken) => {}
                Err(e) => return Err(e),
            }
            if let Err(e) = self.store.remove_leftovers(Duration::from_millis(GRACE_MS)).await {
                tracing::warn!(error = chain(&e), "what dead writers left in the store stays there");
            }
        }
        Ok(self.report(request, &survey, &live, &deleted, &candidates))
    }

    /// Keeps other data directories from collecting, if none does now.
    pub(crate) async fn lease(
        &self,
        grace_ms: u64,
        now_ms: fn() -> u64,
    ) -> Result<(Collection, Version), CollectError> {
        let (noted, version) = self.collection().await?;
        let begun = noted.begin(self.owner, now_ms(), grace_ms)?;
        let version = self.note(&begun, version.as_ref()).await?;
        Ok((begun, version))
    }

    /// The same, waiting for a data directory that collects or stores now.
    pub(crate) async fn lease_within(
        &self,
        within: Duration,
        grace_ms: u64,
        now_ms: fn() -> u64,
    ) -> Result<(Collection, Version), CollectError> {
        let until = Instant::now() + within;
        loop {
            match self.lease(grace_ms, now_ms).await {
                Err(CollectError::Busy(_) | CollectError::Overtaken) if Instant::now() < until => {
                    tokio::time::sleep(LOOKS_AGAIN).await;
                }
                done => return done,
            }
        }
    }

    pub(crate) async fn note(
        &self,
        collection: &Collection,
        version: Option<&Version>,
    ) -> Result<Version, CollectError> {
        Ok(self.store.swap_reference(&self.collection_key(), version, collection.encode().into()).await?)
    }

    async fn survey_and_mark(&self) -> Result<(Survey, BTreeSet<Object>), CollectError> {
        let mut survey = self.survey(&self.store.in_background()).await?;
        let heads = std::mem::take(&mut survey.heads);
        let live = self.live(heads, &survey.fronts).await?;
        Ok((survey, live))
    }

    /// Every front that a head keeps, and every pack that such a front leads to. What can no longer
    /// be read, for its key was destroyed, leads to nothing; if that is a head, every front of its
    /// proc counts as kept.
    async fn live(
        &self,
        heads: BTreeMap<ProcId, Result<Head, HeadFailure>>,
        listed: &BTreeMap<ProcId, BTreeSet<FrontRef>>,
    ) -> Result<BTreeSet<Object>, CollectError> {
        let mut fronts = Vec::new();
        for (proc, head) in heads {
            match head {
                Ok(head) => fronts.extend(head.fronts().map(|front| (proc, front))),
                Err(e) if e.is_destroyed() => {
                    fronts.extend(listed.get(&proc).into_iter().flatten().map(|front| (proc, *front)));
                }
                Err(source) => return Err(CollectError::Head { proc, source }),
            }
        }
        let mut live: BTreeSet<Object> = fronts.iter().map(|(proc, front)| Object::Front(*proc, *front)).collect();
        for ((proc, front), summary) in self.summaries(&self.store.in_background(), fronts).await {
            match summary {
                Ok(summary) => live.extend(summary.manifest.packs.iter().map(|pack| Object::Pack(pack.id))),
                Err(e) if e.is_destroyed() => {}
                Err(source) => {
                    let object = self.front_key(proc, front).as_str().to_owned();
                    return Err(CollectError::Front { object, source });
                }
            }
        }
        Ok(live)
    }

    /// Deletes them as long as the lease lasts; those that it did. What is left stays a candidate.
    async fn delete(
        &self,
        objects: &[Object],
        leased: &Collection,
        now_ms: fn() -> u64,
    ) -> Result<Vec<Object>, CollectError> {
        let until_ms = leased.lease.map_or(0, |lease| lease.until_ms.saturating_sub(MARGIN_MS));
        let delete = |object: Object| async move {
            let deleted = self.store.in_background().delete(&Archive::key(&object.name(&self.realm))).await;
            fault::reach("gc-deleted");
            deleted.map(|()| object)
        };
        let in_time = objects.iter().copied().take_while(|_| now_ms() < until_ms);
        let mut deleting = futures_util::stream::iter(in_time).map(delete).buffer_unordered(AT_ONCE);
        let (mut gone, mut failed) = (Vec::new(), None);
        while let Some(deleted) = deleting.next().await {
            match deleted {
                Ok(object) => gone.push(object),
                Err(e) => failed = failed.or(Some(e)),
            }
        }
        if let Some(cache) = &self.cache {
            let names: HashSet<String> = gone.iter().map(|object| object.name(&self.realm).to_string()).collect();
            cache.forget(|object| names.contains(object));
        }
        let packs: BTreeSet<PackId> = gone.iter().filter_map(pack_of).collect();
        if !packs.is_empty() {
            Arc::make_mut(&mut self.index.lock()).retain(|pack| !packs.contains(pack));
            self.save_index();
        }
        failed.map_or(Ok(gone), |e| Err(e.into()))
    }

    fn report(
        &self,
        request: &CollectRequest,
        survey: &Survey,
        live: &BTreeSet<Object>,
        deleted: &[Object],
        candidates: &Candidates,
    ) -> CollectView {
        let written: HashMap<Object, u64> = survey.stored.iter().map(|s| (s.object, s.written_ms)).collect();
        let unused = |object: &Object| UnusedView {
            object: object.name(&self.realm).to_string(),
            bytes: survey.bytes.get(object).copied().unwrap_or(0),
            due_at_ms: candidates
                .since(object)
                .map(|since| since.max(written.get(object).copied().unwrap_or(0)).saturating_add(request.grace_ms))
                .map(|due_at_ms| due_at_ms.min(i64::MAX as u64)),
        };
        let gone: BTreeSet<&Object> = deleted.iter().collect();
        CollectView {
            dry_run: request.dry_run,
            used: survey.stored.iter().filter(|DatedObject { object, .. }| live.contains(object)).count() as u64,
            waiting: candidates.objects().filter(|object| !gone.contains(object)).map(unused).collect(),
            deleted: deleted.iter().map(unused).collect(),
        }
    }
}

fn pack_of(object: &Object) -> Option<PackId> {
    match object {
        Object::Pack(pack) => Some(*pack),
        Object::Front(..) => None,
    }
}

/// One line of what was deleted.
pub fn summary(view: &CollectView) -> String {
    let bytes: u64 = view.deleted.iter().map(|unused| unused.bytes).sum();
    format!("{} objects of {bytes} bytes, {} wait", view.deleted.len(), view.waiting.len())
}
