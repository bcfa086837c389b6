//! The supervisor: one task per proc decides when that sleeps, sinks, wakes, starts again and ends.
//!
//! | module | owns |
//! | --- | --- |
//! | [`task`] | one task per proc: every transition, each carried out by `kip_engine` |
//! | [`registry`] | all tasks, and what comes to them from pager and wake plane |
//! | [`idle`] | whether a running proc is idle |
//! | [`relief`], [`disk`] | which procs sleep for lack of memory, which are archived for lack of room on the disk |
//! | [`recover`] | after a restart: what was half done |
//! | [`outdated`] | residents of another version, replaced |
//! | [`policy`] | what images from a store may ask for |
//! | [`runtime`] | procs as the runtime socket knows them |
//! | [`spawned`] | procs as those are asked that are spawned |
//! | [`probe`] | ports on which Kip answers how a proc is |
//!
//! Touches a process only through `kip_engine`; never speaks to clients, but for the one line that
//! a probe is answered.
#![forbid(unsafe_code)]

pub mod disk;
pub mod idle;
pub mod outdated;
pub mod policy;
pub mod probe;
pub mod recover;
pub mod registry;
pub mod relief;
pub mod runtime;
pub mod spawned;
pub mod task;
