//! What the store has of this realm: one listing, every head, the beginnings of fronts. Only reads.
//!
//! What cannot be read is told of each head and front by itself; only a store that does not answer
//! ends it.

use crate::{Archive, HeadFailure};
use futures_util::{StreamExt as _, TryStreamExt as _};
use kip_archive::front::{FrontManifest, SUMMARY, read};
use kip_archive::gc::{DatedObject, Object};
use kip_archive::head::{Head, HeadError};
use kip_archive::ids::{PackId, ProcId};
use kip_archive::keys::NoKey;
use kip_archive::names::{FrontRef, ObjectName};
use kip_archive::seal::UnsealError;
use kip_store::{GetError, Key, ReadReferenceError, Store, StoreFailure};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::UNIX_EPOCH;

/// Heads or fronts that are read at once.
const AT_ONCE: usize = 16;
/// Where the format version is in an object's header, two bytes.
const FORMAT_AT: usize = 8;

/// One look at a realm's part of the store. A head is at least as new as the listing.
pub(crate) struct Survey {
    /// What can be deleted, and when it was written.
    pub(crate) stored: Vec<DatedObject>,
    /// Bytes of each.
    pub(crate) bytes: HashMap<Object, u64>,
    /// The fronts that were listed, by proc.
    pub(crate) fronts: BTreeMap<ProcId, BTreeSet<FrontRef>>,
    /// The heads of all procs that have a head or a front.
    pub(crate) heads: BTreeMap<ProcId, Result<Head, HeadFailure>>,
}

/// The beginning of a front.
pub(crate) struct Summary {
    pub(crate) manifest: FrontManifest,
    pub(crate) format: u32,
}

/// The beginning of a front cannot be read.
#[allow(missing_docs, reason = "the text of each is what it means")]
#[derive(Debug, thiserror::Error)]
pub enum SummaryError {
    #[error(transparent)]
    Get(#[from] GetError),
    #[error(transparent)]
    Open(#[from] UnsealError),
}

impl SummaryError {
    /// Whether it can never be read, for its key was destroyed.
    pub(crate) fn is_destroyed(&self) -> bool {
        matches!(self, SummaryError::Open(UnsealError::Key(NoKey::Destroyed { .. })))
    }
}

impl HeadFailure {
    /// Whether it can never be read, for its key was destroyed.
    pub(crate) fn is_destroyed(&self) -> bool {
        matches!(self, HeadFailure::Head(HeadError::Open(UnsealError::Key(NoKey::Destroyed { .. }))))
    }
}

impl Archive {
    /// Surveys the realm. The listing is made first, then heads are read.
    pub(crate) async fn survey(&self, store: &Store) -> Result<Survey, StoreFailure> {
        let all = Key::new(ObjectName::of_realm(&self.realm)).expect("a realm is letters");
        let (mut stored, mut bytes, mut fronts) = (Vec::new(), HashMap::new(), BTreeMap::<_, BTreeSet<_>>::new());
        let mut procs = BTreeSet::new();
        let mut listed = store.list(Some(&all));
        while let Some(found) = listed.try_next().await? {
            let name = ObjectName::parse(found.key.as_str());
            if let ObjectName::Head { proc, .. } = &name {
                procs.insert(*proc);
            }
            let Some(object) = Object::of(&self.realm, &name) else { continue };
            let since = found.modified.duration_since(UNIX_EPOCH).unwrap_or_default();
            stored.push(DatedObject { object, written_ms: since.as_millis() as u64 });
            bytes.insert(object, found.size);
            if let Object::Front(proc, front) = object {
                procs.insert(proc);
                fronts.entry(proc).or_default().insert(front);
            }
        }
        let read = |proc| async move { (proc, self.head_in(store, proc).await) };
        let mut reading = futures_util::stream::iter(procs).map(read).buffer_unordered(AT_ONCE);
        let mut heads = BTreeMap::new();
        while let Some((proc, head)) = reading.next().await {
            match head {
                Err(HeadFailure::Read(ReadReferenceError::Store(failure))) => return Err(failure),
                Ok(None) => {}
                Ok(Some((head, _))) => drop(heads.insert(proc, Ok(head))),
                Err(e) => drop(heads.insert(proc, Err(e))),
            }
        }
        Ok(Survey { stored, bytes, fronts, heads })
    }

    /// The beginnings of fronts, several at once; in no order.
    pub(crate) async fn summaries(
        &self,
        store: &Store,
        fronts: impl IntoIterator<Item = (ProcId, FrontRef)>,
    ) -> Vec<((ProcId, FrontRef), Result<Summary, SummaryError>)> {
        let read = |(proc, front)| async move { ((proc, front), self.summary(store, proc, front).await) };
        futures_util::stream::iter(fronts).map(read).buffer_unordered(AT_ONCE).collect().await
    }

    /// The beginning of a front: one request of 64 KiB, as a rule.
    pub(crate) async fn summary(&self, store: &Store, proc: ProcId, front: FrontRef) -> Result<Summary, SummaryError> {
        let key = self.front_key(proc, front);
        let size = store.size(&key).await?;
        let mut end = SUMMARY.min(size);
        loop {
            let bytes = store.get_range(&key, 0..end).await?;
            if let Some(manifest) = read::summary(&self.keys(), Some(proc), Some(front), &bytes)? {
                let format = bytes.get(FORMAT_AT..FORMAT_AT + 2).map_or(0, |at| u16::from_le_bytes([at[0], at[1]]));
                return Ok(Summary { manifest, format: format.into() });
            }
            if end == size {
                return Err(UnsealError::Truncated { at: size }.into());
            }
            end = (end * 4).min(size);
        }
    }

    /// The packs that are there.
    pub(crate) async fn packs_there(&self) -> Result<BTreeSet<PackId>, StoreFailure> {
        let packs = Key::new(format!("{}/packs", ObjectName::of_realm(&self.realm))).expect("a realm is letters");
        let mut listed = self.store.list(Some(&packs));
        let mut there = BTreeSet::new();
        while let Some(object) = listed.try_next().await? {
            if let ObjectName::Pack { pack, .. } = ObjectName::parse(object.key.as_str()) {
                there.insert(pack);
            }
        }
        Ok(there)
    }
}
