//! What is needed of an archived generation to show what is in it, and no more. Only reads, and
//! leaves nothing behind.
//!
//! A front comes in the order of need: once its images have come the rest of it is not read, unless
//! pages are wanted that are in it. What is read is authentic, section by section, as in a wake;
//! whether the rest is whole is not checked.

use crate::stream::origin_of;
use crate::{Archive, DemandError, FetchError};
use kip_archive::front::read::FrontEvent;
use kip_archive::ids::ProcId;
use kip_archive::names::{FrontRef, ObjectName};
use kip_archive::pack::{BlockRef, PackReader};
use kip_archive::table::{Found, Home, PageTable, RemotePages, RemoteRun, Space};
use kip_criu_images::inspect::is_wanted;
use kip_criu_images::{CheckpointImageError, Images};
use kip_snapshot::pages::{PAGE, PageFile};
use kip_store::GetError;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

/// A store that does not answer keeps a client waiting no longer than this.
const WITHIN: Duration = Duration::from_secs(15);

/// Pages, by process and address.
pub type Wanted = BTreeSet<(u32, u64)>;

/// A generation as it lies in the store.
#[derive(Debug, Default)]
pub struct StoredImages {
    /// CRIU's images.
    pub images: Images,
    /// Where each page is.
    pub table: PageTable,
    /// Those that were wanted and are anywhere.
    pub pages: BTreeMap<(u32, u64), Vec<u8>>,
}

/// It cannot be shown.
#[allow(missing_docs, reason = "the text of each is what it means")]
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    #[error(transparent)]
    Front(#[from] FetchError),
    #[error(transparent)]
    Get(#[from] GetError),
    #[error(transparent)]
    Image(#[from] CheckpointImageError),
    #[error(transparent)]
    Page(#[from] DemandError),
    #[error("store {store} does not answer")]
    Silent { store: String },
}

impl Archive {
    /// Reads the images of a generation, and the pages that `wanted` names when it has seen them.
    /// Blocking; not on a thread of the runtime.
    pub fn peek(
        &self,
        proc: ProcId,
        front: FrontRef,
        wanted: impl Fn(&Images) -> Result<Wanted, CheckpointImageError>,
    ) -> Result<StoredImages, InspectError> {
        self.answered(self.read_stored(proc, front, wanted))
    }

    /// A page of a remote page file that is not here, without putting it there. Blocking; not on a
    /// thread of the runtime.
    pub fn remote_page(&self, directory: &Path, file: &PageFile, page: u32) -> Result<Vec<u8>, InspectError> {
        let table = self.table_of(directory, file)?;
        let remote = RemotePages::new(&table, 0);
        let mut runs = remote.runs();
        match runs.find(|of| (of.first..of.first + of.run.pages).contains(&page)) {
            Some(RemoteRun { first, space, run }) => match run.home {
                Home::Block { block, first: at } => {
                    self.answered(self.block_page(&table.blocks[block as usize], at + page - first))
                }
                Home::Front => {
                    let path = || directory.join(&file.name);
                    let (proc, origin) =
                        origin_of(directory, &file.name).ok_or_else(|| DemandError::NoFront { path: path() })?;
                    let address = run.start + u64::from(page - first) * PAGE as u64;
                    self.answered(self.front_page(proc, origin.front, space, address))
                }
                Home::Zeros => Ok(vec![0; PAGE]),
            },
            None => Ok(vec![0; PAGE]),
        }
    }

    fn answered<T>(&self, work: impl Future<Output = Result<T, InspectError>>) -> Result<T, InspectError> {
        let silent = |_| InspectError::Silent { store: self.store.name().to_owned() };
        self.runtime.block_on(async { tokio::time::timeout(WITHIN, work).await }).map_err(silent)?
    }

    async fn read_stored(
        &self,
        proc: ProcId,
        front: FrontRef,
        wanted: impl Fn(&Images) -> Result<Wanted, CheckpointImageError>,
    ) -> Result<StoredImages, InspectError> {
        let mut stored = StoredImages::default();
        let mut stream = self.front_to_inspect(proc, front).await?;
        let mut files: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        let mut pages: Option<Wanted> = None;
        while let Some(event) = stream.next().await? {
            let came = match event {
                FrontEvent::PageTable(table) => {
                    stored.table = table;
                    continue;
                }
                FrontEvent::Metadata { name, bytes, .. } => {
                    if is_wanted(&name) {
                        files.entry(name).or_default().extend_from_slice(&bytes);
                    }
                    continue;
                }
                FrontEvent::Manifest(_) | FrontEvent::Sets(_) | FrontEvent::Files(_) => continue,
                FrontEvent::EagerPages { space, pages } | FrontEvent::SetPages { space, pages } => Some((space, pages)),
                FrontEvent::Eager | FrontEvent::End => None,
            };
            // Images are complete.
            let wanted = match &mut pages {
                Some(wanted) => wanted,
                none => {
                    stored.images = Images::of_files(std::mem::take(&mut files))?;
                    none.insert(wanted(&stored.images)?)
                }
            };
            if let Some((Space::Process(pid), came)) = came {
                for (address, bytes) in came.into_iter().filter(|(address, _)| wanted.contains(&(pid, *address))) {
                    stored.pages.insert((pid, address), bytes);
                }
            }
            if !stored.awaits(wanted) {
                break;
            }
        }
        drop(stream);
        for (pid, address) in pages.unwrap_or_default() {
            if let Found::Block(place) = stored.table.find(Space::Process(pid), address)
                && !stored.pages.contains_key(&(pid, address))
            {
                let page = self.block_page(&place.block, place.at / PAGE as u32).await?;
                stored.pages.insert((pid, address), page);
            }
        }
        Ok(stored)
    }

    /// A page that only a front has.
    async fn front_page(
        &self,
        proc: ProcId,
        front: FrontRef,
        of: Space,
        address: u64,
    ) -> Result<Vec<u8>, InspectError> {
        let mut stream = self.front_to_inspect(proc, front).await?;
        while let Some(event) = stream.next().await? {
            if let FrontEvent::EagerPages { space, pages } | FrontEvent::SetPages { space, pages } = event
                && space == of
                && let Some((_, bytes)) = pages.into_iter().find(|(at, _)| *at == address)
            {
                return Ok(bytes);
            }
        }
        Ok(vec![0; PAGE])
    }

    /// A page of a block, which is fetched by a range. Once more if what came cannot be opened, for
    /// it may have been damaged on its way.
    async fn block_page(&self, block: &BlockRef, page: u32) -> Result<Vec<u8>, InspectError> {
        let name = ObjectName::Pack { realm: self.realm.clone(), pack: block.pack.id };
        let mut tries = 0;
        loop {
            let here = self.cache.as_ref().filter(|_| tries == 0);
            let bytes = match here.and_then(|cache| cache.read(self.pack_key(block.pack.id).as_str(), &block.range())) {
                Some(bytes) => bytes,
                None => self.store.get_range(&self.pack_key(block.pack.id), block.range()).await?,
            };
            tries += 1;
            match PackReader::new(&self.keys()).open_block(block, &bytes) {
                Ok(opened) => {
                    let at = page as usize * PAGE;
                    return Ok(opened.get(at..at + PAGE).map_or_else(|| vec![0; PAGE], <[u8]>::to_vec));
                }
                Err(_) if tries < 2 => {}
                Err(source) => return Err(DemandError::Open { object: name.to_string(), source }.into()),
            }
        }
    }
}

impl StoredImages {
    /// Whether a page that is wanted is still to come with the front.
    fn awaits(&self, wanted: &Wanted) -> bool {
        wanted.iter().any(|(pid, address)| {
            self.table.find(Space::Process(*pid), *address) == Found::Front
                && !self.pages.contains_key(&(*pid, *address))
        })
    }
}

#[cfg(test)]
#[path = "inspect_tests.rs"]
mod tests;
