//! What is recorded of a proc (`state.json`): enough for a restarted daemon to finish or undo whatever was under way.

use kip_types::api::{PortView, SleepView, WakeView};
use kip_types::lifecycle::{Input, Unfit, step};
use kip_types::{Generation, State};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The record.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Where in its lifecycle it is.
    #[serde(flatten)]
    pub(crate) state: State,
    /// Its number on this machine: addresses and ids follow from it.
    pub(crate) slot: u16,
    /// The skeleton that it was created over.
    pub(crate) base: PathBuf,
    /// False until its first start succeeded: a crash before that removes it.
    pub(crate) established: bool,
    /// Published ports.
    pub(crate) ports: Vec<PortView>,
    /// The program's pid inside; 0 when it is not known.
    pub(crate) program: u32,
    /// Its last sleep.
    pub(crate) last_sleep: Option<SleepView>,
    /// Its last wake.
    pub(crate) last_wake: Option<WakeView>,
    /// What stood in the way of the last sleep.
    pub(crate) cannot_sleep: Vec<String>,
    /// Wakes in a row that served nothing but ticks: they are made rarer and rarer.
    pub(crate) tick_wakes: u32,
    /// Wakes since it was last started.
    #[serde(default)]
    pub(crate) wakes: u64,
    /// The data directory that has taken it over from the store.
    #[serde(default)]
    pub(crate) taken_over_by: Option<String>,
}

impl Record {
    /// Of a proc that is about to start for the first time.
    pub(crate) fn new(slot: u16, base: PathBuf) -> Record {
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
            tick_wakes: 0,
            wakes: 0,
            taken_over_by: None,
        }
    }

    /// The record after `input`.
    pub(crate) fn after(&self, input: Input) -> Result<Record, Unfit> {
        Ok(Record { state: step(&self.state, input)?, ..self.clone() })
    }

    /// The newest complete generation.
    pub(crate) fn generation(&self) -> Generation {
        self.state.generation()
    }
}
