//! Events, as `kip events` and a data directory's file have them.

use crate::name::ProcName;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `GET /v1/events`, as its query; answered with one `Event` per line.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EventsRequest {
    /// Follow new events after those that are kept, which include events of earlier daemons of this
    /// data directory.
    pub follow: bool,
    /// Only events after the one with this id: a client that reconnects gives the last id that it
    /// has seen.
    pub since: Option<u64>,
}

/// One line of `kip events`.
#[derive(Debug, Clone, JsonSchema, Serialize, Deserialize)]
pub struct Event {
    /// Event id, ascending over all daemons of this data directory, and by one from event to event
    /// of the same daemon. 0 from older daemons.
    #[serde(default)]
    pub id: u64,
    /// Time, milliseconds since the epoch.
    pub at_ms: u64,
    /// Proc that the event is about; null for the daemon itself.
    pub name: Option<ProcName>,
    /// Kind of the event.
    pub kind: EventKind,
    /// Description for people, one line.
    pub detail: String,
}

/// The kind of an event.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize, strum::AsRefStr, strum::EnumString)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum EventKind {
    /// The daemon found the proc as an earlier one had left it.
    Adopted,
    /// The proc was archived.
    Archived,
    /// A backup was written.
    Backup,
    /// A checkpoint of the proc was taken.
    Checkpointed,
    /// The proc was made as a clone of another.
    Cloned,
    /// A snapshot could not be used: the proc starts cold on its newest files.
    ColdStart,
    /// Objects of the store that nothing refers to were deleted.
    Collected,
    /// A call of the proc to an address that its rules do not name was refused.
    EgressRefused,
    /// Another data directory has taken the proc over.
    Elsewhere,
    /// The program ended.
    Exited,
    /// A snapshot could not be used: the proc wakes from an older one.
    FellBack,
    /// A probe that was wrong is right again.
    Healthy,
    /// The proc was hibernated.
    Hibernated,
    /// A hook of the proc failed.
    HookFailed,
    /// An image was brought here.
    Image,
    /// A snapshot or a template was imported.
    Imported,
    /// The keeper was replaced.
    Keeper,
    /// A key was made, imported or destroyed.
    Key,
    /// The proc was not ready in time.
    NotReady,
    /// The pager was replaced, or could not be.
    Pager,
    /// The proc was parked.
    Parked,
    /// The proc is being parked.
    Parking,
    /// Memory or disk is short, or a proc was put to sleep or refused because of that.
    Pressure,
    /// The proc is ready; without a name, the daemon is.
    Ready,
    /// A snapshot, or a part of it, is fetched from the store again.
    Refetch,
    /// A step was refused or failed; the proc is as it was.
    Refused,
    /// The proc was removed.
    Removed,
    /// The proc has another name.
    Renamed,
    /// What was held for a sleeper was lost and is made anew: its sockets listen again, and its
    /// connections are lost.
    Renewed,
    /// A proc takes the place of another, which is about to end.
    Replaced,
    /// The program is about to be started again.
    Restarting,
    /// The proc goes on from a checkpoint.
    RolledBack,
    /// The rules of NAT were put back, or could not be; or forwarding was switched on for another
    /// interface.
    Rules,
    /// Replicas of the proc were added or taken away, or could not be.
    Scaled,
    /// The program was started.
    Started,
    /// The proc was stopped.
    Stopped,
    /// The proc was taken over from another data directory.
    TakenOver,
    /// A template was taken from the proc, or was not: why.
    Templated,
    /// Ticks of the proc come late because of its sleep.
    TicksLate,
    /// A probe is wrong.
    Unhealthy,
    /// The spec of the proc was changed.
    Updated,
    /// The proc waits for memory of its that a store does not give yet.
    Waiting,
    /// The proc is being woken.
    Waking,
    /// The proc was woken.
    Woken,
    /// A trial: the proc would fall asleep now.
    WouldSleep,
    /// A trial: the proc would wake now.
    WouldWake,
    /// A word of another Kip, kept as it is.
    #[serde(untagged)]
    #[schemars(skip)]
    #[strum(default, transparent)]
    Unknown(String),
}

#[cfg(test)]
mod tests {
    use super::EventKind;

    #[test]
    fn people_read_the_words_that_travel_and_a_word_of_another_kip_is_kept() {
        for word in ["adopted", "cold-start", "hook-failed", "ready", "would-wake", "of a newer Kip"] {
            let kind: EventKind = serde_json::from_value(word.into()).unwrap();
            assert_eq!((kind.as_ref(), serde_json::to_value(&kind).unwrap()), (word, word.into()));
            assert_eq!(kind, word.parse().unwrap());
            assert_eq!(matches!(kind, EventKind::Unknown(_)), word.contains(' '), "{word}");
        }
    }
}
