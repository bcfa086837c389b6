//! Takes a process tree apart into checkpoint images and restores it: by CRIU, or, where it can, by
//! a restorer of our own.
//!
//! | module | owns |
//! | --- | --- |
//! | [`locate`], [`helper`], [`helper_pool`], [`dump`], [`restore`] | CRIU: where it is, its helpers, the two requests |
//! | [`sockets`], [`inotify`], [`owners`], [`volumes`], [`limits`], [`ids`], [`procfs`], [`links`], [`pages`], [`hold`] | what Kip changes in images |
//! | [`attributes`] | what images have no place for |
//! | [`plan`], [`rebuild`], [`registers`], [`resume`] | the fast way back: a plan made from the images, carried out by `kip-restore`, finished by ptrace |
//! | [`policy`] | what images may ask for |
//!
//! Never stores anything for good, never decides when, knows nothing of procs. The format of images
//! is `kip-criu-images`.
#![forbid(unsafe_code)]

pub mod attributes;
pub mod dump;
pub mod helper;
pub mod helper_pool;
mod hold;
mod ids;
pub mod inotify;
mod limits;
mod links;
pub mod locate;
mod objects;
mod owners;
mod pages;
pub mod plan;
pub mod policy;
mod procfs;
mod rebuild;
mod registers;
pub mod restore;
pub mod resume;
mod rpc;
pub mod sockets;
mod system_v;
pub mod terminals;
mod volumes;

pub use hold::{Held, hold_threads, is_held};
pub use ids::move_id_block;
pub use limits::set_limits;
pub use links::use_other_names;
pub use objects::HeldObject;
pub use owners::{Owned, SignalReceiver, take_owners};
pub use pages::{is_for_criu, make_whole, page_map};
pub use procfs::mend_proc_paths;
pub use rebuild::{Came, Rebuild, RebuildError, Unfilled};
pub use registers::Registers;
pub use system_v::has_own_ipc;
pub use volumes::{VolumeFile, is_below, release_volume_files};
