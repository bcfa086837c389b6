//! Calls that inspect procs, on threads of their own, which the daemon can do without.
//!
//! What is read of a running program may wait for it, whatever is done about that. So a call is
//! given up after its time; a thread that is stuck then ends when what it waits for does, and while
//! [`MOST_CALLS`] are under way no other is begun.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::oneshot;

/// Calls under way at the same time.
const MOST_CALLS: usize = 16;

static CALLS: AtomicUsize = AtomicUsize::new(0);

/// One of [`MOST_CALLS`].
struct Permit;

impl Permit {
    fn take() -> Option<Permit> {
        let taken = CALLS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| (n < MOST_CALLS).then_some(n + 1));
        taken.ok().map(|_| Permit)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        CALLS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// What a call has returned; why there is nothing, in words that go on from "it could not be
/// inspected: ".
pub async fn run<T: Send + 'static>(within: Duration, work: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    let Some(permit) = Permit::take() else {
        return Err(format!("{MOST_CALLS} inspections are running already: try again"));
    };
    let (sender, receiver) = oneshot::channel();
    let spawned = std::thread::Builder::new().name("kip-inspect".to_owned()).spawn(move || {
        let _permit = permit;
        // When its time is over, the caller does not wait any more.
        let _ = sender.send(work());
    });
    spawned.map_err(|e| e.to_string())?;
    match tokio::time::timeout(within, receiver).await {
        Ok(Ok(seen)) => Ok(seen),
        Ok(Err(_)) => Err("the thread that looked has ended".to_owned()),
        Err(_) => Err(format!("that took longer than {} s", within.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_limited() {
        let permits: Vec<Permit> = std::iter::from_fn(Permit::take).take(100).collect();
        assert_eq!(permits.len(), MOST_CALLS);
        assert!(Permit::take().is_none());
        drop(permits);
        assert!(Permit::take().is_some());
    }
}
