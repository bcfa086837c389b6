//! Reads SPDX licence expressions (SPDX 2.3, annex D) and says whether an allowlist satisfies them.
//!
//! `OR` needs one side, `AND` both; `A WITH B` is one licence of its own; Cargo's old
//! `MIT/Apache-2.0` is an `OR`.

/// An expression that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable(pub String);

/// Whether `expression` is satisfied by licences for which `allowed` says yes.
pub fn satisfied(expression: &str, allowed: &dyn Fn(&str) -> bool) -> Result<bool, Unreadable> {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let tokens: Vec<&str> = spaced.split_whitespace().collect();
    let mut parser = Parser { tokens: &tokens, allowed };
    match parser.any_of() {
        Some(answer) if parser.tokens.is_empty() => Ok(answer),
        _ => Err(Unreadable(expression.to_owned())),
    }
}

struct Parser<'a> {
    tokens: &'a [&'a str],
    allowed: &'a dyn Fn(&str) -> bool,
}

impl Parser<'_> {
    fn take(&mut self, wanted: &str) -> bool {
        let found = self.tokens.first() == Some(&wanted);
        if found {
            self.tokens = &self.tokens[1..];
        }
        found
    }

    fn next(&mut self) -> Option<String> {
        let (first, rest) = self.tokens.split_first()?;
        self.tokens = rest;
        (!["AND", "OR", "WITH", "(", ")"].contains(first)).then(|| (*first).to_owned())
    }

    fn any_of(&mut self) -> Option<bool> {
        let mut answer = self.all_of()?;
        while self.take("OR") {
            answer |= self.all_of()?;
        }
        Some(answer)
    }

    fn all_of(&mut self) -> Option<bool> {
        let mut answer = self.one()?;
        while self.take("AND") {
            answer &= self.one()?;
        }
        Some(answer)
    }

    fn one(&mut self) -> Option<bool> {
        if self.take("(") {
            let answer = self.any_of()?;
            return self.take(")").then_some(answer);
        }
        let mut licence = self.next()?;
        if self.take("WITH") {
            licence = format!("{licence} WITH {}", self.next()?);
        }
        Some((self.allowed)(&licence))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(expression: &str) -> Result<bool, Unreadable> {
        satisfied(expression, &|l| ["MIT", "Apache-2.0", "Unicode-3.0", "Apache-2.0 WITH LLVM-exception"].contains(&l))
    }

    #[test]
    fn alternatives_need_one_side_and_conjunctions_both() {
        assert_eq!(ask("MIT"), Ok(true));
        assert_eq!(ask("GPL-3.0-only"), Ok(false));
        assert_eq!(ask("GPL-3.0-only OR MIT"), Ok(true));
        assert_eq!(ask("GPL-3.0-only AND MIT"), Ok(false));
        assert_eq!(ask("MIT/GPL-3.0-only"), Ok(true));
        assert_eq!(ask("(MIT OR GPL-3.0-only) AND Unicode-3.0"), Ok(true));
        assert_eq!(ask("(MIT OR Apache-2.0) AND GPL-3.0-only"), Ok(false));
        assert_eq!(ask("GPL-3.0-only AND MIT OR Apache-2.0"), Ok(true), "AND binds closer");
        assert_eq!(ask("Apache-2.0 WITH LLVM-exception"), Ok(true));
        assert_eq!(ask("MIT WITH Some-exception"), Ok(false));
    }

    #[test]
    fn nonsense_is_no_licence() {
        for bad in ["", "MIT MIT", "(MIT", "MIT OR", "AND MIT", "MIT)", "MIT WITH"] {
            assert_eq!(ask(bad), Err(Unreadable(bad.to_owned())), "{bad:?}");
        }
    }
}
