//! Words that leave a sentence without its subject (STYLE.md, Words).
//!
//! Looks at all of the public surface, that is the documents that a user reads and the crates that have its words, and at every comment of
//! the rest.

use super::File;

/// Pronouns that stand for a program, a client, a proc or a person that the sentence does not name.
const PRONOUNS: [&str; 10] =
    ["anybody", "anyone", "everybody", "everyone", "nobody", "somebody", "someone", "whoever", "whom", "whomever"];

/// Directories and files without such words in any line.
const PUBLIC: [&str; 8] = [
    "README.md",
    "CONTRIBUTING.md",
    "recipes/README.md",
    "docs/",
    "crates/cli/src/",
    "crates/daemon/src/",
    "crates/api/src/",
    "crates/types/src/",
];

/// Each line with such a word.
pub fn findings(file: &File) -> Vec<String> {
    let is_public = PUBLIC.iter().any(|path| file.path.starts_with(path));
    let has_comments = ["crates/", "tests/", "bench/"].iter().any(|path| file.path.starts_with(path));
    // A dated design is frozen.
    if !is_public && !has_comments || file.path.starts_with("docs/design/2") {
        return Vec::new();
    }
    let lines = file.text.lines().enumerate();
    lines
        .filter(|(_, line)| is_public || is_comment(line))
        .filter_map(|(at, line)| {
            pronoun(line).map(|word| format!("{}:{}: name the subject instead of {word:?}", file.path, at + 1))
        })
        .collect()
}

fn is_comment(line: &str) -> bool {
    let line = line.trim_start();
    line.starts_with("//") || line.starts_with("# ")
}

fn pronoun(line: &str) -> Option<&str> {
    let mut words = line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.find(|word| PRONOUNS.iter().any(|pronoun| word.eq_ignore_ascii_case(pronoun)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pronouns_are_found_where_the_public_reads() {
        let check_one = |path: &str, text: &str| findings(&File { path: path.to_owned(), text: text.to_owned() });
        assert_eq!(
            check_one("docs/time.md", "The pager waits.\nWhoever waits."),
            ["docs/time.md:2: name the subject instead of \"Whoever\""]
        );
        assert_eq!(check_one("crates/api/src/lib.rs", "/// Wakes nobody.").len(), 1);
        let none = [("docs/design/2026-01-01-old.md", "nobody"), ("crates/pager/src/lib.rs", "    expect(\"nobody\")")];
        assert!(none.iter().all(|(path, text)| check_one(path, text).is_empty()));
        assert_eq!(check_one("crates/pager/src/lib.rs", "    // Nobody waits.").len(), 1);
        assert!(check_one("docs/time.md", "A client that nobody_else knows.").is_empty(), "a name");
    }
}
