//! What is kept with a proc's record: its meter, read from its control group and its network, and
//! its absolute waits.

use crate::host::Proc;
use kip_clocks::AbsoluteWaits;
use kip_journal::meter::{Kept, marks};
use kip_net::activity::TrafficCounters as Traffic;
use kip_records::record::{self, Durability, RecordError};
use kip_records::state::Record;
use serde::{Deserialize, Serialize};

/// The record with the meter, as `state.json` has both.
#[derive(Serialize)]
struct Written<'a> {
    #[serde(flatten)]
    record: &'a Record,
    meter: &'a Kept,
    absolute_waits: AbsoluteWaits,
}

/// The same, read.
#[derive(Debug, Deserialize)]
pub struct Stored {
    /// The record.
    #[serde(flatten)]
    pub record: Record,
    /// What the proc has used.
    #[serde(default)]
    pub meter: Kept,
    /// How long its absolute waits are; none in the record of an older Kip.
    #[serde(default)]
    pub absolute_waits: Option<AbsoluteWaits>,
}

impl Proc {
    /// Writes its record, and with it its absolute waits and its meter, which is in the record's
    /// tier from now on.
    pub fn write_record(&self, record: &Record, durability: Durability) -> Result<(), RecordError> {
        if self.meter.tier() != record.state.tier() {
            // Until now it was used in the tier that it leaves.
            self.sample_cpu();
        }
        let before = self.meter.enter(record.state.tier());
        let kept = self.meter.kept();
        let absolute_waits = self.absolute_waits.lock().clone();
        let written = record::write_state(&self.dir, &Written { record, meter: &kept, absolute_waits }, durability);
        match &written {
            Ok(()) if marks::is_due(&kept) && marks::add(&self.dir, &kept) => self.meter.marked(&kept),
            Ok(()) => {}
            Err(_) => drop(self.meter.enter(before)),
        }
        written
    }

    /// Samples what it holds and has used, while it runs as this pid 1 and what that has started.
    /// Returns its CPU time, nanoseconds, and the counters of its network namespace.
    pub fn sample_meter(&self, init: u32) -> (Option<u64>, Option<Traffic>) {
        let cpu_ns = self.sample_cpu();
        self.meter.level_of_running(self.cgroup.held_bytes());
        (cpu_ns, self.meter.traffic(|| Traffic::read(init).ok()))
    }

    /// What its cgroup has counted until now.
    pub fn sample_cpu(&self) -> Option<u64> {
        let cpu_ns = self.meter.cpu(|| self.cgroup.cpu_ns().ok());
        if cpu_ns.is_some() {
            self.meter.killed(|| self.cgroup.oom_kills());
        }
        cpu_ns
    }
}
