//! The format of CRIU's checkpoint images: files read, named, changed and written.
//!
//! Owns the layers of the format: messages on the wire ([`Message`]), one image file ([`Image`]),
//! all images of a checkpoint ([`Images`]), the numbers of fields ([`fields`]) and their values
//! ([`codes`]). [`inspect`] reads from them what people ask about a checkpoint.
//!
//! Never runs CRIU, never touches a process, and knows no policy: what Kip changes in images, and
//! what images may ask for, `kip-checkpoint` says. A message keeps fields that Kip does not know,
//! so that an image that is read and written again loses nothing. Nothing here is durable: the
//! caller syncs.
#![forbid(unsafe_code)]

pub mod codes;
pub mod fields;
mod file;
mod images;
pub mod inspect;
pub mod pagemap;
mod wire;

pub use file::{Image, ImageError};
pub use images::{CHECKPOINT, Images};
pub use wire::{Malformed, Message, Value};
