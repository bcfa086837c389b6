//! Procs that programs and clients spawn: parents, classes, ends and waits.
//!
//! | module | owns |
//! | --- | --- |
//! | [`host`] | what is asked of the machine's procs |
//! | `request` | what a spawned proc gets, and what of its parent's |
//! | `entry` | what is kept of one, and what is shown of it |
//! | `kept` | entries in the metadata store |
//! | `room` | CPUs and memory that are reserved |
//! | [`spawner`] | the service: spawn, wait, evict |
//! | `life` | one of them from the queue to the end that is kept |
//!
//! A spawned proc is an ordinary proc that never restarts. Its entry is made before it, and goes
//! after it: a client waits for a change of the entry, which is on disk before the client is
//! answered.
//!
//! ```text
//!  queued --begun--> starting --executed--> live --ended--> ended, kept --a day, or many others--> forgotten
//! ```
//!
//! **What a crash leaves behind.** An entry that is not begun: the next daemon starts it. One that
//! is begun and has no proc: its program may have run, so it is not started again, and its end says
//! so. One whose proc is there: the next daemon follows that. One that has ended and whose proc is
//! still there: the next daemon removes the proc.
//!
//! Never starts a process itself, and knows of states no more than whether a program is there.
#![forbid(unsafe_code)]

mod entry;
pub mod host;
mod kept;
mod life;
mod request;
mod room;
pub mod spawner;

pub use host::{HostedProc, ProgramEnd, SpawnHost};
pub use kept::is_spawn_key;
pub use spawner::{CompleteRun, SpawnParts, Spawner};
