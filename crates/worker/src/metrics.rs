//! Metrics for Prometheus, in its text format 0.0.4: `GET /metrics`, `kip metrics`.
//!
//! Counts what happens from the daemon's start on; what is (procs by tier, memory, meters) is gathered for each scrape, [`moment`], from
//! what is known anyway: no file of a proc is read and nobody wakes. `docs/metrics.md` lists them all.

mod moment;

pub(crate) use moment::{Moment, ProcNow};

use crate::meter;
use kip_types::Tier;
use prometheus_client::encoding::text::encode_registry;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// Upper bounds of wakes and sleeps, seconds.
const BUCKETS: [f64; 18] =
    [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0];

type Word = (&'static str, &'static str);
type Durations<const N: usize> = Family<[Word; N], Histogram, fn() -> Histogram>;

fn durations<const N: usize>() -> Durations<N> {
    Family::new_with_constructor(|| Histogram::new(BUCKETS))
}

/// A tier as labels have it.
fn word(tier: Tier) -> &'static str {
    match tier {
        Tier::Hot => "hot",
        Tier::Hibernated => "hibernated",
        Tier::Parked => "parked",
        Tier::Archived => "archived",
    }
}

fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

const SLEEPS: [Tier; 3] = [Tier::Hibernated, Tier::Parked, Tier::Archived];
/// What may stand in the way of each of [`SLEEPS`].
const CAUSES: [&[Cause]; 3] =
    [&[Cause::Exec, Cause::Memory, Cause::Pager], &[Cause::Exec, Cause::Criu, Cause::Snapshot], &[Cause::Store]];

/// What stood in the way of a sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// A program runs in it by `kip exec`.
    Exec,
    /// Its memory cannot be taken out, for instance because it is traced.
    Memory,
    /// The pager is not there.
    Pager,
    /// CRIU cannot make images of something it has.
    Criu,
    /// The snapshot could not be completed, for instance for lack of disk.
    Snapshot,
    /// The store did not take it.
    Store,
    /// Its own command before sleep.
    Hook,
}

impl Cause {
    fn word(self) -> &'static str {
        match self {
            Cause::Exec => "exec",
            Cause::Memory => "memory",
            Cause::Pager => "pager",
            Cause::Criu => "criu",
            Cause::Snapshot => "snapshot",
            Cause::Store => "store",
            Cause::Hook => "hook",
        }
    }
}

/// What is counted as it happens.
pub(crate) struct Metrics {
    registry: Registry,
    wakes: Family<[Word; 2], Counter>,
    wake_durations: Durations<2>,
    failed_wakes: Family<[Word; 1], Counter>,
    sleep_durations: Durations<1>,
    refusals: Family<[Word; 2], Counter>,
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        let mut registry = Registry::default();
        let (wakes, wake_durations) = (Family::default(), durations());
        let (failed_wakes, sleep_durations, refusals) = (Family::default(), durations(), Family::default());
        registry.register("kip_wakes", "Wakes, by the tier they began in and what for", wakes.clone());
        let help = "From what woke a proc to its first instruction";
        registry.register("kip_wake_duration_seconds", help, wake_durations.clone());
        registry.register("kip_wake_failures", "Wakes that failed, by the tier they began in", failed_wakes.clone());
        let help = "From the decision to let a proc sleep until it was in the tier";
        registry.register("kip_sleep_duration_seconds", help, sleep_durations.clone());
        let help = "Sleeps that could not be, by the tier they were to lead to and what stood in the way";
        registry.register("kip_sleep_refusals", help, refusals.clone());
        let metrics = Metrics { registry, wakes, wake_durations, failed_wakes, sleep_durations, refusals };
        metrics.show_zeros();
        metrics
    }

    /// What has not happened yet is shown as such: from a sample that is not there nobody can tell a rate.
    fn show_zeros(&self) {
        for tier in SLEEPS {
            drop(self.failed_wakes.get_or_create(&[("tier", word(tier))]));
            drop(self.sleep_durations.get_or_create(&[("tier", word(tier))]));
            for trigger in meter::WORDS {
                let labels = [("tier", word(tier)), ("trigger", trigger)];
                drop(self.wakes.get_or_create(&labels));
                drop(self.wake_durations.get_or_create(&labels));
            }
        }
        for (tier, causes) in SLEEPS.into_iter().zip(CAUSES) {
            for cause in causes {
                drop(self.refusals.get_or_create(&[("tier", word(tier)), ("cause", cause.word())]));
            }
        }
    }

    /// `trigger`: one of the words of [`crate::meter::word`].
    pub(crate) fn woke(&self, from: Tier, trigger: &'static str, us: u64) {
        let labels = [("tier", word(from)), ("trigger", trigger)];
        self.wakes.get_or_create(&labels).inc();
        self.wake_durations.get_or_create(&labels).observe(seconds(us));
    }

    pub(crate) fn failed_to_wake(&self, from: Tier) {
        self.failed_wakes.get_or_create(&[("tier", word(from))]).inc();
    }

    pub(crate) fn slept(&self, to: Tier, us: u64) {
        self.sleep_durations.get_or_create(&[("tier", word(to))]).observe(seconds(us));
    }

    pub(crate) fn refused(&self, to: Tier, cause: Cause) {
        self.refusals.get_or_create(&[("tier", word(to)), ("cause", cause.word())]).inc();
    }

    /// All of it, with what is now.
    pub(crate) fn text(&self, moment: Moment) -> String {
        let mut text = String::new();
        let mut gathered = Registry::default();
        gathered.register_collector(Box::new(moment));
        let written = encode_registry(&mut text, &self.registry).and_then(|()| encode_registry(&mut text, &gathered));
        written.expect("a String takes what is written");
        classic(&text)
    }
}

/// OpenMetrics as the text format 0.0.4 has it, which every scraper and promtool read: it names a counter in full, with `_total`,
/// where it says what it is, too.
fn classic(text: &str) -> String {
    let mut to = String::with_capacity(text.len() + 1024);
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let described = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' '));
        match (described, lines.peek().and_then(|next| next.strip_prefix("# TYPE "))) {
            (Some((name, help)), Some(kind)) if kind == format!("{name} counter") => {
                to += &format!("# HELP {name}_total {help}\n# TYPE {name}_total counter\n");
                lines.next();
            }
            _ => {
                to += line;
                to += "\n";
            }
        }
    }
    to
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happened_is_counted() {
        let metrics = Metrics::new();
        metrics.woke(Tier::Parked, "tcp", 2_000);
        metrics.woke(Tier::Parked, "tcp", 40_000_000);
        metrics.refused(Tier::Parked, Cause::Criu);
        let text = metrics.text(Moment::default());
        for line in [
            "# HELP kip_wakes_total Wakes, by the tier they began in and what for.",
            "# TYPE kip_wakes_total counter",
            "kip_wakes_total{tier=\"parked\",trigger=\"tcp\"} 2",
            "kip_wake_duration_seconds_bucket{le=\"0.001\",tier=\"parked\",trigger=\"tcp\"} 0",
            "kip_wake_duration_seconds_bucket{le=\"0.0025\",tier=\"parked\",trigger=\"tcp\"} 1",
            "kip_wake_duration_seconds_bucket{le=\"30.0\",tier=\"parked\",trigger=\"tcp\"} 1",
            "kip_wake_duration_seconds_count{tier=\"parked\",trigger=\"tcp\"} 2",
            "kip_sleep_refusals_total{tier=\"parked\",cause=\"criu\"} 1",
            "kip_sleep_refusals_total{tier=\"archived\",cause=\"store\"} 0",
            "kip_wakes_total{tier=\"hibernated\",trigger=\"timer\"} 0",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
    }
}
