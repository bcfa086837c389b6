//! Which number a data directory has on its machine, by which everything of its procs outside of it is named: ids, addresses, links,
//! control groups.
//!
//! Owns `/run/kip/instance-I`: locked by the daemon that has the number, with the path of the data directory, which keeps it as long as
//! that remembers it (`DIR/run/instance`). After a restart of the machine nothing is there, and whoever comes first may have another's: then
//! the files of the latter's procs are given the ids of another number, as when a backup is restored.
//!
//! Crash in the middle of that: `DIR/run/instance-moves` says between which numbers, and the next daemon puts them back first.

use crate::proc::IDS_PER_BLOCK;
use crate::quota;
use crate::record;
use kip_archive::files::restore::IdShift;
use kip_archive::files::shift::shift;
use kip_keeper::Keeper;
use kip_net::{Instance, Slot};
use kip_sandbox::disk::{DiskError, MountedDisk};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Directory of the machine's instance locks.
const INSTANCES: &str = "/run/kip";
/// First host id of the first instance's first block.
const FIRST_ID: u32 = 0x2000_0000;
/// The number that a data directory has, or had.
const MARK: &str = "run/instance";
/// From which number to which its files are moved.
const MOVES: &str = "run/instance-moves";

/// No instance number is free, or its lock cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum InstanceError {
    /// A file, of the directory of locks or the data directory.
    #[error("{path}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// All are taken.
    #[error("16 data directories already run on this machine: `kip down` one of them")]
    Full,
    /// Procs run by the number that another directory has.
    #[error("procs of {} may still run by the number {number}, which {owner} has taken: end that daemon first (`kip --data {owner} down`)", data.display())]
    Taken {
        /// This data directory.
        data: PathBuf,
        /// The number.
        number: u8,
        /// The other data directory.
        owner: String,
    },
    /// Whether a keeper runs.
    #[error("the keeper")]
    Keeper(#[from] kip_keeper::StartError),
    /// A proc's limited disk.
    #[error("a limited disk")]
    Disk(#[from] DiskError),
    /// A mark of the data directory.
    #[error(transparent)]
    Record(#[from] record::RecordError),
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> InstanceError {
    let path = path.to_owned();
    move |source| InstanceError::Io { path, source }
}

/// A number that nobody else has; the lock keeps it as long as it is open, after that the data directory that remembers it.
pub(crate) type Claim = (Instance, File);

/// Takes the number this data directory had before if it is free, else the lowest that no directory uses. Then files of its procs get
/// the ids of that.
pub(crate) fn take(data: &Path) -> Result<Claim, InstanceError> {
    put_back(data)?;
    let remembered = fs::read_to_string(data.join(MARK)).ok().and_then(|t| t.trim().parse::<u8>().ok());
    let claim = claim(data, remembered)?;
    match remembered.and_then(|number| Instance::new(number).ok()) {
        Some(before) if before.number() != claim.0.number() && has_procs(data) => move_files(data, before, claim.0)?,
        _ => remember(data, claim.0)?,
    }
    Ok(claim)
}

/// The number that is wanted, unless it is another's, else the lowest that is nobody's. Not remembered yet.
pub(crate) fn claim(data: &Path, wanted: Option<u8>) -> Result<Claim, InstanceError> {
    let numbers = wanted.into_iter().chain((0..kip_net::addr::INSTANCES).filter(|n| Some(*n) != wanted));
    for instance in numbers.filter_map(|number| Instance::new(number).ok()) {
        let path = file_of(instance.number());
        let Some(mut file) = lock(&path).map_err(at(&path))? else { continue };
        if is_others(instance.number(), data) {
            continue;
        }
        file.set_len(0).and_then(|()| file.write_all(data.as_os_str().as_encoded_bytes())).map_err(at(&path))?;
        return Ok((instance, file));
    }
    Err(InstanceError::Full)
}

/// The data directory has this number from now on.
pub(crate) fn remember(data: &Path, instance: Instance) -> Result<(), InstanceError> {
    Ok(record::replace(&data.join(MARK), instance.number().to_string().as_bytes())?)
}

fn file_of(number: u8) -> PathBuf {
    Path::new(INSTANCES).join(format!("instance-{number}"))
}

fn owner_of(number: u8) -> String {
    fs::read_to_string(file_of(number)).unwrap_or_default().trim().to_owned()
}

/// Whether a number is another data directory's. One whose daemon died may still have procs running: it belongs to its directory
/// while that remembers it.
fn is_others(number: u8, data: &Path) -> bool {
    let owner = owner_of(number);
    let other = Path::new(&owner);
    let remembered = || fs::read_to_string(other.join(MARK)).is_ok_and(|t| t.trim() == number.to_string());
    !owner.is_empty() && other != data && remembered()
}

fn has_procs(data: &Path) -> bool {
    fs::read_dir(data.join("procs")).is_ok_and(|mut entries| entries.next().is_some())
}

/// Its number is another's, and its procs, none of which runs, get the ids of this one.
fn move_files(data: &Path, from: Instance, to: Instance) -> Result<(), InstanceError> {
    let number = from.number();
    if Keeper::runs(data)? {
        return Err(InstanceError::Taken { data: data.to_owned(), number, owner: owner_of(number) });
    }
    record::replace(&data.join(MOVES), format!("{number} {}", to.number()).as_bytes())?;
    shift_all(data, from, to)?;
    remember(data, to)?;
    fs::remove_file(data.join(MOVES)).map_err(at(&data.join(MOVES)))?;
    tracing::info!(
        number,
        now = to.number(),
        "its number is another data directory's; files of its procs have other ids now"
    );
    Ok(())
}

/// What was interrupted, the other way round.
fn put_back(data: &Path) -> Result<(), InstanceError> {
    let path = data.join(MOVES);
    let text = match fs::read_to_string(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        text => text.map_err(at(&path))?,
    };
    let numbers = text.split_whitespace().filter_map(|word| Instance::new(word.parse().ok()?).ok()).collect::<Vec<_>>();
    let [from, to] = numbers[..] else {
        return Err(at(&path)(io::Error::new(io::ErrorKind::InvalidData, "it does not name two numbers")));
    };
    shift_all(data, to, from)?;
    remember(data, from)?;
    fs::remove_file(&path).map_err(at(&path))
}

/// Files of all procs, on limited disks too. May be done again where it was stopped.
fn shift_all(data: &Path, from: Instance, to: Instance) -> Result<(), InstanceError> {
    let ((from, count), (to, _)) = (ids_of(from), ids_of(to));
    let ids = IdShift { from, to, count };
    let procs = data.join("procs");
    for entry in fs::read_dir(&procs).map_err(at(&procs))? {
        let proc = entry.map_err(at(&procs))?.path();
        shift(&proc, ids).map_err(at(&proc))?;
        let image = proc.join(quota::IMAGE);
        if image.exists() {
            let place = proc.join(quota::PLACE);
            let _mounted = MountedDisk::mount(&image, &place)?;
            shift(&place, ids).map_err(at(&place))?;
        }
    }
    Ok(())
}

/// All ids of an instance: the first, and how many.
pub(crate) fn ids_of(instance: Instance) -> (u32, u32) {
    let count = u32::from(kip_net::addr::SLOTS) * IDS_PER_BLOCK;
    (FIRST_ID + u32::from(instance.number()) * count, count)
}

/// Locks the file at a path, which is made if it is not there; None if somebody else has the lock. Whoever gives a number back
/// removes its file: a lock on a file that the path does not lead to any more keeps nobody away, so another is opened then.
fn lock(path: &Path) -> io::Result<Option<File>> {
    const TRIES: u32 = 1000;
    let opened = || {
        path.parent().map(fs::create_dir_all).transpose()?;
        File::options().read(true).write(true).create(true).truncate(false).open(path)
    };
    let mut tries = 0;
    loop {
        tries += 1;
        let file = match opened() {
            // The last one to give its number back removes the directory as well, maybe right now.
            Err(e) if tries < TRIES && matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists) => {
                continue;
            }
            opened => opened?,
        };
        if rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
            return Ok(None);
        }
        let locked = file.metadata()?;
        match fs::metadata(path) {
            Ok(there) if (there.dev(), there.ino()) == (locked.dev(), locked.ino()) => return Ok(Some(file)),
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
}

/// Gives the instance number back, for good. Its lock is held until after this.
pub(crate) fn release(data: &Path, instance: Instance) {
    let _ = fs::remove_file(data.join(MARK));
    let _ = fs::remove_file(file_of(instance.number()));
    // Only if it is empty.
    let _ = fs::remove_dir(INSTANCES);
}

/// First host id of a slot's block.
pub(crate) fn first_id(instance: Instance, slot: Slot) -> u32 {
    let block = u32::from(instance.number()) * u32::from(kip_net::addr::SLOTS) + u32::from(slot.number());
    FIRST_ID + block * IDS_PER_BLOCK
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn a_move_that_was_interrupted_is_put_back() {
        let data = tempfile::tempdir().unwrap();
        let [one, other] = [1, 2].map(|number| Instance::new(number).unwrap());
        let upper = data.path().join("procs/web/upper");
        fs::create_dir_all(&upper).unwrap();
        fs::create_dir(data.path().join("run")).unwrap();
        let owner = |name: &str| fs::metadata(upper.join(name)).unwrap().uid();
        for (name, instance) in [("moved", other), ("not-yet", one)] {
            fs::write(upper.join(name), "").unwrap();
            std::os::unix::fs::chown(upper.join(name), Some(ids_of(instance).0 + 7), None).expect("root");
        }
        fs::write(upper.join("roots"), "").unwrap();
        put_back(data.path()).expect("there is nothing to put back");
        fs::write(data.path().join(MOVES), "1 2").unwrap();
        fs::write(data.path().join(MARK), "2").unwrap();
        put_back(data.path()).unwrap();
        assert_eq!([owner("moved"), owner("not-yet"), owner("roots")], [ids_of(one).0 + 7, ids_of(one).0 + 7, 0]);
        assert_eq!(fs::read_to_string(data.path().join(MARK)).unwrap(), "1");
        assert!(!data.path().join(MOVES).exists());
        fs::write(data.path().join(MOVES), "1").unwrap();
        assert!(matches!(put_back(data.path()), Err(InstanceError::Io { .. })));
    }

    #[test]
    fn a_lock_whose_file_is_removed_by_its_holder_is_one_holders_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("locks/instance-0");
        let (holders, taken) = (AtomicU32::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..5000 {
                        let Some(held) = lock(&path).unwrap() else { continue };
                        assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0, "two have it");
                        taken.fetch_add(1, Ordering::SeqCst);
                        holders.fetch_sub(1, Ordering::SeqCst);
                        fs::remove_file(&path).unwrap();
                        let _ = fs::remove_dir(path.parent().unwrap());
                        drop(held);
                    }
                });
            }
        });
        assert!(taken.into_inner() > 8);
    }
}
