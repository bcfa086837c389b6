//! Copies a proc that runs on: frozen as for a park, with its memory held by copies of its
//! processes, which is written when it runs again.

use super::{Freeze, ParkError, Seen, Still, Thawed, finalize, frozen, sealed, sweep};
use crate::host::Proc;
use crate::lifted::LiftedGroup;
use crate::survey;
use kip_copy::memory::HeldMemory;
use kip_snapshot::carry;
use kip_snapshot::pages::UNSYNCED;
use kip_sys::fault;
use kip_types::Generation;
use std::time::{Duration, Instant};

/// What is done with a proc that is copied.
pub trait CopySteps {
    /// Its files are copied, while it stands still.
    ///
    /// # Errors
    /// In words.
    fn files(&mut self) -> Result<(), String>;

    /// Whether the generation is to outlive the machine.
    fn is_kept(&self) -> bool;

    /// Its generation is taken, which is gone afterwards, while it runs.
    ///
    /// # Errors
    /// In words.
    fn generation(&mut self, generation: Generation) -> Result<(), String>;
}

/// A proc that was copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyDone {
    /// How long it stood still, or a little less time.
    pub still: Duration,
}

/// Copies. `pids` and `paged_out` are as of [`super::park`].
///
/// # Errors
/// [`ParkError`]; [`ParkError::Hold`] if its memory cannot be held: it can be parked all the same.
pub fn copy(
    proc: &Proc,
    pids: &[u32],
    generation: Generation,
    paged_out: bool,
    steps: &mut dyn CopySteps,
) -> Result<CopyDone, ParkError> {
    let lifted = LiftedGroup::for_threads(proc, 2 * pids.len()).map_err(ParkError::Limits)?;
    let freeze = Freeze { proc, pids, generation, paged_out, once: None, sleeps: steps.is_kept(), leaves_memory: true };
    let mut copied = |still: &Still<'_>, seen: &mut Seen| {
        let mut memory = HeldMemory::default();
        let finalized = finalize(&freeze, still, seen, &mut |tree, map| {
            // Of one that has ended CRIU writes no memory.
            let with_memory = map.processes.keys();
            let processes: Vec<(u32, u32)> =
                with_memory.filter_map(|inside| Some((*inside, *tree.threads.get(inside)?))).collect();
            memory = HeldMemory::hold(still.helper, &processes, map)?;
            Ok(())
        })?;
        fault::reach("copy-held");
        lifted.for_copies().map_err(ParkError::Limits)?;
        steps.files().map_err(ParkError::Copy)?;
        fault::reach("copy-files");
        Ok((finalized, memory))
    };
    let Thawed { outcome: (mut finalized, memory), helper, still, .. } = frozen(&freeze, &mut copied, false)?;
    let thawed = Instant::now();
    survey::note_ends_of(proc, memory.processes());
    let growing = kip_snapshot::growing_path(&proc.dir, generation);
    let written = memory.write(&growing).map_err(ParkError::Held).map(|sums| {
        let file = finalized.pages.files.iter_mut().find(|file| file.name == UNSYNCED && !steps.is_kept());
        // Of one that is kept they are taken of what is read back.
        file.into_iter().for_each(|file| file.sums.clone_from(&sums));
    });
    // The copies end with it.
    drop(helper);
    let written_after = thawed.elapsed();
    fault::reach("copy-written");
    let done = (|| {
        written?;
        carry::write_sets(&mut finalized.pages, &growing).map_err(ParkError::Carry)?;
        sealed(proc, &growing, generation, &finalized.body, finalized.pages, &finalized.images, steps.is_kept())?;
        fault::reach("copy-sealed");
        steps.generation(generation).map_err(ParkError::Copy)
    })();
    tracing::debug!(proc = %proc.name, ?still, ?written_after, sealed_after = ?thawed.elapsed(), "copied");
    sweep(proc, generation);
    memory.wait_until_gone();
    done.map(|()| CopyDone { still })
}
