//! What a proc has used, by tier: time, memory, CPU time, connections, wakes.
//!
//! Memory of a running proc is what its cgroup holds, looked at whenever its task looks anyway
//! (once a second) and taken to change evenly in between; of a sleeper it is what was left when it
//! fell asleep, which does not change. So nothing is ever measured, and no proc wakes, for the
//! meter's sake alone. CPU time and connections are the kernel's own counters of its cgroup and its
//! network namespace, which outlive sleeps; a counter that went back is that of another. They are
//! read when a proc changes its tier, so that each tier has its own: what was used in it, the work
//! of the wake that ended it, and connections that came to a sleeper, for those woke it.
//! Connections that Kip itself makes, to see whether a proc is ready or well, are left out.
//!
//! It is written with each state of the record, and once a minute while the proc runs. What a
//! daemon that is killed had not written is counted by the next: the tier is the recorded one, the
//! counters are the kernel's. Lost are, of a proc that is gone by then, its time and memory since
//! the last writing and what it used of the CPU since; and how memory changed meanwhile.

use kip_net::activity::TrafficCounters as Traffic;
use kip_types::Tier;
use kip_types::api::{MeterView, TRIGGERS, TierMeterView, WakesView};
use kip_types::{ProcName, StateName};
use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

pub mod marks;

/// While a proc runs its meter is written at least this often.
pub const WRITE_EVERY: Duration = Duration::from_secs(60);

/// Use of one tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct InTier {
    /// Microseconds.
    us: u64,
    /// Bytes times seconds.
    byte_seconds: f64,
    cpu_ns: u64,
    connections: u64,
    datagrams: u64,
}

impl InTier {
    /// Each with its counterpart.
    fn with(self, other: InTier, counts: impl Fn(u64, u64) -> u64, sizes: impl Fn(f64, f64) -> f64) -> InTier {
        InTier {
            us: counts(self.us, other.us),
            byte_seconds: sizes(self.byte_seconds, other.byte_seconds),
            cpu_ns: counts(self.cpu_ns, other.cpu_ns),
            connections: counts(self.connections, other.connections),
            datagrams: counts(self.datagrams, other.datagrams),
        }
    }
}

/// A counter of the kernel's, over all that have counted for the proc one after the other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Grown {
    total: u64,
    /// What the counter of now showed last.
    seen: u64,
}

impl Grown {
    /// Gives what has been added.
    fn grow_to(&mut self, shows: u64) -> u64 {
        // One that went back began anew.
        let grown = if shows >= self.seen { shows - self.seen } else { shows };
        self.seen = shows;
        self.total += grown;
        grown
    }
}

/// The meter as it is written.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Kept {
    /// Counts from then on, milliseconds since the epoch.
    since_ms: u64,
    /// To then.
    at_ms: u64,
    /// When the newest mark was made (see [`marks`]).
    marked_ms: u64,
    tier: Option<Tier>,
    /// What it holds in this tier, bytes; none before the first look in it.
    level: Option<u64>,
    tiers: BTreeMap<Tier, InTier>,
    /// The deepest that it has slept in since the last look at its connections; none if it only
    /// ran.
    slept_in: Option<Tier>,
    cpu_ns: Grown,
    /// Processes that were killed for want of memory.
    oom_kills: Grown,
    connections: Grown,
    /// Connections that were made from within.
    outward: Grown,
    /// CRIU has worked in its network namespace since the last look.
    engine: bool,
    datagrams: Grown,
    /// By the tier that it woke from and what for.
    wakes: BTreeMap<Tier, BTreeMap<String, u64>>,
}

#[derive(Debug)]
struct Live {
    kept: Kept,
    /// Counted to then.
    at: Instant,
    /// Before that, while no daemon was there.
    gap: Duration,
    /// In this tier, for which no level is known yet.
    unlevelled: Duration,
    /// Connections of our own that the kernel has yet to count.
    own: u64,
    /// When it was last seen that a process had been killed for want of memory.
    killed_at: Option<Instant>,
}

impl Live {
    /// Counts what has passed. `level`: what it holds now, if that was looked at.
    fn advance(&mut self, now: Instant, now_ms: u64, level: Option<u64>) {
        let passed = now.saturating_duration_since(self.at) + std::mem::take(&mut self.gap);
        self.at = now;
        let kept = &mut self.kept;
        kept.at_ms = now_ms;
        let Some(tier) = kept.tier else { return };
        let in_tier = kept.tiers.entry(tier).or_default();
        in_tier.us += passed.as_micros() as u64;
        match (kept.level, level) {
            // A running proc's level changes evenly from look to look, a sleeper's not at all until
            // a new one is given.
            (Some(was), Some(is)) if tier == Tier::Hot => {
                in_tier.byte_seconds += (was as f64 + is as f64) / 2.0 * passed.as_secs_f64();
            }
            (Some(was), _) => in_tier.byte_seconds += was as f64 * passed.as_secs_f64(),
            (None, Some(is)) => {
                let since = passed + std::mem::take(&mut self.unlevelled);
                in_tier.byte_seconds += is as f64 * since.as_secs_f64();
            }
            (None, None) => self.unlevelled += passed,
        }
        kept.level = level.or(kept.level);
    }

    /// Takes what the counters of its network namespace show: connections made to it and from
    /// within, datagrams that came.
    fn came(&mut self, accepted: u64, outward: u64, datagrams: u64) {
        let Live { kept, own, .. } = self;
        let mut came = kept.connections.grow_to(accepted);
        let outward = kept.outward.grow_to(outward);
        let datagrams = kept.datagrams.grow_to(datagrams);
        let mut nobodys = 0;
        if std::mem::take(&mut kept.engine) {
            // To find out about the kernel CRIU connects to itself there; so do reset connections
            // that are made anew.
            nobodys = outward.min(came);
        }
        let ours = (*own).min(came - nobodys);
        *own -= ours;
        came -= nobodys + ours;
        kept.connections.total -= nobodys + ours;
        let tier = kept.tiers.entry(kept.slept_in.unwrap_or(Tier::Hot)).or_default();
        tier.connections += came;
        tier.datagrams += datagrams;
        if kept.tier == Some(Tier::Hot) {
            kept.slept_in = None;
        }
    }
}

/// The meter of one proc.
#[derive(Debug)]
pub struct Meter(Mutex<Live>);

impl Meter {
    /// Of a proc that is made now.
    pub fn new(now_ms: u64) -> Meter {
        Meter::taken_up(Kept { since_ms: now_ms, at_ms: now_ms, marked_ms: now_ms, ..Kept::default() }, now_ms)
    }

    /// As the last daemon wrote it; that of one which kept none begins now.
    pub fn taken_up(kept: Kept, now_ms: u64) -> Meter {
        if kept.since_ms == 0 {
            return Meter::new(now_ms);
        }
        let gap = Duration::from_millis(now_ms.saturating_sub(kept.at_ms));
        let kept = kept.with_all_in_tiers();
        Meter(Mutex::new(Live { kept, at: Instant::now(), gap, unlevelled: Duration::ZERO, own: 0, killed_at: None }))
    }

    fn live(&self) -> MutexGuard<'_, Live> {
        self.0.lock()
    }

    /// From now on it is in this tier, or in none. Returns where it was.
    pub fn enter(&self, tier: Option<Tier>) -> Option<Tier> {
        let mut live = self.live();
        live.advance(Instant::now(), kip_sys::clock::now_ms(), None);
        let before = live.kept.tier;
        if before != tier {
            (live.kept.tier, live.kept.level, live.unlevelled) = (tier, None, Duration::ZERO);
            live.kept.slept_in = match tier {
                // From the store it comes by way of the disk.
                Some(asleep) if asleep != Tier::Hot => live.kept.slept_in.max(tier),
                Some(_) => live.kept.slept_in,
                None => None,
            };
        }
        before
    }

    /// The tier that it is in.
    pub fn tier(&self) -> Option<Tier> {
        self.live().kept.tier
    }

    /// What it holds now where its tier has it: memory, the local disk, the store.
    pub fn level(&self, bytes: u64) {
        self.live().advance(Instant::now(), kip_sys::clock::now_ms(), Some(bytes));
    }

    /// As [`Meter::level`], where nothing is known of it yet.
    pub fn level_if_unknown(&self, bytes: impl FnOnce() -> u64) {
        if self.live().kept.level.is_none() {
            self.level(bytes());
        }
    }

    /// What a running one holds now; nothing of one that has fallen asleep meanwhile.
    pub fn level_of_running(&self, bytes: u64) {
        let mut live = self.live();
        if live.kept.tier == Some(Tier::Hot) {
            live.advance(Instant::now(), kip_sys::clock::now_ms(), Some(bytes));
        }
    }

    /// Takes what its cgroup's counter shows. It is read under the meter's lock: an older figure
    /// after a newer one would pass for another counter's.
    pub fn cpu(&self, read: impl FnOnce() -> Option<u64>) -> Option<u64> {
        let mut live = self.live();
        let ns = read()?;
        let kept = &mut live.kept;
        let grown = kept.cpu_ns.grow_to(ns);
        // Starting and ending it is work of a running one.
        let asleep = kept.tier.filter(|tier| *tier != Tier::Hot);
        let tier = asleep.max(asleep.and(kept.slept_in)).unwrap_or(Tier::Hot);
        kept.tiers.entry(tier).or_default().cpu_ns += grown;
        Some(ns)
    }

    /// Likewise, of its cgroup.
    pub fn killed(&self, read: impl FnOnce() -> u64) {
        let mut live = self.live();
        if live.kept.oom_kills.grow_to(read()) > 0 {
            live.killed_at = Some(Instant::now());
        }
    }

    /// Whether it was first seen within that time that a process had been killed for want of
    /// memory. Told once.
    pub fn was_killed_within(&self, time: Duration) -> bool {
        self.live().killed_at.take().is_some_and(|at| at.elapsed() <= time)
    }

    /// Its cgroup is gone: the next one counts from nothing.
    pub fn without_cgroup(&self) {
        let mut live = self.live();
        (live.kept.cpu_ns.seen, live.kept.oom_kills.seen) = (0, 0);
    }

    /// Takes what the counters of its network namespace show, likewise, and gives it back.
    pub fn traffic(&self, read: impl FnOnce() -> Option<Traffic>) -> Option<Traffic> {
        let mut live = self.live();
        let traffic = read()?;
        live.came(traffic.accepted(), traffic.opened_from_within(), traffic.datagrams_received());
        Some(traffic)
    }

    /// It has another network namespace, which counts from nothing.
    pub fn without_network(&self) {
        let mut live = self.live();
        let kept = &mut live.kept;
        (kept.connections.seen, kept.outward.seen, kept.datagrams.seen) = (0, 0, 0);
    }

    /// A connection of our own is about to be made to it, which does not count. To be told when it
    /// is.
    pub fn own_connection(&self) -> OwnConnection<'_> {
        self.live().own += 1;
        OwnConnection { meter: self, made: false }
    }

    /// CRIU is about to work in its network namespace, while the program stands still.
    pub fn engine_at_work(&self) {
        self.live().kept.engine = true;
    }

    /// It was woken.
    pub fn woken(&self, from: Tier, trigger: &str) {
        debug_assert!(TRIGGERS.contains(&trigger), "{trigger} is what wakes are counted by");
        let mut live = self.live();
        *live.kept.wakes.entry(from).or_default().entry(trigger.to_owned()).or_default() += 1;
    }

    /// It was not there while no daemon was: that time does not count.
    pub fn forget_gap(&self) {
        self.live().gap = Duration::ZERO;
    }

    /// A mark was made of `kept`.
    pub fn marked(&self, kept: &Kept) {
        self.live().kept.marked_ms = kept.at_ms;
    }

    /// All of it, to this moment.
    pub fn kept(&self) -> Kept {
        let mut live = self.live();
        live.advance(Instant::now(), kip_sys::clock::now_ms(), None);
        live.kept.clone()
    }

    /// What was used after `since_ms`; from the beginning without it.
    pub fn view_since(&self, name: &ProcName, dir: &Path, state: StateName, since_ms: Option<u64>) -> MeterView {
        let kept = self.kept();
        match since_ms {
            Some(since_ms) if since_ms > kept.since_ms => {
                let then = marks::at(dir, &kept, since_ms);
                kept.after(&then).view(name, state)
            }
            _ => kept.view(name, state),
        }
    }
}

/// A connection of our own. One that is dropped before it is made is none.
#[derive(Debug)]
pub struct OwnConnection<'a> {
    meter: &'a Meter,
    made: bool,
}

impl OwnConnection<'_> {
    /// It has been made: it counts.
    pub fn made(mut self) {
        self.made = true;
    }
}

impl Drop for OwnConnection<'_> {
    fn drop(&mut self) {
        if self.made {
            return;
        }
        let mut live = self.meter.live();
        if live.own > 0 {
            live.own -= 1;
        } else {
            // A client's connection was taken for it.
            live.kept.connections.total += 1;
            live.kept.tiers.entry(Tier::Hot).or_default().connections += 1;
        }
    }
}

impl Kept {
    /// What an earlier version has not told apart was used by a running one.
    fn with_all_in_tiers(mut self) -> Kept {
        let sum = |of: fn(&InTier) -> u64| self.tiers.values().map(of).sum::<u64>();
        let cpu_ns = self.cpu_ns.total.saturating_sub(sum(|used| used.cpu_ns));
        let connections = self.connections.total.saturating_sub(sum(|used| used.connections));
        let datagrams = self.datagrams.total.saturating_sub(sum(|used| used.datagrams));
        if cpu_ns + connections + datagrams > 0 {
            let hot = self.tiers.entry(Tier::Hot).or_default();
            hot.cpu_ns += cpu_ns;
            hot.connections += connections;
            hot.datagrams += datagrams;
        }
        self
    }

    /// What was used between `then` and this.
    fn after(mut self, then: &Kept) -> Kept {
        self.since_ms = then.at_ms;
        for (tier, was) in &then.tiers {
            let is = self.tiers.entry(*tier).or_default();
            *is = is.with(*was, u64::saturating_sub, |is, was| (is - was).max(0.0));
        }
        let counters = [
            (&mut self.cpu_ns, then.cpu_ns),
            (&mut self.oom_kills, then.oom_kills),
            (&mut self.connections, then.connections),
            (&mut self.datagrams, then.datagrams),
        ];
        counters.into_iter().for_each(|(is, was)| is.total = is.total.saturating_sub(was.total));
        for (from, wakes) in &then.wakes {
            for (trigger, was) in wakes {
                let is = self.wakes.entry(*from).or_default().entry(trigger.clone()).or_default();
                *is = is.saturating_sub(*was);
            }
        }
        self
    }

    fn view(self, name: &ProcName, state: StateName) -> MeterView {
        let in_tier = |(tier, used): (Tier, InTier)| TierMeterView {
            tier,
            time_us: used.us,
            byte_seconds: used.byte_seconds,
            cpu_us: used.cpu_ns / 1000,
            connections: used.connections,
            datagrams: used.datagrams,
        };
        let wakes = self.wakes.into_iter().flat_map(|(from, by)| {
            by.into_iter().filter(|(_, count)| *count > 0).map(move |(trigger, count)| WakesView {
                from,
                trigger,
                count,
            })
        });
        MeterView {
            name: name.clone(),
            state,
            tier: self.tier,
            from_ms: self.since_ms,
            to_ms: self.at_ms,
            held_bytes: self.level.filter(|_| self.tier.is_some()).unwrap_or(0),
            tiers: self.tiers.into_iter().filter(|(_, used)| *used != InTier::default()).map(in_tier).collect(),
            cpu_us: self.cpu_ns.total / 1000,
            connections: self.connections.total,
            datagrams: self.datagrams.total,
            oom_kills: self.oom_kills.total,
            wakes: wakes.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub fn live(tier: Tier) -> Live {
        let kept = Kept { since_ms: 1, at_ms: 1, tier: Some(tier), ..Kept::default() };
        Live { kept, at: Instant::now(), gap: Duration::ZERO, unlevelled: Duration::ZERO, own: 0, killed_at: None }
    }

    #[test]
    fn a_kill_is_recent_whatever_look_has_counted_it() {
        let meter = Meter::taken_up(Kept::default(), 1);
        assert!(!meter.was_killed_within(Duration::from_secs(60)));
        meter.killed(|| 1);
        meter.killed(|| 1);
        assert!(meter.was_killed_within(Duration::from_secs(60)) && !meter.was_killed_within(Duration::from_secs(60)));
        meter.killed(|| 2);
        assert!(!meter.was_killed_within(Duration::ZERO));
    }

    fn area(live: &Live, tier: Tier) -> (u64, f64) {
        let used = live.kept.tiers[&tier];
        (used.us / 1_000_000, used.byte_seconds.round())
    }

    #[test]
    fn memory_changes_evenly_between_samples_and_not_at_all_in_sleep() {
        let mut meter = live(Tier::Hot);
        let at = |s: u64| meter.at + Duration::from_secs(s);
        let [one, three, five] = [1, 3, 5].map(at);
        meter.advance(one, 2, None);
        meter.advance(three, 3, Some(100));
        assert_eq!(area(&meter, Tier::Hot), (3, 300.0), "what is seen first held since it is in this tier");
        meter.advance(five, 4, Some(200));
        assert_eq!(area(&meter, Tier::Hot), (5, 600.0));
        let mut asleep = live(Tier::Hibernated);
        asleep.advance(asleep.at, 2, Some(50));
        let later = asleep.at + Duration::from_secs(4);
        asleep.advance(later, 3, Some(1_000_000));
        assert_eq!(area(&asleep, Tier::Hibernated), (4, 200.0));
    }

    #[test]
    fn the_time_without_a_daemon_counts_where_it_was() {
        let kept = Kept { since_ms: 5, at_ms: 10_000, tier: Some(Tier::Parked), level: Some(7), ..Kept::default() };
        let meter = Meter::taken_up(kept.clone(), 70_000);
        meter.enter(Some(Tier::Hot));
        let (seconds, bytes) = area(&meter.live(), Tier::Parked);
        assert_eq!((seconds, bytes), (60, 420.0));
        let gone = Meter::taken_up(kept, 70_000);
        gone.forget_gap();
        gone.enter(None);
        assert_eq!(area(&gone.live(), Tier::Parked), (0, 0.0));
    }

    #[test]
    fn counters_that_begin_anew_are_neither_lost_nor_counted_twice() {
        let mut cpu = Grown::default();
        let grown: u64 = [10, 25, 25, 5, 9].into_iter().map(|shows| cpu.grow_to(shows)).sum();
        assert_eq!((cpu.total, grown), (25 + 9, 25 + 9));
        let meter = Meter::new(1);
        meter.cpu(|| Some(40));
        meter.without_cgroup();
        meter.cpu(|| Some(60));
        meter.cpu(|| None);
        assert_eq!(meter.live().kept.cpu_ns.total, 100, "another cgroup, which has used more than the first by now");
    }

    #[test]
    fn each_tier_has_its_own_cpu_time() {
        let meter = Meter::new(1);
        let step = |tier, ns| {
            meter.cpu(|| Some(ns));
            meter.enter(tier);
        };
        step(Some(Tier::Hot), 5); // its start
        step(Some(Tier::Hibernated), 105);
        step(Some(Tier::Hot), 112); // its wake
        step(Some(Tier::Archived), 212);
        step(Some(Tier::Parked), 213);
        step(Some(Tier::Hot), 243);
        step(None, 250);
        meter.cpu(|| Some(252)); // its end
        let kept = meter.kept();
        let cpu = |tier| kept.tiers.get(&tier).map(|used| used.cpu_ns);
        assert_eq!(cpu(Tier::Hot), Some(5 + 100 + 100 + 7 + 2));
        assert_eq!((cpu(Tier::Hibernated), cpu(Tier::Archived)), (Some(7), Some(31)), "by way of the disk");
        assert_eq!(kept.cpu_ns.total, 252);
    }

    #[test]
    fn our_own_connections_do_not_count() {
        let meter = Meter::new(1);
        meter.enter(Some(Tier::Hot));
        let own = meter.own_connection();
        let sample = |accepted| meter.live().came(accepted, 0, 0);
        sample(0);
        own.made();
        assert_eq!(meter.kept().connections.total, 0);
        sample(3);
        assert_eq!(meter.kept().connections.total, 2);
        let given_up = meter.own_connection();
        sample(5);
        assert_eq!(meter.kept().connections.total, 3, "one of them may be ours");
        drop(given_up);
        assert_eq!((meter.kept().connections.total, meter.kept().tiers[&Tier::Hot].connections), (4, 4));
        meter.enter(Some(Tier::Parked));
        meter.enter(Some(Tier::Hot));
        sample(6);
        sample(8);
        let tiers = meter.kept().tiers;
        assert_eq!((tiers[&Tier::Parked].connections, tiers[&Tier::Hot].connections), (1, 6), "the first woke it");
    }

    // promise meters: a meter of an earlier version goes on; what it did not tell apart is the hot
    //   tier's
    #[test]
    fn what_an_earlier_version_counted_is_kept() {
        let old = r#"{"since_ms": 5, "at_ms": 9, "cpu_ns": {"total": 70, "seen": 70}, "tiers": {"hot": {"us": 4, "byte_seconds": 1.0}}}"#;
        let meter = Meter::taken_up(serde_json::from_str(old).unwrap(), 9);
        assert_eq!(meter.kept().tiers[&Tier::Hot].cpu_ns, 70);
    }

    #[test]
    fn what_is_written_is_read() {
        let meter = Meter::new(5);
        meter.enter(Some(Tier::Hibernated));
        meter.level(9);
        meter.woken(Tier::Hibernated, "tcp");
        let kept = meter.kept();
        let text = serde_json::to_string(&kept).unwrap();
        assert_eq!(serde_json::from_str::<Kept>(&text).unwrap(), kept);
        assert_eq!(serde_json::from_str::<Kept>("{}").unwrap(), Kept::default());
    }
}
