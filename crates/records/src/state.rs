//! What is recorded of a proc (`state.json`): enough for a restarted daemon to finish or undo
//! whatever was under way.

use crate::due::Ticks;
use kip_types::api::{PortView, SleepView, WakeView};
use kip_types::life::{RAN_WELL_MS, Restart};
use kip_types::lifecycle::{Exit, Input, Unfit, step};
use kip_types::{Generation, State};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What the check of a probe said last.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Checked {
    /// The probe's.
    pub host_port: u16,
    /// When, milliseconds since the epoch.
    pub at_ms: u64,
    /// What was wrong; none if nothing was.
    pub wrong: Option<String>,
}

/// The record.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// Where in its lifecycle it is.
    #[serde(flatten)]
    pub state: State,
    /// Its number on this machine: addresses and ids follow from it.
    pub slot: u16,
    /// The skeleton that it was created over.
    pub base: PathBuf,
    /// False until its first start succeeded: a crash before that removes it.
    pub established: bool,
    /// Published ports.
    pub ports: Vec<PortView>,
    /// The program's pid inside; 0 when it is not known.
    pub program: u32,
    /// Its last sleep.
    pub last_sleep: Option<SleepView>,
    /// Its last wake.
    pub last_wake: Option<WakeView>,
    /// What stood in the way of the last sleep.
    pub cannot_sleep: Vec<String>,
    /// When [`Record::cannot_sleep`] or [`Record::stays_parked`] was found, milliseconds since the
    /// epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused_at_ms: Option<u64>,
    /// Why its generation cannot go to the store, of one that is parked.
    #[serde(default)]
    pub stays_parked: Option<String>,
    /// Wakes in a row that served nothing but ticks: they are made rarer and rarer.
    pub tick_wakes: u32,
    /// What becomes of its ticks while it is parked. Of a proc that is awake: what became of them
    /// last.
    #[serde(default)]
    pub ticks: Ticks,
    /// Wakes since it was last started.
    #[serde(default)]
    pub wakes: u64,
    /// How often its policy has started it again since its owner did.
    #[serde(default)]
    pub restarts: u32,
    /// How often in a row: since it last ran well.
    #[serde(default)]
    pub restarts_in_a_row: u32,
    /// When its program was last started, milliseconds since the epoch; 0 in records of older
    /// daemons.
    #[serde(default)]
    pub started_at_ms: u64,
    /// Whether it has become ready since it was started; none without a check.
    #[serde(default)]
    pub ready: Option<bool>,
    /// How its probes found it since it was started. On disk only as it was at the last change of
    /// something else: a sleep is one.
    #[serde(default)]
    pub checked: Vec<Checked>,
    /// It was awake when the daemon was told to park all and end: the next one wakes it.
    #[serde(default)]
    pub wakes_again: bool,
    /// It is stopped, or about to be, so that another proc can take its place. Until that has
    /// happened the next daemon starts it again, and its end is not the end its owner waits for.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stands_aside: bool,
    /// The data directory that has taken it over from the store.
    #[serde(default)]
    pub taken_over_by: Option<String>,
    /// The kernel ended its program for lack of memory, by the proc's limit or the machine's.
    #[serde(default)]
    pub out_of_memory: bool,
    /// Its newest generation could not be woken: why, and on what it runs instead. Since its last
    /// start.
    #[serde(default)]
    pub fell_back: Option<String>,
}

impl Record {
    /// Of a proc that is about to start for the first time.
    pub fn new(slot: u16, base: PathBuf) -> Record {
        Record {
            state: State::Starting,
            slot,
            base,
            established: false,
            ports: Vec::new(),
            program: 0,
            last_sleep: None,
            last_wake: None,
            cannot_sleep: Vec::new(),
            stays_parked: None,
            refused_at_ms: None,
            tick_wakes: 0,
            ticks: Ticks::default(),
            wakes: 0,
            restarts: 0,
            restarts_in_a_row: 0,
            started_at_ms: 0,
            ready: None,
            checked: Vec::new(),
            wakes_again: false,
            stands_aside: false,
            taken_over_by: None,
            out_of_memory: false,
            fell_back: None,
        }
    }

    /// The record after `input`.
    pub fn after(&self, input: Input) -> Result<Record, Unfit> {
        Ok(Record { state: step(&self.state, input)?, ..self.clone() })
    }

    /// The record after its program ended by itself: to be started again, or not.
    pub fn after_end(&self, restart: Restart, exit: Exit, now_ms: u64) -> Result<Record, Unfit> {
        let ran_well = now_ms.saturating_sub(self.started_at_ms) >= RAN_WELL_MS;
        let in_a_row = if ran_well { 0 } else { self.restarts_in_a_row };
        match restart.pause_ms(exit, in_a_row) {
            None => self.after(Input::Exited(Some(exit))),
            Some(pause_ms) => {
                let next = self.after(Input::ExitedForNow { exit: Some(exit), at_ms: now_ms + pause_ms })?;
                let (restarts, restarts_in_a_row) = (self.restarts.saturating_add(1), in_a_row.saturating_add(1));
                Ok(Record { restarts, restarts_in_a_row, ..next })
            }
        }
    }

    /// How its program ended; none while the program is not known to have ended.
    pub fn exit(&self) -> Option<Exit> {
        match &self.state {
            State::Stopped { exit } | State::Restarting { exit, .. } => *exit,
            _ => None,
        }
    }

    /// [`Record::exit`] for people.
    pub fn exit_words(&self) -> Option<String> {
        let why = if self.out_of_memory { ", out of memory" } else { "" };
        self.exit().map(|exit| format!("{exit}{why}"))
    }

    /// The newest complete generation.
    pub fn generation(&self) -> Generation {
        self.state.generation()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // promise life: the row begins anew after 10 s
    #[test]
    fn a_run_of_ten_seconds_begins_the_row_anew() {
        let hot = State::Hot { init: 7, init_started: 1, generation: Generation(0) };
        let running = Record { state: hot, established: true, ..Record::new(1, PathBuf::new()) };
        let (policy, exit) = (Restart::OnFailure(Some(3)), Exit::Code(1));
        let at = |record: &Record| match record.state {
            State::Restarting { at_ms, .. } => Some(at_ms),
            _ => None,
        };
        let third = Record { restarts: 9, restarts_in_a_row: 2, started_at_ms: 1000, ..running };
        let soon = third.after_end(policy, exit, 10_999).unwrap();
        assert_eq!((at(&soon), soon.restarts, soon.restarts_in_a_row), (Some(11_399), 10, 3));
        let well = third.after_end(policy, exit, 11_000).unwrap();
        assert_eq!((at(&well), well.restarts, well.restarts_in_a_row), (Some(11_100), 10, 1));
        let last = Record { restarts_in_a_row: 3, ..third };
        let stopped = last.after_end(policy, exit, 2000).unwrap();
        assert_eq!((stopped.state, stopped.restarts), (State::Stopped { exit: Some(exit) }, 9));
    }
}
