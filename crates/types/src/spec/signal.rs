//! Signals by their names, as owners write them.

/// Signals by name: signal(7), those of x86_64.
const SIGNALS: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE", "ALRM", "TERM",
    "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO",
    "PWR", "SYS",
];

/// A signal could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("signal {0:?} is not valid: write a name or a number from 1 to 64, for example SIGQUIT or 3")]
pub struct BadSignal(String);

/// Reads `SIGQUIT`, `quit`, `3` or `SIGRTMIN+3`.
pub fn parse_signal(s: &str) -> Result<i32, BadSignal> {
    /// The first that C libraries leave to programs.
    const RTMIN: i32 = 34;
    let bad = || BadSignal(s.to_owned());
    let upper = s.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    if let Some(at) = SIGNALS.iter().position(|known| *known == name) {
        return Ok(at as i32 + 1);
    }
    let number = match name.strip_prefix("RTMIN") {
        Some("") => Some(RTMIN),
        Some(more) => more.strip_prefix('+').and_then(|n| n.parse::<i32>().ok()).map(|n| RTMIN + n),
        None => s.parse().ok(),
    };
    number.filter(|n| (1..=64).contains(n)).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_signals() {
        for (text, number) in [("SIGTERM", 15), ("quit", 3), ("9", 9), ("SIGRTMIN+3", 37), ("WINCH", 28), ("SYS", 31)] {
            assert_eq!(parse_signal(text), Ok(number), "{text}");
        }
        for bad in ["", "SIG", "0", "65", "SIGRTMIN+99", "TERMINATE"] {
            assert!(parse_signal(bad).is_err(), "{bad}");
        }
    }
}
