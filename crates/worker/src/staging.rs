//! A proc that is being made of another one, or of what was kept of one, until it has its name.

use crate::volumes_of_clones::{self, OwnVolume, OwnVolumes};
use crate::worker::Worker;
use kip_copy::{Becomes, ProcCopy};
use kip_engine::host::Host;
use kip_engine::{secrets, volumes};
use kip_net::Slot;
use kip_net::prepared::PreparedNetwork;
use kip_records::record::{Durability, Unpublished};
use kip_records::state::Record;
use kip_types::api::{Code, Refusal};
use kip_types::keys::Hex;
use kip_types::{Generation, ProcName, Spec, VolumeSource, chain};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

/// What clones have of their source beside memory and files.
pub(crate) struct Moment {
    /// As it was when they were asked for, or at the checkpoint.
    pub(crate) spec: Arc<Spec>,
    /// The skeleton that its files lie over.
    pub(crate) base: PathBuf,
    /// Contents of its secrets, by their names, as they are now.
    pub(crate) secrets: BTreeMap<String, Hex>,
}

/// What files are copied from.
pub(crate) struct CopiedFrom {
    pub(crate) directory: PathBuf,
    /// First id of the block that owns them.
    pub(crate) first_id: u32,
    /// The host name in them.
    pub(crate) hostname: String,
    /// What the volumes of the new one's own are filled with.
    pub(crate) volumes: Vec<OwnVolume>,
    /// The same proc or another.
    pub(crate) becomes: Becomes,
}

impl CopiedFrom {
    /// Copies from what does not change: another clone, or a checkpoint.
    pub(crate) fn copy(self, to: &Staging, generation: Option<Generation>) -> Result<(), Refusal> {
        let copy = ProcCopy {
            from: self.directory,
            to: to.directory(),
            ids: (self.first_id, to.first_id()),
            names: (self.hostname, to.spec.hostname().to_owned()),
            becomes: self.becomes,
        };
        let copied = || {
            copy.copy_files().map_err(|e| chain(&e))?;
            volumes_of_clones::fill(&self.volumes)?;
            let Some(generation) = generation else { return Ok(()) };
            copy.copy_generation(generation).map_err(|e| chain(&e))?;
            volumes_of_clones::note_restored(&self.volumes, &copy.from, &copy.to, generation)
        };
        copied().map_err(|why| Refusal::new(Code::Failed, format!("{} cannot be made: {why}", to.spec.name)))
    }
}

/// A proc that is being made, with its slot, until it is published.
pub(crate) struct Staging {
    pub(crate) machine: Arc<Host>,
    pub(crate) spec: Spec,
    pub(crate) record: Record,
    pub(crate) key: ProcName,
    pub(crate) made: Option<Unpublished>,
    /// Its directory has its name: the slot is the proc's.
    pub(crate) published: bool,
    pub(crate) prepared: Option<PreparedNetwork>,
    _volumes: volumes::Claim,
    /// Named volumes that were made for it. They go if it is not published, and is known to have
    /// none then.
    pub(crate) own_volumes: Option<OwnVolumes>,
}

impl Staging {
    pub(crate) fn directory(&self) -> PathBuf {
        self.made.as_ref().expect("it is published last").path().to_owned()
    }

    /// Records what it sleeps in: what its source would.
    pub(crate) fn settle(&mut self, source: &Record) -> Result<(), Refusal> {
        self.record = Record {
            state: source.state.clone(),
            established: true,
            program: source.program,
            last_sleep: source.last_sleep.clone(),
            ticks: source.ticks,
            started_at_ms: source.started_at_ms,
            ready: source.ready,
            wakes_again: source.wakes_again,
            ..self.record.clone()
        };
        let made = self.made.as_ref().expect("it is published last");
        let failed = |e| Refusal::new(Code::Exhausted, format!("{} cannot be recorded: {}", self.spec.name, chain(&e)));
        made.change_state(&self.record).map_err(failed)
    }

    pub(crate) fn first_id(&self) -> u32 {
        let slot = Slot::new(self.record.slot).expect("it was taken");
        self.machine.first_id(slot)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if let Some(made) = self.made.take()
            && let Err(e) = fs::remove_dir_all(made.path())
        {
            tracing::warn!(path = %made.path().display(), error = %e, "a clone that was not made is left to the next daemon");
        }
        if !self.published {
            let slot = Slot::new(self.record.slot).expect("it was taken");
            let _ = self.machine.pool.release(&[slot]);
            self.machine.prepared_networks.free(slot);
        }
    }
}

impl Worker {
    /// What the clone has of itself: its spec, its secrets under its own key, and its place.
    pub(crate) fn begin_staging(&self, moment: &Moment, mut spec: Spec) -> Result<Staging, Refusal> {
        let (machine, name) = (&self.machine, spec.name.clone());
        let failed = |what: &str, e: &dyn std::error::Error| {
            Refusal::new(Code::Failed, format!("{name} cannot be made: {what}: {}", chain(e)))
        };
        let key = self.key_for(&name)?;
        let _volumes = volumes::declare(machine, &mut spec)?;
        spec.volumes.retain(|volume| volume.source != VolumeSource::Secrets);
        let sealed = secrets::seal(machine, &key, &mut spec, moment.secrets.clone());
        let sealed = sealed.map_err(|e| failed("its secrets", &e))?;
        let prepared = machine.prepared_networks.take(spec.sandbox.network());
        let prepared = prepared.map_err(|e| Refusal::new(Code::Exhausted, chain(&e)))?;
        let slot = prepared.slot;
        // What it sleeps in is recorded when that is there.
        let record = Record::new(slot.number(), moment.base.clone());
        // Synced with its files, before it is published or when all of its memory is there.
        let made = machine.records.prepare(&key, &spec, &record, Durability::Rename).map_err(|e| {
            let _ = machine.pool.release(&[slot]);
            machine.prepared_networks.free(slot);
            Refusal::new(Code::Exhausted, format!("{name} cannot be recorded: {}", chain(&e)))
        })?;
        let staging = Staging {
            machine: Arc::clone(machine),
            spec,
            record,
            key,
            made: Some(made),
            published: false,
            prepared: Some(prepared),
            _volumes,
            own_volumes: None,
        };
        if let (Some(sealed), Some(made)) = (sealed, &staging.made) {
            made.add(secrets::FILE, &sealed).map_err(|e| failed("its secrets", &e))?;
        }
        Ok(staging)
    }
}
