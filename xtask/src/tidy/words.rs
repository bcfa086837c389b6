//! Words that leave a sentence without its subject, and words that only the house knows (STYLE.md,
//! Words).
//!
//! Judges every text that a person reads: all lines of documents, of the crates that have the
//! public words, of scripts and packages; comments and messages of other sources; comments and
//! docstrings of tests, whose data may hold any word.

use super::File;

/// Pronouns that stand for a program, a client, a proc or a person that the sentence does not name;
/// and words of the house that a stranger does not know.
const WORDS: [&str; 13] = [
    "anybody",
    "anyone",
    "everybody",
    "everyone",
    "nobody",
    "somebody",
    "someone",
    "whoever",
    "whom",
    "whomever",
    "mishap",
    "mishaps",
    "abroad",
];

/// The same of several words.
const PHRASES: [&str; 4] = ["what is told", "that of those", "at rest", "memory is out"];

/// A document that the repository does not have.
const ABSENT: &str = "DESIGN";

/// Where no line has such a word.
const PUBLIC: [&str; 8] = [
    "docs/",
    "packaging/",
    "scripts/",
    "bench/",
    "crates/cli/src/",
    "crates/daemon/src/",
    "crates/api/src/",
    "crates/types/src/",
];

/// This list, the house's examples, and a text that the house has not written.
const EXEMPT: [&str; 3] = ["xtask/src/tidy/words.rs", "STYLE.md", "LICENSE"];

/// Which lines of a file are judged, and how much of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Lines,
    /// Comments, and texts in quotes as far as this line of the file; behind it are its tests.
    Messages(usize),
    Comments,
}

fn part(file: &File) -> Part {
    let path = file.path.as_str();
    let ends = |ends: &[&str]| ends.iter().any(|end| path.ends_with(end));
    if PUBLIC.iter().any(|public| path.starts_with(public)) || ends(&[".md", ".html"]) && !path.starts_with("tests/") {
        Part::Lines
    } else if ends(&[".rs"]) && path.contains("/src/") && !ends(&["tests.rs"]) {
        Part::Messages(super::source::lines_before_tests(&file.text))
    } else {
        Part::Comments
    }
}

/// Each line with such a word.
pub fn findings(file: &File) -> Vec<String> {
    // A dated design is frozen.
    if EXEMPT.contains(&file.path.as_str()) || file.path.starts_with("docs/design/2") {
        return Vec::new();
    }
    let part = part(file);
    let mut found = Vec::new();
    for (at, line) in file.text.lines().enumerate() {
        let place = format!("{}:{}", file.path, at + 1);
        let judged = match part {
            Part::Lines => line.to_owned(),
            _ if is_comment(line) => line.to_owned(),
            Part::Messages(end) if at < end => quoted(line),
            _ => String::new(),
        };
        found.extend(word(&judged).map(|word| format!("{place}: name the subject instead of {word:?}")));
        if line.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| word == ABSENT) {
            found.push(format!("{place}: {ABSENT} is not in the repository: name ARCHITECTURE.md, or say the thing"));
        }
        if file.path.ends_with(".json") && line.contains("[`") {
            found.push(format!(
                "{place}: a link of rustdoc leads nowhere here: use plain words in the comment that it is made from"
            ));
        }
    }
    found
}

fn is_comment(line: &str) -> bool {
    let line = line.trim_start();
    ["//", "# ", "/*", "\"\"\""].iter().any(|mark| line.starts_with(mark))
}

/// The texts in quotes.
fn quoted(line: &str) -> String {
    line.split('"').skip(1).step_by(2).collect::<Vec<_>>().join(" | ")
}

fn word(line: &str) -> Option<String> {
    let words: Vec<&str> = line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').collect();
    let word = words.iter().find(|word| WORDS.iter().any(|known| word.eq_ignore_ascii_case(known)));
    let spaced = format!(" {} ", words.join(" ").to_ascii_lowercase());
    let phrase = || PHRASES.iter().find(|phrase| spaced.contains(&format!(" {phrase} ")));
    word.or_else(phrase).map(|found| (*found).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_one(path: &str, text: &str) -> Vec<String> {
        findings(&File { path: path.to_owned(), text: text.to_owned() })
    }

    #[test]
    fn words_without_a_subject_are_found_where_a_person_reads() {
        assert_eq!(
            check_one("docs/time.md", "The pager waits.\nWhoever waits."),
            ["docs/time.md:2: name the subject instead of \"Whoever\""]
        );
        for (path, text) in [
            ("crates/api/src/lib.rs", "/// Wakes nobody."),
            ("crates/pager/src/lib.rs", "    // Nobody waits."),
            ("crates/pager/src/lib.rs", "    expect(\"nobody\")"),
            ("xtask/src/check.rs", "/// Somebody calls cargo."),
            ("packaging/prerm", "# Nobody wakes."),
            ("scripts/install", "refuse \"nobody wakes\""),
            ("recipes/git/git.conf", "    # Whoever may push"),
            ("ARCHITECTURE.md", "Its memory is out."),
            ("docs/time.md", "A proc at rest."),
            ("crates/pager/src/lib.rs", "#[error(\"a Mishap\")]"),
            ("tests/test_api.py", "    \"\"\"What is told of a sleeper."),
        ] {
            assert_eq!(check_one(path, text).len(), 1, "{path}: {text}");
        }
    }

    #[test]
    fn names_and_the_data_of_tests_may_hold_them() {
        for (path, text) in [
            ("docs/design/2026-01-01-old.md", "nobody"),
            ("docs/time.md", "A client that nobody_else knows, and on what that rests."),
            ("crates/pager/src/lib.rs", "let nobody = whom(); // as the kernel has it"),
            ("crates/pager/src/lib.rs", "#[cfg(test)]\nmod tests {\n    expect(\"nobody\")"),
            ("crates/pager/src/lib_tests.rs", "expect(\"nobody\")"),
            ("tests/test_api.py", "kip.refused(\"ps\", \"nobody\")"),
            ("recipes/irc/ngircd.conf", "ServerUID = nobody"),
        ] {
            assert_eq!(check_one(path, text), [""; 0], "{path}: {text}");
        }
    }

    #[test]
    fn what_leads_nowhere_is_found() {
        let absent = format!("//! {ABSENT}.md, invariant 1");
        assert!(check_one("crates/offload/src/lib.rs", &absent)[0].contains("name ARCHITECTURE.md"));
        assert!(check_one("docs/api/openapi.json", "\"[`Detail::Files`].\"")[0].contains("rustdoc"));
        assert_eq!(check_one("crates/types/src/lib.rs", "/// [`Detail::Files`]."), [""; 0]);
    }
}
