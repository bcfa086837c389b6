//! Opens a worker: the machine's parts in their order, recovery, and the other way round at the
//! end.

use crate::backup;
use crate::own_file::OwnFile;
use crate::rest;
use crate::worker::Worker;
use kip_checkpoint::helper::{self, HelperConfig, SHIM};
use kip_checkpoint::helper_pool::HelperPool;
use kip_checkpoint::locate;
use kip_engine::blocking::blocking;
use kip_engine::exec_ends::Ends;
use kip_engine::host::Claims;
use kip_engine::host::Host;
use kip_engine::host::egress::EgressControl;
use kip_engine::host::resolver;
use kip_engine::namespaces::ReadyNamespaces;
use kip_engine::observe::WakeObserver;
use kip_engine::upkeep::FORWARDING;
use kip_engine::volumes;
use kip_image::ImageStore;
use kip_journal::events::Events;
use kip_journal::metrics::Metrics;
use kip_keeper::{Keeper, KeeperError};
use kip_logs::LogPump;
use kip_net::nat::{Forward, Network, Published};
use kip_net::prepared::PreparedNetworks;
use kip_net::wake::WakePoll;
use kip_net::{Nat, NetPool, Slot};
use kip_offload::{Archive, ArchiveError, collect};
use kip_pager::client::Pager;
use kip_pressure::{MemoryMarks, Pressure};
use kip_records::instance::{self, InstanceError};
use kip_records::record::{self, Records};
use kip_records::state::Record;
use kip_sandbox::base::Base;
use kip_sandbox::cgroup::Cgroups;
use kip_sandbox::launcher::Launcher;
use kip_sandbox::restorer::RESTORER;
use kip_supervisor::disk;
use kip_supervisor::outdated;
use kip_supervisor::probe::Listeners;
use kip_supervisor::recover;
use kip_supervisor::registry::Registry;
use kip_supervisor::runtime::RuntimeSocketError;
use kip_sys::clock::now_ms;
use kip_sys::fault;
use kip_sys::ns::Unshare;
use kip_types::api::EventKind;
use kip_types::chain;
use kip_types::{ProcName, Spec, State};
use parking_lot::Mutex;
use rustix::fs::MemfdFlags;
use rustix::mount::{MountPropagationFlags, mount_change};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a dump or restore of the last daemon's may go on.
const STRAYS_WITHIN: Duration = Duration::from_secs(60);

/// What a worker is opened with.
#[derive(Debug, Clone)]
pub struct Config {
    /// The data directory, absolute; it exists.
    pub data: PathBuf,
    /// CRIU, if it is not to be searched for.
    pub criu: Option<PathBuf>,
    /// Directory of `kip-keeper`, `kip-pager` and `kip-launch`.
    pub programs: PathBuf,
    /// No wake is made without CRIU (tests).
    pub only_criu: bool,
    /// What all working sets may take in memory, bytes; beyond that they are on disk. None for a
    /// part of what procs may use.
    pub set_memory: Option<u64>,
    /// Hears of wakes.
    pub observer: Option<Arc<dyn WakeObserver>>,
    /// URL of the object store, or `none`; without it the one of the last time, or a directory
    /// `store` of the data directory.
    pub store: Option<String>,
    /// How often the store is collected, milliseconds; none for the usual.
    pub collect_every: Option<u64>,
    /// How much memory procs may use.
    pub memory: MemoryMarks,
    /// What parked procs' generations may take on the local disk, bytes; beyond that those parked
    /// the longest are archived.
    pub disk: Option<u64>,
    /// Residents that run are taken for those of another version (tests).
    pub supersede: bool,
    /// Called whenever another proc has been taken up.
    pub progress: fn(),
    /// A file there that another part of the daemon writes.
    pub own_file: Option<OwnFile>,
    /// What the cache of the store may take there, bytes: 0 for no cache, nothing for the usual.
    pub cache: Option<u64>,
}

/// A worker could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenWorkerError {
    /// CRIU.
    #[error(transparent)]
    Criu(#[from] locate::LocateError),
    /// The object store.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// A limit of what is parked on this disk, with nowhere else to go.
    #[error("--disk needs a store elsewhere: give `kip up --store URL`")]
    NowhereElse,
    /// The instance number.
    #[error("this data directory cannot have a number on this machine")]
    Instance(#[from] InstanceError),
    /// A file of the data directory.
    #[error("cannot read or write {path}")]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The records.
    #[error("the records of the data directory cannot be read")]
    Records(#[from] record::RecordError),
    /// The keeper.
    #[error("the keeper cannot be started or asked")]
    Keeper(#[from] kip_keeper::StartError),
    /// What it holds is not given back.
    #[error("the keeper does not give back what it holds for {name}: raise the limit on open files if that is why")]
    Held {
        /// The proc.
        name: ProcName,
        /// Why.
        #[source]
        source: KeeperError,
    },
    /// The runtime socket.
    #[error(transparent)]
    RuntimeSocket(#[from] RuntimeSocketError),
    /// The pager.
    #[error("the pager cannot be started or asked")]
    Pager(#[from] kip_pager::client::PagerError),
    /// The launcher.
    #[error("the launcher cannot be started")]
    Launcher(#[from] kip_sandbox::launcher::LaunchError),
    /// The skeleton.
    #[error("the base of the procs' files cannot be made")]
    Base(#[from] kip_sandbox::base::BaseError),
    /// The images.
    #[error("the images of the data directory cannot be opened")]
    Images(#[from] kip_image::ImageError),
    /// Control groups.
    #[error("the control groups of the procs cannot be set up")]
    Cgroups(#[from] kip_sandbox::cgroup::CgroupError),
    /// Namespaces.
    #[error("the pool of network namespaces cannot be set up")]
    Pool(#[from] kip_net::pool::NetNsError),
    /// Rules.
    #[error("port forwarding cannot be set up")]
    Nat(#[from] kip_net::nat::NatError),
    /// The log pump.
    #[error("the procs' logs cannot be opened")]
    Logs(#[from] kip_logs::LogError),
    /// The wake plane.
    #[error("the wake plane cannot be set up")]
    WakePlane(#[from] kip_net::wake::WatchError),
}

/// Puts the calling process into a mount namespace of its own with a tmpfs at `DATA/run/stage`. To
/// be called at the very start of the daemon, before it has a second thread. Mounts of the host
/// still arrive; nothing of ours leaves, and all of it is gone with the last process of the
/// daemon's.
pub fn enter_private_mounts(data: &Path) -> io::Result<()> {
    let stage = data.join("run/stage");
    fs::create_dir_all(&stage)?;
    kip_sys::ns::unshare(Unshare { mount: true, ..Unshare::default() })?;
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
    helper::mount_stage(&stage)
}

impl Worker {
    /// Opens the data directory and takes up what an earlier daemon left.
    pub async fn open(config: Config) -> Result<Worker, OpenWorkerError> {
        let collect_every = config.collect_every.unwrap_or(collect::EVERY_MS);
        let (disk, progress, own_file) = (config.disk, config.progress, config.own_file.clone());
        let Assembled { machine, remembered, keeper_was_new } = blocking(move || assemble(&config)).await?;
        let registry = Registry::new(Arc::clone(&machine));
        registry.serve_wake_plane();
        machine.serve_launcher();
        machine.prepare_namespaces();
        // From now on it is known exactly since when a thread waits.
        kip_sys::ran::watch().expect("a thread can be started");
        let worker = Worker {
            machine: Arc::clone(&machine),
            registry: Arc::clone(&registry),
            procs: Arc::default(),
            history: Arc::default(),
            backing_up: Arc::default(),
            renaming: Arc::default(),
            replacing: Arc::default(),
            ending: Arc::default(),
            tags: Arc::default(),
            templating: Arc::default(),
            scaler: Arc::default(),
            templated: Arc::default(),
            claimed: Arc::default(),
            own_file,
        };
        if keeper_was_new && remembered.iter().any(|r| r.record.state.tier().is_some()) {
            tracing::warn!("the keeper was not running: connections of procs that were parked are lost");
        }
        let mut recovered = Vec::new();
        for one in remembered {
            let name = one.spec.name.clone();
            let taken_up = recover::recover(&machine, one).await;
            recovered.extend(taken_up.map_err(|source| OpenWorkerError::Held { name, source })?);
            progress();
        }
        let swept = Arc::clone(&machine);
        let live: Vec<Published> = recovered.iter().filter_map(|(p, r)| published_of(&p.spec(), r, &p.dir)).collect();
        let keys: BTreeSet<ProcName> = recovered.iter().map(|(p, _)| p.key.clone()).collect();
        let bases: Vec<PathBuf> = recovered.iter().map(|(p, _)| p.base.clone()).collect();
        blocking(move || swept.sweep(&live, &keys)).await?;
        // What is kept for procs that are not there any more goes; none if a proc's directory was
        // not recovered.
        let all_known = fs::read_dir(machine.data.join("procs")).is_ok_and(|d| d.count() == recovered.len());
        let (mut trials, mut stood_aside) = (Vec::new(), Vec::new());
        for (proc, record) in recovered {
            let half_taken = matches!(record.state, State::Archived { .. }) && !record.established;
            let (trial, stands_aside) = (proc.spec().trial, record.stands_aside);
            let handle = worker.adopt(proc, record, None, Listeners::new());
            if handle.proc.spec().remove {
                tokio::spawn(worker.clone().remove_at_end(handle.clone(), false));
            }
            if trial {
                // The client that asked for it is gone with the last daemon.
                trials.push(handle);
            } else if stands_aside {
                stood_aside.push(handle);
            } else if half_taken {
                tokio::spawn(worker.clone().finish_taking_over(handle));
            }
        }
        if all_known {
            let worker = worker.clone();
            blocking(move || worker.sweep_checkpoints(bases)).await;
        }
        tokio::spawn(worker.clone().end_trials(trials, stood_aside));
        worker.machine.knows_names.store(true, std::sync::atomic::Ordering::SeqCst);
        worker.machine.live_procs().iter().for_each(|proc| resolver::take_up(proc));
        let is_followed = registry.serve_pager();
        let replacing = Arc::downgrade(&registry);
        tokio::spawn(async move {
            if is_followed.await.is_ok()
                && let Some(registry) = replacing.upgrade()
            {
                outdated::replace(&registry).await;
            }
        });
        machine.watch_keeper();
        machine.watch_rules();
        kip_supervisor::relief::relieve(&machine.pressure, &registry);
        crate::collecting::collect_by_itself(&machine, collect_every);
        crate::lately::watch(&worker);
        crate::periodic::watch(&worker);
        kip_scale::watch(Arc::clone(&worker.scaler), Arc::new(worker.clone()));
        if let Some(limit) = disk {
            disk::watch(&registry, limit);
        }
        let awake: Vec<_> = worker.handles().into_iter().filter(rest::was_awake).collect();
        tokio::spawn(rest::wake_again(awake));
        machine.events.emit(None, EventKind::Ready, format!("instance {}", machine.instance.number()));
        Ok(worker)
    }
}

/// What a proc that runs or sleeps has published. One that a daemon was starting or stopping when
/// it died may have processes, for which the limits of its egress hold until recovery has ended
/// them.
fn published_of(spec: &Spec, record: &Record, dir: &Path) -> Option<Published> {
    let slot = Slot::new(record.slot).ok()?;
    let egress = EgressControl::open(spec, dir).allowed();
    if record.state.tier().is_none() {
        let half = matches!(record.state, State::Starting | State::Stopping) && egress.is_some();
        return half.then(|| Published {
            slot,
            network: None,
            ports: Vec::new(),
            egress,
            alone: spec.alone,
            held: false,
        });
    }
    let forwards = record.ports.iter().map(Forward::of).collect();
    Some(Published { slot, network: Network::of(spec), ports: forwards, egress, alone: spec.alone, held: false })
}

/// A helper of the last daemon's may be in the middle of a dump or restore, and may not even have
/// begun to freeze: this daemon may not look at the helper's proc before that is done.
fn wait_for_strays(stage: &Path) {
    let until = Instant::now() + STRAYS_WITHIN;
    loop {
        let strays = helper::strays(stage);
        if strays.is_empty() {
            return;
        }
        if Instant::now() > until {
            tracing::warn!(?strays, "helpers of the last daemon do not come to their end; they are ended");
            for pid in strays {
                let ended = kip_sys::process::pidfd_open(pid)
                    .and_then(|fd| kip_sys::process::pidfd_send_signal(fd.as_fd(), kip_sys::process::Signal::KILL));
                if let Err(e) = ended {
                    tracing::warn!(pid, error = %e, "a helper cannot be ended");
                }
            }
            return;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// What a worker is made of.
struct Assembled {
    machine: Arc<Host>,
    remembered: Vec<recover::Remembered>,
    keeper_was_new: bool,
}

/// `kip-restore`, read-only, for the kernel executes no file that a process has open for writing.
fn restorer() -> io::Result<OwnedFd> {
    let memory = rustix::fs::memfd_create("kip-restore", MemfdFlags::CLOEXEC)?;
    File::from(memory.try_clone()?).write_all(RESTORER)?;
    Ok(File::open(format!("/proc/self/fd/{}", memory.as_raw_fd()))?.into())
}

fn assemble(config: &Config) -> Result<Assembled, OpenWorkerError> {
    // First: what is started below outlives a daemon that does not come up.
    if config.disk.is_some() && !Archive::is_elsewhere(&config.data, config.store.as_deref())? {
        return Err(OpenWorkerError::NowhereElse);
    }
    let archive = Archive::choose(&config.data, config.store.as_deref(), now_ms())?;
    let archive = archive.map(|archive| archive.with_cache(&config.data, config.cache));
    let at = |path: &Path| {
        let path = path.to_owned();
        move |source| OpenWorkerError::Io { path, source }
    };
    let run = config.data.join("run");
    fs::create_dir_all(&run).map_err(at(&run))?;
    wait_for_strays(&run.join("stage"));
    let criu = locate::locate(config.criu.as_deref())?;
    let engine = format!("criu {}", criu.version);
    let archive = archive.map(|archive| Arc::new(archive.with_engine(engine.clone())));
    let shim = run.join("criu-shim.so");
    fs::write(&shim, SHIM).map_err(at(&shim))?;
    let helpers = HelperPool::start(HelperConfig { criu, shim, stage: run.join("stage") });
    let (instance, lock) = instance::take(&config.data)?;
    let (records, leftovers) = Records::open(&config.data)?;
    for e in leftovers {
        tracing::warn!(error = chain(&e), "something removed is still on disk");
    }
    volumes::sweep(&config.data);
    // Of a backup that was not finished.
    let _ = fs::remove_dir_all(backup::scratch(&config.data));
    let remembered = recover::read_all(&records)?;
    // Residents of another version, whose messages are others: what they hold passes to those of
    // this one.
    let keeper_program = config.programs.join("kip-keeper");
    let pager = Pager::new(&config.programs.join("kip-pager"), &config.data)?;
    let replaces = config.supersede || Keeper::is_foreign(&config.data)?;
    // A pager of ours may be connected to a keeper that is not: it could not go on with another.
    if let Some(pid) = pager.supersede(replaces)? {
        tracing::info!(pid, "the pager is of another version and is replaced; procs that were held run");
    }
    fault::reach("supersede-pager");
    if replaces && let Some(held) = Keeper::supersede(&keeper_program, &config.data)? {
        tracing::info!(held, "the keeper is of another version and is replaced");
    }
    fault::reach("supersede-keeper");
    let keeper = Arc::new(Keeper::connect_or_spawn(&keeper_program, &config.data)?);
    let keeper_was_new = keeper.found() == kip_keeper::Presence::Started;
    let runtime = kip_supervisor::runtime::socket(&config.data, &keeper)?;
    pager.ensure()?;
    let launcher = Mutex::new(Arc::new(Launcher::spawn(&config.programs.join("kip-launch"))?));
    let base = Base::prepare(&config.data.join("base"))?;
    let images = Arc::new(ImageStore::open(&config.data.join("images"))?);
    let cgroups = Cgroups::detect()?;
    let places = config.data.join(kip_engine::sysfs::PLACES);
    kip_sandbox::sysfs::make_places(&places).map_err(at(&places))?;
    let group = cgroups.open(&format!("kip-{}", instance.number()));
    let pressure = Pressure::new(config.memory.clone(), group);
    let pool = Arc::new(NetPool::new(instance)?);
    let live: Vec<Published> =
        remembered.iter().filter_map(|r| published_of(&r.spec, &r.record, &records.directory(&r.key))).collect();
    let nat = Nat::open(instance, Path::new(FORWARDING), &[], &live)?;
    let used: BTreeSet<Slot> = remembered.iter().filter_map(|r| Slot::new(r.record.slot).ok()).collect();
    pool.sweep(&used.iter().copied().collect::<Vec<_>>())?;
    let prepared_networks = PreparedNetworks::start(Arc::clone(&pool), used);
    let machine = Host {
        data: config.data.clone(),
        name: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        instance,
        engine,
        records,
        keeper,
        pager,
        pager_stays: tokio::sync::RwLock::default(),
        resting: Default::default(),
        set_memory: config.set_memory,
        observer: config.observer.clone(),
        archive,
        fills: Default::default(),
        programs: config.programs.clone(),
        launcher,
        restorer: restorer().map_err(at(&run))?,
        only_criu: config.only_criu.into(),
        pool,
        prepared_networks,
        ready_namespaces: ReadyNamespaces::default(),
        nat,
        base,
        images,
        cgroups,
        pressure,
        helpers,
        exec_ends: Ends::default(),
        events: Events::open(&config.data),
        metrics: Metrics::new(&kip_engine::cause::WORDS),
        logs: LogPump::start()?,
        runtime,
        wake_plane: Arc::new(WakePoll::new()?),
        leads: Mutex::default(),
        procs: Mutex::default(),
        claims: Claims::default(),
        knows_names: false.into(),
        closing: false.into(),
        ends_keeper: false.into(),
        _instance_lock: lock,
        _fast_breakpoints: kip_sys::perf::hold_disabled_event().ok(),
    };
    Ok(Assembled { machine: Arc::new(machine), remembered, keeper_was_new })
}
