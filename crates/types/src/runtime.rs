//! Where the runtime socket is: what a program says to Kip.

/// Inside of each proc.
pub const PATH: &str = "/run/kip/runtime";
/// Its directory below the data directory.
pub const PLACE: &str = "run/runtime";
/// Its name there, with which its address ends.
pub const SOCKET: &str = "kip-runtime";
