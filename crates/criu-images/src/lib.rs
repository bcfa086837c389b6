//! The format of CRIU's checkpoint images: files read, named, changed and written.
//!
//! Owns the layers of the format: messages on the wire ([`Message`]), one image file
//! ([`CheckpointImage`]), all images of a checkpoint ([`Images`]), the numbers of fields
//! ([`fields`]) and their values ([`codes`]). [`inspect`] reads from them what people ask about a
//! checkpoint, [`processes`] what code asks of its process tree, [`bars_criu`] whether CRIU can
//! read them back.
//!
//! Never runs CRIU, never touches a process, and knows no policy: what Kip changes in images, and
//! what images may ask for, `kip-checkpoint` says. A message keeps fields that Kip does not know,
//! so that an image that is read and written again loses nothing. Nothing here is durable: the
//! caller syncs.
#![forbid(unsafe_code)]

pub mod codes;
mod comeback;
pub mod fields;
mod file;
mod ghost;
mod images;
pub mod inspect;
pub mod pagemap;
pub mod processes;
pub mod system_v;
mod wire;

pub use comeback::bars_criu;
pub use file::{CheckpointImage, CheckpointImageError, Mixed};
pub use ghost::GhostFile;
pub use images::{CHECKPOINT, Images};
pub use wire::{FieldValue, Malformed, Message};
