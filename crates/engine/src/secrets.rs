//! A proc's secrets: files below /run/secrets that are in memory while it runs, and on the disk
//! only sealed.
//!
//! `DIR/procs/KEY/secrets` is what [`kip_archive::secrets`] seals. Each start and each wake opens
//! it and makes a file system in memory of it, which is a volume of the proc like others: no
//! generation has its contents, neither here nor in a store. Crash: the file is there before the
//! proc is recorded, and goes with it.

use crate::host::Host;
use crate::host::Proc;
use kip_archive::ids::KeyId;
use kip_archive::keys::{KeyFileError, Keyring, NoKey};
use kip_archive::secrets::{Secrets, SecretsError, key_of};
use kip_sandbox::volume::{self, Volume};
use kip_types::keys::Hex;
use kip_types::spec::SECRETS;
use kip_types::{ProcName, Realm, Spec, VolumeSource, VolumeSpec};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// In a proc's directory.
pub const FILE: &str = "secrets";
/// Where the realm's keys are.
const KEYS: &str = "archive";

/// A proc's secrets cannot be had.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each is what it means")]
pub enum SecretsLost {
    #[error("the realm's keys cannot be read")]
    Keys(#[from] KeyFileError),
    #[error("its secrets cannot be sealed")]
    Seal(#[from] NoKey),
    #[error("{} cannot be opened", path.display())]
    Sealed {
        path: PathBuf,
        #[source]
        source: SecretsError,
    },
    #[error("its secrets in {} cannot be read", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the file system of its secrets cannot be made")]
    Mount(#[source] io::Error),
}

/// The realm's keys: those of the store, or where there is none those that a store would have.
fn ring(machine: &Host) -> Result<Arc<Keyring>, KeyFileError> {
    if let Some(archive) = &machine.archive {
        return Ok(archive.keys());
    }
    let (directory, realm) = (machine.data.join(KEYS), Realm::default());
    let made = fs::create_dir_all(&directory);
    made.map_err(|source| KeyFileError::Io { path: directory.clone(), source })?;
    let ring = match Keyring::load(&directory, &realm) {
        Err(KeyFileError::Missing { .. }) => Keyring::create(&directory, realm, kip_sys::clock::now_ms())?,
        ring => ring?,
    };
    Ok(Arc::new(ring))
}

/// What is to be kept of a new proc's secrets, and the volume by which it gets them; none without
/// secrets.
pub fn seal(
    machine: &Host,
    key: &ProcName,
    spec: &mut Spec,
    secrets: BTreeMap<String, Hex>,
) -> Result<Option<Vec<u8>>, SecretsLost> {
    if secrets.is_empty() {
        return Ok(None);
    }
    let secrets = Secrets::new(secrets.into_iter().map(|(name, contents)| (name, contents.0)));
    let sealed = secrets.seal(&*ring(machine)?, key)?;
    let target = SECRETS.to_owned();
    spec.volumes.push(VolumeSpec { source: VolumeSource::Secrets, target, read_only: true });
    Ok(Some(sealed))
}

/// What a proc finds below /run/secrets.
pub fn open(proc: &Proc) -> Result<Secrets, SecretsLost> {
    let path = proc.dir.join(FILE);
    let sealed = fs::read(&path).map_err(|source| SecretsLost::Read { path: path.clone(), source })?;
    let opened = Secrets::open(&*ring(&proc.shared)?, &proc.key, &sealed);
    opened.map_err(|source| SecretsLost::Sealed { path, source })
}

/// The file system for a start or a wake, its files owned by a user and a group of the inside.
pub fn mount(proc: &Proc, target: &str, uid: u32, gid: u32) -> Result<Volume, SecretsLost> {
    let secrets = open(proc)?;
    let first = proc.first_id();
    volume::in_memory(secrets.files(), target, first, (first + uid, first + gid)).map_err(SecretsLost::Mount)
}

/// Names of those that a proc has with other contents than these.
pub fn differing(proc: &Proc, wanted: &BTreeMap<String, Hex>) -> Result<Vec<String>, SecretsLost> {
    if wanted.is_empty() || proc.spec().secrets.is_empty() {
        return Ok(Vec::new());
    }
    let secrets = open(proc)?;
    let differs = |(name, contents): (&str, &[u8])| wanted.get(name).is_some_and(|wanted| wanted.0 != contents);
    Ok(secrets.files().filter(|file| differs(*file)).map(|(name, _)| name.to_owned()).collect())
}

/// The key without which a proc has no secrets any more; none if it has none.
pub fn key_needed(directory: &Path) -> Option<KeyId> {
    key_of(&fs::read(directory.join(FILE)).ok()?)
}
