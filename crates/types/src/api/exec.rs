//! `kip exec`: what is run in a proc, and the frames in which its input and output travel.

use super::Refusal;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One frame of an exec: 1 byte channel, 4 bytes length (big endian), then at most [`FRAME_MAX`] bytes.
///
/// Channels: 0 stdin (an empty frame is end of file), 1 stdout, 2 stderr, 3 end: JSON [`ExecEnd`]. An empty frame of
/// channel 1 or 2 carries nothing; the daemon sends one now and then to learn whether its client is still there.
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

/// `POST /v1/procs/NAME/exec`, answered with 101 and frames both ways.
#[derive(Debug, Clone, JsonSchema, Serialize, Deserialize)]
pub struct ExecRequest {
    /// Program and arguments.
    pub command: Vec<String>,
    /// Additional environment.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
}

/// The last frame of an exec.
#[derive(Debug, Clone, JsonSchema, Serialize, Deserialize)]
pub struct ExecEnd {
    /// The code `kip exec` exits with: the program's own, or 128 plus the signal.
    pub code: i32,
    /// Why it could not be run at all.
    pub refusal: Option<Refusal>,
}
