//! What the procs of a data directory have of their machine, and what never changes of each of
//! them.
//!
//! Owns slots, pools and the connections to keeper, pager and launcher. Has no state of any proc,
//! and knows nothing of tasks.

pub mod egress;
pub mod measured;
pub mod names;
pub mod proc;
pub mod resolver;

pub use proc::Proc;

use crate::descriptors::reopen;
use crate::exec_ends::Ends;
use crate::fd_store::key;
use crate::namespaces::ReadyNamespaces;
use crate::observe::WakeObserver;
use kip_checkpoint::helper_pool::HelperPool;
use kip_copy::fill::Fills;
use kip_image::ImageStore;
use kip_journal::events::Events;
use kip_journal::metrics::Metrics;
use kip_keeper::Keeper;
use kip_logs::{LogPump, Rotation};
use kip_net::prepared::PreparedNetworks;
use kip_net::wake::WakePoll;
use kip_net::{Instance, Nat, NetPool, Slot};
use kip_offload::Archive;
use kip_pager::client::Pager;
use kip_pressure::Pressure;
use kip_records::instance;
use kip_records::record::Records;
use kip_records::state::Record;
use kip_sandbox::base::Base;
use kip_sandbox::cgroup::Cgroups;
use kip_sandbox::launcher::{LaunchError, Launcher};
use kip_types::api::{Code, PortView, Refusal};
use kip_types::chain;
use kip_types::spec::addresses_meet;
use kip_types::{Image, PortSpec, ProcName, Spec, State, VolumeName};
use parking_lot::Mutex;
use rustix::fs::OFlags;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Named volumes of procs that are still being made: no list of procs has these yet.
#[derive(Debug, Default)]
pub struct Claims(pub Mutex<Vec<VolumeName>>);

/// Shared by all procs.
pub struct Host {
    /// The data directory.
    pub data: PathBuf,
    /// What this machine is called.
    pub name: String,
    /// Which data directory of this machine it is.
    pub instance: Instance,
    /// CRIU's version, as snapshots name it.
    pub engine: String,
    /// Holds descriptors through the death of the daemon.
    pub keeper: Arc<Keeper>,
    /// Takes memory out, and brings it back.
    pub pager: Pager,
    /// Held for reading while a proc falls asleep or wakes by way of the pager, which is not
    /// replaced meanwhile.
    pub pager_stays: tokio::sync::RwLock<()>,
    /// All procs are parked because the daemon is about to end: none begins or wakes any more.
    pub resting: AtomicBool,
    /// What working sets may take in memory, bytes; none for a part of all that may be used.
    pub set_memory: Option<u64>,
    /// Is told of wakes.
    pub observer: Option<Arc<dyn WakeObserver>>,
    /// The object store, if there is one.
    pub archive: Option<Arc<Archive>>,
    /// Memory of clones that is still copied.
    pub fills: Fills,
    /// Directory of `kip-keeper`, `kip-pager` and `kip-launch`.
    pub programs: PathBuf,
    /// Starts processes.
    pub launcher: Mutex<Arc<Launcher>>,
    /// `kip-restore`, to be executed by descriptor.
    pub restorer: OwnedFd,
    /// Wakes are CRIU's alone: asked for, or because this kernel cannot make the sandbox of a
    /// rebuild.
    pub only_criu: AtomicBool,
    /// Network links of procs.
    pub pool: Arc<NetPool>,
    /// Namespaces that are ready before they are needed.
    pub prepared_networks: PreparedNetworks,
    /// Other namespaces that are ready before they are needed.
    pub ready_namespaces: ReadyNamespaces,
    /// Rules that lead to published ports.
    pub nat: Nat,
    /// The machine's own files, as procs without an image see them.
    pub base: Base,
    /// Layers of images.
    pub images: Arc<ImageStore>,
    /// Control groups of procs.
    pub cgroups: Cgroups,
    /// Memory that procs use, and may use.
    pub pressure: Arc<Pressure>,
    /// Processes of CRIU that wait for work.
    pub helpers: Arc<HelperPool>,
    /// Ends of commands that were executed in procs.
    pub exec_ends: Ends,
    /// Events of procs.
    pub events: Events,
    /// What is counted for Prometheus.
    pub metrics: Metrics,
    /// Writes what programs print to their logs.
    pub logs: LogPump,
    /// The runtime socket of all procs.
    pub runtime: OwnedFd,
    /// Watches the held sockets of procs that sleep.
    pub wake_plane: Arc<WakePoll<Slot>>,
    /// What is recorded of procs.
    pub records: Records,
    /// How long the last wake of each proc took from moving its timers in the images until they
    /// were armed, nanoseconds.
    pub leads: Mutex<HashMap<Slot, i64>>,
    /// Procs that exist.
    pub procs: Mutex<HashMap<Slot, Arc<Proc>>>,
    /// Names and ports that are taken.
    pub claims: Claims,
    /// All procs of before are known: their names can be answered for.
    pub knows_names: AtomicBool,
    /// Whether the daemon ends.
    pub closing: AtomicBool,
    /// The keeper ends because it was told to.
    pub ends_keeper: AtomicBool,
    /// Keeps other daemons off the data directory.
    pub _instance_lock: File,
    /// While it is open the kernel sets breakpoints faster.
    pub _fast_breakpoints: Option<OwnedFd>,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Host({})", self.data.display())
    }
}

impl Host {
    /// First host id of a slot's block.
    pub fn first_id(&self, slot: Slot) -> u32 {
        instance::first_id(self.instance, slot)
    }

    /// The skeleton of a new proc.
    pub fn base_of(&self, spec: &Spec) -> PathBuf {
        match &spec.image {
            Image::Oci(_) => self.base.over_image.clone(),
            Image::Host | Image::Tar(_) => self.base.root.clone(),
        }
    }

    /// How long the last restore of each proc took until its timers were armed, nanoseconds.
    pub fn leads(&self) -> parking_lot::MutexGuard<'_, HashMap<Slot, i64>> {
        self.leads.lock()
    }

    fn procs(&self) -> parking_lot::MutexGuard<'_, HashMap<Slot, Arc<Proc>>> {
        self.procs.lock()
    }

    /// A proc exists from now on.
    pub fn enlist(&self, proc: Arc<Proc>) {
        self.procs().insert(proc.slot, proc);
    }

    /// The proc is removed; its slot is free.
    pub fn strike(&self, slot: Slot) {
        self.procs().remove(&slot);
        self.leads().remove(&slot);
        self.nat.forget(slot);
        self.prepared_networks.free(slot);
    }

    /// All procs that exist.
    pub fn live_procs(&self) -> Vec<Arc<Proc>> {
        self.procs().values().map(Arc::clone).collect()
    }

    /// Nothing that dies from now on is replaced.
    pub fn close(&self) {
        self.closing.store(true, Ordering::SeqCst);
    }

    /// Whether the daemon is ending.
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    /// The launcher of the moment.
    pub fn launcher(&self) -> Arc<Launcher> {
        Arc::clone(&self.launcher.lock())
    }

    /// Notifies waiting clients how their programs under exec ended, and starts another launcher
    /// when this one dies; runs on a thread of its own.
    pub fn serve_launcher(self: &Arc<Host>) {
        let machine = Arc::clone(self);
        let serve = move || {
            while !machine.is_closing() {
                let gone = machine.serve_exec_ends(&machine.launcher());
                if machine.is_closing() {
                    return;
                }
                tracing::warn!(error = chain(&gone), "kip-launch has died; starting another");
                machine.exec_ends.forget();
                match Launcher::spawn(&machine.programs.join("kip-launch")) {
                    Ok(new) => *machine.launcher.lock() = Arc::new(new),
                    Err(e) => {
                        tracing::error!(error = chain(&e), "no launcher can be started");
                        std::thread::sleep(Duration::from_secs(1));
                    }
                }
            }
        };
        std::thread::Builder::new().name("launcher".to_owned()).spawn(serve).expect("a thread can be started");
    }

    /// Makes namespaces ahead of starts, on a thread of its own.
    pub fn prepare_namespaces(self: &Arc<Host>) {
        let host = Arc::clone(self);
        let make = move || {
            let one = |slot| host.launcher().namespaces(host.first_id(slot), "");
            host.ready_namespaces.serve(&host.prepared_networks, one);
        };
        std::thread::Builder::new().name("prepare-ns".to_owned()).spawn(make).expect("a thread can be started");
    }

    /// Returns when that launcher is gone.
    fn serve_exec_ends(&self, launcher: &Launcher) -> LaunchError {
        use rustix::event::{PollFd, PollFlags, poll};
        loop {
            match launcher.next_event() {
                Ok(Some(ended)) => self.exec_ends.notify(ended),
                Ok(None) => {
                    let _ = poll(&mut [PollFd::new(&launcher.events(), PollFlags::IN)], None);
                }
                Err(gone) => return gone,
            }
        }
    }

    /// Why nothing is begun any more, if the daemon is about to end.
    pub fn rests(&self) -> Option<Refusal> {
        let rests = self.resting.load(Ordering::SeqCst);
        let message =
            "all procs are being parked and the daemon is about to end (`kip down --park`): the next `kip up` has them";
        rests.then(|| Refusal::new(Code::State, message))
    }

    /// The name of a proc's cgroup.
    pub fn cgroup_name(&self, key: &ProcName) -> String {
        format!("kip-{}/{key}", self.instance.number())
    }

    /// Which of our procs, those of `apart` aside, has published a host port that is in the way of
    /// that one.
    pub fn owner_of_port(&self, wanted: &PortSpec, port: u16, apart: &[ProcName]) -> Option<ProcName> {
        let same = |v: &PortView| {
            (v.proto, v.host_port) == (wanted.proto, Some(port)) && addresses_meet(v.only_at(), wanted.host_addr)
        };
        let procs = self.live_procs();
        let mine = procs.iter().filter(|p| !apart.contains(&p.name));
        let mut found = mine.filter(|p| {
            let record = self.records.read_state::<Record>(&p.key);
            record.is_ok_and(|r| {
                !matches!(r.state, State::Stopped { .. } | State::Elsewhere { .. }) && r.ports.iter().any(same)
            })
        });
        found.next().map(|p| p.name.clone())
    }

    /// Sends what a proc writes to its log from now on. To be called in a runtime.
    pub fn follow_output(&self, proc: &Proc) {
        let ends = [key::OUT, key::ERR].map(|k| proc.fd_store.get(k));
        let [Some(out), Some(err)] = ends else {
            tracing::warn!(proc = %proc.name, "its output is lost: no process holds its pipes any more");
            return;
        };
        let rotation = Rotation::of(&proc.spec().limits);
        if let Err(e) = self.logs.add(proc.key.as_str(), out, err, &proc.dir.join("logs"), rotation) {
            tracing::warn!(proc = %proc.name, error = chain(&e), "its output is not logged");
        }
        let Some(terminal) = proc.fd_store.get(key::TERMINAL) else { return };
        let out = proc.fd_store.get(key::OUT).ok_or_else(|| io::Error::other("its output is lost"));
        let log = out.and_then(|out| reopen(&out, OFlags::WRONLY | OFlags::NONBLOCK));
        if let Err(error) = log.and_then(|log| proc.console.follow(terminal, log)) {
            tracing::warn!(proc = %proc.name, %error, "its terminal is not read");
        }
    }

    /// Writes a line of Kip's own into the log of a proc.
    pub fn remark(&self, proc: &Proc, text: &str) {
        if let Err(e) = self.logs.remark(proc.key.as_str(), text) {
            tracing::warn!(proc = %proc.name, error = chain(&e), "a remark is not in its log");
        }
    }

    /// The last line a proc wrote, for an error message.
    pub fn last_words(&self, proc: &Proc) -> String {
        use kip_logs::{From, LogReader};
        let _ = self.logs.flush(proc.key.as_str());
        // Beside a remark of Kip's own.
        let lines = LogReader::open(&proc.dir.join("logs"), From::Last(2)).and_then(|mut r| r.next_lines());
        let own = |l: &&kip_logs::LogRecord| l.stream != kip_logs::Stream::Kip;
        let last = lines.ok().and_then(|l| l.iter().rfind(own).map(|l| String::from_utf8_lossy(&l.text).into_owned()));
        last.filter(|l| !l.trim().is_empty()).map(|l| format!("; it last wrote: {}", l.trim())).unwrap_or_default()
    }
}
