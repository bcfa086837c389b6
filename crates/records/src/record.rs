//! The durable record of each proc: the directory `DIR/procs/NAME` with `spec.json`, replaced by an
//! update of the proc, and `state.json`, replaced at each step of the lifecycle.
//!
//! Owns the two files and the coming and going of the directory; what else lies in it (layers,
//! snapshots, logs) belongs to others. Never interprets a state.
//!
//! Invariants: a directory with a proc's name always holds a whole spec and a whole state; a name
//! is taken by one proc at most. A crash leaves, and [`Records::open`] removes:
//!
//! | in the middle of | leaves |
//! | --- | --- |
//! | [`Records::create`] | `.new-*`, which no client has been told of |
//! | [`Records::write_state`] | the old state or the new one, and maybe `.state.json.new`, which the next write replaces |
//! | [`write_spec`] | the old spec or the new one, and maybe `spec.new`, which the next write replaces |
//! | [`Records::remove`] | the proc, or `.trash-*` |

use kip_clocks::Boot;
use kip_types::ProcName;
use rustix::fs::{AtFlags, CWD, RenameFlags};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::ffi::{OsStr, OsString};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

const PROCS: &str = "procs";
const SPEC: &str = "spec.json";
const STATE: &str = "state.json";
const STATE_NEW: &str = ".state.json.new";
/// While this file is there, the rest of the directory may not outlive the machine's power.
const BEGUN: &str = "begun";
/// Where the kernel says which boot this is.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const NEW_PREFIX: &str = ".new-";
const TRASH_PREFIX: &str = ".trash-";

/// A record could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The system refused.
    #[error("cannot {what} {path}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// With which file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A file is not what it should be: damaged, cut short or written by another version.
    #[error("{path} is damaged")]
    Corrupt {
        /// Which.
        path: PathBuf,
        /// Where it went wrong.
        #[source]
        source: serde_json::Error,
    },
    /// A value cannot be written as JSON.
    #[error("cannot write a record to {path}")]
    Encode {
        /// Where it would have gone.
        path: PathBuf,
        /// Why not.
        #[source]
        source: serde_json::Error,
    },
    /// A proc of that name exists.
    #[error("proc {name} exists already in {path}")]
    Exists {
        /// Its name.
        name: ProcName,
        /// Its directory.
        path: PathBuf,
    },
    /// There is no such proc.
    #[error("there is no proc {name} in {path}")]
    Unknown {
        /// The name.
        name: ProcName,
        /// Where it was looked for.
        path: PathBuf,
    },
    /// Removing would have reached through a mount.
    #[error("cannot remove {path}: something is mounted at {mount}; unmount it first")]
    Mounted {
        /// What was to be removed.
        path: PathBuf,
        /// The mount point in it.
        mount: PathBuf,
    },
    /// The proc does not fall asleep: its generation was made for a copy.
    #[error("the generation is not the proc's to sleep in")]
    NotKept,
}

impl RecordError {
    pub(crate) fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RecordError {
        let path = path.to_owned();
        move |source| RecordError::Io { what, path, source }
    }
}

/// What a written state outlives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// The machine's power: file and directory are synced. Milliseconds.
    Fsync,
    /// The daemon's death only: after a power cut the old state, the new one or none that can be
    /// read. Microseconds.
    Rename,
}

impl Durability {
    /// Syncs the names in a directory, if they are to outlive the machine's power.
    fn of_directory(self, directory: &Path) -> Result<(), RecordError> {
        match self {
            Durability::Fsync => sync_directory(directory),
            Durability::Rename => Ok(()),
        }
    }
}

/// What [`Records::list`] found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// Procs, in order.
    pub names: Vec<ProcName>,
    /// What should not be there; never touched.
    pub strangers: Vec<PathBuf>,
}

/// The records of a data directory.
#[derive(Debug, Clone)]
pub struct Records {
    procs: PathBuf,
}

/// A proc's directory that is complete but has not got its name yet. Dropped, it stays until the
/// next start.
#[derive(Debug)]
pub struct Unpublished {
    path: PathBuf,
    target: PathBuf,
    name: ProcName,
    durability: Durability,
}

/// A removed proc's directory that is still to be deleted. Dropped, it stays until the next start.
#[derive(Debug)]
pub struct Trash {
    path: PathBuf,
}

impl Records {
    /// Opens the records of a data directory, makes their directory when it is missing and deletes
    /// what creations and removals left half done. What of that cannot be deleted is returned and
    /// stays for the next time.
    ///
    /// # Errors
    /// [`RecordError`] when the records cannot be used at all.
    pub fn open(dir: &Path) -> Result<(Records, Vec<RecordError>), RecordError> {
        let procs = dir.join(PROCS);
        match DirBuilder::new().mode(0o700).create(&procs) {
            Ok(()) => sync_directory(dir)?,
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(RecordError::io("create", &procs)(e)),
        }
        let records = Records { procs };
        let failed = records.delete_leftovers()?;
        Ok((records, failed))
    }

    /// Those in a directory, which may not exist yet. Deletes nothing.
    pub(crate) fn at(procs: PathBuf) -> Records {
        Records { procs }
    }

    /// Deletes what creations and removals left half done; returns what stays of that.
    pub(crate) fn delete_leftovers(&self) -> Result<Vec<RecordError>, RecordError> {
        let leftovers = self.entries()?.into_iter().filter(|e| is_leftover(e));
        Ok(leftovers.filter_map(|e| Trash { path: self.procs.join(e) }.delete().err()).collect())
    }

    /// The proc's directory, which may not exist.
    pub fn directory(&self, name: &ProcName) -> PathBuf {
        self.procs.join(name.as_str())
    }

    /// Which procs there are.
    ///
    /// # Errors
    /// [`RecordError::Io`].
    pub fn list(&self) -> Result<Listing, RecordError> {
        let mut listing = Listing::default();
        for entry in self.entries()?.into_iter().filter(|e| !is_leftover(e)) {
            match entry.to_str().and_then(|e| e.parse().ok()) {
                Some(name) => listing.names.push(name),
                None => listing.strangers.push(self.procs.join(entry)),
            }
        }
        listing.names.sort();
        listing.strangers.sort();
        Ok(listing)
    }

    /// Creates a proc's record, durably, and returns its directory.
    ///
    /// # Errors
    /// [`RecordError::Exists`] when the name is taken; otherwise nothing of it remains under that
    /// name.
    pub fn create(
        &self,
        name: &ProcName,
        spec: &impl Serialize,
        state: &impl Serialize,
    ) -> Result<PathBuf, RecordError> {
        if self.directory(name).exists() {
            return Err(RecordError::Exists { name: name.clone(), path: self.directory(name) });
        }
        self.prepare(name, spec, state, Durability::Fsync)?.publish()
    }

    /// The first half of [`Records::create`]: everything but the name. With [`Durability::Rename`]
    /// the caller syncs the directory, before it is published or when that is as it is to stay.
    ///
    /// # Errors
    /// [`RecordError`]; nothing remains.
    pub fn prepare(
        &self,
        name: &ProcName,
        spec: &impl Serialize,
        state: &impl Serialize,
        durability: Durability,
    ) -> Result<Unpublished, RecordError> {
        let path = self.procs.join(format!("{NEW_PREFIX}{name}.{}", unique()));
        DirBuilder::new().mode(0o700).create(&path).map_err(RecordError::io("create", &path))?;
        let fill = || {
            write_file(&path.join(SPEC), &encode(&path.join(SPEC), spec)?, durability)?;
            write_file(&path.join(STATE), &encode(&path.join(STATE), state)?, durability)?;
            durability.of_directory(&path)
        };
        if let Err(e) = fill() {
            // The first error is the one to tell; what remains here goes at the next start.
            let _ = std::fs::remove_dir_all(&path);
            return Err(e);
        }
        Ok(Unpublished { path, target: self.directory(name), name: name.clone(), durability })
    }

    /// As [`Records::prepare`], for a proc that is started at once: its record outlives the
    /// daemon's death, and with [`Records::settle`], beside the start, the machine's power. Until
    /// then it is marked: no program of it can be there after a power cut, and no client was told
    /// of it.
    ///
    /// # Errors
    /// [`RecordError`]; nothing remains.
    pub fn begin(
        &self,
        name: &ProcName,
        spec: &impl Serialize,
        state: &impl Serialize,
    ) -> Result<Unpublished, RecordError> {
        let begun = self.prepare(name, spec, state, Durability::Rename)?;
        let boot = Boot::read().map_err(RecordError::io("read", Path::new(BOOT_ID)))?;
        begun.add(BEGUN, boot.id.as_bytes())?;
        Ok(begun)
    }

    /// Whether the record of a proc is not yet known to outlive the machine's power.
    fn is_begun(&self, name: &ProcName) -> bool {
        self.directory(name).join(BEGUN).exists()
    }

    /// The same of a proc that was begun before the machine was started, so that no program of it
    /// can be there. The mark may have been lost with what it marks.
    pub fn was_cut_off(&self, name: &ProcName) -> bool {
        let mark = std::fs::read_to_string(self.directory(name).join(BEGUN));
        mark.is_ok_and(|boot| Boot::read().is_ok_and(|now| now.id != boot))
    }

    /// Syncs what [`Records::begin`] has made, and the files that are beside it. Nothing to do for
    /// any other record.
    ///
    /// # Errors
    /// [`RecordError::Io`]; the record stays marked.
    pub fn settle(&self, name: &ProcName) -> Result<(), RecordError> {
        let directory = self.directory(name);
        if !self.is_begun(name) {
            return Ok(());
        }
        for entry in std::fs::read_dir(&directory).map_err(RecordError::io("read", &directory))?.flatten() {
            let path = entry.path();
            if entry.file_type().is_ok_and(|kind| kind.is_file()) {
                match File::open(&path).and_then(|file| file.sync_all()) {
                    // One state takes the place of another.
                    Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                    synced => synced.map_err(RecordError::io("sync", &path))?,
                }
            }
        }
        sync_directory(&directory)?;
        sync_directory(&self.procs)?;
        let mark = directory.join(BEGUN);
        std::fs::remove_file(&mark).map_err(RecordError::io("remove", &mark))
    }

    /// What was asked for.
    ///
    /// # Errors
    /// [`RecordError::Unknown`], [`RecordError::Corrupt`], [`RecordError::Io`].
    pub fn read_spec<T: DeserializeOwned>(&self, name: &ProcName) -> Result<T, RecordError> {
        self.read(name, SPEC)
    }

    /// The state last written.
    ///
    /// # Errors
    /// As [`Records::read_spec`].
    pub fn read_state<T: DeserializeOwned>(&self, name: &ProcName) -> Result<T, RecordError> {
        self.read(name, STATE)
    }

    /// Replaces the proc's state. Only one thread at a time may write one proc's.
    ///
    /// # Errors
    /// [`RecordError`]; the state read back is then the old one, or the new one if only its syncing
    /// failed.
    pub fn write_state(
        &self,
        name: &ProcName,
        state: &impl Serialize,
        durability: Durability,
    ) -> Result<(), RecordError> {
        write_state(&self.directory(name), state, durability)
    }

    /// Removes the proc, durably. When this has returned the name is free; its files are deleted by
    /// [`Trash::delete`], which may take long.
    ///
    /// # Errors
    /// [`RecordError::Unknown`], [`RecordError::Io`].
    pub fn remove(&self, name: &ProcName) -> Result<Trash, RecordError> {
        let (from, path) = (self.directory(name), self.procs.join(format!("{TRASH_PREFIX}{name}.{}", unique())));
        match std::fs::rename(&from, &path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Err(RecordError::Unknown { name: name.clone(), path: self.procs.clone() });
            }
            other => other.map_err(RecordError::io("rename", &from))?,
        }
        sync_directory(&self.procs)?;
        Ok(Trash { path })
    }

    pub(crate) fn read<T: DeserializeOwned>(&self, name: &ProcName, file: &str) -> Result<T, RecordError> {
        let directory = self.directory(name);
        let path = directory.join(file);
        match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|source| RecordError::Corrupt { path, source }),
            Err(e) if e.kind() == io::ErrorKind::NotFound && !directory.exists() => {
                Err(RecordError::Unknown { name: name.clone(), path: self.procs.clone() })
            }
            Err(e) => Err(RecordError::io("read", &path)(e)),
        }
    }

    fn entries(&self) -> Result<Vec<OsString>, RecordError> {
        let listed = || -> io::Result<Vec<OsString>> {
            std::fs::read_dir(&self.procs)?.map(|entry| Ok(entry?.file_name())).collect()
        };
        listed().map_err(RecordError::io("list", &self.procs))
    }
}

impl Unpublished {
    /// Puts another file beside its record, as durably.
    ///
    /// # Errors
    /// [`RecordError::Io`].
    pub fn add(&self, name: &str, bytes: &[u8]) -> Result<(), RecordError> {
        write_file(&self.path.join(name), bytes, self.durability)?;
        self.durability.of_directory(&self.path)
    }

    /// Where it lies until then.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Puts another state in place of the one that it was made with, as durably.
    ///
    /// # Errors
    /// [`RecordError::Io`].
    pub fn change_state(&self, state: &impl Serialize) -> Result<(), RecordError> {
        write_state(&self.path, state, self.durability)
    }

    /// Its name, and all that comes from now on, is durable: what is there was synced.
    pub fn durable(self) -> Unpublished {
        Unpublished { durability: Durability::Fsync, ..self }
    }

    /// Gives it its name, as durably as it was made. Returns the directory.
    ///
    /// # Errors
    /// [`RecordError::Exists`] when another was faster.
    pub fn publish(self) -> Result<PathBuf, RecordError> {
        match rustix::fs::renameat_with(CWD, &self.path, CWD, &self.target, RenameFlags::NOREPLACE) {
            Ok(()) => {}
            Err(e) => {
                // No client has been told of it, so it may go at once.
                let _ = std::fs::remove_dir_all(&self.path);
                return Err(match e {
                    rustix::io::Errno::EXIST => RecordError::Exists { name: self.name, path: self.target },
                    e => RecordError::io("create", &self.target)(e.into()),
                });
            }
        }
        self.durability.of_directory(self.target.parent().expect("it lies in procs/"))?;
        Ok(self.target)
    }
}

impl Trash {
    /// Where it lies until then.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Deletes it. What cannot be deleted stays for the next start.
    ///
    /// # Errors
    /// [`RecordError::Mounted`] when something is mounted in it, and nothing was deleted;
    /// [`RecordError::Io`].
    pub fn delete(self) -> Result<(), RecordError> {
        if let Some(mount) = mount_below(&self.path)? {
            return Err(RecordError::Mounted { path: self.path, mount });
        }
        std::fs::remove_dir_all(&self.path).map_err(RecordError::io("delete", &self.path))
    }
}

/// As [`Records::write_state`], for a caller that has the proc's directory at hand.
///
/// # Errors
/// As [`Records::write_state`].
pub fn write_state(directory: &Path, state: &impl Serialize, durability: Durability) -> Result<(), RecordError> {
    let (new, path) = (directory.join(STATE_NEW), directory.join(STATE));
    let bytes = encode(&path, state)?;
    if let Err(e) = write_file(&new, &bytes, durability) {
        // Gives the space back when the disk is full; the first error is the one to tell.
        let _ = rustix::fs::unlinkat(CWD, &new, AtFlags::empty());
        return Err(e);
    }
    std::fs::rename(&new, &path).map_err(RecordError::io("replace", &path))?;
    durability.of_directory(directory)
}

/// Makes the directory of a proc that was published without that durable, and its name.
///
/// # Errors
/// [`RecordError::Io`].
pub fn sync_published(directory: &Path) -> Result<(), RecordError> {
    sync_directory(directory)?;
    sync_directory(directory.parent().expect("it lies in procs/"))
}

/// Replaces the spec of the proc whose directory that is, durably. Only one thread at a time may
/// write one proc's.
///
/// # Errors
/// As [`Records::write_state`].
pub fn write_spec(directory: &Path, spec: &impl Serialize) -> Result<(), RecordError> {
    let path = directory.join(SPEC);
    replace(&path, &encode(&path, spec)?)
}

/// Replaces a file beside the record, durably.
pub fn replace(path: &Path, bytes: &[u8]) -> Result<(), RecordError> {
    let new = path.with_extension("new");
    write_file(&new, bytes, Durability::Fsync)?;
    std::fs::rename(&new, path).map_err(RecordError::io("replace", path))?;
    sync_directory(path.parent().unwrap_or(Path::new("/")))
}

fn encode(path: &Path, value: &impl Serialize) -> Result<Vec<u8>, RecordError> {
    serde_json::to_vec_pretty(value).map_err(|source| RecordError::Encode { path: path.to_owned(), source })
}

fn write_file(path: &Path, bytes: &[u8], durability: Durability) -> Result<(), RecordError> {
    let written = || -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
        file.write_all(bytes)?;
        match durability {
            Durability::Fsync => file.sync_all(),
            Durability::Rename => Ok(()),
        }
    };
    written().map_err(RecordError::io("write", path))
}

pub(crate) fn sync_directory(path: &Path) -> Result<(), RecordError> {
    File::open(path).and_then(|d| d.sync_all()).map_err(RecordError::io("sync", path))
}

fn is_leftover(entry: &OsStr) -> bool {
    let bytes = entry.as_bytes();
    bytes.starts_with(NEW_PREFIX.as_bytes()) || bytes.starts_with(TRASH_PREFIX.as_bytes())
}

/// A suffix that no other creation or removal has: of this process, nor of one before it that left
/// something behind.
fn unique() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    format!("{}-{}-{}", now.as_nanos(), std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// The first mount point at or below `path` that this process sees: proc_pid_mountinfo(5), field 5.
fn mount_below(path: &Path) -> Result<Option<PathBuf>, RecordError> {
    let real = std::fs::canonicalize(path).map_err(RecordError::io("find", path))?;
    let table = Path::new("/proc/self/mountinfo");
    let mounts = std::fs::read(table).map_err(RecordError::io("read", table))?;
    let points = mounts.split(|b| *b == b'\n').filter_map(|line| line.split(|b| *b == b' ').nth(4));
    Ok(points.map(unescape).find(|point| point.starts_with(&real)))
}

/// Undoes the octal escapes of blanks and backslashes in mountinfo.
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        let octal = tail.get(..3).filter(|_| *first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => (bytes.push(byte), rest = &tail[3..]),
            None => (bytes.push(*first), rest = tail),
        };
    }
    OsString::from_vec(bytes).into()
}

#[cfg(test)]
#[path = "record_tests.rs"]
mod tests;
