//! What no other process can see of the waits and timers of a program that runs: the pager stops
//! its threads for a moment and finds out.
//!
//! The pager, for a daemon that is killed in that moment would leave calls broken off. Without an
//! answer a sleep is as safe; its time-outs may begin anew.

use crate::host::Proc;
use kip_clocks::tree::Tree;
use kip_pager::client::PagerError;
use kip_pager::protocol::{Survey, Timer};
use std::time::{Duration, Instant};

/// How long the pager is asked again for what has to be known.
const NOTED_WITHIN: Duration = Duration::from_secs(2);
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
    let answer = asked_again(NOTED_WITHIN, || order(proc, Survey::Records));
    let _ = known(proc, Survey::Records, answer);
}

fn asked_again<T, E>(within: Duration, mut ask: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    let until = Instant::now() + within;
    loop {
        match ask() {
            Err(_) if Instant::now() < until => std::thread::sleep(AGAIN_AFTER),
            answer => return answer,
        }
    }
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
            if left < 0 { Ok(()) } else { Err(left) }
        };
        assert_eq!(asked_again(NOTED_WITHIN, &mut ask), Ok(()));
        assert_eq!(asked_again(Duration::ZERO, || Err::<(), _>(7)), Err(7));
    }
}
