//! Signals that came while CRIU took its snapshot.
//!
//! CRIU reads the signals that wait for a process first and its timers last, and timers go on
//! meanwhile: what a timer sends in between is in no image, and one that is set for once is not
//! armed any more. Whatever waits now and is not in the images is added to them. /proc says which
//! signals wait, not from where each came: that follows from the timers. Sources: sigaction(2),
//! proc_pid_status(5), timer_create(2), and CRIU's images of signals, which are siginfo_t as the
//! kernel has it.

use crate::frozen::{ClockError, Frozen};
use crate::now::Now;
use crate::timers::{Posix, Real, posix_timers, real_timer};
use kip_criu_images::fields::{core_entry, siginfo_entry, signal_queue_entry, task_core_entry, thread_core_entry};
use kip_criu_images::{CheckpointImage, CheckpointImageError, FieldValue, Malformed, Message};
use kip_sys::timer::{TimerSignal, kernel_signal_bytes};
use std::collections::BTreeMap;

/// SI_TIMER of sigaction(2).
const SI_TIMER: i32 = -2;
/// SIGKILL, SIGTRAP, SIGCONT and SIGSTOP of signal(7): no program takes them, or a tracer makes
/// them.
const NOT_THE_PROGRAMS: [u64; 4] = [9, 5, 18, 19];
/// SIGALRM.
const SIGALRM: u64 = 14;
/// A moment as it is known may be so much later than it was, nanoseconds.
const INEXACT_NS: i64 = 10_000_000;

/// Where signals wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Queue {
    /// For a thread.
    Thread(u32),
    /// For a process.
    Process(u32),
}

/// siginfo_t of what each queue lacks.
pub(crate) type Came = BTreeMap<Queue, Vec<Vec<u8>>>;

/// What is known of a queue.
#[derive(Debug, Default)]
struct Known {
    /// (number, timer that sent it) of each signal in the image.
    queued: Vec<(u64, Option<i32>)>,
    /// Signals that wait now, as bits.
    waiting: u64,
    /// Timers that send here, with the moment at which they were read.
    timers: Vec<(Posix, i64)>,
    /// The interval timer, likewise.
    real: Option<(Real, i64)>,
}

/// What a queue lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lacks {
    Timer(TimerSignal),
    Kernel(u64),
}

/// Finds out what came. `cores`: each thread's id inside, when its timers were read, and its image.
pub(crate) fn came(cores: &[(u32, i64, CheckpointImage)], frozen: &Frozen<'_>) -> Result<Came, ClockError> {
    let mut queues: BTreeMap<Queue, Known> = BTreeMap::new();
    for (thread, read_ns, image) in cores {
        let damaged = |source| CheckpointImageError::Damaged { path: image.path.clone(), source };
        let waiting = (frozen.waiting)(*thread);
        for core in &image.entries {
            if let Some(own) = core.message(core_entry::THREAD_CORE).map_err(damaged)? {
                let known = queues.entry(Queue::Thread(*thread)).or_default();
                let queue = own.message(thread_core_entry::SIGNALS_P).map_err(damaged)?;
                known.queued = queued(queue).map_err(damaged)?;
                known.waiting = waiting.own;
            }
            let Some(task) = core.message(core_entry::TC).map_err(damaged)? else { continue };
            let known = queues.entry(Queue::Process(*thread)).or_default();
            let queue = task.message(task_core_entry::SIGNALS_S).map_err(damaged)?;
            known.queued = queued(queue).map_err(damaged)?;
            known.waiting = waiting.shared;
            let Some(timers) = task.message(task_core_entry::TIMERS).map_err(damaged)? else { continue };
            known.real = real_timer(&timers).map_err(damaged)?.map(|real| (real, *read_ns));
            for timer in posix_timers(&timers).map_err(damaged)? {
                let queue = timer.thread.map_or(Queue::Process(*thread), Queue::Thread);
                queues.entry(queue).or_default().timers.push((timer, *read_ns));
            }
        }
    }
    let asked_ns = Now::read().monotonic_ns;
    let mut came = Came::new();
    for (queue, known) in queues {
        let lacks = lacks(&known, frozen.interrupted_ns, asked_ns).map_err(|signal| ClockError::Whose { signal })?;
        if !lacks.is_empty() {
            let bytes = |lacks: &Lacks| match lacks {
                Lacks::Timer(signal) => signal.bytes(),
                Lacks::Kernel(signal) => kernel_signal_bytes(*signal as i32),
            };
            came.insert(queue, lacks.iter().map(bytes).collect());
        }
    }
    Ok(came)
}

/// The signals of an image's queue.
fn queued(queue: Option<Message>) -> Result<Vec<(u64, Option<i32>)>, Malformed> {
    let word =
        |info: &[u8], at: usize| info.get(at..at + 4).map(|b| i32::from_le_bytes(b.try_into().expect("4 bytes")));
    let mut found = Vec::new();
    for entry in queue.unwrap_or_default().messages(signal_queue_entry::SIGNALS)? {
        let info = entry.bytes(siginfo_entry::SIGINFO).unwrap_or_default();
        let timer = word(info, 16).filter(|_| word(info, 8) == Some(SI_TIMER));
        found.extend(word(info, 0).map(|signal| (signal as u64, timer)));
    }
    Ok(found)
}

/// What waits and is not in the image. `interrupted_ns`: when the program stood still, or a little
/// later; `asked_ns`: when the kernel was asked what waits. The number of a signal whose timer is
/// not known.
fn lacks(known: &Known, interrupted_ns: i64, asked_ns: i64) -> Result<Vec<Lacks>, u64> {
    let mut found = Vec::new();
    for signal in (1..=64).filter(|signal| known.waiting & 1 << (signal - 1) != 0 && !NOT_THE_PROGRAMS.contains(signal))
    {
        let timers = || known.timers.iter().filter(|(timer, _)| timer.signal as u64 == signal);
        let real = known.real.as_ref().filter(|_| signal == SIGALRM);
        let in_image = known.queued.iter().any(|(number, _)| *number == signal);
        // Its timer is in the image as one that is armed, and sends it once more.
        let is_due =
            |left_ns: i64, read_ns: i64| left_ns > 0 && read_ns.saturating_add(left_ns) <= asked_ns + INEXACT_NS;
        let sent_later = timers().any(|(timer, read_ns)| is_due(timer.left_ns, *read_ns))
            || real.is_some_and(|(real, read_ns)| is_due(real.left_ns, *read_ns));
        // Between the moments at which it stood still and at which its timers were read.
        let came = |left_ns: i64, every_ns: i64, read_ns: i64| {
            // One whose first expiration is further away than its interval has not expired yet.
            let ago = every_ns - left_ns;
            left_ns > 0 && ago >= 0 && read_ns.saturating_sub(ago) >= interrupted_ns - INEXACT_NS
        };
        let lacks_timer = |timer: &Posix| !known.queued.contains(&(signal, Some(timer.id)));
        let before = found.len();
        for (timer, read_ns) in timers().filter(|(timer, _)| lacks_timer(timer)) {
            if came(timer.left_ns, timer.every_ns, *read_ns) {
                found.push(Lacks::Timer(timer.sends()));
            }
        }
        if in_image {
            // That another one came cannot be seen.
            continue;
        }
        if let Some((real, read_ns)) = real
            && real.every_ns > 0
            && (real.left_ns <= 0 || came(real.left_ns, real.every_ns, *read_ns))
        {
            found.push(Lacks::Kernel(signal));
        }
        if found.len() > before || sent_later {
            continue;
        }
        let over: Vec<&Posix> = timers().map(|(timer, _)| timer).filter(|timer| timer.left_ns <= 0).collect();
        match over[..] {
            [] => found.push(Lacks::Kernel(signal)),
            [timer] => found.push(Lacks::Timer(timer.sends())),
            _ => return Err(signal),
        }
    }
    Ok(found)
}

/// Adds to a thread's image what came; true if anything did.
pub(crate) fn add(core: &mut Message, thread: u32, came: &Came) -> Result<bool, Malformed> {
    let mut changed = false;
    let queues = [
        (Queue::Thread(thread), core_entry::THREAD_CORE, thread_core_entry::SIGNALS_P),
        (Queue::Process(thread), core_entry::TC, task_core_entry::SIGNALS_S),
    ];
    for (queue, of, field) in queues {
        let Some(signals) = came.get(&queue) else { continue };
        core.edit_messages::<Malformed>(of, |owner| {
            let mut queue = owner.message(field)?.unwrap_or_default();
            for info in signals {
                let mut entry = Message::default();
                entry.set_bytes(siginfo_entry::SIGINFO, info.clone());
                queue.0.push((signal_queue_entry::SIGNALS, FieldValue::Bytes(entry.encode())));
            }
            owner.set_bytes(field, queue.encode());
            changed = true;
            Ok(())
        })?;
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: i64 = 1_000_000;
    /// When the program stood still, its timers were read, and the kernel was asked what waits.
    const STOOD: i64 = 1_000 * MS;
    const READ: i64 = STOOD + 200 * MS;
    const LOOKED: i64 = READ + 100 * MS;

    fn timer(id: i32, signal: i32, left_ms: i64, every_ms: i64) -> (Posix, i64) {
        let (left_ns, every_ns) = (left_ms * MS, every_ms * MS);
        (Posix { id, clock: 1, signal, notifies: true, thread: None, value: 7, left_ns, every_ns }, READ)
    }

    fn real(left_ms: i64, every_ms: i64) -> Option<(Real, i64)> {
        Some((Real { left_ns: left_ms * MS, every_ns: every_ms * MS }, READ))
    }

    fn of(timer: &(Posix, i64)) -> Lacks {
        Lacks::Timer(timer.0.sends())
    }

    fn found(known: &Known) -> Result<Vec<Lacks>, u64> {
        lacks(known, STOOD, LOOKED)
    }

    #[test]
    fn what_is_in_the_image_is_not_added() {
        let waiting = 1 << (40 - 1) | 1 << (SIGALRM - 1);
        let queued = vec![(40, Some(3)), (SIGALRM, None)];
        let known = Known { queued, waiting, timers: vec![timer(3, 40, 0, 0)], real: real(0, 50) };
        assert_eq!(found(&known), Ok(vec![]));
        assert_eq!(found(&Known { waiting: 0, queued: vec![], ..known }), Ok(vec![]));
    }

    #[test]
    fn a_timer_that_was_set_for_once_is_not_taken_for_one_that_is_armed() {
        let (over, armed, other) = (timer(3, 40, 0, 0), timer(4, 40, 5_000, 0), timer(5, 41, 0, 0));
        let known = Known { waiting: 1 << (40 - 1), timers: vec![over, armed, other], ..Known::default() };
        assert_eq!(found(&known), Ok(vec![of(&over)]));
        let two = Known { timers: vec![over, timer(6, 40, 0, 0)], ..known };
        assert_eq!(found(&two), Err(40), "one of them was not armed, and it is not known which");
    }

    /// The wake lets it expire once more.
    #[test]
    fn a_timer_that_expires_after_it_was_read_is_armed_in_the_image() {
        let known = Known { waiting: 1 << (40 - 1), timers: vec![timer(3, 40, 60, 0)], ..Known::default() };
        assert_eq!(found(&known), Ok(vec![]));
        let known = Known { waiting: 1 << (SIGALRM - 1), real: real(60, 0), ..Known::default() };
        assert_eq!(found(&known), Ok(vec![]));
    }

    #[test]
    fn a_periodic_timer_is_known_by_its_phase() {
        let (came, earlier) = (timer(3, 40, 400, 500), timer(4, 40, 100, 500));
        let known = Known { waiting: 1 << (40 - 1), timers: vec![came, earlier], ..Known::default() };
        assert_eq!(found(&known), Ok(vec![of(&came)]), "100 ms ago, and 400 ms ago, before it stood still");
        let known = Known { queued: vec![(40, Some(9))], ..known };
        assert_eq!(found(&known), Ok(vec![of(&came)]), "beside another timer's");
        let over = timer(5, 40, 0, 0);
        let known = Known { queued: vec![], timers: vec![came, over], ..known };
        assert_eq!(found(&known), Ok(vec![of(&came)]), "one that is not armed is not taken for one that was");
        let (first, ever) = (timer(6, 40, 50_000, 1_000), timer(7, 40, i64::MAX / MS, 0));
        let known = Known { timers: vec![first, ever, over], ..known };
        assert_eq!(found(&known), Ok(vec![of(&over)]), "the others have not expired yet");
    }

    #[test]
    fn interval_timers_and_what_is_of_no_timer() {
        let alarm = Known { waiting: 1 << (SIGALRM - 1), ..Known::default() };
        for (left, every) in [(0, 0), (0, 500), (400, 500)] {
            let known = Known { real: real(left, every), ..Known { waiting: alarm.waiting, ..Known::default() } };
            assert_eq!(found(&known), Ok(vec![Lacks::Kernel(SIGALRM)]), "{left} of {every}");
        }
        assert_eq!(found(&alarm), Ok(vec![Lacks::Kernel(SIGALRM)]));
        let known = Known { waiting: 1 << 28 | 1 << (19 - 1) | 1 << (9 - 1), ..Known::default() };
        assert_eq!(found(&known), Ok(vec![Lacks::Kernel(29)]), "SIGIO, and neither SIGSTOP nor SIGKILL");
    }

    #[test]
    fn what_came_is_in_the_image_after_that() {
        let signal = TimerSignal { signal: 40, timer: 3, overrun: 0, value: 7 };
        let came = Came::from([
            (Queue::Thread(5), vec![signal.bytes()]),
            (Queue::Process(5), vec![kernel_signal_bytes(14), signal.bytes()]),
        ]);
        let mut core = Message::default();
        core.set_bytes(core_entry::TC, Vec::new());
        core.set_bytes(core_entry::THREAD_CORE, Vec::new());
        assert!(add(&mut core, 5, &came).unwrap() && !add(&mut core.clone(), 6, &came).unwrap());
        let all = |of, field| queued(core.message(of).unwrap().unwrap().message(field).unwrap()).unwrap();
        assert_eq!(all(core_entry::THREAD_CORE, thread_core_entry::SIGNALS_P), [(40, Some(3))]);
        assert_eq!(all(core_entry::TC, task_core_entry::SIGNALS_S), [(14, None), (40, Some(3))]);
    }
}
