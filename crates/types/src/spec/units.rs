//! Durations and sizes as people write them.

/// A duration could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("duration {0:?} is not valid: write a number with ms, s, m, h or d, for example 500ms or 10s")]
pub struct BadDuration(String);

/// Reads `500ms`, `10s`, `5m`, `2h`, `1d` or a bare number of seconds; the result is in
/// milliseconds.
pub fn parse_duration_ms(s: &str) -> Result<u64, BadDuration> {
    let bad = || BadDuration(s.to_owned());
    let digits = s.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(s.len());
    let (number, unit) = s.split_at(digits);
    let number: f64 = number.parse().map_err(|_| bad())?;
    let factor = match unit {
        "ms" => 1.0,
        "" | "s" => 1e3,
        "m" => 60e3,
        "h" => 3600e3,
        "d" => 86_400e3,
        _ => return Err(bad()),
    };
    let ms = number * factor;
    if ms.is_finite() && ms < 1e15 { Ok(ms.round() as u64) } else { Err(bad()) }
}

/// A size could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("size {0:?} is not valid: write a number with K, M or G (powers of 1024), for example 64M")]
pub struct BadSize(String);

/// Reads `64M`, `1.5G`, `4096`; the result is in bytes.
pub fn parse_size(s: &str) -> Result<u64, BadSize> {
    let bad = || BadSize(s.to_owned());
    let digits = s.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(s.len());
    let (number, unit) = s.split_at(digits);
    let number: f64 = number.parse().map_err(|_| bad())?;
    let factor = match unit.trim_end_matches("iB").trim_end_matches('B') {
        "" => 1.0,
        "K" | "k" => 1024.0,
        "M" | "m" => 1024.0 * 1024.0,
        "G" | "g" => 1024.0 * 1024.0 * 1024.0,
        _ => return Err(bad()),
    };
    let bytes = number * factor;
    if bytes.is_finite() && bytes < 1e18 { Ok(bytes as u64) } else { Err(bad()) }
}

/// A size as people read it: `3.0M`, powers of 1024, at most five characters.
pub fn show_bytes(n: u64) -> String {
    if n < 1024 {
        return n.to_string();
    }
    let (mut value, mut unit) = (n as f64 / 1024.0, 'K');
    for next in ['M', 'G', 'T', 'P', 'E'] {
        if value < 999.95 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    format!("{value:.1}{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_durations_and_sizes() {
        assert_eq!(parse_duration_ms("500ms"), Ok(500));
        assert_eq!(parse_duration_ms("1.5s"), Ok(1500));
        assert_eq!(parse_duration_ms("2"), Ok(2000));
        assert!(parse_duration_ms("5 parsecs").is_err());
        assert!(parse_duration_ms("").is_err());
        assert_eq!(parse_size("64M"), Ok(64 << 20));
        assert_eq!(parse_size("1GiB"), Ok(1 << 30));
        assert!(parse_size("much").is_err());
    }
}
