//! What no other process can see of the waits and timers of a program that runs: the pager stops
//! its threads for a moment and finds out.
//!
//! The pager, for a daemon that is killed in that moment would leave calls broken off. Without an
//! answer a sleep is as safe; its time-outs may begin anew.

use crate::host::Proc;
use kip_clocks::tree::Tree;
use kip_pager::client::PagerError;
use kip_pager::protocol::{Survey, Timer};
use std::fs;
use std::time::Duration;

/// How often the pager is asked for what has to be known.
const TRIES: u32 = 5;
/// Between two stops of a program whose threads the machine was too busy to stop in time.
const AGAIN_AFTER: Duration = Duration::from_millis(50);

/// Makes sure that the end of each thread's wait can be told: a wait of which it cannot begins
/// anew.
pub fn find_ends(proc: &Proc, tree: &Tree) {
    if tree.has_undated() {
        ask(proc, Survey::Ends);
    }
}

/// Has each wait end when it would have, once it has been broken off from outside and begun anew:
/// to be called before that and after it. A call that obeys the time-out of its socket begins with
/// the whole of it. So the pager is asked until it has stopped all threads: on a machine that is
/// too busy it gives up after a fifth of a second, for the program stands still meanwhile.
pub fn note_ends(proc: &Proc) {
    let answer = asked_again(|| order(proc, Survey::Records));
    let _ = known(proc, Survey::Records, answer);
}

/// As [`note_ends`], of these processes alone (host pids): copies of them are there that are never
/// to go on.
pub fn note_ends_of(proc: &Proc, pids: &[u32]) {
    let list = proc.dir.join("processes");
    let there = proc.cgroup.pids().unwrap_or_default();
    let text: String = pids.iter().filter(|pid| there.contains(pid)).map(|pid| format!("{pid}\n")).collect();
    let order = || proc.shared.pager.survey(proc.key.as_str(), &list, Survey::Records);
    let answer = fs::write(&list, text).map_err(|e| PagerError::Refused(e.to_string()));
    let answer = answer.and_then(|()| asked_again(order));
    let _ = known(proc, Survey::Records, answer);
    let _ = fs::remove_file(&list);
}

fn asked_again<T>(mut ask: impl FnMut() -> Result<T, PagerError>) -> Result<T, PagerError> {
    for _ in 1..TRIES {
        match ask() {
            Err(PagerError::Refused(_)) => std::thread::sleep(AGAIN_AFTER),
            answer => return answer,
        }
    }
    ask()
}

/// The armed POSIX and interval timers of all its processes.
pub fn timers(proc: &Proc) -> Vec<Timer> {
    ask(proc, Survey::Timers)
}

fn ask(proc: &Proc, survey: Survey) -> Vec<Timer> {
    known(proc, survey, order(proc, survey))
}

fn order(proc: &Proc, survey: Survey) -> Result<Vec<Timer>, PagerError> {
    proc.shared.pager.survey(proc.key.as_str(), &proc.cgroup.processes_file(), survey)
}

fn known(proc: &Proc, survey: Survey, answer: Result<Vec<Timer>, PagerError>) -> Vec<Timer> {
    answer.unwrap_or_else(|e| {
        tracing::info!(proc = %proc.name, ?survey, error = kip_types::chain(&e), "waits and timers are not known");
        Vec::new()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_to_be_known_is_asked_again() {
        let mut left = 2;
        let mut ask = || {
            left -= 1;
            if left < 0 { Ok(()) } else { Err(PagerError::Refused("busy".into())) }
        };
        assert!(asked_again(&mut ask).is_ok());
        let mut asked = 0;
        let mut refuse = |error: fn() -> PagerError| {
            asked_again(|| {
                asked += 1;
                Err::<(), _>(error())
            })
            .unwrap_err();
            std::mem::take(&mut asked)
        };
        assert_eq!(refuse(|| PagerError::Refused("busy".into())), TRIES);
        assert_eq!(refuse(|| PagerError::Gone(std::io::ErrorKind::NotConnected.into())), 1);
    }
}
