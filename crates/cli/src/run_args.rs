//! What `kip run` and `kip check` say of a proc, and the request that it makes.

use crate::detach::{DETACH_KEYS, Keys, parse_keys};
use crate::image::{RegistryArgs, When};
use crate::life::LifeArgs;
use clap::Args;
use kip_describe::env_file::parse_env;
use kip_describe::runtime::{self, Runtime};
use kip_text::stem;
use kip_types::api::{InFile, LeftOpen, RunRequest};
use kip_types::image::OciImage;
use kip_types::name::{ProcName, Realm};
use kip_types::spec::{
    Capability, Clock, Egress, Fallback, Hibernate, HostEntry, Image, Lazy, Limits, PortSpec, Sandbox, Spec, Timing,
    Tmpfs, TreeAccess, Ulimit, bad_hostname, parse_duration_ms, parse_label, parse_size,
};
use kip_types::volume::{BadVolume, VolumeSpec};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub struct RunArgs {
    /// Name of the proc; made from the command's if left out
    #[arg(long)]
    pub name: Option<ProcName>,
    /// Tarball that lies over the host's files
    #[arg(long, value_name = "FILE")]
    pub tar: Option<PathBuf>,
    // Not a doc comment: rustdoc would take the brackets for links.
    #[arg(
        help = "Image whose files it has instead of the host's: a name, oci:PATH[:TAG] or docker-archive:FILE",
        long,
        value_name = "IMAGE",
        conflicts_with = "tar"
    )]
    pub image: Option<String>,
    /// When to pull the image: always, missing or never
    #[arg(long, value_name = "WHEN", default_value = "missing")]
    pub pull: When,
    #[command(flatten)]
    pub registry: RegistryArgs,
    /// Run this program of the image instead of its own; the command's words are its arguments
    #[arg(long, value_name = "PROGRAM")]
    pub entrypoint: Option<String>,
    /// Publish every port that the image exposes, each by a host port of Kip's choice
    #[arg(short = 'P', long)]
    pub publish_all: bool,
    // Not a doc comment: rustdoc would take the brackets for links.
    #[arg(
        help = "Publish [ADDRESS:][HOST:]PORT[/udp][,wake=data], at all addresses of the machine if none is given, or PORT,private for other procs of its network only; may be repeated",
        short = 'p',
        long = "port",
        alias = "publish",
        value_name = "PORT"
    )]
    pub ports: Vec<PortSpec>,
    // Not a doc comment either.
    #[arg(
        help = "Put files of this machine at DST, SRC:DST[:ro]: SRC is an absolute path, one that begins with a dot, or the name of a volume that Kip keeps; may be repeated",
        long = "volume",
        short = 'v',
        value_name = "SRC:DST",
        value_parser = parse_volume
    )]
    pub volumes: Vec<GivenVolume>,
    /// Give it a runtime of this machine that is outside of /usr, read-only; may be repeated
    #[arg(long = "base", value_name = "DIR", value_parser = runtime::find, conflicts_with = "image")]
    pub bases: Vec<Runtime>,
    /// Most memory, for example 64M
    #[arg(short, long, alias = "memory", value_name = "SIZE", value_parser = parse_size)]
    pub mem: Option<u64>,
    /// Most CPU time, 1.0 is one core
    #[arg(long, value_name = "N")]
    pub cpus: Option<f64>,
    /// Most processes and threads
    #[arg(long, alias = "pids-limit", value_name = "N")]
    pub pids: Option<u32>,
    // Not a doc comment: rustdoc would take the brackets for links.
    #[arg(
        help = "What each of its processes may use at most, NAME=SOFT[:HARD], for example nofile=1024:4096; may be repeated",
        long = "ulimit",
        value_name = "LIMIT"
    )]
    pub ulimits: Vec<Ulimit>,
    /// Make the root file system read-only; volumes stay as they are
    #[arg(long)]
    pub read_only: bool,
    // Not a doc comment: rustdoc would take the brackets for links.
    #[arg(
        help = "Put a file system in memory at PATH, PATH[:size=SIZE,mode=OCTAL,uid=N,gid=N,exec]; what is in it sleeps with the proc, and a start makes it anew; may be repeated",
        long,
        value_name = "PATH"
    )]
    pub tmpfs: Vec<Tmpfs>,
    /// Size of /dev/shm, which is in memory; default: 64M
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub shm_size: Option<u64>,
    /// Give root inside the capability NAME, within the proc's own user namespace; ALL for all that
    /// Kip gives; may be repeated
    #[arg(long, value_name = "NAME")]
    pub cap_add: Vec<Capability>,
    /// Take the capability NAME from root inside; ALL for all; may be repeated
    #[arg(long, value_name = "NAME")]
    pub cap_drop: Vec<Capability>,
    /// Most disk space of the proc's own files, for example 1G; volumes, logs and snapshots do not
    /// count
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub disk: Option<u64>,
    /// Size of each log file with the proc's output
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "10M")]
    pub log_size: u64,
    /// Number of log files, 1 to 16; the oldest is removed
    #[arg(long, value_name = "N", default_value_t = kip_types::spec::LOG_FILES)]
    pub log_files: u32,
    /// Set an environment variable; K alone takes the value from this command's environment; may be
    /// repeated
    #[arg(short, long, value_name = "K=V", value_parser = parse_env)]
    pub env: Vec<(String, String)>,
    /// Working directory inside the proc
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<PathBuf>,
    /// Join the network NAME: its procs find and reach each other; other procs reach only published
    /// ports
    #[arg(long, value_name = "NAME")]
    pub network: Option<String>,
    /// Further name of the proc in its network; may be repeated
    #[arg(long, alias = "network-alias", value_name = "NAME", requires = "network")]
    pub alias: Vec<String>,
    /// Host name inside the proc; default: the proc's name
    #[arg(long, value_name = "NAME", value_parser = parse_hostname)]
    pub hostname: Option<String>,
    /// Line for the proc's /etc/hosts; may be repeated
    #[arg(long = "add-host", value_name = "NAME:ADDRESS")]
    pub add_host: Vec<HostEntry>,
    /// What the proc may call outside its network: all (default), none, or an address, a network or
    /// a name, for example pypi.org:443, *.npmjs.org, 192.0.2.0/24:80-90/tcp; may be repeated
    #[arg(long, value_name = "RULE", value_delimiter = ',')]
    pub egress: Vec<Egress>,
    /// Label for `kip ps --filter label=K`, with or without a value; may be repeated
    #[arg(short, long = "label", value_name = "K=V", value_parser = parse_label)]
    pub labels: Vec<(String, String)>,
    // Not a doc comment: rustdoc would take the brackets for links.
    #[arg(help = "Run as USER[:GROUP] of the proc's own files, names or numbers", short, long, value_name = "USER")]
    pub user: Option<String>,
    #[command(flatten)]
    pub life: LifeArgs,
    /// Time without activity after which a proc is hibernated
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms)]
    pub idle: Option<u64>,
    /// Time a proc stays hibernated before it is parked
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms)]
    pub park_after: Option<u64>,
    /// Time a proc stays parked before it is archived, to any store and even with open connections
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms)]
    pub archive_after: Option<u64>,
    /// Timers and time-outs shorter than this do not count as activity and do not wake a parked
    /// proc
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms)]
    pub tick: Option<u64>,
    /// CLOCK_MONOTONIC of a parked proc: continue, suspend (the clock stands still, and all that
    /// waits on it is later by the sleep), auto (suspend only if `kip profiles` has the program and
    /// no connection is open)
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub clock: Clock,
    /// How the proc hibernates: auto, blocked (any system call that returns wakes it), held
    /// (sockets and timers wake it), off
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub hibernate: Hibernate,
    /// Whether a wake prefetches the working set: on or off
    #[arg(long, value_name = "ON|OFF", value_parser = parse_switch, default_value = "on", action = clap::ArgAction::Set)]
    pub prefetch: bool,
    /// Start a parked proc before all its memory is read: auto (if there is much), on, off
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    pub lazy: Lazy,
    /// Whether hibernation drops unchanged pages of files, which other procs may share: drop or
    /// keep
    #[arg(long, value_name = "DROP|KEEP", value_parser = parse_file_pages, default_value = "drop", action = clap::ArgAction::Set)]
    pub file_pages: bool,
    /// If the snapshot is damaged: cold (start on the newest files) or previous (wake the newest
    /// older generation that is whole)
    #[arg(long, value_name = "TO", default_value = "cold")]
    pub fallback: Fallback,
    /// Sleep only by `kip sleep`, never automatically
    #[arg(long)]
    pub never_sleep: bool,
    /// Stay awake, and report when the proc would have slept: `kip events`, `kip why`
    #[arg(long, conflicts_with = "never_sleep")]
    pub idle_dry_run: bool,
    /// Let setuid and setgid programs inside change their identity
    #[arg(long)]
    pub allow_setuid: bool,
    /// Sandbox of the proc: full, or light: no network, read-only files, few system calls
    #[arg(long, value_name = "KIND", default_value = "full")]
    pub sandbox: Sandbox,
    /// What the program may do to the name tree, over the runtime socket: none, read or write
    #[arg(long, value_name = "ACCESS", default_value = "none")]
    pub tree: TreeAccess,
    /// Let its programs spawn procs over the runtime socket: at most N that have not ended
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub spawn: u32,
    /// Keep the program's standard input open, and stay attached: the program reads this command's
    /// input
    #[arg(short, long)]
    pub interactive: bool,
    /// Run the program on a terminal of its own, and stay attached; later clients use `kip attach`
    #[arg(short, long)]
    pub tty: bool,
    /// Stay attached to the program's output until it ends, and exit with its code
    #[arg(short, long, conflicts_with = "detach")]
    pub attach: bool,
    /// Return as soon as the proc runs; the default without -i, -t and -a
    #[arg(short, long)]
    pub detach: bool,
    /// Remove the proc with all it has when its program has ended
    #[arg(long)]
    pub rm: bool,
    /// Keys that detach the client, as for `kip attach`
    #[arg(long, value_name = "KEYS", default_value = DETACH_KEYS, value_parser = parse_keys)]
    pub detach_keys: Keys,
    /// Return only when the proc's ports listen
    #[arg(long)]
    pub wait_ready: bool,
    /// No effect: every proc has an init as pid 1. For users of Docker
    #[arg(long)]
    pub init: bool,
    /// The image is named by the first word of the command, not by a flag.
    #[arg(skip)]
    pub image_is_word: bool,
    /// IMAGE and the arguments of its program, or `--` and a program of this machine with its
    /// arguments
    #[arg(trailing_var_arg = true, required_unless_present = "image", value_name = "IMAGE|CMD")]
    pub command: Vec<String>,
}

/// How `--help` has `kip run`; `kip check` is alike.
pub const RUN_USAGE: &str = "kip run [OPTIONS] IMAGE [ARG]...\n       kip run [OPTIONS] -- PROGRAM [ARG]...";
/// See [`RUN_USAGE`].
pub const CHECK_USAGE: &str = "kip check [OPTIONS] IMAGE [ARG]...\n       kip check [OPTIONS] -- PROGRAM [ARG]...";

/// Whether hibernation keeps unchanged pages of files.
pub fn parse_file_pages(s: &str) -> Result<bool, String> {
    match s {
        "drop" => Ok(false),
        "keep" => Ok(true),
        _ => Err("write drop or keep".to_owned()),
    }
}

/// A volume as the command line has it.
#[derive(Debug, Clone)]
pub struct GivenVolume {
    /// What it is.
    pub spec: VolumeSpec,
    /// Its path counts from the directory that the command is given in.
    pub is_relative: bool,
}

/// A path that begins with a dot counts from the directory that the command is given in.
fn parse_volume(s: &str) -> Result<GivenVolume, String> {
    let is_relative =
        |source: &str| matches!(source, "." | "..") || source.starts_with("./") || source.starts_with("../");
    let absolute = match s.split_once(':') {
        Some((source, rest)) if is_relative(source) => {
            let path = Path::new(source).canonicalize().or_else(|_| std::path::absolute(source));
            let path = path.map_err(|e| format!("the path {source:?} cannot be made absolute: {e}"))?;
            format!("{}:{rest}", path.display())
        }
        _ => s.to_owned(),
    };
    let spec = absolute.parse().map_err(|e: BadVolume| e.to_string())?;
    Ok(GivenVolume { spec, is_relative: absolute != s })
}

fn parse_hostname(s: &str) -> Result<String, String> {
    bad_hostname(s).map_or_else(|| Ok(s.to_owned()), Err)
}

pub fn parse_switch(s: &str) -> Result<bool, String> {
    match s {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("write on or off".to_owned()),
    }
}

impl RunArgs {
    /// Takes the first word for the image where it comes without `--` before it. `words` are those
    /// of the whole command line: the command is its end, for no flag of Kip follows its first
    /// word.
    ///
    /// # Errors
    /// What does not go together.
    pub fn divide(&mut self, words: &[OsString]) -> Result<(), &'static str> {
        let before = words.len().checked_sub(self.command.len() + 1).and_then(|at| words.get(at));
        let dashes = before.is_some_and(|word| word == "--");
        if !dashes && self.image.is_none() && !self.command.is_empty() {
            if self.tar.is_some() || !self.bases.is_empty() {
                return Err(
                    "with --tar or --base the program is one of its files or of this machine: write -- before it",
                );
            }
            self.image_is_word = true;
            self.image = Some(self.command.remove(0));
        }
        // `kip run IMAGE -- ARG` is what `kip run --image IMAGE -- ARG` always was.
        if !dashes && self.command.first().is_some_and(|word| word == "--") {
            self.command.remove(0);
        }
        let of_images = self.entrypoint.is_some() || self.publish_all || self.pull.said().is_some();
        if of_images && self.image.is_none() {
            return Err("--entrypoint, --publish-all and --pull are for images: name one, with no -- before it");
        }
        Ok(())
    }

    /// What is said if there is no such image: a program of this machine may have been meant.
    pub fn meant_program(&self, error: anyhow::Error) -> anyhow::Error {
        let word = self.image.as_deref().filter(|_| self.image_is_word).unwrap_or_default();
        let path = std::env::var_os("PATH").unwrap_or_default();
        let is_program = match word {
            "" => false,
            word if word.contains('/') => Path::new(word).is_file(),
            word => std::env::split_paths(&path).any(|dir| dir.join(word).is_file()),
        };
        match is_program {
            true => anyhow::anyhow!("{error:#}; a program of this machine comes after `--`: kip run -- {word}"),
            false => error,
        }
    }

    /// What the API is asked for.
    pub fn into_request(self) -> anyhow::Result<RunRequest> {
        let left_open = LeftOpen {
            name: self.name.is_none(),
            idle: self.idle.is_none(),
            park_after: self.park_after.is_none(),
            archive_after: self.archive_after.is_none(),
        };
        let usual = Timing::default();
        let timing = Timing {
            idle_ms: self.idle.unwrap_or(usual.idle_ms),
            park_after_ms: self.park_after.unwrap_or(usual.park_after_ms),
            archive_after_ms: self.archive_after.unwrap_or(usual.archive_after_ms),
            archive_by_default: self.archive_after.is_none(),
            tick_ms: self.tick.unwrap_or(usual.tick_ms),
            clock: self.clock,
            never: self.never_sleep,
            dry_run: self.idle_dry_run,
            hibernate: self.hibernate,
            prefetch: self.prefetch,
            lazy: self.lazy,
            keep_files: self.file_pages,
            fallback: self.fallback,
        };
        let mut env = self.life.environment(self.env)?;
        if let (true, Ok(kind)) = (self.tty, std::env::var("TERM")) {
            env.entry("TERM".to_owned()).or_insert(kind);
        }
        let mut volumes = self.volumes.into_iter().map(|volume| volume.spec).collect();
        runtime::give(self.bases, &mut volumes, &mut env);
        let limits = Limits {
            memory_bytes: self.mem,
            cpus: self.cpus,
            pids: self.pids.unwrap_or_else(|| Limits::default().pids),
            disk_bytes: self.disk,
            log_bytes: self.log_size,
            log_files: self.log_files,
            ..Limits::default()
        };
        let image = match (self.tar, &self.image) {
            // The daemon's working directory is another.
            (Some(file), _) => Image::Tar(std::path::absolute(file)?),
            (None, Some(reference)) => Image::Oci(OciImage {
                reference: reference.clone(),
                entrypoint: self.entrypoint.map(|word| if word.is_empty() { vec![] } else { vec![word] }),
                publish_all: self.publish_all,
                ..OciImage::default()
            }),
            (None, None) => Image::Host,
        };
        let spec = Spec {
            name: self.name.unwrap_or_else(|| stem(self.image.as_deref(), &self.command)),
            realm: Realm::default(),
            command: self.command,
            env,
            workdir: self.workdir,
            image,
            ports: self.ports,
            network: self.network,
            aliases: self.alias,
            hostname: self.hostname,
            extra_hosts: self.add_host,
            egress: self.egress,
            labels: self.labels.into_iter().collect(),
            volumes,
            limits,
            ulimits: self.ulimits,
            read_only: self.read_only,
            tmpfs: self.tmpfs,
            shm_bytes: self.shm_size,
            cap_add: self.cap_add,
            cap_drop: self.cap_drop,
            timing,
            allow_setuid: self.allow_setuid,
            sandbox: self.sandbox,
            tree: self.tree,
            spawn: self.spawn,
            user: self.user,
            stop_signal: self.life.stop_signal.clone(),
            stop_grace_ms: self.life.stop_grace,
            restart: self.life.restart,
            secrets: Vec::new(),
            ready: self.life.ready(),
            hooks: self.life.hooks(),
            template: self.life.template(),
            checkpoints: self.life.checkpoints(),
            probes: self.life.probes.clone(),
            terminal: self.tty,
            stdin_open: self.interactive,
            remove: self.rm,
            file: None,
            asked: None,
            tar_digest: None,
            trial: false,
            alone: false,
            replaced: 0,
            lineage: None,
            scale: None,
            replica_of: None,
            own_volumes: Vec::new(),
        };
        let secrets = self.life.secrets()?;
        let in_file = InFile {
            pull: self.pull.said(),
            plain_http: self.registry.plain_http && self.image.is_some(),
            ..InFile::default()
        };
        Ok(RunRequest { spec, wait_ready: self.wait_ready, secrets, left_open, in_file })
    }
}
