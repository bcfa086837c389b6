//! How many procs serve behind one name (paper S, section I).
//!
//! [`watch`] looks at each scaled proc once a second: [`Load`] is what its replicas do, [`decide`]
//! how many more or fewer there should be, and a [`Fleet`] has that done. What is decided depends
//! on what is seen and nothing else: a daemon that is started anew sees the same procs.
//!
//! A replica that is taken away gets no new connections. It sleeps when it is idle, as any proc
//! does, is parked, and is removed then; if there is load meanwhile it is put back, which takes
//! less than a new one. Owns no proc and no rule of the network; never measures, which is
//! the fleet's.
#![forbid(unsafe_code)]

mod decide;
mod fleet;
mod load;
mod scaler;

pub use decide::{Decision, Trend, decide};
pub use fleet::{Fleet, Group, Member, MemberState};
pub use load::{Load, LoadCounters};
pub use scaler::{Scaler, watch};
