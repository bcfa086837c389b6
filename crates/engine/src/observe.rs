//! Observers that hear of every wake, besides events and metrics: traces. None of them is on a
//! wake's way.

use kip_types::api::WakeView;
use kip_types::{ProcName, Tier};
use std::fmt::Debug;

/// Hears of wakes, when they are over. Must not block.
pub trait WakeObserver: Debug + Send + Sync {
    /// A proc runs again.
    fn woke(&self, name: &ProcName, wake: &WakeView);
    /// One does not, for that reason.
    fn failed(&self, name: &ProcName, from: Tier, why: &str);
}
