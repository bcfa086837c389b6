//! A front from the store, all of it, without keeping its pages.

use crate::blocking;
use crate::{Archive, FetchError};
use futures_util::StreamExt as _;
use kip_archive::files::tree::Files;
use kip_archive::front::read::{FrontEvent, FrontReader};
use kip_archive::front::{FrontManifest, WorkingSets};
use kip_archive::ids::{KeyId, ProcId};
use kip_archive::names::FrontRef;
use kip_archive::pack::BlockRef;
use kip_archive::seal::UnsealError;
use kip_archive::table::PageTable;
use kip_store::GetError;
use kip_types::api::SectionView;
use std::collections::BTreeSet;

/// What a whole front says.
#[derive(Default)]
pub(crate) struct WholeFront {
    pub(crate) manifest: Option<FrontManifest>,
    pub(crate) sets: WorkingSets,
    pub(crate) table: PageTable,
    pub(crate) files: Files,
    /// Sealed bytes of each section.
    pub(crate) sections: Vec<SectionView>,
    pub(crate) key: Option<KeyId>,
    pub(crate) bytes: u64,
}

/// What has to be known of a generation before its proc is taken over.
pub struct Whole {
    /// What its manifest says.
    pub manifest: FrontManifest,
    /// The keys that all of it takes.
    pub keys: BTreeSet<KeyId>,
    /// Bytes that the store holds for it.
    pub stored_bytes: u64,
}

/// A front is not as it was sealed, or not there.
#[allow(missing_docs, reason = "the text of each is what it means")]
#[derive(Debug, thiserror::Error)]
pub enum FrontReadError {
    #[error(transparent)]
    Get(#[from] GetError),
    #[error(transparent)]
    Open(#[from] UnsealError),
}

impl WholeFront {
    /// Every block that it leads to.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = &BlockRef> {
        self.table.blocks.iter().chain(self.files.roots.values().flat_map(|tree| &tree.blocks))
    }

    fn take(&mut self, event: FrontEvent) -> &'static str {
        match event {
            FrontEvent::Manifest(manifest) => {
                self.manifest = Some(*manifest);
                "manifest"
            }
            FrontEvent::Sets(sets) => {
                self.sets = sets;
                "sets"
            }
            FrontEvent::PageTable(table) => {
                self.table = table;
                "page table"
            }
            FrontEvent::Files(files) => {
                self.files = files;
                "files"
            }
            FrontEvent::Metadata { .. } => "metadata",
            FrontEvent::EagerPages { .. } | FrontEvent::Eager => "eager pages",
            FrontEvent::SetPages { .. } => "set pages",
            FrontEvent::End => "end",
        }
    }

    fn count(&mut self, section: &str, bytes: u64) {
        match self.sections.last_mut() {
            Some(last) if last.name == section => last.bytes += bytes,
            _ => self.sections.push(SectionView { name: section.to_owned(), bytes }),
        }
    }
}

impl Archive {
    /// Reads all of a front from the store. The cache has it then, so that what follows asks for it
    /// no more.
    pub async fn read_to_take(&self, proc: ProcId, front: FrontRef) -> Result<Whole, FetchError> {
        let mut came = Vec::new();
        let whole =
            self.whole_front(proc, front, |bytes| came.extend_from_slice(bytes)).await.map_err(|e| match e {
                FrontReadError::Get(e) => FetchError::Get(e),
                FrontReadError::Open(source) => FetchError::Open { proc, front, source },
            })?;
        if let Some(cache) = self.cache.clone() {
            let object = self.front_key(proc, front);
            let keep = move || cache.keep_whole(object.as_str(), &came);
            blocking(keep).await;
        }
        let sealed: u64 = whole.blocks().map(|block| u64::from(block.sealed)).sum();
        let stored_bytes = whole.bytes + sealed;
        let manifest = whole.manifest.expect("a front that is whole has a manifest");
        let keys = manifest.packs.iter().map(|pack| pack.key).chain(whole.key).collect();
        Ok(Whole { manifest, keys, stored_bytes })
    }

    /// Reads a front and authenticates all of it; `each` gets its bytes as they come.
    pub(crate) async fn whole_front(
        &self,
        proc: ProcId,
        front: FrontRef,
        mut each: impl FnMut(&[u8]),
    ) -> Result<WholeFront, FrontReadError> {
        let mut object = self.store.get(&self.front_key(proc, front)).await?;
        let mut reader = FrontReader::new(self.keys(), proc, front);
        let (mut whole, mut uncounted) = (WholeFront::default(), 0);
        while let Some(bytes) = object.next().await {
            let bytes = bytes?;
            each(&bytes);
            whole.bytes += bytes.len() as u64;
            let mut rest = &bytes[..];
            loop {
                let before = rest.len();
                let event = reader.next(&mut rest)?;
                uncounted += (before - rest.len()) as u64;
                let Some(event) = event else { break };
                let section = whole.take(event);
                whole.count(section, std::mem::take(&mut uncounted));
            }
        }
        reader.finish()?;
        whole.key = reader.header().map(|header| header.key);
        Ok(whole)
    }
}
