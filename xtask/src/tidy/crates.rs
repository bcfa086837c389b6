//! Rule about whole crates: none has more than 8,000 lines without tests.

use super::File;
use super::source::lines_before_tests;
use std::collections::BTreeMap;

/// Lines of all sources of a crate without tests.
const LARGEST: usize = 8000;

/// Crates that are too large.
pub fn findings(files: &[File]) -> Vec<String> {
    let mut lines: BTreeMap<&str, usize> = BTreeMap::new();
    for file in files {
        if let Some(name) = crate_of(&file.path) {
            *lines.entry(name).or_default() += lines_before_tests(&file.text);
        }
    }
    let too_large = lines.into_iter().filter(|(_, lines)| *lines > LARGEST);
    let finding = |(name, lines)| {
        format!(
            "crates/{name}: {lines} lines without tests; at most {LARGEST}: move what is another crate's, or cut one off"
        )
    };
    too_large.map(finding).collect()
}

/// The crate of a source that is no test.
pub fn crate_of(path: &str) -> Option<&str> {
    let (name, source) = path.strip_prefix("crates/")?.split_once("/src/")?;
    let is_test = source.ends_with("tests.rs") || source.split('/').any(|folder| folder == "tests");
    (source.ends_with(".rs") && !is_test && !name.contains('/')).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, lines: usize) -> File {
        File { path: path.into(), text: "// x\n".repeat(lines) }
    }

    // promise workspace: no crate has more than 8000 lines without its tests
    #[test]
    fn lines_of_a_crate_are_summed_without_its_tests() {
        let tests = format!("// x\n#[cfg(test)]\n#[path = \"x.rs\"]\nmod tests {{\n{}}}\n", "// x\n".repeat(LARGEST));
        let mut files = vec![
            source("crates/net/src/lib.rs", LARGEST / 2),
            source("crates/net/src/pool/nat.rs", LARGEST / 2 - 1),
            File { path: "crates/net/src/inner.rs".into(), text: tests },
            source("crates/net/src/nat_tests.rs", LARGEST),
            source("crates/net/src/pool/tests/nat.rs", LARGEST),
            source("crates/net/tests/sleep.rs", LARGEST),
            source("crates/net/src/nat.txt", LARGEST),
            source("crates/sys/src/lib.rs", LARGEST),
            source("xtask/src/main.rs", LARGEST + 1),
        ];
        assert_eq!(findings(&files), Vec::<String>::new());
        files.push(source("crates/net/src/one_more.rs", 1));
        let found = findings(&files);
        assert!(found.len() == 1 && found[0].starts_with("crates/net: 8001 lines without tests"), "{found:?}");
    }
}
