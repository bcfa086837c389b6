//! What is kept of a spawned proc, and what is shown of it.

use crate::host::ProgramEnd;
use kip_types::ProcName;
use kip_types::api::RunRequest;
use kip_types::api::spawn::{SpawnEnd, SpawnEndKind, SpawnMoment, SpawnedState, SpawnedView};
use kip_types::lifecycle::{Exit, Tier};
use kip_types::spec::ProcClass;
use serde::{Deserialize, Serialize};

/// The program that a proc was spawned by, or for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ParentProgram {
    /// Key of its proc.
    pub(crate) key: ProcName,
    /// The name that the proc had.
    pub(crate) name: ProcName,
    /// When the program was started, milliseconds since the epoch.
    pub(crate) started_at_ms: u64,
    /// Key of the proc whose right to spawn this was: the parent's, or of one above it.
    pub(crate) root: ProcName,
}

/// What the program has said before it ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SaidExit {
    pub(crate) status: i32,
    pub(crate) message: Option<String>,
}

/// That it is to end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Eviction {
    pub(crate) reason: String,
    pub(crate) grace_ms: u64,
}

/// What is reserved for it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Reserved {
    pub(crate) cpus: f64,
    pub(crate) memory_bytes: u64,
}

/// How far it is, as the next daemon has to know it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "stage", rename_all = "lowercase")]
pub(crate) enum Stage {
    /// Nothing was done for it yet.
    Queued { run: Box<RunRequest> },
    /// Its program may have been executed.
    Begun { run: Box<RunRequest> },
    /// It has ended. Its proc may be there still.
    Ended { end: SpawnEnd },
}

/// A spawned proc, by its name when it was made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct SpawnEntry {
    pub(crate) name: ProcName,
    pub(crate) command: Vec<String>,
    pub(crate) class: ProcClass,
    pub(crate) parent: Option<ParentProgram>,
    pub(crate) detached: bool,
    pub(crate) says_started: bool,
    pub(crate) reserved: Reserved,
    pub(crate) spawned_at_ms: u64,
    #[serde(flatten)]
    pub(crate) stage: Stage,
    /// Its program has said that it has started; or was executed, if that is its start.
    pub(crate) started: bool,
    pub(crate) said: Option<SaidExit>,
    /// Its program waits for the word to end, and gets no signal for that.
    #[serde(default)]
    pub(crate) takes_word: bool,
    pub(crate) evicted: Option<Eviction>,
}

/// An entry, and what only this daemon knows of it.
#[derive(Debug, Clone)]
pub(crate) struct EntryNow {
    pub(crate) entry: SpawnEntry,
    /// Its program was executed.
    pub(crate) is_live: bool,
    /// What it waits for in the queue.
    pub(crate) waits_for: Option<String>,
}

impl SpawnEntry {
    pub(crate) fn end(&self) -> Option<&SpawnEnd> {
        if let Stage::Ended { end } = &self.stage { Some(end) } else { None }
    }

    /// The same as one that has ended so. What was to be run is kept no more.
    pub(crate) fn ended(&self, end: SpawnEnd) -> SpawnEntry {
        SpawnEntry { stage: Stage::Ended { end }, ..self.clone() }
    }

    /// The end of one whose program has ended so; none: its proc was removed.
    pub(crate) fn end_by(&self, end: Option<ProgramEnd>, at_ms: u64) -> SpawnEnd {
        let said = self.said.as_ref();
        let (exit, words) = end.map_or((None, None), |end| (end.exit, end.words));
        let (exit_code, signal) = match exit {
            Some(Exit::Code(code)) => (Some(code), None),
            Some(Exit::Signal(signal)) => (None, Some(signal)),
            Some(Exit::Unknown) | None => (None, None),
        };
        let (why, more) = match (&self.evicted, exit) {
            (Some(eviction), _) => (SpawnEndKind::Evicted, Some(eviction.reason.clone())),
            (None, Some(Exit::Code(_))) => (SpawnEndKind::Exited, words),
            (None, Some(Exit::Signal(_))) => (SpawnEndKind::Killed, words),
            (None, Some(Exit::Unknown)) => {
                let why =
                    "its exit status is lost: the machine was restarted, or its processes were ended from outside";
                (SpawnEndKind::Lost, Some(why.to_owned()))
            }
            (None, None) => (SpawnEndKind::Evicted, Some("its owner has ended or removed it".to_owned())),
        };
        let message = said.and_then(|said| said.message.clone()).or(more);
        SpawnEnd { why, exit_code, signal, status: said.map(|said| said.status), message, at_ms }
    }

    /// The end of one that has no exit.
    pub(crate) fn end_without(&self, why: SpawnEndKind, message: String, at_ms: u64) -> SpawnEnd {
        let status = self.said.as_ref().map(|said| said.status);
        SpawnEnd { why, exit_code: None, signal: None, status, message: Some(message), at_ms }
    }
}

impl EntryNow {
    pub(crate) fn new(entry: SpawnEntry) -> EntryNow {
        EntryNow { entry, is_live: false, waits_for: None }
    }

    fn has_started(&self) -> bool {
        self.entry.started || self.is_live && !self.entry.says_started
    }

    /// Whether that moment has come, or can come no more.
    pub(crate) fn has_come(&self, moment: SpawnMoment) -> bool {
        let entry = &self.entry;
        entry.end().is_some()
            || match moment {
                SpawnMoment::Start => self.has_started(),
                SpawnMoment::Exit => false,
                SpawnMoment::Evict => entry.evicted.is_some(),
            }
    }

    /// What clients see of it.
    pub(crate) fn view(&self, tier: Option<Tier>) -> SpawnedView {
        let entry = &self.entry;
        let state = match &entry.stage {
            Stage::Queued { .. } => SpawnedState::Queued,
            Stage::Begun { .. } if self.is_live => SpawnedState::Live,
            Stage::Begun { .. } => SpawnedState::Starting,
            Stage::Ended { .. } => SpawnedState::Ended,
        };
        SpawnedView {
            name: entry.name.clone(),
            command: entry.command.clone(),
            parent: entry.parent.as_ref().map(|parent| parent.name.clone()),
            detached: entry.detached,
            class: entry.class,
            state,
            tier: tier.filter(|_| state == SpawnedState::Live),
            waits_for: self.waits_for.clone().filter(|_| state == SpawnedState::Queued),
            started: self.has_started(),
            evicted: entry.evicted.as_ref().map(|eviction| eviction.reason.clone()),
            spawned_at_ms: entry.spawned_at_ms,
            end: entry.end().cloned(),
        }
    }
}
