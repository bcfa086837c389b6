//! When leases end, by the clock that does not jump.
//!
//! The file has the same by the clock of the machine, which goes on while no process runs. A clock
//! that was set back gives a lease its whole time at most.

use super::tables::StoredLease;
use crate::keys::LeaseId;
use crate::store::MetaLease;
use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// When a lease ends now.
pub(super) struct LeaseEnd {
    pub(super) id: LeaseId,
    /// Its whole time, and its end; none if it is gone.
    pub(super) at: Option<(Duration, Instant)>,
}

/// When each lease ends.
#[derive(Default)]
pub(super) struct Deadlines {
    by_time: BTreeSet<(Instant, LeaseId)>,
    by_lease: HashMap<LeaseId, (Duration, Instant)>,
}

impl Deadlines {
    /// The next end.
    pub(super) fn first(&self) -> Option<Instant> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// The leases whose time has come.
    pub(super) fn due(&self, now: Instant) -> Vec<LeaseId> {
        self.by_time.iter().take_while(|(at, _)| *at <= now).map(|(_, lease)| *lease).collect()
    }

    /// Takes over what was committed.
    pub(super) fn change(&mut self, ends: impl IntoIterator<Item = LeaseEnd>) {
        for LeaseEnd { id, at } in ends {
            if let Some((_, end)) = self.by_lease.remove(&id) {
                self.by_time.remove(&(end, id));
            }
            if let Some((ttl, end)) = at {
                self.by_lease.insert(id, (ttl, end));
                self.by_time.insert((end, id));
            }
        }
    }

    /// A lease that has time left.
    pub(super) fn lease(&self, id: LeaseId) -> Option<MetaLease> {
        let (ttl, end) = *self.by_lease.get(&id)?;
        let left = end.checked_duration_since(Instant::now())?;
        Some(MetaLease { id, ttl, left })
    }
}

/// The time a lease of the file has left.
pub(super) fn taken_up(id: LeaseId, stored: &StoredLease) -> LeaseEnd {
    let ttl = Duration::from_millis(stored.ttl_ms);
    let left = Duration::from_millis(stored.ends_unix_ms.saturating_sub(unix_ms())).min(ttl);
    LeaseEnd { id, at: Some((ttl, Instant::now() + left)) }
}

/// The clock of the machine.
pub(super) fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, millis)
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_was_set_back_gives_no_more_than_the_whole_time() {
        let left = |ends_unix_ms| {
            let mut all = Deadlines::default();
            all.change([taken_up(LeaseId(1), &StoredLease { ttl_ms: 10_000, ends_unix_ms })]);
            all.lease(LeaseId(1)).map(|lease| lease.left)
        };
        let near = |found: Option<Duration>, wanted: u64| {
            let found = found.expect("it has time left");
            found <= Duration::from_secs(wanted) && found > Duration::from_secs(wanted - 2)
        };
        assert!(near(left(unix_ms() + 5_000), 5));
        assert!(near(left(unix_ms() + 1_000_000), 10));
        assert_eq!(left(unix_ms() - 1), None);
    }
}
