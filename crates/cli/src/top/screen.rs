//! The terminal while `kip top` has it.

use super::layout::{self, ScreenSize, Style};
use super::look::Look;
use crate::output;
use kip_types::api::TopView;
use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use std::io::{self, Write};

/// The alternate screen, and no cursor: console_codes(4), xterm's ctlseqs.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";
/// A terminal that does not tell its size has the size of a VT100.
const USUAL: (usize, usize) = (80, 24);

/// Columns and rows of the terminal that is stdout; none if it is none.
pub fn size() -> Option<(usize, usize)> {
    let size = tcgetwinsize(io::stdout()).ok()?;
    let told = (usize::from(size.ws_col), usize::from(size.ws_row));
    Some(if told.0 == 0 || told.1 == 0 { USUAL } else { told })
}

/// Whether the terminal can do more than print.
pub fn takes_control_codes() -> bool {
    std::env::var_os("TERM").is_some_and(|term| !term.is_empty() && term != "dumb")
}

/// The terminal: keys come at once and are not echoed, the screen is another. Dropped, all is as it
/// was.
pub struct Screen {
    /// How stdin was; none if it is no terminal.
    before: Option<Termios>,
    style: Style,
}

impl Screen {
    /// Takes it.
    pub fn take() -> anyhow::Result<Screen> {
        let before = tcgetattr(io::stdin()).ok();
        // https://no-color.org
        let plain = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
        let screen = Screen { before, style: if plain { Style::Plain } else { Style::Highlighted } };
        if let Some(before) = &screen.before {
            let mut ours = before.clone();
            // Without ISIG Ctrl-Z cannot leave the shell with this screen; Ctrl-C comes as a key.
            ours.local_modes -= LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
            ours.special_codes[SpecialCodeIndex::VMIN] = 1;
            ours.special_codes[SpecialCodeIndex::VTIME] = 0;
            tcsetattr(io::stdin(), OptionalActions::Now, &ours)?;
        }
        output::print(ENTER)?;
        Ok(screen)
    }

    /// How many procs it shows at once.
    pub fn room(&self, view: &TopView) -> usize {
        layout::room_for(view.procs.len(), size().unwrap_or(USUAL).1)
    }

    /// Draws over what is there, line by line, so that nothing flickers. Each is cleared before it
    /// is written: at the right edge the cursor is still on the last character.
    pub fn draw(&mut self, view: &TopView, look: Look) -> anyhow::Result<()> {
        let (columns, rows) = size().unwrap_or(USUAL);
        let mut lines =
            layout::lines(view, Some(look), ScreenSize { rows: Some(rows), columns: Some(columns) }, self.style);
        lines.resize(rows, String::new());
        let lines: Vec<String> = lines.into_iter().map(|line| format!("\x1b[2K{line}")).collect();
        output::print(&format!("\x1b[H{}", lines.join("\r\n")))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A terminal that is gone needs nothing any more.
        let mut out = io::stdout().lock();
        let _ = out.write_all(LEAVE.as_bytes()).and_then(|()| out.flush());
        if let Some(before) = &self.before {
            let _ = tcsetattr(io::stdin(), OptionalActions::Flush, before);
        }
    }
}
