//! `kip meter`: what procs have used.

use crate::names::{self, name};
use crate::output::show;
use clap::Args;
use kip_client::Client;
use kip_text as text;
use kip_text::table;
use kip_types::api::{MeterRequest, MeterView, TierMeterView};
use kip_types::spec::parse_duration_ms;

/// Bytes times seconds in one GB-hour; a GB is 10^9 bytes.
const GB_HOUR: f64 = 1e9 * 3600.0;

#[derive(Debug, Args)]
pub struct MeterArgs {
    /// Names of procs; default: all
    #[arg(add = names::known(), value_name = "NAME")]
    pub names: Vec<String>,
    /// Only use within this time, to a quarter of an hour
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms)]
    pub since: Option<u64>,
}

/// Asks and shows.
pub async fn meter(client: &Client, args: &MeterArgs, json: bool) -> anyhow::Result<()> {
    let which = MeterRequest { since_ms: args.since.map(|ms| text::now_ms().saturating_sub(ms)) };
    let mut views = Vec::new();
    if args.names.is_empty() {
        views = client.meters(&which).await?;
    }
    for text in &args.names {
        views.push(client.meter(&name(text)?, &which).await?);
    }
    show(&views, json, |views| lines(views))
}

fn lines(views: &[MeterView]) -> String {
    if views.is_empty() {
        return "there are no procs\n".to_owned();
    }
    let head = ["NAME", "TIER", "TIME", "GB-HOURS", "CPU", "CONNECTIONS", "DATAGRAMS", "WAKES"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for view in views {
        let totals = counts(view.cpu_us, view.connections, view.datagrams);
        rows.push(
            [vec![view.name.to_string(), "all".to_owned()], sums(view), totals, vec![wakes(view, None)]].concat(),
        );
        rows.extend(view.tiers.iter().map(|used| {
            let counts = counts(used.cpu_us, used.connections, used.datagrams);
            [vec![String::new(), used.tier.to_string()], use_of(used), counts, vec![wakes(view, Some(used))]].concat()
        }));
    }
    table(&rows)
}

fn counts(cpu_us: u64, connections: u64, datagrams: u64) -> Vec<String> {
    vec![format!("{:.2} s", cpu_us as f64 / 1e6), connections.to_string(), datagrams.to_string()]
}

fn use_of(used: &TierMeterView) -> Vec<String> {
    vec![text::millis(used.time_us / 1000), format!("{:.6}", used.byte_seconds / GB_HOUR)]
}

/// Memory, disk and store have prices of their own, so only their times add up.
fn sums(view: &MeterView) -> Vec<String> {
    vec![text::millis(view.tiers.iter().map(|used| used.time_us).sum::<u64>() / 1000), "-".to_owned()]
}

/// `3 (tcp 2, timer 1)`, of all tiers or of one.
fn wakes(view: &MeterView, of: Option<&TierMeterView>) -> String {
    let own = view.wakes.iter().filter(|wakes| of.is_none_or(|used| used.tier == wakes.from));
    let counted: Vec<_> = own.collect();
    let all: u64 = counted.iter().map(|wakes| wakes.count).sum();
    match (of, all) {
        (None, _) | (_, 0) => all.to_string(),
        _ => {
            let each: Vec<String> = counted.iter().map(|wakes| format!("{} {}", wakes.trigger, wakes.count)).collect();
            format!("{all} ({})", each.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_types::api::WakesView;
    use kip_types::{StateName, Tier};

    #[test]
    fn each_tier_has_a_line() {
        let used = |tier, s: u64, gb: f64, connections| TierMeterView {
            tier,
            time_us: s * 1_000_000,
            byte_seconds: gb * 3.6e12,
            cpu_us: s * 300_000,
            connections,
            datagrams: 0,
        };
        let woken = |trigger: &str, count| WakesView { from: Tier::Parked, trigger: trigger.to_owned(), count };
        let view = MeterView {
            name: "web".parse().unwrap(),
            state: StateName::Parked,
            tier: Some(Tier::Parked),
            from_ms: 1,
            to_ms: 2,
            held_bytes: 9,
            tiers: vec![used(Tier::Hot, 2, 0.5, 2), used(Tier::Parked, 3, 0.25, 2)],
            cpu_us: 1_500_000,
            connections: 4,
            datagrams: 0,
            oom_kills: 0,
            wakes: vec![woken("tcp", 2), woken("timer", 1)],
        };
        let text = lines(&[view]);
        let words: Vec<Vec<&str>> =
            text.lines().map(|line| line.split("  ").map(str::trim).filter(|w| !w.is_empty()).collect()).collect();
        assert_eq!(words[1], ["web", "all", "5.0s", "-", "1.50 s", "4", "0", "3"], "{text}");
        assert_eq!(words[2], ["hot", "2.0s", "0.500000", "0.60 s", "2", "0", "0"], "{text}");
        assert_eq!(words[3], ["parked", "3.0s", "0.250000", "0.90 s", "2", "0", "3 (tcp 2, timer 1)"], "{text}");
        assert_eq!(lines(&[]), "there are no procs\n");
    }
}
