//! Calls that change nothing a program could see.

use super::{Pager, PagerError, unexpected};
use crate::protocol::{MOST_PEEKED, PagerAnswer, PagerRequest, Peek, Survey, Timer};
use crate::swap::PAGE;
use kip_snapshot::pages::PageMap;
use rustix::fs::{MemfdFlags, memfd_create};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// A page that was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeekedPage {
    /// Its bytes.
    Here(Vec<u8>),
    /// They come from a store: file in `parked` of the proc's directory, page.
    Away(String, u32),
    /// It cannot be read, and why.
    Unread(String),
}

/// A file for what is handed over.
fn memory() -> Result<File, PagerError> {
    let made = memfd_create("kip-inspect", MemfdFlags::CLOEXEC);
    Ok(File::from(made.map_err(|e| PagerError::Gone(e.into()))?))
}

impl Pager {
    /// What missing pages of a proc hold, by host pid, with files as in its directory; none of one
    /// that never slept.
    ///
    /// # Errors
    /// See [`PagerError`].
    pub fn chart(&self, name: &str) -> Result<Option<PageMap>, PagerError> {
        let file = memory()?;
        match self.call_with(&PagerRequest::Chart { name: name.into() }, &[file.as_fd()])? {
            PagerAnswer::Charted { known: false } => Ok(None),
            PagerAnswer::Charted { known: true } => {
                let read = PageMap::load_from(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())));
                read.map(Some).map_err(|e| PagerError::Gone(io::Error::other(e)))
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Stops the threads of a proc that runs for a moment, for what no other process can see.
    /// `processes` is the proc's cgroup.procs file. Returns the timers, if they were asked for.
    ///
    /// # Errors
    /// See [`PagerError`]; its threads run on.
    pub fn survey(&self, name: &str, processes: &Path, survey: Survey) -> Result<Vec<Timer>, PagerError> {
        match self.call(&PagerRequest::Survey { name: name.into(), processes: processes.into(), survey })? {
            PagerAnswer::Surveyed { timers } => Ok(timers),
            other => Err(unexpected(&other)),
        }
    }

    /// Pages of a proc, by host pid and address. `processes` is the proc's cgroup.procs file. Wakes
    /// no proc.
    ///
    /// # Errors
    /// See [`PagerError`].
    pub fn peek(
        &self,
        name: &str,
        processes: &Path,
        pages: &[(u32, u64)],
    ) -> Result<HashMap<(u32, u64), PeekedPage>, PagerError> {
        let mut found = HashMap::with_capacity(pages.len());
        for pages in pages.chunks(MOST_PEEKED) {
            let file = memory()?;
            let peek = Peek { name: name.into(), processes: PathBuf::from(processes), pages: pages.to_vec() };
            let (away, unread) = match self.call_with(&PagerRequest::Peek(peek), &[file.as_fd()])? {
                PagerAnswer::Peeked { away, unread } => (away, unread),
                other => return Err(unexpected(&other)),
            };
            let at = |index: u32| pages.get(index as usize).copied().unwrap_or_default();
            found.extend(away.into_iter().map(|(index, file, page)| (at(index), PeekedPage::Away(file, page))));
            found.extend(unread.into_iter().map(|(index, why)| (at(index), PeekedPage::Unread(why))));
            for (index, page) in (0..).zip(pages).filter(|(_, page)| !found.contains_key(page)).collect::<Vec<_>>() {
                let mut bytes = vec![0; PAGE];
                file.read_exact_at(&mut bytes, index * PAGE as u64).map_err(PagerError::Gone)?;
                found.insert(*page, PeekedPage::Here(bytes));
            }
        }
        Ok(found)
    }
}
