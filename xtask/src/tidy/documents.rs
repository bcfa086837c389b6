//! Rules about the documents at the top (README.md, SPECIFICATION.md and so on) and in docs/: every
//! path they link or quote exists, and every test that they name is there.
//!
//! A test is named as `FILE::[module::]name` (for example `tests/test_park.py::test_keeps_data`)
//! or, for a unit test of a crate, as `kip_net::module::tests::name`. Documents under docs/design/
//! with a date are frozen and not looked at. Those that a stranger reads first stay short.

use super::File;

const TOP_LEVEL: [&str; 8] = ["crates/", "xtask/", "tests/", "bench/", "scripts/", "docs/", ".ci/", "sdk/"];

/// The most bytes of a document that is to be read at one sitting.
const SHORT: [(&str, usize); 4] =
    [("README.md", 8 << 10), ("ARCHITECTURE.md", 12 << 10), ("SPECIFICATION.md", 12 << 10), ("STYLE.md", 6 << 10)];

/// What the documents name and the project does not have, and what is too long. `exists` answers
/// for a path relative to the workspace.
pub fn findings(files: &[File], exists: &dyn Fn(&str) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for document in files.iter().filter(|file| is_document(&file.path)) {
        let (path, length) = (&document.path, document.text.len());
        if let Some((_, most)) = SHORT.iter().find(|(short, most)| path == short && length > *most) {
            found.push(format!("{path}: {length} bytes; at most {most}, move details to docs/"));
        }
        for (at, line) in document.text.lines().enumerate() {
            let place = format!("{}:{}", document.path, at + 1);
            for path in
                links(line).filter_map(|link| resolve(&document.path, link)).chain(quoted(line).filter_map(own_path))
            {
                if !exists(&path) {
                    found.push(format!("{place}: {path} does not exist"));
                }
            }
            for name in quoted(line).filter(|name| is_test_name(name)) {
                if !has_test(files, name) {
                    found.push(format!("{place}: there is no test {name}"));
                }
            }
        }
    }
    found
}

fn is_document(path: &str) -> bool {
    let watched = !path.contains('/') || path.starts_with("docs/") && !path.starts_with("docs/design/2");
    watched && path.ends_with(".md")
}

/// Targets of `[text](target)`.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split_once(')').map(|(target, _)| target))
}

/// A link's file relative to the workspace; none for the web and for a place in the same document.
fn resolve(document: &str, link: &str) -> Option<String> {
    let path = link.split('#').next().unwrap_or(link);
    if path.is_empty() || link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let mut parts: Vec<&str> = document.split('/').collect();
    parts.pop();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// Text between single backticks.
fn quoted(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2).filter(|text| !text.is_empty())
}

/// A quoted path of ours without the test it may name; none for other text and for patterns.
fn own_path(text: &str) -> Option<String> {
    let path = text.split("::").next().unwrap_or(text).trim_end_matches('/');
    let plain = path.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c));
    (plain && TOP_LEVEL.iter().any(|top| path.starts_with(top))).then(|| path.to_owned())
}

fn is_test_name(text: &str) -> bool {
    text.contains("::") && (text.starts_with("kip_") || text.starts_with("xtask::") || own_path(text).is_some())
}

fn has_test(files: &[File], name: &str) -> bool {
    let (place, function) = name.rsplit_once("::").unwrap_or((name, ""));
    let function = function.split('[').next().unwrap_or(function);
    let first = place.split("::").next().unwrap_or(place);
    let within = match first.strip_prefix("kip_") {
        Some(name) => format!("crates/{}/", name.replace('_', "-")),
        None if first == "xtask" => "xtask/".to_owned(),
        None => first.to_owned(),
    };
    files.iter().filter(|file| file.path.starts_with(&within)).any(|file| defines(&file.text, function))
}

/// Whether a Rust or Python source defines a function of exactly this name.
fn defines(text: &str, function: &str) -> bool {
    text.lines().any(|line| {
        let line = line.trim_start().trim_start_matches("pub ").trim_start_matches("async ");
        let signature = line.strip_prefix("fn ").or(line.strip_prefix("def "));
        signature.and_then(|rest| rest.strip_prefix(function)).is_some_and(|rest| rest.starts_with('('))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn project(document: &str, text: &str) -> Vec<File> {
        let file = |path: &str, text: &str| File { path: path.into(), text: text.into() };
        vec![
            file(document, text),
            file("tests/test_park.py", "def test_keeps_data(server):\n    pass\n"),
            file("crates/two-words/src/lib.rs", "//! x\nmod tests {\n    fn has_a_hyphen() {}\n}\n"),
            file("crates/net/src/pool.rs", "//! x\nmod tests {\n    #[test]\n    fn is_recycled() {}\n}\n"),
        ]
    }

    fn check_one(document: &str, text: &str) -> Vec<String> {
        let files = project(document, text);
        let paths: Vec<String> = files.iter().map(|file| file.path.clone()).collect();
        findings(&files, &|path| paths.iter().any(|p| p == path || p.starts_with(&format!("{path}/"))))
    }

    #[test]
    fn what_is_there_passes() {
        let text = "See [pool](crates/net/src/pool.rs#top), [web](https://example.org/x), [here](#words), `crates/net/`,\n\
                    `tests/test_park.py::test_keeps_data`, `kip_net::pool::tests::is_recycled`, `kip_two_words::tests::has_a_hyphen`, `Vec::new`, `kip ps`,\n\
                    `crates/*/src`, `tests/test_park.py::test_keeps_data[lighttpd]`.\n";
        assert_eq!(check_one("SPECIFICATION.md", text), Vec::<String>::new());
        assert_eq!(check_one("docs/tour.md", "[pool](../crates/net/src/pool.rs)"), Vec::<String>::new());
    }

    // promise workspace: documents name only what exists
    #[test]
    fn what_is_not_there_is_named_with_its_line() {
        assert_eq!(check_one("README.md", "x\n[gone](docs/gone.md)"), ["README.md:2: docs/gone.md does not exist"]);
        assert_eq!(check_one("ARCHITECTURE.md", "`crates/gone`"), ["ARCHITECTURE.md:1: crates/gone does not exist"]);
        let found =
            check_one("SPECIFICATION.md", "`tests/test_park.py::test_gone` and `kip_net::pool::tests::is_gone`");
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found.iter().all(|line| line.contains("there is no test")), "{found:?}");
    }

    #[test]
    fn what_is_to_be_read_at_one_sitting_is_short() {
        let text = "long\n".repeat(2000);
        assert_eq!(check_one("README.md", &text), ["README.md: 10000 bytes; at most 8192, move details to docs/"]);
        assert_eq!(check_one("ARCHITECTURE.md", &text), Vec::<String>::new());
        assert_eq!(check_one("docs/tour.md", &text), Vec::<String>::new());
    }

    #[test]
    fn design_documents_are_checked_unless_they_have_a_date() {
        assert_eq!(check_one("docs/design/wake.md", "`crates/gone`").len(), 1);
        assert_eq!(check_one("docs/design/2026-11-21-foundation.md", "`crates/gone`"), Vec::<String>::new());
    }

    #[test]
    fn a_name_that_only_begins_alike_is_another_test() {
        assert_eq!(check_one("SPECIFICATION.md", "`tests/test_park.py::test_keeps`").len(), 1);
        assert_eq!(check_one("SPECIFICATION.md", "`kip_worker::pool::tests::is_recycled`").len(), 1, "another crate");
    }

    #[test]
    fn frozen_designs_may_name_what_is_gone() {
        assert_eq!(check_one("docs/design/2026-01-01-x.md", "[gone](gone.md) `crates/gone`"), Vec::<String>::new());
    }
}
