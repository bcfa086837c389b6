//! The end of a dump: every thread back onto its call, everything that is due noted.

use crate::calls::{self, WaitingThreads};
use crate::due::{Due, Source};
use crate::frozen::{ClockError, Frozen};
use crate::noted::Clocks;
use crate::now::Now;
use crate::{signals, timers};
use kip_criu_images::fields::{core_entry, thread_core_entry, thread_info_x86};
use kip_criu_images::processes::{has_own_filters, stopped_threads};
use kip_criu_images::{CheckpointImageError, Images, Malformed, Message};

/// Mends registers, points relative time-outs at our own, and finds out what is due when. Run once
/// at the end of a dump, every task stopped.
pub fn finalize(
    images: &mut Images,
    now: Now,
    since: &WaitingThreads,
    frozen: &Frozen<'_>,
) -> Result<Clocks, ClockError> {
    let frozen = &Frozen { own_filters: has_own_filters(images)?, ..*frozen };
    let (ahead_ns, stands) = (frozen.ahead_ns, frozen.stands);
    let absolute = frozen.absolute.clone();
    let mut clocks = Clocks { frozen_ns: now.monotonic_ns, ahead_ns, stands, absolute, ..Clocks::default() };
    let stopped = stopped_threads(images)?;
    let (mut busy, mut arrived) = (false, frozen.arrived);
    let read = |(thread, name): (u32, String)| {
        let read_ns = (frozen.timers_read_ns)(thread).unwrap_or_else(|| timers::read_at(images, &name, now));
        Ok::<_, CheckpointImageError>((thread, read_ns, images.image(&name)?))
    };
    let mut cores = images.numbered("core").into_iter().map(read).collect::<Result<Vec<_>, _>>()?;
    let came = signals::came(&cores, frozen)?;
    for (thread, read_ns, image) in &mut cores {
        let thread = *thread;
        let damaged = image.damaged();
        let (mut changed, mut works) = (false, false);
        for core in &mut image.entries {
            core.edit_messages::<Malformed>(core_entry::THREAD_INFO, |info| {
                info.edit_messages::<Malformed>(thread_info_x86::GPREGS, |regs| {
                    let since = since.get(&thread).copied();
                    let before = clocks.dues.len();
                    let found = calls::finalize_thread(thread, regs, now, since, frozen, &mut clocks);
                    if stopped.contains(&thread) {
                        // The time-out of its call passes, and it stands still all the same.
                        clocks.dues.truncate(before);
                    }
                    changed |= found.changed;
                    if found.waits && !stopped.contains(&thread) {
                        clocks.standing.insert(thread);
                    }
                    works = !found.waits && !found.ticks && !stopped.contains(&thread);
                    Ok(())
                })
            })
            .map_err(&damaged)?;
            if works && clocks.at_work.is_none() {
                clocks.at_work = Some((thread, name_of(core).map_err(&damaged)?));
            }
            busy |= works;
            changed |= timers::arm_pending(core).map_err(&damaged)?;
            changed |= signals::add(core, thread, &came).map_err(&damaged)?;
            if timers::collect(core, *read_ns, &mut arrived, &mut clocks.dues).map_err(&damaged)? {
                clocks.read_ns.insert(thread, *read_ns);
            }
        }
        if changed {
            images.put(image);
        }
    }
    clocks.absolute.keep(|thread| cores.iter().any(|(core, _, _)| *core == thread));
    timers::finalize_timerfds(images, frozen, &mut clocks)?;
    if busy || arrived != 0 || !frozen.quiescent {
        // A client may be waiting for what the program was about to do, and would wait until
        // something else wakes the proc.
        clocks.dues.push(Due { source: Source::Work, at_ns: now.monotonic_ns, every_ns: None, monotonic: false });
    }
    for (_, name) in images.numbered("timens") {
        images.remove(&name);
    }
    Ok(clocks)
}

/// The name of the thread of a core image, as pthread_setname_np(3) set it.
fn name_of(core: &Message) -> Result<String, Malformed> {
    let thread = core.message(core_entry::THREAD_CORE)?.unwrap_or_default();
    Ok(thread.string(thread_core_entry::COMM).unwrap_or_default().trim_end_matches('\0').to_owned())
}
