//! What the data directory records: each proc's spec and state, the number of the directory on its
//! machine, and what a sleeping proc needs to wake.
//!
//! Owns `DIR/procs/NAME/{spec,state}.json`, the records of `DIR/checkpoints` and `DIR/templates`,
//! `/run/kip/instance-I` and the part of a generation's
//! manifest that is about the kernel. Never starts, stops or looks at a process.
#![forbid(unsafe_code)]

pub mod body;
pub mod checkpoints;
pub mod due;
pub mod instance;
pub mod kind;
pub mod record;
pub mod state;
pub mod templates;
