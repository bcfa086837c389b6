//! Control plane: the API of one data directory on a unix socket and, if asked to, by TCP.
//!
//! Owns the routes before a [`kip_service::WorkerService`], the edge checks of a request
//! ([`admit`]), the lock that makes a daemon the only one of its data directory ([`DataLock`]) and
//! the socket's file ([`ApiSocket`]). Never sits in a data path and knows nothing of sandboxes,
//! memory or checkpoints.
//!
//! Invariants: an operation that changes something runs in its own task, so that a client which
//! goes away in its middle leaves nothing half done; every refusal reaches the client as a JSON
//! [`kip_types::Refusal`] with a matching HTTP status. A crash leaves a socket file on which no
//! process listens; the next daemon replaces it.
#![forbid(unsafe_code)]

pub mod admit;
mod answer;
mod describe;
mod exec;
mod feed;
mod lock;
mod remote;
mod routes;
mod server;
mod socket;
mod state;
mod tokens;

pub use lock::{DataLock, LockError};
pub use remote::{ListenError, RemoteListener, Tls};
pub use routes::openapi;
pub use server::{Ending, ServeError};
pub use socket::{ApiSocket, BindError, SOCKET};
pub use state::{Api, ApiServices};
pub use tokens::{Tokens, TokensError};
