//! What a proc was measured to have: memory, processes, processor time.

use kip_records::state::Record;
use kip_types::State;
use kip_types::api::{MemoryView, SleepView};
use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// What a proc was measured to have.
#[derive(Debug, Default)]
pub struct Measured {
    /// A hibernated one, and in which sleep. Its threads stand still: but for what the kernel or
    /// the pager moves to disk meanwhile, that does not change before it wakes.
    asleep: Mutex<Option<(SleepView, Measure)>>,
    samples: Mutex<Samples>,
}

#[derive(Debug, Default)]
struct Samples {
    /// When the oldest sample began that has not ended.
    began: Option<Instant>,
    /// What the newest one found.
    last: Option<Measure>,
}

/// What a proc uses.
#[derive(Debug, Clone, Default)]
pub struct Measure {
    /// Pids of its processes, on the host.
    pub pids: Vec<u32>,
    /// Its memory.
    pub memory: MemoryView,
    /// CPU time that it has used, microseconds.
    pub cpu_us: Option<u64>,
}

impl Measured {
    /// What it has used up to the sleep of this record, if that was measured.
    pub fn in_sleep(&self, record: &Record) -> Option<Measure> {
        let known = self.asleep.lock();
        let (sleep, measure) = known.as_ref()?;
        let same = matches!(record.state, State::Hibernated { .. }) && record.last_sleep.as_ref() == Some(sleep);
        same.then(|| measure.clone())
    }

    /// Remembers what it has used up to the sleep of this record.
    pub fn keep(&self, record: &Record, measure: &Measure) {
        let sleep = record.last_sleep.clone().filter(|_| matches!(record.state, State::Hibernated { .. }));
        *self.asleep.lock() = sleep.map(|sleep| (sleep, measure.clone()));
    }

    /// What was measured last.
    pub fn last(&self) -> Measure {
        self.samples.lock().last.clone().unwrap_or_default()
    }

    /// Samples, unless an earlier sample has been under way for so long.
    pub fn sample(&self, stuck_after: Duration, measure: impl FnOnce() -> Measure) -> Option<Measure> {
        let now = Instant::now();
        let first = {
            let mut samples = self.samples.lock();
            if samples.began.is_some_and(|began| now - began > stuck_after) {
                return None;
            }
            let first = samples.began.is_none();
            samples.began.get_or_insert(now);
            first
        };
        let found = measure();
        let mut samples = self.samples.lock();
        if first {
            samples.began = None;
        }
        samples.last = Some(found.clone());
        Some(found)
    }
}
