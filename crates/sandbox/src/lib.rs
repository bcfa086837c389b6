//! Sandboxes: the files, namespaces, groups and rules that a proc's processes live in, and
//! `kip-launch`, which builds them.
//!
//! Owns the base and layers of a root filesystem ([`base`], [`rootfs`], [`archive`]), files of the
//! host that lie in it ([`volume`]), `/sys` ([`sysfs`]), the users that programs run as
//! ([`users`]), control groups ([`cgroup`]), the system call filter ([`seccomp`]), the sandbox's
//! pid 1 ([`init`]; while it is restored, [`restorer`]) and the launcher ([`launcher`] is its
//! client, [`launch`] the resident process). Never knows of sleep: what holds descriptors while a
//! proc is parked, and when, is decided elsewhere.
#![forbid(unsafe_code)]

pub mod archive;
pub mod base;
pub mod cgroup;
pub mod disk;
pub mod init;
pub mod launch;
pub mod launcher;
mod mounts;
mod protocol;
pub mod quota;
pub mod restorer;
pub mod rootfs;
pub mod seccomp;
pub mod sysfs;
pub mod terminals;
pub mod users;
pub mod volume;

pub use launcher::Launcher;
pub use protocol::{Failure, ProgramIds, ResourceLimit, Step};
