//! `kip top`: a screen of all procs, drawn anew every second.
//!
//! Asks what `kip ps` asks, so it wakes no proc and counts as activity of none. [`compare`] makes
//! one picture of two answers, [`look`] knows what the user wants to see of it, [`layout`] makes
//! lines of it, [`screen`] owns the terminal and gives it back however this ends.

mod compare;
mod layout;
mod look;
mod screen;

use crate::output::{print, print_json};
use clap::Args;
use compare::DaemonSample;
pub use compare::cpu_percent;
use kip_client::Client;
use layout::{ScreenSize, Style};
use look::{KeyPress, Look};
use screen::Screen;
use std::io::IsTerminal;
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;

#[derive(Debug, Args)]
pub struct TopArgs {
    /// Seconds from one screen to the next
    #[arg(short, long, value_name = "SECS", value_parser = parse_delay, default_value = "1")]
    pub delay: Duration,
    /// Print one screen without control codes and end; the default if the output is no terminal
    #[arg(long)]
    pub once: bool,
}

fn parse_delay(s: &str) -> Result<Duration, String> {
    match s.parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("write seconds, from 0.1 to 3600".to_owned()),
    }
}

/// CPU is told of what was used in this long, at most, before a single screen.
const FIRST_SPAN: Duration = Duration::from_secs(1);
/// What Ctrl-C is for a terminal that makes no signal of it.
const CTRL_C: u8 = 3;

/// Shows procs until the user has seen enough; one picture where the output is no terminal.
pub async fn top(client: &Client, args: &TopArgs, json: bool) -> anyhow::Result<()> {
    let watched = std::io::stdout().is_terminal() && screen::takes_control_codes();
    if !args.once && !json && watched {
        return watch(client, args.delay).await;
    }
    let first = DaemonSample::ask(client).await?;
    tokio::time::sleep(args.delay.min(FIRST_SPAN)).await;
    let view = compare::compare(&first, &DaemonSample::ask(client).await?);
    if json {
        return print_json(&view);
    }
    // A terminal's lines are as long as it is wide; a script gets all there is.
    let size = ScreenSize { rows: None, columns: screen::size().map(|(columns, _)| columns) };
    print(&(layout::lines(&view, None, size, Style::Plain).join("\n") + "\n"))
}

async fn watch(client: &Client, delay: Duration) -> anyhow::Result<()> {
    // Before the terminal is touched: a daemon that does not answer is told of on the usual screen.
    let mut last = DaemonSample::ask(client).await?;
    let mut view = compare::compare(&last, &last);
    let (mut interrupt, mut terminate, mut hangup, mut resized) = (
        signal(SignalKind::interrupt())?,
        signal(SignalKind::terminate())?,
        signal(SignalKind::hangup())?,
        signal(SignalKind::window_change())?,
    );
    let mut keys = std::io::stdin().is_terminal().then(tokio::io::stdin);
    let mut screen = Screen::take()?;
    let mut look = Look::default();
    let mut next = Instant::now() + delay.min(FIRST_SPAN);
    loop {
        // Procs may be fewer than they were.
        look.above = look.above.min(view.procs.len().saturating_sub(screen.room(&view)));
        screen.draw(&view, look)?;
        let mut pressed = [0; 16];
        tokio::select! {
            n = read(&mut keys, &mut pressed) => match n {
                0 => keys = None,
                n => for key in look::keys(&pressed[..n]) {
                    if key == KeyPress::Quit {
                        return Ok(());
                    }
                    look = look.after(key, view.procs.len(), screen.room(&view));
                },
            },
            _ = interrupt.recv() => return Ok(()),
            _ = terminate.recv() => return Ok(()),
            _ = hangup.recv() => return Ok(()),
            _ = resized.recv() => {}
            () = tokio::time::sleep_until(next) => {
                let answer = DaemonSample::ask(client).await?;
                view = compare::compare(&last, &answer);
                last = answer;
                next = Instant::now() + delay;
            }
        }
    }
}

/// How many keys were pressed; 0 when there will be none any more. Without a keyboard it never
/// returns.
async fn read(keys: &mut Option<tokio::io::Stdin>, pressed: &mut [u8]) -> usize {
    match keys {
        Some(keys) => keys.read(pressed).await.unwrap_or(0),
        None => std::future::pending().await,
    }
}
