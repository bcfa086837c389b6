//! `kip stats`: what procs use now, as docker's command of that name shows it. Asks what `kip ps`
//! asks, so it wakes no proc.

use crate::names::{self, name};
use crate::output::{print, print_json};
use crate::top::cpu_percent;
use clap::Args;
use kip_client::Client;
use kip_text::{bytes, table};
use kip_types::api::ProcView;
use kip_types::lifecycle::{StateName, Tier};
use kip_types::name::ProcName;
use serde::Serialize;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// From one look to the next.
const EVERY: Duration = Duration::from_secs(1);
/// Moves a terminal's cursor to its first place and clears what follows.
const CLEAR: &str = "\x1b[H\x1b[2J";

#[derive(Debug, Args)]
pub struct StatsArgs {
    /// Names of procs; default: all that are not stopped
    #[arg(add = names::known(), value_name = "NAME")]
    pub names: Vec<String>,
    /// Include stopped procs
    #[arg(short, long)]
    pub all: bool,
    /// Print the table once and end
    #[arg(long)]
    pub no_stream: bool,
}

/// A proc's line.
#[derive(Debug, Serialize)]
struct Stats {
    name: ProcName,
    state: StateName,
    tier: Option<Tier>,
    /// 100 is one core. Null for a sleeper and for one that was not there a second ago.
    cpu_percent: Option<f64>,
    /// Its proportional set, bytes.
    memory_bytes: u64,
    memory_limit_bytes: Option<u64>,
    memory_percent: Option<f64>,
    /// Its processes; none of a parked proc.
    pids: usize,
    wakes: u64,
}

/// Shows them every second until Ctrl-C, or once.
pub async fn stats(client: &Client, args: &StatsArgs, json: bool) -> anyhow::Result<()> {
    let wanted = args.names.iter().map(|text| name(text)).collect::<anyhow::Result<Vec<_>>>()?;
    // The daemon refuses an unknown name, with the name that may have been meant.
    for name in &wanted {
        client.inspect(name).await?;
    }
    let is_shown = |view: &ProcView| match wanted.as_slice() {
        [] => args.all || view.state != StateName::Stopped,
        names => names.contains(&view.name),
    };
    let clears = std::io::stdout().is_terminal() && !json && !args.no_stream;
    let mut enough = std::pin::pin!(tokio::signal::ctrl_c());
    let (mut at, mut before) = (Instant::now(), client.list().await?);
    loop {
        tokio::select! {
            pressed = &mut enough => return Ok(pressed?),
            () = tokio::time::sleep(EVERY) => {}
        }
        let (now_at, now) = (Instant::now(), client.list().await?);
        let span_us = now_at.duration_since(at).as_micros() as f64;
        let rows: Vec<Stats> =
            now.iter().filter(|view| is_shown(view)).map(|view| row(view, &before, span_us)).collect();
        match (json, clears) {
            (true, _) => print_json(&rows)?,
            (_, true) => print(&format!("{CLEAR}{}", lines(&rows)))?,
            _ => print(&lines(&rows))?,
        }
        if args.no_stream {
            return Ok(());
        }
        (at, before) = (now_at, now);
    }
}

fn row(view: &ProcView, before: &[ProcView], span_us: f64) -> Stats {
    let limit = view.spec.limits.memory_bytes;
    let memory = view.memory.pss_bytes;
    let older = before.iter().find(|older| older.name == view.name);
    Stats {
        name: view.name.clone(),
        state: view.state,
        tier: view.tier,
        cpu_percent: older.and_then(|older| cpu_percent(older, view, span_us)),
        memory_bytes: memory,
        memory_limit_bytes: limit,
        memory_percent: limit.filter(|limit| *limit > 0).map(|limit| memory as f64 * 100.0 / limit as f64),
        pids: view.pids.len(),
        wakes: view.wakes,
    }
}

fn lines(rows: &[Stats]) -> String {
    let dash = || "-".to_owned();
    let percent = |of: Option<f64>| of.map_or_else(dash, |percent| format!("{percent:.1}%"));
    let head = ["NAME", "TIER", "CPU", "MEMORY", "LIMIT", "MEM", "PIDS", "WAKES"].map(str::to_owned).to_vec();
    let line = |row: &Stats| {
        vec![
            row.name.to_string(),
            row.tier.map_or_else(|| row.state.to_string(), |tier| tier.to_string()),
            percent(row.cpu_percent),
            bytes(row.memory_bytes),
            row.memory_limit_bytes.map_or_else(dash, bytes),
            percent(row.memory_percent),
            row.pids.to_string(),
            row.wakes.to_string(),
        ]
    };
    table(&std::iter::once(head).chain(rows.iter().map(line)).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(cpu_us: u64) -> ProcView {
        serde_json::from_value(serde_json::json!({
            "name": "web", "realm": "default", "state": "running", "tier": "hot", "worker": "m", "generation": 2, "ports": [],
            "pids": [7, 8], "cpu_us": cpu_us, "wakes": 2,
            "memory": {"rss_bytes": 0, "pss_bytes": 16 << 20, "kernel_bytes": 0, "swap_bytes": 0, "working_set_pages": 0},
            "last_sleep": null, "last_wake": null, "exit": null, "idle_ms": null, "next_timer_ms": null,
            "spec": {"name": "web", "command": ["x"], "limits": {"memory_bytes": 64 << 20}},
        }))
        .unwrap()
    }

    #[test]
    fn a_line_has_shares_of_a_core_and_of_the_limit() {
        let rows = [row(&view(1_500_000), &[view(1_000_000)], 2e6), row(&view(5), &[], 1e6)];
        let text = lines(&rows);
        let words: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(words[1], ["web", "hot", "25.0%", "16.0M", "64.0M", "25.0%", "2", "2"]);
        assert_eq!(words[2][2], "-");
    }
}
