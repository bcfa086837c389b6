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
/// With what the names of such files of programs that have ended begin: those leases are to end.
pub const ENDED_LEASES: &str = "leases.ended";

/// The name that [`LEASES`], of this inode, has when the program has ended: no other file in its
/// directory has it.
pub fn ended_leases(inode: u64) -> String {
    format!("{ENDED_LEASES}.{inode}")
}
