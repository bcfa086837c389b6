//! Drives CRIU: takes a process tree apart into images and brings it back.
//!
//! Owns helpers ([`helper`]), the requests ([`dump`], [`restore`]) and what Kip changes in images ([`sockets`],
//! [`clocks`]). Never stores anything for good, never decides when, knows nothing of procs.
#![forbid(unsafe_code)]

pub mod clocks;
pub mod dump;
pub mod helper;
pub mod image;
pub mod locate;
pub mod restore;
pub mod rpc;
pub mod sockets;
pub mod wire;
