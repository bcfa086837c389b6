//! Numbers, times, tables and lines as people read them. Never prints and never asks a daemon.
//!
//! | module | owns |
//! | --- | --- |
//! | [`format`](mod@format) | templates of fields, `--format` |
//! | [`when`] | moments on a command line |
#![forbid(unsafe_code)]

pub mod format;
pub mod when;

use kip_types::name::{MAX_NAME, ProcName};
pub use kip_types::spec::show_bytes as bytes;
use std::time::{SystemTime, UNIX_EPOCH};

/// Rows below a head, columns aligned and two spaces apart, without trailing blanks.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|c| c.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Everything on one line and nothing that moves a terminal's cursor.
pub fn one_line(text: &str) -> String {
    text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// At most `longest` characters.
pub fn short(text: &str, longest: usize) -> String {
    if text.chars().count() <= longest {
        return text.to_owned();
    }
    text.chars().take(longest - 1).chain(['…']).collect()
}

/// `7.5ms`, from microseconds.
pub fn micros(us: u64) -> String {
    match us {
        0..1000 => format!("{us}us"),
        1000..1_000_000 => format!("{:.1}ms", us as f64 / 1e3),
        _ => millis(us / 1000),
    }
}

/// `1.5s`, `3m`, `2h`, `5d`, from milliseconds.
pub fn millis(ms: u64) -> String {
    let seconds = ms / 1000;
    match seconds {
        0 => format!("{ms}ms"),
        1..10 => format!("{:.1}s", (ms / 100) as f64 / 10.0),
        10..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// `2025-11-21T21:33:45.123Z`, from milliseconds since the epoch.
pub fn utc(at_ms: u64) -> String {
    let (days, ms) = (at_ms / 86_400_000, at_ms % 86_400_000);
    // Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms": days to a year that begins in
    // March.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (ms / 3_600_000, ms / 60_000 % 60, ms / 1000 % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:03}Z", ms % 1000)
}

/// `3m ago`.
pub fn ago(at_ms: u64) -> String {
    format!("{} ago", millis(now_ms().saturating_sub(at_ms)))
}

/// Milliseconds since the epoch.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// A name for a command, or an image, to which the daemon adds a number: its base name in a name's
/// alphabet.
pub fn stem(image: Option<&str>, command: &[String]) -> ProcName {
    /// Leaves room for the number.
    const LONGEST: usize = MAX_NAME - 20;
    let word = image.or(command.first().map(String::as_str)).unwrap_or("");
    let program = word.rsplit('/').next().unwrap_or(word);
    // The tag of an image says nothing about it.
    let program = image.map_or(program, |_| program.split([':', '@']).next().unwrap_or(program));
    let letters = program.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' });
    let text: String = letters.take(LONGEST).collect();
    text.trim_matches('-').parse().unwrap_or_else(|_| "proc".parse().expect("a valid name"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let rows = [vec!["NAME".into(), "X".into()], vec!["a-long-one".into(), "ü".into()], vec!["b".into()]];
        assert_eq!(table(&rows), "NAME        X\na-long-one  ü\nb\n");
        assert_eq!(table(&[]), "");
    }

    #[test]
    fn numbers_are_short() {
        let sizes =
            [(0, "0"), (1023, "1023"), (1024, "1.0K"), (3 << 20, "3.0M"), (1_048_570, "1.0M"), (5 << 40, "5.0T")];
        for (n, text) in sizes {
            assert_eq!(bytes(n), text);
        }
        for (us, text) in [(7, "7us"), (999, "999us"), (7500, "7.5ms"), (2_000_000, "2.0s"), (90_000_000, "90s")] {
            assert_eq!(micros(us), text);
        }
        for (ms, text) in [
            (0, "0ms"),
            (1999, "1.9s"),
            (61_000, "61s"),
            (180_000, "3m"),
            (7_200_000, "2h"),
            (u64::MAX, "213503982334d"),
        ] {
            assert_eq!(millis(ms), text);
        }
    }

    #[test]
    fn times_are_right() {
        for (ms, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_826_154_007, "2000-02-29T12:09:14.007Z"),
            (1_763_760_825_123, "2025-11-21T21:33:45.123Z"),
            (1_767_225_599_999, "2025-12-31T23:59:59.999Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(utc(ms), text);
        }
    }

    #[test]
    fn lines_stay_lines() {
        assert_eq!(one_line("a\nb\u{1b}[2Jc\n"), "a b [2Jc");
        assert_eq!(short("abcdef", 4), "abc…");
        assert_eq!(short("abcd", 4), "abcd");
    }
}
