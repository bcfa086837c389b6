//! Commands that run inside for Kip: before a sleep, after a wake, to see whether a program is
//! ready.

use super::*;
use kip_engine::cause::WakeCause;
use kip_engine::host::Proc;
use kip_engine::tickets::Ticket;
use kip_journal::metrics::RefusalCause;
use kip_sessions::exec::{self, ExecOutput};
use kip_types::api::ExecRequest;
use kip_types::life::Check;
use std::collections::BTreeMap;

/// Of what a command wrote, bytes of its end that are told if it fails.
const TOLD: usize = 300;

/// Runs a command by the shell inside. The proc stays awake for it.
pub(super) async fn run(
    proc: &Arc<Proc>,
    command: &str,
    env: BTreeMap<String, String>,
    tickets: &Arc<AtomicUsize>,
) -> Result<(), String> {
    tickets.fetch_add(1, Ordering::SeqCst);
    run_awake(proc, command, env, Ticket(Arc::clone(tickets))).await
}

/// Runs a hook inside, for `ms` milliseconds at most, in a proc that `ticket` keeps awake: a
/// command by the shell, or `http:PORT/PATH`, which is a GET of the program's own.
///
/// # Errors
/// In words: it ended with another code than 0, took too long, or could not be run.
pub async fn run_hook(
    proc: &Arc<Proc>,
    command: &str,
    env: BTreeMap<String, String>,
    ticket: Ticket,
    ms: u64,
) -> Result<(), String> {
    within(ms, run_awake(proc, command, env, ticket)).await
}

async fn run_awake(
    proc: &Arc<Proc>,
    command: &str,
    env: BTreeMap<String, String>,
    ticket: Ticket,
) -> Result<(), String> {
    if let Ok(Check::Http(port, path)) = command.parse() {
        // As headers: KIP_TIER is Kip-Tier.
        let headers: Vec<(String, String)> = env.into_iter().map(|(name, value)| (header(&name), value)).collect();
        let answered = request::get(proc, port, &path, &headers).await;
        drop(ticket);
        return answered.map_err(|why| format!("{command}: {why}"));
    }
    let command = ["/bin/sh", "-c", command].map(str::to_owned).to_vec();
    let mut session = exec::exec(Arc::clone(proc), ExecRequest { command, env, ..ExecRequest::default() }, ticket)
        .await
        .map_err(|e| e.message)?;
    drop(session.input);
    let mut wrote = Vec::new();
    while let Some(output) = session.output.recv().await {
        match output {
            ExecOutput::End(end) if end.code == 0 => return Ok(()),
            ExecOutput::End(end) => {
                let text = String::from_utf8_lossy(&wrote);
                let last = text.lines().rev().find(|line| !line.trim().is_empty());
                let last = last.map(|line| format!(": {}", line.trim())).unwrap_or_default();
                return Err(format!("the command ended with code {}{last}", end.code));
            }
            ExecOutput::Stdout(bytes) | ExecOutput::Stderr(bytes) => {
                wrote.extend(bytes);
                wrote.drain(..wrote.len().saturating_sub(TOLD));
            }
        }
    }
    Err("the command ended".to_owned())
}

/// The header that stands for a variable.
fn header(name: &str) -> String {
    let word = |word: &str| {
        let (first, rest) = word.split_at(1.min(word.len()));
        first.to_ascii_uppercase() + &rest.to_ascii_lowercase()
    };
    name.split('_').map(word).collect::<Vec<_>>().join("-")
}

async fn within(ms: u64, running: impl Future<Output = Result<(), String>>) -> Result<(), String> {
    let limit = Duration::from_millis(ms);
    // What is dropped before its end is killed.
    tokio::time::timeout(limit, running).await.unwrap_or_else(|_| Err(format!("the command took more than {ms} ms")))
}

impl Task {
    /// Asks a running proc's own command whether it may sleep now. Nothing else happens to it
    /// meanwhile.
    pub(super) async fn before_sleep(&mut self, to: Tier) -> Result<(), Refusal> {
        self.check_over().await;
        let hooks = &self.proc.spec().hooks;
        let Some(command) = hooks.before_sleep.as_ref().filter(|_| self.phase.running().is_some()) else {
            return Ok(());
        };
        let env = BTreeMap::from([("KIP_TIER".to_owned(), to.to_string())]);
        let Err(why) = within(hooks.within_ms, run(&self.proc, command, env, &self.tickets)).await else {
            return Ok(());
        };
        let cause = format!("its own command before sleep refuses: {why}");
        let message = format!("{} cannot sleep: {cause}", self.proc.name);
        self.proc.shared.metrics.refused(to, RefusalCause::Hook);
        self.cannot_sleep(vec![cause]);
        self.keep(self.record.clone());
        self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Refused, message.clone());
        if let Some(running) = self.phase.running_mut() {
            running.not_before = Instant::now() + RETRY_SLEEP;
        }
        Err(Refusal::new(Code::CannotSleep, message))
    }

    /// Notifies a proc that it has woken, beside what it does.
    pub(super) fn after_wake(&self, from: Tier, cause: WakeCause) {
        let hooks = &self.proc.spec().hooks;
        let Some(command) = hooks.after_wake.clone() else { return };
        let env = [("KIP_TIER", from.to_string()), ("KIP_TRIGGER", cause.to_string())];
        let env = env.map(|(key, value)| (key.to_owned(), value)).into();
        let (proc, tickets, ms) = (Arc::clone(&self.proc), Arc::clone(&self.tickets), hooks.within_ms);
        self.hooking.fetch_add(1, Ordering::SeqCst);
        let one_of_them = Ticket(Arc::clone(&self.hooking));
        tokio::spawn(async move {
            if let Err(why) = within(ms, run(&proc, &command, env, &tickets)).await {
                let message = format!("its own command after the wake failed: {why}");
                proc.shared.events.emit(Some(&proc.name), EventKind::HookFailed, message);
            }
            drop(one_of_them);
        });
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn variables_are_headers() {
        assert_eq!(super::header("KIP_CLONE_OF"), "Kip-Clone-Of");
        assert_eq!(super::header("X"), "X");
    }
}
