//! What people see of a proc beyond its state: why it is as it is (`kip why`), what is in it
//! (`kip inspect`), and how it is seen from outside ([`view`]), in whatever tier it is.
//!
//! Reads /proc, images and held sockets. Wakes no proc, changes nothing, and never decides for a
//! proc.
#![forbid(unsafe_code)]

mod beside;
mod inspect;
pub mod view;
mod why;

pub use inspect::details;
pub use why::why;
