//! The keeper: a tiny process that holds descriptors under names and hands duplicates of them out
//! again.
//!
//! It has no other job, so that it need not be restarted when anything else is. The daemon holds
//! duplicates of the same descriptors: either may be killed at any moment, and what they refer to
//! (sockets, namespaces, pipes) lives on in the other. The daemon sees the keeper's death at once
//! ([`Keeper::watch_fd`]), starts another and puts everything again; a restarted daemon takes
//! everything from the keeper.
//!
//! | module | owns |
//! | --- | --- |
//! | [`client`] | the daemon's side: [`Keeper`] |
//! | [`server`] | the process: one thread, one poll loop |
//! | [`store`] | what is held, under which names |
//! | [`bundle`] | several descriptors for the price of one |
//! | [`protocol`] | the messages between the two |
//! | [`run_directory`] | the files in `DIR/run` and their lock |
//! | [`resident`] | how it and `kip-pager` come to be no other program's children |
//!
//! Never does: look at what it holds, decide anything, write anything durable.
#![forbid(unsafe_code)]

pub mod bundle;
pub mod client;
mod errors;
pub mod protocol;
pub mod resident;
pub mod run_directory;
pub mod server;
pub mod store;

pub use client::{Keeper, Presence};
pub use errors::{KeeperError, StartError};
pub use protocol::KeeperStatus;
