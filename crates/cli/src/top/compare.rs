//! One picture of all procs, from two answers of the daemon.

use kip_client::Client;
use kip_types::api::{CacheView, ProcView, RoomView, TopProc, TopView};
use kip_types::lifecycle::Tier;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Instant;

/// Tiers from the top down; `stopped` stands for none.
pub const TIERS: [&str; 5] = ["hot", "hibernated", "parked", "archived", STOPPED];
const STOPPED: &str = "stopped";

/// What the daemon said at one moment.
pub struct DaemonSample {
    at: Instant,
    at_ms: u64,
    procs: Vec<ProcView>,
    wakes_last_minute: u64,
    room: Option<RoomView>,
    cache: Option<CacheView>,
}

impl DaemonSample {
    /// Asks for it.
    pub async fn ask(client: &Client) -> anyhow::Result<DaemonSample> {
        let procs = client.list().await?;
        let (at, at_ms) = (Instant::now(), kip_text::now_ms());
        let info = client.info().await?;
        let (room, cache) = (info.room, info.cache);
        Ok(DaemonSample { at, at_ms, procs, wakes_last_minute: info.wakes_last_minute, room, cache })
    }
}

/// The newer answer, with CPU shares since the older one.
pub fn compare(older: &DaemonSample, newer: &DaemonSample) -> TopView {
    let span_us = newer.at.duration_since(older.at).as_micros() as f64;
    let used = |view: &ProcView| {
        let before = older.procs.iter().find(|p| p.name == view.name)?;
        cpu_percent(before, view, span_us)
    };
    let mut procs: Vec<TopProc> = newer.procs.iter().map(|view| row(view, used(view))).collect();
    let memory = |p: &TopProc| p.memory_bytes.max(p.saved_bytes.unwrap_or(0));
    procs.sort_by_cached_key(|p| (rank(p.tier), Reverse(memory(p)), p.name.clone()));
    let mut tiers: BTreeMap<String, usize> = TIERS.iter().map(|tier| ((*tier).to_owned(), 0)).collect();
    for proc in &procs {
        *tiers.entry(tier_word(proc.tier)).or_default() += 1;
    }
    TopView {
        at_ms: newer.at_ms,
        tiers,
        held_bytes: procs.iter().map(|p| p.memory_bytes).sum(),
        saved_bytes: procs.iter().filter_map(|p| p.saved_bytes).sum(),
        wakes_last_minute: newer.wakes_last_minute,
        room: newer.room.clone(),
        cache: newer.cache,
        procs,
    }
}

/// The share of a core that a proc used in the `span_us` microseconds between two looks at it.
pub fn cpu_percent(before: &ProcView, now: &ProcView, span_us: f64) -> Option<f64> {
    // One that slept meanwhile, or was replaced, counts from somewhere else.
    if before.pids.first() != now.pids.first() || span_us <= 0.0 {
        return None;
    }
    Some(now.cpu_us?.checked_sub(before.cpu_us?)? as f64 * 100.0 / span_us)
}

/// The tier's word, or that of none.
pub fn tier_word(tier: Option<Tier>) -> String {
    tier.map_or_else(|| STOPPED.to_owned(), |tier| tier.to_string())
}

fn rank(tier: Option<Tier>) -> usize {
    let word = tier_word(tier);
    TIERS.iter().position(|t| *t == word).unwrap_or(TIERS.len())
}

fn row(view: &ProcView, cpu_percent: Option<f64>) -> TopProc {
    let wake = view.last_wake.as_ref();
    TopProc {
        name: view.name.clone(),
        state: view.state,
        tier: view.tier,
        memory_bytes: view.memory.pss_bytes,
        saved_bytes: view.saved_bytes,
        idle_ms: view.idle_ms,
        cpu_percent,
        wakes: view.wakes,
        last_wake_us: wake.map(|w| w.total_us),
        last_wake_at_ms: wake.map(|w| w.at_ms),
        last_trigger: wake.map(|w| w.trigger.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn proc(name: &str, tier: Option<&str>, mib: u64, cpu_us: Option<u64>) -> ProcView {
        let sleep = serde_json::json!({"to": "parked", "frozen_us": 1, "total_us": 1, "bytes_written": 1,
            "memory_bytes": mib << 20, "at_ms": 0});
        let held = if tier == Some("hot") { mib << 20 } else { 0 };
        let saved = (tier == Some("parked")).then_some(mib << 20);
        serde_json::from_value(serde_json::json!({
            "name": name, "realm": "default", "state": "running", "tier": tier, "worker": "m", "generation": 2, "ports": [],
            "pids": if tier == Some("hot") { vec![7] } else { vec![] },
            "memory": {"rss_bytes": 0, "pss_bytes": held, "kernel_bytes": 0, "swap_bytes": 0, "working_set_pages": 0},
            "saved_bytes": saved, "last_sleep": sleep, "last_wake": null, "exit": null, "idle_ms": null, "next_timer_ms": null,
            "cpu_us": cpu_us, "wakes": 2, "spec": {"name": name, "command": ["x"]},
        }))
        .unwrap()
    }

    fn answer(at: Instant, procs: Vec<ProcView>) -> DaemonSample {
        DaemonSample { at, at_ms: 5, procs, wakes_last_minute: 3, room: None, cache: None }
    }

    #[test]
    fn procs_are_sorted_and_summed_by_tier() {
        let begin = Instant::now();
        let procs = vec![
            proc("ended", None, 1, None),
            proc("small", Some("hot"), 2, Some(0)),
            proc("asleep", Some("parked"), 5, None),
            proc("asleep-more", Some("parked"), 8, None),
            proc("big", Some("hot"), 3, Some(100)),
        ];
        let view = compare(&answer(begin, Vec::new()), &answer(begin + Duration::from_secs(1), procs));
        let names: Vec<&str> = view.procs.iter().map(|p| p.name.as_str()).collect();
        assert_eq!(names, ["big", "small", "asleep-more", "asleep", "ended"]);
        assert_eq!((view.held_bytes, view.saved_bytes), (5 << 20, 13 << 20));
        assert_eq!(
            (view.tiers["hot"], view.tiers["parked"], view.tiers["hibernated"], view.tiers["stopped"]),
            (2, 2, 0, 1)
        );
        assert_eq!(view.procs[0].saved_bytes, None, "the awake have given nothing back");
        assert_eq!((view.procs[4].saved_bytes, view.procs[0].cpu_percent), (None, None));
    }

    #[test]
    fn cpu_is_what_was_used_between() {
        let begin = Instant::now();
        let at = |us, pid| {
            let mut busy = proc("busy", Some("hot"), 1, Some(us));
            busy.pids = vec![pid];
            vec![busy]
        };
        let first = answer(begin, at(1_000_000, 7));
        let later = begin + Duration::from_secs(2);
        assert_eq!(compare(&first, &answer(later, at(1_500_000, 7))).procs[0].cpu_percent, Some(25.0));
        for other in [at(1_500_000, 8), at(10, 7)] {
            assert_eq!(compare(&first, &answer(later, other)).procs[0].cpu_percent, None);
        }
        assert_eq!(compare(&first, &first).procs[0].cpu_percent, None);
    }
}
