//! Objects back into a generation directory.

use super::{Archive, HeadFailure};
use futures_util::StreamExt as _;
use kip_archive::files::restore::RestoreError;
use kip_archive::front::read::{Event, FrontReader};
use kip_archive::front::{Manifest, Sets};
use kip_archive::ids::ProcId;
use kip_archive::index::{FileKey, Place};
use kip_archive::names::FrontRef;
use kip_archive::seal::OpenError;
use kip_archive::table::{Found, Home, PageTable, Remote, Space};
use kip_snapshot::carry;
use kip_snapshot::pages::{PAGE, PageMap, Process, Run};
use kip_snapshot::remote::{RemoteFile, TABLE};
use kip_snapshot::{Contents, SnapshotError};
use kip_store::GetError;
use kip_types::Generation;
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

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
    #[error("its files have a part {name:?}, which this Kip does not know: upgrade Kip")]
    Files { name: String },
    #[error("{path} of its own files cannot be restored")]
    Restore {
        path: PathBuf,
        #[source]
        source: Box<RestoreError>,
    },
    #[error("{path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// A front that comes.
struct Coming<'a> {
    growing: &'a Path,
    /// Name of the page file with the pages that came with the front.
    name: String,
    manifest: Option<Manifest>,
    sets: Sets,
    table: PageTable,
    file: Option<File>,
    /// Which of its pages are which.
    pages: BTreeMap<(Space, u64), u32>,
}

impl Coming<'_> {
    fn io_at(&self, name: &str) -> impl Fn(io::Error) -> FetchError + use<> {
        let path = self.growing.join(name);
        move |source| FetchError::Io { path: path.clone(), source }
    }

    fn take(&mut self, event: Event) -> Result<(), FetchError> {
        match event {
            Event::Manifest(manifest) => self.manifest = Some(*manifest),
            Event::Sets(sets) => self.sets = sets,
            Event::PageTable(table) => self.table = table,
            Event::Metadata { name, bytes, .. } => {
                let open = OpenOptions::new().append(true).create(true).open(self.growing.join(&name));
                open.and_then(|mut file| file.write_all(&bytes)).map_err(self.io_at(&name))?;
            }
            Event::EagerPages { space, pages } | Event::SetPages { space, pages } => {
                let io_at = self.io_at(&self.name);
                if self.file.is_none() {
                    let path = self.growing.join(&self.name);
                    self.file = Some(OpenOptions::new().write(true).create_new(true).open(path).map_err(&io_at)?);
                }
                let first = self.pages.len() as u32;
                let bytes: Vec<u8> = pages.iter().flat_map(|(_, bytes)| bytes).copied().collect();
                let file = self.file.as_ref().expect("just made");
                file.write_all_at(&bytes, u64::from(first) * PAGE as u64).map_err(&io_at)?;
                self.pages.extend((first..).zip(&pages).map(|(page, (address, _))| ((space, *address), page)));
            }
            Event::Files(_) | Event::Eager | Event::End => {}
        }
        Ok(())
    }

    /// Where all memory lies: what came with the front in one file, all else in a remote one.
    fn map(&mut self, generation: Generation, realm: &kip_types::Realm) -> Result<PageMap, FetchError> {
        let mut map = PageMap::default();
        let here = self.file.is_some().then(|| map.file(&self.name));
        let remote = Remote::new(&self.table, map.files.len() as u32);
        let is_remote = remote.runs().any(|(.., run)| run.home != Home::Front);
        if is_remote {
            let name = format!("g{generation}-remote");
            let pages = self.table.pages() as u32;
            let file = RemoteFile::create(self.growing, &name, pages)?;
            for (first, _, run) in remote.runs().filter(|(.., run)| run.home == Home::Zeros) {
                file.put_zeros(first, run.pages).map_err(self.io_at(&name))?;
            }
            let table = format!("{name}{TABLE}");
            fs::write(self.growing.join(&table), self.table.save(realm)).map_err(self.io_at(&table))?;
            let number = map.file(&name) as usize;
            map.files[number].remote = Some(pages);
        }
        for (first, space, run) in remote.runs() {
            let Space::Process(number) = space else { continue };
            let process = map.processes.entry(number).or_default();
            let mut start = run.start;
            let away = |from: u64, to: u64, runs: &mut Vec<Run>| {
                let at = |address: u64| ((address - run.start) / PAGE as u64) as u32;
                let (pages, first) = (at(to) - at(from), first + at(from));
                if pages > 0 {
                    append(runs, Run { start: from, pages, file: remote.file(), first });
                }
            };
            for ((_, address), page) in self.pages.range((space, run.start)..(space, run.end())) {
                away(start, *address, &mut process.runs);
                let file = here.expect("pages came");
                append(&mut process.runs, Run { start: *address, pages: 1, file, first: *page });
                start = address + PAGE as u64;
            }
            away(start, run.end(), &mut process.runs);
        }
        for (number, sets) in std::mem::take(&mut self.sets) {
            map.processes.entry(number).or_insert_with(Process::default).sets = sets;
        }
        Ok(map)
    }
}

impl Archive {
    /// Brings a generation back into the proc's directory: its final path. Only its front is fetched. Blocking; not on a thread of
    /// the runtime.
    pub(crate) fn fetch(&self, proc: ProcId, front: FrontRef, dir: &Path) -> Result<PathBuf, FetchError> {
        let generation = front.generation;
        let growing = kip_snapshot::begin(dir, generation)?;
        let mut coming = Coming {
            growing: &growing,
            name: format!("g{generation}-front"),
            manifest: None,
            sets: Sets::default(),
            table: PageTable::default(),
            file: None,
            pages: BTreeMap::new(),
        };
        self.runtime.block_on(self.front(proc, front, &mut coming))?;
        let mut map = coming.map(generation, &self.realm)?;
        carry::write_sets(&mut map, &growing)?;
        let Coming { name, manifest, table, pages, .. } = coming;
        let manifest = manifest.expect("a front that is complete has one");
        let contents = Contents { engine: manifest.engine, body: manifest.body, pages: map };
        let path = kip_snapshot::seal_copy(&growing, generation, contents)?;
        self.remember(proc, &path, &name, &table, &pages);
        Ok(path)
    }

    /// What came with the front and is in packs as well need not be read when it is archived again.
    fn remember(&self, proc: ProcId, path: &Path, name: &str, table: &PageTable, pages: &BTreeMap<(Space, u64), u32>) {
        let key = File::open(path.join(name)).and_then(|file| FileKey::of(&file));
        let (Ok(Some(key)), Ok(map)) = (key, PageMap::load(path)) else { return };
        let Some(file) = map.files.iter().find(|file| file.name == name) else { return };
        let mut known = self.known.lock().expect("nobody panics with it");
        let known = known.entry(proc).or_default();
        for ((space, address), page) in pages {
            let place: Option<Place> = match table.find(*space, *address) {
                Found::Block(place) => Some(place),
                Found::Absent | Found::Zeros | Found::Front => None,
            };
            if let (Some(place), Some(sum)) = (place, file.sums.get(*page as usize)) {
                known.insert(key, *page, *sum, place);
            }
        }
    }

    /// Reads the front as it comes.
    async fn front(&self, proc: ProcId, which: FrontRef, coming: &mut Coming<'_>) -> Result<(), FetchError> {
        let opened = |source| FetchError::Open { proc, front: which, source };
        let mut object = self.store.get(&self.front_key(proc, which)).await?;
        let mut reader = FrontReader::new(self.keys(), proc, which);
        while let Some(bytes) = object.next().await {
            let bytes = bytes?;
            let mut rest = &bytes[..];
            while let Some(event) = reader.next(&mut rest).map_err(opened)? {
                coming.take(event)?;
            }
        }
        reader.finish().map_err(opened)
    }
}

/// Adds pages to runs that are by address.
fn append(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.end() == run.start && last.file == run.file && last.first + last.pages == run.first => {
            last.pages += run.pages;
        }
        _ => runs.push(run),
    }
}
