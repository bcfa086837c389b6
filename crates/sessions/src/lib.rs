//! Programs that clients run in procs, and clients that sit at a proc's own.
//!
//! Owns what lies between the frames of a client and the descriptors of a program: [`exec`] with
//! pipes, [`session`] on a terminal of its own, [`attach`] at the proc's, [`follow`] for a
//! program's log. Never decides whether a proc may sleep: it asks for tickets that keep one awake.
#![forbid(unsafe_code)]

pub mod attach;
pub mod exec;
pub mod follow;
pub mod logs;
pub mod session;
