//! Generations of parked procs to an object store and back.
//!
//! Owns the connection to the store, the realm's keys and what is known of content that is stored. Never sees a task, never decides
//! when a generation goes or comes.
#![forbid(unsafe_code)]

pub mod archive;
