//! The runtime socket: what a program inside a proc says to Kip, and the answers.
//!
//! | module | owns |
//! | --- | --- |
//! | [`wire`] | messages as bytes: docs/runtime.md |
//! | `frames` | frames in a socket, none of which a killed daemon loses |
//! | `socket` | where the socket is |
//! | [`home`] | what is asked of procs |
//! | `server` | connections as they come, and those of the last daemon |
//! | `connection` | one connection, from its greeting to its end |
//! | `access` | which calls a proc may make |
//! | `share` | what one proc may have at a time |
//! | `memory` | what the next daemon has to know of it |
//! | `calls` | calls about the name tree |
//! | `leases` | leases that belong to procs |
//! | `spawns` | calls about procs by spawn |
//!
//! Which proc a client is in is known by the socket: the kernel tells which user has connected, and
//! each proc has user ids of its own. Nothing that is said over it is believed about that. Both
//! ends of a connection are held while the daemon or the program is not there; an open connection
//! keeps no proc awake, and what comes for a sleeper wakes it. Never asks a process, and knows no
//! states of procs but whether they sleep.
#![forbid(unsafe_code)]

mod access;
mod calls;
mod connection;
mod frames;
pub mod home;
mod leases;
mod memory;
mod server;
mod share;
mod socket;
mod spawns;
pub mod wire;

pub use home::{HomeLife, RuntimeHome, RuntimeHomes};
pub use server::{RuntimeParts, serve};
pub use socket::{is_there, listen};
