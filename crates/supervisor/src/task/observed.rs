//! Wakes, told to the meter, the metrics and the observer.

use super::Task;
use kip_engine::cause::WakeCause;
use kip_types::Tier;
use kip_types::api::WakeView;

impl Task {
    /// Counts it for the proc's meter and the metrics, and tells the observer.
    pub fn count_wake(&self, cause: WakeCause, wake: &WakeView) {
        self.proc.meter.woken(wake.from, cause.word());
        self.proc.shared.metrics.woke(wake.from, cause.word(), wake.total_us);
        if let Some(observer) = &self.proc.shared.observer {
            observer.woke(&self.proc.name, wake);
        }
    }

    /// The same of a wake that failed.
    pub fn count_failed_wake(&self, from: Tier, why: &str) {
        self.proc.shared.metrics.failed_to_wake(from);
        if let Some(observer) = &self.proc.shared.observer {
            observer.failed(&self.proc.name, from, why);
        }
    }
}
