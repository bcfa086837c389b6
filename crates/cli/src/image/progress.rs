//! How far a pull is, on a terminal: a bar for each layer.

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use kip_types::image::PullProgress;
use std::collections::HashMap;
use std::time::Duration;

/// Digits of a layer's digest that are shown.
const DIGITS: usize = 12;
const TICK: Duration = Duration::from_millis(200);

/// Draws on stderr; nothing if that is no terminal.
pub struct Progress {
    all: MultiProgress,
    bars: HashMap<String, ProgressBar>,
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("a constant template")
}

impl Progress {
    pub fn new() -> Progress {
        Progress { all: MultiProgress::new(), bars: HashMap::new() }
    }

    fn bar(&mut self, layer: &str) -> &ProgressBar {
        let all = &self.all;
        self.bars.entry(layer.to_owned()).or_insert_with(|| {
            let bar = all.add(ProgressBar::new(0));
            let digits = layer.trim_start_matches("sha256:").chars().take(DIGITS).collect::<String>();
            bar.set_prefix(digits);
            bar
        })
    }

    pub fn report(&mut self, progress: &PullProgress) {
        match progress {
            PullProgress::Here { layer } => {
                let bar = self.bar(layer);
                bar.set_style(style("{prefix} {msg}"));
                bar.finish_with_message("is here");
            }
            PullProgress::Fetching { layer, done, of } => {
                let bar = self.bar(layer);
                if bar.length() != Some(*of) {
                    bar.set_length(*of);
                    bar.set_style(style(
                        "{prefix} {bar:30} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}",
                    ));
                }
                bar.set_position(*done);
            }
            PullProgress::Unpacking { layer } => {
                let bar = self.bar(layer);
                bar.set_style(style("{prefix} {msg} {elapsed}"));
                bar.set_message("unpacking");
                bar.enable_steady_tick(TICK);
            }
            PullProgress::Done { layer } => {
                let bar = self.bar(layer);
                bar.set_style(style("{prefix} {msg}"));
                bar.finish_with_message("done");
            }
            PullProgress::End { .. } => {}
        }
    }

    /// Leaves the terminal as it was.
    pub fn end(&self) {
        // A terminal that is gone has nothing to clear.
        let _ = self.all.clear();
    }
}
