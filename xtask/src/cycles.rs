//! No top-level module of a crate may use itself by way of others.
//!
//! Read from the text: `crate::name` and, in a top-level module, `super::name`. Modules of tests
//! are left out. What the root re-exports counts as the module that it comes from, anything else of
//! the root as the root, which is called `lib`.

use crate::tidy::File;
use std::collections::{BTreeMap, BTreeSet};

type Graph = BTreeMap<String, BTreeSet<String>>;

/// Modules that are in a circle, each with its way.
pub fn findings(files: &[File]) -> Vec<String> {
    let mut found = Vec::new();
    for name in crates(files) {
        let graph = graph(&name, files);
        let ways = graph.keys().filter_map(|module| Some((module, circle(&graph, module)?)));
        found.extend(ways.map(|(module, circle)| {
            let way: Vec<&str> = circle.iter().map(|module| module.as_str()).collect();
            format!("crates/{name}: module {module} uses itself by way of others: {}", way.join(" -> "))
        }));
    }
    found
}

fn crates(files: &[File]) -> BTreeSet<String> {
    files.iter().filter_map(|file| Some(file.path.strip_prefix("crates/")?.split_once("/src/")?.0.to_owned())).collect()
}

/// Which modules each module uses.
fn graph(name: &str, files: &[File]) -> Graph {
    let prefix = format!("crates/{name}/src/");
    let own = files.iter().filter_map(|file| Some((file.path.strip_prefix(&prefix)?, file)));
    let own: Vec<(String, bool, &str)> = own
        .filter(|(path, _)| path.ends_with(".rs") && !path.ends_with("tests.rs"))
        .map(|(path, file)| {
            let first = path.split('/').next().unwrap_or(path).trim_end_matches(".rs");
            let root = matches!(first, "lib" | "main");
            (if root { "lib" } else { first }.to_owned(), !path.contains('/'), without_tests(&file.text))
        })
        .collect();
    let modules: BTreeSet<&str> = own.iter().map(|(module, ..)| module.as_str()).collect();
    let exported: BTreeMap<&str, &str> = own
        .iter()
        .filter(|(module, ..)| module == "lib")
        .flat_map(|(_, _, text)| text.split("pub use ").skip(1).chain(text.split("pub(crate) use ").skip(1)))
        .filter_map(|rest| rest.split_once(';')?.0.split_once("::"))
        .flat_map(|(module, names)| words(names).map(move |name| (name, module)))
        .collect();
    let mut graph = Graph::new();
    for (module, top, text) in &own {
        let mut used = names(text, "crate::");
        if *top && module != "lib" {
            used.extend(names(text, "super::"));
        }
        if module == "lib" {
            // The root's own names have no prefix.
            used.extend(modules.iter().copied().filter(|name| uses(text, name)));
        }
        let resolved = used.into_iter().map(|name| match exported.get(name) {
            _ if modules.contains(name) => name,
            Some(module) if modules.contains(module) => module,
            _ => "lib",
        });
        graph.entry(module.clone()).or_default().extend(resolved.filter(|used| used != module).map(str::to_owned));
    }
    graph
}

/// A source up to its tests.
fn without_tests(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod tests").next().unwrap_or(text)
}

/// Lines that are code.
fn code(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| !line.trim_start().starts_with("//"))
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c| !is_word(c)).filter(|word| !word.is_empty())
}

/// The first names of paths that begin with `prefix`, those in braces too.
fn names<'a>(text: &'a str, prefix: &str) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    for (at, _) in text.match_indices(prefix) {
        let before = &text[..at];
        let line = before.rsplit('\n').next().unwrap_or(before);
        if line.contains("//") || before.ends_with(|c: char| is_word(c) || c == '$' || c == ':') {
            continue;
        }
        let rest = &text[at + prefix.len()..];
        match rest.strip_prefix('{') {
            None => found.extend(words(rest).next().filter(|_| rest.starts_with(is_word))),
            Some(group) => found.extend(firsts(group)),
        }
    }
    found
}

/// The first name of each path in a group of imports.
fn firsts(group: &str) -> Vec<&str> {
    let (mut depth, mut start, mut found) = (0, 0, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                found.extend(words(&group[start..at]).next());
                start = at + 1;
                if c == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    found
}

/// Whether the root uses one of its modules and does not only declare or re-export it.
fn uses(text: &str, module: &str) -> bool {
    code(text).filter(|line| !line.trim_start().starts_with("pub use ")).any(|line| {
        line.match_indices(&format!("{module}::"))
            .any(|(at, _)| !line[..at].ends_with(|c: char| is_word(c) || c == ':'))
    })
}

/// The shortest way from a module back to itself.
fn circle<'a>(graph: &'a Graph, from: &'a String) -> Option<Vec<&'a String>> {
    let mut ways = vec![vec![from]];
    let mut seen = BTreeSet::new();
    while !ways.is_empty() {
        let mut longer = Vec::new();
        for way in ways {
            for next in graph.get(*way.last()?).into_iter().flatten() {
                let mut way = way.clone();
                way.push(next);
                if next == from {
                    return Some(way);
                }
                if seen.insert(next) {
                    longer.push(way);
                }
            }
        }
        ways = longer;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn project(files: &[(&str, &str)]) -> Vec<File> {
        let file = |(path, text): &(&str, &str)| File { path: format!("crates/x/src/{path}"), text: (*text).into() };
        files.iter().map(file).collect()
    }

    #[test]
    fn a_circle_is_named_with_its_way() {
        let files = project(&[
            ("lib.rs", "mod a;\nmod b;\nmod c;\n"),
            ("a.rs", "use crate::b::B;\n"),
            ("b/deep.rs", "use crate::{c::{D, E}, Other};\n"),
            ("c.rs", "fn f() { super::a::g() }\n"),
        ]);
        let found = findings(&files);
        assert_eq!(found.len(), 3, "{found:?}");
        assert_eq!(found[0], "crates/x: module a uses itself by way of others: a -> b -> c -> a");
    }

    #[test]
    fn what_the_root_re_exports_is_of_its_module() {
        let files =
            project(&[("lib.rs", "mod a;\npub use a::A;\n"), ("a.rs", "// crate::b\n"), ("b.rs", "use crate::A;\n")]);
        assert_eq!(findings(&files), Vec::<String>::new());
    }

    #[test]
    fn the_root_is_a_module_too_and_tests_are_none() {
        let root = "mod a;\npub struct Root;\nfn f() { a::g() }\n";
        let tests = "#[cfg(test)]\nmod tests {\n    use crate::b::B;\n}\n";
        let files = project(&[("lib.rs", root), ("a.rs", "use crate::Root;\n"), ("b.rs", "use crate::a::A;\n")]);
        assert_eq!(findings(&files).len(), 2, "{:?}", findings(&files));
        let files =
            project(&[("lib.rs", "mod a;\n"), ("a.rs", tests), ("b.rs", "use crate::a::A;\n"), ("b_tests.rs", "")]);
        assert_eq!(findings(&files), Vec::<String>::new());
    }
}
