//! Orders that change nothing a program could see.

use super::refused::OrderError;
use super::{Service, listed};
use crate::proc::{LIFTED, Peeked, peek_whole};
use crate::protocol::{PagerAnswer, Peek, Survey};
use crate::swap::PAGE;
use kip_stop::timers;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long threads may take to stand still whose waits need an end; a busy machine takes longer
/// than its own work.
const FOUND_WITHIN: Duration = Duration::from_secs(2);
/// The same where a sleep is as right without the answer, and the program would stand still for it.
const ASKED_WITHIN: Duration = Duration::from_millis(200);

fn first(fds: Vec<OwnedFd>) -> Result<OwnedFd, OrderError> {
    fds.into_iter().next().ok_or(OrderError::NoFile)
}

fn listed_for(processes: &Path) -> Result<Vec<u32>, OrderError> {
    listed(processes).map_err(|source| OrderError::List { path: processes.to_owned(), source })
}

impl Service {
    pub(super) fn chart(&self, name: &str, fds: Vec<OwnedFd>) -> Result<PagerAnswer, OrderError> {
        let file = first(fds)?;
        let Some(slot) = self.known(name) else { return Ok(PagerAnswer::Charted { known: false }) };
        let guard = slot.lock();
        let Some(entry) = guard.as_ref() else { return Ok(PagerAnswer::Charted { known: false }) };
        let map = entry.proc.chart().map_err(|source| OrderError::PageMap { name: name.to_owned(), source })?;
        map.save_as(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())))?;
        Ok(PagerAnswer::Charted { known: true })
    }

    pub(super) fn survey(&self, name: &str, processes: &Path, survey: Survey) -> Result<PagerAnswer, OrderError> {
        let pids = listed_for(processes)?;
        let within = |time| Instant::now() + time;
        let timers = match survey {
            Survey::Ends => kip_stop::find_ends(&pids, within(FOUND_WITHIN)).map(|()| Vec::new()),
            Survey::Records => kip_stop::note_ends(&pids, within(ASKED_WITHIN)).map(|()| Vec::new()),
            Survey::Timers => {
                // A proc that has not slept yet has no directory here.
                let known = self.known(name);
                let lifted = known.and_then(|slot| slot.lock().as_ref().map(|entry| entry.directory.join(LIFTED)));
                timers::of_running(&pids, within(ASKED_WITHIN), lifted.as_deref())
            }
        };
        Ok(PagerAnswer::Surveyed { timers: timers? })
    }

    pub(super) fn peek(&self, peek: &Peek, fds: Vec<OwnedFd>) -> Result<PagerAnswer, OrderError> {
        let file = File::from(first(fds)?);
        let slot = self.slot(&peek.name);
        // Nothing of it is taken out meanwhile.
        let guard = slot.lock();
        let own = listed_for(&peek.processes)?;
        let (mut away, mut unread) = (Vec::new(), Vec::new());
        for (index, (pid, address)) in (0..).zip(&peek.pages) {
            let mut bytes = [0; PAGE];
            let peeked = match guard.as_ref() {
                // Numbers of processes are used again.
                _ if !own.contains(pid) => Err(io::Error::new(io::ErrorKind::NotFound, "it has ended")),
                Some(entry) => entry.proc.peek(*pid, *address, &mut bytes),
                None => peek_whole(*pid, *address, &mut bytes),
            };
            match peeked {
                Ok(Peeked::Here) => {
                    let written = file.write_all_at(&bytes, u64::from(index) * PAGE as u64);
                    written.map_err(OrderError::HandOver)?;
                }
                Ok(Peeked::Away { file, page }) => away.push((index, file.to_owned(), page)),
                Err(e) => unread.push((index, e.to_string())),
            }
        }
        Ok(PagerAnswer::Peeked { away, unread })
    }
}
