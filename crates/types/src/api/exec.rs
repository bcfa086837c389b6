//! `kip exec` and `kip attach`: what is run in a proc, and the frames in which its input and output
//! travel.

use super::Refusal;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One frame of an exec: 1 byte channel, 4 bytes length (big endian), then at most [`FRAME_MAX`]
/// bytes.
///
/// Channels: 0 stdin (an empty frame is end of file), 1 stdout, 2 stderr, 3 end: JSON [`ExecEnd`],
/// 4 a new size of the terminal, [`TerminalSize::to_frame`]. A terminal has only standard output.
/// An empty frame of channel 1 or 2 carries nothing; the daemon sends one now and then to learn
/// whether its client is still there.
pub const FRAME_HEADER: usize = 5;

/// Most bytes of payload in one frame.
pub const FRAME_MAX: usize = 1 << 20;

/// The name of the frame protocol in the `Upgrade` header of an exec.
pub const EXEC_PROTOCOL: &str = "kip-frames";

/// Channel of the program's standard input.
pub const CHANNEL_STDIN: u8 = 0;
/// Channel of the program's standard output.
pub const CHANNEL_STDOUT: u8 = 1;
/// Channel of the program's standard error.
pub const CHANNEL_STDERR: u8 = 2;
/// Channel of the last frame.
pub const CHANNEL_END: u8 = 3;
/// Channel of the client's news that its terminal has another size.
pub const CHANNEL_SIZE: u8 = 4;

/// The size of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct TerminalSize {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub columns: u16,
}

impl TerminalSize {
    /// The payload of a frame: lines and characters in a line, 2 bytes each, big endian.
    pub fn to_frame(self) -> [u8; 4] {
        let [[a, b], [c, d]] = [self.rows.to_be_bytes(), self.columns.to_be_bytes()];
        [a, b, c, d]
    }

    /// Reads such a payload; none if it is of another length.
    pub fn from_frame(payload: &[u8]) -> Option<TerminalSize> {
        let [a, b, c, d] = *payload else { return None };
        Some(TerminalSize { rows: u16::from_be_bytes([a, b]), columns: u16::from_be_bytes([c, d]) })
    }
}

/// `POST /v1/procs/NAME/exec`, answered with 101 and frames both ways.
#[derive(Debug, Clone, Default, JsonSchema, Serialize, Deserialize)]
pub struct ExecRequest {
    /// Program and arguments.
    pub command: Vec<String>,
    /// Additional environment.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// User that it runs as, or USER:GROUP, names or numbers of the proc's own files; the proc's
    /// own if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Working directory inside; the proc's own if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    /// It runs on a terminal of this size, in a session of its own. Such a program sleeps with its
    /// proc and keeps it awake only while its client types.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminal: Option<TerminalSize>,
    /// It runs on without a client: standard input is empty, and what it writes is in the proc's
    /// logs. The answer ends as soon as the program runs.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub detach: bool,
}

/// `POST /v1/procs/NAME/attach`, answered with 101 and frames both ways, as an exec is. What the
/// proc's own program writes comes from then on, and its end; the client may go at any time, and
/// the program runs on.
#[derive(Debug, Clone, Default, JsonSchema, Serialize, Deserialize)]
pub struct AttachRequest {
    /// The client's terminal has this size. The proc's own gets it, if it has one, and the proc is
    /// woken for that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminal: Option<TerminalSize>,
    /// First comes what the program has written since its start: the last 64 KiB of a terminal,
    /// else all lines that are in the log.
    #[serde(default)]
    pub since_start: bool,
    /// The client's end of file is the program's. A terminal has none.
    #[serde(default)]
    pub ends_input: bool,
}

/// The last frame of an exec, and of an attachment.
#[derive(Debug, Clone, JsonSchema, Serialize, Deserialize)]
pub struct ExecEnd {
    /// The code `kip exec` exits with: the program's own, or 128 plus the signal.
    pub code: i32,
    /// Why it could not be run at all.
    pub refusal: Option<Refusal>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_request_is_one_that_an_older_daemon_reads() {
        let request = ExecRequest { command: vec!["ls".into()], ..ExecRequest::default() };
        assert_eq!(serde_json::to_string(&request).unwrap(), r#"{"command":["ls"],"env":{}}"#);
    }

    #[test]
    fn the_size_of_a_terminal_travels_in_four_bytes() {
        let size = TerminalSize { rows: 300, columns: 77 };
        assert_eq!(TerminalSize::from_frame(&size.to_frame()), Some(size));
        assert_eq!(TerminalSize::from_frame(&[1, 2, 3]), None);
    }
}
