//! One check of the machine, and what all checks read alike.

use serde::Serialize;

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckStatus {
    /// As it should be.
    Ok,
    /// Procs run, but something is slower, weaker or missing.
    Warn,
    /// Procs cannot run or cannot sleep.
    Fail,
}

/// One check, done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DoctorCheck {
    /// What was looked at.
    pub name: &'static str,
    /// How it came out.
    pub status: CheckStatus,
    /// What is there, one line.
    pub found: String,
    /// What the lack costs; none if nothing lacks.
    pub cost: Option<String>,
    /// How to mend it; none if nothing lacks.
    pub mend: Option<String>,
}

impl DoctorCheck {
    pub(crate) fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, status: CheckStatus::Ok, found: found.into(), cost: None, mend: None }
    }

    pub(crate) fn warn(
        name: &'static str,
        found: impl Into<String>,
        cost: impl Into<String>,
        mend: impl Into<String>,
    ) -> Self {
        Self { name, status: CheckStatus::Warn, found: found.into(), cost: Some(cost.into()), mend: Some(mend.into()) }
    }

    pub(crate) fn fail(
        name: &'static str,
        found: impl Into<String>,
        cost: impl Into<String>,
        mend: impl Into<String>,
    ) -> Self {
        Self { status: CheckStatus::Fail, ..Self::warn(name, found, cost, mend) }
    }
}

/// The trimmed text of a file under /proc or /sys; none if it cannot be read.
pub(crate) fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The number in such a file.
pub(crate) fn read_number(path: &str) -> Option<u64> {
    read(path)?.parse().ok()
}

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}
