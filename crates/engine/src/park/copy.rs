//! Copies a proc that runs on: frozen as for a park, with its memory held by copies of its
//! processes, which is written when it runs again.

use super::take::carry_over;
use super::{Finalized, Freeze, FrozenMemory, ParkError, Seen, Still, Thawed, finalize, frozen, sealed, sweep};
use crate::host::Proc;
use crate::lifted::LiftedGroup;
use crate::survey;
use kip_copy::memory::HeldMemory;
use kip_pager::SWAP;
use kip_snapshot::carry::Growing;
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
    let is_kept = steps.is_kept();
    let freeze = Freeze { proc, pids, generation, paged_out, once: None, sleeps: is_kept, leaves_memory: true };
    // The pager's file of what is paged out, to which it writes when the program runs again.
    let into = Growing { generation, is_kept, still_written: Some(SWAP) };
    let file = into.name_of("memory.pages");
    let mut copied = |still: &Still<'_>, seen: &mut Seen| {
        let (mut memory, mut paged_out, mut lifted) = (HeldMemory::default(), None, None);
        let mut place = |frozen: FrozenMemory<'_>| {
            let (threads, mut map) = (&frozen.tree.threads, frozen.map);
            // Of one that has ended CRIU writes no memory.
            let processes: Vec<(u32, u32)> =
                map.processes.keys().filter_map(|inside| Some((*inside, *threads.get(inside)?))).collect();
            let group =
                LiftedGroup::for_threads(proc, threads.len() + 2 * processes.len()).map_err(ParkError::Limits)?;
            // What a fork wipes is not for a clone.
            let images = is_kept.then_some(frozen.images);
            memory = HeldMemory::hold(still.helper, &processes, &mut map, &file, images)?;
            group.for_copies(processes.len()).map_err(ParkError::Limits)?;
            (lifted, paged_out) = (Some(group), frozen.paged_out);
            Ok(map)
        };
        let finalized = finalize(&freeze, still, seen, &mut place)?;
        fault::reach("copy-held");
        steps.files().map_err(ParkError::Copy)?;
        fault::reach("copy-files");
        Ok((finalized, memory, paged_out, lifted))
    };
    let Thawed { outcome, helper, still, .. } = frozen(&freeze, &mut copied, false)?;
    let (Finalized { body, images, pages, .. }, memory, paged_out, lifted) = outcome;
    let thawed = Instant::now();
    survey::note_ends_of(proc, memory.processes());
    let growing = kip_snapshot::growing_path(&proc.dir, generation);
    let written = (|| {
        let sums = memory.write(&growing).map_err(ParkError::Held)?;
        // The copies are the pager's too, which keeps what was paged out of them as it was.
        let mut pages = carry_over(proc, pages, paged_out, &growing, into)?;
        // Of one that is kept they are taken of what is read back.
        let file = pages.files.iter_mut().find(|known| known.name == file && !is_kept);
        file.into_iter().for_each(|file| file.sums.clone_from(&sums));
        Ok(pages)
    })();
    // The copies end with it.
    drop(helper);
    let written_after = thawed.elapsed();
    fault::reach("copy-written");
    let done = written.and_then(|pages| {
        sealed(proc, &growing, generation, &body, pages, &images, is_kept)?;
        fault::reach("copy-sealed");
        steps.generation(generation).map_err(ParkError::Copy)
    });
    tracing::debug!(proc = %proc.name, ?still, ?written_after, sealed_after = ?thawed.elapsed(), "copied");
    sweep(proc, generation);
    memory.wait_until_gone();
    drop(lifted);
    done.map(|()| CopyDone { still })
}
