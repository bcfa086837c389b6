//! Fault injection: `kip up --fault-at STEP` kills the daemon, by SIGKILL, when it first reaches
//! that step; `--fault-at STEP:MS` delays it there by so many milliseconds, each time.
//!
//! Only tests use it. A step costs one atomic load otherwise.

use std::sync::OnceLock;
use std::time::Duration;

/// Every step, in the order in which a proc reaches them.
pub const STEPS: &[&str] = &[
    "supersede-pager",
    "supersede-keeper",
    "start-recorded",
    "start-ports",
    "start-namespaces",
    "start-mounts",
    "start-held",
    "start-launched",
    "start-hot",
    "hibernate-begin",
    "hibernate-out",
    "hibernate-recorded",
    "park-intent",
    "park-dump",
    "park-sampled",
    "park-frozen",
    "park-images",
    "park-sealed",
    "park-held",
    "park-recorded",
    "park-killed",
    "park-custody",
    "archive-pack",
    "archive-pack-read",
    "archive-front",
    "archive-front-read",
    "archive-head",
    "archive-stored",
    "archive-kept",
    "archive-recorded",
    "archive-released",
    "fetch-begun",
    "fetch-done",
    "fetch-recorded",
    "older-aside",
    "older-brought",
    "older-recorded",
    "adopt-recorded",
    "adopt-held",
    "adopt-headed",
    "adopt-files",
    "adopt-done",
    "wake-intent",
    "wake-helper",
    "wake-created",
    "wake-restored",
    "wake-held",
    "wake-released",
    "wake-resumed",
    "wake-recorded",
    "update-written",
    "update-ports",
    "rename-recorded",
    "replace-started",
    "replace-ports",
    "replace-recorded",
    "replace-switched",
    "replace-left",
    "replace-failed",
    "replace-gives-back",
    "replace-given-back",
    "stop-intent",
    "stop-killed",
    "stop-recorded",
    "remove-intent",
    "remove-network",
    "remove-files",
    "backup-still",
    "copy-held",
    "copy-files",
    "copy-written",
    "copy-sealed",
    "copy-behind",
    "clone-copied",
    "clone-synced",
    "clone-published",
    "clone-filled",
    "checkpoint-copied",
    "checkpoint-published",
    "rollback-kept",
    // Templates.
    "template-taken",
    "template-copied",
    "template-exported",
    "template-unpacked",
    // Of a connection to the runtime socket.
    "runtime-held",
    "runtime-begun",
    "runtime-done",
    "runtime-answered",
    // Of a spawned proc.
    "spawn-recorded",
    "spawn-begun",
    "spawn-started",
    "spawn-evicted",
    "spawn-ended",
    "spawn-end-kept",
    "gc-marked",
    "gc-candidates",
    "gc-deleted",
];

#[derive(Debug)]
struct Fault {
    step: String,
    /// None: the daemon dies.
    delay: Option<Duration>,
}

static AT: OnceLock<Fault> = OnceLock::new();

/// Chooses the step, `STEP` or `STEP:MS`; false if there is none of that name.
pub fn arm(fault: &str) -> bool {
    let (step, delay) = match fault.split_once(':').map(|(step, ms)| (step, ms.parse())) {
        None => (fault, None),
        Some((step, Ok(ms))) => (step, Some(Duration::from_millis(ms))),
        Some((_, Err(_))) => return false,
    };
    STEPS.contains(&step) && AT.set(Fault { step: step.to_owned(), delay }).is_ok()
}

/// Dies here if this is the step, or waits.
pub fn reach(step: &'static str) {
    debug_assert!(STEPS.contains(&step), "{step}");
    let Some(fault) = AT.get().filter(|fault| fault.step == step) else { return };
    match fault.delay {
        Some(delay) => {
            tracing::info!(step, "fault injection: the daemon waits");
            std::thread::sleep(delay);
        }
        None => {
            tracing::info!(step, "fault injection: the daemon kills itself");
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        }
    }
}
