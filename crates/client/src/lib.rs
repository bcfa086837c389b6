//! Rust client of a Kip daemon.
//!
//! Owns the way over the unix socket, or by TCP with TLS and a token: one connection per call,
//! typed requests and answers, and errors whose one line can be shown to a person. Never retries: a
//! call that changes something is carried out by the daemon even when its client goes away in the
//! middle, so asking again is the caller's decision.
#![forbid(unsafe_code)]

mod checkpoints;
mod client;
mod connect;
mod error;
mod exec;
mod feed;
mod files;
mod images;
mod keys;
mod meters;
mod remote;
mod snapshots;
mod spawned;
mod templates;
mod tokens;
mod tree;
mod volumes;

pub use client::Client;
pub use connect::SOCKET;
pub use error::CallError;
pub use exec::{Exec, ExecReceived, ExecReceiver, ExecSender};
pub use feed::AnswerFeed;
pub use files::{Archive, Pieces};
pub use remote::{Remote, RemoteError};
pub use tree::TreeFileRead;
