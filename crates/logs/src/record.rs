//! One record of a log, and the names of its files.

/// Most files of one log.
pub(crate) const MAX_FILES: usize = kip_types::spec::MOST_LOG_FILES as usize;

/// The largest record: text, time, two blanks, stream, newline.
pub(crate) const MAX_RECORD: usize = crate::MAX_TEXT + 32;

/// Where a line comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stream {
    /// The program's standard output.
    Stdout,
    /// The program's standard error.
    Stderr,
    /// Kip itself, about the log or the program.
    Kip,
}

impl Stream {
    pub(crate) fn letter(self, complete: bool) -> u8 {
        match (self, complete) {
            (Stream::Stdout, true) => b'o',
            (Stream::Stdout, false) => b'O',
            (Stream::Stderr, true) => b'e',
            (Stream::Stderr, false) => b'E',
            (Stream::Kip, _) => b'k',
        }
    }
}

/// One record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogRecord {
    /// When it was read from the program, milliseconds since the epoch.
    pub at_ms: u64,
    /// Where it comes from.
    pub stream: Stream,
    /// A newline followed; if not, the line goes on in the next one of the same stream.
    pub complete: bool,
    /// The line without its newline; any bytes.
    pub text: Vec<u8>,
}

/// The file name of the `age`th file, 0 being the current one.
pub(crate) fn file_name(age: usize) -> String {
    if age == 0 { "current".to_owned() } else { format!("current.{age}") }
}

/// Appends one record to a batch.
pub(crate) fn encode(batch: &mut Vec<u8>, at_ms: u64, stream: Stream, complete: bool, text: &[u8]) {
    batch.extend_from_slice(at_ms.to_string().as_bytes());
    batch.extend_from_slice(&[b' ', stream.letter(complete), b' ']);
    batch.extend_from_slice(text);
    batch.push(b'\n');
}

/// Understands a record without its newline.
pub(crate) fn parse(record: &[u8]) -> Option<LogRecord> {
    let digits = record.iter().position(|b| *b == b' ')?;
    let at_ms = std::str::from_utf8(&record[..digits]).ok()?.parse().ok()?;
    let [b' ', letter, b' ', text @ ..] = &record[digits..] else { return None };
    let (stream, complete) = match letter {
        b'o' => (Stream::Stdout, true),
        b'O' => (Stream::Stdout, false),
        b'e' => (Stream::Stderr, true),
        b'E' => (Stream::Stderr, false),
        b'k' => (Stream::Kip, true),
        _ => return None,
    };
    Some(LogRecord { at_ms, stream, complete, text: text.to_owned() })
}
