//! Files of environment variables, as docker has them: `NAME=VALUE` a line, the value as it stands;
//! `NAME` alone takes the value that it has here, if any; empty lines and those that begin with `#`
//! say nothing.

use anyhow::{Context, bail};
use std::collections::BTreeMap;
use std::path::Path;

/// Adds what a file says; what was there under the same name goes.
pub fn read(path: &Path, into: &mut BTreeMap<String, String>) -> anyhow::Result<()> {
    let bytes =
        std::fs::read(path).with_context(|| format!("the environment file {} cannot be read", path.display()))?;
    let own = |name: &str| std::env::var(name).ok();
    parse(&bytes, own, into).with_context(|| format!("the environment file {}", path.display()))
}

fn parse(
    bytes: &[u8],
    own: impl Fn(&str) -> Option<String>,
    into: &mut BTreeMap<String, String>,
) -> anyhow::Result<()> {
    // Where an editor says what encoding it is.
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    for (number, line) in (1..).zip(bytes.split(|b| *b == b'\n')) {
        let Ok(line) = std::str::from_utf8(line) else { bail!("line {number}: it is not UTF-8") };
        let line = line.strip_suffix('\r').unwrap_or(line).trim_start();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (name, value) = match line.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (line.trim_end(), own(line.trim_end())),
        };
        // Never the value: it may be a secret.
        if name.is_empty() {
            bail!("line {number}: there is no name before `=`: write NAME=VALUE");
        }
        if name.contains(char::is_whitespace) {
            bail!("line {number}: the name {name:?} has white space in it: write NAME=VALUE, nothing before the name");
        }
        if name.contains('\0') || value.as_ref().is_some_and(|value| value.contains('\0')) {
            bail!("line {number}: it contains a NUL byte");
        }
        if let Some(value) = value {
            into.insert(name.to_owned(), value);
        }
    }
    Ok(())
}

/// A variable of the command line; a name alone takes the value that it has here.
pub fn parse_env(s: &str) -> Result<(String, String), String> {
    match s.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        None if !s.is_empty() => match std::env::var(s) {
            Ok(value) => Ok((s.to_owned(), value)),
            Err(_) => Err(format!("{s} has no value here: write NAME=VALUE")),
        },
        _ => Err("write NAME=VALUE".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &[u8]) -> Result<Vec<(String, String)>, String> {
        let mut all = BTreeMap::from([("A".to_owned(), "before".to_owned())]);
        let own = |name: &str| (name == "OWN").then(|| "mine".to_owned());
        parse(text, own, &mut all).map_err(|e| e.to_string())?;
        Ok(all.into_iter().collect())
    }

    #[test]
    fn lines_are_taken_as_they_stand() {
        let text = b"\xef\xbb\xbf# a comment\n\nA=1=2\r\n  B=\"x y\" # z \nOWN\nNONE\nC=";
        let all = parsed(text).unwrap();
        let all: Vec<_> = all.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        assert_eq!(all, [("A", "1=2"), ("B", "\"x y\" # z "), ("C", ""), ("OWN", "mine")]);
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line_and_without_values() {
        for (text, line) in [(&b"A=1\n=secret"[..], 2), (b"\n\nA B=secret", 3), (b"A=sec\0ret", 1), (b"A=\xff", 1)] {
            let said = parsed(text).unwrap_err();
            assert!(said.starts_with(&format!("line {line}: ")) && !said.contains("sec"), "{said}");
        }
    }
}
