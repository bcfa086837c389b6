//! The worker: what the API asks of the procs of this machine, and the machine's parts in their
//! order. It implements the traits of [`kip_service`].
//!
//! | module | owns |
//! | --- | --- |
//! | [`worker`], [`open`] | the procs by name; the machine's parts in their order, and the other way round at the end |
//! | [`procs`], [`node`] | what is asked of procs, and of the daemon |
//! | [`adopt`] | a proc from the store, into this data directory |
//! | [`keys`], [`images`], [`named_volumes`], [`snapshots`] | the realm's keys, layers, volumes and snapshots, by command |
//! | [`clones`], [`checkpoints`], [`lineage`], [`copied`] | procs that go on from where another one is or was; whose checkpoints; how a source is copied |
//! | [`staging`], [`claim`] | one that is being made, until it has its name; what is being made |
//! | [`volumes_of_clones`] | what clones have in place of volumes |
//! | [`replicas`] | procs that serve behind the name of another, as `kip_scale` asks for them |
//! | [`periodic`] | checkpoints that are taken by themselves |
//! | [`templates`], [`template_files`] | what the first proc of a kind leaves for later ones to begin from; into files and from files |
//! | [`backup`], [`own_file`], [`collecting`] | a copy of the whole data directory; a file there of another part's; when the store is collected |
//! | [`lately`] | what people see |
//! | [`check`], [`rehearse`] | a trial before a proc is trusted; whether a proc could be started, before another one goes for it |
//! | [`scrape`] | what is at the moment of a scrape, as metrics |
//! | [`rest`] | how a daemon that ends waits for its procs |
//!
//! Never decides for a proc, which is `kip_supervisor`'s, and never speaks to clients.
#![forbid(unsafe_code)]

mod adopt;
mod backup;
mod check;
mod checkpoints;
mod claim;
mod clones;
mod collecting;
mod copied;
mod files;
mod images;
mod keys;
mod lately;
mod lineage;
mod named_volumes;
mod node;
mod open;
mod own_file;
mod periodic;
mod procs;
mod rehearse;
mod replace;
mod replicas;
mod rest;
mod scrape;
mod snapshots;
mod staging;
mod template_files;
mod templates;
mod volumes_of_clones;
mod worker;

pub use kip_engine::observe::WakeObserver;
pub use kip_offload::restore::{BackupRestoreError, RestoredBackup, restore};
pub use kip_pressure::{BadMarks, MemoryMarks};
pub use kip_records::instance::InstanceError;
pub use open::{Config, OpenWorkerError, enter_private_mounts};
pub use own_file::OwnFile;
pub use worker::Worker;
