//! Ports of the host on which Kip itself answers how a proc is: awake, by a check that does not
//! count as activity; asleep, by what that said last, without waking it.
//!
//! The ports are there from the proc's creation to its removal, also while it is stopped. The
//! keeper has them as well: a client that connects while there is no daemon waits, and is answered
//! by the next one. One request a connection is answered, whatever its path: 200 or 503 with a
//! [`HealthView`]. Crash: what was known is as in the record, which is written when the proc falls
//! asleep.

use crate::task::{Handle, Probes, ProcStatus, TaskCommand, check_once};
use kip_engine::fd_store::key;
use kip_engine::host::Proc;
use kip_net::reserve::{self, ReserveError};
use kip_records::state::{Checked, Record};
use kip_sys::clock::now_ms;
use kip_types::api::{Code, Health, HealthView, ProbeView, Refusal};
use kip_types::chain;
use kip_types::life::{Check, Probe};
use kip_types::{ProcName, Spec, State, StateName};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

/// A check takes no longer; longer than it takes nothing waits for its end.
const CHECK_WITHIN: Duration = Duration::from_secs(2);
/// What was checked less than this ago is not checked again, milliseconds.
const FRESH_MS: u64 = 1000;
/// A client is answered within this, by what is known if the proc is in the middle of something.
const ANSWER_WITHIN: Duration = Duration::from_secs(3);
/// From accept to close.
const EXCHANGE_WITHIN: Duration = Duration::from_secs(10);
/// Connections of one port at the same time; more wait.
const AT_ONCE: usize = 32;
/// The longest request, bytes.
const LONGEST_REQUEST: usize = 8 << 10;
/// A port that another program has is tried again after this.
const AGAIN: Duration = Duration::from_secs(5);
/// After an accept that failed, for want of descriptors, say.
const PAUSE: Duration = Duration::from_millis(100);

/// Listeners by host port.
pub type Listeners = BTreeMap<u16, std::net::TcpListener>;

/// Opens the ports of a proc that is to be made.
pub fn listen(spec: &Spec) -> Result<Listeners, Refusal> {
    let open = |probe: &Probe| Ok((probe.host_port, reserve::listen(probe.host_port)?));
    spec.probes.iter().map(open).collect::<Result<_, _>>().map_err(|e| is_taken(&spec.name, &e))
}

/// `name` cannot have the port of one of its probes.
pub fn is_taken(name: &ProcName, e: &ReserveError) -> Refusal {
    let code = if matches!(e, ReserveError::Taken { .. }) { Code::Taken } else { Code::Failed };
    Refusal::new(code, format!("{name} cannot start: its probe's {}", chain(e)))
}

/// Answers on the ports of a proc, and opens those that are not open yet.
pub fn serve(handle: &Handle, mut listeners: Listeners) -> Probes {
    let proc = &handle.proc;
    let spec = proc.spec();
    let tasks = spec.probes.iter().map(|probe| {
        let listener = listeners.remove(&probe.host_port).or_else(|| held(proc, probe));
        tokio::spawn(answer(handle.clone(), probe.clone(), listener))
    });
    Probes::new(tasks.collect())
}

fn key_of(probe: &Probe) -> String {
    format!("{}{}", key::PROBE, probe.host_port)
}

/// The listener that an earlier daemon has left with the keeper.
fn held(proc: &Proc, probe: &Probe) -> Option<std::net::TcpListener> {
    proc.fd_store.get(&key_of(probe))?.try_clone().ok().map(Into::into)
}

/// Gives a proc the ports of the probes of its spec before it answers there: those that another
/// proc has as duplicates, so that no client is refused meanwhile.
///
/// # Errors
/// A port is taken, or the keeper cannot hold its socket.
pub fn inherit(proc: &Proc, spec: &Spec, from: &Proc) -> Result<(), Refusal> {
    for probe in &spec.probes {
        let listener = held(from, probe).map_or_else(|| reserve::listen(probe.host_port), Ok);
        hold(proc, probe, &listener.map_err(|e| is_taken(&spec.name, &e))?);
    }
    Ok(())
}

/// Leaves it with the keeper for the next daemon.
fn hold(proc: &Proc, probe: &Probe, listener: &std::net::TcpListener) {
    if proc.fd_store.get(&key_of(probe)).is_some() {
        return;
    }
    let duplicate = listener.try_clone().map_err(|e| e.to_string());
    let hold = |fd: std::net::TcpListener| proc.fd_store.hold(vec![(key_of(probe), fd.into())]).map_err(|e| chain(&e));
    if let Err(error) = duplicate.and_then(hold) {
        tracing::warn!(proc = %proc.name, port = probe.host_port, error, "the keeper does not hold the probe's port: the port is closed while no daemon runs");
    }
}

async fn answer(handle: Handle, probe: Probe, listener: Option<std::net::TcpListener>) {
    let listener = opened(&handle.proc, &probe, listener).await;
    let places = Arc::new(Semaphore::new(AT_ONCE));
    loop {
        let place = Arc::clone(&places).acquire_owned().await.expect("the semaphore is never closed");
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let (handle, probe) = (handle.clone(), probe.clone());
        tokio::spawn(async move {
            // A client that goes away needs no answer any more.
            let _ = tokio::time::timeout(EXCHANGE_WITHIN, exchange(stream, &handle, &probe)).await;
            drop(place);
        });
    }
}

/// The listener of a port; waits as long as another program has the port.
async fn opened(proc: &Proc, probe: &Probe, listener: Option<std::net::TcpListener>) -> TcpListener {
    let mut listener = listener.map_or_else(|| reserve::listen(probe.host_port), Ok);
    let mut told = false;
    loop {
        let why = match listener {
            Ok(listener) => {
                hold(proc, probe, &listener);
                match listener.set_nonblocking(true).and_then(|()| TcpListener::from_std(listener)) {
                    Ok(listener) => return listener,
                    Err(e) => e.to_string(),
                }
            }
            Err(e) => chain(&e),
        };
        if !std::mem::replace(&mut told, true) {
            tracing::warn!(proc = %proc.name, port = probe.host_port, reason = why, "a probe's port cannot be opened; tried again");
        }
        tokio::time::sleep(AGAIN).await;
        listener = reserve::listen(probe.host_port);
    }
}

/// One request and its answer.
async fn exchange(mut stream: TcpStream, handle: &Handle, probe: &Probe) -> io::Result<()> {
    let mut request = Vec::new();
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        if request.len() > LONGEST_REQUEST || stream.read_buf(&mut request).await? == 0 {
            return Ok(());
        }
    }
    let (status, body) = match request.split(|b| *b == b' ').next() {
        Some(b"GET" | b"HEAD") => {
            let view = health(handle, std::slice::from_ref(probe)).await;
            let status = if view.available { "200 OK" } else { "503 Service Unavailable" };
            (status, serde_json::to_string(&view).map_err(io::Error::other)? + "\n")
        }
        _ => ("405 Method Not Allowed", String::new()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    if !request.starts_with(b"HEAD") {
        stream.write_all(body.as_bytes()).await?;
    }
    stream.shutdown().await
}

/// How a proc is, as those of its probes see it. An awake one is asked, unless it was a moment ago.
pub async fn health(handle: &Handle, probes: &[Probe]) -> HealthView {
    let (asked, probes) = (handle.clone(), probes.to_vec());
    let mine = probes.clone();
    // In a task of its own: the caller may go away, and the task says what it has found all the
    // same.
    let asking = tokio::spawn(async move {
        for probe in &mine {
            ask(&asked, probe).await;
        }
    });
    let _ = tokio::time::timeout(ANSWER_WITHIN, asking).await;
    view(&handle.status.borrow(), handle.proc.name.clone(), &probes)
}

/// Whether it is worth asking: it runs, and was not asked a moment ago.
fn is_due(status: &ProcStatus, probe: &Probe) -> bool {
    let last = status.record.checked.iter().find(|c| c.host_port == probe.host_port);
    let fresh = last.is_some_and(|c| now_ms().saturating_sub(c.at_ms) < FRESH_MS);
    matches!(status.record.state, State::Hot { .. }) && !status.starting && !fresh
}

async fn ask(handle: &Handle, probe: &Probe) {
    let due = || is_due(&handle.status.borrow(), probe);
    if !due() {
        return;
    }
    let _turn = handle.proc.probing.lock().await;
    if !due() {
        return;
    }
    let Some(answer) = check_in_turn(handle, &probe.check).await else { return };
    let wrong = answer.err();
    let checked = Checked { host_port: probe.host_port, at_ms: now_ms(), wrong };
    let _ = handle.ask(|reply| TaskCommand::Checked { checked, reply }).await;
}

/// Whether a check of a proc succeeds; none for one that is asleep. It is no activity.
///
/// # Errors
/// What is wrong, in words.
pub async fn check(handle: &Handle, check: &Check) -> Option<Result<(), String>> {
    let _turn = handle.proc.probing.lock().await;
    check_in_turn(handle, check).await
}

async fn check_in_turn(handle: &Handle, check: &Check) -> Option<Result<(), String>> {
    let asking = handle.ask(|reply| TaskCommand::Ask { reply }).await.ok()??;
    // It does not sleep as long as `asking` lives: no ticket is needed, and one would count as
    // activity.
    let of_no_session = Arc::default();
    let answer = tokio::time::timeout(CHECK_WITHIN, check_once(&handle.proc, check, &of_no_session)).await;
    drop(asking);
    Some(answer.unwrap_or_else(|_| Err(format!("no answer within {} ms", CHECK_WITHIN.as_millis()))))
}

/// What is known of the probes, from the record.
pub fn views(probes: &[Probe], record: &Record) -> Vec<ProbeView> {
    let view = |probe: &Probe| {
        let last = record.checked.iter().find(|c| c.host_port == probe.host_port);
        let health = match last {
            None => Health::Unknown,
            Some(Checked { wrong: None, .. }) => Health::Healthy,
            Some(_) => Health::Unhealthy,
        };
        ProbeView {
            host_port: probe.host_port,
            check: probe.check.clone(),
            health,
            reason: last.and_then(|c| c.wrong.clone()),
            checked_ms: last.map(|c| now_ms().saturating_sub(c.at_ms)),
        }
    };
    probes.iter().map(view).collect()
}

fn view(status: &ProcStatus, name: kip_types::ProcName, probes: &[Probe]) -> HealthView {
    let record = &status.record;
    let probes = views(probes, record);
    let said = probes.iter().find_map(|p| p.reason.as_ref().map(|why| format!("{}: {why}", p.check)));
    let reason = match &record.state {
        _ if status.starting => Some("it is not ready yet".to_owned()),
        State::Starting => Some("it is being started".to_owned()),
        State::Stopping | State::Stopped { .. } => Some("it is stopped".to_owned()),
        State::Restarting { .. } => Some("its program has ended and will be started again".to_owned()),
        State::Elsewhere { .. } => Some("another data directory has it".to_owned()),
        State::Hot { .. } => {
            let unknown = probes.iter().any(|p| p.health == Health::Unknown);
            said.or_else(|| unknown.then(|| "the proc could not be asked, because it is changing its tier".to_owned()))
        }
        _ if status.waits => Some("its wake waits for memory".to_owned()),
        // A proc that no probe asked before it fell asleep would wake for a request like any other
        // proc.
        _ => said,
    };
    HealthView {
        name,
        state: if status.starting { StateName::Starting } else { record.state.name() },
        tier: record.state.tier(),
        available: reason.is_none(),
        reason,
        probes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_types::Generation;
    use std::path::PathBuf;

    fn told(state: State, wrong: Option<Option<&str>>) -> (bool, Option<String>) {
        let probe: Probe = "9000=tcp:80".parse().unwrap();
        let mut record = Record { state, ..Record::new(1, PathBuf::new()) };
        record.checked.extend(wrong.map(|w| Checked { host_port: 9000, at_ms: 1, wrong: w.map(str::to_owned) }));
        let status = ProcStatus::new(record);
        let view = view(&status, "web".parse().unwrap(), &[probe]);
        (view.available, view.reason)
    }

    #[test]
    fn a_sleeper_is_as_it_was_and_one_that_does_not_run_is_not_available() {
        let parked = || State::Parked { generation: Generation(1) };
        assert_eq!(told(parked(), None), (true, None));
        assert_eq!(told(parked(), Some(None)), (true, None));
        assert_eq!(told(parked(), Some(Some("status 500"))), (false, Some("tcp:80: status 500".to_owned())));
        let hot = || State::Hot { init: 7, init_started: 1, generation: Generation(1) };
        assert_eq!(told(hot(), Some(None)), (true, None));
        assert!(!told(hot(), None).0, "nobody knows");
        assert!(!told(State::Stopped { exit: None }, Some(None)).0);
    }
}
