//! Where something stands in a file, and what is wrong there.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// A place in a file, for people: both numbers count from 1, columns are characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourcePosition {
    /// The file as it was named.
    pub file: Arc<str>,
    /// Line.
    pub line: usize,
    /// Column.
    pub column: usize,
}

impl SourcePosition {
    /// The place `offset` bytes into `text`.
    pub fn at(path: &Path, text: &str, offset: usize) -> SourcePosition {
        let mut end = offset.min(text.len());
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let before = &text[..end];
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
        SourcePosition { file: path.display().to_string().into(), line, column }
    }
}

impl fmt::Display for SourcePosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.line, self.column)
    }
}

/// One mistake in a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {message}")]
pub struct Fault {
    /// Where.
    pub place: SourcePosition,
    /// What is wrong and what to write.
    pub message: String,
}

impl Fault {
    /// A mistake at `place`.
    pub fn new(place: &SourcePosition, message: impl Into<String>) -> Fault {
        Fault { place: place.clone(), message: message.into() }
    }
}

/// All that is wrong with a file; never empty.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(Fault::to_string).collect::<Vec<_>>().join("\n"))]
pub struct Faults(pub Vec<Fault>);

impl From<Fault> for Faults {
    fn from(fault: Fault) -> Faults {
        Faults(vec![fault])
    }
}

/// How much it matters that Kip lacks something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// The program does not notice.
    Harmless,
    /// It would run as something else than was described.
    Changes,
}

/// What a file asks for and Kip lacks, or does in another way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// Where it is asked for.
    pub place: SourcePosition,
    /// How much that matters.
    pub weight: Weight,
    /// What, why and what happens instead.
    pub message: String,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}

/// `; did you mean ..?` or the whole list: what was probably meant by `word`.
pub fn meant<'a>(word: &str, known: impl Iterator<Item = &'a str> + Clone) -> String {
    match kip_types::nearest(word, known.clone()) {
        Some(nearest) => format!("did you mean {nearest}?"),
        None => format!("known are {}", known.collect::<Vec<_>>().join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_lines_and_characters_from_one() {
        let at = |offset| SourcePosition::at(Path::new("f"), "ab\näöx\n", offset).to_string();
        assert_eq!([at(0), at(3), at(7), at(999)], ["f:1:1", "f:2:1", "f:2:3", "f:3:1"]);
    }

    #[test]
    fn the_nearest_key_is_named() {
        let known = ["port", "park-after", "env", "env-file"];
        assert_eq!(meant("ports", known.into_iter()), "did you mean port?");
        assert_eq!(meant("park_after", known.into_iter()), "did you mean park-after?");
        assert_eq!(meant("zzzzzzzzzzzz", known.into_iter()), "known are port, park-after, env, env-file");
    }
}
