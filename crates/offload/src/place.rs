//! Which store a data directory has: the one that is asked for, else that of the last time, else a
//! directory of its own.
//!
//! What is archived in a store wakes from there only, so the choice is remembered beside the keys,
//! in `archive/store`: a daemon that is started without a word finds its procs again. The directory
//! of its own is not written down: it moves with the data directory.

use crate::{Archive, ArchiveError, DIRECTORY, io_at};
use kip_types::Realm;
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

/// No store.
const NONE: &str = "none";
/// The store of a data directory for which no store was named; in backups too.
pub const OWN: &str = "store";
/// What was asked for the last time, in [`DIRECTORY`].
const REMEMBERED: &str = "store";

impl Archive {
    /// Opens the store that a data directory has. Asks no network. Blocking.
    pub fn choose(data: &Path, asked: Option<&str>, now_ms: u64) -> Result<Option<Archive>, ArchiveError> {
        if asked == Some(NONE) {
            return Ok(None);
        }
        let (remembered, before) = (data.join(DIRECTORY).join(REMEMBERED), remembered(data)?);
        let own = data.join(OWN);
        if asked.is_some_and(|asked| Path::new(asked) == own) {
            match fs::remove_file(&remembered) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io_at(&remembered)(e)),
                _ => return Archive::choose(data, None, now_ms),
            }
        }
        let url = match asked.map(str::to_owned).or(before.clone()) {
            Some(url) => url,
            None => {
                let made = fs::DirBuilder::new().mode(0o700).recursive(true).create(&own);
                made.map_err(io_at(&own))?;
                own.display().to_string()
            }
        };
        let archive = Archive::open(&url, data, Realm::default(), now_ms)?;
        if let Some(asked) = asked.filter(|asked| before.as_deref() != Some(asked)) {
            let written = kip_records::record::replace(&remembered, asked.as_bytes());
            written.map_err(|e| io_at(&remembered)(io::Error::other(e)))?;
        }
        Ok(Some(archive))
    }

    /// Whether the choice is a store that is not the data directory's own. Nothing is opened or
    /// remembered.
    pub fn is_elsewhere(data: &Path, asked: Option<&str>) -> Result<bool, ArchiveError> {
        Ok(match asked {
            Some(asked) => asked != NONE && Path::new(asked) != data.join(OWN),
            None => remembered(data)?.is_some(),
        })
    }

    /// Whether the store is that directory.
    pub fn is_at(&self, path: &Path) -> bool {
        let real = |path: &Path| fs::canonicalize(path).ok();
        self.store.is_directory() && real(Path::new(self.store.name())).is_some_and(|own| real(path) == Some(own))
    }
}

/// What was asked for the last time.
fn remembered(data: &Path) -> Result<Option<String>, ArchiveError> {
    let path = data.join(DIRECTORY).join(REMEMBERED);
    match fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text.trim().to_owned()).filter(|url| !url.is_empty())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(io_at(&path)(e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_last_one_is_remembered_and_the_own_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let (data, other) = (dir.path().join("data"), dir.path().join("other"));
        fs::create_dir_all(&data).unwrap();
        fs::create_dir(&other).unwrap();
        let other = other.display().to_string();
        let choose = |asked| Archive::choose(&data, asked, 0).map(|found| found.map(|a| a.store.name().to_owned()));
        assert_eq!(choose(Some(NONE)).unwrap(), None);
        assert!(!data.join(OWN).exists());
        let own = data.join(OWN).display().to_string();
        assert_eq!(choose(None).unwrap().as_ref(), Some(&own));
        assert!(!data.join(DIRECTORY).join(REMEMBERED).exists());
        assert!(choose(Some("/nowhere/at/all")).is_err());
        assert_eq!(choose(None).unwrap().as_ref(), Some(&own), "what cannot be opened is not remembered");
        assert_eq!(choose(Some(&other)).unwrap().as_ref(), Some(&other));
        assert_eq!(choose(None).unwrap().as_ref(), Some(&other));
        assert_eq!(choose(Some(NONE)).unwrap(), None);
        assert_eq!(choose(None).unwrap().as_ref(), Some(&other));
        assert_eq!(choose(Some(&own)).unwrap().as_ref(), Some(&own), "by its name too");
        assert_eq!(choose(None).unwrap().as_ref(), Some(&own));
    }
}
