//! A proc as a table of a `kip.toml`: keys are the long flags of `kip run`. From it a request is
//! made, and from a request it is made again, so that what is exported, compared and read are the
//! same keys.

use crate::values::{FilePages, Port, Pull, Signal, Size, Switch, Texts, Time, Value, VolumeText, Words, normal};
use kip_types::api::{InFile, LeftOpen, RunRequest};
use kip_types::image::OciImage;
use kip_types::keys::Hex;
use kip_types::life::{
    Check, HOOK_WITHIN_MS, Hooks, KEPT_CHECKPOINTS, PeriodicCheckpoints, Probe, READY_WITHIN_MS, Ready, Restart,
    TemplateWhen, Templating,
};
use kip_types::name::{ProcName, Realm};
use kip_types::scale::{CALM_MS, CloneMethod, Scaling};
use kip_types::spec::{
    Capability, Clock, Egress, Fallback, Hibernate, HostEntry, Image, LOG_BYTES, LOG_FILES, LONGEST_SECRET, Lazy,
    Limits, Sandbox, Spec, Timing, Tmpfs, TreeAccess, Ulimit, bad_secret,
};
use kip_types::volume::{BadVolume, ClonedVolumes, VolumeSpec};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// A proc.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct ProcTable {
    /// Program and arguments; with an image, the arguments of its own program. A string is split as
    /// a shell does, but no shell runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<Words>,
    /// Image whose files the proc has instead of the host's: a name, `oci:PATH[:TAG]` or
    /// `docker-archive:FILE`, paths from the file's directory on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Tarball that lies over the host's files; a path from the file's directory on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tar: Option<PathBuf>,
    /// When to pull the image: always, missing or never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pull: Option<Pull>,
    /// Ask the image's registry without TLS.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub plain_http: bool,
    /// Run this program of the image instead of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entrypoint: Option<Words>,
    /// Publish every port that the image exposes, each by a host port of Kip's choice.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub publish_all: bool,
    /// Published ports: `[ADDRESS:][HOST:]PORT[/udp][,wake=data]`, a number, or a table;
    /// `PORT,private` for other procs only.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub port: Vec<Port>,
    /// Name of a network: procs of the same network find each other by name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// Further names of the proc in its network.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub alias: Vec<String>,
    /// Host name inside the proc; default: the proc's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// Lines for the proc's /etc/hosts: `NAME:ADDRESS`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub add_host: Vec<HostEntry>,
    /// What the proc may call outside its network: `all` (usual), `none`, or addresses, networks
    /// and names: `pypi.org:443`, `*.npmjs.org`, `192.0.2.0/24:80-90/tcp`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub egress: Vec<Egress>,
    /// Files of the machine: `SRC:DST[:ro]`, or a table.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub volume: Vec<VolumeText>,
    /// Most memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mem: Option<Size>,
    /// Most CPU time, 1.0 is one core.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<f64>,
    /// Most processes and threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pids: Option<u32>,
    /// Limits of each process of the proc, getrlimit(2): `NAME=SOFT[:HARD]`, for example
    /// `nofile=1024:4096`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ulimit: Vec<Ulimit>,
    /// The root file system is read-only; volumes stay as they are.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// File systems in memory: `PATH[:size=SIZE,mode=OCTAL,uid=N,gid=N,exec]`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tmpfs: Vec<Tmpfs>,
    /// Size of /dev/shm, which is in memory; default 64M.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shm_size: Option<Size>,
    /// Capabilities that root inside has in addition, within the proc's own user namespace; `ALL`
    /// for all that Kip gives.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cap_add: Vec<Capability>,
    /// Capabilities that root inside has not; `ALL` for all.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cap_drop: Vec<Capability>,
    /// Most disk space of the proc's own files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<Size>,
    /// Size of each log file with the proc's output; default 10M.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_size: Option<Size>,
    /// Number of log files, 1 to 16; default 3; the oldest is removed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_files: Option<u32>,
    /// Working directory inside the proc.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workdir: Option<PathBuf>,
    /// Run as `USER[:GROUP]` of the proc's own files, names or numbers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Stop signal that `kip stop` sends first, instead of SIGTERM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_signal: Option<Signal>,
    /// Time between the stop signal and SIGKILL; default 10s.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_grace: Option<Time>,
    /// Restart the program when it ends: `no`, `on-failure[:MAX]` or `always`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart: Option<Restart>,
    /// Check that the proc is ready: `tcp:PORT`, `http:PORT/PATH` or `exec:COMMAND`. Procs that
    /// depend on it are started after that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready: Option<Check>,
    /// Longest wait for `ready`; default 60s.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_timeout: Option<Time>,
    /// Shell command to run inside the proc before each sleep; if it fails the proc stays awake.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before_sleep: Option<String>,
    /// Shell command to run inside the proc after each wake, beside the program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after_wake: Option<String>,
    /// Shell command to run inside the proc before a clone, a checkpoint or a template is taken of
    /// it while it is awake.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before_checkpoint: Option<String>,
    /// Shell command to run inside each clone of the proc before clients reach it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after_clone: Option<String>,
    /// Whether the proc begins from the template of its kind, or leaves one when it is ready: auto,
    /// or off (default).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<TemplateWhen>,
    /// Shell command to run inside the proc before its template is taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template_after: Option<String>,
    /// Time from one checkpoint that is taken by itself to the next; default: none is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_every: Option<Time>,
    /// How many of them are kept; default 3.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_keep: Option<u32>,
    /// Most procs that serve behind its name, itself included, 1 to 32; default: itself alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale_max: Option<u32>,
    /// How many of them are there and awake at least; default 0: the last one sleeps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale_min: Option<u32>,
    /// What a new one begins from: auto (default), hot, warm or cold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale_method: Option<CloneMethod>,
    /// What they have in place of volumes that the proc can write to: share, copy or drop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale_volumes: Option<ClonedVolumes>,
    /// A check as in `ready`, asked of the proc while it is awake: while it fails another one is
    /// added.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale_probe: Option<Check>,
    /// How long the load has to be low before one is taken away; default 1m.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale_calm: Option<Time>,
    /// Longest run of each hook and of an `exec:` check; default 10s.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hook_timeout: Option<Time>,
    /// Ports of the host on which Kip serves the health of the proc, awake or asleep:
    /// `HOST_PORT=CHECK`, a check as in `ready`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub probe: Vec<Probe>,
    /// Time without activity after which the proc is hibernated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle: Option<Time>,
    /// Time that the proc stays hibernated before it is parked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub park_after: Option<Time>,
    /// Time that the proc stays parked before it is archived, if there is a store.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub archive_after: Option<Time>,
    /// Timers and time-outs shorter than this do not count as activity and do not wake a parked
    /// proc.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tick: Option<Time>,
    /// How CLOCK_MONOTONIC behaves while the proc is parked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clock: Option<Clock>,
    /// How the proc hibernates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hibernate: Option<Hibernate>,
    /// Whether a wake prefetches the working set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefetch: Option<Switch>,
    /// Start a parked proc before all its memory is read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lazy: Option<Lazy>,
    /// Whether hibernation drops unchanged pages of files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_pages: Option<FilePages>,
    /// If the snapshot is damaged: a cold start, or the newest older generation that is whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fallback: Option<Fallback>,
    /// Sleep only by `kip sleep`, never automatically.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub never_sleep: bool,
    /// Stay awake, and report when the proc would have slept.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub idle_dry_run: bool,
    /// Let setuid and setgid programs inside change their identity.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub allow_setuid: bool,
    /// The proc's sandbox: `full`, or `light`: no network, read-only files, few system calls.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<Sandbox>,
    /// What the program may do to the name tree, over the runtime socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tree: Option<TreeAccess>,
    /// How many procs its programs may have spawned that have not ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spawn: Option<u32>,
    /// The program's standard input and output are a terminal: `kip attach`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub terminal: bool,
    /// The program's standard input is open, for `kip attach`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub stdin_open: bool,
    /// Procs that depend on this one, and `kip apply`, wait until its ports listen.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub wait_ready: bool,
    /// Procs of this file that are started before this one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub depends_on: Vec<ProcName>,
    /// Files with environment variables, one `NAME=VALUE` a line; paths from the file's directory
    /// on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env_file: Option<Texts>,
    /// Files whose contents the proc has as `/run/secrets/NAME`, in memory; paths from the file's
    /// directory on.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub secret: BTreeMap<String, PathBuf>,
    /// Labels for `kip ps --filter label=KEY[=VALUE]`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub label: BTreeMap<String, Value>,
    /// Environment variables, on top of those of `env-file`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, Value>,
}

impl ProcTable {
    /// The request that makes it. Paths count from `directory`; `env` is what its environment files
    /// say, `secrets` what its secrets contain.
    ///
    /// # Errors
    /// A volume that cannot be.
    pub fn into_request(
        self,
        name: ProcName,
        directory: &Path,
        env: Vec<(String, String)>,
        secrets: BTreeMap<String, Hex>,
    ) -> Result<RunRequest, BadVolume> {
        let left_open = LeftOpen {
            name: false,
            idle: self.idle.is_none(),
            park_after: self.park_after.is_none(),
            archive_after: self.archive_after.is_none(),
        };
        let usual = Timing::default();
        let timing = Timing {
            idle_ms: self.idle.map_or(usual.idle_ms, |t| t.0),
            park_after_ms: self.park_after.map_or(usual.park_after_ms, |t| t.0),
            archive_after_ms: self.archive_after.map_or(usual.archive_after_ms, |t| t.0),
            archive_by_default: self.archive_after.is_none(),
            tick_ms: self.tick.map_or(usual.tick_ms, |t| t.0),
            clock: self.clock.unwrap_or_default(),
            never: self.never_sleep,
            dry_run: self.idle_dry_run,
            hibernate: self.hibernate.unwrap_or_default(),
            prefetch: self.prefetch.is_none_or(|p| p.0),
            lazy: self.lazy.unwrap_or_default(),
            keep_files: self.file_pages == Some(FilePages::Keep),
            fallback: self.fallback.unwrap_or_default(),
        };
        let image = match (self.tar, self.image) {
            (Some(tar), _) => Image::Tar(normal(&directory.join(tar)).into()),
            (None, Some(reference)) => Image::Oci(OciImage {
                reference: reference_in(&reference, directory),
                entrypoint: self.entrypoint.map(|words| words.0),
                publish_all: self.publish_all,
                ..OciImage::default()
            }),
            (None, None) => Image::Host,
        };
        let said = self.env.into_iter().map(|(key, value)| (key, value.0));
        let volumes: Result<Vec<VolumeSpec>, BadVolume> = self.volume.iter().map(|v| v.resolve(directory)).collect();
        let spec = Spec {
            name,
            realm: Realm::default(),
            command: self.command.unwrap_or_default().0,
            env: env.into_iter().chain(said).collect(),
            workdir: self.workdir,
            image,
            ports: self.port.into_iter().map(|port| port.0).collect(),
            network: self.network,
            aliases: self.alias,
            hostname: self.hostname,
            extra_hosts: self.add_host,
            egress: self.egress,
            labels: self.label.into_iter().map(|(key, value)| (key, value.0)).collect(),
            volumes: volumes?,
            limits: Limits {
                memory_bytes: self.mem.map(|size| size.0),
                cpus: self.cpus,
                pids: self.pids.unwrap_or_else(|| Limits::default().pids),
                disk_bytes: self.disk.map(|size| size.0),
                log_bytes: self.log_size.map_or(LOG_BYTES, |size| size.0),
                log_files: self.log_files.unwrap_or(LOG_FILES),
                ..Limits::default()
            },
            ulimits: self.ulimit,
            read_only: self.read_only,
            tmpfs: self.tmpfs,
            shm_bytes: self.shm_size.map(|size| size.0),
            cap_add: self.cap_add,
            cap_drop: self.cap_drop,
            timing,
            allow_setuid: self.allow_setuid,
            sandbox: self.sandbox.unwrap_or_default(),
            tree: self.tree.unwrap_or_default(),
            spawn: self.spawn.unwrap_or_default(),
            user: self.user,
            stop_signal: self.stop_signal.map(|signal| signal.0),
            stop_grace_ms: self.stop_grace.map(|time| time.0),
            restart: self.restart.unwrap_or_default(),
            secrets: secrets.keys().cloned().collect(),
            ready: self
                .ready
                .map(|check| Ready { check, within_ms: self.ready_timeout.map_or(READY_WITHIN_MS, |time| time.0) }),
            hooks: Hooks {
                before_sleep: self.before_sleep,
                after_wake: self.after_wake,
                before_checkpoint: self.before_checkpoint,
                after_clone: self.after_clone,
                within_ms: self.hook_timeout.map_or(HOOK_WITHIN_MS, |time| time.0),
            },
            template: match self.template {
                Some(TemplateWhen::Auto) => Some(Templating { after: self.template_after }),
                _ => None,
            },
            checkpoints: self.checkpoint_every.map(|every| PeriodicCheckpoints {
                every_ms: every.0,
                keep: self.checkpoint_keep.unwrap_or(KEPT_CHECKPOINTS),
            }),
            scale: self.scale_max.map(|max| Scaling {
                min: self.scale_min.unwrap_or(0),
                max,
                method: self.scale_method.unwrap_or_default(),
                volumes: self.scale_volumes,
                probe: self.scale_probe,
                calm_ms: self.scale_calm.map_or(CALM_MS, |time| time.0),
            }),
            probes: self.probe,
            terminal: self.terminal,
            stdin_open: self.stdin_open,
            remove: false,
            file: None,
            asked: None,
            tar_digest: None,
            trial: false,
            alone: false,
            replaced: 0,
            lineage: None,
            replica_of: None,
            own_volumes: Vec::new(),
        };
        Ok(RunRequest { spec, wait_ready: self.wait_ready, secrets, left_open, in_file: InFile::default() })
    }

    /// What says the same as `request`. What is usual is left out.
    pub fn of(request: &RunRequest) -> ProcTable {
        // Contents of secrets are nowhere else than in the request that makes a proc.
        let RunRequest { spec, wait_ready, secrets: _, left_open, in_file } = request;
        // Named one by one, so that what a spec gets in addition is not forgotten here.
        let Spec {
            name: _, // the table's own
            realm: _,
            command,
            env,
            workdir,
            image,
            ports,
            network,
            aliases,
            hostname,
            extra_hosts,
            egress,
            labels,
            volumes,
            limits,
            ulimits,
            read_only,
            tmpfs,
            shm_bytes,
            cap_add,
            cap_drop,
            timing,
            allow_setuid,
            sandbox,
            tree,
            spawn,
            user,
            stop_signal,
            stop_grace_ms,
            restart,
            secrets,
            ready,
            hooks,
            template,
            checkpoints,
            scale,
            probes,
            terminal,
            stdin_open,
            // One that goes by itself is none that a file describes.
            remove: _,
            file: _,
            asked: _,
            tar_digest: _,
            trial: _,
            alone: _,
            replaced: _,
            lineage: _,
            replica_of: _,
            own_volumes: _,
        } = spec.clone();
        let scale = scale.as_ref();
        let usual = Timing::default();
        let time = |open: bool, ms: u64| (!open).then_some(Time(ms));
        let (mut tar, mut reference, mut entrypoint, mut publish_all) = (None, None, None, false);
        match image {
            Image::Host => {}
            Image::Tar(path) => tar = Some(path),
            Image::Oci(oci) => {
                (reference, publish_all) = (Some(oci.reference), oci.publish_all);
                entrypoint = oci.entrypoint.map(Words);
            }
        }
        let volume =
            |v: VolumeSpec| VolumeText { source: v.source.to_string(), target: v.target, read_only: v.read_only };
        ProcTable {
            command: (!command.is_empty()).then_some(Words(command)),
            image: reference,
            tar,
            pull: in_file.pull,
            plain_http: in_file.plain_http,
            entrypoint,
            publish_all,
            port: ports.into_iter().map(Port).collect(),
            network,
            alias: aliases,
            hostname,
            add_host: extra_hosts,
            egress,
            ulimit: ulimits,
            read_only,
            tmpfs,
            shm_size: shm_bytes.map(Size),
            cap_add,
            cap_drop,
            label: labels.into_iter().map(|(key, value)| (key, Value(value))).collect(),
            volume: volumes.into_iter().map(volume).collect(),
            mem: limits.memory_bytes.map(Size),
            cpus: limits.cpus,
            disk: limits.disk_bytes.map(Size),
            log_size: (limits.log_bytes != LOG_BYTES).then_some(Size(limits.log_bytes)),
            log_files: (limits.log_files != LOG_FILES).then_some(limits.log_files),
            pids: (limits.pids != Limits::default().pids).then_some(limits.pids),
            workdir,
            user,
            stop_signal: stop_signal.map(Signal),
            stop_grace: stop_grace_ms.map(Time),
            restart: (!restart.is_no()).then_some(restart),
            ready_timeout: ready.as_ref().filter(|r| r.within_ms != READY_WITHIN_MS).map(|r| Time(r.within_ms)),
            ready: ready.map(|ready| ready.check),
            before_sleep: hooks.before_sleep,
            after_wake: hooks.after_wake,
            before_checkpoint: hooks.before_checkpoint,
            after_clone: hooks.after_clone,
            checkpoint_every: checkpoints.map(|periodic| Time(periodic.every_ms)),
            checkpoint_keep: checkpoints.map(|periodic| periodic.keep).filter(|keep| *keep != KEPT_CHECKPOINTS),
            scale_max: scale.map(|scale| scale.max),
            scale_min: scale.map(|scale| scale.min).filter(|min| *min > 0),
            scale_method: scale.map(|scale| scale.method).filter(|method| *method != CloneMethod::Auto),
            scale_volumes: scale.and_then(|scale| scale.volumes),
            scale_probe: scale.and_then(|scale| scale.probe.clone()),
            scale_calm: scale.map(|scale| scale.calm_ms).filter(|ms| *ms != CALM_MS).map(Time),
            template: template.as_ref().map(|_| TemplateWhen::Auto),
            template_after: template.and_then(|template| template.after),
            hook_timeout: (hooks.within_ms != HOOK_WITHIN_MS).then_some(Time(hooks.within_ms)),
            probe: probes,
            idle: time(left_open.idle, timing.idle_ms),
            park_after: time(left_open.park_after, timing.park_after_ms),
            archive_after: time(left_open.archive_after, timing.archive_after_ms),
            tick: time(timing.tick_ms == usual.tick_ms, timing.tick_ms),
            clock: (timing.clock != usual.clock).then_some(timing.clock),
            hibernate: (timing.hibernate != usual.hibernate).then_some(timing.hibernate),
            prefetch: (timing.prefetch != usual.prefetch).then_some(Switch(timing.prefetch)),
            lazy: (timing.lazy != usual.lazy).then_some(timing.lazy),
            file_pages: timing.keep_files.then_some(FilePages::Keep),
            fallback: (timing.fallback != usual.fallback).then_some(timing.fallback),
            never_sleep: timing.never,
            idle_dry_run: timing.dry_run,
            allow_setuid,
            sandbox: (!sandbox.is_full()).then_some(sandbox),
            tree: (!tree.is_none()).then_some(tree),
            spawn: (spawn > 0).then_some(spawn),
            terminal,
            stdin_open,
            wait_ready: *wait_ready,
            depends_on: in_file.depends_on.clone(),
            env_file: None,
            // Where the secrets would be looked for; the daemon never gives them out.
            secret: secrets.into_iter().map(|name| (name.clone(), Path::new("secrets").join(name))).collect(),
            env: env.into_iter().map(|(key, value)| (key, Value(value))).collect(),
        }
    }
}

/// Files of images are named from the description's directory on.
fn reference_in(reference: &str, directory: &Path) -> String {
    for kind in ["oci:", "docker-archive:"] {
        if let Some(path) = reference.strip_prefix(kind).filter(|path| !path.starts_with('/')) {
            return format!("{kind}{}", normal(&directory.join(path)));
        }
    }
    reference.to_owned()
}

/// What the files of secrets contain, by their names.
///
/// # Errors
/// A line that says which cannot be.
pub fn read_secrets(
    files: &BTreeMap<String, PathBuf>,
    directory: &Path,
) -> Result<BTreeMap<String, Hex>, (String, String)> {
    let mut all = BTreeMap::new();
    for (name, file) in files {
        let bad = |message: String| (name.clone(), message);
        bad_secret(name).map_or(Ok(()), |line| Err(bad(line)))?;
        let path = directory.join(file);
        let mut contents = Vec::new();
        // One byte more says that there is too much, also of what never ends.
        let read = File::open(&path).and_then(|f| f.take(LONGEST_SECRET as u64 + 1).read_to_end(&mut contents));
        read.map_err(|e| bad(format!("{} cannot be read: {e}", path.display())))?;
        if contents.len() > LONGEST_SECRET {
            return Err(bad(format!("{} has more than {LONGEST_SECRET} bytes", path.display())));
        }
        all.insert(name.clone(), Hex(contents));
    }
    Ok(all)
}
