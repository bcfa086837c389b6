//! What happened, for `kip events`: a ring of the newest, a channel for clients that follow, and a
//! file from which the next daemon has them again.
//!
//! [`file`] owns the file. An event reaches it by a thread of its own: no proc waits for the disk.
//! A crash of the daemon loses those of the last moment, one of the machine what the kernel had not
//! written.

mod file;

use file::EventWriter;
use kip_sys::clock::now_ms;
use kip_types::ProcName;
use kip_types::api::{Event, EventKind};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::path::Path;
use tokio::sync::broadcast;

/// Events that are kept for later readers.
const KEPT: usize = 4096;

/// The machine's events.
#[derive(Debug)]
pub struct Events {
    kept: Mutex<VecDeque<Event>>,
    /// The id of this daemon's first one: larger than those of earlier daemons.
    first_id: u64,
    live: broadcast::Sender<Event>,
    /// None where they are kept in memory alone.
    writer: Option<EventWriter>,
}

impl Default for Events {
    fn default() -> Events {
        Events::after(VecDeque::new(), None)
    }
}

impl Events {
    /// With those that earlier daemons of a data directory left there. What cannot be read or
    /// written is logged: events are never a reason not to run.
    pub fn open(data: &Path) -> Events {
        Events::after(file::read(data, KEPT), EventWriter::start(data))
    }

    fn after(kept: VecDeque<Event>, writer: Option<EventWriter>) -> Events {
        // Larger also if the clock went back, or if there were more than a thousand each
        // millisecond.
        let first_id = kept.back().map_or(0, |newest| newest.id + 1).max(now_ms() * 1000);
        Events { kept: Mutex::new(kept), first_id, live: broadcast::Sender::new(1024), writer }
    }

    /// Keeps an event and sends it to all clients that follow.
    pub fn emit(&self, name: Option<&ProcName>, kind: EventKind, detail: impl Into<String>) {
        let detail = detail.into();
        tracing::info!(name = name.map(ProcName::as_str), kind = kind.as_ref(), detail, "event");
        let mut kept = self.kept.lock();
        let id = kept.back().map_or(self.first_id, |newest| (newest.id + 1).max(self.first_id));
        let event = Event { id, at_ms: now_ms(), name: name.cloned(), kind, detail };
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back(event.clone());
        if let Some(writer) = &self.writer {
            writer.write(event.clone());
        }
        // Sent under the lock, so that `subscribe` neither misses nor repeats one.
        let _ = self.live.send(event);
    }

    /// Writes what is still to be written. What is emitted after that is kept in memory alone.
    pub fn close(&self) {
        if let Some(writer) = &self.writer {
            writer.close();
        }
    }

    /// Whether this daemon emitted it: what an earlier one said may be of another proc of that
    /// name.
    fn is_own(&self, event: &Event) -> bool {
        event.id >= self.first_id
    }

    /// What the newest event of that kind says of a proc, of those that this daemon emitted.
    pub fn last_detail(&self, name: &ProcName, kind: &EventKind) -> Option<String> {
        let kept = self.kept.lock();
        let same = |e: &&Event| self.is_own(e) && &e.kind == kind && e.name.as_ref() == Some(name);
        kept.iter().rev().find(same).map(|e| e.detail.clone())
    }

    /// How many of `kind` this daemon emitted in the minute before `now_ms`. If a full ring does
    /// not reach back that far: as many as there would have been at its pace.
    pub fn per_minute(&self, kind: &EventKind, now_ms: u64) -> u64 {
        const MINUTE_MS: u64 = 60_000;
        let kept = self.kept.lock();
        let begin = now_ms.saturating_sub(MINUTE_MS);
        let counted = |e: &&Event| self.is_own(e) && &e.kind == kind && e.at_ms >= begin;
        let count = kept.iter().filter(counted).count() as u64;
        let span = kept.front().filter(|_| kept.len() == KEPT).map_or(MINUTE_MS, |e| now_ms.saturating_sub(e.at_ms));
        if span >= MINUTE_MS { count } else { count * MINUTE_MS / span.max(1) }
    }

    /// Those that are kept and come after the one with id `since`, and a receiver of all that
    /// follow.
    pub fn subscribe(&self, since: u64) -> (Vec<Event>, broadcast::Receiver<Event>) {
        let kept = self.kept.lock();
        (kept.iter().filter(|event| event.id > since).cloned().collect(), self.live.subscribe())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(events: impl Iterator<Item = (u64, EventKind)>) -> Events {
        let all = Events { first_id: 0, ..Events::default() };
        let event = |(at_ms, kind): (u64, EventKind)| Event {
            id: at_ms,
            at_ms,
            name: "web".parse().ok(),
            kind,
            detail: String::new(),
        };
        all.kept.lock().extend(events.map(event));
        all
    }

    #[test]
    fn wakes_of_the_last_minute_are_counted() {
        let few = filled(
            [
                (1_000, EventKind::Woken),
                (90_000, EventKind::Woken),
                (95_000, EventKind::Parked),
                (100_000, EventKind::Woken),
            ]
            .into_iter(),
        );
        assert_eq!(few.per_minute(&EventKind::Woken, 110_000), 2);
    }

    #[test]
    fn who_comes_back_misses_nothing_and_hears_nothing_twice() {
        let events = Events::default();
        (0..5).for_each(|n| events.emit(None, EventKind::Ready, n.to_string()));
        let (all, _) = events.subscribe(0);
        assert!(all.windows(2).all(|two| two[1].id == two[0].id + 1));
        let (rest, mut live) = events.subscribe(all[2].id);
        assert_eq!(rest.iter().map(|e| e.id).collect::<Vec<_>>(), [all[3].id, all[4].id]);
        events.emit(None, EventKind::Ready, "later");
        assert_eq!(live.try_recv().unwrap().id, all[4].id + 1);
    }

    #[test]
    fn a_ring_that_is_too_short_is_extrapolated() {
        let storm = filled((0..KEPT as u64).map(|n| (1_000_000 + n * 10, EventKind::Woken)));
        let rate = storm.per_minute(&EventKind::Woken, 1_000_000 + KEPT as u64 * 10);
        assert!((5_990..=6_010).contains(&rate), "{rate}");
    }

    #[test]
    fn the_next_daemon_has_those_of_the_one_before() {
        let dir = tempfile::tempdir().unwrap();
        let web: ProcName = "web".parse().unwrap();
        let first = Events::open(dir.path());
        (0..3).for_each(|n| first.emit(Some(&web), EventKind::Refused, n.to_string()));
        first.close();
        let second = Events::open(dir.path());
        let (kept, _) = second.subscribe(0);
        assert_eq!(kept.iter().map(|e| e.detail.as_str()).collect::<Vec<_>>(), ["0", "1", "2"]);
        assert_eq!(second.last_detail(&web, &EventKind::Refused), None, "an earlier daemon's proc");
        second.emit(Some(&web), EventKind::Refused, "3");
        let (kept, _) = second.subscribe(kept[2].id);
        assert_eq!(kept.iter().map(|e| e.detail.as_str()).collect::<Vec<_>>(), ["3"]);
        assert_eq!(second.last_detail(&web, &EventKind::Refused).as_deref(), Some("3"));
        assert_eq!(second.per_minute(&EventKind::Refused, now_ms()), 1);
    }
}
