//! How procs were spread over the tiers in the last hour: a look at all of them every ten seconds,
//! from memory alone. Lost with the daemon.

use crate::view;
use kip_supervisor::task::Handle;
use kip_sys::clock::now_ms;
use kip_types::Tier;
use kip_types::api::HistorySample;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::time::Duration;

/// From one look to the next.
pub const EVERY: Duration = Duration::from_secs(10);
/// An hour.
pub const KEPT: usize = 360;

/// The looks that are kept.
#[derive(Debug, Default)]
pub struct TierHistory(Mutex<VecDeque<HistorySample>>);

impl TierHistory {
    /// Keeps a look, in place of the oldest one.
    pub fn keep(&self, sample: HistorySample) {
        let mut kept = self.0.lock();
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back(sample);
    }

    /// Those that are kept, and another one.
    pub fn with(&self, now: HistorySample) -> Vec<HistorySample> {
        let kept = self.0.lock();
        kept.iter().copied().chain([now]).collect()
    }
}

/// A look at all of them.
pub fn sample(handles: &[Handle]) -> HistorySample {
    let mut sample = HistorySample { at_ms: now_ms(), ..HistorySample::default() };
    for handle in handles {
        let now = view::proc_now(handle);
        let held = now.meter.held_bytes;
        let count = match now.meter.tier {
            Some(Tier::Hot) => &mut sample.hot,
            Some(Tier::Hibernated) => &mut sample.hibernated,
            Some(Tier::Parked) => &mut sample.parked,
            Some(Tier::Archived) => &mut sample.archived,
            None => &mut sample.stopped,
        };
        *count += 1;
        let in_memory = matches!(now.meter.tier, Some(Tier::Hot | Tier::Hibernated));
        sample.held_bytes += if in_memory { held } else { 0 };
        sample.saved_bytes += now.saved_bytes;
    }
    sample
}

#[cfg(test)]
mod tests {
    use super::*;

    // promise api: the last hour, a look each ten seconds
    #[test]
    fn an_hour_is_kept() {
        let history = TierHistory::default();
        (0..500).for_each(|at_ms| history.keep(HistorySample { at_ms, ..HistorySample::default() }));
        let all = history.with(HistorySample { at_ms: 1000, ..HistorySample::default() });
        assert_eq!((all.len(), all[0].at_ms, all[KEPT].at_ms), (KEPT + 1, 500 - KEPT as u64, 1000));
    }
}
