//! What a program inside a Kip proc says to Kip: which proc it is in, the name tree, and procs that
//! it spawns.
//!
//! ```ignore
//! use kip_sdk::{Client, Put};
//!
//! let client = Client::new();
//! println!("{}", client.whoami()?.name);
//! client.put("/services/web", b"10.0.0.7:80", &Put::default())?;
//! # Ok::<(), kip_sdk::Error>(())
//! ```
//!
//! | module | owns |
//! | --- | --- |
//! | `client` | calls, each of which waits for its answer |
//! | `connection` | one connection: frames and their numbers |
//! | `watch` | changes as they come |
//! | `error` | what can be wrong |
//! | [`wire`] | messages as bytes: docs/runtime.md |
//!
//! A connection that has ended is made again. What may be asked twice is; a change that was not
//! answered is [`Error::is_unknown`].
#![forbid(unsafe_code)]

mod client;
mod connection;
mod error;
mod watch;
#[path = "../../../crates/runtime/src/wire.rs"]
pub mod wire;

pub use client::{Client, Put};
pub use error::Error;
pub use watch::Watch;
pub use wire::{
    FailureCode, RuntimeIdentity as Identity, SpawnCall as Spawn, WireChange as Change, WireChangeKind as ChangeKind,
    WireChanges as Changes, WireEndKind as EndKind, WireFence as Fence, WireFile as File, WireLease as Lease,
    WireNode as Node, WireSpawnEnd as SpawnEnd, WireSpawned as Spawned, WireVariable as Variable,
};

/// Where the socket is in each proc.
pub const PATH: &str = "/run/kip/runtime";
