//! Rules about one source file: header, unsafe code, length, name, marks of unfinished work.

use super::File;

/// Lines of a file before its tests.
const LONGEST: usize = 600;

/// Names that say nothing about what lives there.
const VAGUE: [&str; 6] = ["utils", "util", "common", "helpers", "misc", "shared"];

/// The only crate that may hold unsafe code.
const UNSAFE_CRATE: &str = "crates/sys/";

/// What is wrong with one file.
pub fn findings(file: &File) -> Vec<String> {
    let is_rust = file.path.ends_with(".rs");
    let is_source =
        is_rust || [".py", ".sh", ".c", ".h", ".go"].iter().any(|end| file.path.ends_with(end)) || is_script(file);
    let mut found = Vec::new();
    if is_source {
        found.extend(vague_name(&file.path));
        found.extend(marks(file));
        found.extend(too_long(file));
    }
    if is_rust || file.path.ends_with(".py") {
        found.extend(wide_comments(file));
    }
    if is_rust && file.path.starts_with("crates/") {
        found.extend(skips(file));
    }
    if is_rust && is_in_src(&file.path) {
        found.extend(header(file));
        found.extend(unsafe_code(file));
    }
    found
}

fn is_script(file: &File) -> bool {
    file.text.starts_with("#!")
}

fn is_in_src(path: &str) -> bool {
    path.contains("/src/")
}

fn vague_name(path: &str) -> Option<String> {
    let stem = |part: &str| part.split('.').next().unwrap_or(part).to_owned();
    let parts: Vec<String> = path.split('/').map(stem).collect();
    if let Some(vague) = parts.iter().find(|part| VAGUE.contains(&part.as_str())) {
        return Some(format!("{path}: {vague:?} says nothing about what lives there"));
    }
    match parts.as_slice() {
        [.., folder, file] if folder == file && path.ends_with(".rs") => {
            Some(format!("{path}: {file} inside {folder}; name it for what it adds, or make it {folder}.rs"))
        }
        _ => None,
    }
}

/// The marks, put together here so that this file does not hold them itself.
fn marks(file: &File) -> Vec<String> {
    let words = [["TO", "DO"].concat(), ["FIX", "ME"].concat(), ["X", "XX"].concat()];
    let calls =
        [["todo", "!("].concat(), ["unimplemented", "!("].concat(), ["dbg", "!("].concat(), ["#[", "ignore"].concat()];
    let mut found = Vec::new();
    for (number, line) in numbered(&file.text) {
        let word = words
            .iter()
            .find(|word| line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|w| w == word.as_str()));
        let call = calls.iter().find(|call| line.contains(call.as_str()));
        if let Some(mark) = word.or(call) {
            found.push(format!("{}:{number}: {mark}: finish it, or say in an issue what is missing", file.path));
        }
    }
    found
}

/// Columns of a comment that has a line of its own.
const WIDEST: usize = 100;

/// Comments wider than [`WIDEST`]. Tables, text in fences and single long names may be wider.
fn wide_comments(file: &File) -> Vec<String> {
    let marker = if file.path.ends_with(".rs") { "//" } else { "#" };
    let (mut found, mut in_fence) = (Vec::new(), false);
    for (number, line) in numbered(&file.text) {
        let Some(text) = line.trim_start().strip_prefix(marker) else {
            in_fence = false;
            continue;
        };
        let text = text.trim_start_matches(['/', '!']).trim();
        if text.starts_with("```") {
            in_fence = !in_fence;
        }
        let is_one_word = !text.trim_end_matches([',', ';']).contains(' ');
        if line.chars().count() > WIDEST && !in_fence && !text.starts_with('|') && !is_one_word {
            found.push(format!("{}:{number}: a comment of more than {WIDEST} columns: break the line", file.path));
        }
    }
    found
}

/// Tests that say they were skipped, and pass.
fn skips(file: &File) -> Vec<String> {
    let prints = |line: &str| {
        let text = line.split_once("println!(\"").map(|(_, text)| text.to_lowercase());
        text.is_some_and(|text| text.starts_with("skipped"))
    };
    let found = numbered(&file.text).filter(|(_, line)| prints(line));
    found.map(|(number, _)| format!("{}:{number}: a test that lacks something fails and names it", file.path)).collect()
}

fn too_long(file: &File) -> Option<String> {
    // What a test promises is read in the index.
    let promised = crate::spec::promised_lines(file);
    let lines = lines_before_tests(&file.text).saturating_sub(promised);
    (lines > LONGEST && !file.path.contains("/generated/")).then(|| {
        format!("{}: {lines} lines before its tests; {LONGEST} is the most: split it by what lives there", file.path)
    })
}

/// Lines up to the first module of tests, all of them if there is none.
pub fn lines_before_tests(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let is_test_module = |at: usize| {
        let item = || lines[at + 1..].iter().map(|line| line.trim_start()).find(|line| !line.starts_with("#["));
        lines[at].trim() == "#[cfg(test)]" && item().is_some_and(|item| item.starts_with("mod "))
    };
    (0..lines.len()).find(|at| is_test_module(*at)).unwrap_or(lines.len())
}

fn header(file: &File) -> Option<String> {
    let is_test_file = file.path.ends_with("/tests.rs");
    (!is_test_file && !file.text.starts_with("//!"))
        .then(|| format!("{}:1: no `//!` header: say what the module owns and what it never does", file.path))
}

fn unsafe_code(file: &File) -> Option<String> {
    let is_crate_root =
        file.path.ends_with("/src/lib.rs") || file.path.ends_with("/src/main.rs") || file.path.contains("/src/bin/");
    let forbids = file.text.lines().any(|line| line.trim() == "#![forbid(unsafe_code)]");
    (is_crate_root && !forbids && !file.path.starts_with(UNSAFE_CRATE))
        .then(|| format!("{}: no `#![forbid(unsafe_code)]`: unsafe code lives in {UNSAFE_CRATE} only", file.path))
}

fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().map(|(at, line)| (at + 1, line))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_one(path: &str, text: &str) -> Vec<String> {
        findings(&File { path: path.into(), text: text.into() })
    }

    const GOOD: &str = "//! Owns nothing.\n#![forbid(unsafe_code)]\n";

    #[test]
    fn a_tidy_file_passes() {
        assert_eq!(check_one("crates/net/src/lib.rs", GOOD), Vec::<String>::new());
        assert_eq!(check_one("crates/net/src/pool.rs", "//! Pools.\nfn f() {}\n"), Vec::<String>::new());
        assert_eq!(check_one("crates/sys/src/lib.rs", "//! Wrappers.\n#![allow(unsafe_code)]\n"), Vec::<String>::new());
        assert_eq!(check_one("crates/net/build.rs", "fn main() {}\n"), Vec::<String>::new());
        assert_eq!(check_one("docs/picture.md", "anything"), Vec::<String>::new());
    }

    // promise workspace: every module has a header; unsafe code is in one crate; files are short
    // held by: this, `xtask::tidy::source::tests::length_is_counted_up_to_the_tests`
    #[test]
    fn a_missing_header_or_forbid_is_found() {
        assert!(check_one("crates/net/src/pool.rs", "fn f() {}\n")[0].contains("no `//!` header"));
        for root in ["lib.rs", "main.rs", "bin/kip-launch.rs"] {
            let found = check_one(&format!("crates/net/src/{root}"), "//! Owns nothing.\n");
            assert!(found.len() == 1 && found[0].contains("forbid(unsafe_code)"), "{root}: {found:?}");
        }
        let commented = "//! Owns nothing.\n// #![forbid(unsafe_code)]\n";
        assert_eq!(check_one("crates/net/src/lib.rs", commented).len(), 1);
    }

    #[test]
    fn marks_of_unfinished_work_are_found_as_words_only() {
        for mark in [["TO", "DO"].concat(), ["FIX", "ME"].concat(), ["X", "XX"].concat()] {
            let found = check_one("crates/net/src/pool.rs", &format!("//! Pools.\n// {mark}: later\n"));
            assert!(found.len() == 1 && found[0].starts_with("crates/net/src/pool.rs:2:"), "{found:?}");
            assert_eq!(check_one("scripts/x", &format!("#!/bin/sh\n# {mark}\n")).len(), 1);
        }
        let macro_call = format!("//! Pools.\nfn f() {{ {}) }}\n", ["todo", "!("].concat());
        assert_eq!(check_one("crates/net/src/pool.rs", &macro_call).len(), 1);
        assert_eq!(check_one("scripts/x", "#!/bin/sh\nmktemp /tmp/a.XXXXXX\n"), Vec::<String>::new());
    }

    #[test]
    fn length_is_counted_up_to_the_tests() {
        let long = format!("//! Long.\n{}", "// x\n".repeat(LONGEST));
        assert!(check_one("crates/net/src/pool.rs", &long)[0].contains("601 lines"));
        let tested = format!("//! Short.\n#[cfg(test)]\nmod tests {{\n{}}}\n", "// x\n".repeat(LONGEST));
        assert_eq!(check_one("crates/net/src/pool.rs", &tested), Vec::<String>::new());
        let guarded = format!("//! Long.\n#[cfg(test)]\nfn f() {{}}\n{}", "// x\n".repeat(LONGEST));
        assert_eq!(check_one("crates/net/src/pool.rs", &guarded).len(), 1, "a test function is no test module");
    }

    #[test]
    fn a_wide_comment_is_found_and_a_table_is_not() {
        let long = "word ".repeat(20);
        for comment in ["// ", "/// ", "    //! "] {
            let text = format!("//! Pools.\n{comment}{long}\n");
            assert!(check_one("crates/net/src/pool.rs", &text)[0].contains(":2: a comment of more"), "{comment}");
        }
        let one = "x".repeat(100);
        for fine in [format!("// | {long}|"), format!("// ```text\n// {long}\n// ```"), format!("//   {one},")] {
            assert_eq!(check_one("crates/net/src/pool.rs", &format!("//! Pools.\n{fine}\n")), Vec::<String>::new());
        }
    }

    #[test]
    fn a_test_that_skips_itself_is_found() {
        for call in ["println", "eprintln"] {
            let text = format!("//! Pools.\nfn f() {{\n    {call}!(\"SKIPPED: no root\");\n}}\n");
            assert!(check_one("crates/net/src/pool.rs", &text)[0].contains(":3: a test that lacks"), "{call}");
        }
    }

    #[test]
    fn vague_names_are_found() {
        for path in [
            "crates/net/src/utils.rs",
            "crates/net/src/common/mod.rs",
            "tests/helpers.py",
            "crates/net/src/pool/pool.rs",
        ] {
            assert_eq!(check_one(path, "//! Things.\n").len(), 1, "{path}");
        }
        assert_eq!(check_one("crates/checkpoint/src/helper.rs", "//! One CRIU helper.\n"), Vec::<String>::new());
    }
}
