//! When and how a proc sleeps, and what its clocks do meanwhile.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// How a proc hibernates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Hibernate {
    /// Held if it ticks or a port wakes on data only, blocked otherwise.
    #[default]
    Auto,
    /// Its threads wait in their system calls; whatever ends one of these wakes it.
    Blocked,
    /// Its threads are stopped; its sockets and timers are watched for it.
    Held,
    /// Not at all: from hot it goes to parked.
    Off,
}

impl FromStr for Hibernate {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(Hibernate::Auto),
            "blocked" => Ok(Hibernate::Blocked),
            "held" => Ok(Hibernate::Held),
            "off" => Ok(Hibernate::Off),
            _ => Err("write auto, blocked, held or off".to_owned()),
        }
    }
}

/// Whether a parked proc runs before its memory is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Lazy {
    /// If there is so much of it that reading it takes longer than to have its pages brought.
    #[default]
    Auto,
    /// Yes.
    On,
    /// No, all of it is read first.
    Off,
}

impl FromStr for Lazy {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(Lazy::Auto),
            "on" => Ok(Lazy::On),
            "off" => Ok(Lazy::Off),
            _ => Err("write auto, on or off".to_owned()),
        }
    }
}

/// What a proc's own clock, CLOCK_MONOTONIC, does while the proc is parked or archived.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Clock {
    /// It goes on, unless a profile of the program says that the program bears a suspended sleep
    /// and no connection is open.
    #[default]
    Auto,
    /// It always goes on.
    Continue,
    /// It stands, as on a machine that is suspended.
    Suspend,
}

impl fmt::Display for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Clock::Auto => "auto",
            Clock::Continue => "continue",
            Clock::Suspend => "suspend",
        })
    }
}

impl FromStr for Clock {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(Clock::Auto),
            "continue" => Ok(Clock::Continue),
            "suspend" => Ok(Clock::Suspend),
            _ => Err("write auto, continue or suspend".to_owned()),
        }
    }
}

/// What a proc falls back to when the newest generation that it slept with is damaged for good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fallback {
    /// A cold start on its newest files.
    #[default]
    Cold,
    /// The newest older generation in the store that is whole, memory and files; a cold start if
    /// there is none.
    Previous,
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Fallback::Cold => "cold",
            Fallback::Previous => "previous",
        })
    }
}

impl FromStr for Fallback {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "cold" => Ok(Fallback::Cold),
            "previous" => Ok(Fallback::Previous),
            _ => Err("write cold or previous".to_owned()),
        }
    }
}

/// When a proc goes to a lower tier; times are milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default)]
pub struct Timing {
    /// Time without activity after which the proc is hibernated.
    pub idle_ms: u64,
    /// Time that the proc stays hibernated before it is parked.
    pub park_after_ms: u64,
    /// Time that the proc stays parked before it is archived, if there is a store.
    pub archive_after_ms: u64,
    /// True: `archive_after_ms` is Kip's default. Then Kip does not archive to a store that is a
    /// local directory, nor while connections are open.
    pub archive_by_default: bool,
    /// Periodic timers and time-outs of blocking calls shorter than this do not count as activity
    /// and do not wake a parked proc.
    pub tick_ms: u64,
    /// How CLOCK_MONOTONIC behaves while the proc is parked or archived.
    pub clock: Clock,
    /// The proc never sleeps automatically; `kip sleep` still works.
    pub never: bool,
    /// The proc never sleeps automatically, but Kip reports when it would have.
    pub dry_run: bool,
    /// How the proc hibernates.
    pub hibernate: Hibernate,
    /// A wake installs the working set; otherwise every page comes when it is touched.
    pub prefetch: bool,
    /// Whether a parked proc runs before all its memory is read.
    pub lazy: Lazy,
    /// Hibernation leaves clean pages of files in memory, where other procs may share them.
    pub keep_files: bool,
    /// What follows if the snapshot is damaged.
    pub fallback: Fallback,
}

impl Timing {
    /// Times to archive after that Kip has chosen itself, now and in versions that did not record
    /// whether the owner had said one.
    const USUAL_ARCHIVE_MS: [u64; 2] = [600_000, 86_400_000];

    /// For a request or an old record that does not say whether the owner chose when to archive:
    /// any time but the usual ones was chosen.
    pub fn resolve_archive_default(&mut self) {
        self.archive_by_default &= Self::USUAL_ARCHIVE_MS.contains(&self.archive_after_ms);
    }

    /// Whether it sleeps only when told to.
    pub fn stays_awake(&self) -> bool {
        self.never || self.dry_run
    }
}

impl Default for Timing {
    fn default() -> Self {
        Timing {
            idle_ms: 10_000,
            park_after_ms: 60_000,
            archive_after_ms: 600_000,
            archive_by_default: true,
            tick_ms: 60_000,
            clock: Clock::Auto,
            never: false,
            dry_run: false,
            hibernate: Hibernate::Auto,
            prefetch: true,
            lazy: Lazy::Auto,
            keep_files: false,
            fallback: Fallback::Cold,
        }
    }
}
