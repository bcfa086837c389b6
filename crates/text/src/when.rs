//! Moments on a command line: a duration back from now, `10m`, or a time, `2026-11-27T09:30:00Z`
//! (RFC 3339).

use crate::now_ms;
use kip_types::spec::parse_duration_ms;

/// Milliseconds of a day.
const DAY_MS: i64 = 86_400_000;

/// Reads one, as milliseconds since the epoch.
///
/// # Errors
/// What is wrong with it.
pub fn parse(text: &str) -> Result<u64, String> {
    if let Ok(ms) = parse_duration_ms(text) {
        return Ok(now_ms().saturating_sub(ms));
    }
    let bad = || format!("time {text:?} is not valid: write a duration back from now as 10m, or 2026-11-27T09:30:00Z");
    rfc3339(text).and_then(|ms| u64::try_from(ms).ok()).ok_or_else(bad)
}

/// A date with or without a time of the day, which is UTC if it says nothing else.
fn rfc3339(text: &str) -> Option<i64> {
    let (date, time) = match text.split_once(['T', 't', ' ']) {
        Some((date, time)) => (date, Some(time)),
        None => (text.strip_suffix(['Z', 'z']).unwrap_or(text), None),
    };
    let [year, month, day] = numbers(date, '-')?;
    let longest = match month {
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return None,
    };
    if !(1970..=9999).contains(&year) || !(1..=longest).contains(&day) {
        return None;
    }
    Some(days(year, month, day) * DAY_MS + time.map_or(Some(0), of_day)?)
}

/// Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms": days since the epoch, from a year
/// that begins in March.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (year / 400, year % 400);
    let from_march = (month + 9) % 12;
    let day_of_year = (153 * from_march + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

/// `09:30`, `09:30:00.5`, with `Z` or `+01:00` after it.
fn of_day(text: &str) -> Option<i64> {
    let (clock, offset_minutes) = match text.find(['Z', 'z', '+', '-']) {
        None => (text, 0),
        Some(at) if text[at..].eq_ignore_ascii_case("z") => (&text[..at], 0),
        Some(at) => {
            let [hours, minutes] = numbers(&text[at + 1..], ':')?;
            let offset = hours * 60 + minutes;
            (&text[..at], if text[at..].starts_with('-') { -offset } else { offset })
        }
    };
    let (clock, fraction) = clock.split_once('.').unwrap_or((clock, ""));
    let [hour, minute, second] = numbers::<3>(clock, ':').or_else(|| {
        let [hour, minute] = numbers(clock, ':')?;
        Some([hour, minute, 0])
    })?;
    // A second that was put in is the last of its minute.
    if hour > 23 || minute > 59 || second > 60 || !fraction.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let digits: String = fraction.chars().chain("000".chars()).take(3).collect();
    let ms = digits.parse::<i64>().ok()?;
    Some((((hour * 60) + minute - offset_minutes) * 60 + second) * 1000 + ms)
}

fn numbers<const N: usize>(text: &str, between: char) -> Option<[i64; N]> {
    let read = |part: &str| part.bytes().all(|b| b.is_ascii_digit()).then(|| part.parse::<i64>().ok()).flatten();
    let all: Option<Vec<i64>> = text.split(between).map(read).collect();
    all?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::utc;

    #[test]
    fn times_are_read_as_they_are_written() {
        for ms in [0, 951_826_154_007, 1_763_760_825_123, 1_767_225_599_999, 4_107_542_400_000] {
            assert_eq!(parse(&utc(ms)), Ok(ms), "{}", utc(ms));
        }
        for (text, same) in [
            ("2026-11-27", "2026-11-27T00:00:00.000Z"),
            ("2026-11-27T09:30", "2026-11-27T09:30:00.000Z"),
            ("2026-11-27T09:30:00+01:30", "2026-11-27T08:00:00.000Z"),
            ("2026-11-27t00:30:00.25-01:00", "2026-11-27T01:30:00.250Z"),
            ("2024-02-29 12:00:00z", "2024-02-29T12:00:00.000Z"),
        ] {
            assert_eq!(parse(text).map(utc).as_deref(), Ok(same), "{text}");
        }
    }

    #[test]
    fn durations_go_back_from_now() {
        let (before, parsed) = (now_ms(), parse("10m").unwrap());
        assert!((before..=now_ms()).contains(&(parsed + 600_000)));
    }

    #[test]
    fn what_is_no_time_is_refused() {
        for bad in ["", "soon", "2026-13-01", "2026-02-29", "2026-11-27T25:00", "2026-11-27T09:30:00+x", "1969-01-01"] {
            assert!(parse(bad).unwrap_err().contains("is not valid"), "{bad}");
        }
    }
}
