//! Fault injection for tests: at one step of a hibernation the pager dies, stands still, or meets
//! an error, once.
//!
//! A step costs one atomic load otherwise.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Every step of taking one process's memory out, in their order.
pub const STEPS: &[&str] = &[
    "stopped",
    "in-hand",
    "scratch",
    "planted",
    "turned",
    "handed-back",
    "watched",
    "saved",
    "in-hand-again",
    "entered",
    "unwatched",
    "dropped",
    "watched-again",
    "mended",
    "unmapped",
    "out",
];

/// The steps between which a process must not run on without a pager: some of its memory is neither
/// there nor watched.
pub const DEADLY: &[&str] = &["unwatched", "dropped", "watched-again"];

/// What happens there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// The pager is killed.
    Kill,
    /// The pager is stopped as by SIGSTOP, until another process lets it go on.
    Stop,
    /// The step fails.
    Fail,
}

static AT: OnceLock<(String, How)> = OnceLock::new();
static PASSED: AtomicBool = AtomicBool::new(false);

/// Chooses the step; false if there is none of that name, or one is chosen already.
pub fn arm(step: &str, how: How) -> bool {
    STEPS.contains(&step) && AT.set((step.to_owned(), how)).is_ok()
}

/// Fails here if this is the step.
pub(crate) fn reach(step: &'static str) -> io::Result<()> {
    debug_assert!(STEPS.contains(&step), "{step}");
    let Some((_, how)) = AT.get().filter(|(at, _)| at == step) else { return Ok(()) };
    if PASSED.swap(true, Ordering::SeqCst) {
        return Ok(());
    }
    let signal = match how {
        How::Kill => rustix::process::Signal::KILL,
        How::Stop => rustix::process::Signal::STOP,
        How::Fail => return Err(io::Error::other(format!("fault injection at {step}"))),
    };
    rustix::process::kill_process(rustix::process::getpid(), signal)?;
    Ok(())
}
