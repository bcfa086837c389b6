//! What has happened, and what procs have used.
//!
//! | module | owns |
//! | --- | --- |
//! | [`events`] | the newest events, in memory and in a file of the data directory, and their listeners |
//! | [`meter`] | time and memory of a proc by tier, its CPU time, connections and wakes |
//! | [`metrics`] | counters and durations for Prometheus |
//!
//! Never acts on what it notes, and asks no process: all are given what they note.
#![forbid(unsafe_code)]

pub mod events;
pub mod meter;
pub mod metrics;
