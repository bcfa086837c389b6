//! Working sets: which pages came back between two sleeps, and which are expected the next time, in
//! what order.
//!
//! A page that was installed ahead leaves no trace of whether it was used (there is no cheap
//! accessed bit), unless it was written. So that pages that are not needed fall out, they are held
//! back now and then: their bytes are at hand, a fault of some microseconds brings them, and only
//! those that the program touches stay known. A page that the program was never seen to touch (it
//! came as another's neighbour) is held back at once, any other in one of 32 sets, and if it was
//! seen to be touched again in one of [`History::HELD_BACK_ONCE_IN`]. And when the program has gone
//! on to something else (at least half as much came by faults as the set had), all that was
//! installed and not seen to be touched is held back.
//!
//! The order in which pages are needed is known of those that came by faults: a page keeps the
//! place that it had among the faults of the last wake at which it came by one.
//!
//! What is needed depends on what a wake is for: each port, timers and calls have a history of
//! their own ([`Histories`]). Their sets are kept as one, each page with the kinds of wakes that it
//! is installed at; at others it is held back.
//!
//! Prediction is pure; the bytes are [`crate::stored`]'s.

use crate::swap::PAGE;
use kip_snapshot::pages::{Expected, WorkingSet};
use std::collections::{HashMap, HashSet, VecDeque};

/// What came back between two sleeps.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SetRecord {
    /// Pages that came by faults, in their order.
    pub touched: Vec<u64>,
    /// Pages of the set that a thread waited for when the set was installed.
    pub waited: Vec<u64>,
    /// Others that were written.
    pub written: Vec<u64>,
    /// Pages that came along with these, and may be of no use.
    pub came_along: Vec<u64>,
    /// Pages of the set that was installed, which may have been of no use.
    pub from_set: Vec<u64>,
    /// How many came by faults that the set did not have, and how many it had.
    pub missed: (usize, usize),
}

impl SetRecord {
    fn pages(&self) -> impl Iterator<Item = u64> + '_ {
        [&self.touched, &self.waited, &self.written, &self.came_along, &self.from_set].into_iter().flatten().copied()
    }

    /// Pages that were touched for certain.
    fn certain(&self) -> impl Iterator<Item = u64> + '_ {
        [&self.touched, &self.waited, &self.written].into_iter().flatten().copied()
    }

    /// Whether so much came that was not in the set that this was of another use.
    fn is_elsewhere(&self) -> bool {
        self.missed.1 > 0 && self.missed.0 * 2 >= self.missed.1
    }
}

/// What is expected next.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prediction {
    /// Those first that are needed first.
    pub pages: Vec<u64>,
    /// Those of them that are kept at hand and not installed.
    pub held_back: HashSet<u64>,
}

/// How a set is predicted from the last records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Predictor {
    /// What the last one had.
    LastUse,
    /// What at least `k` of the last `n` had.
    KOfN {
        /// At least.
        k: usize,
        /// Of these.
        n: usize,
    },
    /// What any of the last `n` had.
    Union {
        /// Of these.
        n: usize,
    },
}

/// The last records of one address space, and what to expect from them.
#[derive(Debug)]
pub struct History {
    records: VecDeque<SetRecord>,
    predictor: Predictor,
    turn: u64,
    /// Pages of the records that were once touched for certain.
    confirmed: HashMap<u64, Confirmed>,
}

/// What is known of a page that was touched for certain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Confirmed {
    /// Its place in the order in which pages are needed.
    place: u16,
    /// How often that was seen.
    times: u8,
}

/// The place of one of some pages that are told in their order.
fn place(index: usize, of: usize) -> u16 {
    (index * usize::from(u16::MAX) / of.max(1)) as u16
}

impl History {
    /// The most pages of a set: a program that looked at all it has shall not wait for all of it
    /// the next time. 16 MiB.
    pub const MOST: usize = 4096;
    /// A page that was often seen to be touched is held back in one of this many sets.
    pub const HELD_BACK_ONCE_IN: u64 = 32 << (Self::OFTEN - 1);
    const OFTEN: u8 = 2;

    /// An empty one.
    pub fn new(predictor: Predictor) -> Self {
        Self { records: VecDeque::new(), predictor, turn: 0, confirmed: HashMap::new() }
    }

    /// One that goes on after its process was parked with this set.
    pub fn resumed(predictor: Predictor, set: &WorkingSet) -> Self {
        let last = SetRecord { from_set: set.pages.iter().map(|page| page.address).collect(), ..SetRecord::default() };
        let placed = |(index, page): (usize, &Expected)| {
            let place = place(index, set.pages.len());
            (page.confirmed > 0).then_some((page.address, Confirmed { place, times: page.confirmed }))
        };
        let confirmed = set.pages.iter().enumerate().filter_map(placed).collect();
        Self { records: VecDeque::from([last]), turn: set.turn, confirmed, ..Self::new(predictor) }
    }

    /// What is expected next, with what is known of it: for [`History::resumed`].
    pub fn working_set(&self, kind: &str) -> WorkingSet {
        let Prediction { mut pages, mut held_back } = self.predict();
        // What was touched the last time, and not yet often enough, is at hand.
        let known: HashSet<u64> = pages.iter().copied().collect();
        for page in self.records.front().into_iter().flat_map(SetRecord::certain) {
            if pages.len() < Self::MOST && !known.contains(&page) {
                pages.push(page);
                held_back.insert(page);
            }
        }
        let expected = |page: &u64| Expected {
            address: *page,
            confirmed: self.confirmed.get(page).map_or(0, |known| known.times),
            held_back: held_back.contains(page),
        };
        WorkingSet { kind: kind.to_owned(), turn: self.turn, pages: pages.iter().map(expected).collect() }
    }

    fn depth(&self) -> usize {
        match self.predictor {
            Predictor::LastUse => 1,
            Predictor::KOfN { n, .. } | Predictor::Union { n } => n.max(1),
        }
    }

    /// Adds what came back since the last sleep.
    pub fn push(&mut self, record: SetRecord) {
        self.records.push_front(record);
        self.records.truncate(self.depth());
        self.turn += 1;
        let known: HashSet<u64> = self.records.iter().flat_map(SetRecord::pages).collect();
        let SetRecord { touched, waited, written, .. } = &self.records[0];
        let mut see = |page: u64, place: &dyn Fn(Option<u16>) -> u16| {
            let before = self.confirmed.get(&page);
            let times = before.map_or(0, |known| known.times) + 1;
            let place = place(before.map(|known| known.place));
            self.confirmed.insert(page, Confirmed { place, times: times.min(Self::OFTEN) });
        };
        for (index, page) in touched.iter().enumerate() {
            see(*page, &|_| place(index, touched.len()));
        }
        waited.iter().for_each(|page| see(*page, &|_| 0));
        written.iter().for_each(|page| see(*page, &|before| before.unwrap_or(u16::MAX / 2)));
        self.confirmed.retain(|page, _| known.contains(page));
    }

    /// Pages that are expected next.
    pub fn predict(&self) -> Prediction {
        let least = match self.predictor {
            Predictor::KOfN { k, .. } => k.max(1).min(self.records.len().max(1)),
            _ => 1,
        };
        let mut seen: HashMap<u64, usize> = HashMap::new();
        let mut order = Vec::new();
        for page in self.records.iter().flat_map(SetRecord::pages) {
            let count = seen.entry(page).or_insert(0);
            *count += 1;
            if *count == 1 {
                order.push(page);
            }
        }
        order.retain(|page| seen[page] >= least);
        order.truncate(Self::MOST);
        let Some(last) = self.records.front() else { return Prediction::default() };
        let certain: HashSet<u64> = last.certain().collect();
        let doubted: HashSet<u64> =
            if last.is_elsewhere() { last.from_set.iter().copied().collect() } else { HashSet::new() };
        let held_back = order
            .iter()
            .copied()
            .filter(|page| !certain.contains(page) && (doubted.contains(page) || self.is_due(*page)));
        let held_back: HashSet<u64> = held_back.collect();
        order.sort_by_key(|page| (held_back.contains(page), self.confirmed.get(page).map(|known| known.place)));
        Prediction { held_back, pages: order }
    }

    fn is_due(&self, page: u64) -> bool {
        let mixed = (page / PAGE as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let turns = |known: &Confirmed| 32 << (known.times - 1);
        self.confirmed.get(&page).map(turns).is_none_or(|turns: u64| mixed % turns == self.turn % turns)
    }
}

/// The histories of one address space, by what it was woken for.
#[derive(Debug)]
pub struct Histories {
    predictor: Predictor,
    /// The newest first.
    kinds: Vec<(String, History)>,
}

/// The pages that are expected next, each once: those first that are needed first at a wake of the
/// newest kind, those last that are held back at all; each with a bit for every kind of wake that
/// it is installed at.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Expectation {
    /// The kinds.
    pub kinds: Vec<String>,
    /// Address and bits of each page.
    pub pages: Vec<(u64, u8)>,
}

impl Expectation {
    pub(crate) fn of(sets: &[WorkingSet]) -> Self {
        let mut found = Self { kinds: sets.iter().map(|set| set.kind.clone()).collect(), pages: Vec::new() };
        let mut places = HashMap::new();
        for (number, set) in sets.iter().enumerate() {
            for page in &set.pages {
                let place = *places.entry(page.address).or_insert_with(|| {
                    found.pages.push((page.address, 0));
                    found.pages.len() - 1
                });
                found.pages[place].1 |= u8::from(!page.held_back) << number;
            }
        }
        found.pages.sort_by_key(|(_, bits)| *bits == 0);
        found
    }
}

impl Histories {
    /// Kinds that are kept apart; the one that has not come for longest makes place.
    pub const MOST: usize = 8;

    /// None.
    pub fn new(predictor: Predictor) -> Self {
        Self { predictor, kinds: Vec::new() }
    }

    /// Those of a process that was parked with these sets.
    pub fn resumed(predictor: Predictor, sets: &[WorkingSet]) -> Self {
        let resume = |set: &WorkingSet| (set.kind.clone(), History::resumed(predictor, set));
        Self { predictor, kinds: sets.iter().take(Self::MOST).map(resume).collect() }
    }

    /// Adds what came back since a wake of this kind.
    pub fn push(&mut self, kind: &str, record: SetRecord) {
        let known = self.kinds.iter().position(|(known, _)| known == kind).map(|place| self.kinds.remove(place));
        let (kind, mut history) = known.unwrap_or_else(|| (kind.to_owned(), History::new(self.predictor)));
        history.push(record);
        self.kinds.insert(0, (kind, history));
        self.kinds.truncate(Self::MOST);
    }

    /// The sets of all kinds.
    pub fn working_sets(&self) -> Vec<WorkingSet> {
        self.kinds.iter().map(|(kind, history)| history.working_set(kind)).collect()
    }

    /// What is expected next.
    pub fn expect(&self) -> Expectation {
        Expectation::of(&self.working_sets())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(list: &[u64]) -> Vec<u64> {
        list.iter().map(|p| p * PAGE as u64).collect()
    }

    fn history(predictor: Predictor, records: &[&[u64]]) -> Vec<u64> {
        let mut history = History::new(predictor);
        records.iter().for_each(|r| history.push(SetRecord { touched: pages(r), ..SetRecord::default() }));
        history.predict().pages
    }

    /// Uses a set as a program does that needs the pages `useful`.
    fn used(history: &mut History, useful: &[u64]) {
        let Prediction { pages, held_back } = history.predict();
        let needs = |page: &&u64| useful.contains(page) && (held_back.contains(page) || !pages.contains(page));
        let touched = useful.iter().filter(needs).copied().collect();
        let from_set = pages.into_iter().filter(|page| !held_back.contains(page)).collect();
        history.push(SetRecord { touched, from_set, ..SetRecord::default() });
    }

    #[test]
    fn predictors_count_records_and_keep_the_order() {
        let records: [&[u64]; 3] = [&[1, 2], &[3, 2], &[4, 2, 3]];
        assert_eq!(history(Predictor::LastUse, &records), pages(&[4, 2, 3]));
        assert_eq!(history(Predictor::KOfN { k: 2, n: 3 }, &records), pages(&[2, 3]));
        assert_eq!(history(Predictor::Union { n: 2 }, &records), pages(&[4, 2, 3]));
        assert_eq!(history(Predictor::Union { n: 3 }, &records), pages(&[4, 1, 2, 3]), "1 was needed first, too");
        assert_eq!(history(Predictor::KOfN { k: 2, n: 3 }, &records[..1]), pages(&[1, 2]), "one record is all we know");
        assert_eq!(history(Predictor::LastUse, &[]), Vec::<u64>::new());
    }

    #[test]
    fn pages_of_no_use_fall_out_and_others_stay() {
        let mut history = History::new(Predictor::LastUse);
        let (useful, useless) = (pages(&(0..50).collect::<Vec<_>>()), pages(&(100..150).collect::<Vec<_>>()));
        history.push(SetRecord { touched: useful.iter().chain(&useless).copied().collect(), ..SetRecord::default() });
        (0..=History::HELD_BACK_ONCE_IN).for_each(|_| used(&mut history, &useful));
        let set = history.predict().pages;
        assert!(useless.iter().all(|p| !set.contains(p)));
        assert!(useful.iter().all(|p| set.contains(p)));
    }

    // promise P9: what is of no use falls out at the next sleep, or within 32 if it once was
    // held by: this, `kip_pager::set::tests::pages_of_no_use_fall_out_and_others_stay`,
    //   `kip_pager::set::tests::a_set_of_another_use_is_held_back_at_once`
    #[test]
    fn neighbours_that_nobody_touches_fall_out_soon() {
        let mut history = History::new(Predictor::LastUse);
        let (useful, neighbours) = (pages(&(0..50).collect::<Vec<_>>()), pages(&(100..400).collect::<Vec<_>>()));
        history.push(SetRecord { touched: useful.clone(), came_along: neighbours.clone(), ..SetRecord::default() });
        assert!(neighbours.iter().all(|p| history.predict().held_back.contains(p)));
        used(&mut history, &useful);
        let set = history.predict();
        assert!(neighbours.iter().all(|p| !set.pages.contains(p)));
        assert!(useful.iter().all(|p| set.pages.contains(p)) && set.held_back.len() < 25);
    }

    #[test]
    fn those_first_that_are_needed_first() {
        let mut history = History::new(Predictor::LastUse);
        history.push(SetRecord { touched: pages(&[9, 5, 7, 1]), came_along: pages(&[8]), ..SetRecord::default() });
        assert_eq!(history.predict().pages, pages(&[9, 5, 7, 1, 8]));
        let record = SetRecord { waited: pages(&[1]), from_set: pages(&[9, 5, 7]), ..SetRecord::default() };
        history.push(SetRecord { written: pages(&[3]), ..record });
        let place = |page: u64| history.predict().pages.iter().position(|p| *p == page * PAGE as u64);
        assert!(place(1) < place(5) && place(5) < place(7), "1 is waited for: it comes sooner");
        let sets = [history.working_set("")];
        let again = History::resumed(Predictor::LastUse, &sets[0]);
        assert_eq!(again.working_set(""), sets[0]);
    }

    #[test]
    fn a_set_of_another_use_is_held_back_at_once() {
        let mut history = History::new(Predictor::LastUse);
        let (old, new) = (pages(&(0..50).collect::<Vec<_>>()), pages(&(100..150).collect::<Vec<_>>()));
        history.push(SetRecord { touched: old.clone(), ..SetRecord::default() });
        history.push(SetRecord {
            touched: new.clone(),
            from_set: old.clone(),
            missed: (50, 50),
            ..SetRecord::default()
        });
        let set = history.predict();
        assert!(old.iter().all(|p| set.held_back.contains(p)));
        assert!(new.iter().all(|p| set.pages.contains(p) && !set.held_back.contains(p)));
        history.push(SetRecord {
            touched: old[..4].to_vec(),
            from_set: new.clone(),
            missed: (4, 50),
            ..SetRecord::default()
        });
        assert!(history.predict().held_back.len() < 25, "a little that is new says nothing");
    }

    #[test]
    fn what_is_known_of_a_set_outlives_parking() {
        let mut history = History::new(Predictor::LastUse);
        history.push(SetRecord { touched: pages(&[1, 2]), came_along: pages(&[3]), ..SetRecord::default() });
        let set = history.working_set("tcp 80");
        assert_eq!(set.pages.iter().map(|p| p.confirmed).collect::<Vec<_>>(), [1, 1, 0]);
        let again = History::resumed(Predictor::LastUse, &set);
        let confirmed = |history: &History| history.confirmed.keys().copied().collect::<HashSet<_>>();
        assert_eq!((again.turn, confirmed(&again)), (history.turn, confirmed(&history)));
        let order = |history: &History| Expectation::of(&[history.working_set("")]);
        assert_eq!(order(&again), order(&history));
    }

    #[test]
    fn what_was_touched_too_rarely_is_at_hand() {
        let mut history = History::new(Predictor::KOfN { k: 2, n: 3 });
        let touched = |list: &[u64]| SetRecord { touched: pages(list), ..SetRecord::default() };
        history.push(touched(&[1, 2]));
        history.push(touched(&[2, 3]));
        let told = |history: &History| -> Vec<(u64, bool)> {
            history.working_set("").pages.iter().map(|p| (p.address / PAGE as u64, p.held_back)).collect()
        };
        assert_eq!(told(&history), [(2, false), (3, true)]);
        let mut again = History::resumed(Predictor::KOfN { k: 2, n: 3 }, &history.working_set(""));
        again.push(SetRecord { touched: pages(&[3]), from_set: pages(&[2]), ..SetRecord::default() });
        assert_eq!(told(&again), [(3, false), (2, false)], "it is learned although it was parked meanwhile");
    }

    #[test]
    fn each_kind_of_wake_has_a_set_of_its_own() {
        let mut histories = Histories::new(Predictor::LastUse);
        let touched = |list: &[u64]| SetRecord { touched: pages(list), ..SetRecord::default() };
        histories.push("tcp 80", touched(&[1, 2]));
        histories.push("timer", touched(&[2, 3]));
        let Expectation { kinds, pages: expected } = histories.expect();
        assert_eq!(kinds, ["timer", "tcp 80"]);
        let bits: Vec<(u64, u8)> = expected.iter().map(|(page, bits)| (page / PAGE as u64, *bits)).collect();
        assert_eq!(bits, [(2, 0b11), (3, 0b01), (1, 0b10)]);
        histories.push("tcp 80", touched(&[4]));
        assert_eq!(histories.expect().kinds, ["tcp 80", "timer"], "the newest first");
        (0..20).for_each(|n| histories.push(&format!("tcp {n}"), touched(&[n])));
        assert_eq!(histories.expect().kinds.len(), Histories::MOST);
    }
}
