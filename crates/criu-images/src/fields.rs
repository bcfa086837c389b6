//! Numbers of the fields in CRIU's images: a module for each protobuf message, a constant for each
//! field that Kip uses.
//!
//! Modules and constants are named as `images/*.proto` of CRIU 4.2 names messages and fields.
//! Values of fields are in [`crate::codes`]; [`crate::Message`] is a message as it is read and
//! written.
#![allow(missing_docs, reason = "the names are CRIU's; a comment has what they do not say")]

mod files;
mod ipc;
mod memory;
mod tasks;

pub use files::*;
pub use ipc::*;
pub use memory::*;
pub use tasks::*;
