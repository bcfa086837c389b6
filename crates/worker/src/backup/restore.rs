//! A data directory of a backup, before its daemon is started: `kip restore`.
//!
//! What a daemon then finds is a data directory after a reboot: sockets are made anew, sleepers
//! sleep in their generations, what ran has ended (`recover`). Three things are of the old place
//! and are changed here: ids, if the number of the old directory is another's on this machine; the
//! path of the skeletons; and that files in volumes have other inodes, which is noted beside the
//! generation that they belong to ([`kip_engine::volumes::sleep::is_restored`]).
//!
//! All of it is made in `DATA/.kip-restore` and moved up when it is whole, procs last. A crash
//! leaves that directory, which the next try removes.

use super::{FORMAT, NOTE, Note, Noted, Said, TAR};
use kip_archive::backup::{BackupError, BackupReader};
use kip_archive::files::restore::IdShift;
use kip_archive::files::shift::shift;
use kip_engine::volumes::sleep::RESTORED;
use kip_net::Instance;
use kip_offload::{KeyLength, with_wrap};
use kip_records::instance::{self, InstanceError, ids_of};
use kip_types::ProcName;
use kip_types::keys::KeysWrap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Where it is made.
const GROWING: &str = ".kip-restore";
/// What a data directory may have in it already: what is made anew for each.
const NOTHING_OF: [&str; 5] = ["run", "cache", "base", GROWING, "images"];
/// Bytes that are handed to tar at once.
const PIECE: usize = 256 << 10;

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
    #[error("tar failed: {said}")]
    Tar {
        /// Its first line.
        said: String,
    },
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
    let reader = with_wrap(wrap, |wrap| BackupReader::open(Counted { file: sealed, bytes: 0, report }, wrap))?;
    let mut reader = reader.map_err(|source| BackupRestoreError::Open { path: file.to_owned(), source })?;
    fs::DirBuilder::new().mode(0o700).create(growing).map_err(at(growing))?;
    extract(&mut reader, growing, file)?;
    let damaged = |what: String| BackupRestoreError::Damaged { path: file.to_owned(), what };
    let path = growing.join(NOTE);
    let text = fs::read(&path).map_err(|_| damaged(format!("it has no {NOTE}")))?;
    let format = serde_json::from_slice::<serde_json::Value>(&text).ok().and_then(|note| note["format"].as_u64());
    match format.and_then(|format| u32::try_from(format).ok()) {
        None => return Err(damaged(format!("its {NOTE} says nothing"))),
        Some(found) if found > FORMAT => return Err(BackupRestoreError::Newer { path: file.to_owned(), found }),
        Some(_) => {}
    }
    let note: Note = serde_json::from_slice(&text).map_err(|e| damaged(format!("its {NOTE}: {e}")))?;
    fs::remove_file(&path).map_err(at(&path))?;
    let procs = adapt_records(data, growing, &note)?;
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

/// Takes the tar apart.
fn extract(from: &mut impl Read, to: &Path, file: &Path) -> Result<(), BackupRestoreError> {
    let mut said = Said::new().map_err(at(to))?;
    let mut command = Command::new("tar");
    command.args(["--extract", "--file=-", "--ignore-zeros", "--listed-incremental=/dev/null", "--sparse"]);
    command.args(["--preserve-permissions", "--same-owner", "--delay-directory-restore"]).args(TAR);
    command.arg("--directory").arg(to).stdin(Stdio::piped()).stdout(Stdio::null());
    command.stderr(said.hand().map_err(at(to))?);
    let mut tar =
        command.spawn().map_err(|e| BackupRestoreError::Tar { said: format!("it cannot be started: {e}") })?;
    let mut pipe = tar.stdin.take().expect("it is piped");
    let mut piece = vec![0; PIECE];
    let copied = loop {
        match from.read(&mut piece) {
            Ok(0) => break Ok(()),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                break Err(BackupRestoreError::Damaged { path: file.to_owned(), what: e.to_string() });
            }
            Err(e) => break Err(at(file)(e)),
            // It has ended, and says why.
            Ok(count) if pipe.write_all(&piece[..count]).is_err() => break Ok(()),
            Ok(_) => {}
        }
    };
    drop(pipe);
    if copied.is_err() {
        let _ = tar.kill();
    }
    let status = tar.wait().map_err(at(to))?;
    copied?;
    if status.success() {
        return Ok(());
    }
    // tar says how much it wrote, and not why no more.
    let full = rustix::fs::statvfs(to).is_ok_and(|found| found.f_bavail * found.f_frsize < PIECE as u64);
    let why = if full { ": no space is left there" } else { "" };
    Err(BackupRestoreError::Tar { said: format!("{}{why}", said.line()) })
}

/// Makes the records those of this directory.
fn adapt_records(data: &Path, growing: &Path, note: &Note) -> Result<Vec<(ProcName, bool)>, BackupRestoreError> {
    let procs = growing.join("procs");
    let entries = match fs::read_dir(&procs) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(at(&procs))?,
    };
    let mut restored = Vec::new();
    for entry in entries {
        let path = entry.map_err(at(&procs))?.path();
        let key =
            |one: &Noted| path.file_name().is_some_and(|name| name == one.key.as_ref().unwrap_or(&one.name).as_str());
        let noted = note.procs.iter().find(|one| key(one));
        let Some(noted) = noted else {
            // Removed while the backup was made.
            fs::remove_dir_all(&path).map_err(at(&path))?;
            continue;
        };
        let state = path.join("state.json");
        let text = fs::read(&state).map_err(at(&state))?;
        let unread = |e: serde_json::Error| at(&state)(io::Error::new(io::ErrorKind::InvalidData, e));
        let mut record: serde_json::Value = serde_json::from_slice(&text).map_err(unread)?;
        let base = record["base"].as_str().and_then(|base| Path::new(base).strip_prefix(&note.data).ok());
        if let Some(inside) = base {
            record["base"] = data.join(inside).display().to_string().into();
        }
        let text = serde_json::to_vec(&record).map_err(unread)?;
        fs::write(&state, text).map_err(at(&state))?;
        if let Some(generation) = noted.generation {
            let mark = path.join(RESTORED);
            fs::write(&mark, generation.0.to_string()).map_err(at(&mark))?;
        }
        restored.push((noted.name.clone(), noted.generation.is_some() || noted.stored));
    }
    restored.sort();
    Ok(restored)
}

/// Ids of this directory's number, which is that of the old one if it can be.
fn adapt_ids(data: &Path, growing: &Path, note: &Note) -> Result<instance::ClaimedInstance, BackupRestoreError> {
    let claim = instance::claim(data, Some(note.instance))?;
    if let Ok(from) = Instance::new(note.instance)
        && from.number() != claim.0.number()
    {
        let ((from, count), (to, _)) = (ids_of(from), ids_of(claim.0));
        shift(growing, IdShift { from, to, count }).map_err(at(growing))?;
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
