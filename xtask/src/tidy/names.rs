//! Rule about names of types: a public type at the level of a module has a name that no other crate
//! gives to a public type of its own, so that the name alone says which type is meant.
//!
//! [`SHARED`] are the names that stood in several crates when the rule came. The list only shrinks:
//! a name that is in fewer crates than it says is a finding, too. Looks at the text of formatted
//! files, not at its grammar: what is indented is not at the level of a module.

use super::File;
use super::crates::crate_of;
use super::source::lines_before_tests;
use std::collections::{BTreeMap, BTreeSet};

/// Names that stand in several crates, and in how many.
const SHARED: &[(&str, usize)] = &[("Failure", 2)];

/// Where each public type stands.
type Places<'a> = BTreeMap<&'a str, BTreeSet<&'a str>>;

/// Names of types in more crates than they may stand in, and exceptions that are not needed.
pub fn findings(files: &[File]) -> Vec<String> {
    judge(files, SHARED)
}

fn judge(files: &[File], shared: &[(&str, usize)]) -> Vec<String> {
    let places = places(files);
    let allowed: BTreeMap<&str, usize> = shared.iter().copied().collect();
    let mut findings = Vec::new();
    for (name, crates) in &places {
        let most = allowed.get(name).copied().unwrap_or(1);
        if crates.len() > most {
            let crates: Vec<_> = crates.iter().copied().collect();
            let crates = crates.join(", ");
            findings.push(format!("crates: the name {name} stands in {crates}: name the type for what it is there"));
        }
    }
    for (name, most) in allowed {
        let now = places.get(name).map_or(0, BTreeSet::len);
        if now < most {
            let mend = if now > 1 { format!("lower its number to {now}") } else { "remove it".to_owned() };
            findings.push(format!("xtask/src/tidy/names.rs: {name} stands in {now} crates, not in {most}: {mend}"));
        }
    }
    findings
}

/// The crates of each public type.
fn places(files: &[File]) -> Places<'_> {
    let mut places = Places::new();
    for file in files {
        let Some(owner) = crate_of(&file.path) else { continue };
        for name in file.text.lines().take(lines_before_tests(&file.text)).filter_map(type_of) {
            places.entry(name).or_default().insert(owner);
        }
    }
    places
}

/// The type that a line declares.
fn type_of(line: &str) -> Option<&str> {
    let declared = line.strip_prefix("pub ")?;
    let named = ["struct ", "enum ", "trait ", "type "].iter().find_map(|word| declared.strip_prefix(word))?;
    let end = named.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(named.len());
    Some(&named[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> File {
        File { path: path.into(), text: text.into() }
    }

    // promise workspace: a public type has a name of its own among the crates, apart from a list
    //   that only shrinks
    #[test]
    fn a_name_stands_in_one_crate() {
        let mut files = vec![
            file("crates/net/src/lib.rs", "pub struct Held<'a> {\n    pub struct Inner;\n}\npub(crate) enum Kind {}\n"),
            file("crates/net/src/custody.rs", "pub type Held = u8;\npub fn held() {}\n"),
            file("crates/sys/src/lib.rs", "pub enum Kind {}\n#[cfg(test)]\nmod tests {\npub struct Held;\n}\n"),
            file("crates/sys/tests/held.rs", "pub struct Held;\n"),
            file("crates/sys/src/held_tests.rs", "pub struct Held;\n"),
            file("crates/store/src/lib.rs", "pub trait Inner {}\n"),
        ];
        assert_eq!(judge(&files, &[]), Vec::<String>::new());
        files.push(file("crates/image/src/lib.rs", "pub trait Held {}\n"));
        let found = judge(&files, &[]);
        assert_eq!(found, ["crates: the name Held stands in image, net: name the type for what it is there"]);
        assert_eq!(judge(&files, &[("Held", 2)]), Vec::<String>::new());
    }

    #[test]
    fn exceptions_only_shrink() {
        let files = [file("crates/net/src/a.rs", "pub struct A;\n"), file("crates/sys/src/a.rs", "pub struct A;\n")];
        let found = judge(&files, &[("A", 3), ("B", 2)]);
        let expected = [
            "xtask/src/tidy/names.rs: A stands in 2 crates, not in 3: lower its number to 2",
            "xtask/src/tidy/names.rs: B stands in 0 crates, not in 2: remove it",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn the_list_is_sorted() {
        assert!(SHARED.windows(2).all(|pair| pair[0].0 < pair[1].0));
        assert!(SHARED.iter().all(|(_, crates)| *crates > 1));
    }
}
