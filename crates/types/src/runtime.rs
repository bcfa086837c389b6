//! Where the runtime socket is: what a program says to Kip.

/// Inside of each proc.
pub const PATH: &str = "/run/kip/runtime";
/// Its directory below the data directory.
pub const PLACE: &str = "run/runtime";
/// Its name there, with which its address ends.
pub const SOCKET: &str = "kip-runtime";
/// In a proc's directory, the leases that its program has granted: a line for each, its number and
/// its time in milliseconds.
pub const LEASES: &str = "leases";
/// The same of a program that has ended: they are to end.
pub const ENDED_LEASES: &str = "leases.ended";
