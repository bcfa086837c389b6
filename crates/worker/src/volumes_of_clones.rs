//! What clones have in place of the volumes that their source can write to: the same ones, copies
//! of the moment, or empty ones.

use crate::worker::Worker;
use kip_engine::volumes;
use kip_engine::volumes::sleep::RESTORED;
use kip_records::body::Body;
use kip_types::api::clone::{CloneMethod, CloneRequest, ClonedVolumes};
use kip_types::api::{Code, Refusal};
use kip_types::name::MAX_NAME;
use kip_types::{Generation, ProcName, Spec, VolumeName, VolumeSource, VolumeSpec, chain};
use std::fs;
use std::path::{Path, PathBuf};

/// A named volume of a clone, in place of one of its source.
#[derive(Debug, Clone)]
pub(crate) struct OwnVolume {
    /// The source's files; none if the clone's volume is to be empty.
    pub(crate) from: Option<PathBuf>,
    pub(crate) to: PathBuf,
}

impl OwnVolume {
    /// Fills those of a clone, and notes that they are not the ones that it fell asleep with.
    pub(crate) fn fill_all(
        volumes: &[OwnVolume],
        directory: &Path,
        generation: Option<Generation>,
    ) -> Result<(), String> {
        for volume in volumes {
            if let Some(from) = &volume.from {
                kip_copy::copy_volume(from, &volume.to).map_err(|e| chain(&e))?;
            }
        }
        match generation.filter(|_| !volumes.is_empty()) {
            Some(generation) => fs::write(directory.join(RESTORED), generation.to_string()).map_err(|e| chain(&e)),
            None => Ok(()),
        }
    }
}

impl Worker {
    /// The volumes that a clone does not share with its source, which are there and empty.
    pub(crate) fn own_volumes(&self, source: &Spec, clone: &Spec, request: &CloneRequest) -> Vec<OwnVolume> {
        let own = |volume: &VolumeSpec| {
            let other = source.volumes.iter().find(|other| other.target == volume.target)?;
            let path = |of: &VolumeSpec| volumes::path_of(&self.machine.data, &of.source);
            let from = (request.volumes == Some(ClonedVolumes::Copy)).then(|| path(other));
            (other.source != volume.source).then(|| OwnVolume { from, to: path(volume) })
        };
        clone.volumes.iter().filter(|volume| volume.source != VolumeSource::Secrets).filter_map(own).collect()
    }

    /// Refuses names of clones for which a volume would be made that is there already.
    pub(crate) fn check_volumes(
        &self,
        source: &Spec,
        names: &[ProcName],
        request: &CloneRequest,
    ) -> Result<(), Refusal> {
        if !matches!(request.volumes, Some(ClonedVolumes::Copy | ClonedVolumes::Drop)) {
            return Ok(());
        }
        let all = names.iter().flat_map(|name| source.volumes.iter().filter(is_writable).map(|v| volume_of(name, v)));
        let taken = |name: &VolumeName| volumes::directory(&self.machine.data).join(name.as_str()).exists();
        match all.into_iter().find(taken) {
            None => Ok(()),
            Some(name) => {
                let message = format!("a clone would have the volume {name}, which is there already");
                Err(Refusal::new(Code::Taken, message)
                    .with_hint(format!("choose another name for the clone, or `kip volume rm {name}`")))
            }
        }
    }
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

/// What a clone has in place of that volume of its source.
pub(crate) fn own_volume(volume: &VolumeSpec, clone: &ProcName, request: &CloneRequest) -> VolumeSpec {
    let own = matches!(request.volumes, Some(ClonedVolumes::Copy | ClonedVolumes::Drop)) && is_writable(&volume);
    match own {
        true => VolumeSpec { source: VolumeSource::Named(volume_of(clone, volume)), ..volume.clone() },
        false => volume.clone(),
    }
}

fn is_writable(volume: &&VolumeSpec) -> bool {
    !volume.read_only && volume.source != VolumeSource::Secrets
}

/// The named volume of a clone in place of that one of its source.
fn volume_of(clone: &ProcName, volume: &VolumeSpec) -> VolumeName {
    let text = match &volume.source {
        VolumeSource::Named(name) => name.to_string(),
        VolumeSource::Host(_) | VolumeSource::Secrets => volume.target.replace('/', "-"),
    };
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let stem: String = text.trim_matches('-').chars().filter(|c| good(*c)).take(128 - 1 - MAX_NAME).collect();
    format!("{stem}-{clone}").parse().unwrap_or_else(|_| format!("v-{clone}").parse().expect("letters are a name"))
}

/// Refuses a clone with empty volumes where the source had something open in one.
pub(crate) fn check_dropped(source: &Spec, directory: &Path, generation: Option<Generation>) -> Result<(), String> {
    let Some(generation) = generation else { return Ok(()) };
    let manifest = kip_snapshot::open::<Body>(&kip_snapshot::path_of(directory, generation)).map_err(|e| chain(&e))?;
    let dropped = |target: &str| source.volumes.iter().any(|v| v.target == target && is_writable(&v));
    let mut open = manifest.body.volumes.iter().filter(|volume| dropped(&volume.target) && !volume.files.is_empty());
    match open.next() {
        None => Ok(()),
        Some(volume) => {
            let file = &volume.files[0].path;
            Err(format!("it has {file:?} open in its volume at {}: --volumes share, or copy", volume.target))
        }
    }
}

/// Removes volumes of clones that were not made.
pub(crate) fn remove_volumes(volumes: &[OwnVolume]) {
    for volume in volumes {
        if let Err(e) = fs::remove_dir_all(&volume.to) {
            tracing::warn!(path = %volume.to.display(), error = %e, "a volume of a clone that was not made stays");
        }
    }
}
