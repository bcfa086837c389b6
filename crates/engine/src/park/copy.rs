//! Copies a proc that runs on: frozen as for a park, with its memory held by copies of its
//! processes, which is written when it runs again.

use super::take::carry_over;
use super::{Finalized, Freeze, FrozenMemory, ParkError, Seen, Still, Thawed, finalize, frozen, sealed, sweep};
use crate::host::Proc;
use crate::lifted::LiftedGroup;
use crate::survey;
use kip_copy::memory::{HeldMemory, leave_out, wiped};
use kip_pager::SWAP;
use kip_snapshot::carry::Growing;
use kip_sys::fault;
use kip_types::Generation;
use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// From so many pages on memory is copied behind a clone that runs: less is written sooner than a
/// clone is made, and all of it is read when that is woken ([`crate::plans`]).
const COPIED_BEHIND: u32 = 2048;

/// So long memory is copied for a clone only where that needs it: processors and disk are the
/// clone's until it runs.
const RUNS_WITHIN: Duration = Duration::from_millis(250);

/// What is done with a proc that is copied.
pub trait CopySteps {
    /// Its files are copied, while it stands still.
    ///
    /// # Errors
    /// In words.
    fn files(&mut self) -> Result<(), String>;

    /// Whether the generation is to outlive the machine.
    fn is_kept(&self) -> bool;

    /// Whether the copy is another proc, in which memory is zeros that a fork wipes.
    fn is_clone(&self) -> bool;

    /// Its generation is taken, which is gone afterwards, while it runs.
    ///
    /// # Errors
    /// In words.
    fn generation(&mut self, generation: Generation) -> Result<(), String>;

    /// The clone may run, while its memory is still copied: what this returns is closed when the
    /// clone runs. Of one that is copied whole before, this is not called.
    fn may_run(&mut self, done: CopyDone) -> Option<Receiver<()>>;
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
    // Both outlive a failure: the copies are to be gone before the limits are back.
    let (mut lifted, mut memory) = (None, HeldMemory::new(file.clone()));
    let mut copied = |still: &Still<'_>, seen: &mut Seen| {
        let mut paged_out = None;
        let mut place = |mut frozen: FrozenMemory<'_>| {
            let (threads, mut map) = (&frozen.tree.threads, frozen.map);
            // Of one that has ended CRIU writes no memory.
            let processes: Vec<(u32, u32)> =
                map.processes.keys().filter_map(|inside| Some((*inside, *threads.get(inside)?))).collect();
            let tasks = threads.len() + 2 * processes.len();
            let group = lifted.insert(LiftedGroup::for_threads(proc, tasks).map_err(ParkError::Limits)?);
            let wiped = wiped(frozen.images)?;
            let comes_along = if steps.is_clone() { BTreeMap::new() } else { wiped.clone() };
            memory.hold(still.helper, &processes, &mut map, &comes_along)?;
            if let Some(paged_out) = frozen.paged_out.as_mut().filter(|_| steps.is_clone()) {
                leave_out(paged_out, &wiped);
            }
            group.for_copies(processes.len()).map_err(ParkError::Limits)?;
            paged_out = frozen.paged_out;
            Ok(map)
        };
        let finalized = finalize(&freeze, still, seen, &mut place)?;
        fault::reach("copy-held");
        steps.files().map_err(ParkError::Copy)?;
        fault::reach("copy-files");
        Ok((finalized, paged_out))
    };
    let (outcome, helper, still) = match frozen(&freeze, &mut copied, false) {
        Ok(Thawed { outcome, helper, still, .. }) => (outcome, helper, still),
        Err(error) => {
            memory.wait_until_gone();
            return Err(error);
        }
    };
    let (Finalized { body, images, pages, .. }, paged_out) = outcome;
    let thawed = Instant::now();
    survey::note_ends_of(proc, memory.processes());
    let growing = kip_snapshot::growing_path(&proc.dir, generation);
    let is_behind = !is_kept && memory.pages() >= COPIED_BEHIND;
    let written = (|| {
        let fill = is_behind.then(|| memory.fill(&growing)).transpose();
        let fill = fill.map_err(|e| ParkError::Held(io::Error::other(e)))?;
        let sums = if is_behind { Vec::new() } else { memory.write(&growing).map_err(ParkError::Held)? };
        // The copies are the pager's too, which keeps what was paged out of them as it was.
        let mut pages = carry_over(proc, pages, paged_out, &growing, into)?;
        // Of one that is kept they are taken of what is read back.
        let file = pages.files.iter_mut().find(|known| known.name == file && !is_kept);
        file.into_iter().for_each(|file| file.sums.clone_from(&sums));
        Ok((pages, fill))
    })();
    // The copies end with it.
    let helper = Some(helper).filter(|_| is_behind);
    let written_after = thawed.elapsed();
    fault::reach("copy-written");
    let done = written.and_then(|(pages, fill)| {
        let sealed = sealed(proc, &growing, generation, &body, pages, &images, is_kept)?;
        fault::reach("copy-sealed");
        let filling = fill.map(|fill| proc.shared.fills.begin(&sealed.path.join(&file), fill)).transpose();
        let filling = filling.map_err(ParkError::Held)?;
        steps.generation(generation).map_err(ParkError::Copy)?;
        let Some(filling) = filling else { return Ok(()) };
        let runs = steps.may_run(CopyDone { still });
        fault::reach("copy-behind");
        let _ = runs.map(|runs| runs.recv_timeout(RUNS_WITHIN));
        let copied = filling.fill().put_all();
        copied.map_err(|e| ParkError::Copy(format!("memory that its clone needs was lost: {e}")))
    });
    drop(helper);
    tracing::debug!(proc = %proc.name, ?still, ?written_after, sealed_after = ?thawed.elapsed(), "copied");
    sweep(proc, generation);
    memory.wait_until_gone();
    drop(lifted);
    done.map(|()| CopyDone { still })
}
