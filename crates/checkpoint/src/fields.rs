//! Numbers of the fields in CRIU's images: a module for each protobuf message, a constant for each
//! field that Kip uses.
//!
//! Modules and constants are named as `images/*.proto` of CRIU 4.2 names messages and fields.
//! Values of fields are in [`crate::codes`]; [`crate::wire`] reads and writes messages.

mod files;
mod memory;
mod tasks;

pub use files::*;
pub(crate) use memory::*;
pub use tasks::*;
