//! What people see of a proc beyond its state: why it is as it is (`kip why`), what is in it
//! (`kip inspect`), how it is seen from outside ([`view`],
//! [`history`]), how it is best cloned, in whatever tier it is.
//!
//! Reads /proc, images and held sockets. Wakes no proc, changes nothing, and never decides for a
//! proc.
#![forbid(unsafe_code)]

mod advice;
mod beside;
pub mod history;
mod inspect;
pub mod view;
mod why;

pub use advice::advice;
pub use inspect::details;
pub use why::why;
