//! A probe's check of a running proc, which is not to count as activity.
//!
//! Before it the proc is looked at as ever; what its counters show from there to the end of the
//! check is left out. It does not fall asleep meanwhile: it would wake for the check. Both are
//! short, and there is a second between two of them (`probe`), so that what others do cannot hide
//! behind them for long.

use super::*;

/// As long as it lives a check is under way.
#[derive(Debug)]
pub struct Asking(#[allow(dead_code, reason = "it is dropped, that is all")] oneshot::Sender<()>);

impl Task {
    pub(super) fn begin_check(&mut self) -> Option<Asking> {
        self.sample();
        if self.phase.running().is_none() || !matches!(self.record.state, State::Hot { .. }) {
            return None;
        }
        let (asking, over) = oneshot::channel();
        self.checking = Some(over);
        Some(Asking(asking))
    }

    /// Waits for the end of a check that is under way.
    pub(super) async fn check_over(&mut self) {
        if let Some(over) = &mut self.checking {
            let _ = over.await;
        }
        self.checking = None;
    }

    pub(super) fn on_checked(&mut self, checked: Checked) {
        self.sample();
        if self.record.state.tier().is_none() {
            return;
        }
        let before = self.record.checked.iter().position(|c| c.host_port == checked.host_port);
        let was_wrong = before.map(|at| self.record.checked.remove(at)).is_some_and(|c| c.wrong.is_some());
        if was_wrong != checked.wrong.is_some() {
            let kind = if was_wrong { EventKind::Healthy } else { EventKind::Unhealthy };
            let why = checked.wrong.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
            let detail = format!("probe {}{why}", checked.host_port);
            self.proc.shared.events.emit(Some(&self.proc.name), kind, detail);
        }
        self.record.checked.push(checked);
        self.publish();
    }
}
