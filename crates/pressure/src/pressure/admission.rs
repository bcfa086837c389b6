//! When a wake may begin, and whether a new proc may be started.
//!
//! Wakes queue twice, in the order in which they are due: for one of the places of wakes under way,
//! then for room in memory. A client's wake is due when the client came. The wake that has the turn
//! for room keeps all others waiting, for at most [`ROOM_WITHIN`]; otherwise small wakes would
//! starve a large one. A wait that is given up (its future dropped) leaves nothing behind.

use super::line::Place;
use super::{Books, Pass, Pressure, size};
use kip_sandbox::cgroup::Cgroup;
use kip_types::ProcName;
use kip_types::api::{Code, Refusal};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// Wakes under way at the same time, per core: one may wait for the disk while another works.
pub(super) const WAKES_PER_CORE: usize = 2;
/// How long relief has to make room for one.
pub const ROOM_WITHIN: Duration = Duration::from_secs(2);
/// Between looks for room while relief is at work.
const POLL_EVERY: Duration = Duration::from_millis(50);

/// How much work a wake is, its memory aside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// A tree is built.
    Much,
    /// A set of pages is installed: none of the places of wakes under way is needed, and nothing is
    /// measured as long as the newest figures leave a margin.
    Hardly,
}

/// A hibernated proc that wakes touches most of the memory that it needs within this time.
const FAULTS_FOR: Duration = Duration::from_millis(500);

/// What a wake takes.
#[derive(Debug, Clone)]
pub struct Need {
    /// Memory that is to come, bytes.
    pub bytes: u64,
    /// Memory that was there before, bytes.
    pub there: u64,
    /// Where both will show.
    pub group: Cgroup,
    /// Beside that.
    pub work: Work,
}

/// There is no room for a wake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Short {
    /// What it takes, bytes.
    pub needs: u64,
    /// What is used, bytes.
    pub used: u64,
    /// The most that may be used, bytes.
    pub last_resort: u64,
}

impl Short {
    /// As a refusal of `what`, for example `web cannot be woken`.
    pub fn refusal(&self, what: &str, pressure: &Pressure) -> Refusal {
        let marks = &pressure.marks;
        let all = marks.limit_words();
        let (needs, used, most) = (size(self.needs), size(self.used), size(self.last_resort));
        let share = marks.last_resort_percent();
        let advice = match (self.needs > self.last_resort, marks.whole_machine) {
            (true, _) => "give `kip up` more --memory",
            (false, true) => "end something on this machine, or stop procs that never sleep",
            (false, false) => "stop procs that never sleep, or give `kip up` more --memory",
        };
        let who = marks.who();
        let most = format!("no more than {most} ({share}% of {all}) may be used");
        Refusal::new(Code::Exhausted, format!("{what}: it needs {needs}, {who} {used}, and {most}; {advice}"))
    }
}

/// Leave to wake. To be kept until the wake has ended.
#[derive(Debug)]
pub struct Grant {
    pressure: Arc<Pressure>,
    promise: u64,
    /// It was not given at once.
    pub was_queued: bool,
    /// What was promised is expected for so long after the wake.
    linger: Duration,
    _place: Option<Place>,
}

impl Drop for Grant {
    fn drop(&mut self) {
        let until = std::time::Instant::now() + self.linger;
        self.pressure.books().ledger.end(self.promise, until);
    }
}

/// While one lives, relief knows what is needed.
struct Wanted<'a>(&'a AtomicU64, u64);

impl<'a> Wanted<'a> {
    fn add(sum: &'a AtomicU64, bytes: u64) -> Wanted<'a> {
        sum.fetch_add(bytes, Ordering::SeqCst);
        Wanted(sum, bytes)
    }
}

impl Drop for Wanted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::SeqCst);
    }
}

impl Books {
    fn promise(&mut self, need: &Need, mark: u64) -> Option<u64> {
        let id = self.ledger.promise(need.bytes, mark)?;
        self.waking.insert(id, (need.group.clone(), need.there));
        Some(id)
    }
}

impl Pressure {
    /// Promises room for `need` below `mark`. Measures for each: figures of even a second ago would
    /// let two large programs in where there is room for one, and reading new ones costs some 50
    /// microseconds. That is too long for a proc that wakes within a millisecond: below the low
    /// mark, the figures of relief's last look do.
    fn promise(&self, need: &Need, mark: u64) -> Option<u64> {
        let known = match need.work {
            Work::Hardly => self.books().promise(need, self.marks.low_bytes()),
            Work::Much => None,
        };
        known.or_else(|| {
            self.measure();
            self.books().promise(need, mark)
        })
    }

    fn grant(self: &Arc<Pressure>, need: &Need, promise: u64, place: Option<Place>, was_queued: bool) -> Grant {
        let linger = match need.work {
            Work::Much => Duration::ZERO,
            Work::Hardly => FAULTS_FOR,
        };
        Grant { pressure: Arc::clone(self), promise, was_queued, linger, _place: place }
    }

    /// Leave to wake at once; none if others wait or there is no room.
    pub fn try_admit(self: &Arc<Pressure>, need: &Need) -> Option<Grant> {
        let place = match need.work {
            Work::Much => Some(self.at_once.try_enter()?),
            Work::Hardly => None,
        };
        let _turn = self.turn.try_enter()?;
        let promise = self.promise(need, self.marks.high_bytes())?;
        Some(self.grant(need, promise, place, false))
    }

    /// Leave to wake, when it is its turn and relief has done what it can within [`ROOM_WITHIN`].
    /// `due`: when the timer is due or the client came that the wake is for.
    pub async fn admit(self: Arc<Pressure>, need: Need, due: std::time::Instant) -> Result<Grant, Short> {
        let last_resort = self.marks.last_resort_bytes();
        if need.bytes > last_resort {
            self.refused_wakes.fetch_add(1, Ordering::Relaxed);
            return Err(Short { needs: need.bytes, used: self.measure(), last_resort });
        }
        let _wanted = Wanted::add(&self.wanted, need.bytes);
        let place = self.at_once.enter(due).await;
        let _turn = self.turn.enter(due).await;
        let mut passes = self.passes.subscribe();
        let begun = passes.borrow_and_update().number;
        let _first = Wanted::add(&self.first, need.bytes);
        let until = Instant::now() + ROOM_WITHIN;
        loop {
            if let Some(promise) = self.promise(&need, self.marks.high_bytes()) {
                return Ok(self.grant(&need, promise, Some(place), true));
            }
            let last: Pass = *passes.borrow_and_update();
            // A pass that was under way when the wish was made may not have seen it.
            if Instant::now() >= until || (last.hopeless && last.number > begun + 1) {
                break;
            }
            self.asked.notify_one();
            let _ = tokio::time::timeout(POLL_EVERY, passes.changed()).await;
        }
        match self.promise(&need, last_resort) {
            Some(promise) => Ok(self.grant(&need, promise, Some(place), true)),
            None => {
                self.refused_wakes.fetch_add(1, Ordering::Relaxed);
                Err(Short { needs: need.bytes, used: self.books().ledger.expected(), last_resort })
            }
        }
    }

    /// Returns after `pause`, or sooner when relief sees room for `need` that was not there before.
    pub async fn pause(&self, need: &Need, pause: Duration) {
        let mut passes = self.passes.subscribe();
        let most = self.marks.high_bytes();
        let room = |pass: &Pass| pass.number > 0 && pass.used.saturating_add(need.bytes) <= most;
        // What was seen last is from before the try that failed.
        passes.mark_unchanged();
        let seen = async { while passes.changed().await.is_ok() && !room(&passes.borrow_and_update()) {} };
        let _ = tokio::time::timeout(pause, seen).await;
    }

    /// Whether another proc may be started: not above the high mark, once relief has done what it
    /// can.
    pub async fn admit_new(&self, name: &ProcName) -> Result<(), Refusal> {
        let mut passes = self.passes.subscribe();
        let begun = passes.borrow_and_update().number;
        let until = Instant::now() + ROOM_WITHIN;
        loop {
            let used = self.measure_for_new();
            if used <= self.marks.high_bytes() {
                return Ok(());
            }
            let last: Pass = *passes.borrow_and_update();
            if Instant::now() >= until || (last.hopeless && last.number > begun + 1) {
                let advice = match self.marks.whole_machine {
                    true => "stop procs, or end something else on this machine",
                    false => "stop procs that are not needed, or give `kip up` more --memory",
                };
                self.refused_starts.fetch_add(1, Ordering::Relaxed);
                let state = self.above_high(used);
                return Err(Refusal::new(Code::Exhausted, format!("{name} cannot start: {state}; {advice}")));
            }
            self.asked.notify_one();
            let _ = tokio::time::timeout(POLL_EVERY, passes.changed()).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::MemoryMarks;
    use super::*;
    use kip_sandbox::cgroup::Cgroups;

    /// No relief runs for it, and its procs use nothing but what is promised.
    fn pressure(limit: u64) -> (Arc<Pressure>, impl Fn(u64) -> Need) {
        let marks = MemoryMarks { limit_bytes: limit, high_percent: 90, low_percent: 80, whole_machine: false };
        let groups = Cgroups::detect().unwrap();
        let none = groups.open("kip-test-of-pressure");
        let group = groups.open("kip-test-of-pressure/proc");
        (Pressure::new(marks, none), move |bytes| Need { bytes, there: 0, group: group.clone(), work: Work::Much })
    }

    fn report_pass(pressure: &Pressure, hopeless: bool) {
        pressure.passes.send_modify(|p| *p = Pass { number: p.number + 1, used: 0, hopeless });
    }

    #[tokio::test]
    async fn room_is_promised_up_to_the_high_mark_at_once_and_to_the_last_resort_after_a_wait() {
        let (pressure, need) = pressure(1000);
        let first = pressure.try_admit(&need(880)).unwrap();
        assert!(pressure.try_admit(&need(30)).is_none());
        let begun = Instant::now();
        let second = Arc::clone(&pressure).admit(need(30), std::time::Instant::now()).await.unwrap();
        assert!(begun.elapsed() >= ROOM_WITHIN);
        let short = Arc::clone(&pressure).admit(need(80), std::time::Instant::now()).await.unwrap_err();
        assert_eq!(short, Short { needs: 80, used: 910, last_resort: 980 });
        assert_eq!(pressure.wanted.load(Ordering::SeqCst), 0);
        drop((first, second));
        assert!(pressure.try_admit(&need(900)).is_some(), "what was promised is given back");
    }

    #[tokio::test]
    async fn it_waits_until_there_is_room_and_not_at_all_without_hope() {
        let (pressure, need) = pressure(1000);
        let first = pressure.try_admit(&need(900)).unwrap();
        let begun = Instant::now();
        let waiting = tokio::spawn(Arc::clone(&pressure).admit(need(900), std::time::Instant::now()));
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(pressure.wanted.load(Ordering::SeqCst), 900);
        drop(first);
        let second = waiting.await.unwrap().unwrap();
        assert!(begun.elapsed() < ROOM_WITHIN);
        let hopeless = tokio::spawn(Arc::clone(&pressure).admit(need(900), std::time::Instant::now()));
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_millis(10)).await;
            report_pass(&pressure, true);
        }
        hopeless.await.unwrap().unwrap_err();
        assert!(begun.elapsed() < ROOM_WITHIN);
        drop(second);
    }

    #[tokio::test]
    async fn a_pause_ends_when_there_is_room() {
        let (pressure, need) = pressure(1000);
        let see = |used| pressure.passes.send_modify(|p| *p = Pass { number: p.number + 1, used, hopeless: false });
        see(0);
        let begun = Instant::now();
        pressure.pause(&need(100), Duration::from_millis(20)).await;
        assert!(begun.elapsed() >= Duration::from_millis(20), "that was seen before");
        let need = need(100);
        let mut long = std::pin::pin!(pressure.pause(&need, Duration::from_secs(600)));
        let soon = Duration::from_millis(20);
        assert!(tokio::time::timeout(soon, &mut long).await.is_err());
        see(801);
        assert!(tokio::time::timeout(soon, &mut long).await.is_err());
        see(800);
        long.await;
    }

    // promise pressure: wakes that queue begin in the order in which they are due
    // held by: this, `kip_pressure::pressure::line::tests::the_one_that_is_due_first_comes_first`
    #[tokio::test]
    async fn what_is_due_first_is_served_first() {
        let (pressure, need) = pressure(1000);
        let first = pressure.try_admit(&need(800)).unwrap();
        let order = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let mut waiting = Vec::new();
        let now = std::time::Instant::now();
        // The first of them has its turn already when the last comes.
        for (n, bytes, due) in [(0, 500, 2), (2, 10, 9), (1, 20, 5)] {
            let due = now + Duration::from_secs(due);
            let (pressure, need, order) = (Arc::clone(&pressure), need(bytes), Arc::clone(&order));
            waiting.push(tokio::spawn(async move {
                let grant = pressure.admit(need, due).await;
                order.lock().push(n);
                grant
            }));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(pressure.try_admit(&need(10)).is_none(), "the small one waits behind the large one");
        drop(first);
        for task in waiting {
            task.await.unwrap().unwrap();
        }
        assert_eq!(*order.lock(), [0, 1, 2]);
    }

    #[tokio::test]
    async fn who_gives_up_leaves_nothing_behind() {
        let (pressure, need) = pressure(1000);
        let first = pressure.try_admit(&need(900)).unwrap();
        let gone = tokio::time::timeout(
            Duration::from_millis(10),
            Arc::clone(&pressure).admit(need(900), std::time::Instant::now()),
        )
        .await;
        assert!(gone.is_err());
        assert_eq!(pressure.wanted.load(Ordering::SeqCst), 0);
        drop(first);
        let cores = std::thread::available_parallelism().unwrap().get();
        let all: Vec<_> = (0..WAKES_PER_CORE * cores).map(|_| pressure.try_admit(&need(1)).unwrap()).collect();
        assert!(pressure.try_admit(&need(1)).is_none(), "as many as there are places");
        drop(all);
        assert!(pressure.try_admit(&need(1)).is_some());
    }

    #[tokio::test]
    async fn who_hibernated_needs_no_place_but_room() {
        let (pressure, need) = pressure(1000);
        let light = |bytes| Need { work: Work::Hardly, ..need(bytes) };
        let cores = std::thread::available_parallelism().unwrap().get();
        let all: Vec<_> = (0..WAKES_PER_CORE * cores).map(|_| pressure.try_admit(&need(1)).unwrap()).collect();
        assert!(pressure.try_admit(&need(1)).is_none(), "all places are taken");
        let _one = pressure.try_admit(&light(700)).unwrap();
        assert!(pressure.try_admit(&light(300)).is_none(), "there is no room");
        drop(all);
        let sets = pressure.keep_sets(150);
        assert!(pressure.try_admit(&light(100)).is_none(), "what the pager keeps counts");
        drop(sets);
        assert!(pressure.try_admit(&light(100)).is_some());
        let _turn = pressure.turn.enter(std::time::Instant::now()).await;
        assert!(pressure.try_admit(&light(1)).is_none(), "a large one that waits is not overtaken");
    }

    #[tokio::test]
    async fn new_procs_are_refused_above_the_high_mark() {
        let (pressure, need) = pressure(100 << 20);
        let name = "web".parse().unwrap();
        pressure.admit_new(&name).await.unwrap();
        let _first = pressure.try_admit(&need(90 << 20)).unwrap();
        pressure.admit_new(&name).await.unwrap();
        let _second = Arc::clone(&pressure).admit(need(5 << 20), std::time::Instant::now()).await.unwrap();
        let refused = pressure.admit_new(&name).await.unwrap_err();
        let expected = "web cannot start: procs use 95.0M, the high mark is 90.0M (90% of --memory 100.0M); stop procs \
                        that are not needed, or give `kip up` more --memory";
        assert_eq!((refused.code, refused.message.as_str()), (Code::Exhausted, expected));
        let short = Arc::clone(&pressure).admit(need(200 << 20), std::time::Instant::now()).await.unwrap_err();
        let refused = short.refusal("web cannot be woken", &pressure).message;
        assert!(
            refused.ends_with("98.0M (98% of --memory 100.0M) may be used; give `kip up` more --memory"),
            "{refused}"
        );
        assert_eq!(pressure.refused(), (1, 1), "both are counted");
    }
}
