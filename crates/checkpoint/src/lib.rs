//! Takes a process tree apart into images and brings it back: by CRIU, or, where it can, by a restorer of our own.
//!
//! Owns CRIU's helpers ([`helper`]), the requests ([`dump`], [`restore`]), what Kip changes in images ([`sockets`], [`procfs`], [`volumes`],
//! [`clocks`], [`ids`]), and the fast way back: a plan made from the images ([`plan`]), carried out by `kip-restore`, to which
//! [`rebuild`] talks, and finished by ptrace ([`resume`]). Says what images may ask for ([`policy`]), whether
//! CRIU can read them ([`comeback`]); their format is `kip-criu-images`. Never stores anything for good, never decides when, knows nothing of procs.
#![forbid(unsafe_code)]

pub mod clocks;
pub mod comeback;
pub mod dump;
pub mod helper;
pub mod hold;
pub mod ids;
pub mod inotify;
pub mod limits;
pub mod locate;
mod objects;
pub mod owners;
pub mod pages;
pub mod plan;
pub mod policy;
pub mod procfs;
pub mod rebuild;
pub mod registers;
pub mod restore;
pub mod resume;
mod rpc;
pub mod sockets;
pub mod volumes;
