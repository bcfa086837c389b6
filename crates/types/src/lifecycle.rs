//! The lifecycle of a proc: one enum, one pure function.
//!
//! ```text
//!            start            exec'd
//! Stopped ----------> Starting ------> Hot <-----------+
//!    ^                    |             | sleep        | woken
//!    |   failed, exited   |             v              |
//!    +<-------------------+          Parking           |      Hot --hibernated--> Hibernated --woken--> Hot
//!    |                                  |              |                             +--sleep--> Parking
//!    ^                                  | recorded     |
//!    | exited                           v      event   |
//!    +------------- Stopping <------ Parked ------> Waking
//!                      ^            |     ^         where its spec asks for it: exited --> Restarting --start--> Starting
//!                      |  archived  v     | fetched
//!                      +---------- Archived ---taken over---> Elsewhere
//! ```
//!
//! Parking that is refused returns to Hot, waking that fails returns to Parked with the same
//! generation. A crash in Starting is undone (nothing had been promised), in Parking it is Parked
//! if that generation was recorded and Hot or Stopped otherwise, in Waking it is Hot if the
//! processes are there and Parked otherwise, in Stopping it is finished.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Number of a durable image of a proc. Each replaces its parent. 0 is before the first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Generation(pub u64);

impl Generation {
    /// The one that replaces this one.
    pub fn next(self) -> Generation {
        Generation(self.0 + 1)
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Tier of a proc: where its memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// Running.
    Hot,
    /// Stopped in place: its processes are there, their memory is in a private swap file.
    Hibernated,
    /// Checkpoint on local disk, no process, sockets held.
    Parked,
    /// Checkpoint in the object store; on the machine that owns it the sockets stay held.
    Archived,
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Tier::Hot => "hot",
            Tier::Hibernated => "hibernated",
            Tier::Parked => "parked",
            Tier::Archived => "archived",
        })
    }
}

/// How the program ended, as waitpid(2) tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Exit {
    /// Called exit with this code.
    Code(i32),
    /// Died of this signal.
    Signal(i32),
    /// It is gone and its exit status is unknown (its init was killed from outside).
    Unknown,
}

impl Exit {
    /// As shells tell it: the code, or 128 and the number of the signal; 1 where it is not known.
    pub fn shell_code(self) -> i32 {
        match self {
            Exit::Code(code) => code,
            Exit::Signal(signal) => 128 + signal,
            Exit::Unknown => 1,
        }
    }

    /// [`Exit::shell_code`]; none where the exit status is unknown.
    pub fn known_code(self) -> Option<i32> {
        Some(self).filter(|exit| *exit != Exit::Unknown).map(Exit::shell_code)
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Exit::Code(c) => write!(f, "exit code {c}"),
            Exit::Signal(s) => write!(f, "signal {s}"),
            Exit::Unknown => f.write_str("unknown"),
        }
    }
}

/// The state of a proc. What is in a variant is all that a restarted daemon needs to finish or undo
/// it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "lowercase")]
pub enum State {
    /// The sandbox is being built.
    Starting,
    /// Running. `init` is the host pid of the sandbox's pid 1, `init_started` its start time in
    /// clock ticks since boot (proc(5), stat field 22), which together name a process beyond doubt.
    Hot {
        /// Host pid of the sandbox's pid 1.
        init: u32,
        /// Its start time, clock ticks since boot.
        init_started: u64,
        /// The newest generation, from which this run was woken or 0.
        generation: Generation,
    },
    /// As Hot, but its memory is paged out and has not been touched since.
    Hibernated {
        /// As in Hot.
        init: u32,
        /// As in Hot.
        init_started: u64,
        /// As in Hot.
        generation: Generation,
    },
    /// A snapshot is being taken; the processes are there until it is recorded.
    Parking {
        /// As in Hot.
        init: u32,
        /// As in Hot.
        init_started: u64,
        /// The generation being made.
        generation: Generation,
    },
    /// No process; sockets held; the generation is complete, read back and recorded.
    Parked {
        /// The generation to wake from.
        generation: Generation,
    },
    /// No process; the generation is in the store, read back, and its head says so. Locally it may
    /// be gone.
    Archived {
        /// The generation to wake from.
        generation: Generation,
    },
    /// It is not here any more: another data directory has taken it over from the store. What is
    /// left of it here is removed, or nothing.
    Elsewhere {
        /// What it would have woken from here.
        generation: Generation,
    },
    /// Being restored from the generation.
    Waking {
        /// The generation being restored.
        generation: Generation,
    },
    /// Being ended.
    Stopping,
    /// Its program ended and is to be started again; it keeps its ports and its address.
    Restarting {
        /// How the program ended.
        exit: Option<Exit>,
        /// When it is started, milliseconds since the epoch.
        at_ms: u64,
    },
    /// Ended; name, files and logs kept.
    Stopped {
        /// How the program ended.
        exit: Option<Exit>,
    },
}

/// A state without its data: what the API and `kip ps` show.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    JsonSchema,
    Serialize,
    Deserialize,
    strum::Display,
    strum::IntoStaticStr,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum StateName {
    /// The sandbox is being built, or the proc is not ready yet.
    Starting,
    /// Its processes run.
    Running,
    /// Its memory is paged out, its processes are there.
    Hibernated,
    /// A snapshot is being taken.
    Parking,
    /// It is a snapshot on the local disk.
    Parked,
    /// It is a snapshot in the store.
    Archived,
    /// Another data directory has taken it over.
    Elsewhere,
    /// Its snapshot is being restored.
    Waking,
    /// Its processes are being ended.
    Stopping,
    /// It has ended and is about to be started again.
    Restarting,
    /// It has no process and no snapshot.
    Stopped,
    /// A state of a newer Kip.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

impl State {
    /// Which state it is.
    pub fn name(&self) -> StateName {
        match self {
            State::Starting => StateName::Starting,
            State::Hot { .. } => StateName::Running,
            State::Hibernated { .. } => StateName::Hibernated,
            State::Parking { .. } => StateName::Parking,
            State::Parked { .. } => StateName::Parked,
            State::Archived { .. } => StateName::Archived,
            State::Elsewhere { .. } => StateName::Elsewhere,
            State::Waking { .. } => StateName::Waking,
            State::Stopping => StateName::Stopping,
            State::Restarting { .. } => StateName::Restarting,
            State::Stopped { .. } => StateName::Stopped,
        }
    }

    /// The tier the memory is in; none for a proc that has none.
    pub fn tier(&self) -> Option<Tier> {
        match self {
            State::Hot { .. } | State::Parking { .. } => Some(Tier::Hot),
            State::Hibernated { .. } => Some(Tier::Hibernated),
            State::Parked { .. } | State::Waking { .. } => Some(Tier::Parked),
            State::Archived { .. } => Some(Tier::Archived),
            State::Starting
            | State::Stopping
            | State::Restarting { .. }
            | State::Stopped { .. }
            | State::Elsewhere { .. } => None,
        }
    }

    /// The newest complete generation, 0 if there is none.
    pub fn generation(&self) -> Generation {
        match self {
            State::Hot { generation, .. }
            | State::Hibernated { generation, .. }
            | State::Parked { generation }
            | State::Archived { generation }
            | State::Elsewhere { generation }
            | State::Waking { generation } => *generation,
            State::Parking { generation, .. } => Generation(generation.0.saturating_sub(1)),
            State::Starting | State::Stopping | State::Restarting { .. } | State::Stopped { .. } => Generation(0),
        }
    }
}

/// What happened to a proc.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// Start it (again).
    Start,
    /// The program has been exec'd.
    Execed {
        /// Host pid of pid 1.
        init: u32,
        /// Its start time.
        init_started: u64,
    },
    /// Its memory has been taken out.
    Hibernated,
    /// Park it.
    Park,
    /// The snapshot is complete, read back and recorded.
    Recorded,
    /// Parking was refused; the processes run on.
    ParkRefused,
    /// The generation is in the store.
    Archived,
    /// The generation is on the local disk again, complete and read back.
    Fetched,
    /// An older generation has taken the place of a damaged one, as the one after that.
    FellBack {
        /// Its number now.
        generation: Generation,
    },
    /// Another data directory has it.
    TakenOver,
    /// A wake event.
    Wake,
    /// The processes are back.
    Woken {
        /// Host pid of pid 1.
        init: u32,
        /// Its start time.
        init_started: u64,
    },
    /// The restore failed; nothing was lost.
    WakeFailed,
    /// End it.
    Stop,
    /// The program is gone.
    Exited(Option<Exit>),
    /// The program is gone, and is to be started again.
    ExitedForNow {
        /// How it ended.
        exit: Option<Exit>,
        /// When, milliseconds since the epoch.
        at_ms: u64,
    },
}

/// An input that does not fit the state.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("it is {state}")]
pub struct Unfit {
    /// The state that it is in.
    pub state: StateName,
}

/// The next state. Pure: no clock, no I/O. The caller records the result before acting on it.
pub fn step(state: &State, input: Input) -> Result<State, Unfit> {
    use Input as I;
    use State as S;
    Ok(match (state, input) {
        (S::Stopped { .. } | S::Restarting { .. }, I::Start) => S::Starting,
        (S::Starting, I::Execed { init, init_started }) => S::Hot { init, init_started, generation: Generation(0) },
        (S::Hot { init, init_started, generation }, I::Hibernated) => {
            S::Hibernated { init: *init, init_started: *init_started, generation: *generation }
        }
        (S::Hibernated { generation, .. }, I::Woken { init, init_started }) => {
            S::Hot { init, init_started, generation: *generation }
        }
        (S::Hot { init, init_started, generation } | S::Hibernated { init, init_started, generation }, I::Park) => {
            S::Parking { init: *init, init_started: *init_started, generation: generation.next() }
        }
        (S::Parking { generation, .. }, I::Recorded) => S::Parked { generation: *generation },
        (S::Parking { init, init_started, generation }, I::ParkRefused) => {
            S::Hot { init: *init, init_started: *init_started, generation: Generation(generation.0.saturating_sub(1)) }
        }
        (S::Parked { generation }, I::Archived) => S::Archived { generation: *generation },
        (S::Archived { generation }, I::Fetched) => S::Parked { generation: *generation },
        (S::Stopped { .. }, I::FellBack { generation }) => S::Parked { generation },
        (S::Archived { generation }, I::TakenOver) => S::Elsewhere { generation: *generation },
        (S::Parked { generation }, I::Wake) => S::Waking { generation: *generation },
        (S::Waking { generation }, I::Woken { init, init_started }) => {
            S::Hot { init, init_started, generation: *generation }
        }
        (S::Waking { generation }, I::WakeFailed) => S::Parked { generation: *generation },
        (
            S::Starting
            | S::Hot { .. }
            | S::Hibernated { .. }
            | S::Parked { .. }
            | S::Archived { .. }
            | S::Restarting { .. }
            | S::Stopping,
            I::Stop,
        ) => S::Stopping,
        (
            S::Starting | S::Hot { .. } | S::Hibernated { .. } | S::Parking { .. } | S::Waking { .. } | S::Stopping,
            I::Exited(exit),
        ) => S::Stopped { exit },
        (
            S::Starting | S::Hot { .. } | S::Hibernated { .. } | S::Parking { .. } | S::Waking { .. } | S::Stopping,
            I::ExitedForNow { exit, at_ms },
        ) => S::Restarting { exit, at_ms },
        (state, _) => return Err(Unfit { state: state.name() }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn codes_are_those_of_a_shell() {
        assert_eq!(Exit::Code(5).known_code(), Some(5));
        assert_eq!(Exit::Signal(9).known_code(), Some(137));
        assert_eq!(Exit::Unknown.known_code(), None);
    }

    fn inputs() -> impl Strategy<Value = Input> {
        prop_oneof![
            Just(Input::Start),
            Just(Input::Execed { init: 7, init_started: 1 }),
            Just(Input::Hibernated),
            Just(Input::Park),
            Just(Input::Recorded),
            Just(Input::ParkRefused),
            Just(Input::Archived),
            Just(Input::Fetched),
            Just(Input::FellBack { generation: Generation(5) }),
            Just(Input::TakenOver),
            Just(Input::Wake),
            Just(Input::Woken { init: 8, init_started: 2 }),
            Just(Input::WakeFailed),
            Just(Input::Stop),
            Just(Input::Exited(Some(Exit::Code(0)))),
            Just(Input::ExitedForNow { exit: Some(Exit::Code(1)), at_ms: 5 }),
        ]
    }

    proptest! {
        // promise invariants: 5 generations only grow; a parked proc has one
        /// Whatever happens, the generation a proc can wake from never goes back while it lives, a
        /// parked proc has one, and only an end (stop, exit) loses it.
        #[test]
        fn generations_only_grow(seq in proptest::collection::vec(inputs(), 0..200)) {
            let mut state = State::Stopped { exit: None };
            let mut newest = Generation(0);
            for input in seq {
                let Ok(next) = step(&state, input.clone()) else { continue };
                match (&state, &next) {
                    (_, State::Stopped { .. } | State::Stopping | State::Starting | State::Restarting { .. }) => {
                        newest = Generation(0);
                    }
                    _ => {
                        prop_assert!(next.generation() >= newest, "{state:?} {input:?} {next:?}");
                        newest = next.generation();
                    }
                }
                if let State::Parked { generation } | State::Archived { generation } = &next {
                    prop_assert!(generation.0 > 0);
                }
                state = next;
            }
        }

        /// From any state a stop or an exit leads to Stopped within four inputs; a proc that lives
        /// elsewhere cannot be stopped here.
        #[test]
        fn always_can_end(seq in proptest::collection::vec(inputs(), 0..50)) {
            let mut state = State::Stopped { exit: None };
            for input in seq {
                if let Ok(next) = step(&state, input) { state = next }
            }
            for input in [Input::ParkRefused, Input::WakeFailed, Input::Stop, Input::Exited(None)] {
                if let Ok(next) = step(&state, input) { state = next }
            }
            let stopped = matches!(state, State::Stopped { .. } | State::Elsewhere { .. });
            prop_assert!(stopped, "{:?}", state);
        }
    }
}
