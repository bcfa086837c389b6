//! What a daemon is started with.

use kip_types::spec::Timing;
use kip_worker::MemoryMarks;
use std::net::SocketAddr;
use std::path::PathBuf;

/// What a daemon is started with.
#[derive(Debug, Clone)]
pub struct Options {
    /// The data directory, absolute.
    pub data: PathBuf,
    /// CRIU's program, if it is not to be searched for.
    pub criu: Option<PathBuf>,
    /// When procs leave their tiers whose owner does not say so.
    pub timing: Timing,
    /// How much memory procs may use.
    pub memory: MemoryMarks,
    /// What all working sets of hibernated procs may take in memory, bytes; none for a part of what
    /// procs may use.
    pub set_memory: Option<u64>,
    /// URL of the object store, or `none`; without it that of the last time.
    pub store: Option<String>,
    /// How often the store is collected, milliseconds; none for the usual.
    pub collect_every: Option<u64>,
    /// What parked procs may take on the local disk, bytes.
    pub disk: Option<u64>,
    /// What the cache of the store may take there, bytes: 0 for no cache, nothing for the usual.
    pub cache: Option<u64>,
    /// Where traces of wakes are sent, if not where the variables OTEL_* say.
    #[cfg(feature = "otel")]
    pub traces: Option<String>,
    /// Group that may use the API, by number or name.
    pub group: Option<String>,
    /// Where the API is offered by TCP.
    pub listen: Option<Listen>,
    /// What is logged on stderr, as a filter of tracing-subscriber.
    pub log: String,
    /// The daemon is killed at this recorded step, or delayed there (tests).
    pub fault_at: Option<String>,
    /// No wake is made without CRIU (tests).
    pub only_criu: bool,
    /// Residents that run are taken for those of another version (tests).
    pub supersede: bool,
}

/// An address of the API by TCP.
#[derive(Debug, Clone)]
pub struct Listen {
    /// Where.
    pub address: SocketAddr,
    /// What TLS is spoken with; without it, on a loopback address only, none is.
    pub tls: Option<Certificate>,
}

/// A certificate and its key.
#[derive(Debug, Clone)]
pub struct Certificate {
    /// PEM file of the certificate, with those that lead to its CA.
    pub chain: PathBuf,
    /// PEM file of the private key.
    pub key: PathBuf,
}
