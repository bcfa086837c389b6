//! What the images of a proc may ask for: its spec and the sandbox's rules as
//! [`kip_checkpoint::policy`] wants them.
//!
//! Asked for every generation that came from a store, before anything of it is restored, and for
//! every one that is to go there, before it does: what would be refused then stays parked. Not for
//! those that never left the local disk: only root can write there.

use kip_checkpoint::plan::PLAN;
use kip_checkpoint::policy::{self, FactsError, Policy, Refused};
use kip_criu_images::{CheckpointImageError, Images, bars_criu};
use kip_engine::host::Proc;
use kip_engine::tmpfs;
use kip_engine::volumes::sleep::key;
use kip_records::body::Body;
use kip_records::instance::IDS_PER_BLOCK;
use kip_sandbox::{base, launch, seccomp};
use kip_snapshot::pages::PageMap;
use kip_snapshot::{Manifest, SnapshotError};
use kip_types::spec::FilterKind;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// A generation may not be restored.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each is what it means")]
pub enum NotAllowed {
    #[error("its images cannot be judged")]
    Facts(#[from] FactsError),
    #[error("its images are refused")]
    Refused(#[from] Refused),
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error("the manifest does not list the sockets, timers and files that the proc slept with")]
    Body,
}

/// A generation may not go to a store: it could not come back from there.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each is what it means")]
pub enum NoReturn {
    #[error(transparent)]
    NotAllowed(#[from] NotAllowed),
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error(transparent)]
    Image(#[from] CheckpointImageError),
    /// What its plan takes over is held by this machine, and only until that ends.
    #[error("only this machine can wake the proc, because of {what}")]
    OnlyHere { what: String },
}

impl NoReturn {
    /// It will be so as long as the generation is what it is.
    pub fn is_final(&self) -> bool {
        matches!(self, NoReturn::NotAllowed(NotAllowed::Refused(_)) | NoReturn::OnlyHere { .. })
    }
}

fn allowed(proc: &Proc, body: &Body) -> Policy {
    let filter = proc.spec().sandbox.filter();
    let own = |path: &str| std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<i32>().ok());
    Policy {
        // Where it was archived it had another block, which a wake moves to its own.
        ids: (body.home.as_ref().map_or(proc.first_id(), |home| home.first_id), IDS_PER_BLOCK),
        capabilities: proc.spec().capabilities()
            | match filter {
                FilterKind::Default => launch::INIT_CAPABILITY_BITS,
                FilterKind::Light => 0,
            },
        no_new_privileges: !proc.spec().allow_setuid,
        filters: seccomp::known(filter).iter().map(|known| known.to_vec()).collect(),
        masks: launch::MASKED.iter().map(|path| (*path).to_owned()).collect(),
        volumes: volumes(proc, body),
        sockets: body.sockets.iter().map(|socket| socket.inode).collect(),
        devices: base::DEVICES.iter().map(|(name, ..)| format!("/dev/{name}")).collect(),
        own_ipc: body.own_ipc,
        nice: rustix::process::getpriority_process(None).unwrap_or(0).min(0),
        oom_score: own("/proc/self/oom_score_adj").unwrap_or(0).min(0),
    }
}

/// By the keys of their mounts, with those in memory. Whether one is read-only is its spec's to
/// say.
fn volumes(proc: &Proc, body: &Body) -> BTreeMap<String, (String, bool)> {
    let (of_it, all) = (proc.spec(), body.volumes.iter().enumerate());
    let volumes = all.filter_map(|(number, slept)| {
        let spec = of_it.volumes.iter().find(|v| v.target == slept.target)?;
        Some((key(number), (slept.point.clone(), spec.read_only)))
    });
    let in_memory = body.tmpfs.iter().enumerate();
    volumes.chain(in_memory.map(|(number, slept)| (tmpfs::key_of(number), (slept.point.clone(), false)))).collect()
}

/// Whether a generation that came from a store may be restored. `known` is what was kept here of
/// its manifest.
///
/// # Errors
/// What it asks for that its sandbox does not give; its images cannot be read.
pub fn check(proc: &Proc, images: &Path, known: &Body) -> Result<(), NotAllowed> {
    let manifest: Manifest<Body> = kip_snapshot::open(images)?;
    let plain = |body| serde_json::to_value(body).expect("it is plain data");
    if plain(&manifest.body) != plain(known) {
        return Err(NotAllowed::Body);
    }
    let facts = policy::read(&Images::read(images).map_err(FactsError::from)?, &BTreeSet::new())?;
    policy::check(&facts, &allowed(proc, known))?;
    Ok(())
}

/// Whether a parked generation could be woken if it came from a store, on any machine.
///
/// # Errors
/// Why not; its images cannot be read.
pub fn check_return(proc: &Proc, images: &Path) -> Result<(), NoReturn> {
    let manifest: Manifest<Body> = kip_snapshot::open(images)?;
    // The plan stays here, and memory goes in packs.
    let pages = PageMap::load(images)?.files.into_iter().map(|file| file.name);
    let read = Images::read(images)?;
    let facts = policy::read(&read, &pages.chain([PLAN.to_owned()]).collect()).map_err(NotAllowed::from)?;
    policy::check(&facts, &allowed(proc, &manifest.body)).map_err(NotAllowed::from)?;
    match bars_criu(&read)? {
        Some(what) => Err(NoReturn::OnlyHere { what }),
        None => Ok(()),
    }
}
