//! What no other process can see of the waits and timers of a program that runs: the pager stops
//! its threads for a moment and finds out.
//!
//! The pager, for a daemon that is killed in that moment would leave calls broken off. Without an
//! answer a sleep is as safe; its time-outs may begin anew.

use crate::host::Proc;
use kip_clocks::tree::Tree;
use kip_pager::protocol::{Survey, Timer};

/// Makes sure that the end of each thread's wait can be told: a wait of which it cannot begins
/// anew.
pub fn find_ends(proc: &Proc, tree: &Tree) {
    if tree.has_undated() {
        ask(proc, Survey::Ends);
    }
}

/// Has each wait end when it would have, once it has been broken off from outside and begun anew.
pub fn note_ends(proc: &Proc) {
    ask(proc, Survey::Records);
}

/// The armed POSIX and interval timers of all its processes.
pub fn timers(proc: &Proc) -> Vec<Timer> {
    ask(proc, Survey::Timers)
}

fn ask(proc: &Proc, survey: Survey) -> Vec<Timer> {
    let answer = proc.shared.pager.survey(proc.key.as_str(), &proc.cgroup.processes_file(), survey);
    answer.unwrap_or_else(|e| {
        tracing::info!(proc = %proc.name, ?survey, error = kip_types::chain(&e), "waits and timers are not known");
        Vec::new()
    })
}
