//! `kip inspect --files | --env | --sockets | --maps`: a proc from within, whatever tier it is in.
//!
//! Reads, wakes no proc and changes nothing. Running and hibernated procs are read in /proc, but
//! for their memory, which only the pager may read ([`live`]); parked and archived ones in their
//! images ([`asleep`]); sockets that are held are asked for in the kernel in every tier
//! ([`sockets`]). A proc that goes to another tier meanwhile is inspected again.

mod asleep;
mod files;
mod live;
mod maps;
mod own;
mod sockets;
mod strings;

use crate::beside;
use kip_criu_images::inspect::ImageProcess;
use kip_engine::host::Proc;
use kip_records::state::Record;
use kip_supervisor::task::Handle;
use kip_types::api::{
    Code, Detail, Details, EnvView, FilesView, Inspected, MapsView, ProcessEnv, ProcessFiles, ProcessMaps, Refusal,
    SocketsView,
};
use kip_types::chain;
use kip_types::{State, Tier};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// An inspection may take so long: two answers of a store that is slow.
const WITHIN: Duration = Duration::from_secs(40);
/// How often one is inspected that changes its tier meanwhile.
const TRIES: u32 = 4;

/// Pages by process, as numbered inside, and address.
type Page = (u32, u64);
type Pages = BTreeMap<Page, Result<Vec<u8>, String>>;

/// What a proc's processes are, and where their memory is.
enum Subject {
    Live(live::Live),
    Asleep(Box<asleep::Asleep>),
}

impl Subject {
    fn of(proc: &Proc, tier: Tier, state: &State, of: Detail) -> Result<Subject, String> {
        match tier {
            Tier::Hot | Tier::Hibernated => live::Live::read(proc, of).map(Subject::Live),
            Tier::Parked => asleep::Asleep::parked(proc, state.generation()).map(Box::new).map(Subject::Asleep),
            Tier::Archived => asleep::Asleep::archived(proc, of).map(Box::new).map(Subject::Asleep),
        }
    }

    fn processes(&self) -> &[ImageProcess] {
        match self {
            Subject::Live(live) => &live.processes,
            Subject::Asleep(asleep) => &asleep.processes,
        }
    }

    fn pages(&self, proc: &Proc, wanted: &BTreeSet<Page>) -> Result<Pages, String> {
        match self {
            Subject::Live(live) => live.pages(proc, wanted),
            Subject::Asleep(asleep) => asleep.pages(proc, wanted),
        }
    }
}

/// What is asked about a proc.
pub async fn details(handle: &mut Handle, of: Detail) -> Result<Details, Refusal> {
    let name = handle.proc.name.clone();
    for _ in 0..TRIES {
        handle.wait_until_stable().await;
        let record = handle.status.borrow().record.clone();
        let tier = inspectable(&handle.proc, &record)?;
        let (proc, state) = (Arc::clone(&handle.proc), record.state.clone());
        let seen = beside::run(WITHIN, move || inspect(&proc, tier, &state, of)).await;
        // What was read while it fell asleep or woke may be half of each.
        if handle.status.borrow().record.state == record.state {
            let failed = |why| Refusal::new(Code::Failed, format!("{name} cannot be inspected: {why}"));
            return seen.and_then(|seen| seen).map_err(failed);
        }
    }
    Err(Refusal::new(Code::State, format!("{name} changed tier while it was inspected: try again")))
}

/// The tier of a proc that has an inside.
fn inspectable(proc: &Proc, record: &Record) -> Result<Tier, Refusal> {
    let name = &proc.name;
    let refused = |message: String| Err(Refusal::new(Code::State, message));
    match &record.state {
        State::Hot { .. } => Ok(Tier::Hot),
        State::Hibernated { .. } => Ok(Tier::Hibernated),
        State::Parked { .. } => Ok(Tier::Parked),
        State::Archived { .. } if record.established => Ok(Tier::Archived),
        State::Archived { .. } => {
            refused(format!("{name} is being taken over from the store: `kip wake {name}` finishes that"))
        }
        State::Stopped { .. } => {
            refused(format!("{name} is stopped and has nothing inside: `kip start {name}` starts it"))
        }
        State::Elsewhere { .. } => {
            let by = record.taken_over_by.as_ref().map(|by| format!(" by {by}")).unwrap_or_default();
            refused(format!("{name} is not here any more: it was taken over{by}; inspect it there"))
        }
        state => refused(format!("{name} is {} and cannot be inspected now: try again", state.name())),
    }
}

fn inspect(proc: &Proc, tier: Tier, state: &State, of: Detail) -> Result<Details, String> {
    let subject = Subject::of(proc, tier, state, of)?;
    let inspected = Inspected { name: proc.name.clone(), tier, generation: state.generation() };
    let processes = subject.processes();
    Ok(match of {
        Detail::Files => {
            let sockets = sockets::Sockets::read(proc, &subject)?;
            let view = |process: &ImageProcess| ProcessFiles {
                pid: process.pid,
                name: process.name.clone(),
                files: process.files.iter().map(|file| files::view(file, &sockets)).collect(),
            };
            let place = proc.files.place().map_err(|e| chain(&e))?;
            let own = own::read(place.path()).map_err(|e| chain(&e))?;
            Details::Files(FilesView { inspected, processes: processes.iter().map(view).collect(), own })
        }
        Detail::Sockets => {
            let sockets = sockets::Sockets::read(proc, &subject)?;
            Details::Sockets(SocketsView { inspected, sockets: sockets.open(processes) })
        }
        Detail::Env => {
            let wanted = processes.iter().flat_map(strings::wanted).collect();
            let pages = subject.pages(proc, &wanted)?;
            let processes = processes.iter().map(|process| environment(process, &pages)).collect::<Result<_, _>>()?;
            Details::Env(EnvView { inspected, processes })
        }
        Detail::Maps => {
            let places = match &subject {
                Subject::Live(live) => live.places(proc)?,
                Subject::Asleep(asleep) => asleep.places()?,
            };
            let view = |process: &ImageProcess| {
                let none = maps::PageLocations::default();
                let places = places.get(&process.pid).unwrap_or(&none);
                let maps = process.mappings.iter().map(|mapping| maps::view(mapping, places)).collect();
                ProcessMaps { pid: process.pid, name: process.name.clone(), maps }
            };
            Details::Maps(MapsView { inspected, processes: processes.iter().map(view).collect() })
        }
    })
}

fn environment(process: &ImageProcess, pages: &Pages) -> Result<ProcessEnv, String> {
    let (command, env) = strings::read(process, pages)?;
    Ok(ProcessEnv {
        pid: process.pid,
        parent: process.parent,
        name: process.name.clone(),
        ended: process.ended,
        program: process.program.clone(),
        command,
        directory: process.directory.clone(),
        uid: process.user.0,
        gid: process.user.1,
        env,
    })
}
