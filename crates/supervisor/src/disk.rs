//! Room on the local disk: what the generations of parked procs may take together
//! (`kip up --disk`).
//!
//! One task adds them up. While they take more, the procs that were parked the longest ago are
//! archived, one after the other, by their own tasks, each of which may decline: its proc may just
//! be waking. A proc that cannot be archived is left alone for a while. Deletes nothing itself: a
//! generation goes when the store has it, as always.

use crate::registry::Registry;
use crate::task::{Handle, TaskCommand};
use kip_engine::blocking::blocking;
use kip_net::Slot;
use kip_pressure::size;
use kip_types::api::EventKind;
use kip_types::{Generation, State};
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Between checks.
const CHECK_EVERY: Duration = Duration::from_secs(1);
/// A proc that could not be archived is asked again after this.
const REFUSED: Duration = Duration::from_secs(60);

/// A parked proc's generation.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Parked<K> {
    key: K,
    /// When it was parked, milliseconds since the epoch.
    at_ms: u64,
    /// What it takes on the disk.
    bytes: u64,
    /// It is not to be asked now.
    rests: bool,
}

/// The procs to archive, in this order, so that what is left takes no more than `limit` bytes.
fn victims<K: Clone>(parked: &[Parked<K>], limit: u64) -> Vec<Parked<K>> {
    let mut taken: u64 = parked.iter().map(|one| one.bytes).sum();
    let mut by_age: Vec<&Parked<K>> = parked.iter().filter(|one| !one.rests).collect();
    by_age.sort_by_key(|one| one.at_ms);
    let mut chosen = Vec::new();
    for one in by_age {
        if taken <= limit {
            break;
        }
        taken -= one.bytes;
        chosen.push(one.clone());
    }
    chosen
}

struct Watch {
    machine: Weak<Registry>,
    limit: u64,
    /// Sealed generations do not change.
    known: HashMap<(Slot, Generation), u64>,
    rests: HashMap<Slot, Instant>,
    /// An event has told that too much is taken and no proc can be archived.
    told: bool,
}

/// Starts the task, which ends with the machine. `limit`: bytes.
pub fn watch(machine: &Arc<Registry>, limit: u64) {
    let (known, rests) = (HashMap::new(), HashMap::new());
    let watch = Watch { machine: Arc::downgrade(machine), limit, known, rests, told: false };
    tokio::spawn(watch.run());
}

impl Watch {
    async fn run(mut self) {
        loop {
            tokio::time::sleep(CHECK_EVERY).await;
            let Some(machine) = self.machine.upgrade() else { return };
            if machine.host.is_closing() {
                return;
            }
            self.check(&machine).await;
        }
    }

    async fn check(&mut self, machine: &Arc<Registry>) {
        let parked = self.parked(machine).await;
        let taken: u64 = parked.iter().map(|one| one.bytes).sum();
        if taken <= self.limit {
            self.told = false;
            return;
        }
        let state = format!("parked procs take {} of {} on disk", size(taken), size(self.limit));
        let chosen = victims(&parked, self.limit);
        if chosen.is_empty() && !self.told {
            machine.host.events.emit(
                None,
                EventKind::Pressure,
                format!("{state}, and none of them can be archived now"),
            );
            self.told = true;
        }
        for victim in chosen {
            let cause = format!("disk pressure: {state}; it slept the longest, on {}", size(victim.bytes));
            let answer = victim.key.ask(|reply| TaskCommand::ArchiveForRoom { cause, reply }).await;
            if answer.is_err() {
                // Others may be archived meanwhile, after another check.
                self.rests.insert(victim.key.proc.slot, Instant::now() + REFUSED);
                return;
            }
        }
    }

    async fn parked(&mut self, machine: &Arc<Registry>) -> Vec<Parked<Handle>> {
        let handles: Vec<Handle> = machine.all_handles();
        let found: Vec<(Handle, Generation, u64)> = handles
            .into_iter()
            .filter_map(|handle| {
                let record = handle.status.borrow().record.clone();
                let State::Parked { generation } = record.state else { return None };
                Some((handle, generation, record.last_sleep.map_or(0, |sleep| sleep.at_ms)))
            })
            .collect();
        let mut known = std::mem::take(&mut self.known);
        let (parked, known) = blocking(move || {
            let mut kept = HashMap::new();
            let mut parked = Vec::new();
            for (handle, generation, at_ms) in found {
                let key = (handle.proc.slot, generation);
                let measure = || kip_snapshot::bytes_of(&kip_snapshot::path_of(&handle.proc.dir, generation));
                let bytes = known.remove(&key).unwrap_or_else(measure);
                kept.insert(key, bytes);
                parked.push(Parked { key: handle, at_ms, bytes, rests: false });
            }
            (parked, kept)
        })
        .await;
        self.known = known;
        let now = Instant::now();
        self.rests.retain(|_, until| *until > now);
        let rested = |one: Parked<Handle>| Parked { rests: self.rests.contains_key(&one.key.proc.slot), ..one };
        parked.into_iter().map(rested).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_sleeps_the_longest_goes_first_and_no_more_than_needed() {
        let parked = |key, at_ms, bytes| Parked { key, at_ms, bytes, rests: false };
        let mut all = [parked("new", 30, 10), parked("old", 10, 5), parked("middle", 20, 10)];
        let chosen = |all: &[Parked<&'static str>], limit| -> Vec<&'static str> {
            victims(all, limit).iter().map(|one| one.key).collect()
        };
        assert_eq!(chosen(&all, 25), Vec::<&str>::new());
        assert_eq!(chosen(&all, 24), ["old"]);
        assert_eq!(chosen(&all, 20), ["old"]);
        assert_eq!(chosen(&all, 19), ["old", "middle"]);
        assert_eq!(chosen(&all, 0), ["old", "middle", "new"]);
        all[1].rests = true;
        assert_eq!(chosen(&all, 20), ["middle"]);
    }
}
