//! The user's own terminal: its size, and the raw mode in which each key goes to a program inside.

use anyhow::bail;
use kip_types::api::TerminalSize;
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};
use std::io;

/// The size of the terminal that standard output or input is; refused where neither is one.
pub fn size() -> anyhow::Result<TerminalSize> {
    let size = match (tcgetwinsize(io::stdout()), tcgetwinsize(io::stdin())) {
        (Ok(size), _) | (_, Ok(size)) => size,
        _ => bail!("-t: neither standard output nor standard input is a terminal: leave -t out"),
    };
    Ok(TerminalSize { rows: size.ws_row, columns: size.ws_col })
}

/// Keys go to the program as they come, and the terminal shows nothing by itself. Undone when this
/// is dropped.
#[derive(Debug)]
pub struct Raw(Option<Termios>);

impl Raw {
    /// Whether standard input is a terminal.
    pub fn is_in_place(&self) -> bool {
        self.0.is_some()
    }

    /// Begins, if standard input is a terminal.
    pub fn begin() -> io::Result<Raw> {
        if !isatty(io::stdin()) {
            return Ok(Raw(None));
        }
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Raw(Some(before)))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            // What was typed and not read is the shell's.
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, before);
        }
    }
}
