//! What is at the moment of a scrape, as metrics: procs by tier, memory, the store, meters, the
//! daemon itself.
//!
//! Is gathered from what is known anyway: no file of a proc is read and no proc wakes. What happens
//! is counted elsewhere, [`kip_journal::metrics`].

mod process;

pub(crate) use process::Process;

use kip_insight::view::ProcNow;
use kip_journal::metrics::word;
use kip_offload::CacheUse;
use kip_store::{Counters, FIRST_BYTE_BOUNDS};
use kip_types::Tier;
use kip_types::api::{MeterView, RoomView};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeLabelSet, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use std::collections::BTreeMap;
use std::fmt;

/// All that is gathered.
#[derive(Debug, Default)]
pub(crate) struct Moment {
    /// All procs.
    pub(crate) procs: Vec<ProcNow>,
    /// Room on the local disk, if that has a limit.
    pub(crate) room: Option<RoomView>,
    /// What the wakes that wait need, bytes.
    pub(crate) wanted_bytes: u64,
    /// The cache, if there is one.
    pub(crate) cache: Option<CacheUse>,
    /// What was asked of the object store, if there is one.
    pub(crate) store: Option<Counters>,
    /// Starts and wakes for which there was no room.
    pub(crate) refused: (u64, u64),
    /// The daemon itself, if /proc says.
    pub(crate) process: Option<Process>,
}

/// Writes samples under names.
struct Writer<'a>(DescriptorEncoder<'a>);

const NONE: NoLabels = [];
type NoLabels = [(&'static str, &'static str); 0];

impl Writer<'_> {
    fn gauge<L: EncodeLabelSet, V: EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (L, V)>,
    ) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        samples.into_iter().try_for_each(|(labels, value)| metric.encode_family(&labels)?.encode_gauge(&value))
    }

    fn counter<L: EncodeLabelSet, V: EncodeCounterValue>(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (L, V)>,
    ) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        let none = None::<&prometheus_client::metrics::exemplar::Exemplar<NoLabelSet, f64>>;
        samples.into_iter().try_for_each(|(labels, value)| metric.encode_family(&labels)?.encode_counter(&value, none))
    }
}

fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

const TIERS: [Tier; 4] = [Tier::Hot, Tier::Hibernated, Tier::Parked, Tier::Archived];

impl Collector for Moment {
    fn encode(&self, encoder: DescriptorEncoder) -> fmt::Result {
        let mut to = Writer(encoder);
        to.gauge("kip_build_info", "The daemon's version", [([("version", env!("CARGO_PKG_VERSION"))], 1u64)])?;
        self.all_procs(&mut to)?;
        self.memory(&mut to)?;
        self.store(&mut to)?;
        self.each_proc(&mut to)?;
        self.process(&mut to)
    }
}

impl Moment {
    fn sum(&self, tier: Tier, of: impl Fn(&ProcNow) -> u64) -> u64 {
        self.procs.iter().filter(|proc| proc.meter.tier == Some(tier)).map(of).sum()
    }

    fn all_procs(&self, to: &mut Writer<'_>) -> fmt::Result {
        let mut counts: BTreeMap<(&str, &str), u64> = BTreeMap::new();
        for ProcNow { meter, .. } in &self.procs {
            *counts.entry((meter.tier.map_or("none", word), <&str>::from(meter.state))).or_default() += 1;
        }
        let samples = counts.into_iter().map(|((tier, state), count)| ([("tier", tier), ("state", state)], count));
        to.gauge("kip_procs", "Procs, by tier (none for the stopped) and state", samples)?;
        let refused = self.procs.iter().filter(|proc| proc.refused).count();
        to.gauge("kip_procs_refused", "Procs that run although they were to sleep, see kip why", [(NONE, refused)])?;
        let ram =
            [Tier::Hot, Tier::Hibernated].map(|tier| ([("tier", word(tier))], self.sum(tier, |p| p.meter.held_bytes)));
        to.gauge("kip_memory_held_bytes", "Memory that procs hold, looked at once a second while they run", ram)?;
        let saved = TIERS[1..].iter().map(|tier| ([("tier", word(*tier))], self.sum(*tier, |proc| proc.saved_bytes)));
        to.gauge(
            "kip_memory_saved_bytes",
            "Memory of their own that sleepers would take if they ran, less what they hold",
            saved,
        )?;
        let disk = self.sum(Tier::Parked, |proc| proc.meter.held_bytes);
        to.gauge("kip_parked_disk_bytes", "What generations of parked procs take on the local disk", [(NONE, disk)])?;
        let stored = self.sum(Tier::Archived, |proc| proc.meter.held_bytes);
        to.gauge("kip_archived_store_bytes", "What generations of archived procs take in the store", [(NONE, stored)])
    }

    fn memory(&self, to: &mut Writer<'_>) -> fmt::Result {
        let waiting = self.procs.iter().filter(|proc| proc.waits).count();
        to.gauge("kip_admission_waiting_procs", "Procs whose wakes wait for room", [(NONE, waiting)])?;
        to.gauge(
            "kip_admission_wanted_bytes",
            "Memory that the procs need whose wakes wait for room",
            [(NONE, self.wanted_bytes)],
        )?;
        let (starts, wakes) = self.refused;
        let refused = [([("kind", "start")], starts), ([("kind", "wake")], wakes)];
        let help = "Starts and wakes for which there was no room, each try of a wake counted";
        to.counter("kip_admission_refusals", help, refused)?;
        let Some(room) = &self.room else { return Ok(()) };
        to.gauge("kip_memory_used_bytes", "Memory in use, as kip up --memory counts it", [(NONE, room.used_bytes)])?;
        let marks = [("limit", room.limit_bytes), ("high", room.high_bytes), ("low", room.low_bytes)];
        let marks = marks.map(|(mark, bytes)| ([("mark", mark)], bytes));
        to.gauge("kip_memory_mark_bytes", "The limit and the marks that memory in use is held against", marks)?;
        let help = "Of memory in use, working sets of hibernated procs";
        to.gauge("kip_working_sets_bytes", help, [(NONE, room.set_bytes)])
    }

    fn store(&self, to: &mut Writer<'_>) -> fmt::Result {
        if let Some(cache) = self.cache {
            to.gauge("kip_cache_bytes", "What the cache of the store takes on the local disk", [(NONE, cache.bytes)])?;
            to.gauge(
                "kip_cache_limit_bytes",
                "What the cache may take on the local disk",
                [(NONE, cache.limit_bytes)],
            )?;
            to.counter(
                "kip_cache_hits",
                "Fronts and blocks of archived generations that the cache had",
                [(NONE, cache.hits)],
            )?;
            to.counter(
                "kip_cache_misses",
                "Fronts and blocks of archived generations that the cache had not",
                [(NONE, cache.misses)],
            )?;
        }
        let Some(store) = self.store else { return Ok(()) };
        let kinds = [
            ("get", store.gets),
            ("head", store.heads),
            ("put", store.puts),
            ("part", store.parts),
            ("upload", store.uploads),
            ("list", store.lists),
            ("delete", store.deletes),
        ];
        let kinds = kinds.map(|(kind, count)| ([("kind", kind)], count));
        to.counter(
            "kip_store_requests",
            "Requests to the object store, failed ones and further tries included",
            kinds,
        )?;
        to.counter(
            "kip_store_failures",
            "Requests to a bucket that failed in a way that may pass",
            [(NONE, store.failures)],
        )?;
        to.counter("kip_store_retries", "Requests that were sent again because one failed", [(NONE, store.retries)])?;
        to.counter("kip_store_hedges", "Second requests because a first byte was slow", [(NONE, store.hedges)])?;
        to.counter("kip_store_read_bytes", "Bytes of objects that came", [(NONE, store.bytes_read)])?;
        to.counter("kip_store_written_bytes", "Bytes of objects that were sent", [(NONE, store.bytes_written)])?;
        let (name, help) = ("kip_store_first_byte_seconds", "From sending a read to its first byte");
        let mut buckets: Vec<(f64, u64)> = FIRST_BYTE_BOUNDS.iter().copied().zip(store.first_byte.buckets).collect();
        let within: u64 = buckets.iter().map(|(_, count)| count).sum();
        buckets.push((f64::MAX, store.first_byte.count.saturating_sub(within)));
        let mut histogram = to.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        let sum = store.first_byte.sum.as_secs_f64();
        histogram.encode_histogram::<NoLabelSet>(sum, store.first_byte.count, &buckets, None)
    }

    fn each_proc(&self, to: &mut Writer<'_>) -> fmt::Result {
        let meters = || self.procs.iter().map(|proc| &proc.meter);
        let held = meters().map(|m| {
            let labels =
                [("proc", m.name.as_str()), ("state", <&str>::from(m.state)), ("tier", m.tier.map_or("none", word))];
            (labels, m.held_bytes)
        });
        to.gauge("kip_proc_held_bytes", "What a proc holds where its tier has it: memory, local disk, store", held)?;
        let times = meters().flat_map(|m| m.tiers.iter().map(|used| (labels_of(m, used.tier), seconds(used.time_us))));
        to.counter("kip_proc_time_seconds", "Time of a proc in each tier, over all daemons", times)?;
        let held = meters().flat_map(|m| m.tiers.iter().map(|used| (labels_of(m, used.tier), used.byte_seconds)));
        to.counter(
            "kip_proc_held_byte_seconds",
            "What a proc held in each tier, times how long: bytes times seconds",
            held,
        )?;
        let cpu = meters().flat_map(|m| m.tiers.iter().map(|used| (labels_of(m, used.tier), seconds(used.cpu_us))));
        to.counter("kip_proc_cpu_seconds", "CPU time of a proc's cgroups in each tier, as the kernel counts it", cpu)?;
        let connections = meters().flat_map(|m| m.tiers.iter().map(|used| (labels_of(m, used.tier), used.connections)));
        to.counter("kip_proc_connections", "TCP connections made to a proc, by the tier it was in", connections)?;
        let datagrams = meters().flat_map(|m| m.tiers.iter().map(|used| (labels_of(m, used.tier), used.datagrams)));
        to.counter("kip_proc_datagrams", "UDP datagrams that came to a proc, by the tier it was in", datagrams)?;
        let killed = meters().map(|m| ([("proc", m.name.as_str())], m.oom_kills));
        let help = "Processes of a proc that the kernel killed because its memory was at its limit";
        to.counter("kip_proc_oom_kills", help, killed)?;
        let disks = || self.procs.iter().filter_map(|p| Some(([("proc", p.meter.name.as_str())], p.disk?)));
        let used = disks().map(|(labels, (used, _))| (labels, used));
        to.gauge("kip_proc_disk_bytes", "What files of a proc with --disk take", used)?;
        let limits = disks().map(|(labels, (_, limit))| (labels, limit));
        to.gauge("kip_proc_disk_limit_bytes", "What they may take", limits)?;
        let wakes = meters().flat_map(|m| {
            let labels = |from, trigger| [("proc", m.name.as_str()), ("tier", word(from)), ("trigger", trigger)];
            m.wakes.iter().map(move |wakes| (labels(wakes.from, wakes.trigger.as_str()), wakes.count))
        });
        to.counter("kip_proc_wakes", "Wakes of a proc, by the tier it woke from and what for, over all daemons", wakes)
    }
}

impl Moment {
    fn process(&self, to: &mut Writer<'_>) -> fmt::Result {
        let Some(own) = self.process else { return Ok(()) };
        to.counter("process_cpu_seconds", "CPU time of the daemon", [(NONE, own.cpu_seconds)])?;
        to.gauge("process_resident_memory_bytes", "Memory of the daemon", [(NONE, own.resident_bytes)])?;
        to.gauge("process_virtual_memory_bytes", "Address space of the daemon", [(NONE, own.virtual_bytes)])?;
        to.gauge("process_start_time_seconds", "When the daemon started, since the epoch", [(NONE, own.started)])?;
        to.gauge("process_open_fds", "Descriptors that the daemon has open", [(NONE, own.open_fds)])?;
        to.gauge("process_max_fds", "Descriptors that it may have open", [(NONE, own.max_fds)])?;
        to.gauge("process_threads", "Threads of the daemon", [(NONE, own.threads)])
    }
}

fn labels_of(meter: &MeterView, tier: Tier) -> [(&str, &str); 2] {
    [("proc", meter.name.as_str()), ("tier", word(tier))]
}
