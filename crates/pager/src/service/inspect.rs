//! Orders that change nothing a program could see.

use super::{Service, line, listed};
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

fn first(fds: Vec<OwnedFd>) -> Result<OwnedFd, String> {
    fds.into_iter().next().ok_or_else(|| "there is no file to write to".to_owned())
}

impl Service {
    pub(super) fn chart(&self, name: &str, fds: Vec<OwnedFd>) -> Result<PagerAnswer, String> {
        let file = first(fds)?;
        let Some(slot) = self.known(name) else { return Ok(PagerAnswer::Charted { known: false }) };
        let guard = slot.lock();
        let Some(entry) = guard.as_ref() else { return Ok(PagerAnswer::Charted { known: false }) };
        let map = entry.proc.chart().map_err(|e| format!("what {name} has out cannot be told: {e}"))?;
        map.save_as(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd()))).map_err(line)?;
        Ok(PagerAnswer::Charted { known: true })
    }

    pub(super) fn survey(&self, name: &str, processes: &Path, survey: Survey) -> Result<PagerAnswer, String> {
        let pids = listed(processes).map_err(|e| format!("{}: {e}", processes.display()))?;
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
        timers.map(|timers| PagerAnswer::Surveyed { timers }).map_err(line)
    }

    pub(super) fn peek(&self, peek: &Peek, fds: Vec<OwnedFd>) -> Result<PagerAnswer, String> {
        let file = File::from(first(fds)?);
        let slot = self.slot(&peek.name);
        // Nothing of it is taken out meanwhile.
        let guard = slot.lock();
        let own = listed(&peek.processes).map_err(|e| format!("{}: {e}", peek.processes.display()))?;
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
                    written.map_err(|e| format!("pages cannot be handed over: {e}"))?;
                }
                Ok(Peeked::Away { file, page }) => away.push((index, file.to_owned(), page)),
                Err(e) => unread.push((index, e.to_string())),
            }
        }
        Ok(PagerAnswer::Peeked { away, unread })
    }
}
