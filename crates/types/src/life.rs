//! How a program lives: what becomes of it when it ends. Pure; the worker starts programs again.

use crate::lifecycle::Exit;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Before the first start again, milliseconds; twice as long each time.
pub const FIRST_PAUSE_MS: u64 = 100;
/// However often it ended.
pub const LONGEST_PAUSE_MS: u64 = 30_000;
/// A program that ran this long ran well: what ended before it does not count any more,
/// milliseconds.
pub const RAN_WELL_MS: u64 = 10_000;

/// Whether a program that ended by itself is started again: `no`, `on-failure[:MAX]` or `always`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String", extend("pattern" = r"^(no|always|on-failure(:\+?0*[1-9][0-9]*)?)$"))]
pub enum Restart {
    /// It stays stopped.
    #[default]
    No,
    /// If it ended by a signal or with a code other than 0; at most so often in a row, if that is
    /// given.
    OnFailure(Option<u32>),
    /// However it ended.
    Always,
}

/// A restart policy could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("restart policy {0:?} is not valid: write no, on-failure, on-failure:MAX (MAX from 1) or always")]
pub struct BadRestart(String);

impl FromStr for Restart {
    type Err = BadRestart;
    fn from_str(s: &str) -> Result<Self, BadRestart> {
        let bad = || BadRestart(s.to_owned());
        match s.split_once(':') {
            None if s == "no" => Ok(Restart::No),
            None if s == "always" => Ok(Restart::Always),
            None if s == "on-failure" => Ok(Restart::OnFailure(None)),
            Some(("on-failure", max)) => {
                let max = max.parse::<u32>().ok().filter(|max| *max > 0).ok_or_else(bad)?;
                Ok(Restart::OnFailure(Some(max)))
            }
            _ => Err(bad()),
        }
    }
}

impl TryFrom<String> for Restart {
    type Error = BadRestart;
    fn try_from(text: String) -> Result<Self, BadRestart> {
        text.parse()
    }
}

impl From<Restart> for String {
    fn from(restart: Restart) -> String {
        restart.to_string()
    }
}

impl fmt::Display for Restart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Restart::No => f.write_str("no"),
            Restart::OnFailure(None) => f.write_str("on-failure"),
            Restart::OnFailure(Some(max)) => write!(f, "on-failure:{max}"),
            Restart::Always => f.write_str("always"),
        }
    }
}

impl Restart {
    /// It is the default, which records and listings leave out.
    pub fn is_no(&self) -> bool {
        *self == Restart::No
    }

    /// How long to wait before a program that ended is started again, milliseconds; none if it is
    /// not to be. `in_a_row` counts the starts again since it last ran well.
    pub fn pause_ms(&self, exit: Exit, in_a_row: u32) -> Option<u64> {
        let again = match self {
            Restart::No => false,
            Restart::OnFailure(max) => exit != Exit::Code(0) && max.is_none_or(|max| in_a_row < max),
            Restart::Always => true,
        };
        let doubled = FIRST_PAUSE_MS.saturating_mul(1u64.checked_shl(in_a_row).unwrap_or(u64::MAX));
        again.then_some(doubled.min(LONGEST_PAUSE_MS))
    }
}

/// A hook may take so long where its owner does not say, milliseconds.
pub const HOOK_WITHIN_MS: u64 = 10_000;

/// What is done inside when the proc falls asleep, has woken, is copied and is a copy: commands for
/// the shell, or `http:PORT/PATH`, a GET that the program answers with a status from 200 to 399.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default)]
pub struct Hooks {
    /// Before the program is frozen, for whatever reason it is put to sleep. One that fails, or
    /// takes too long, refuses the sleep.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before_sleep: Option<String>,
    /// When the program runs again, beside it. One that fails is an event and no more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after_wake: Option<String>,
    /// Before a clone, a checkpoint or a template is taken of the proc while it is awake. One that
    /// fails, or takes too long, refuses that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before_checkpoint: Option<String>,
    /// In a clone of the proc, before clients reach it. One that fails, or takes too long, undoes
    /// the clone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after_clone: Option<String>,
    /// How long each may take, milliseconds.
    pub within_ms: u64,
}

impl Default for Hooks {
    fn default() -> Self {
        Hooks {
            before_sleep: None,
            after_wake: None,
            before_checkpoint: None,
            after_clone: None,
            within_ms: HOOK_WITHIN_MS,
        }
    }
}

impl Hooks {
    /// There is none.
    pub fn is_none(&self) -> bool {
        !self.are_of_sleep() && self.before_checkpoint.is_none() && self.after_clone.is_none()
    }

    /// Whether one runs when the proc sleeps or wakes.
    pub fn are_of_sleep(&self) -> bool {
        self.before_sleep.is_some() || self.after_wake.is_some()
    }
}

/// So many checkpoints that Kip takes by itself are kept, where the owner does not say.
pub const KEPT_CHECKPOINTS: u32 = 3;
/// Most that are kept.
pub const MOST_KEPT_CHECKPOINTS: u32 = 100;
/// Least time between two, milliseconds.
pub const LEAST_CHECKPOINT_MS: u64 = 1000;

/// Checkpoints that Kip takes by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeriodicCheckpoints {
    /// From one to the next, milliseconds; at least 1000. Of a proc that has slept all the while
    /// none is taken.
    #[schemars(range(min = 1000))]
    pub every_ms: u64,
    /// The newest of them that are kept, 1 to 100; those with other tags do not count.
    #[schemars(range(min = 1, max = 100))]
    pub keep: u32,
}

impl PeriodicCheckpoints {
    /// What is wrong with it; none if nothing is.
    pub fn fault(&self) -> Option<String> {
        match self {
            one if one.every_ms < LEAST_CHECKPOINT_MS => {
                Some(format!("a checkpoint every {} ms is too many: 1s is the least", one.every_ms))
            }
            one if !(1..=MOST_KEPT_CHECKPOINTS).contains(&one.keep) => {
                Some(format!("{} checkpoints cannot be kept: say 1 to {MOST_KEPT_CHECKPOINTS}", one.keep))
            }
            _ => None,
        }
    }
}

/// Whether a proc has to do with a template.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TemplateWhen {
    /// It begins from one if there is one of its kind, else leaves one.
    Auto,
    /// It always starts.
    #[default]
    Off,
}

impl FromStr for TemplateWhen {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(TemplateWhen::Auto),
            "off" => Ok(TemplateWhen::Off),
            _ => Err("write auto or off".to_owned()),
        }
    }
}

/// The first proc of its kind is kept as a template when it is ready, and each later one that is
/// run goes on from that instead of a start.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Templating {
    /// Command that a shell runs inside before the template is taken, to warm what the program
    /// keeps. One that fails, or takes too long, leaves the proc without a template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
}

/// Within this a proc is to be ready where its owner does not say, milliseconds.
pub const READY_WITHIN_MS: u64 = 60_000;

/// How it is seen that a program does what it is there for.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String", extend("pattern" = r"^(tcp:|http:|exec:)"))]
pub enum Check {
    /// `tcp:PORT`: it takes a connection on that port of its own address.
    Tcp(u16),
    /// `http:PORT/PATH`: it answers a GET there with a status from 200 to 399.
    Http(u16, String),
    /// `exec:COMMAND`: that, run inside by a shell, ends with code 0.
    Exec(String),
}

/// A check could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("check {0:?} is not valid: write tcp:PORT, http:PORT/PATH or exec:COMMAND, ports inside the proc")]
pub struct BadCheck(String);

impl FromStr for Check {
    type Err = BadCheck;
    fn from_str(s: &str) -> Result<Self, BadCheck> {
        let bad = || BadCheck(s.to_owned());
        let port = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0).ok_or_else(bad);
        match s.split_once(':') {
            Some(("tcp", text)) => Ok(Check::Tcp(port(text)?)),
            Some(("http", text)) => {
                let (number, path) = text.split_at(text.find('/').unwrap_or(text.len()));
                let path = if path.is_empty() { "/" } else { path };
                if path.contains(|c: char| c.is_control() || c.is_whitespace()) {
                    return Err(bad());
                }
                Ok(Check::Http(port(number)?, path.to_owned()))
            }
            Some(("exec", command)) if !command.trim().is_empty() && !command.contains('\0') => {
                Ok(Check::Exec(command.to_owned()))
            }
            _ => Err(bad()),
        }
    }
}

impl TryFrom<String> for Check {
    type Error = BadCheck;
    fn try_from(text: String) -> Result<Self, BadCheck> {
        text.parse()
    }
}

impl From<Check> for String {
    fn from(check: Check) -> String {
        check.to_string()
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Check::Tcp(port) => write!(f, "tcp:{port}"),
            Check::Http(port, path) => write!(f, "http:{port}{path}"),
            Check::Exec(command) => write!(f, "exec:{command}"),
        }
    }
}

/// A port of the host on which Kip itself answers how a proc is, `HOST_PORT=CHECK`. Asking neither
/// wakes the proc nor keeps it awake.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String", extend("pattern" = r"^[0-9]+=(tcp:|http:|exec:)"))]
pub struct Probe {
    /// Where it is asked.
    pub host_port: u16,
    /// What shows that it is well while it is awake.
    pub check: Check,
}

/// A probe could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadProbe {
    /// It is not of that form.
    #[error("probe {0:?} is not valid: write HOST_PORT=CHECK, for example 9000=http:8080/healthz")]
    Form(String),
    /// Its check is none.
    #[error(transparent)]
    Check(#[from] BadCheck),
}

impl FromStr for Probe {
    type Err = BadProbe;
    fn from_str(s: &str) -> Result<Self, BadProbe> {
        let bad = || BadProbe::Form(s.to_owned());
        let (port, check) = s.split_once('=').ok_or_else(bad)?;
        let host_port = port.parse::<u16>().ok().filter(|port| *port > 0).ok_or_else(bad)?;
        Ok(Probe { host_port, check: check.parse()? })
    }
}

impl TryFrom<String> for Probe {
    type Error = BadProbe;
    fn try_from(text: String) -> Result<Self, BadProbe> {
        text.parse()
    }
}

impl From<Probe> for String {
    fn from(probe: Probe) -> String {
        probe.to_string()
    }
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.host_port, self.check)
    }
}

/// When a proc that was started is ready.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ready {
    /// What shows it.
    pub check: Check,
    /// Within this it is to be so, milliseconds.
    #[serde(default = "ready_within_ms")]
    pub within_ms: u64,
}

fn ready_within_ms() -> u64 {
    READY_WITHIN_MS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_policies_and_writes_them_the_same() {
        for text in ["no", "on-failure", "on-failure:3", "always"] {
            assert_eq!(text.parse::<Restart>().unwrap().to_string(), text);
            let json = serde_json::to_string(&text.parse::<Restart>().unwrap()).unwrap();
            assert_eq!(json, format!("{text:?}"));
        }
        for bad in ["", "yes", "on-failure:", "on-failure:0", "on-failure:x", "always:3", "no:1"] {
            assert!(bad.parse::<Restart>().is_err(), "{bad}");
            assert!(serde_json::from_str::<Restart>(&format!("{bad:?}")).is_err(), "{bad}");
        }
    }

    #[test]
    fn reads_checks_and_writes_them_the_same() {
        for text in ["tcp:80", "http:8080/health?x=1", "http:80/", "exec:redis-cli ping: x"] {
            assert_eq!(text.parse::<Check>().unwrap().to_string(), text);
        }
        assert_eq!("http:80".parse(), Ok(Check::Http(80, "/".to_owned())));
        for bad in ["", "80", "tcp:", "tcp:0", "tcp:70000", "http:/x", "http:80/a b", "exec:", "exec: ", "udp:53"] {
            assert!(bad.parse::<Check>().is_err(), "{bad}");
        }
    }

    #[test]
    fn reads_probes_and_writes_them_the_same() {
        for text in ["9000=http:8080/healthz", "1=tcp:80", "9000=exec:test a=b"] {
            assert_eq!(text.parse::<Probe>().unwrap().to_string(), text);
        }
        for bad in ["", "9000", "9000=", "0=tcp:80", "70000=tcp:80", "tcp:80", "9000=udp:53", "9000:tcp:80"] {
            assert!(bad.parse::<Probe>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_pause_doubles_up_to_its_bound() {
        let pauses: Vec<_> = (0..12).map(|n| Restart::Always.pause_ms(Exit::Code(0), n).unwrap()).collect();
        assert_eq!(pauses[..4], [100, 200, 400, 800]);
        assert_eq!(pauses[8..], [25_600, 30_000, 30_000, 30_000]);
        assert_eq!(Restart::Always.pause_ms(Exit::Code(0), u32::MAX), Some(30_000));
    }

    #[test]
    fn who_is_started_again() {
        let three = Restart::OnFailure(Some(3));
        assert_eq!(Restart::No.pause_ms(Exit::Code(1), 0), None);
        assert_eq!(three.pause_ms(Exit::Code(0), 0), None);
        assert_eq!((three.pause_ms(Exit::Signal(9), 2), three.pause_ms(Exit::Signal(9), 3)), (Some(400), None));
        assert_eq!(Restart::OnFailure(None).pause_ms(Exit::Unknown, 9), Some(30_000));
    }
}
