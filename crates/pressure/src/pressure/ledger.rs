//! What is used and what has been promised. Pure.
//!
//! A promise is made to a wake before it begins and counts until a measurement was begun after its
//! end: from then on its memory is in what was measured. While the wake is under way only the part
//! that has not arrived yet counts beside what was measured. Where memory comes by faults, it goes
//! on arriving for a while after the wake.

use std::collections::HashMap;
use std::time::Instant;

#[derive(Debug)]
struct Promise {
    id: u64,
    bytes: u64,
    arrived: u64,
    /// From then on what has not arrived is not expected any more; none while the wake is under
    /// way.
    until: Option<Instant>,
}

impl Promise {
    fn is_kept(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| until <= now || self.arrived >= self.bytes)
    }
}

/// Figures of one moment, bytes.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    measured: u64,
    promises: Vec<Promise>,
    next: u64,
}

impl Ledger {
    /// What is used, and what will be once all promises are kept.
    pub(super) fn expected(&self) -> u64 {
        let coming = |p: &Promise| p.bytes.saturating_sub(p.arrived);
        self.measured.saturating_add(self.promises.iter().map(coming).sum())
    }

    /// Promises `bytes` if they fit below `mark`; returns by which number they are known.
    pub(super) fn promise(&mut self, bytes: u64, mark: u64) -> Option<u64> {
        if self.expected().saturating_add(bytes) > mark {
            return None;
        }
        self.next += 1;
        self.promises.push(Promise { id: self.next, bytes, arrived: 0, until: None });
        Some(self.next)
    }

    /// A wake that began without a grant has taken `bytes`.
    pub(super) fn took(&mut self, bytes: u64, now: Instant) {
        self.next += 1;
        self.promises.push(Promise { id: self.next, bytes, arrived: 0, until: Some(now) });
    }

    /// The wake has ended, one way or the other. What it was promised is expected `until` then.
    pub(super) fn end(&mut self, id: u64, until: Instant) {
        self.promises.iter_mut().filter(|p| p.id == id).for_each(|p| p.until = Some(until));
    }

    /// Wakes that have ended: a measurement that begins now has all of their memory.
    pub(super) fn ended(&self, now: Instant) -> Vec<u64> {
        self.promises.iter().filter(|p| p.is_kept(now)).map(|p| p.id).collect()
    }

    /// `used` was measured; before it, what had arrived of each promise. `ended` is what
    /// [`Ledger::ended`] was before that.
    pub(super) fn measured(&mut self, used: u64, arrived: &HashMap<u64, u64>, ended: &[u64]) {
        self.measured = used;
        self.promises.retain(|p| !ended.contains(&p.id));
        for promise in &mut self.promises {
            promise.arrived = arrived.get(&promise.id).copied().unwrap_or(promise.arrived);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    // promise pressure: what was promised counts until it has arrived and no longer; where it comes
    //   by faults, for half a second
    // held by: this,
    //   `kip_pressure::ledger::tests::what_comes_by_faults_is_expected_for_a_while`
    #[test]
    fn promises_count_until_they_are_measured() {
        let (mut ledger, now) = (Ledger::default(), Instant::now());
        ledger.measured(50, &HashMap::new(), &[]);
        let first = ledger.promise(30, 100).unwrap();
        assert_eq!(ledger.expected(), 80);
        assert_eq!(ledger.promise(30, 100), None, "110 is above the mark");
        let second = ledger.promise(20, 100).unwrap();
        // 10 of the first have arrived and are in what was measured.
        ledger.measured(60, &HashMap::from([(first, 10), (second, 0)]), &[]);
        assert_eq!(ledger.expected(), 100);
        let before = ledger.ended(now);
        ledger.end(first, now);
        ledger.measured(80, &HashMap::from([(first, 30)]), &before);
        assert_eq!(ledger.expected(), 100, "it ended after the measurement had begun");
        let before = ledger.ended(now);
        ledger.measured(80, &HashMap::new(), &before);
        assert_eq!(ledger.expected(), 100, "the second has not arrived");
        ledger.end(second, now);
        let before = ledger.ended(now);
        ledger.measured(85, &HashMap::new(), &before);
        assert_eq!(ledger.expected(), 85, "it took less than it was promised");
    }

    #[test]
    fn what_came_unasked_counts_until_it_is_measured() {
        let (mut ledger, now) = (Ledger::default(), Instant::now());
        let before = ledger.ended(now);
        ledger.took(70, now);
        assert_eq!((ledger.expected(), ledger.promise(31, 100)), (70, None));
        ledger.measured(20, &HashMap::new(), &before);
        assert_eq!(ledger.expected(), 90, "it came after the measurement had begun");
        let before = ledger.ended(now);
        ledger.measured(60, &HashMap::new(), &before);
        assert_eq!(ledger.expected(), 60);
    }

    #[test]
    fn what_comes_by_faults_is_expected_for_a_while() {
        let (mut ledger, now) = (Ledger::default(), Instant::now());
        let later = now + Duration::from_secs(1);
        let [slow, whole] = [30, 20].map(|bytes| ledger.promise(bytes, 100).unwrap());
        ledger.end(slow, later);
        ledger.end(whole, later);
        let before = ledger.ended(now);
        ledger.measured(25, &HashMap::from([(slow, 5), (whole, 20)]), &before);
        assert_eq!((ledger.expected(), ledger.ended(now)), (50, vec![whole]), "25 of the first are still to come");
        let ended = ledger.ended(later);
        ledger.measured(25, &HashMap::new(), &ended);
        assert_eq!((ledger.expected(), ended.len()), (25, 2), "it did not need them");
    }

    #[test]
    fn more_than_was_promised_is_no_credit() {
        let mut ledger = Ledger::default();
        let id = ledger.promise(10, 100).unwrap();
        ledger.measured(70, &HashMap::from([(id, 40)]), &[]);
        assert_eq!(ledger.expected(), 70);
        assert_eq!(ledger.promise(u64::MAX, 100), None);
    }
}
