//! Environment files, and variables in Compose files.
//!
//! One variable a line, `NAME=VALUE`; `NAME` alone takes the caller's own value. In a `kip.toml`
//! values are taken as they stand, as by `kip run --env-file`; Compose takes quotes and comments
//! off and replaces references to variables.

use crate::document::Lookup;
use std::path::Path;

/// The value of a variable; none if it is not set.
type VariableValue = Option<String>;

/// An environment file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum EnvFileError {
    /// It cannot be read.
    #[error("the environment file {file} cannot be read: {source}")]
    Read {
        /// The file.
        file: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A line makes no sense.
    #[error("{file}:{line}: {message}")]
    Line {
        /// The file.
        file: String,
        /// Which line, from 1.
        line: usize,
        /// What is wrong.
        message: String,
    },
}

/// Reads `path`. With `expand`, quotes and comments are taken off and references in values
/// replaced, except between single quotes. `unset` hears of variables that have no value anywhere.
pub fn read(
    path: &Path,
    lookup: Lookup<'_>,
    expand: bool,
    unset: &dyn Fn(&str),
) -> Result<Vec<(String, String)>, EnvFileError> {
    let file = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|source| EnvFileError::Read { file: file.clone(), source })?;
    let mut all: Vec<(String, String)> = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let bad = |message: String| EnvFileError::Line { file: file.clone(), line: at + 1, message };
        let line = if expand { line.trim() } else { line.trim_start() };
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let line = line.strip_prefix("export ").filter(|_| expand).unwrap_or(line);
        let (name, value) = match line.split_once(|c| c == '=' || expand && c == ':') {
            Some((name, value)) => (name.trim(), Some(value)),
            None => (line.trim(), None),
        };
        if name.is_empty() || name.contains(char::is_whitespace) {
            return Err(bad(format!("{name:?} is no variable's name: write NAME=VALUE")));
        }
        let Some(value) = value else {
            match lookup(name) {
                Some(value) => all.push((name.to_owned(), value)),
                None => unset(name),
            }
            continue;
        };
        if !expand {
            all.push((name.to_owned(), value.to_owned()));
            continue;
        }
        let (value, literal) = unquote(value.trim()).map_err(bad)?;
        let value = match literal {
            false => {
                // Variables of earlier lines may be referred to; the caller's own go first.
                let known = |key: &str| {
                    lookup(key).or_else(|| all.iter().rev().find(|(n, _)| n == key).map(|(_, v)| v.clone()))
                };
                interpolate(&value, &known, unset).map_err(bad)?
            }
            true => value,
        };
        all.push((name.to_owned(), value));
    }
    Ok(all)
}

/// The value without its quotes or its comment; true if it stood between single ones.
fn unquote(text: &str) -> Result<(String, bool), String> {
    let quote = match text.chars().next() {
        Some(quote @ ('"' | '\'')) => quote,
        _ => {
            let end = text.find(" #").unwrap_or(text.len());
            return Ok((text[..end].trim_end().to_owned(), false));
        }
    };
    let mut value = String::new();
    let mut letters = text[1..].chars();
    while let Some(letter) = letters.next() {
        match letter {
            l if l == quote => return Ok((value, quote == '\'')),
            '\\' if quote == '"' => match letters.next() {
                Some('n') => value.push('\n'),
                Some('t') => value.push('\t'),
                Some('r') => value.push('\r'),
                Some('$') => value.push_str("$$"),
                Some(other) => value.push(other),
                None => break,
            },
            l => value.push(l),
        }
    }
    Err(format!("the quote {quote} is not closed"))
}

/// Replaces `$NAME`, `${NAME}`, `${NAME:-default}`, `${NAME-default}`, `${NAME:?error}`,
/// `${NAME?error}`, `${NAME:+other}` and `${NAME+other}`; `$$` is a dollar sign. `unset` hears of
/// those for which nothing was put in because they have no value.
pub fn interpolate(text: &str, lookup: &dyn Fn(&str) -> VariableValue, unset: &dyn Fn(&str)) -> Result<String, String> {
    let plain = |name: &str| {
        lookup(name).unwrap_or_else(|| {
            unset(name);
            String::new()
        })
    };
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            out.push('$');
            rest = after;
        } else if let Some(after) = rest.strip_prefix('{') {
            let end =
                closing(after).ok_or_else(|| format!("${{ in {text:?} is not closed: write $$ for a dollar sign"))?;
            out.push_str(&braced(&after[..end], lookup, unset)?);
            rest = &after[end + 1..];
        } else {
            let end = name_end(rest);
            if end == 0 {
                return Err(format!("a $ in {text:?} refers to nothing: write $$ for a dollar sign"));
            }
            out.push_str(&plain(&rest[..end]));
            rest = &rest[end..];
        }
    }
    out.push_str(rest);
    Ok(out)
}

fn name_end(text: &str) -> usize {
    let starts = text.chars().next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
    if !starts {
        return 0;
    }
    text.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(text.len())
}

/// Where the brace that is open here closes.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 0usize;
    for (at, letter) in text.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' if depth == 0 => return Some(at),
            '}' => depth -= 1,
            _ => {}
        }
    }
    None
}

fn braced(inner: &str, lookup: &dyn Fn(&str) -> VariableValue, unset: &dyn Fn(&str)) -> Result<String, String> {
    let end = name_end(inner);
    let (name, rest) = inner.split_at(end);
    if name.is_empty() {
        return Err(format!("${{{inner}}} names no variable"));
    }
    let (colon, rest) = match rest.strip_prefix(':') {
        Some(rest) => (true, rest),
        None => (false, rest),
    };
    // With a colon an empty value is as none.
    let value = lookup(name).filter(|value| !(colon && value.is_empty()));
    let mut letters = rest.chars();
    let operator = letters.next();
    let word = letters.as_str();
    match (operator, value) {
        (None, Some(value)) if !colon => Ok(value),
        (None, None) if !colon => {
            unset(name);
            Ok(String::new())
        }
        (Some('-'), Some(value)) | (Some('?'), Some(value)) => Ok(value),
        (Some('-'), None) => interpolate(word, lookup, unset),
        (Some('?'), None) => {
            let why = interpolate(word, lookup, unset)?;
            Err(format!("the variable {name} is needed{}{why}", if why.is_empty() { "" } else { ": " }))
        }
        (Some('+'), Some(_)) => interpolate(word, lookup, unset),
        (Some('+'), None) => Ok(String::new()),
        _ => Err(format!("${{{inner}}} is not understood: write ${{{name}}} or ${{{name}:-default}}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_replaced_as_compose_does() {
        let lookup = |name: &str| match name {
            "A" => Some("a".to_owned()),
            "E" => Some(String::new()),
            _ => None,
        };
        let told = std::cell::RefCell::new(Vec::new());
        let to = |text: &str| interpolate(text, &lookup, &|name| told.borrow_mut().push(name.to_owned())).unwrap();
        assert_eq!(to("x$A-${A}y"), "xa-ay");
        assert_eq!(to("${N:-d}${E:-d}${E-d}${N-${A:-z}}"), "dda");
        assert_eq!(to("${A:+yes}${N:+no}${E+set}"), "yesset");
        assert_eq!(to("cost: 5$$"), "cost: 5$");
        assert_eq!(*told.borrow(), Vec::<String>::new());
        assert_eq!((to("[$N]"), to("[${M}]")), ("[]".to_owned(), "[]".to_owned()));
        assert_eq!(*told.borrow(), ["N", "M"], "what has no value is told");
        for bad in ["${A", "$", "${N:?say it}", "${}", "${A!x}", "${A:}"] {
            assert!(interpolate(bad, &lookup, &|_| ()).is_err(), "{bad}");
        }
        assert!(interpolate("${N:?say it}", &lookup, &|_| ()).unwrap_err().ends_with("needed: say it"));
    }

    #[test]
    fn environment_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.env");
        std::fs::write(&path, "# c\n\nA=1 # not\nexport B=\"x\\ny\"\nC='$A'\nD=$A$H\nH\nNOT_THERE\nI: i=j\n").unwrap();
        let lookup = |name: &str| (name == "H").then(|| "h".to_owned());
        let told = std::cell::RefCell::new(Vec::new());
        let pairs = |expand| {
            let all = read(&path, &lookup, expand, &|name| told.borrow_mut().push(name.to_owned())).unwrap();
            all.into_iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>()
        };
        assert_eq!(pairs(true), ["A=1", "B=x\ny", "C=$A", "D=1h", "H=h", "I=i=j"]);
        assert_eq!(*told.borrow(), ["NOT_THERE"]);
        std::fs::write(&path, "# c\n\nA=1 # so\nB=\"x y\"\nH\n").unwrap();
        assert_eq!(pairs(false), ["A=1 # so", "B=\"x y\"", "H=h"], "as docker has them");
        for (text, expand, name) in
            [("A=1\nB C=2\n", false, "B C"), ("A=1\nB: c\n", false, "B: c"), ("#\nB c\n", true, "B c")]
        {
            std::fs::write(&path, text).unwrap();
            let told = read(&path, &lookup, expand, &|_| ()).unwrap_err().to_string();
            assert!(told.ends_with(&format!("x.env:2: {name:?} is no variable's name: write NAME=VALUE")), "{told}");
        }
        assert!(read(&dir.path().join("none"), &lookup, false, &|_| ()).is_err());
    }
}
