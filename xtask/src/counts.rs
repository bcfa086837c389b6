//! Counts tests from what `cargo test` and pytest print, and decides which of their lines people
//! need to see.
//!
//! A Rust test that cannot run here prints a line `skipped: why` and returns. Run with
//! `--show-output`, cargo shows that line; the test is then counted as skipped, not as passed.

use std::borrow::Cow;
use std::ops::AddAssign;

/// Tests by result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Ran and were right.
    pub passed: u64,
    /// Ran and were wrong, or could not be set up.
    pub failed: u64,
    /// Did not run.
    pub skipped: u64,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// Follows one kind of output line by line.
pub trait Follow {
    /// Takes a line; gives what people should see of it, if anything.
    fn line<'a>(&mut self, line: &'a str) -> Option<Cow<'a, str>>;
    /// What was counted.
    fn counts(&self) -> Counts;
}

/// Output of `cargo test -- --show-output`.
#[derive(Debug, Default)]
pub struct Cargo {
    counts: Counts,
    in_successes: bool,
    /// Tests of this binary that printed a skip; its result line will count them as passed.
    printed_skips: u64,
    /// The test whose output comes now, and whether it printed a skip.
    test: String,
    skipped_here: bool,
}

impl Follow for Cargo {
    fn line<'a>(&mut self, line: &'a str) -> Option<Cow<'a, str>> {
        match line {
            "successes:" => self.in_successes = true,
            "failures:" => self.in_successes = false,
            _ => {}
        }
        if let Some(rest) = line.strip_prefix("test result: ") {
            self.in_successes = false;
            let of = |word: &str| number_before(rest, word);
            let skips = std::mem::take(&mut self.printed_skips);
            self.counts += Counts {
                passed: of("passed").saturating_sub(skips),
                failed: of("failed"),
                skipped: of("ignored") + skips,
            };
            return Some(line.into());
        }
        if !self.in_successes {
            return Some(line.into());
        }
        if let Some(name) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
            self.test = name.to_owned();
            self.skipped_here = false;
        }
        if !line.starts_with("skipped: ") {
            return None;
        }
        self.printed_skips += u64::from(!self.skipped_here);
        self.skipped_here = true;
        Some(format!("test {} ... {line}", self.test).into())
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}

/// Output of pytest.
#[derive(Debug, Default)]
pub struct Pytest {
    counts: Counts,
}

impl Follow for Pytest {
    fn line<'a>(&mut self, line: &'a str) -> Option<Cow<'a, str>> {
        let text = line.trim_matches(|c: char| c == '=' || c == ' ');
        let is_seconds = |word: &str| word.strip_suffix('s').is_some_and(|number| number.parse::<f64>().is_ok());
        let is_summary =
            text.rsplit_once(" in ").is_some_and(|(_, took)| took.split(' ').next().is_some_and(is_seconds));
        if is_summary {
            let of = |word: &str| number_before(text, word);
            let passed = of("passed") + of("xpassed");
            let failed = of("failed") + of("error") + of("errors");
            let counts = Counts { passed, failed, skipped: of("skipped") + of("xfailed") };
            if counts != Counts::default() {
                self.counts = counts;
            }
        }
        Some(line.into())
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}

/// The number before a word: 3 in `ok. 3 passed; 1 failed` for `passed`; 0 if the word is not
/// there.
fn number_before(text: &str, word: &str) -> u64 {
    let words: Vec<&str> =
        text.split(|c: char| c.is_whitespace() || c == ';' || c == ',').filter(|w| !w.is_empty()).collect();
    words.windows(2).find(|pair| pair[1] == word).and_then(|pair| pair[0].parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn follow(mut follower: impl Follow, text: &str) -> (Counts, Vec<Cow<'_, str>>) {
        let shown = text.lines().filter_map(|line| follower.line(line)).collect();
        (follower.counts(), shown)
    }

    #[test]
    fn several_test_binaries_are_summed() {
        let text = "running 2 tests\ntest a ... ok\n\n\
                    test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 7 filtered out; finished in 0.01s\n\
                    test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s\n";
        let (counts, shown) = follow(Cargo::default(), text);
        assert_eq!(counts, Counts { passed: 5, failed: 2, skipped: 1 });
        assert_eq!(shown.len(), text.lines().count());
    }

    // promise workspace: a skip is not counted as a pass
    #[test]
    fn a_printed_skip_is_no_pass_and_other_output_of_successes_is_hidden() {
        let text = "running 3 tests\n\nsuccesses:\n\n---- a stdout ----\nskipped: no root\nskipped: really\n\n\
                    ---- b stdout ----\nchatter\n\nsuccesses:\n    a\n    b\n\n\
                    test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s\n";
        let (counts, shown) = follow(Cargo::default(), text);
        assert_eq!(counts, Counts { passed: 2, failed: 0, skipped: 1 });
        assert!(
            shown.contains(&"test a ... skipped: no root".into()) && !shown.contains(&"chatter".into()),
            "{shown:?}"
        );
        assert!(shown.last().unwrap().starts_with("test result"));
    }

    #[test]
    fn output_of_failures_is_shown() {
        let text = "successes:\n---- a stdout ----\nchatter\nfailures:\n---- b stdout ----\npanicked\n";
        assert_eq!(follow(Cargo::default(), text).1, ["failures:", "---- b stdout ----", "panicked"]);
    }

    // promise workspace: tests are counted whether one pytest worker runs them or several
    #[test]
    fn pytest_summaries_are_read() {
        let last = |text| follow(Pytest::default(), text).0;
        assert_eq!(last("= 3 passed in 1.20s ="), Counts { passed: 3, failed: 0, skipped: 0 });
        assert_eq!(
            last("== 1 failed, 3 passed, 2 skipped, 1 error in 61.20s (0:01:01) =="),
            Counts { passed: 3, failed: 2, skipped: 2 }
        );
        assert_eq!(last("12 passed, 1 xfailed, 4 deselected in 2.1s"), Counts { passed: 12, failed: 0, skipped: 1 });
        assert_eq!(last("the server answered in 3 ms, 7 passed through"), Counts::default());
        assert_eq!(last("= no tests ran in 0.01s ="), Counts::default());
        let workers = "created: 2/2 workers\n2 workers [4 items]\n\n..F.\n[gw1] node down: Not properly terminated\n\
                       = 1 failed, 3 passed in 301.25s (0:05:01) =";
        assert_eq!(last(workers), Counts { passed: 3, failed: 1, skipped: 0 });
    }
}
