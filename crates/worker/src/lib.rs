//! The worker: decides for the procs of this machine: parks them when they are idle and wakes them when somebody comes.
//!
//! | module | owns |
//! | --- | --- |
//! | [`task`] | one task per proc: every transition, each carried out by `kip_engine` |
//! | [`worker`], [`open`] | what the API asks of procs; the machine's parts in their order |
//! | [`registry`] | the tasks of procs, and what comes to them from outside |
//! | [`recover`], [`adopt`] | after a restart: what was half done; a proc from the store, into this data directory |
//! | [`idle`], [`relief`], [`disk`] | which procs sleep: idle ones, those in the way of others' memory, those in the way of others' files |
//! | [`keys`], [`images`], [`named_volumes`], [`snapshots`] | the realm's keys, layers, volumes and snapshots, by command |
//! | [`backup`], [`collecting`] | a copy of the whole data directory; when the store is collected |
//! | [`view`], [`inspect`], [`why`], [`history`], [`lately`] | what people see |
//! | [`probe`] | ports on which Kip answers how a proc is |
//! | [`check`], [`rehearse`] | a trial before a proc is trusted; whether a proc could be started, before another one goes for it |
//! | [`outdated`], [`rest`] | residents of another version; how a daemon that ends waits for its procs |
//!
//! Never does a step of one proc itself, never decides for other workers, never speaks to clients, but for the one line that a
//! probe is answered.
#![forbid(unsafe_code)]

mod adopt;
mod backup;
mod check;
mod collecting;
mod disk;
mod history;
mod idle;
mod images;
mod inspect;
mod keys;
mod lately;
mod named_volumes;
mod open;
mod outdated;
mod probe;
mod recover;
mod registry;
mod rehearse;
mod relief;
mod rest;
mod snapshots;
mod task;
mod view;
mod why;
mod worker;

pub use backup::restore::{RestoreError, Restored, restore};
pub use kip_engine::exec::{ExecOutput, ExecSession};
pub use kip_engine::observe::WakeObserver;
pub use kip_engine::pressure::{BadMarks, MemoryMarks};
pub use kip_records::instance::InstanceError;
pub use open::{Config, OpenError, enter_private_mounts};
pub use worker::Worker;
