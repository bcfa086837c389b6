//! The worker: runs procs on this machine, parks them when they are idle and wakes them when somebody comes.
//!
//! | module | owns |
//! | --- | --- |
//! | [`task`] | one task per proc: every transition |
//! | [`start`], [`hibernate`], [`park`], [`wake`], [`stop`] | the work of one transition each |
//! | [`adopt`] | a proc from the store, into this data directory |
//! | [`recover`], [`renew`] | after a restart: what was half done, what was held and is lost |
//! | [`host`], [`kits`], [`helper_pool`] | what procs have of their machine: pools, the wake plane, names |
//! | [`registry`] | the tasks of procs, and what comes to them from outside |
//! | [`worker`] | what the API asks of procs |
//! | [`idle`] | when to sleep |
//! | [`pressure`], [`relief`] | when a wake may begin, which procs sleep for lack of memory |
//! | [`holdings`] | descriptors that must survive the daemon, in the keeper |
//! | [`keys`] | the realm's keys, by command |
//! | [`images`] | images and the layers that procs keep |
//! | [`backup`] | a copy of the whole data directory, and a data directory of that |
//! | [`disk`] | who is archived for lack of room on the disk |
//! | [`meter`] | what each proc has used |
//! | [`metrics`] | what Prometheus is told |
//! | [`observe`] | who else hears of wakes: traces |
//! | [`policy`] | what images from a store may ask for |
//! | [`volumes`] | files of the host that procs have |
//! | [`secrets`] | what procs are told in files that are on the disk only sealed |
//! | [`events`], [`view`], [`inspect`], [`why`], [`exec`] | what people see |
//! | [`probe`] | ports on which Kip answers how a proc is |
//! | [`check`] | a trial before a proc is trusted |
//! | [`rehearse`] | whether a proc could be started, before another one goes for it |
//! | [`beside`] | looks that may take their time |
//!
//! Never decides for other workers, never speaks to clients, but for the one line that a probe is answered.
#![forbid(unsafe_code)]

mod adopt;
mod backup;
mod beside;
mod blocking;
mod calls;
mod check;
mod collecting;
mod descriptors;
mod disk;
mod events;
mod exec;
mod exec_ends;
mod exits;
mod helper_pool;
mod hibernate;
mod history;
mod holdings;
mod host;
mod idle;
mod images;
mod inotify;
mod inspect;
mod keys;
mod kits;
mod lately;
mod lifted;
mod meter;
mod metering;
mod metrics;
mod named_volumes;
mod observe;
mod open;
mod outdated;
mod owners;
mod page_out;
mod park;
mod pins;
mod plans;
mod policy;
mod pressure;
mod probe;
mod recover;
mod registry;
mod rehearse;
mod relief;
mod renew;
mod rest;
mod secrets;
mod snapshots;
mod start;
mod stop;
mod suspend;
mod task;
mod tickets;
mod tree;
mod view;
mod volumes;
mod wake;
mod watches;
mod why;
mod worker;

pub use backup::restore::{RestoreError, Restored, restore};
pub use exec::{ExecOutput, ExecSession};
pub use kip_records::instance::InstanceError;
pub use observe::WakeObserver;
pub use open::{Config, OpenError, enter_private_mounts};
pub use pressure::{BadMarks, MemoryMarks};
pub use worker::Worker;
