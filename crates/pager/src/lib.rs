//! The pager: memory of running processes taken out to a private swap file, and brought back by
//! faults or in one go.
//!
//! Owns swap files, slot maps, working sets and the serving of faults. Touches a process only by
//! its userfaultfd, and, while it is stopped, by the injection of `kip_sys::inject`. Never decides
//! when a proc sleeps.
//!
//! ```text
//! running --stop--> Stopped --deflate--> out --arm--> armed --go--> resuming --wait--> armed --first fault--> awake
//!                                         |
//!                                         +--(held)--wake--go--> awake
//! rebuilt from a snapshot, a part of its memory left out --inflate--> awake
//! ```
//!
//! The program `kip-pager` is [`service`]; the daemon speaks to it by [`client`], in the words of
//! [`protocol`].
//!
//! From here, top down: [`proc`] one proc and the whole way, with [`kip_stop`]; [`plant`] a
//! userfaultfd from inside a sandbox; [`mend`] what others touched meanwhile; [`deflate`] the steps
//! down, with [`space`] and [`convert`]; [`memory`] one address space and its way up, with
//! [`install`], [`resuming`] and [`ticking`]; [`serve`] the threads; [`slots`], [`swap`],
//! [`parked`], [`source`], [`set`] and [`stored`] what is kept where.
//!
//! A crash at any moment loses no page as long as another process holds the userfaultfds
//! ([`proc::Custodian`]): processes wait at missing pages until [`proc::PagedProc::adopt`], and a
//! thread that is just making calls for us goes on as if it had not ([`kip_sys::inject`]). The one
//! exception is a process whose memory is just being dropped ([`deflate`]): the kernel kills it.
//! What a program can notice: [`convert`] takes files' names out of its maps, and mappings that are
//! watched do not join new ones beside them, so that mremap(2) over both fails where it would not
//! have.
#![forbid(unsafe_code)]

mod ahead;
mod arguments;
pub mod client;
mod convert;
mod crew;
mod deflate;
pub mod fault;
mod install;
mod memory;
mod mend;
mod parked;
mod plant;
pub mod proc;
pub mod protocol;
mod resuming;
mod serve;
pub mod service;
mod set;
mod slots;
mod source;
mod space;
mod spares;
mod stored;
mod swap;
mod ticking;

pub use memory::{Bell, SpaceId};
pub use serve::Server;
pub use set::{History, Predictor, SetRecord};
pub use slots::Change;
pub use swap::SWAP;
