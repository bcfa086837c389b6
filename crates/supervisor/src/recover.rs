//! After a start of the daemon: makes every record true again, whatever the last daemon was killed
//! at.
//!
//! What is found running is newer than any snapshot and wins. | record | processes there | none |
//! starting: undone; running: adopted, or its end is recorded; parking: adopted, or ended; parked
//! and waking: adopted (a kill order never reached CRIU, or a restore had finished), or parked;
//! stopping: finished.

use crate::task;
use kip_clocks::AbsoluteWaits;
use kip_clocks::tree::Tree;
use kip_engine::cause::WakeCause;
use kip_engine::fd_store::{FdStore, KeeperError, key};
use kip_engine::hibernate;
use kip_engine::host::Host;
use kip_engine::host::Proc;
use kip_engine::metering::Stored;
use kip_engine::plans::take_custody;
use kip_engine::ports;
use kip_engine::renew;
use kip_engine::stop::{self, NetworkFate};
use kip_journal::meter::{Kept, Meter};
use kip_net::{Slot, custody};
use kip_records::body::Body;
use kip_records::record::{self, Records};
use kip_records::state::Record;
use kip_sys::clock::now_ms;
use kip_sys::status::Status;
use kip_types::api::{EventKind, PortView};
use kip_types::chain;
use kip_types::lifecycle::Exit;
use kip_types::name::MAX_NAME;
use kip_types::{Generation, ProcName, Restart, Spec, State};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a dump or restore that was under way may take to come to its end.
const STABLE_WITHIN: Duration = Duration::from_secs(15);
/// Numbers that are tried for a name like another one; there are fewer procs.
const MOST_NUMBERED: u32 = 100_000;

/// What a data directory remembers of a proc.
#[derive(Debug)]
pub struct Remembered {
    /// The name of its directory.
    pub key: ProcName,
    /// What it was run with.
    pub spec: Spec,
    /// Its newest record.
    pub record: Record,
    /// What it has used.
    pub meter: Kept,
    /// How long its absolute waits are, if its record says so.
    pub absolute_waits: Option<AbsoluteWaits>,
}

/// Reads all records; those that cannot be read are named and left alone.
pub fn read_all(records: &Records) -> Result<Vec<Remembered>, record::RecordError> {
    let listing = records.list()?;
    for stranger in &listing.strangers {
        tracing::warn!(path = %stranger.display(), "not a proc, left alone");
    }
    let mut all = Vec::new();
    for key in listing.names {
        let read = records.read_spec::<Spec>(&key).and_then(|spec| Ok((spec, records.read_state::<Stored>(&key)?)));
        match read {
            Ok((mut spec, Stored { record, meter, absolute_waits })) => {
                if let Err(e) = records.settle(&key) {
                    tracing::warn!(proc = %key, error = chain(&e), "its record may not outlive the machine");
                }
                spec.timing.resolve_archive_default();
                all.push(Remembered { key, spec, record, meter, absolute_waits });
            }
            // Its first record was not synced when the machine stopped, and no process is left.
            Err(_) if records.was_cut_off(&key) || kip_copy::fill::is_unfinished(&records.directory(&key)) => {
                tracing::info!(proc = %key, "a proc that was being made when the machine stopped is undone");
                if let Err(e) = records.remove(&key).and_then(record::Trash::delete) {
                    tracing::warn!(proc = %key, error = chain(&e), "it is left to the next daemon");
                }
            }
            Err(e) => {
                tracing::error!(proc = %key, error = chain(&e), "the record of a proc cannot be read; it is left alone")
            }
        }
    }
    Ok(settled(all))
}

/// Each name once. A proc that was renamed, or that has replaced another one, has another key than
/// its name. One that was replaced and is still there is a trial, which goes; what else has the
/// name of another proc is a copy that Kip has not made.
fn settled(all: Vec<Remembered>) -> Vec<Remembered> {
    let mut owners: BTreeMap<ProcName, (u64, bool, ProcName)> = BTreeMap::new();
    for one in all.iter().filter(|one| !one.spec.trial) {
        let claim = (one.spec.replaced, one.key == one.spec.name, one.key.clone());
        let owner = owners.entry(one.spec.name.clone()).or_insert_with(|| claim.clone());
        *owner = claim.max(owner.clone());
    }
    let mut names: BTreeSet<ProcName> = all.iter().map(|one| one.spec.name.clone()).collect();
    let mut settled = Vec::new();
    for mut one in all {
        let owner = owners.get(&one.spec.name).filter(|(.., key)| *key != one.key && !one.spec.trial);
        match owner {
            Some((replaced, ..)) if *replaced > one.spec.replaced => {
                let Some(name) = numbered(&one.spec.name).find(|name| names.insert(name.clone())) else { continue };
                one.spec = task::hidden(&one.spec, name);
            }
            Some(_) => {
                tracing::error!(proc = %one.key, "the record of a proc is that of {}; it is left alone", one.spec.name);
                continue;
            }
            None => {}
        }
        if one.spec.trial {
            // It is about to go, and a port may be that of the proc that it was to replace.
            one.record.ports = PortView::all_unpublished(&one.record.ports);
        }
        settled.push(one);
    }
    settled
}

/// Names that are like one, each another.
pub fn numbered(name: &ProcName) -> impl Iterator<Item = ProcName> {
    let stem: String = name.as_str().chars().take(MAX_NAME - 8).collect();
    (1..MOST_NUMBERED).filter_map(move |n| format!("{stem}-r{n}").parse().ok())
}

/// The proc and its true record, or none if it was removed.
///
/// # Errors
/// The keeper does not give back what it holds for it. To go on without that would be to let go of
/// it.
pub async fn recover(machine: &Arc<Host>, remembered: Remembered) -> Result<Option<(Arc<Proc>, Record)>, KeeperError> {
    let Remembered { key, spec, record, meter, absolute_waits } = remembered;
    let meter = Meter::taken_up(meter, now_ms());
    let Ok(slot) = Slot::new(record.slot) else {
        tracing::error!(proc = %spec.name, slot = record.slot, "the record names a slot that does not exist; it is left alone");
        return Ok(None);
    };
    let fd_store = FdStore::recover(&key, Arc::clone(&machine.keeper))?;
    let proc = Proc::new(machine, key, spec, slot, record.base.clone(), fd_store, meter);
    if proc.sample_cpu().is_none() {
        // The machine was started anew, or all ended.
        proc.meter.without_cgroup();
    }
    if kip_copy::fill::is_unfinished(&proc.dir) {
        tracing::info!(proc = %proc.name, "a clone whose memory was still copied when the daemon ended is undone");
        undo(&proc).await;
        return Ok(None);
    }
    let state = match record.state.clone() {
        State::Parked { generation } if has_ended(&proc) && is_lost_copy(&proc, generation) => {
            tracing::warn!(proc = %proc.name, "what came from the store is lost on the local disk: it is fetched again");
            State::Archived { generation }
        }
        state => state,
    };
    let record = Record { state, ..record };
    let next = match record.state.clone() {
        State::Stopped { .. } | State::Elsewhere { .. } => {
            stop::release(&proc, NetworkFate::Removed).await;
            record.clone()
        }
        State::Starting if !record.established => {
            tracing::info!(proc = %proc.name, "a start that was cut off is undone");
            undo(&proc).await;
            return Ok(None);
        }
        State::Restarting { .. } => {
            stop::release(&proc, NetworkFate::Reserved).await;
            record.clone()
        }
        State::Starting => ended(&proc, &record, proc.spec().restart).await,
        State::Stopping => ended(&proc, &record, Restart::No).await,
        State::Hot { generation, .. } | State::Hibernated { generation, .. } | State::Parking { generation, .. } => {
            let asleep = still_asleep(&proc, &record.state);
            let generation = match record.state {
                State::Parking { .. } => Generation(generation.0.saturating_sub(1)),
                _ => generation,
            };
            // A proc that sleeps in its place is in no dump, and a held one is traced, by the
            // pager.
            let init = match asleep {
                true => Tree::read(&proc.cgroup.pids().unwrap_or_default()).init(),
                false => stable_init(&proc).await,
            };
            match init {
                Some(init) if asleep => {
                    let init_started = kip_sys::process::start_time(init).unwrap_or(0);
                    Record {
                        state: State::Hibernated { init, init_started, generation },
                        ..adopted(&proc, &record, init, generation)
                    }
                }
                Some(init) => adopted(&proc, &record, init, generation),
                None => ended(&proc, &record, proc.spec().restart).await,
            }
        }
        State::Archived { .. } => {
            hibernate::forget(&proc);
            // What an upload or a fetch left, complete or not.
            if let Err(e) = kip_snapshot::sweep(&proc.dir, None) {
                tracing::warn!(proc = %proc.name, error = chain(&e), "an archived generation is left on disk");
            }
            // What it lacks is said when its task begins.
            let archived = task::archived(&proc).ok().filter(|_| record.established);
            let next = archived.map(|archived| held_again(&proc, &record, &archived.body));
            proc.shared.events.emit(Some(&proc.name), EventKind::Adopted, "archived");
            next.unwrap_or_else(|| record.clone())
        }
        State::Parked { generation } | State::Waking { generation } => {
            hibernate::take_up(&proc);
            match stable_init(&proc).await {
                Some(init) => adopted(&proc, &record, init, generation),
                None => parked(&proc, &record, generation),
            }
        }
    };
    if let Some(absolute_waits) = absolute_waits {
        *proc.absolute_waits.lock() = absolute_waits;
    }
    limit_again(&proc, &next);
    let next = publish_again(&proc, next);
    meter_again(&proc, &next);
    if let Err(e) = proc.write_record(&next, record::Durability::Fsync) {
        tracing::error!(proc = %proc.name, error = chain(&e), "the recovered state cannot be recorded");
    }
    Ok(Some((proc, next)))
}

/// Removes what was not made whole.
async fn undo(proc: &Arc<Proc>) {
    if let Err(e) = stop::remove(proc).await {
        tracing::warn!(proc = %proc.name, error = %e, "what was cut off is not undone whole");
    }
}

/// Its limits hold, although an update or a wake may have been cut off before they did.
fn limit_again(proc: &Proc, next: &Record) {
    if next.state.tier().is_some()
        && proc.cgroup.exists()
        && let Err(e) = proc.cgroup.set_limits(&proc.spec().limits)
    {
        tracing::warn!(proc = %proc.name, error = chain(&e), "limits could not be set again");
    }
}

/// Its ports are those of its spec, although an update may have been cut off before they were.
fn publish_again(proc: &Proc, next: Record) -> Record {
    let spec = proc.spec();
    if spec.trial || !next.established || next.state.tier().is_none() || PortView::all_agree(&next.ports, &spec.ports) {
        return next;
    }
    match ports::change(proc, &spec, &next.ports) {
        Ok(ports) => {
            ports::let_go_of_others(proc, &ports);
            Record { ports, ..next }
        }
        Err(refusal) => {
            tracing::warn!(proc = %proc.name, error = refusal.message, "its ports are not those that it was given last");
            next
        }
    }
}

/// What was used while no daemon was there is its own, unless it was not there either.
fn meter_again(proc: &Proc, next: &Record) {
    match (&next.state, next.state.tier()) {
        (_, None) => proc.meter.forget_gap(),
        (State::Parked { generation }, _) => {
            let dir = kip_snapshot::path_of(&proc.dir, *generation);
            proc.meter.level_if_unknown(|| kip_snapshot::bytes_of(&dir));
        }
        (State::Hibernated { .. }, _) => proc.meter.level_if_unknown(|| proc.cgroup.held_bytes()),
        _ => {}
    }
}

/// It has no processes: else it was being woken.
fn has_ended(proc: &Proc) -> bool {
    proc.cgroup.pids().is_ok_and(|pids| pids.is_empty())
}

/// Whether a generation that came from the store was lost with the machine: it was never synced.
fn is_lost_copy(proc: &Proc, generation: Generation) -> bool {
    let is_copy = task::archived(proc).is_ok_and(|archived| archived.front.generation == generation);
    let opened = kip_snapshot::open::<Body>(&kip_snapshot::path_of(&proc.dir, generation));
    is_copy && !matches!(opened, Ok(_) | Err(kip_snapshot::SnapshotError::Newer { .. }))
}

/// Takes up what the pager has of it. True if it is hibernated and sleeps on: in its calls or,
/// held, until its task parks it.
fn still_asleep(proc: &Proc, state: &State) -> bool {
    let status = hibernate::take_up(proc);
    if status.asleep && matches!(state, State::Hibernated { .. }) {
        return true;
    }
    if (status.asleep || status.held)
        && let Err(e) = proc.shared.pager.wake(proc.key.as_str(), WakeCause::PagerReplaced.purpose())
    {
        tracing::warn!(proc = %proc.name, error = chain(&e), "a hibernated proc is not woken");
    }
    false
}

/// Nothing of it runs any more: to be started again, or stopped.
async fn ended(proc: &Arc<Proc>, record: &Record, restart: Restart) -> Record {
    let exit = kip_engine::exits::reported_exit(proc).unwrap_or(Exit::Unknown);
    // What it wrote while no daemon was there is still in its pipes.
    if proc.fd_store.get(key::OUT).is_some() {
        proc.shared.follow_output(proc);
    }
    let next = record.after_end(restart, exit, now_ms());
    let next = next.unwrap_or_else(|_| Record { state: State::Stopped { exit: Some(exit) }, ..record.clone() });
    stop::release(proc, NetworkFate::after(&next.state)).await;
    let _ = kip_snapshot::sweep(&proc.dir, None);
    next
}

/// The sandbox's pid 1 once no dump or restore works on the tree any more; none if there is none.
async fn stable_init(proc: &Arc<Proc>) -> Option<u32> {
    let until = Instant::now() + STABLE_WITHIN;
    loop {
        let pids = proc.cgroup.pids().unwrap_or_default();
        let tree = Tree::read(&pids);
        // A helper that restores is in the cgroup, outside the sandbox; one that dumps traces the
        // tree.
        let helper = pids.len() > tree.pids.len();
        let traced = tree.pids.iter().any(|pid| is_traced(*pid));
        if !helper && !traced {
            if !tree.pids.iter().any(|pid| is_half_made(*pid) || kip_checkpoint::is_held(*pid)) {
                return tree.init();
            }
            tracing::info!(proc = %proc.name, "a wake that was cut off is undone");
            end_processes(proc);
            return None;
        }
        if Instant::now() > until {
            tracing::warn!(proc = %proc.name, "a dump or restore of the last daemon does not end; its processes are ended");
            end_processes(proc);
            return None;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Ends what is half made; the proc wakes in the same cgroup later.
fn end_processes(proc: &Proc) {
    let ended = proc.cgroup.kill(Duration::from_secs(5));
    if let Err(e) = ended.and_then(|()| proc.cgroup.set_limits(&proc.spec().limits)) {
        tracing::warn!(proc = %proc.name, error = chain(&e), "what was half made is not ended whole");
    }
}

/// Whether the restorer still stands in it, see [`kip_checkpoint::Rebuild`].
fn is_half_made(pid: u32) -> bool {
    let stack = format!("{:x}-", kip_checkpoint::plan::RESTORER_STACK);
    fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| maps.lines().any(|l| l.starts_with(&stack)))
}

fn is_traced(pid: u32) -> bool {
    Status::read(pid).is_ok_and(|status| status.number("TracerPid:").is_some_and(|tracer| tracer != 0))
}

/// A running tree. If a sleep or wake had been under way, the sockets are the program's alone
/// again.
fn adopted(proc: &Arc<Proc>, record: &Record, init: u32, generation: Generation) -> Record {
    let body = kip_snapshot::open::<Body>(&kip_snapshot::path_of(&proc.dir, generation)).ok().map(|m| m.body);
    // Waits that have lasted since before its last wake.
    *proc.absolute_waits.lock() = body.as_ref().map(|body| body.clocks.absolute.clone()).unwrap_or_default();
    for socket in body.iter().flat_map(|b| &b.sockets) {
        if let Some(fd) = proc.fd_store.get(&format!("{}{}", key::SOCKET, socket.inode))
            && let Err(e) = custody::release(fd.as_fd(), &socket.options)
        {
            tracing::warn!(proc = %proc.name, error = chain(&e), "options of a socket could not be put back");
        }
    }
    if let Err(e) = proc.fd_store.drop_prefix(key::ASLEEP) {
        tracing::warn!(proc = %proc.name, error = chain(&e), "the keeper did not let sockets go");
    }
    if let Err(e) = kip_snapshot::sweep(&proc.dir, Some(generation)) {
        tracing::warn!(proc = %proc.name, error = chain(&e), "an unfinished generation is left on disk");
    }
    proc.shared.follow_output(proc);
    proc.shared.events.emit(Some(&proc.name), EventKind::Adopted, format!("running, pid {init}"));
    let init_started = kip_sys::process::start_time(init).unwrap_or(0);
    Record { state: State::Hot { init, init_started, generation }, wakes_again: false, ..record.clone() }
}

fn parked(proc: &Arc<Proc>, record: &Record, generation: Generation) -> Record {
    hibernate::forget(proc);
    if let Err(e) = kip_snapshot::sweep(&proc.dir, Some(generation)) {
        tracing::warn!(proc = %proc.name, error = chain(&e), "an unfinished generation is left on disk");
    }
    let record = match kip_snapshot::open::<Body>(&kip_snapshot::path_of(&proc.dir, generation)) {
        Ok(manifest) => held_again(proc, record, &manifest.body),
        Err(e) => {
            tracing::warn!(proc = %proc.name, error = chain(&e), "the snapshot of a parked proc cannot be read");
            proc.shared.follow_output(proc);
            record.clone()
        }
    };
    proc.shared.events.emit(Some(&proc.name), EventKind::Adopted, "parked");
    Record { state: State::Parked { generation }, ..record }
}

/// What a sleeper holds is in custody again; where it is lost, it is made anew first.
fn held_again(proc: &Proc, record: &Record, body: &Body) -> Record {
    let mut record = record.clone();
    if renew::is_lost(proc) {
        match renew::renew(proc, body, &record.ports) {
            Ok(ports) => {
                record.ports = ports;
                let lost = body
                    .sockets
                    .iter()
                    .filter(|s| matches!(s.options.kind, custody::SocketKind::Stream { .. }))
                    .count();
                let detail = format!("its sockets listen again; {lost} connections are lost");
                proc.shared.events.emit(Some(&proc.name), EventKind::Renewed, detail);
            }
            Err(e) => {
                let message = format!("{} cannot be woken: {}", proc.name, chain(&e));
                proc.shared.events.emit(Some(&proc.name), EventKind::Refused, message.clone());
                tracing::error!(proc = %proc.name, error = message, "what a sleeper held is lost and cannot be made anew");
            }
        }
    }
    take_custody(proc, body);
    proc.shared.follow_output(proc);
    // Before the next one is taken up: as many sleep as do not fit otherwise.
    proc.fd_store.pack();
    record
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(key: &str, name: &str, replaced: u64) -> Remembered {
        let spec = format!(r#"{{"name":"{name}","command":["x"],"replaced":{replaced}}}"#);
        let mut record = Record::new(1, "/base".into());
        let addr = "0.0.0.0".parse().unwrap();
        record.ports =
            vec![PortView { proto: kip_types::Protocol::Tcp, port: 80, addr, host_addr: addr, host_port: Some(8080) }];
        Remembered {
            key: key.parse().unwrap(),
            spec: serde_json::from_str(&spec).unwrap(),
            record,
            meter: Kept::default(),
            absolute_waits: None,
        }
    }

    /// Keys with names, whether it is a trial, and the port of the host.
    fn all(remembered: Vec<Remembered>) -> Vec<(String, String, bool, Option<u16>)> {
        let told = |one: Remembered| {
            (one.key.to_string(), one.spec.name.to_string(), one.spec.trial, one.record.ports[0].host_port)
        };
        settled(remembered).into_iter().map(told).collect()
    }

    fn is(key: &str, name: &str, trial: bool) -> (String, String, bool, Option<u16>) {
        (key.to_owned(), name.to_owned(), trial, (!trial).then_some(8080))
    }

    // promise recovery: a proc whose start a power cut has interrupted is there as it was asked
    //   for, or not at all
    #[test]
    fn a_begun_record_that_a_power_cut_has_emptied_is_undone() {
        let dir = tempfile::tempdir().unwrap();
        let (records, _) = Records::open(dir.path()).unwrap();
        for name in ["whole", "emptied", "settled", "of-now"] {
            let Remembered { key, spec, record, .. } = one(name, name, 0);
            records.begin(&key, &spec, &record).unwrap().publish().unwrap();
        }
        let key = |name: &str| name.parse::<ProcName>().unwrap();
        records.settle(&key("settled")).unwrap();
        let file = |name: &str, file: &str| records.directory(&key(name)).join(file);
        for name in ["emptied", "settled", "of-now"] {
            std::fs::write(file(name, "spec.json"), "").unwrap();
        }
        std::fs::write(file("emptied", "begun"), "").unwrap();
        let found: Vec<ProcName> = read_all(&records).unwrap().into_iter().map(|one| one.key).collect();
        assert_eq!(found, [key("whole")]);
        assert!(!file("whole", "begun").exists());
        assert!(!records.directory(&key("emptied")).exists());
        assert!(records.directory(&key("settled")).exists(), "what a client was told of is left alone");
        assert!(records.directory(&key("of-now")).exists(), "a program of it may run");
    }

    #[test]
    fn of_two_with_one_name_the_one_that_has_replaced_the_other_has_it() {
        let both = vec![one("web", "web", 1), one("web-r1", "web", 2), one("web-r2", "db", 0)];
        assert_eq!(all(both), [is("web", "web-r1", true), is("web-r1", "web", false), is("web-r2", "db", false)]);
        // Not yet: the new one is a trial.
        let mut new = one("web-r1", "web-r1", 2);
        new.spec.trial = true;
        assert_eq!(all(vec![one("web", "web", 1), new]), [is("web", "web", false), is("web-r1", "web-r1", true)]);
    }

    #[test]
    fn a_copy_is_left_alone() {
        let copied = vec![one("copy", "web", 0), one("web", "web", 0)];
        assert_eq!(all(copied), [is("web", "web", false)]);
    }
}
