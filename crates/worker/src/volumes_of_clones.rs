//! What clones have in place of the volumes that their source can write to: the same ones, copies
//! of the moment, or empty ones.
//!
//! A volume of a clone's own is made here, and goes again with [`OwnVolumes`] unless that is kept.
//! It is never one that was there before.

use kip_engine::host::Host;
use kip_engine::volumes;
use kip_engine::volumes::sleep::is_restored;
use kip_offload::restore::RESTORED;
use kip_records::body::Body;
use kip_types::api::clone::{CloneMethod, CloneRequest};
use kip_types::api::{Code, Refusal};
use kip_types::name::MAX_NAME;
use kip_types::volume::ClonedVolumes;
use kip_types::volume::LONGEST_VOLUME_NAME;
use kip_types::{Generation, ProcName, Spec, VolumeName, VolumeSource, VolumeSpec, chain};
use std::collections::BTreeSet;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A named volume of a clone, in place of one of its source.
#[derive(Debug, Clone)]
pub(crate) struct OwnVolume {
    source: VolumeSource,
    name: VolumeName,
    /// The source's files; none if the clone's volume is to be empty.
    from: Option<PathBuf>,
    to: PathBuf,
}

/// Those of one clone. They are removed when this is dropped, unless they are kept or in use by
/// then.
pub(crate) struct OwnVolumes {
    machine: Arc<Host>,
    all: Vec<OwnVolume>,
}

impl OwnVolumes {
    /// Makes those that a clone of that name is to have, empty.
    ///
    /// # Errors
    /// One is there already, or cannot be made.
    pub(crate) fn make(
        machine: &Arc<Host>,
        source: &Spec,
        clone: &ProcName,
        request: &CloneRequest,
    ) -> Result<OwnVolumes, Refusal> {
        let mut own = OwnVolumes { machine: Arc::clone(machine), all: Vec::new() };
        let copies = match request.volumes {
            Some(ClonedVolumes::Copy) => true,
            Some(ClonedVolumes::Drop) => false,
            Some(ClonedVolumes::Share) | None => return Ok(own),
        };
        let directory = volumes::directory(&machine.data);
        let failed =
            |e: io::Error| Refusal::new(Code::Exhausted, format!("{clone} cannot be made: a volume of its own: {e}"));
        DirBuilder::new().recursive(true).mode(0o700).create(&directory).map_err(failed)?;
        let mut names = BTreeSet::new();
        for volume in source.volumes.iter().filter(is_writable) {
            if own.in_place_of(&volume.source).is_some() {
                continue;
            }
            let stem = stem_of(volume);
            let mut numbered = std::iter::once(String::new()).chain((2..).map(|n| format!("-{n}")));
            // One that a replica has left is in no other's way.
            let is_free = |name: &VolumeName| {
                !names.contains(name) && (request.replica_of.is_none() || !directory.join(name.as_str()).exists())
            };
            let name = numbered.find_map(|n| format!("{stem}-{clone}{n}").parse().ok().filter(is_free));
            let name: VolumeName = name.expect("there are more numbers than volumes");
            names.insert(name.clone());
            let to = directory.join(name.as_str());
            match DirBuilder::new().mode(0o755).create(&to) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                    let message = format!("a clone would have the volume {name}, which is there already");
                    return Err(Refusal::new(Code::Taken, message)
                        .with_hint(format!("choose another name for the clone, or `kip volume rm {name}`")));
                }
                made => made.map_err(failed)?,
            }
            let of_source = volumes::path_of(&machine.data, &volume.source);
            if !copies {
                // A program that is another user than root writes there.
                let like = |known: fs::Metadata| {
                    std::os::unix::fs::chown(&to, Some(known.uid()), Some(known.gid()))?;
                    fs::set_permissions(&to, known.permissions())
                };
                let made = fs::metadata(&of_source).and_then(|known| if known.is_dir() { like(known) } else { Ok(()) });
                made.inspect_err(|_| _ = fs::remove_dir(&to)).map_err(failed)?;
            }
            let from = copies.then_some(of_source);
            own.all.push(OwnVolume { source: volume.source.clone(), name, from, to });
        }
        Ok(own)
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = VolumeName> {
        self.all.iter().map(|volume| volume.name.clone())
    }

    pub(crate) fn all(&self) -> Vec<OwnVolume> {
        self.all.clone()
    }

    /// The same, filled from those of another clone of the same source.
    pub(crate) fn like(&self, other: &OwnVolumes) -> Vec<OwnVolume> {
        let of =
            |volume: &OwnVolume| other.all.iter().find(|one| one.source == volume.source).map(|one| one.to.clone());
        self.all
            .iter()
            .map(|volume| OwnVolume { from: volume.from.as_ref().and_then(|_| of(volume)), ..volume.clone() })
            .collect()
    }

    fn in_place_of(&self, source: &VolumeSource) -> Option<&VolumeName> {
        self.all.iter().find(|volume| volume.source == *source).map(|volume| &volume.name)
    }

    /// What the clone has in place of that volume of its source: wherever that is mounted, once
    /// more and read-only too.
    pub(crate) fn replace(&self, volume: &VolumeSpec) -> VolumeSpec {
        match self.in_place_of(&volume.source) {
            Some(name) => VolumeSpec { source: VolumeSource::Named(name.clone()), ..volume.clone() },
            None => volume.clone(),
        }
    }

    /// Makes the files in them durable.
    ///
    /// # Errors
    /// The file system's, in words.
    pub(crate) fn sync(&self) -> Result<(), String> {
        self.all.iter().try_for_each(|volume| kip_copy::sync(&volume.to, None)).map_err(|e| chain(&e))?;
        if self.all.is_empty() {
            return Ok(());
        }
        let directory = volumes::directory(&self.machine.data);
        fs::File::open(&directory).and_then(|directory| directory.sync_all()).map_err(|e| chain(&e))
    }

    /// They are the clone's from now on.
    pub(crate) fn keep(mut self) {
        self.all.clear();
    }
}

impl Drop for OwnVolumes {
    fn drop(&mut self) {
        for OwnVolume { name, to, .. } in self.all.drain(..) {
            let claimed = self.machine.claims.0.lock();
            let has = |volume: &VolumeSpec| volume.source == VolumeSource::Named(name.clone());
            if claimed.contains(&name)
                || self.machine.live_procs().iter().any(|proc| proc.spec().volumes.iter().any(has))
            {
                tracing::info!(volume = %name, "another proc has the volume of a clone that was not made by now");
            } else if let Err(e) = fs::remove_dir_all(&to) {
                tracing::warn!(path = %to.display(), error = %e, "a volume of a clone that was not made stays");
            }
        }
    }
}

/// Fills volumes of a clone in that directory, and notes if they are not the ones that it fell
/// asleep with, or were not its source's either.
///
/// # Errors
/// In words: they cannot be read or written.
pub(crate) fn fill(volumes: &[OwnVolume]) -> Result<(), String> {
    for volume in volumes {
        if let Some(from) = &volume.from {
            kip_copy::copy_volume(from, &volume.to).map_err(|e| chain(&e))?;
        }
    }
    Ok(())
}

/// Notes that a copy's files in volumes are not those of its generation, if that is so.
///
/// # Errors
/// In words: the note cannot be written.
pub(crate) fn note_restored(
    volumes: &[OwnVolume],
    source: &Path,
    directory: &Path,
    generation: Generation,
) -> Result<(), String> {
    if volumes.is_empty() && !is_restored(source, generation) {
        return Ok(());
    }
    fs::write(directory.join(RESTORED), generation.to_string()).map_err(|e| chain(&e))
}

/// Refuses a source whose volumes clones cannot have in the way that is asked for.
pub(crate) fn check(source: &Spec, request: &CloneRequest) -> Result<(), Refusal> {
    let (name, invalid) = (&source.name, |why: String| Err(Refusal::new(Code::Invalid, why)));
    let Some(volume) = source.volumes.iter().find(is_writable) else { return Ok(()) };
    let what = format!("{name} has the volume {} at {}", volume.source, volume.target);
    let of_host = source.volumes.iter().find(|v| is_writable(v) && matches!(v.source, VolumeSource::Host(_)));
    match (request.volumes, of_host) {
        (None, _) => Err(Refusal::new(Code::State, format!("{what}, which a clone would write to as well"))
            .with_hint("say what a clone has in its place: --volumes share, copy or drop")),
        (Some(ClonedVolumes::Copy), Some(volume)) => {
            let (path, target) = (&volume.source, &volume.target);
            invalid(format!("{path} at {target} of {name} is not Kip's own to copy: --volumes share, or drop"))
        }
        (Some(ClonedVolumes::Copy), None) if request.method == CloneMethod::Cold => invalid(format!(
            "{what}, and its files are copied at the moment at which a hot clone is made: leave out --cold, or --volumes share or drop"
        )),
        _ => Ok(()),
    }
}

fn is_writable(volume: &&VolumeSpec) -> bool {
    !volume.read_only && volume.source != VolumeSource::Secrets
}

/// What the name of a clone's volume begins with, in place of that one of its source.
fn stem_of(volume: &VolumeSpec) -> String {
    let text = match &volume.source {
        VolumeSource::Named(name) => name.to_string(),
        VolumeSource::Host(_) | VolumeSource::Secrets => volume.target.replace('/', "-"),
    };
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    // Room for the name of the clone, two hyphens and a number.
    let most = LONGEST_VOLUME_NAME - MAX_NAME - 8;
    let text = text.trim_start_matches(|c: char| !c.is_ascii_alphanumeric());
    let stem: String = text.chars().filter(|c| good(*c)).take(most).collect();
    if stem.is_empty() { "volume".to_owned() } else { stem }
}

/// Refuses a clone with empty volumes where the source had something open in one.
///
/// # Errors
/// Why, in words.
pub(crate) fn check_dropped(source: &Spec, directory: &Path, generation: Option<Generation>) -> Result<(), String> {
    let Some(generation) = generation else { return Ok(()) };
    let manifest = kip_snapshot::open::<Body>(&kip_snapshot::path_of(directory, generation)).map_err(|e| chain(&e))?;
    let writable: Vec<&VolumeSource> = source.volumes.iter().filter(is_writable).map(|volume| &volume.source).collect();
    let dropped = |target: &str| source.volumes.iter().any(|v| v.target == target && writable.contains(&&v.source));
    let mut open = manifest.body.volumes.iter().filter(|volume| dropped(&volume.target) && !volume.files.is_empty());
    match open.next() {
        None => Ok(()),
        Some(volume) => {
            let file = &volume.files[0].path;
            Err(format!("it has {file:?} open in its volume at {}: --volumes share, or copy", volume.target))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stems_are_the_beginning_of_a_name() {
        let volume =
            |source: VolumeSource, target: &str| VolumeSpec { source, target: target.to_owned(), read_only: false };
        let host = || VolumeSource::Host("/srv/x".into());
        for (volume, stem) in [
            (volume(VolumeSource::Named("data".parse().unwrap()), "/var/lib/x"), "data"),
            (volume(host(), "/var/lib/x y"), "var-lib-xy"),
            (volume(host(), "/.cache"), "cache"),
            (volume(host(), "/\u{e9}"), "volume"),
            (volume(VolumeSource::Named("n".repeat(128).parse().unwrap()), "/x"), &*"n".repeat(128 - MAX_NAME - 8)),
        ] {
            assert_eq!(stem_of(&volume), stem);
            format!("{stem}-{}-32", "c".repeat(MAX_NAME)).parse::<VolumeName>().unwrap();
        }
    }
}
