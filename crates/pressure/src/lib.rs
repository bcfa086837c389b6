//! The memory of the machine, and when a wake may have some. Of a proc it knows only what its
//! callers say of it, and puts none to sleep.
#![forbid(unsafe_code)]

mod pressure;

pub use pressure::admission::ROOM_WITHIN;
pub use pressure::*;
