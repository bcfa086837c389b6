//! Metrics for Prometheus, in its text format 0.0.4: `GET /metrics`, `kip metrics`.
//!
//! Counts what happens from the daemon's start on, and never reads a file of a proc. What is at the
//! moment of a scrape (procs by tier, memory, meters) its caller gathers. `docs/metrics.md` lists
//! all metrics.

use kip_types::Tier;
use kip_types::lifecycle::Exit;
use prometheus_client::collector::Collector;
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
pub fn word(tier: Tier) -> &'static str {
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
const CAUSES: [&[RefusalCause]; 3] = [
    &[RefusalCause::Exec, RefusalCause::Starting, RefusalCause::Hook, RefusalCause::Memory, RefusalCause::Pager],
    &[RefusalCause::Exec, RefusalCause::Starting, RefusalCause::Hook, RefusalCause::Criu, RefusalCause::Snapshot],
    &[RefusalCause::Store],
];

/// What stood in the way of a sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalCause {
    /// A program runs in it by `kip exec`.
    Exec,
    /// It is not ready yet.
    Starting,
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
    /// Its own command before sleep, or after a wake, which still runs.
    Hook,
}

impl RefusalCause {
    fn word(self) -> &'static str {
        match self {
            RefusalCause::Exec => "exec",
            RefusalCause::Starting => "starting",
            RefusalCause::Memory => "memory",
            RefusalCause::Pager => "pager",
            RefusalCause::Criu => "criu",
            RefusalCause::Snapshot => "snapshot",
            RefusalCause::Store => "store",
            RefusalCause::Hook => "hook",
        }
    }
}

/// How programs end by themselves.
const ENDS: [&str; 5] = ["ok", "failed", "signal", "memory", "unknown"];

fn end_word(exit: Exit, for_memory: bool) -> &'static str {
    match exit {
        Exit::Code(0) => "ok",
        Exit::Code(_) => "failed",
        Exit::Signal(9) if for_memory => "memory",
        Exit::Signal(_) => "signal",
        Exit::Unknown => "unknown",
    }
}

/// What is counted as it happens.
pub struct Metrics {
    registry: Registry,
    wakes: Family<[Word; 2], Counter>,
    wake_durations: Durations<2>,
    failed_wakes: Family<[Word; 1], Counter>,
    sleep_durations: Durations<1>,
    refusals: Family<[Word; 2], Counter>,
    exits: Family<[Word; 1], Counter>,
    restarts: Counter,
    cold_starts: Counter,
}

impl Metrics {
    /// None yet. `triggers` are all words that wakes are counted by.
    pub fn new(triggers: &[&'static str]) -> Metrics {
        let mut registry = Registry::default();
        let (wakes, wake_durations) = (Family::default(), durations());
        let (failed_wakes, sleep_durations, refusals) = (Family::default(), durations(), Family::default());
        registry.register("kip_wakes", "Wakes, by the tier they began in and their trigger", wakes.clone());
        let help = "Time from the wake event to the first instruction";
        registry.register("kip_wake_duration_seconds", help, wake_durations.clone());
        registry.register("kip_wake_failures", "Wakes that failed, by the tier they began in", failed_wakes.clone());
        let help = "Time from the decision to sleep to the tier";
        registry.register("kip_sleep_duration_seconds", help, sleep_durations.clone());
        let help = "Sleeps that were refused, by target tier and cause";
        registry.register("kip_sleep_refusals", help, refusals.clone());
        let (exits, restarts, cold_starts) = (Family::default(), Counter::default(), Counter::default());
        registry.register("kip_exits", "Programs that ended by themselves, by how", exits.clone());
        let help = "Starts by restart policy, of programs that had ended";
        registry.register("kip_restarts", help, restarts.clone());
        let help =
            "Procs that were started on their files because their snapshot could not be used: connections were lost";
        registry.register("kip_cold_starts", help, cold_starts.clone());
        let metrics = Metrics {
            registry,
            wakes,
            wake_durations,
            failed_wakes,
            sleep_durations,
            refusals,
            exits,
            restarts,
            cold_starts,
        };
        metrics.show_zeros(triggers);
        metrics
    }

    /// What has not happened yet is shown as zero: a missing sample gives no rate.
    fn show_zeros(&self, triggers: &[&'static str]) {
        for tier in SLEEPS {
            drop(self.failed_wakes.get_or_create(&[("tier", word(tier))]));
            drop(self.sleep_durations.get_or_create(&[("tier", word(tier))]));
            for trigger in triggers {
                let labels = [("tier", word(tier)), ("trigger", *trigger)];
                drop(self.wakes.get_or_create(&labels));
                drop(self.wake_durations.get_or_create(&labels));
            }
        }
        for how in ENDS {
            drop(self.exits.get_or_create(&[("how", how)]));
        }
        for (tier, causes) in SLEEPS.into_iter().zip(CAUSES) {
            for cause in causes {
                drop(self.refusals.get_or_create(&[("tier", word(tier)), ("cause", cause.word())]));
            }
        }
    }

    /// `trigger`: one of the words that wakes are counted by.
    pub fn woke(&self, from: Tier, trigger: &'static str, us: u64) {
        let labels = [("tier", word(from)), ("trigger", trigger)];
        self.wakes.get_or_create(&labels).inc();
        self.wake_durations.get_or_create(&labels).observe(seconds(us));
    }

    /// A wake from that tier has failed.
    pub fn failed_to_wake(&self, from: Tier) {
        self.failed_wakes.get_or_create(&[("tier", word(from))]).inc();
    }

    /// A sleep has led to that tier, after so many microseconds.
    pub fn slept(&self, to: Tier, us: u64) {
        self.sleep_durations.get_or_create(&[("tier", word(to))]).observe(seconds(us));
    }

    /// A sleep to that tier could not be.
    pub fn refused(&self, to: Tier, cause: RefusalCause) {
        self.refusals.get_or_create(&[("tier", word(to)), ("cause", cause.word())]).inc();
    }

    /// A program ended by itself; `for_memory`: the kernel killed for want of memory just then.
    pub fn ended(&self, exit: Exit, for_memory: bool) {
        self.exits.get_or_create(&[("how", end_word(exit, for_memory))]).inc();
    }

    /// The restart policy has started a program.
    pub fn restarted(&self) {
        self.restarts.inc();
    }

    /// A program was started on its files because its snapshot could not be used.
    pub fn started_cold(&self) {
        self.cold_starts.inc();
    }

    /// All of it, with what is now.
    pub fn text(&self, now: impl Collector + 'static) -> String {
        let mut text = String::new();
        let mut gathered = Registry::default();
        gathered.register_collector(Box::new(now));
        let written = encode_registry(&mut text, &self.registry).and_then(|()| encode_registry(&mut text, &gathered));
        written.expect("a String takes what is written");
        classic(&text)
    }
}

/// OpenMetrics as the text format 0.0.4 has it, which every scraper and promtool read: it names a
/// counter in full, with `_total`, where it says what it is, too.
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

    #[derive(Debug)]
    struct Nothing;

    impl Collector for Nothing {
        fn encode(&self, _: prometheus_client::encoding::DescriptorEncoder<'_>) -> std::fmt::Result {
            Ok(())
        }
    }

    #[test]
    fn what_happened_is_counted() {
        let metrics = Metrics::new(&["tcp", "timer"]);
        metrics.woke(Tier::Parked, "tcp", 2_000);
        metrics.woke(Tier::Parked, "tcp", 40_000_000);
        metrics.refused(Tier::Parked, RefusalCause::Criu);
        metrics.ended(Exit::Signal(9), true);
        metrics.started_cold();
        let text = metrics.text(Nothing);
        for line in [
            "# HELP kip_wakes_total Wakes, by the tier they began in and their trigger.",
            "# TYPE kip_wakes_total counter",
            "kip_wakes_total{tier=\"parked\",trigger=\"tcp\"} 2",
            "kip_wake_duration_seconds_bucket{le=\"0.001\",tier=\"parked\",trigger=\"tcp\"} 0",
            "kip_wake_duration_seconds_bucket{le=\"0.0025\",tier=\"parked\",trigger=\"tcp\"} 1",
            "kip_wake_duration_seconds_bucket{le=\"30.0\",tier=\"parked\",trigger=\"tcp\"} 1",
            "kip_wake_duration_seconds_count{tier=\"parked\",trigger=\"tcp\"} 2",
            "kip_sleep_refusals_total{tier=\"parked\",cause=\"criu\"} 1",
            "kip_sleep_refusals_total{tier=\"archived\",cause=\"store\"} 0",
            "kip_wakes_total{tier=\"hibernated\",trigger=\"timer\"} 0",
            "kip_sleep_refusals_total{tier=\"hibernated\",cause=\"hook\"} 0",
            "kip_exits_total{how=\"memory\"} 1",
            "kip_exits_total{how=\"signal\"} 0",
            "kip_cold_starts_total 1",
            "kip_restarts_total 0",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
    }
}
