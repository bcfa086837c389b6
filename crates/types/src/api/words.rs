//! Closed sets of words that travel as texts, as the schemas of the API have them. No code branches
//! on them.

/// Kinds of [`super::Event`], by the alphabet.
pub const EVENTS: &[&str] = &[
    "adopted",
    "archived",
    "backup",
    "cold-start",
    "collected",
    "elsewhere",
    "exited",
    "fell-back",
    "healthy",
    "hibernated",
    "hook-failed",
    "image",
    "imported",
    "keeper",
    "key",
    "not-ready",
    "pager",
    "parked",
    "parking",
    "pressure",
    "ready",
    "refetch",
    "refused",
    "removed",
    "renewed",
    "restarting",
    "rules",
    "started",
    "stopped",
    "taken-over",
    "ticks-late",
    "unhealthy",
    "waiting",
    "waking",
    "woken",
    "would-sleep",
    "would-wake",
];

/// What wakes are counted by, [`super::WakesView`].
pub const TRIGGERS: &[&str] = &["tcp", "udp", "timer", "touch", "wake", "exec", "stop", "other"];

/// What a timer is that will wake a sleeper, [`super::NextWakeView`].
pub const TIMERS: &[&str] = &["timerfd", "POSIX timer", "interval timer", "time-out of a call", "it was at work"];

/// States of a socket, [`super::SocketView`].
pub const SOCKET_STATES: &[&str] = &["established", "close-wait", "fin-wait", "syn-sent", "listen", "closing", "flow"];

/// Kinds of [`super::OpenSocketView`].
pub const OPEN_PROTOCOLS: &[&str] = &["tcp", "udp", "unix", "netlink", "socket"];

/// Kinds of [`super::OwnFileView`].
pub const OWN_FILES: &[&str] = &["file", "link", "device", "fifo", "socket", "deleted", "replaced"];

/// Parts of a sealed front, [`super::SectionView`].
pub const SECTIONS: &[&str] =
    &["manifest", "sets", "page table", "files", "metadata", "eager pages", "set pages", "end"];

/// Steps of a trial, [`super::CheckStep`].
pub const CHECK_STEPS: &[&str] = &["start", "sleep", "wake"];
