//! A data directory of a backup, before its daemon is started: `kip restore`. What a backup says of
//! itself is here too; how one is made is the worker's.
//!
//! What a daemon then finds is a data directory after a reboot: sockets are made anew, sleepers
//! sleep in their generations, what ran has ended (`recover`). Three things are of the old place
//! and are changed here: ids, if the number of the old directory is another's on this machine; the
//! path of the skeletons; and that files in volumes have other inodes, which is noted beside the
//! generation that they belong to ([`RESTORED`]).
//!
//! All of it is made in `DATA/.kip-restore` and moved up when it is whole, procs last. A crash
//! leaves that directory, which the next try removes.

use crate::keys::{KeyLength, with_wrap};
use kip_archive::backup::{BackupError, BackupReader, Content};
use kip_archive::files::restore::IdShift;
use kip_archive::files::shift::shift;
use kip_copy::tarred::{self, UntarError};
use kip_records::checkpoints::CheckpointNote;
use kip_records::instance::{self, InstanceError, ids_of, ids_of_number};
use kip_records::state::Record;
use kip_types::keys::KeysWrap;
use kip_types::{Generation, ProcName, State};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Of what is said in `backup.json`.
pub const FORMAT: u32 = 1;
/// The last member.
pub const NOTE: &str = "backup.json";
/// In a proc's directory: the generation whose volumes were restored with it.
pub const RESTORED: &str = "restored";
/// Below a data directory: templates, and the directories of those that have checkpoints.
const TEMPLATES: &str = "templates";
const CHECKPOINTS: &str = "checkpoints";
/// Where it is made.
const GROWING: &str = ".kip-restore";
/// What a data directory may have in it already: what is made anew for each.
const NOTHING_OF: [&str; 5] = ["run", "cache", "base", GROWING, "images"];

/// What a backup says of itself.
#[derive(Debug, Serialize, Deserialize)]
pub struct BackupNote {
    /// At most [`FORMAT`].
    pub format: u32,
    /// The Kip that made it.
    pub kip: String,
    /// When it was made, Unix milliseconds.
    pub made_at_ms: u64,
    /// The data directory that it was made of.
    pub data: PathBuf,
    /// Its number, which ids of its procs follow from.
    pub instance: u8,
    /// Procs that are in it.
    pub procs: Vec<NotedProc>,
    /// Templates and checkpoints that are whole in it: paths below the data directory. Backups of a
    /// Kip that did not say so say nothing.
    #[serde(default)]
    pub kept: Option<Vec<PathBuf>>,
}

/// A proc in a backup.
#[derive(Debug, Serialize, Deserialize)]
pub struct NotedProc {
    /// Its name.
    pub name: ProcName,
    /// The name of its directory, if that is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<ProcName>,
    /// What it sleeps in, if that is in the backup.
    pub generation: Option<Generation>,
    /// It is archived in the data directory's own store, which is in the backup.
    #[serde(default)]
    pub stored: bool,
}

/// Templates and checkpoints of a data directory, as paths below it.
///
/// # Errors
/// The file system's.
pub fn kept_in(data: &Path) -> io::Result<Vec<PathBuf>> {
    fn names(directory: &Path) -> io::Result<Vec<PathBuf>> {
        let entries = match fs::read_dir(directory) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let names = entries.map(|entry| entry.map(|entry| PathBuf::from(entry.file_name())));
        let mut names = names.collect::<io::Result<Vec<_>>>()?;
        names.retain(|name| !name.as_os_str().as_encoded_bytes().starts_with(b"."));
        Ok(names)
    }
    let mut kept: Vec<PathBuf> =
        names(&data.join(TEMPLATES))?.into_iter().map(|id| Path::new(TEMPLATES).join(id)).collect();
    for key in names(&data.join(CHECKPOINTS))? {
        let tags = names(&data.join(CHECKPOINTS).join(&key))?;
        kept.extend(tags.into_iter().map(|tag| Path::new(CHECKPOINTS).join(&key).join(tag)));
    }
    Ok(kept)
}

/// What was restored.
#[derive(Debug)]
pub struct RestoredBackup {
    /// When the backup was made, Unix milliseconds.
    pub made_at_ms: u64,
    /// Of which data directory.
    pub of: PathBuf,
    /// The procs, and whether they sleep with their memory.
    pub procs: Vec<(ProcName, bool)>,
}

/// Nothing was restored: the data directory is as it was.
#[derive(Debug, thiserror::Error)]
pub enum BackupRestoreError {
    /// There is something already.
    #[error("{found} is in the way: restore into a data directory in which nothing is yet (--data)")]
    NotEmpty {
        /// The first thing that was found.
        found: PathBuf,
    },
    /// The file system's word.
    #[error("cannot read or write {path}")]
    Io {
        /// Of what.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The backup does not open.
    #[error("{path} cannot be opened")]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: BackupError,
    },
    /// A key file is none.
    #[error("{0}")]
    Key(String),
    /// It is damaged, cut short, or no backup inside.
    #[error("{path} is not whole: {what}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What was found.
        what: String,
    },
    /// Of a newer Kip.
    #[error("{path} has format {found}, this Kip reads up to {FORMAT}: upgrade Kip")]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u32,
    },
    /// tar did not do it.
    #[error(transparent)]
    Tar(#[from] UntarError),
    /// Its number on this machine.
    #[error(transparent)]
    Instance(#[from] InstanceError),
}

impl From<KeyLength> for BackupRestoreError {
    fn from(e: KeyLength) -> BackupRestoreError {
        BackupRestoreError::Key(e.to_string())
    }
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> BackupRestoreError {
    let path = path.to_owned();
    move |source| BackupRestoreError::Io { path, source }
}

/// Makes a data directory of a backup. The caller has the directory's lock. `report` hears how many
/// bytes of the file were read.
///
/// # Errors
/// See [`BackupRestoreError`].
pub fn restore(
    data: &Path,
    file: &Path,
    wrap: &KeysWrap,
    report: impl FnMut(u64),
) -> Result<RestoredBackup, BackupRestoreError> {
    if let Some(found) = in_the_way(data).map_err(at(data))? {
        return Err(BackupRestoreError::NotEmpty { found });
    }
    let growing = data.join(GROWING);
    let removed = fs::remove_dir_all(&growing);
    if let Err(e) = removed
        && e.kind() != io::ErrorKind::NotFound
    {
        return Err(at(&growing)(e));
    }
    let restored = fill(data, &growing, file, wrap, report);
    let _ = fs::remove_dir_all(&growing);
    restored
}

/// The first file that a data directory has of its own.
fn in_the_way(data: &Path) -> io::Result<Option<PathBuf>> {
    fn file_in(directory: &Path) -> io::Result<Option<PathBuf>> {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let found = if entry.file_type()?.is_dir() { file_in(&entry.path())? } else { Some(entry.path()) };
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }
    for entry in fs::read_dir(data)? {
        let entry = entry?;
        let name = entry.file_name();
        let images = name == "images" && file_in(&entry.path())?.is_some();
        if NOTHING_OF.iter().any(|known| name == *known) && !images {
            continue;
        }
        let found = if entry.file_type()?.is_dir() { file_in(&entry.path())? } else { Some(entry.path()) };
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

fn fill(
    data: &Path,
    growing: &Path,
    file: &Path,
    wrap: &KeysWrap,
    report: impl FnMut(u64),
) -> Result<RestoredBackup, BackupRestoreError> {
    let sealed = File::open(file).map_err(at(file))?;
    let reader =
        with_wrap(wrap, |wrap| BackupReader::open(Counted { file: sealed, bytes: 0, report }, Content::Backup, wrap))?;
    let mut reader = reader.map_err(|source| BackupRestoreError::Open { path: file.to_owned(), source })?;
    fs::DirBuilder::new().mode(0o700).create(growing).map_err(at(growing))?;
    tarred::unpack(&mut reader, growing).map_err(|e| match e {
        UntarError::Read(e) if e.kind() == io::ErrorKind::InvalidData => {
            BackupRestoreError::Damaged { path: file.to_owned(), what: e.to_string() }
        }
        UntarError::Read(e) => at(file)(e),
        e => e.into(),
    })?;
    let damaged = |what: String| BackupRestoreError::Damaged { path: file.to_owned(), what };
    let path = growing.join(NOTE);
    let text = fs::read(&path).map_err(|_| damaged(format!("it has no {NOTE}")))?;
    let format = serde_json::from_slice::<serde_json::Value>(&text).ok().and_then(|note| note["format"].as_u64());
    match format.and_then(|format| u32::try_from(format).ok()) {
        None => return Err(damaged(format!("its {NOTE} says nothing"))),
        Some(found) if found > FORMAT => return Err(BackupRestoreError::Newer { path: file.to_owned(), found }),
        Some(_) => {}
    }
    let note: BackupNote = serde_json::from_slice(&text).map_err(|e| damaged(format!("its {NOTE}: {e}")))?;
    fs::remove_file(&path).map_err(at(&path))?;
    let procs = adapt_records(data, growing, &note)?;
    adapt_kept(data, growing, &note)?;
    // No other instance takes the number before it is remembered.
    let (instance, _lock) = adapt_ids(data, growing, &note)?;
    let all = File::open(growing).map_err(at(growing))?;
    rustix::fs::syncfs(&all).map_err(|e| at(growing)(e.into()))?;
    // Before anything is there: what is there has its files by that number.
    instance::remember(data, instance)?;
    move_up(growing, data).map_err(at(data))?;
    rustix::fs::syncfs(&all).map_err(|e| at(data)(e.into()))?;
    Ok(RestoredBackup { made_at_ms: note.made_at_ms, of: note.data, procs })
}

/// The backup's file, and how far it was read.
struct Counted<F> {
    file: File,
    bytes: u64,
    report: F,
}

impl<F: FnMut(u64)> Read for Counted<F> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(to)?;
        self.bytes += count as u64;
        (self.report)(self.bytes);
        Ok(count)
    }
}

/// Makes the records those of this directory.
fn adapt_records(data: &Path, growing: &Path, note: &BackupNote) -> Result<Vec<(ProcName, bool)>, BackupRestoreError> {
    let procs = growing.join("procs");
    let entries = match fs::read_dir(&procs) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(at(&procs))?,
    };
    let mut restored = Vec::new();
    for entry in entries {
        let path = entry.map_err(at(&procs))?.path();
        let key = |one: &NotedProc| {
            path.file_name().is_some_and(|name| name == one.key.as_ref().unwrap_or(&one.name).as_str())
        };
        let noted = note.procs.iter().find(|one| key(one));
        let Some(noted) = noted else {
            // Removed while the backup was made.
            fs::remove_dir_all(&path).map_err(at(&path))?;
            continue;
        };
        adapt_base(data, &path, note)?;
        if let Some(generation) = noted.generation {
            mark_restored(&path, generation)?;
        }
        restored.push((noted.name.clone(), noted.generation.is_some() || noted.stored));
    }
    restored.sort();
    Ok(restored)
}

/// The skeleton of a record lies in this directory.
fn adapt_base(data: &Path, directory: &Path, note: &BackupNote) -> Result<(), BackupRestoreError> {
    change_json(&directory.join("state.json"), |record| {
        let base = record["base"].as_str().and_then(|base| Path::new(base).strip_prefix(&note.data).ok());
        if let Some(inside) = base {
            record["base"] = data.join(inside).display().to_string().into();
        }
    })
}

fn change_json(path: &Path, change: impl FnOnce(&mut serde_json::Value)) -> Result<(), BackupRestoreError> {
    let unread = |e: serde_json::Error| at(path)(io::Error::new(io::ErrorKind::InvalidData, e));
    let mut value = serde_json::from_slice(&fs::read(path).map_err(at(path))?).map_err(unread)?;
    change(&mut value);
    fs::write(path, serde_json::to_vec(&value).map_err(unread)?).map_err(at(path))
}

/// The same for templates and checkpoints. One that was being made or removed meanwhile goes.
fn adapt_kept(data: &Path, growing: &Path, note: &BackupNote) -> Result<(), BackupRestoreError> {
    let whole: Option<BTreeSet<&PathBuf>> = note.kept.as_ref().map(|kept| kept.iter().collect());
    for kept in kept_in(growing).map_err(at(growing))? {
        let path = growing.join(&kept);
        if whole.as_ref().is_some_and(|whole| !whole.contains(&kept)) {
            fs::remove_dir_all(&path).map_err(at(&path))?;
            continue;
        }
        adapt_base(data, &path, note)?;
        let state = path.join("state.json");
        let record: Option<Record> = fs::read(&state).ok().and_then(|text| serde_json::from_slice(&text).ok());
        if let Some(Record { state: State::Parked { generation }, .. }) = record {
            mark_restored(&path, generation)?;
        }
    }
    Ok(())
}

/// The files in its volumes are other ones than those with which it fell asleep.
fn mark_restored(directory: &Path, generation: Generation) -> Result<(), BackupRestoreError> {
    let mark = directory.join(RESTORED);
    fs::write(&mark, generation.to_string()).map_err(at(&mark))
}

/// Ids of this directory's number, which is that of the old one if it can be.
fn adapt_ids(data: &Path, growing: &Path, note: &BackupNote) -> Result<instance::ClaimedInstance, BackupRestoreError> {
    let claim = instance::claim(data, Some(note.instance))?;
    if let Some((from, count)) = ids_of_number(note.instance)
        && note.instance != claim.0.number()
    {
        let (to, _) = ids_of(claim.0);
        shift(growing, IdShift { from, to, count }).map_err(at(growing))?;
        for kept in kept_in(growing).map_err(at(growing))? {
            let path = growing.join(kept).join(CheckpointNote::FILE);
            change_json(&path, |known| {
                // A template that was imported has those of the machine that it is from, and so
                // have its files.
                let of_number = u64::from(from)..u64::from(from) + u64::from(count);
                if let Some(first) = known["first_id"].as_u64().filter(|first| of_number.contains(first)) {
                    known["first_id"] = (first - u64::from(from) + u64::from(to)).into();
                }
            })?;
        }
    }
    Ok(claim)
}

/// Procs last: as long as they are not there, nothing is.
fn move_up(from: &Path, to: &Path) -> io::Result<()> {
    let mut names = fs::read_dir(from)?.map(|entry| entry.map(|e| e.file_name())).collect::<io::Result<Vec<_>>>()?;
    names.sort_by_key(|name| name == "procs");
    for name in names {
        let place = to.join(&name);
        match fs::remove_dir_all(&place) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => fs::rename(from.join(&name), place)?,
        }
    }
    Ok(())
}
