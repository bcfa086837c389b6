//! Messages about generations in the store and on the local disk: `kip snapshot`.

use super::{SECTIONS, TIMERS};
use crate::lifecycle::Generation;
use crate::name::{ID, ProcName};
use crate::spec::PortSpec;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Which generations are meant: `NAME` or `NAME@GENERATION`. NAME is a proc's name, or its id in
/// the store or as many of the id's first digits as no other has, 8 at least.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[schemars(extend("pattern" = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(@[0-9]+)?$"))]
pub struct SnapshotName {
    /// Name or id.
    pub proc: String,
    /// None is the newest.
    pub generation: Option<Generation>,
}

/// That names no generation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no snapshot {0:?}: write NAME or NAME@GENERATION, as `kip snapshot ls` shows them")]
pub struct BadSnapshotName(String);

impl FromStr for SnapshotName {
    type Err = BadSnapshotName;

    fn from_str(text: &str) -> Result<Self, BadSnapshotName> {
        let bad = || BadSnapshotName(text.to_owned());
        let (proc, generation) = match text.split_once('@') {
            Some((proc, number)) => (proc, Some(Generation(number.parse().map_err(|_| bad())?))),
            None => (text, None),
        };
        // The alphabet of names has that of ids in it.
        proc.parse::<ProcName>().map_err(|_| bad())?;
        Ok(SnapshotName { proc: proc.to_owned(), generation })
    }
}

impl TryFrom<String> for SnapshotName {
    type Error = BadSnapshotName;

    fn try_from(text: String) -> Result<Self, BadSnapshotName> {
        text.parse()
    }
}

impl From<SnapshotName> for String {
    fn from(name: SnapshotName) -> String {
        name.to_string()
    }
}

impl fmt::Display for SnapshotName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.generation {
            Some(generation) => write!(f, "{}@{generation}", self.proc),
            None => f.write_str(&self.proc),
        }
    }
}

/// Owner of a proc in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SnapshotState {
    /// This data directory's, which may be running it.
    OwnedHere,
    /// Another data directory's.
    OwnedElsewhere,
    /// It runs nowhere: free to adopt.
    Archived,
    /// Removed: what is left of it is for collection.
    Removed,
    /// Not in the store: on the local disk only.
    Local,
    /// Its head cannot be read, so nothing is known of it.
    Unreadable,
}

impl fmt::Display for SnapshotState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SnapshotState::OwnedHere => "owned here",
            SnapshotState::OwnedElsewhere => "owned elsewhere",
            SnapshotState::Archived => "archived, free to adopt",
            SnapshotState::Removed => "removed",
            SnapshotState::Local => "local",
            SnapshotState::Unreadable => "unreadable",
        })
    }
}

/// What a generation is to its proc.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SnapshotPlace {
    /// The newest in the store: what the proc wakes from.
    Current,
    /// An older one that is kept in the store.
    Kept,
    /// In the store, and nothing leads to it: for collection.
    Unused,
    /// On the local disk.
    Local,
}

impl fmt::Display for SnapshotPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SnapshotPlace::Current => "current",
            SnapshotPlace::Kept => "kept",
            SnapshotPlace::Unused => "unused",
            SnapshotPlace::Local => "local",
        })
    }
}

/// `GET /v1/snapshots`, as its query; answered with a list of `SnapshotsView`.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SnapshotsRequest {
    /// Those of this name only.
    pub name: Option<ProcName>,
}

/// A proc and its generations, one of `GET /v1/snapshots`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct SnapshotsView {
    /// Its name; null where its head cannot be read.
    pub name: Option<ProcName>,
    /// Its id in the store, 32 hexadecimal digits; null if it never was there.
    #[schemars(extend("pattern" = ID))]
    pub proc: Option<String>,
    /// Owner of the proc.
    pub state: SnapshotState,
    /// The data directory that owns it or did last, 32 hexadecimal digits.
    #[schemars(extend("pattern" = ID))]
    pub owner: Option<String>,
    /// Newest first; those on the local disk behind those in the store.
    pub generations: Vec<SnapshotView>,
    /// Distinct packs that its generations in the store lead to; other procs may share them.
    pub packs: u64,
    /// Their bytes.
    pub pack_bytes: u64,
    /// Why its head cannot be read.
    pub trouble: Option<String>,
}

/// A generation.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct SnapshotView {
    /// Its number.
    pub generation: Generation,
    /// What it is to its proc.
    pub place: SnapshotPlace,
    /// When it was frozen, milliseconds since the epoch; null where that cannot be read.
    pub frozen_at_ms: Option<u64>,
    /// Bytes of its front, or of all its files on the local disk.
    pub bytes: Option<u64>,
    /// Format version; null where it cannot be read.
    pub format: Option<u32>,
    /// Why it cannot be read.
    pub trouble: Option<String>,
}

/// One generation in the store, `GET /v1/snapshots/NAME`.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct SnapshotDetails {
    /// The proc's name.
    pub name: ProcName,
    /// Its id, 32 hexadecimal digits.
    #[schemars(extend("pattern" = ID))]
    pub proc: String,
    /// Owner of the proc.
    pub state: SnapshotState,
    /// Its number.
    pub generation: Generation,
    /// What it is to its proc.
    pub place: SnapshotPlace,
    /// The one that it replaced in the store.
    pub parent: Option<Generation>,
    /// When it was frozen, milliseconds since the epoch.
    pub frozen_at_ms: u64,
    /// Program and arguments; empty where the spec is not understood.
    pub command: Vec<String>,
    /// Ports that it publishes.
    pub ports: Vec<PortSpec>,
    /// The engine that must read it.
    pub engine: String,
    /// `uname -r` of the machine that made it.
    pub kernel: String,
    /// What that machine's processor can do, as /proc/cpuinfo spells it.
    pub cpu_features: Vec<String>,
    /// Format version of the front.
    pub format: u32,
    /// The realm's key that sealed the front, 32 hexadecimal digits.
    #[schemars(extend("pattern" = ID))]
    pub key: String,
    /// Bytes of the front.
    pub bytes: u64,
    /// Of which these are in each section, in their order.
    pub sections: Vec<SectionView>,
    /// Pages of 4096 bytes, by where they are.
    pub pages: PagesView,
    /// Pages of its working sets, each as often as it is in one.
    pub set_pages: u64,
    /// The packs that it leads to.
    pub packs: Vec<PackView>,
    /// Metadata files, in their order.
    pub metadata: Vec<FileView>,
    /// The proc's own files by root.
    pub roots: Vec<RootView>,
    /// Sockets that are held for it or have to be made where it is adopted; null where that is not
    /// understood.
    pub sockets: Option<u64>,
    /// Its timers.
    pub timers: Vec<SnapshotTimer>,
    /// The volumes without which it does not wake, and where they are, a line for each; then no
    /// other data directory can take it over.
    #[serde(default)]
    pub pinned_by: Vec<String>,
}

/// A section of a front.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct SectionView {
    /// Which: `manifest`, `sets`, `page table`, `files`, `metadata`, `eager pages`, `set pages` or
    /// `end`.
    #[schemars(extend("enum" = SECTIONS))]
    pub name: String,
    /// Sealed bytes.
    pub bytes: u64,
}

/// Where pages are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct PagesView {
    /// In the front.
    pub front: u64,
    /// In packs.
    pub packs: u64,
    /// Zeros, stored nowhere.
    pub zeros: u64,
}

/// A pack.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct PackView {
    /// Its name, 64 hexadecimal digits.
    pub pack: String,
    /// The realm's key that sealed it, 32 hexadecimal digits.
    #[schemars(extend("pattern" = ID))]
    pub key: String,
    /// Blocks of it that the generation leads to.
    pub blocks: u64,
    /// Their sealed bytes.
    pub bytes: u64,
}

/// A file.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct FileView {
    /// Its name.
    pub name: String,
    /// Its bytes.
    pub bytes: u64,
}

/// A tree of the proc's own files.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct RootView {
    /// Its name.
    pub name: String,
    /// Entries of all kinds.
    pub entries: u64,
    /// Bytes of all files.
    pub bytes: u64,
    /// Names whose files its processes had mapped or open: their contents come first.
    #[serde(default)]
    pub first: u64,
}

/// A timer of a generation.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct SnapshotTimer {
    /// `timerfd`, `POSIX timer`, `interval timer`, `time-out of a call` or `it was at work`.
    #[schemars(extend("enum" = TIMERS))]
    pub kind: String,
    /// How long after the freeze it is due, milliseconds.
    pub due_ms: u64,
    /// Its period, milliseconds; null for one that fires once.
    pub every_ms: Option<u64>,
}

/// `POST /v1/verify`; answered with one `Verified` per line.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VerifyRequest {
    /// Which; none for every proc's.
    #[serde(default)]
    pub which: Option<SnapshotName>,
    /// All generations that are kept, not only the newest.
    #[serde(default)]
    pub all: bool,
}

/// What verifying has found so far.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Verified {
    /// So much was read.
    Progress {
        /// Objects that were looked at.
        done: u64,
        /// Objects that are known of; grows while fronts are read.
        of: u64,
        /// Bytes that were read.
        bytes: u64,
    },
    /// Something is not what was sealed, or not there.
    Damage {
        /// The object's name in the store, or a path on the local disk.
        object: String,
        /// What is wrong with it.
        what: String,
        /// The generation that leads to it, as `NAME@GENERATION`; the first, if several do; empty
        /// of a head.
        snapshot: String,
    },
    /// The last: all was looked at.
    End {
        /// Generations.
        generations: u64,
        /// Objects.
        objects: u64,
        /// Bytes that were read.
        bytes: u64,
        /// How many lines of damage there were.
        damaged: u64,
    },
}

/// `POST /v1/snapshots/NAME/export`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExportRequest {
    /// Absolute path of the file, which is made.
    pub file: String,
}

/// `POST /v1/import`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImportRequest {
    /// Absolute path of the file.
    pub file: String,
    /// What the proc is called from now on; none for the name that it had.
    #[serde(default)]
    pub name: Option<ProcName>,
}

/// What an export wrote or an import brought in.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct CarriedView {
    /// The proc's name.
    pub name: ProcName,
    /// Its id, 32 hexadecimal digits.
    #[schemars(extend("pattern" = ID))]
    pub proc: String,
    /// The generation.
    pub generation: Generation,
    /// Packs that it leads to.
    pub packs: u64,
    /// Bytes of the objects: those in the file, or those that were stored, for packs that were
    /// there already are not.
    pub bytes: u64,
    /// The file.
    pub file: String,
}

/// `POST /v1/collect`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CollectRequest {
    /// Change nothing.
    pub dry_run: bool,
    /// How long an object must have been known to be unused, milliseconds.
    pub grace_ms: u64,
}

impl Default for CollectRequest {
    fn default() -> Self {
        CollectRequest { dry_run: false, grace_ms: 24 * 3600 * 1000 }
    }
}

/// What collection found and did.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct CollectView {
    /// Nothing was changed.
    pub dry_run: bool,
    /// Packs and fronts that are in use.
    pub used: u64,
    /// Those that nothing leads to and that are kept for now.
    pub waiting: Vec<UnusedView>,
    /// Those that were deleted; with `dry_run` those that would be.
    pub deleted: Vec<UnusedView>,
}

/// An object that nothing leads to.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct UnusedView {
    /// Its name in the store.
    pub object: String,
    /// Its bytes.
    pub bytes: u64,
    /// When it may be deleted, milliseconds since the epoch; null where that is not known yet.
    pub due_at_ms: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_are_named_by_proc_and_generation() {
        let web: SnapshotName = "web@7".parse().unwrap();
        assert_eq!((web.proc.as_str(), web.generation), ("web", Some(Generation(7))));
        assert_eq!(web.to_string(), "web@7");
        let newest: SnapshotName = "0a1b2c3d".parse().unwrap();
        assert_eq!((newest.generation, newest.to_string().as_str()), (None, "0a1b2c3d"));
        let json = serde_json::to_string(&VerifyRequest { which: Some(web), all: false }).unwrap();
        assert_eq!(json, r#"{"which":"web@7","all":false}"#);
        for bad in ["", "@7", "web@", "web@x", "web@-1", "web@7@8", "../x", "Web", "web@18446744073709551616"] {
            let told = bad.parse::<SnapshotName>().unwrap_err().to_string();
            assert!(told.contains("NAME@GENERATION"), "{told}");
        }
    }
}
