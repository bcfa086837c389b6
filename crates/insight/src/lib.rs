//! What people see of a proc beyond its state: why it is as it is (`kip why`), and what is in it
//! (`kip inspect`), in whatever tier it is.
//!
//! Reads /proc, images and held sockets. Wakes no proc, changes nothing, and never decides for a
//! proc.
#![forbid(unsafe_code)]

mod beside;
mod inspect;
mod why;

pub use inspect::details;
pub use why::why;
