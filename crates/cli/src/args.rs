//! The command line, as DESIGN.md has it.

use crate::apply::{ApplyArgs, DiffArgs, ExportArgs};
use crate::backup::{BackupArgs, RestoreArgs};
use crate::check::{CheckArgs, TrialArgs, parse_sleep_tier};
use crate::exec::ExecArgs;
use crate::image::ImageCommand;
use crate::key::KeyCommand;
use crate::meter::MeterArgs;
use crate::names;
use crate::remote::RemoteArgs;
use crate::run_args::RunArgs;
use crate::snapshot::SnapshotArgs;
use crate::token::TokenCommand;
use crate::top::TopArgs;
use crate::up::UpArgs;
use crate::volume::VolumeCommand;
use crate::wait::WaitArgs;
use clap::{Args, Parser, Subcommand};
use kip_types::api::Detail;
use kip_types::lifecycle::Tier;
use kip_types::spec::{Clock, parse_duration_ms};
use std::path::PathBuf;

/// Virtual memory for processes: programs that look always on and cost nothing while idle.
#[derive(Debug, Parser)]
#[command(name = "kip", version, max_term_width = 110)]
pub struct Cli {
    // Not a doc comment: rustdoc would take the brackets for links.
    #[arg(help = "Data directory of the daemon [default: /var/lib/kip]", long, global = true, value_name = "DIR")]
    pub data: Option<PathBuf>,
    #[command(flatten)]
    pub remote: RemoteArgs,
    /// Print JSON
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon in the foreground; it prints `ready` and the API's address
    Up(Box<UpArgs>),
    /// End every proc and the daemon
    Down(DownArgs),
    /// Create a proc and start it
    Run {
        #[command(flatten)]
        trial: TrialArgs,
        #[command(flatten)]
        args: Box<RunArgs>,
    },
    /// Try whether a program can sleep: one like it is started, sleeps and wakes in each tier, and is removed; exits with 1 if not
    Check(Box<CheckArgs>),
    /// Start a stopped proc again, on its files
    Start(NameArg),
    /// Make the procs that a file describes: kip.toml, or a Compose file
    Apply(ApplyArgs),
    /// Show what `apply` would do; exits with 0 if nothing, with 1 if something
    Diff(DiffArgs),
    /// Print procs as a kip.toml that makes the same ones elsewhere; it has the values of environment variables
    Export(ExportArgs),
    /// List procs
    Ps,
    /// Watch procs by tier, memory, CPU and wakes; `q` ends it
    Top(TopArgs),
    /// Show everything about a proc, or what is inside of it, without waking it
    Inspect(InspectArgs),
    /// Show what a proc wrote
    Logs(LogsArgs),
    /// Run a program inside a proc; exits with its code
    Exec(ExecArgs),
    /// Wait until a proc is ready
    Wait(WaitArgs),
    /// End a proc; its name, files and logs stay
    Stop(StopArgs),
    /// Remove a proc with all it has
    Rm(RmArgs),
    /// Send a proc to a lower tier
    Sleep(SleepArgs),
    /// Wake a proc; one that is not here but in the store, and runs nowhere, is taken over
    Wake(WakeArgs),
    /// Say why a proc is awake, or what keeps it from sleeping
    Why(NameArg),
    /// List the programs that are known to bear a sleep in which their clock stands
    Profiles,
    /// Show what procs have used: time and memory by tier, CPU time, connections, wakes
    Meter(MeterArgs),
    /// Print the metrics that Prometheus scrapes, which are `GET /metrics` of the API; docs/metrics.md lists them
    Metrics,
    /// Show what happened
    Events(EventsArgs),
    /// Look at generations in the store, carry them elsewhere, delete what is of no use any more
    Snapshot(SnapshotArgs),
    /// Bring, list and remove images
    #[command(subcommand)]
    Image(ImageCommand),
    /// Show and change the keys that seal what is archived
    #[command(subcommand)]
    Key(KeyCommand),
    /// Write all that the data directory keeps, procs with their memory, into one closed file; sleepers stay asleep, others sleep for a moment
    Backup(BackupArgs),
    /// Make a data directory of a backup, before `kip up`
    Restore(RestoreArgs),
    /// Show and remove volumes that are kept under a name
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Make, list and remove the tokens that let clients in by TCP; on the daemon's machine
    #[command(subcommand)]
    Token(TokenCommand),
    /// Check what Kip needs of this machine
    Doctor(DoctorArgs),
    /// Print what a shell needs to complete commands and names: `source <(kip completion bash)`
    Completion(CompletionArgs),
    /// Print the manual, or write a page for each command
    Man(ManArgs),
}

/// A proc. Not checked here: a name that no proc can have is an unknown proc, not wrong usage.
#[derive(Debug, Args)]
pub struct NameArg {
    /// Name of the proc
    #[arg(add = names::known())]
    pub name: String,
}

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Name of the proc
    #[arg(add = names::known())]
    pub name: String,
    /// What each process has open, and the proc's own files: those that differ from its base, the first 200 by path
    #[arg(long, group = "detail")]
    pub files: bool,
    /// Each process's command line, directory, user and environment, which may hold secrets
    #[arg(long, group = "detail")]
    pub env: bool,
    /// Sockets: addresses, state, bytes queued, the processes that have them open, whether Kip holds them
    #[arg(long, group = "detail")]
    pub sockets: bool,
    /// Each process's memory: what is mapped where, and how much of it is in memory, out, on disk, in the store
    #[arg(long, group = "detail")]
    pub maps: bool,
}

impl InspectArgs {
    /// What is asked for beyond the proc itself.
    pub fn detail(&self) -> Option<Detail> {
        let all = [
            (self.files, Detail::Files),
            (self.env, Detail::Env),
            (self.sockets, Detail::Sockets),
            (self.maps, Detail::Maps),
        ];
        all.into_iter().find_map(|(asked, detail)| asked.then_some(detail))
    }
}

#[derive(Debug, Args)]
pub struct LogsArgs {
    /// Name of the proc
    #[arg(add = names::known())]
    pub name: String,
    /// Go on with new lines
    #[arg(short, long)]
    pub follow: bool,
    /// Only the newest lines
    #[arg(long, value_name = "N")]
    pub tail: Option<u64>,
    /// Only what was written within this time
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms)]
    pub since: Option<u64>,
    /// Begin each line with its time
    #[arg(long)]
    pub timestamps: bool,
}

#[derive(Debug, Args)]
pub struct StopArgs {
    /// Name of the proc
    #[arg(add = names::known())]
    pub name: String,
    /// From asking it to end to killing it; without it what `kip run --stop-grace` said, else 10s
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms)]
    pub grace: Option<u64>,
}

#[derive(Debug, Args)]
pub struct DownArgs {
    /// Park every proc instead of ending it, as before the machine goes down: the next `kip up` has them again, and wakes those that
    /// were awake; exits with 1 if some cannot be parked, which run on
    #[arg(long)]
    pub park: bool,
    /// How long that may take; 90s. A proc that is not parked by then runs on
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms, requires = "park")]
    pub within: Option<u64>,
}

#[derive(Debug, Args)]
pub struct RmArgs {
    /// Name of the proc
    #[arg(add = names::known())]
    pub name: String,
    /// End it first if it is not stopped
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, Args)]
pub struct SleepArgs {
    /// Name of the proc
    #[arg(add = names::known())]
    pub name: String,
    /// Tier to go to: hibernated, parked or archived (with `kip up --store`)
    #[arg(long, value_name = "TIER", value_parser = parse_sleep_tier, default_value = "parked")]
    pub to: Tier,
    /// Its CLOCK_MONOTONIC in this one sleep: suspend (it stands; the default unless the proc was run with --clock continue), continue, auto (as in a sleep by itself)
    #[arg(long, value_name = "HOW")]
    pub clock: Option<Clock>,
}

#[derive(Debug, Args)]
pub struct WakeArgs {
    /// Name of the proc, or its id in the store
    #[arg(add = names::known())]
    pub name: String,
    /// Take over the proc of this id from the store, as NAME
    #[arg(long, value_name = "ID", value_parser = parse_id)]
    pub id: Option<String>,
}

#[derive(Debug, Args)]
pub struct CompletionArgs {
    /// bash, zsh, fish, elvish or powershell
    pub shell: String,
}

#[derive(Debug, Args)]
pub struct ManArgs {
    /// Write a page for each command into this directory, instead of the first one to stdout
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct EventsArgs {
    /// Go on with new ones; when the connection is lost, it is made again and nothing is missed
    #[arg(short, long)]
    pub follow: bool,
    /// Only those after the event of this id, which --json shows
    #[arg(long, value_name = "ID")]
    pub since: Option<u64>,
}

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// CRIU's program, instead of the one found on this machine
    #[arg(long, value_name = "PATH")]
    pub criu: Option<PathBuf>,
}

/// What an id in the store looks like: only the daemon knows whether there is such a proc.
fn parse_id(text: &str) -> Result<String, String> {
    match text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit()) {
        true => Ok(text.to_ascii_lowercase()),
        false => Err("an id has 32 hexadecimal digits".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use kip_types::api::{LeftOpen, RunRequest};
    use kip_types::name::MAX_NAME;
    use kip_types::spec::{Image, Limits, Timing};

    fn run_request(words: &[&str]) -> RunRequest {
        let words = ["kip", "run"].iter().chain(words);
        match Cli::try_parse_from(words).unwrap().command {
            Command::Run { args, .. } => args.into_request().unwrap(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_image_s_command_is_arguments() {
        let request = run_request(&["--image", "host:5000/team/web:1", "-P", "--entrypoint", "/x", "--", "-a", "b"]);
        assert_eq!((request.spec.name.as_str(), request.spec.command), ("web", vec!["-a".to_owned(), "b".to_owned()]));
        let Image::Oci(image) = request.spec.image else { panic!("no image") };
        assert_eq!((image.publish_all, image.entrypoint), (true, Some(vec!["/x".to_owned()])));
        assert!(run_request(&["--image", "web"]).spec.command.is_empty());
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_working_set_may_come_by_faults_alone() {
        assert!(run_request(&["--", "true"]).spec.timing.prefetch);
        assert!(run_request(&["--prefetch", "on", "--", "true"]).spec.timing.prefetch);
        assert!(!run_request(&["--prefetch", "off", "--", "true"]).spec.timing.prefetch);
    }

    // promise command-line: flags and what is left to the daemon
    // held by: this, `kip_cli::args::tests::what_is_not_said_is_left_to_the_daemon`
    #[test]
    fn run_takes_every_flag() {
        let request = run_request(&[
            "--name",
            "web",
            "--tar",
            "/x.tar",
            "--port",
            "8080:80",
            "--port",
            "53/udp",
            "-v",
            "/srv/x:/data:ro",
            "--volume",
            "db:/db",
            "--mem",
            "64M",
            "--disk",
            "1G",
            "--log-size",
            "1M",
            "--log-files",
            "5",
            "--cpus",
            "0.5",
            "--pids",
            "7",
            "--env",
            "A=b=c",
            "--env",
            "E=",
            "--workdir",
            "/srv",
            "--idle",
            "2s",
            "--park-after",
            "500ms",
            "--tick",
            "1m",
            "--never-sleep",
            "--allow-setuid",
            "--wait-ready",
            "--",
            "sh",
            "-c",
            "x",
            "--json",
            "--",
        ]);
        let spec = &request.spec;
        assert_eq!(spec.command, ["sh", "-c", "x", "--json", "--"]);
        assert_eq!((spec.ports[0].host_port, spec.ports[1].port), (Some(8080), 53));
        assert_eq!(spec.volumes, ["/srv/x:/data:ro", "db:/db"].map(|v| v.parse().unwrap()));
        assert_eq!((spec.env["A"].as_str(), spec.env["E"].as_str()), ("b=c", ""));
        assert_eq!(
            spec.timing,
            Timing { idle_ms: 2000, park_after_ms: 500, tick_ms: 60_000, never: true, ..Timing::default() }
        );
        assert_eq!(
            spec.limits,
            Limits {
                memory_bytes: Some(64 << 20),
                cpus: Some(0.5),
                pids: 7,
                disk_bytes: Some(1 << 30),
                log_bytes: 1 << 20,
                log_files: 5
            }
        );
        assert_eq!(spec.image, Image::Tar("/x.tar".into()));
        assert!(request.wait_ready && spec.allow_setuid);
        assert_eq!(request.left_open, LeftOpen { archive_after: true, ..LeftOpen::default() });
    }

    #[test]
    fn what_is_not_said_is_left_to_the_daemon() {
        let request = run_request(&["--", "/usr/bin/Python3.11", "-m", "http.server"]);
        assert_eq!(request.spec.name.as_str(), "python3-11");
        assert_eq!(request.left_open, LeftOpen { name: true, idle: true, park_after: true, archive_after: true });
        assert_eq!(run_request(&["--", "./_"]).spec.name.as_str(), "proc");
        let long = "x".repeat(100);
        assert_eq!(run_request(&["--", &long]).spec.name.as_str().len(), MAX_NAME - 20);
        assert!(run_request(&["--tar", "x.tar", "--", "x"]).spec.image != Image::Tar("x.tar".into()));
    }

    #[test]
    fn global_flags_go_anywhere_and_execs_arguments_are_its_own() {
        let cli = Cli::try_parse_from(["kip", "exec", "web", "--json", "--data", "/d", "--", "ls", "--json"]).unwrap();
        assert!(cli.json && cli.data == Some("/d".into()));
        let Command::Exec(args) = cli.command else { panic!() };
        assert_eq!(args.command, ["ls", "--json"]);
        let cli = Cli::try_parse_from(["kip", "exec", "web", "ls", "--json", "-la"]).unwrap();
        let Command::Exec(args) = cli.command else { panic!() };
        assert!(!cli.json);
        assert_eq!(args.command, ["ls", "--json", "-la"]);
    }

    #[test]
    fn usage_is_checked() {
        for words in [
            &["run"][..],
            &["run", "web"],
            &["run", "--"],
            &["run", "--port", "70000", "--", "x"],
            &["run", "--name", "Not_A_Name", "--", "x"],
            &["run", "--env", "A", "--", "x"],
            &["run", "--mem", "much", "--", "x"],
            &["run", "-v", "data", "--", "x"],
            &["run", "-v", "./data:/data", "--", "x"],
            &["volume", "rm"],
            &["volume", "rm", "../x"],
            &["run", "--image", "debian", "--tar", "x.tar"],
            &["run", "--entrypoint", "/bin/sh", "--", "x"],
            &["run", "-P", "--", "x"],
            &["run", "--image", "debian", "--pull", "often"],
            &["image", "pull"],
            &["image", "pull", "/etc"],
            &["image", "load", "oci:"],
            &["up", "--archive-after", "soon"],
            &["up", "--memory", "much"],
            &["up", "--disk", "much", "--store", "/s"],
            &["up", "--memory-high", "101"],
            &["up", "--memory-high", "0"],
            &["up", "--memory-low", "-1"],
            &["up", "--memory-low", "80M"],
            &["sleep", "web", "--to", "hot"],
            &["exec", "web"],
            &["wake", "web", "--id", "xyz"],
            &["inspect"],
            &["inspect", "web", "--files", "--env"],
            &["key"],
            &["key", "destroy"],
            &["key", "export", "f", "--key-file", "a", "--passphrase-file", "b"],
            &["key", "export", "f", "--passphrase", "a"],
            &["top", "-d", "0"],
            &["top", "-d", "soon"],
            &["top", "web"],
            &["logs", "web", "--tail", "-1"],
            &["up", "--listen", "nowhere"],
            &["up", "--listen", "127.0.0.1:0"],
            &["up", "--listen", "127.0.0.1:0", "--tls-cert", "c"],
            &["up", "--listen", "127.0.0.1:0", "--listen-plain", "--tls-cert", "c", "--tls-key", "k"],
            &["--data", "/d", "--host", "https://h:1", "ps"],
            &["token", "create", "a", "--scope", "much"],
            &["events", "--since", "x"],
            &["dance"],
            &[],
        ] {
            let error = Cli::try_parse_from(["kip"].iter().chain(words)).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{words:?}");
        }
    }
}
