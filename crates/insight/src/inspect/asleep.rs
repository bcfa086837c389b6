//! Processes that are not there: parked, in a generation on the local disk, or archived, in the
//! store.

use super::live::lying;
use super::maps::{PageLocation, PageLocations};
use super::{Page, Pages, strings};
use kip_archive::table::{Home, Space};
use kip_criu_images::inspect::{self, ImageProcess};
use kip_criu_images::{CheckpointImageError, Images};
use kip_engine::host::Proc;
use kip_offload::StoredImages;
use kip_records::body::Body;
use kip_snapshot::pages::{PAGE, PageMap, damaged};
use kip_snapshot::remote::RemoteFile;
use kip_supervisor::task::archived;
use kip_types::Generation;
use kip_types::api::Detail;
use kip_types::chain;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// Where its memory is.
enum Memory {
    Parked { directory: PathBuf, map: PageMap },
    Archived(StoredImages),
}

/// A tree in images.
pub(super) struct Asleep {
    /// By number inside.
    pub(super) processes: Vec<ImageProcess>,
    /// What was noted beside the images.
    pub(super) body: Body,
    memory: Memory,
}

impl Asleep {
    /// In the proc's directory.
    pub(super) fn parked(proc: &Proc, generation: Generation) -> Result<Asleep, String> {
        let directory = kip_snapshot::path_of(&proc.dir, generation);
        let body = kip_snapshot::open::<Body>(&directory).map_err(|e| chain(&e))?.body;
        let map = PageMap::load(&directory).map_err(|e| chain(&e))?;
        let processes =
            Images::read(&directory).and_then(|images| inspect::processes(&images)).map_err(|e| chain(&e))?;
        Ok(Asleep { processes, body, memory: Memory::Parked { directory, map } })
    }

    /// In the store.
    pub(super) fn archived(proc: &Proc, of: Detail) -> Result<Asleep, String> {
        let known = archived(proc)?;
        let archive = proc.shared.archive.as_ref().ok_or("there is no store: `kip up --store URL`")?;
        let id = archive.id_of(&proc.dir).map_err(|e| chain(&e))?;
        let wanted = |images: &Images| match of {
            Detail::Env => {
                Ok::<_, CheckpointImageError>(inspect::processes(images)?.iter().flat_map(strings::wanted).collect())
            }
            Detail::Files | Detail::Sockets | Detail::Maps => Ok(BTreeSet::new()),
        };
        let stored = archive.peek(id, known.front, wanted).map_err(|e| chain(&e))?;
        let processes = inspect::processes(&stored.images).map_err(|e| chain(&e))?;
        Ok(Asleep { processes, body: known.body, memory: Memory::Archived(stored) })
    }

    pub(super) fn pages(&self, proc: &Proc, wanted: &BTreeSet<Page>) -> Result<Pages, String> {
        match &self.memory {
            Memory::Archived(stored) => {
                Ok(stored.pages.iter().map(|(page, bytes)| (*page, Ok(bytes.clone()))).collect())
            }
            Memory::Parked { directory, map } => {
                let read = |page: &Page| Some((*page, page_of(proc, directory, map, *page).transpose()?));
                Ok(wanted.iter().filter_map(read).collect())
            }
        }
    }

    /// Where pages lie, by process.
    pub(super) fn places(&self) -> Result<BTreeMap<u32, PageLocations>, String> {
        let mut all = BTreeMap::new();
        match &self.memory {
            Memory::Parked { directory, map } => {
                for (pid, process) in &map.processes {
                    let ranges = lying(directory, map, &process.runs).map_err(|e| chain(&e))?;
                    all.insert(*pid, PageLocations { ranges, is_stored: false });
                }
            }
            Memory::Archived(stored) => {
                for process in &self.processes {
                    let runs = stored.table.spaces.get(&Space::Process(process.pid)).into_iter().flatten();
                    let runs = runs.filter(|run| run.home != Home::Zeros);
                    let ranges = runs.map(|run| (run.start..run.end(), PageLocation::Store)).collect();
                    all.insert(process.pid, PageLocations { ranges, is_stored: true });
                }
            }
        }
        Ok(all)
    }
}

/// What is said of a page of a clone for which the clone has not asked yet.
pub(super) const STILL_COPIED: &str = "it is still copied from the proc that this is a clone of: try again";

/// A page of a generation on the local disk, which of a remote page file may be in the store still;
/// none if it lies nowhere.
fn page_of(proc: &Proc, directory: &Path, map: &PageMap, page: Page) -> Result<Option<Vec<u8>>, String> {
    let (pid, address) = page;
    let Some(process) = map.processes.get(&pid) else { return Ok(None) };
    let run = process.runs.get(process.runs.partition_point(|run| run.end() <= address));
    let Some(run) = run.filter(|run| run.start <= address) else { return Ok(None) };
    let (file, page) = (&map.files[run.file as usize], run.first + ((address - run.start) / PAGE as u64) as u32);
    let at = |e: io::Error| format!("{}: {e}", directory.join(&file.name).display());
    let mut bytes = vec![0; PAGE];
    let remote = RemoteFile::find(directory, file).map_err(|e| chain(&e))?;
    let Some(remote) = remote else {
        let read = File::open(directory.join(&file.name))
            .and_then(|open| open.read_exact_at(&mut bytes, u64::from(page) * PAGE as u64));
        read.map_err(at)?;
        return match file.first_damaged(page as usize, &bytes) {
            Some(page) => Err(damaged(&file.name, page).to_string()),
            None => Ok(Some(bytes)),
        };
    };
    match remote.read(page, &mut bytes) {
        Ok(()) => Ok(Some(bytes)),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
            if file.remote.is_none() {
                return Err(STILL_COPIED.to_owned());
            }
            let archive = proc.shared.archive.as_ref().ok_or("it is in a store: `kip up --store URL`")?;
            archive.remote_page(directory, file, page).map(Some).map_err(|e| chain(&e))
        }
        Err(e) => Err(at(e)),
    }
}
