//! Whether a proc that was started does what it is there for: checked from outside until it does,
//! or its time is over.
//!
//! The check is a task of its own beside the proc's, which takes commands meanwhile; it ends with
//! the run that it was begun for. Until then the proc does not sleep. Crash: the next daemon checks
//! again.

use super::*;
use kip_engine::tickets::Ticket;
use kip_types::life::{Check, Ready};

/// Between two checks.
const CHECK_AGAIN: Duration = Duration::from_millis(50);
/// One check takes no longer.
const CHECK_WITHIN: Duration = Duration::from_secs(10);

/// Checks that are under way; dropped, they end.
#[derive(Debug)]
pub(super) struct Watching(tokio::task::AbortHandle);

impl Drop for Watching {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Task {
    fn ticket(&self) -> Ticket {
        self.tickets.fetch_add(1, Ordering::SeqCst);
        Ticket(Arc::clone(&self.tickets))
    }

    /// Begins to check, if it runs, has a check and is not known to be ready.
    pub(super) fn watch_readiness(&mut self) {
        let Some(ready) = self.proc.spec().ready.clone().filter(|_| self.record.ready == Some(false)) else { return };
        let (proc, started_at_ms, awake) = (Arc::clone(&self.proc), self.record.started_at_ms, self.ticket());
        let (tickets, own) = (Arc::clone(&self.tickets), self.own.clone());
        let watching = tokio::spawn(async move {
            let result = wait_until_ready(&proc, &ready, &tickets).await;
            if let Some(own) = own.upgrade() {
                let _ = own.send(TaskCommand::Ready { started_at_ms, result }).await;
            }
            drop(awake);
        });
        self.starting = Some(Watching(watching.abort_handle()));
    }

    pub(super) fn on_ready(&mut self, started_at_ms: u64, result: Result<(), String>) {
        if self.starting.is_none() || started_at_ms != self.record.started_at_ms {
            return;
        }
        self.starting = None;
        let ready = result.is_ok();
        let (kind, detail) = match result {
            Ok(()) => (EventKind::Ready, format!("after {} ms", now_ms().saturating_sub(started_at_ms))),
            Err(why) => (EventKind::NotReady, why),
        };
        // First: a client that sees the record looks for the reason among the events.
        self.proc.shared.events.emit(Some(&self.proc.name), kind, detail);
        self.keep(Record { ready: Some(ready), ..self.record.clone() });
    }
}

async fn wait_until_ready(proc: &Arc<Proc>, ready: &Ready, tickets: &Arc<AtomicUsize>) -> Result<(), String> {
    let until = Instant::now() + Duration::from_millis(ready.within_ms);
    let mut why = "no answer".to_owned();
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(why);
        }
        match tokio::time::timeout(left.min(CHECK_WITHIN), check_once(proc, &ready.check, tickets)).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(now)) => why = now,
            // One that was cut off says less than the one before it.
            Err(_) if left <= CHECK_WITHIN => return Err(why),
            Err(_) => why = "no answer".to_owned(),
        }
        tokio::time::sleep(CHECK_AGAIN).await;
    }
}

/// One check: nothing if it is as it is to be.
pub async fn check_once(proc: &Arc<Proc>, check: &Check, tickets: &Arc<AtomicUsize>) -> Result<(), String> {
    match check {
        Check::Tcp(port) => request::connects(proc, *port).await,
        Check::Http(port, path) => request::get(proc, *port, path, &[]).await,
        Check::Exec(command) => hooks::run(proc, command, Default::default(), tickets).await,
    }
}
