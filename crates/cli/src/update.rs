//! `kip update`: what of procs is changed, and what is said of it.

use crate::life::parse_restart;
use crate::many::each;
use crate::names;
use crate::output::show;
use crate::run_args::{parse_file_pages, parse_switch};
use anyhow::bail;
use clap::Args;
use kip_client::Client;
use kip_types::api::{LimitsUpdate, ProcView, TimingUpdate, UpdateRequest};
use kip_types::life::Restart;
use kip_types::name::ProcName;
use kip_types::spec::{
    Clock, Fallback, Hibernate, InnerPort, Lazy, PortSpec, parse_duration_ms, parse_label, parse_size,
};
use std::process::ExitCode;

#[derive(Debug, Args)]
pub struct UpdateArgs {
    /// Names of procs
    #[arg(add = names::known(), required = true, value_name = "NAME")]
    pub names: Vec<String>,
    /// Most memory, for example 64M, not less than a proc uses; 0 for no limit
    #[arg(short, long, alias = "memory", value_name = "SIZE", value_parser = parse_size)]
    pub mem: Option<u64>,
    /// Most CPU time, 1.0 is one core; 0 for no limit
    #[arg(long, value_name = "N")]
    pub cpus: Option<f64>,
    /// Most processes and threads
    #[arg(long, alias = "pids-limit", value_name = "N")]
    pub pids: Option<u32>,
    /// Time without activity after which a proc is hibernated
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms)]
    pub idle: Option<u64>,
    /// Time a proc stays hibernated before it is parked
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms)]
    pub park_after: Option<u64>,
    /// Time a proc stays parked before it is archived, to any store and even with open connections
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms)]
    pub archive_after: Option<u64>,
    /// Timers and time-outs shorter than this do not count as activity; from the next sleep on
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms)]
    pub tick: Option<u64>,
    /// CLOCK_MONOTONIC of a parked proc: continue, suspend or auto; from the next sleep on
    #[arg(long, value_name = "HOW")]
    pub clock: Option<Clock>,
    /// How the proc hibernates: auto, blocked, held or off; from the next sleep on
    #[arg(long, value_name = "HOW")]
    pub hibernate: Option<Hibernate>,
    /// Whether a wake prefetches the working set; from the next sleep on
    #[arg(long, value_name = "ON|OFF", value_parser = parse_switch)]
    pub prefetch: Option<bool>,
    /// Start a parked proc before all its memory is read: auto, on or off; from the next sleep on
    #[arg(long, value_name = "WHEN")]
    pub lazy: Option<Lazy>,
    /// Whether hibernation drops unchanged pages of files: drop or keep
    #[arg(long, value_name = "DROP|KEEP", value_parser = parse_file_pages)]
    pub file_pages: Option<bool>,
    /// If the snapshot is damaged: cold or previous
    #[arg(long, value_name = "TO")]
    pub fallback: Option<Fallback>,
    /// Sleep only by `kip sleep`, never automatically
    #[arg(long, value_name = "ON|OFF", value_parser = parse_switch)]
    pub never_sleep: Option<bool>,
    /// Stay awake, and report when the proc would have slept
    #[arg(long, value_name = "ON|OFF", value_parser = parse_switch)]
    pub idle_dry_run: Option<bool>,
    /// Start it again when its program ends: no, on-failure (or on-failure:MAX) or always
    #[arg(long, value_name = "POLICY", value_parser = parse_restart)]
    pub restart: Option<Restart>,
    /// Stop signal that `kip stop` sends first
    #[arg(long, value_name = "SIGNAL")]
    pub stop_signal: Option<String>,
    /// Time between the stop signal and SIGKILL
    #[arg(long, alias = "stop-timeout", value_name = "DUR", value_parser = parse_duration_ms)]
    pub stop_grace: Option<u64>,
    // Not a doc comment: rustdoc would take the brackets for links.
    #[arg(
        help = "Publish [ADDRESS:][HOST:]PORT[/udp][,wake=data] or PORT,private, or publish such a port otherwise; may be repeated",
        short = 'p',
        long = "port",
        alias = "publish",
        value_name = "PORT"
    )]
    pub ports: Vec<PortSpec>,
    /// Stop publishing PORT, or PORT/udp, of the proc; open connections stay; may be repeated
    #[arg(long, value_name = "PORT")]
    pub port_rm: Vec<InnerPort>,
    /// Set a label, with or without a value; may be repeated
    #[arg(short, long = "label", value_name = "K=V", value_parser = parse_label)]
    pub labels: Vec<(String, String)>,
    /// Remove a label; may be repeated
    #[arg(long, value_name = "K")]
    pub label_rm: Vec<String>,
}

impl UpdateArgs {
    /// What the API is asked for.
    pub fn request(&self) -> UpdateRequest {
        let removed = self.label_rm.iter().map(|key| (key.clone(), None));
        let set = self.labels.iter().map(|(key, value)| (key.clone(), Some(value.clone())));
        UpdateRequest {
            limits: LimitsUpdate {
                memory_bytes: self.mem.map(|bytes| (bytes > 0).then_some(bytes)),
                cpus: self.cpus.map(|cpus| (cpus != 0.0).then_some(cpus)),
                pids: self.pids,
            },
            timing: TimingUpdate {
                idle_ms: self.idle,
                park_after_ms: self.park_after,
                archive_after_ms: self.archive_after,
                tick_ms: self.tick,
                clock: self.clock,
                never: self.never_sleep,
                dry_run: self.idle_dry_run,
                hibernate: self.hibernate,
                prefetch: self.prefetch,
                lazy: self.lazy,
                keep_files: self.file_pages,
                fallback: self.fallback,
            },
            restart: self.restart,
            stop_signal: self.stop_signal.clone().map(Some),
            stop_grace_ms: self.stop_grace.map(Some),
            set_ports: self.ports.clone(),
            remove_ports: self.port_rm.clone(),
            scale: None,
            labels: removed.chain(set).collect(),
        }
    }
}

pub async fn update(client: &Client, args: &UpdateArgs, json: bool) -> anyhow::Result<ExitCode> {
    let request = args.request();
    if request == UpdateRequest::default() {
        bail!("nothing is to be changed: give at least one option, for example --mem 64M");
    }
    let told = |view: &ProcView| format!("{} updated\n", view.name);
    each(&args.names, async |name: &ProcName| show(&client.update(name, &request).await?, json, told)).await
}

#[cfg(test)]
mod tests {
    use crate::args::{Cli, Command};

    fn request(words: &str) -> serde_json::Value {
        let cli = Cli::read(["kip", "update", "web"].into_iter().chain(words.split_whitespace())).unwrap();
        let Command::Update(args) = cli.command else { panic!("another command") };
        serde_json::to_value(args.request()).unwrap()
    }

    #[test]
    fn only_what_is_given_is_asked_for() {
        let all = request("--memory 64M --cpus 0 --idle 5s --never-sleep off --label-rm a -l b=c -l d");
        assert_eq!(
            all,
            serde_json::json!({
                "limits": { "memory_bytes": 64 << 20, "cpus": null },
                "timing": { "idle_ms": 5000, "never": false },
                "labels": { "a": null, "b": "c", "d": "" },
            })
        );
        assert_eq!(request(""), serde_json::json!({ "limits": {}, "timing": {} }));
        assert!(Cli::read(["kip", "update", "web", "--cpus", "much"]).is_err());
        assert!(Cli::read(["kip", "update", "--idle", "5s"]).is_err());
    }
}
