//! Volumes of procs: which files of the host they are, and those that Kip keeps under a name.
//!
//! `DATA/volumes/NAME` is a named volume: a directory that is made when the first proc asks for it
//! and stays until it is removed by its name. What a proc had of its volumes when it fell asleep,
//! and whether that is still there, is [`sleep`]'s. Nothing of a volume is ever part of a
//! generation. Crash: a volume that was being removed is under a name that no volume can have, and
//! the next start of the daemon removes the rest.

pub mod fill;
pub mod sleep;

use crate::host::Host;
use crate::host::Proc;
use crate::secrets;
use kip_sandbox::rootfs::Mounts;
use kip_sandbox::volume::{self, Volume};
use kip_types::api::{Code, Refusal};
use kip_types::{Spec, VolumeName, VolumeSource, VolumeSpec};
use std::fs;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Of volumes that are being removed.
pub const TRASH: &str = ".trash-";

/// Where named volumes are.
pub fn directory(data: &Path) -> PathBuf {
    data.join("volumes")
}

/// Where a volume's files are.
pub fn path_of(data: &Path, source: &VolumeSource) -> PathBuf {
    match source {
        VolumeSource::Named(name) => directory(data).join(name.as_str()),
        VolumeSource::Host(path) => path.clone(),
        // Nowhere on the host: a name for messages.
        VolumeSource::Secrets => PathBuf::from("secrets"),
    }
}

/// Keeps volumes from being removed until the proc that wants them is known.
#[derive(Debug)]
pub struct Claim {
    machine: Arc<Host>,
    names: Vec<VolumeName>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut claimed = self.machine.claims.0.lock();
        for name in &self.names {
            if let Some(at) = claimed.iter().position(|one| one == name) {
                claimed.swap_remove(at);
            }
        }
    }
}

/// Resolves what the volumes of a new proc are: links in paths of the host are resolved, once and
/// for all; named volumes are made.
pub fn declare(machine: &Arc<Host>, spec: &mut Spec) -> Result<Claim, Refusal> {
    let mut claim = Claim { machine: Arc::clone(machine), names: Vec::new() };
    for VolumeSpec { source, target, .. } in &mut spec.volumes {
        let refuse = |code, why: String| Refusal::new(code, format!("{}: the volume at {target}: {why}", spec.name));
        match source {
            VolumeSource::Host(path) => {
                *path = resolve(path, &machine.data).map_err(|why| refuse(Code::Invalid, why))?;
            }
            VolumeSource::Secrets => {}
            VolumeSource::Named(name) => {
                let mut claimed = machine.claims.0.lock();
                claimed.push(name.clone());
                claim.names.push(name.clone());
                let made = make(&directory(&machine.data), name);
                made.map_err(|e| refuse(Code::Exhausted, format!("{name} cannot be made: {e}")))?;
            }
        }
    }
    Ok(claim)
}

/// A named volume that is not there yet, or has nothing in it.
pub fn is_new(machine: &Host, source: &VolumeSource) -> bool {
    let VolumeSource::Named(_) = source else { return false };
    !fs::read_dir(path_of(&machine.data, source)).is_ok_and(|mut files| files.next().is_some())
}

fn make(directory: &Path, name: &VolumeName) -> io::Result<()> {
    // The owners of files in it are ids of the host too: no user of the host may pass.
    fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    match fs::DirBuilder::new().mode(0o755).create(directory.join(name.as_str())) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
        _ => Ok(()),
    }
}

fn resolve(path: &Path, data: &Path) -> Result<PathBuf, String> {
    let shown = path.display();
    let found = match fs::canonicalize(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(format!("there is no {shown} on this machine: make it first"));
        }
        found => found.map_err(|e| format!("{shown}: {e}"))?,
    };
    let kind = fs::metadata(&found).map_err(|e| format!("{shown}: {e}"))?.file_type();
    if !kind.is_dir() && !kind.is_file() {
        return Err(format!("{shown} is neither a file nor a directory"));
    }
    let data = fs::canonicalize(data).unwrap_or_else(|_| data.to_owned());
    if found.starts_with(&data) || data.starts_with(&found) {
        return Err(format!(
            "{shown} has other procs' files, for {} is Kip's own: give another path, or a name",
            data.display()
        ));
    }
    Ok(found)
}

/// Those that lie within others come after them.
fn in_order(spec: &Spec) -> Vec<&VolumeSpec> {
    let mut volumes: Vec<&VolumeSpec> = spec.volumes.iter().collect();
    volumes.sort_by_key(|volume| volume.target.matches('/').count());
    volumes
}

/// Mounts for a start, detached.
///
/// # Errors
/// One of them is not there, or cannot be mounted.
pub fn for_start(
    proc: &Proc,
    mounts: &Mounts,
    user: BorrowedFd<'_>,
    owner: (u32, u32),
) -> Result<Vec<Volume>, sleep::VolumeChanged> {
    for volume in proc.spec().volumes.iter().filter(|v| !v.read_only) {
        if let Err(e) = fill::fill(proc, mounts, volume) {
            let message = "a new volume does not get what it covers";
            tracing::warn!(proc = %proc.name, target = volume.target, error = %e, message);
        }
    }
    let mount = |v: &VolumeSpec| {
        Ok(match &v.source {
            VolumeSource::Secrets => secrets::mount(proc, &v.target, owner.0, owner.1)?,
            source => volume::mount(&path_of(&proc.shared.data, source), &v.target, user, v.read_only)?,
        })
    };
    in_order(&proc.spec()).into_iter().map(mount).collect()
}

/// Mounts for a look at the files of a proc that is not running, without its secrets.
///
/// # Errors
/// One of them is not there, or cannot be mounted.
pub fn for_files(proc: &Proc, user: BorrowedFd<'_>) -> Result<Vec<Volume>, volume::VolumeError> {
    let spec = proc.spec();
    let specs = in_order(&spec).into_iter().filter(|v| v.source != VolumeSource::Secrets);
    specs.map(|v| volume::mount(&path_of(&proc.shared.data, &v.source), &v.target, user, v.read_only)).collect()
}

/// Whether some other proc has files of the volume too.
fn is_shared(proc: &Proc, path: &Path) -> bool {
    let data = &proc.shared.data;
    proc.shared.live_procs().iter().filter(|other| other.slot != proc.slot).any(|other| {
        let spec = other.spec();
        let others = spec.volumes.iter().map(|v| path_of(data, &v.source));
        others.into_iter().any(|other| other.starts_with(path) || path.starts_with(&other))
    })
}

/// A line for each volume of a proc of this data directory.
pub fn lines(data: &Path, spec: &Spec) -> Vec<String> {
    let line = |v: &&VolumeSpec| match &v.source {
        VolumeSource::Named(name) => format!("volume {name} at {}, {}", v.target, path_of(data, &v.source).display()),
        VolumeSource::Host(path) => format!("{} at {}", path.display(), v.target),
        VolumeSource::Secrets => format!("secrets at {}, sealed in the data directory", v.target),
    };
    in_order(spec).iter().map(line).collect()
}

/// Removes what is left of volumes that were being removed when the last daemon ended.
pub fn sweep(data: &Path) {
    for entry in fs::read_dir(directory(data)).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(TRASH)
            && let Err(e) = fs::remove_dir_all(entry.path())
        {
            tracing::warn!(path = %entry.path().display(), error = %e, "something of a removed volume is still on disk");
        }
    }
}

/// What the files below a directory take, bytes; a file with several names counts once.
pub fn size(directory: &Path) -> u64 {
    let mut links = std::collections::BTreeSet::new();
    let (mut bytes, mut open) = (0, vec![directory.to_owned()]);
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let Ok(meta) = entry.metadata() else { continue };
            if meta.is_dir() {
                open.push(entry.path());
            }
            if meta.is_dir() || meta.nlink() == 1 || links.insert((meta.dev(), meta.ino())) {
                bytes += meta.blocks() * 512;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_resolved_and_kips_own_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let top = fs::canonicalize(dir.path()).unwrap();
        let data = top.join("data");
        fs::create_dir_all(top.join("srv/real")).unwrap();
        fs::create_dir_all(data.join("procs")).unwrap();
        std::os::unix::fs::symlink("real", top.join("srv/link")).unwrap();
        std::os::unix::fs::symlink(data.join("procs"), top.join("srv/sly")).unwrap();
        assert_eq!(resolve(&top.join("srv/link"), &data), Ok(top.join("srv/real")));
        for bad in [top.join("srv/sly"), data.clone(), top.clone(), "/".into()] {
            assert!(resolve(&bad, &data).unwrap_err().contains("Kip's own"), "{}", bad.display());
        }
        assert!(resolve(&top.join("none"), &data).unwrap_err().contains("make it first"));
        assert!(resolve(Path::new("/dev/null"), &data).unwrap_err().contains("neither a file"));
    }

    #[test]
    fn sizes_count_a_file_once() {
        let dir = tempfile::tempdir().unwrap();
        let empty = size(dir.path());
        fs::create_dir(dir.path().join("a")).unwrap();
        fs::write(dir.path().join("a/file"), vec![1; 100_000]).unwrap();
        fs::hard_link(dir.path().join("a/file"), dir.path().join("again")).unwrap();
        let full = size(dir.path()) - empty;
        assert!((100_000..200_000).contains(&full), "{full}");
    }
}
