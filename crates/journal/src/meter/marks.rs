//! Marks: the meter as it was from time to time, for `kip meter --since`. One JSON value on each
//! line of `DIR/procs/NAME/meter`.
//!
//! A mark is made when the record is written anyway and the last one is a quarter of an hour old;
//! between two the use is taken to be even. A crash leaves all marks but perhaps the last, and a
//! line that cannot be read is none.

use super::{Grown, InTier, Kept};
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

const FILE: &str = "meter";
/// Between marks, milliseconds.
const EVERY_MS: u64 = 15 * 60 * 1000;
/// A longer file loses its older half, bytes: two weeks of a proc that never sleeps.
const LONGEST: u64 = 512 << 10;

fn path(dir: &Path) -> PathBuf {
    dir.join(FILE)
}

/// Whether a mark has to be set.
pub fn is_due(kept: &Kept) -> bool {
    kept.at_ms.saturating_sub(kept.marked_ms) >= EVERY_MS
}

/// Makes a mark; false if that cannot be done now.
pub fn add(dir: &Path, kept: &Kept) -> bool {
    let append = || -> io::Result<()> {
        let mut line = serde_json::to_vec(kept)?;
        line.push(b'\n');
        let mut file = OpenOptions::new().create(true).append(true).mode(0o600).open(path(dir))?;
        file.write_all(&line)?;
        if file.metadata()?.len() > LONGEST { shorten(dir) } else { Ok(()) }
    };
    append()
        .inspect_err(|error| tracing::debug!(dir = %dir.display(), %error, "a mark of a meter is not written"))
        .is_ok()
}

fn shorten(dir: &Path) -> io::Result<()> {
    let text = fs::read(path(dir))?;
    let half = text.len() / 2;
    let from = text[half..].iter().position(|byte| *byte == b'\n').map_or(half, |at| half + at + 1);
    let new = path(dir).with_extension("new");
    fs::write(&new, &text[from..])?;
    fs::rename(&new, path(dir))
}

/// The meter as it was at `at_ms`, which is after it began and no later than `now`.
pub(super) fn at(dir: &Path, now: &Kept, at_ms: u64) -> Kept {
    let text = fs::read_to_string(path(dir)).unwrap_or_default();
    let all = text.lines().filter_map(|line| serde_json::from_str::<Kept>(line).ok());
    let nothing = Kept { since_ms: now.since_ms, at_ms: now.since_ms, ..Kept::default() };
    let (mut before, mut after) = (nothing, now.clone());
    for mark in all.filter(|mark| mark.since_ms == now.since_ms) {
        if mark.at_ms <= at_ms {
            before = mark;
        } else {
            after = mark;
            break;
        }
    }
    between(&before, &after, at_ms.min(after.at_ms))
}

fn between(a: &Kept, b: &Kept, at_ms: u64) -> Kept {
    let span = b.at_ms.saturating_sub(a.at_ms).max(1) as f64;
    let share = (at_ms.saturating_sub(a.at_ms) as f64 / span).clamp(0.0, 1.0);
    let part = &|a: u64, b: u64| a + (b.saturating_sub(a) as f64 * share).round() as u64;
    let grown = |a: Grown, b: Grown| Grown { total: part(a.total, b.total), seen: 0 };
    let tiers = b.tiers.iter().map(|(tier, then)| {
        let was: InTier = a.tiers.get(tier).copied().unwrap_or_default();
        (*tier, was.with(*then, part, |was, then| was + (then - was).max(0.0) * share))
    });
    let wakes = b.wakes.iter().map(|(from, by)| {
        let was = |trigger| a.wakes.get(from).and_then(|by| by.get(trigger)).copied().unwrap_or(0);
        let by: BTreeMap<String, u64> = by.iter().map(|(word, n)| (word.clone(), part(was(word), *n))).collect();
        (*from, by)
    });
    Kept {
        since_ms: b.since_ms,
        at_ms,
        tiers: tiers.collect(),
        cpu_ns: grown(a.cpu_ns, b.cpu_ns),
        oom_kills: grown(a.oom_kills, b.oom_kills),
        connections: grown(a.connections, b.connections),
        datagrams: grown(a.datagrams, b.datagrams),
        wakes: wakes.collect(),
        ..Kept::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_types::Tier;

    fn kept(at_ms: u64, us: u64) -> Kept {
        let used = InTier { us, byte_seconds: us as f64, cpu_ns: us, ..InTier::default() };
        let tiers = BTreeMap::from([(Tier::Hot, used)]);
        Kept { since_ms: 1000, at_ms, tiers, cpu_ns: Grown { total: us, seen: 3 }, ..Kept::default() }
    }

    #[test]
    fn between_marks_the_use_is_even() {
        let dir = tempfile::tempdir().unwrap();
        let used = |at_ms| at(dir.path(), &kept(9000, 800), at_ms).tiers[&Tier::Hot].us;
        assert_eq!([used(1000), used(5000), used(9000)], [0, 400, 800]);
        assert!(add(dir.path(), &kept(3000, 100)) && add(dir.path(), &kept(7000, 500)));
        fs::OpenOptions::new().append(true).open(path(dir.path())).unwrap().write_all(b"{\"at_ms\": 70").unwrap();
        assert_eq!([used(2000), used(3000), used(5000), used(8000)], [50, 100, 300, 650]);
        let after = kept(9000, 800).after(&at(dir.path(), &kept(9000, 800), 7000));
        assert_eq!((after.tiers[&Tier::Hot].us, after.cpu_ns.total, after.since_ms), (300, 300, 7000));
        assert_eq!(after.tiers[&Tier::Hot].cpu_ns, 300);
    }

    #[test]
    fn the_file_stays_short() {
        let dir = tempfile::tempdir().unwrap();
        for n in 0..6000 {
            assert!(add(dir.path(), &kept(2000 + n, n)));
        }
        let bytes = fs::metadata(path(dir.path())).unwrap().len();
        assert!((LONGEST / 3..=LONGEST).contains(&bytes), "{bytes}");
        let newest = at(dir.path(), &kept(100_000, 90_000), 7999);
        assert_eq!(newest.tiers[&Tier::Hot].us, 5999);
    }
}
