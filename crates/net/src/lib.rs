//! Networks of procs: addresses, namespaces, port forwarding, and the custody of sockets while
//! their program is not there.
//!
//! Owns the network namespace of each proc ([`pool`]), the machine's rules that lead packets there
//! ([`nat`]), the reservation of host ports ([`reserve`]), what the kernel knows of sockets
//! ([`diag`]), sockets without a program ([`custody`]), such made anew ([`renewal`]), their polling
//! ([`wake`]) and the question whether a proc is being talked to ([`activity`]). Never knows of
//! memory, of checkpoints or of a proc's state, and never sits in a data path.
//!
//! Everything here is blocking and made for threads. "The host" is always the network namespace of
//! the thread that calls, so that a test can be a host of its own. All that is made is named after
//! the instance ([`Instance`]), can be made twice, and can be found and removed by a process that
//! has just started.
#![forbid(unsafe_code)]

pub mod activity;
pub mod addr;
pub mod custody;
pub mod diag;
pub mod nat;
pub mod pool;
pub mod prepared;
pub mod renewal;
pub mod reserve;
pub mod wake;

mod rtnl;
mod sysctl;

pub use addr::{Addresses, Instance, Slot};
pub use nat::Nat;
pub use pool::{NetNs, NetPool};
