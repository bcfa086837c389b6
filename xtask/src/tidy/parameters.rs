//! Parameters of functions have a name each: a tuple that is taken apart in the list of parameters
//! hides what belongs together, and why. Closures over the items of an iterator are free.
//!
//! Looks at the text of formatted files, not at its grammar.

use super::File;

/// Each function with a tuple pattern among its parameters.
pub fn findings(file: &File) -> Vec<String> {
    if !file.path.ends_with(".rs") {
        return Vec::new();
    }
    let ends_of_fn = file.text.match_indices("fn ").map(|(at, word)| (at, at + word.len()));
    let functions = ends_of_fn.filter(|(at, _)| !file.text[..*at].ends_with(is_part_of_a_word));
    functions.filter_map(|(at, name)| finding(file, at, &file.text[name..])).collect()
}

fn is_part_of_a_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn finding(file: &File, at: usize, from_name: &str) -> Option<String> {
    let name: String = from_name.chars().take_while(|c| is_part_of_a_word(*c)).collect();
    let list = parameters(&from_name[name.len()..])?;
    let is_taken_apart = |parameter: &&str| parameter.trim_start().trim_start_matches(['&', ' ']).starts_with('(');
    let tuple = (!name.is_empty()).then(|| list.into_iter().find(is_taken_apart)).flatten()?;
    let line = file.text[..at].lines().count().max(1);
    let pattern = tuple.trim().split(':').next().unwrap_or_default();
    Some(format!("{}:{line}: fn {name} takes {pattern} apart: name its parameters, or make them a struct", file.path))
}

/// What stands between the brackets behind a function's name and its generics, at the commas.
fn parameters(behind_name: &str) -> Option<Vec<&str>> {
    let behind = match behind_name.strip_prefix('<') {
        Some(generics) => &generics[closing(generics)? + 1..],
        None => behind_name,
    };
    let list = behind.strip_prefix('(')?;
    let list = &list[..closing(list)?];
    let mut found = Vec::new();
    let mut rest = list;
    while let Some(comma) = first(rest, |c| c == ',') {
        found.push(&rest[..comma]);
        rest = &rest[comma + 1..];
    }
    found.push(rest);
    Some(found)
}

/// Where the bracket is that closes what was opened before.
fn closing(text: &str) -> Option<usize> {
    first(text, |c| matches!(c, ')' | '>' | ']' | '}'))
}

/// The first such character that is in no brackets.
fn first(text: &str, is_it: impl Fn(char) -> bool) -> Option<usize> {
    let mut depth = 0;
    let mut before = ' ';
    for (at, c) in text.char_indices() {
        let is_arrow = c == '>' && before == '-';
        if depth == 0 && !is_arrow && is_it(c) {
            return Some(at);
        }
        match c {
            '(' | '<' | '[' | '{' => depth += 1,
            ')' | '>' | ']' | '}' if !is_arrow => depth -= 1,
            _ => {}
        }
        before = c;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_one(parameters: &str) -> Vec<String> {
        let text = ["//! X.\npub f", "n of", parameters, " {}\n"].concat();
        findings(&File { path: "crates/net/src/pool.rs".into(), text })
    }

    // promise workspace: no function takes a tuple apart in its list of parameters
    #[test]
    fn a_tuple_that_is_taken_apart_is_found() {
        assert_eq!(
            check_one("(a: u8, (b, c): (u8, u8))"),
            ["crates/net/src/pool.rs:2: fn of takes (b, c) apart: name its parameters, or make them a struct"]
        );
        for taken in
            ["(&(a, b): &(u8, u8))", "<F: Fn(u8) -> u8>(f: F, (a, b): (u8, u8))", "(\n    (a, b): (u8, u8),\n)"]
        {
            assert_eq!(check_one(taken).len(), 1, "{taken}");
        }
    }

    #[test]
    fn names_closures_and_types_are_free() {
        for free in [
            "()",
            "(pair: (u8, u8))",
            "(f: impl Fn((u8, u8)) -> u8, b: u8)",
            "<F: Fn(u8) -> u8>(f: F, at: BTreeMap<u8, (u8, u8)>)",
            "(a: u8) { b.map(|(c, d): (u8, u8)| c + d) }",
        ] {
            assert_eq!(check_one(free), Vec::<String>::new(), "{free}");
        }
    }
}
