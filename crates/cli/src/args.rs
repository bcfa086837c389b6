//! The command line: options and help of every command.

use crate::apply::{ApplyArgs, DiffArgs, ExportArgs};
use crate::attach::AttachArgs;
use crate::backup::{BackupArgs, RestoreArgs};
use crate::check::{CheckArgs, TrialArgs, parse_sleep_tier};
use crate::checkpoint::{CheckpointArgs, RollbackArgs};
use crate::cp::CpArgs;
use crate::events::EventsArgs;
use crate::exec::ExecArgs;
use crate::image::ImageCommand;
use crate::key::KeyCommand;
use crate::logs::LogsArgs;
use crate::meter::MeterArgs;
use crate::names;
use crate::port::PortArgs;
use crate::ps::PsArgs;
use crate::remote::RemoteArgs;
use crate::run_args::{CHECK_USAGE, RUN_USAGE, RunArgs};
use crate::scale::ScaleArgs;
use crate::snapshot::SnapshotArgs;
use crate::spawn::{EvictArgs, ProcsArgs, SpawnArgs};
use crate::stats::StatsArgs;
use crate::template::TemplateCommand;
use crate::token::TokenCommand;
use crate::top::TopArgs;
use crate::tree::TreeCommand;
use crate::up::UpArgs;
use crate::update::UpdateArgs;
use crate::volume::VolumeCommand;
use crate::wait::WaitArgs;
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand};
use kip_types::api::Detail;
use kip_types::lifecycle::Tier;
use kip_types::name::ProcName;
use kip_types::scale::CloneMethod;
use kip_types::spec::PortSpec;
use kip_types::spec::{Clock, parse_duration_ms};
use kip_types::volume::ClonedVolumes;
use std::ffi::OsString;
use std::path::PathBuf;

/// Virtual memory for processes: programs that look always on and cost nothing while idle.
#[derive(Debug, Parser)]
#[command(name = "kip", version, max_term_width = 110)]
pub struct Cli {
    // Not a doc comment: rustdoc would take the brackets for links.
    #[arg(
        help = "Data directory of the daemon [default: /var/lib/kip]",
        long,
        global = true,
        display_order = 900,
        value_name = "DIR"
    )]
    pub data: Option<PathBuf>,
    #[command(flatten)]
    pub remote: RemoteArgs,
    /// Print JSON
    #[arg(long, global = true, display_order = 900)]
    pub json: bool,
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// Reads a command line, its first word the program's name.
    ///
    /// # Errors
    /// As clap has them, which has the exit code and the text.
    pub fn read(words: impl IntoIterator<Item = impl Into<OsString>>) -> Result<Cli, clap::Error> {
        let words: Vec<OsString> = words.into_iter().map(Into::into).collect();
        let mut cli = Cli::try_parse_from(&words)?;
        let (args, command) = match &mut cli.command {
            Command::Run { args, .. } => (&mut **args, "run"),
            Command::Check(args) => (&mut args.run, "check"),
            _ => return Ok(cli),
        };
        args.divide(&words).map_err(|line| {
            let mut all = Cli::command();
            all.build();
            let of = all.find_subcommand_mut(command).expect("the command that was read");
            of.error(ErrorKind::ArgumentConflict, line)
        })?;
        Ok(cli)
    }
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon in the foreground; it prints `ready` and the API's address
    Up(Box<UpArgs>),
    /// End every proc and the daemon
    Down(DownArgs),
    /// Create a proc and start it: of an image, or after `--` a program of this machine
    #[command(override_usage = RUN_USAGE)]
    Run {
        #[command(flatten)]
        trial: TrialArgs,
        #[command(flatten)]
        args: Box<RunArgs>,
    },
    /// Try whether a program can sleep: a trial proc starts, sleeps and wakes in each tier, and is
    /// removed; exits with 1 if not
    #[command(override_usage = CHECK_USAGE)]
    Check(Box<CheckArgs>),
    /// Start stopped procs again, on their files
    Start(StartArgs),
    /// End procs and start them again, on their files
    Restart(StopArgs),
    /// Give a proc another name, in any tier, without waking it
    Rename(RenameArgs),
    /// Make procs that go on from where a proc is: its memory and its files, with names, addresses
    /// and ports of their own
    Clone(CloneArgs),
    /// Keep a proc as it is now, its memory and its files, to clone it or to go back to it later
    Checkpoint(CheckpointArgs),
    /// Let a proc go on from a checkpoint; what it was is kept as another checkpoint
    Rollback(RollbackArgs),
    /// Let several procs serve behind the name of one, more of them under load; without options,
    /// show them
    Scale(ScaleArgs),
    /// Take, list and remove templates: what procs of one kind begin from in place of a start
    #[command(subcommand)]
    Template(TemplateCommand),
    /// Change limits, times, ports, labels and the restart policy of procs without a restart
    Update(Box<UpdateArgs>),
    /// Create the procs that a file describes: kip.toml, or a Compose file
    Apply(ApplyArgs),
    /// Show what `apply` would do; exits with 0 if nothing, with 1 if something
    Diff(DiffArgs),
    /// Print procs as a kip.toml that creates the same procs elsewhere, values of environment
    /// variables included
    Export(ExportArgs),
    /// List procs
    Ps(PsArgs),
    /// Show where the ports of a proc are published
    Port(PortArgs),
    /// Show what procs use of CPU and memory, every second
    Stats(StatsArgs),
    /// Watch procs by tier, memory, CPU and wakes; `q` ends it
    Top(TopArgs),
    /// Show everything about procs, or what is inside of them, without waking them
    Inspect(InspectArgs),
    /// Show what a proc wrote
    Logs(LogsArgs),
    /// Run a program inside a proc; exits with its code
    Exec(ExecArgs),
    /// Attach to a proc's terminal, or to its output and input; ctrl-p ctrl-q detaches
    Attach(AttachArgs),
    /// Copy files from a proc or to one, which stays in its tier: NAME:PATH HERE, or HERE NAME:PATH
    Cp(CpArgs),
    /// Wait until procs end, and print their exit codes; with --ready until they are ready
    Wait(WaitArgs),
    /// End procs; their names, files and logs stay
    Stop(StopArgs),
    /// End procs at once, by SIGKILL; their names, files and logs stay. Or send another signal to
    /// their programs
    Kill(KillArgs),
    /// Remove procs with all they have
    Rm(RmArgs),
    /// Send procs to a lower tier
    Sleep(SleepArgs),
    /// Wake procs; a proc that is only in the store, and runs nowhere, is moved to this data
    /// directory
    Wake(WakeArgs),
    /// Say why a proc is awake, or what keeps it from sleeping
    Why(NameArg),
    /// List programs known to work when their clock stands still while they sleep
    Profiles,
    /// Show the use of procs so far: time and memory by tier, CPU time, connections, wakes
    Meter(MeterArgs),
    /// Print the metrics that Prometheus scrapes, which are `GET /metrics` of the API;
    /// docs/metrics.md lists them
    Metrics,
    /// Show events: starts, sleeps, wakes, refusals
    Events(EventsArgs),
    /// List, verify, export and import generations in the store, and delete unused objects
    Snapshot(SnapshotArgs),
    /// Pull, list and remove images
    #[command(subcommand)]
    Image(ImageCommand),
    /// Show and change the keys that seal what is archived
    #[command(subcommand)]
    Key(KeyCommand),
    /// Write the whole data directory, procs with their memory, into one encrypted file; sleeping
    /// procs stay asleep, others sleep for a moment
    Backup(BackupArgs),
    /// Make a data directory of a backup, before `kip up`
    Restore(RestoreArgs),
    /// Show and remove volumes that are kept under a name
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Spawn a proc that runs once and never starts again: prints its name, by which its end is
    /// waited for
    Spawn(Box<SpawnArgs>),
    /// List procs by spawn, children below their parents
    Procs(ProcsArgs),
    /// Have procs by spawn end
    Evict(EvictArgs),
    /// Small files under names: read, write, move and watch them
    #[command(subcommand)]
    Tree(TreeCommand),
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
pub struct RenameArgs {
    /// Name of the proc
    #[arg(add = names::known())]
    pub name: String,
    /// Its name from now on
    pub new: ProcName,
}

#[derive(Debug, Args)]
pub struct CloneArgs {
    /// Name of the source, in any tier; a sleeper is not woken. PROC@TAG is a
    /// checkpoint of it
    #[arg(add = names::known())]
    pub source: String,
    /// Name of the clone [default: the source's, with a number]
    pub name: Option<ProcName>,
    /// Make several, named NAME-1, NAME-2 and so on, all of one moment
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub count: u32,
    // Not a doc comment: rustdoc would take the brackets for links.
    #[arg(
        help = "Publish [ADDRESS:][HOST:]PORT of a single clone there; others of the source's ports get ports of the host that Kip chooses; may be repeated",
        short = 'p',
        long = "port",
        alias = "publish",
        value_name = "PORT"
    )]
    pub ports: Vec<PortSpec>,
    /// Go on from where the source is; the default
    #[arg(long, group = "method")]
    pub hot: bool,
    /// Go on from the template of the source's kind: `kip template`
    #[arg(long, group = "method")]
    pub warm: bool,
    /// Start what the source was asked to be
    #[arg(long, group = "method")]
    pub cold: bool,
    /// The same by name: hot, warm, cold, or auto for what is best just now
    #[arg(long = "method", group = "method", value_name = "HOW")]
    pub by: Option<CloneMethod>,
    /// Make none; tell what a clone would best begin from just now, and why
    #[arg(long, conflicts_with_all = ["name", "count", "ports", "method", "volumes", "asleep"])]
    pub explain: bool,
    /// What the clone has in place of volumes that the source can write to: share (the same ones),
    /// copy (named volumes with the files of the moment) or drop (empty ones)
    #[arg(long, value_name = "HOW")]
    pub volumes: Option<ClonedVolumes>,
    /// Let the clone sleep until a packet wakes it, also if the source is awake
    #[arg(long)]
    pub asleep: bool,
}

#[derive(Debug, Args)]
pub struct StartArgs {
    /// Names of procs
    #[arg(add = names::known(), required = true, value_name = "NAME")]
    pub names: Vec<String>,
    /// Return only when the procs' ports listen
    #[arg(long)]
    pub wait_ready: bool,
}

/// Procs. Each one is tried.
#[derive(Debug, Args)]
pub struct NamesArg {
    /// Names of procs
    #[arg(add = names::known(), required = true, value_name = "NAME")]
    pub names: Vec<String>,
}

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Names of procs
    #[arg(add = names::known(), required = true, value_name = "NAME")]
    pub names: Vec<String>,
    /// Open files of each process, and the proc's own files: those that differ from its base, the
    /// first 200 by path
    #[arg(long, group = "detail")]
    pub files: bool,
    /// Each process's command line, directory, user and environment, which may hold secrets
    #[arg(long, group = "detail")]
    pub env: bool,
    /// Sockets: addresses, state, bytes queued, the processes that have them open, whether Kip
    /// holds them
    #[arg(long, group = "detail")]
    pub sockets: bool,
    /// Each process's memory: what is mapped where, and how much of it is in memory, paged out, on
    /// disk, in the store
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
pub struct StopArgs {
    /// Names of procs
    #[arg(add = names::known(), required = true, value_name = "NAME")]
    pub names: Vec<String>,
    /// Time between the stop signal and SIGKILL; default: `kip run --stop-grace`, else 10s
    #[arg(short = 't', long, alias = "time", alias = "timeout", value_name = "DUR", value_parser = parse_duration_ms)]
    pub grace: Option<u64>,
}

#[derive(Debug, Args)]
pub struct KillArgs {
    /// Names of procs
    #[arg(add = names::known(), required = true, value_name = "NAME")]
    pub names: Vec<String>,
    /// HUP, SIGHUP or a number; for any but KILL a sleeper is woken, and how its program ends, if
    /// it does, is as by itself
    #[arg(short, long, value_name = "SIGNAL", default_value = "KILL")]
    pub signal: String,
}

#[derive(Debug, Args)]
pub struct DownArgs {
    /// Park every proc instead of ending it, as before the machine goes down: the next `kip up` has
    /// them again, and wakes those that were awake; exits with 1 if some cannot be parked, which
    /// run on
    #[arg(long)]
    pub park: bool,
    /// How long that may take; 90s. A proc that is not parked by then runs on
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms, requires = "park")]
    pub within: Option<u64>,
    /// End the procs that are awake or asleep without asking; needed where this command cannot ask,
    /// without a terminal
    #[arg(short = 'y', long, visible_alias = "yes", conflicts_with = "park")]
    pub all: bool,
}

#[derive(Debug, Args)]
pub struct RmArgs {
    /// Names of procs
    #[arg(add = names::known(), required = true, value_name = "NAME")]
    pub names: Vec<String>,
    /// End it first if it is not stopped
    #[arg(short, long)]
    pub force: bool,
}

#[derive(Debug, Args)]
pub struct SleepArgs {
    /// Names of procs
    #[arg(add = names::known(), required = true, value_name = "NAME")]
    pub names: Vec<String>,
    /// Tier to go to: hibernated, parked or archived (with `kip up --store`)
    #[arg(long, value_name = "TIER", value_parser = parse_sleep_tier, default_value = "parked")]
    pub to: Tier,
    /// How CLOCK_MONOTONIC behaves in this sleep: suspend (stands still; the default unless the
    /// proc was run with --clock continue), continue, or auto (as for an automatic sleep)
    #[arg(long, value_name = "HOW")]
    pub clock: Option<Clock>,
}

#[derive(Debug, Args)]
pub struct WakeArgs {
    /// Names of procs, or their ids in the store
    #[arg(add = names::known(), required = true, value_name = "NAME")]
    pub names: Vec<String>,
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
#[path = "args_tests.rs"]
mod tests;
