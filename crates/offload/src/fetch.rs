//! Objects back into a generation directory.

use crate::Archive;
use crate::account::Account;
use crate::errors::FetchError;
use crate::filling::Filling;
use crate::processor;
use crate::stream::{FrontStream, remote_name};
use kip_archive::front::read::FrontEvent;
use kip_archive::front::{FrontManifest, WorkingSets};
use kip_archive::ids::ProcId;
use kip_archive::names::FrontRef;
use kip_archive::table::{Home, PageTable, RemotePages, RemoteRun, Space};
use kip_snapshot::pages::{PageMap, Run};
use kip_snapshot::remote::{RemoteFile, TABLE};
use kip_snapshot::{Contents, Part};
use kip_sys::fault;
use kip_types::Generation;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A front that comes.
struct Coming<'a> {
    growing: &'a Path,
    /// Files that were there before anything had come, empty.
    spare: BTreeSet<String>,
    /// Size and checksum of each file that came.
    written: BTreeMap<String, (u64, crc32fast::Hasher)>,
    /// Of the remote page file, with where it will be.
    name: String,
    path: PathBuf,
    archive: &'a Archive,
    account: Arc<Account>,
    manifest: Option<FrontManifest>,
    sets: WorkingSets,
    /// Where all memory lies, and what fills it: none if there is none.
    map: PageMap,
    filling: Option<Arc<Filling>>,
}

/// A generation of which no page has come.
struct Sealed {
    path: PathBuf,
    filling: Option<Arc<Filling>>,
    sets: WorkingSets,
}

impl Coming<'_> {
    fn io_at(&self, name: &str) -> impl Fn(io::Error) -> FetchError + use<> {
        let path = self.growing.join(name);
        move |source| FetchError::Io { path: path.clone(), source }
    }

    fn take(&mut self, event: FrontEvent) -> Result<(), FetchError> {
        match event {
            FrontEvent::Manifest(manifest) => {
                self.archive.check_engine(&manifest.engine)?;
                processor::check(&manifest.cpu_features)?;
                self.manifest = Some(*manifest);
            }
            FrontEvent::Sets(sets) => self.sets = sets,
            FrontEvent::PageTable(table) => self.table(table)?,
            FrontEvent::Metadata { name, bytes, .. } => {
                self.spare.remove(&name);
                let open = OpenOptions::new().append(true).create(true).open(self.growing.join(&name));
                open.and_then(|mut file| file.write_all(&bytes)).map_err(self.io_at(&name))?;
                let (size, sum) = self.written.entry(name).or_default();
                *size += bytes.len() as u64;
                sum.update(&bytes);
            }
            FrontEvent::Files(_) => {}
            FrontEvent::EagerPages { .. } | FrontEvent::Eager | FrontEvent::SetPages { .. } | FrontEvent::End => {
                unreachable!("pages come last")
            }
        }
        Ok(())
    }

    /// Makes the remote page file, of which nothing is here but zeros.
    fn table(&mut self, table: PageTable) -> Result<(), FetchError> {
        let pages = table.pages() as u32;
        if pages == 0 {
            return Ok(());
        }
        let file = RemoteFile::create(self.growing, &self.name, pages)?;
        let saved = format!("{}{TABLE}", self.name);
        fs::write(self.growing.join(&saved), table.save(&self.archive.realm)).map_err(self.io_at(&saved))?;
        let number = self.map.file(&self.name);
        self.map.files[number as usize].remote = Some(pages);
        let remote = RemotePages::new(&table, number);
        let zeros = remote.runs().filter(|of| of.run.home == Home::Zeros).map(|of| (of.first, of.run.pages));
        file.begin_with_zeros(zeros).map_err(self.io_at(&self.name))?;
        for RemoteRun { first, space, run } in remote.runs() {
            if let Space::Process(inside) = space {
                let runs = &mut self.map.processes.entry(inside).or_default().runs;
                match runs.last_mut().filter(|last| last.end() == run.start && last.first + last.pages == first) {
                    Some(last) => last.pages += run.pages,
                    None => runs.push(Run { start: run.start, pages: run.pages, file: number, first }),
                }
            }
        }
        let filling = Filling::new(self.path.join(&self.name), file, table, Arc::clone(&self.account));
        self.filling = Some(Arc::new(filling));
        Ok(())
    }

    /// All but the pages has come.
    fn seal(self, generation: Generation) -> Result<Sealed, FetchError> {
        for name in &self.spare {
            fs::remove_file(self.growing.join(name)).map_err(self.io_at(name))?;
        }
        let Coming { growing, manifest, sets, mut map, filling, written, .. } = self;
        for (number, sets) in &sets {
            map.processes.entry(*number).or_default().sets.clone_from(sets);
        }
        let manifest = manifest.expect("what comes first has come");
        let contents = Contents { engine: manifest.engine, body: manifest.body, pages: map };
        let written = written.into_iter().map(|(name, (size, sum))| Part { name, size, crc: sum.finalize() }).collect();
        Ok(Sealed { path: kip_snapshot::seal_copy(growing, generation, contents, written)?, filling, sets })
    }
}

impl Archive {
    /// Fetches a generation back into the proc's directory: its final path. Only the first part of
    /// its front has come then, with all that a wake cannot do without; the rest follows. `beside`
    /// checks it as soon as all but the pages is there, while these come. Blocking; not on a thread
    /// of the runtime.
    pub fn fetch<T: Send>(
        &self,
        proc: ProcId,
        front: FrontRef,
        dir: &Path,
        beside: impl Fn(&Path) -> T + Sync,
    ) -> Result<(PathBuf, T), FetchError> {
        self.fetch_as(proc, front, front.generation, dir, beside)
    }

    /// The same under another number.
    pub fn fetch_as<T: Send>(
        &self,
        proc: ProcId,
        front: FrontRef,
        number: Generation,
        dir: &Path,
        beside: impl Fn(&Path) -> T + Sync,
    ) -> Result<(PathBuf, T), FetchError> {
        let account = self.open_account(dir);
        let mut stream = self.runtime.block_on(self.front_stream(proc, front, &account))?;
        let mut fetched = self.fetch_from(&mut stream, front, number, dir, &account, &beside);
        if matches!(fetched, Err(FetchError::Open { .. })) && stream.is_from_cache() {
            // It is not what the store has: without it, from there.
            kip_snapshot::sweep(dir, None)?;
            stream = self.runtime.block_on(self.front_stream(proc, front, &account))?;
            fetched = self.fetch_from(&mut stream, front, number, dir, &account, &beside);
        }
        let (path, filling, checked) = fetched?;
        if let Some(filling) = filling {
            self.fills(&filling);
            stream.follow(&self.runtime, filling);
        }
        Ok((path, checked))
    }

    /// Its first part.
    fn fetch_from<T: Send>(
        &self,
        stream: &mut FrontStream,
        front: FrontRef,
        generation: Generation,
        dir: &Path,
        account: &Arc<Account>,
        beside: &(impl Fn(&Path) -> T + Sync),
    ) -> Result<(PathBuf, Option<Arc<Filling>>, T), FetchError> {
        let (growing, spare) = kip_snapshot::begin_copy(dir, generation)?;
        let mut coming = Coming {
            growing: &growing,
            spare,
            written: BTreeMap::new(),
            name: remote_name(front.generation),
            path: kip_snapshot::path_of(dir, generation),
            archive: self,
            account: Arc::clone(account),
            manifest: None,
            sets: WorkingSets::default(),
            map: PageMap::default(),
            filling: None,
        };
        let mut next = || self.runtime.block_on(stream.next());
        let mut event = next()?;
        while let Some(early) =
            event.take_if(|event| !matches!(event, FrontEvent::EagerPages { .. } | FrontEvent::Eager))
        {
            coming.take(early)?;
            event = next()?;
        }
        let Sealed { path, filling, sets } = coming.seal(generation)?;
        fault::reach("fetch-begun");
        let io_at = |source| FetchError::Io { path: path.join(remote_name(front.generation)), source };
        let pages_come = || -> Result<(), FetchError> {
            while let Some(FrontEvent::EagerPages { space, pages }) = event {
                let filling = filling.as_ref().expect("pages of which no table speaks are refused");
                filling.put_pages(space, &pages).map_err(io_at)?;
                event = next()?;
            }
            Ok(())
        };
        let (came, checked) = std::thread::scope(|scope| {
            let check = scope.spawn(|| beside(&path));
            (pages_come(), check.join().expect("checking does not panic"))
        });
        came?;
        filling.as_ref().map(|filling| filling.front_begins(&sets)).transpose().map_err(io_at)?;
        Ok((path, filling, checked))
    }
}
