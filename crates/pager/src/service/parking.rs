//! Orders about procs that are woken from, or sent to, the tier parked.

use super::refused::OrderError;
use super::{Entry, Service, clear, install_us, installed_pages, micros};
use crate::parked::CopiedFile;
use crate::proc::{PagedProc, RebuiltProcess};
use crate::protocol::{Rebuilt, Woken};
use crate::set::Predictor;
use kip_snapshot::pages::copied::CopiedPages;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// What copies hold of that page file, by a table of it and the copies' memory. Without it the
/// daemon is asked for each page.
fn copied_file(name: String, came: Vec<OwnedFd>) -> Option<CopiedFile> {
    let mut files = came.into_iter().map(File::from);
    let (mut table, mut bytes) = (files.next()?, Vec::new());
    let read = table.seek(SeekFrom::Start(0)).and_then(|_| table.read_to_end(&mut bytes));
    match read.and_then(|_| CopiedPages::read_table(&bytes, files.collect())) {
        Ok(pages) => Some(CopiedFile { name, pages }),
        Err(error) => {
            tracing::warn!(%error, "memory of a clone is not read of copies, but asked for");
            None
        }
    }
}

impl Service {
    pub(super) fn inflate(&self, rebuilt: Rebuilt, mut descriptors: Vec<OwnedFd>) -> Result<Woken, OrderError> {
        let began = Instant::now();
        let Rebuilt { name, number, directory, generation, processes, prefetch, set, later, copied } = rebuilt;
        // What an earlier sleep left. Of another proc the keeper has nothing, unless it did not
        // answer when that was forgotten; then a new name takes the old one's place.
        if self.known(&name).is_some() || self.broken.lock().contains_key(&name) {
            self.forget(&name);
        }
        let came = descriptors.split_off(descriptors.len().min(processes.len()));
        let uffds = descriptors;
        if processes.len() != uffds.len() || copied.is_none() && !came.is_empty() {
            let descriptors = uffds.len() + came.len();
            return Err(OrderError::Descriptors { name, processes: processes.len(), descriptors });
        }
        let with_uffd = |((host, inside, can_come), uffd)| RebuiltProcess {
            host,
            inside,
            can_come,
            uffd,
            waits: later.contains(&inside),
        };
        let pids = processes.iter().map(|(host, ..)| *host).collect();
        let processes = processes.into_iter().zip(uffds).map(with_uffd).collect();
        let slot = self.slot(&name);
        let mut guard = slot.lock();
        let made =
            clear(&directory).and_then(|()| fs::DirBuilder::new().mode(0o700).create(&directory)).and_then(|()| {
                let (server, custodian) = (Arc::clone(&self.server), self.custodian(&name, number));
                let predictor = Predictor::LastUse;
                PagedProc::inflate(
                    number,
                    &directory,
                    server,
                    custodian,
                    predictor,
                    &generation,
                    copied.and_then(|name| copied_file(name, came)),
                    processes,
                    prefetch,
                    &set,
                )
            });
        let proc = match made {
            Ok(proc) => proc,
            Err(source) => {
                drop(guard);
                self.forget(&name);
                self.procs.lock().remove(&name);
                let _ = clear(&directory);
                return Err(OrderError::Restore { name, source });
            }
        };
        let entry =
            Entry { proc, number, directory, pids, holder: None, asleep: Arc::default(), set_bytes: 0, kept_bytes: 0 };
        let woken = Woken {
            install_us: install_us(&entry),
            total_us: micros(began),
            pages: installed_pages(&entry),
            long_tick: false,
        };
        *guard = Some(entry);
        Ok(woken)
    }

    pub(super) fn all_is_here(&self, name: &str) {
        let slot = self.known(name);
        if let Some(entry) = slot.as_ref().map(|slot| slot.lock()).as_deref().and_then(Option::as_ref) {
            entry.proc.all_is_here();
        }
    }

    pub(super) fn prepare_parking(&self, name: &str) -> Result<bool, OrderError> {
        self.sound(name)?;
        let Some(slot) = self.known(name) else { return Ok(false) };
        let mut guard = slot.lock();
        let Some(entry) = guard.as_mut() else { return Ok(false) };
        entry.asleep.store(false, Ordering::SeqCst);
        let prepared = entry.proc.prepare_parking();
        entry.let_go();
        prepared.map_err(|source| OrderError::PrepareParking { name: name.to_owned(), source })?;
        Ok(true)
    }

    pub(super) fn account(&self, name: &str, file: &Path) -> Result<(), OrderError> {
        let slot = self.known(name).ok_or_else(|| OrderError::unknown(name))?;
        let mut guard = slot.lock();
        let entry = guard.as_mut().ok_or_else(|| OrderError::unknown(name))?;
        let map = entry.proc.account().map_err(|source| OrderError::PageMap { name: name.to_owned(), source })?;
        Ok(map.save_as(file)?)
    }
}
