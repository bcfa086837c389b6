//! Objects back into a generation directory.

use super::{Archive, HeadFailure};
use futures_util::StreamExt as _;
use kip_archive::front::read::{Event, FrontReader};
use kip_archive::front::{Manifest, Sets};
use kip_archive::ids::ProcId;
use kip_archive::names::FrontRef;
use kip_archive::pack::{BlockRef, PackReader, PackRef};
use kip_archive::seal::OpenError;
use kip_archive::table::{Home, PageTable, Space};
use kip_snapshot::carry;
use kip_snapshot::pages::{PAGE, PageMap, Process, Run};
use kip_snapshot::{Contents, SnapshotError};
use kip_store::GetError;
use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// The page file of a generation that came from the store.
const FETCHED: &str = "fetched";
/// Each is held in memory while it comes, up to 15 MiB.
const PACKS_AT_ONCE: usize = 4;

/// A generation did not come back; what the store has is as it was.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FetchError {
    #[error(transparent)]
    Head(#[from] HeadFailure),
    #[error(transparent)]
    Get(#[from] GetError),
    #[error("the archived {front} of proc {proc} cannot be opened")]
    Open {
        proc: ProcId,
        front: FrontRef,
        #[source]
        source: OpenError,
    },
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error("{path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// What the front says, once all of it has come.
#[derive(Default)]
struct Front {
    manifest: Option<Manifest>,
    sets: Sets,
    table: PageTable,
    /// Pages of the front, in the page file: number by process and address.
    pages: HashMap<(Space, u64), u32>,
}

/// The page file that grows.
struct PageFile {
    path: PathBuf,
    file: File,
    pages: u32,
}

impl PageFile {
    fn add(&mut self, bytes: &[u8]) -> Result<u32, FetchError> {
        let first = self.pages;
        let written = self.file.write_all_at(bytes, u64::from(first) * PAGE as u64);
        written.map_err(|source| FetchError::Io { path: self.path.clone(), source })?;
        self.pages += (bytes.len() / PAGE) as u32;
        Ok(first)
    }

    /// Pages that take no room.
    fn add_zeros(&mut self, pages: u32) -> u32 {
        self.pages += pages;
        self.pages - pages
    }

    fn end(&self) -> Result<(), FetchError> {
        let set = self.file.set_len(u64::from(self.pages) * PAGE as u64);
        set.map_err(|source| FetchError::Io { path: self.path.clone(), source })
    }
}

impl Archive {
    /// Brings a generation back into the proc's directory: its final path. Blocking; not on a thread of the runtime.
    pub(crate) fn fetch(&self, proc: ProcId, front: FrontRef, dir: &Path) -> Result<PathBuf, FetchError> {
        let growing = kip_snapshot::begin(dir, front.generation)?;
        let path = growing.join(FETCHED);
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
        let file = file.map_err(|source| FetchError::Io { path: path.clone(), source })?;
        let mut pages = PageFile { path, file, pages: 0 };
        let opened = |source| FetchError::Open { proc, front, source };
        let (came, blocks) = self.runtime.block_on(async {
            let came = self.front(proc, front, &growing, &mut pages).await?;
            let blocks = self.blocks(&came.table, &mut pages, opened).await?;
            Ok::<_, FetchError>((came, blocks))
        })?;
        let mut map = PageMap::default();
        let file = map.file(FETCHED);
        for (space, runs) in &came.table.spaces {
            let Space::Process(number) = space else { continue };
            let sets = came.sets.get(number).cloned().unwrap_or_default();
            let mut process = Process { runs: Vec::new(), sets };
            for run in runs {
                let first = match run.home {
                    Home::Zeros => Some(pages.add_zeros(run.pages)),
                    Home::Block { block, first } => Some(blocks[block as usize] + first),
                    Home::Front => None,
                };
                for index in 0..run.pages {
                    let start = run.start + u64::from(index) * PAGE as u64;
                    let first = first.map_or_else(|| came.pages[&(*space, start)], |first| first + index);
                    append(&mut process.runs, Run { start, pages: 1, file, first });
                }
            }
            map.processes.insert(*number, process);
        }
        pages.end()?;
        carry::write_sets(&mut map, &growing)?;
        let manifest = came.manifest.expect("a front that is complete has one");
        let contents = Contents { engine: manifest.engine, body: manifest.body, pages: map };
        Ok(kip_snapshot::seal(&growing, front.generation, contents)?.0)
    }

    /// Reads the front as it comes.
    async fn front(
        &self,
        proc: ProcId,
        which: FrontRef,
        growing: &Path,
        pages: &mut PageFile,
    ) -> Result<Front, FetchError> {
        let opened = |source| FetchError::Open { proc, front: which, source };
        let mut object = self.store.get(&self.front_key(proc, which)).await?;
        let mut reader = FrontReader::new(self.keys.clone(), proc, which);
        let mut front = Front::default();
        while let Some(bytes) = object.next().await {
            let bytes = bytes?;
            let mut rest = &bytes[..];
            while let Some(event) = reader.next(&mut rest).map_err(opened)? {
                front.take(event, growing, pages)?;
            }
        }
        reader.finish().map_err(opened)?;
        Ok(front)
    }

    /// Fetches every block into the page file, from several packs at once; gives each one's first page there.
    async fn blocks(
        &self,
        table: &PageTable,
        pages: &mut PageFile,
        opened: impl Fn(OpenError) -> FetchError,
    ) -> Result<Vec<u32>, FetchError> {
        let mut of_packs: BTreeMap<PackRef, Vec<usize>> = BTreeMap::new();
        for (number, block) in table.blocks.iter().enumerate() {
            of_packs.entry(block.pack).or_default().push(number);
        }
        let mut firsts = vec![0; table.blocks.len()];
        let mut reader = PackReader::new(&self.keys);
        let fetched = of_packs.into_iter().map(|(pack, numbers)| async move {
            let ranges: Vec<_> = numbers.iter().map(|number| table.blocks[*number].range()).collect();
            let bytes = self.store.get_ranges(&self.pack_key(pack.id), &ranges).await?;
            Ok::<_, FetchError>((numbers, bytes))
        });
        let mut fetched = futures_util::stream::iter(fetched).buffer_unordered(PACKS_AT_ONCE);
        while let Some(of_pack) = fetched.next().await {
            let (numbers, bytes) = of_pack?;
            for (number, bytes) in numbers.into_iter().zip(bytes) {
                let block: &BlockRef = &table.blocks[number];
                firsts[number] = pages.add(&reader.open_block(block, &bytes).map_err(&opened)?)?;
            }
        }
        Ok(firsts)
    }
}

impl Front {
    fn take(&mut self, event: Event, growing: &Path, pages: &mut PageFile) -> Result<(), FetchError> {
        match event {
            Event::Manifest(manifest) => self.manifest = Some(*manifest),
            Event::Sets(sets) => self.sets = sets,
            Event::Metadata { name, bytes, .. } => {
                let path = growing.join(name);
                let open = OpenOptions::new().append(true).create(true).open(&path);
                let written = open.and_then(|mut file| file.write_all(&bytes));
                written.map_err(|source| FetchError::Io { path, source })?;
            }
            Event::EagerPages { space, pages: list } | Event::SetPages { space, pages: list } => {
                for (address, bytes) in list {
                    self.pages.insert((space, address), pages.add(&bytes)?);
                }
            }
            Event::PageTable(table) => self.table = table,
            Event::Files(_) | Event::Eager | Event::End => {}
        }
        Ok(())
    }
}

/// Adds a page to runs that are by address.
fn append(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.end() == run.start && last.file == run.file && last.first + last.pages == run.first => {
            last.pages += run.pages;
        }
        _ => runs.push(run),
    }
}
