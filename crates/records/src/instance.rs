//! Which number a data directory has on its machine, by which everything of its procs outside of it
//! is named: ids, addresses, links, control groups.
//!
//! Owns `/run/kip/instance-I`: locked by the daemon that has the number, with the path of the data
//! directory, which keeps it as long as that remembers it (`DIR/run/instance`). Owners of its
//! procs' files go by the number, so a directory with procs never takes another: after a restart of
//! the machine, when no directory is noted there, the first one to come may have it, and then the
//! other is refused.

use crate::record;
use kip_net::{Instance, Slot};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Ids in one block: 0 to 65,535 inside.
pub const IDS_PER_BLOCK: u32 = 65_536;
/// Directory of the machine's instance locks.
const INSTANCES: &str = "/run/kip";
/// First host id of the first instance's first block.
const FIRST_ID: u32 = 0x2000_0000;
/// The number that a data directory has, or had.
const MARK: &str = "run/instance";

/// No instance number is free, or its lock cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum InstanceError {
    /// A file, of the directory of locks or the data directory.
    #[error("cannot read or write {path}, which keeps the number of a data directory")]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// All are taken.
    #[error(
        "16 data directories have numbers on this machine already, which they keep as long as they have procs: remove those of one (`kip rm`), then `kip down` it"
    )]
    Full,
    /// Another directory has the number by which files of its procs have their owners.
    #[error(
        "this data directory had number {number} on this machine, and {owner} has taken that number: stop {owner} (`kip --data {owner} down`), or move one of the two by `kip backup` and `kip restore`"
    )]
    Taken {
        /// The number.
        number: u8,
        /// The other data directory.
        owner: String,
    },
    /// A mark of the data directory.
    #[error(transparent)]
    Record(#[from] record::RecordError),
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> InstanceError {
    let path = path.to_owned();
    move |source| InstanceError::Io { path, source }
}

/// A number that no other data directory has; the lock keeps it as long as it is open, after that
/// the data directory that remembers it.
pub type ClaimedInstance = (Instance, File);

/// Takes the number this data directory had before if it is free, else, if it has no procs, the
/// lowest that no directory uses.
pub fn take(data: &Path) -> Result<ClaimedInstance, InstanceError> {
    let remembered = fs::read_to_string(data.join(MARK)).ok().and_then(|t| t.trim().parse::<u8>().ok());
    let claim = claim(data, remembered)?;
    if let Some(number) = remembered.filter(|number| *number != claim.0.number() && has_procs(data)) {
        // It stays free for others.
        let _ = fs::remove_file(file_of(claim.0.number()));
        return Err(InstanceError::Taken { number, owner: owner_of(number) });
    }
    if remembered != Some(claim.0.number()) {
        remember(data, claim.0)?;
    }
    Ok(claim)
}

/// The number that is wanted, unless another data directory has it, else the lowest that none has.
/// Not remembered yet.
pub fn claim(data: &Path, wanted: Option<u8>) -> Result<ClaimedInstance, InstanceError> {
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
pub fn remember(data: &Path, instance: Instance) -> Result<(), InstanceError> {
    Ok(record::replace(&data.join(MARK), instance.number().to_string().as_bytes())?)
}

fn file_of(number: u8) -> PathBuf {
    Path::new(INSTANCES).join(format!("instance-{number}"))
}

fn owner_of(number: u8) -> String {
    fs::read_to_string(file_of(number)).unwrap_or_default().trim().to_owned()
}

/// Whether a number is another data directory's. One whose daemon died may still have procs
/// running: it belongs to its directory while that remembers it.
fn is_others(number: u8, data: &Path) -> bool {
    let owner = owner_of(number);
    let other = Path::new(&owner);
    let remembered = || fs::read_to_string(other.join(MARK)).is_ok_and(|t| t.trim() == number.to_string());
    // The same by another path is no other.
    let place = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
    !owner.is_empty() && place(other) != place(data) && remembered()
}

fn has_procs(data: &Path) -> bool {
    fs::read_dir(data.join("procs")).is_ok_and(|mut entries| entries.next().is_some())
}

/// All ids of an instance: the first, and how many.
pub fn ids_of(instance: Instance) -> (u32, u32) {
    let count = u32::from(kip_net::addr::SLOTS) * IDS_PER_BLOCK;
    (FIRST_ID + u32::from(instance.number()) * count, count)
}

/// The same of a number, which may be none of an instance.
pub fn ids_of_number(number: u8) -> Option<(u32, u32)> {
    Instance::new(number).ok().map(ids_of)
}

/// Locks the file at a path, which is made if it is not there; None if another process has the
/// lock. A daemon that gives a number back removes its file: a lock on a file that the path does
/// not lead to any more keeps no process away, so another file is opened then.
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

/// Gives the instance number back, for good, if there are no procs: stopped ones have files. Its
/// lock is held until after this.
pub fn release(data: &Path, instance: Instance) {
    if has_procs(data) {
        return;
    }
    let _ = fs::remove_file(data.join(MARK));
    let _ = fs::remove_file(file_of(instance.number()));
    // Only if it is empty.
    let _ = fs::remove_dir(INSTANCES);
}

/// First host id of a slot's block.
pub fn first_id(instance: Instance, slot: Slot) -> u32 {
    let block = u32::from(instance.number()) * u32::from(kip_net::addr::SLOTS) + u32::from(slot.number());
    FIRST_ID + block * IDS_PER_BLOCK
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

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
