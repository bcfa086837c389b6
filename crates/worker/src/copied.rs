//! A proc that is copied as it is at one moment, for clones, for a checkpoint or a template, or to
//! be kept before a rollback.
//!
//! It stands still while its files are copied: frozen in a dump that is called off then, if it runs
//! and its memory can be held ([`CopyRunning`]), else parked ([`Still`]). Its generation is linked,
//! which does not change any more. The copy is a proc that was parked on a machine that
//! has been started anew since: nothing in the kernel is its own.

use crate::volumes_of_clones::{self, OwnVolume};
use kip_copy::fill::{Fills, is_unfinished, mark_unfinished, unmark_unfinished};
use kip_copy::inspected::InspectedGeneration;
use kip_copy::{Becomes, ProcCopy, UnsyncedFiles};
use kip_engine::blocking::blocking;
use kip_engine::cause::{WakeCause, WakeCommand};
use kip_engine::host::Proc;
use kip_engine::park::{CopyDone, CopySteps};
use kip_records::record::sync_published;
use kip_records::state::Record;
use kip_snapshot::pages::PageMap;
use kip_supervisor::task::{ASIDE, Copied, CopyRunning, Handle, Still, StillFor, Stilled, TaskCommand, run_hook};
use kip_types::api::{Code, Refusal};
use kip_types::{Generation, ProcName, Spec, State, VolumeSource, chain};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// How long the source may take to run again before the answer says so.
const RUNS_WITHIN: Duration = Duration::from_secs(30);

/// What a proc is copied for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    Clone,
    Checkpoint,
    /// It stays asleep, for another one takes its place.
    Rollback,
    Template,
}

impl Purpose {
    fn noun(self) -> &'static str {
        match self {
            Purpose::Clone => "clone",
            Purpose::Checkpoint => "checkpoint",
            Purpose::Rollback => "rollback",
            Purpose::Template => "template",
        }
    }

    fn participle(self) -> &'static str {
        match self {
            Purpose::Clone => "cloned",
            Purpose::Checkpoint => "kept in a checkpoint",
            Purpose::Rollback => "rolled back",
            Purpose::Template => "kept as a template",
        }
    }

    pub(crate) fn refuse(self, source: &ProcName, code: Code, why: &str) -> Refusal {
        Refusal::new(code, format!("{source} cannot be {} now: {why}", self.participle()))
    }
}

/// Refuses a proc that has more than can be kept.
pub(crate) fn check_kept(spec: &Spec, purpose: Purpose) -> Result<(), Refusal> {
    if spec.trial {
        return Err(purpose.refuse(&spec.name, Code::State, "it is a trial, and about to go"));
    }
    let writable = spec.volumes.iter().find(|v| !v.read_only && v.source != VolumeSource::Secrets);
    match writable {
        None => Ok(()),
        Some(volume) => {
            let why =
                format!("what is in its volume {} at {} would not be of that moment", volume.source, volume.target);
            Err(purpose.refuse(&spec.name, Code::State, &why))
        }
    }
}

/// Where a copy goes, and what it has of its own.
pub(crate) struct CopyTarget {
    pub(crate) directory: PathBuf,
    pub(crate) first_id: u32,
    pub(crate) hostname: String,
    /// Where its volumes are that it does not share.
    pub(crate) volumes: Vec<OwnVolume>,
    /// It runs at once if its source does, and has no need of its generation after a crash of the
    /// machine.
    pub(crate) runs: bool,
}

/// A source that was copied.
pub(crate) struct SourceCopy {
    /// What would be recorded of it if it slept in the generation that was copied.
    pub(crate) record: Record,
    /// It ran.
    pub(crate) was_awake: bool,
    /// How long it stood still, microseconds.
    pub(crate) still_us: u64,
    /// Keeps it asleep until it is dropped, for a rollback.
    pub(crate) still: Option<Still>,
    /// What its generation says, read while it was copied.
    pub(crate) inspected: Option<InspectedGeneration>,
    /// Its memory is still copied.
    pub(crate) behind: Option<Behind>,
}

/// A copy of which the memory is still copied, behind the clones that run: they are some only if
/// that succeeds.
#[derive(Debug)]
pub(crate) struct Behind {
    copying: JoinHandle<Result<Option<Copied>, Refusal>>,
    runs: Option<Sender<()>>,
}

impl Behind {
    /// The clones run: their memory is copied as fast as may be.
    pub(crate) fn clones_run(&mut self) {
        self.runs = None;
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// What stood in the way.
    pub(crate) async fn finish(self) -> Result<(), String> {
        match self.copying.await {
            Ok(Ok(Some(_))) => Ok(()),
            Ok(Ok(None)) => Err("it cannot be copied as it runs".to_owned()),
            Ok(Err(refusal)) => Err(refusal.message),
            Err(e) => Err(chain(&e)),
        }
    }
}

/// How a source is copied.
#[derive(Clone)]
struct Copying {
    proc: Arc<Proc>,
    copy: ProcCopy,
    volumes: Vec<OwnVolume>,
    is_kept: bool,
}

impl CopySteps for Copying {
    fn is_kept(&self) -> bool {
        self.is_kept
    }

    fn is_clone(&self) -> bool {
        self.copy.becomes == Becomes::Another
    }

    fn files(&mut self) -> Result<(), String> {
        // Mounted, if its disk is limited.
        let _place = self.proc.files.place().map_err(|e| chain(&e))?;
        self.copy.copy_files().map_err(|e| chain(&e))?;
        volumes_of_clones::fill(&self.volumes)
    }

    fn generation(&mut self, generation: Generation) -> Result<(), String> {
        fetch_all(&self.proc, generation)?;
        self.copy.copy_generation(generation).map_err(|e| chain(&e))?;
        volumes_of_clones::note_restored(&self.volumes, &self.copy.from, &self.copy.to, generation)
    }

    fn may_run(&mut self, _: CopyDone) -> Option<Receiver<()>> {
        None
    }
}

/// Copies the source: while it is frozen and then runs on, if it runs; else while it stands still,
/// parked, or stopped if it is not to be cloned.
pub(crate) async fn copy_source(source: &Handle, target: CopyTarget, purpose: Purpose) -> Result<SourceCopy, Refusal> {
    let proc = Arc::clone(&source.proc);
    let spec = proc.spec();
    let name = spec.name.clone();
    let copy = ProcCopy {
        from: proc.dir.clone(),
        to: target.directory.clone(),
        ids: (proc.first_id(), target.first_id),
        names: (spec.hostname().to_owned(), target.hostname),
        becomes: if purpose == Purpose::Clone { Becomes::Another } else { Becomes::Kept },
    };
    let mut copying = Copying { proc, copy, volumes: target.volumes, is_kept: !target.runs };
    if let Some(command) = &spec.hooks.before_checkpoint
        && purpose != Purpose::Rollback
        && matches!(source.status.borrow().record.state, State::Hot { .. })
    {
        let cause = WakeCause::Request(WakeCommand::StoodStill(purpose.noun()));
        let ticket = source.ask(|reply| TaskCommand::KeepAwake { cause, reply }).await?;
        let env = BTreeMap::from([("KIP_PURPOSE".to_owned(), purpose.noun().to_owned())]);
        let ran = run_hook(&source.proc, command, env, ticket, spec.hooks.within_ms).await;
        let refuse = |why| purpose.refuse(&name, Code::Failed, &format!("its own command before that refuses: {why}"));
        ran.map_err(refuse)?;
    }
    // What it has in a store comes before it stands still.
    let (of, known) = (Arc::clone(&source.proc), source.status.borrow().record.generation());
    let come = blocking(move || fetch_all(&of, known)).await;
    come.map_err(|why| purpose.refuse(&name, Code::Failed, &why))?;
    let stood = Instant::now();
    if purpose != Purpose::Rollback {
        let (early, comes_early) = oneshot::channel();
        let copy = CopyRunning { steps: Box::new(copying.clone()), early: Some(early) };
        let asked = source.clone();
        let copied = tokio::spawn(async move { asked.ask(|reply| TaskCommand::CopyRunning { copy, reply }).await });
        let refused = |code, why: &str| purpose.refuse(&name, code, why);
        let (copied, behind) = match comes_early.await {
            Ok(mut early) => {
                let runs = early.runs.take();
                (Some(early), Some(Behind { copying: copied, runs }))
            }
            Err(_) => {
                let copied = copied.await.map_err(|e| refused(Code::Failed, &chain(&e)))?;
                let again = |refusal: Refusal| {
                    let message = refused(refusal.code, &refusal.message).message;
                    Refusal { message, ..refusal }
                };
                (copied.map_err(again)?, None)
            }
        };
        if let Some(Copied { record, still, .. }) = copied {
            let (still_us, mut inspected) = (still.as_micros() as u64, None);
            if let (Some(_), State::Parked { generation }) = (&behind, &record.state) {
                // Of the pages that are read for it, those that have not been copied come first.
                let (generation, directory, proc) = (*generation, copying.copy.to, Arc::clone(&source.proc));
                let read =
                    blocking(move || InspectedGeneration::read(&directory, generation, &proc.shared.fills)).await;
                inspected = Some(read.map_err(|e| refused(Code::State, &chain(&e)))?);
            }
            return Ok(SourceCopy { record, was_awake: true, still_us, still: None, inspected, behind });
        }
    }
    let (still, over) = Still::new();
    let stays = purpose == Purpose::Rollback;
    let what_for = StillFor { purpose: purpose.noun(), stays, fetches: true };
    let ask = |reply| TaskCommand::StandStill { what_for, over, reply };
    let stilled = source.ask(ask).await?;
    let generation = generation_of(source, &stilled, purpose)?;
    let directory = source.proc.dir.clone();
    // Beside the copy. What cannot be read there any more, since the source has gone on, is read
    // again, and refused, when the copy is finished.
    let inspecting = generation.map(|generation| {
        thread::spawn(move || InspectedGeneration::read(&directory, generation, &Fills::default()).ok())
    });
    let done = blocking(move || {
        copying.files()?;
        let Some(generation) = generation else { return Ok(()) };
        // Of a clone that never ran, whose own memory is still copied.
        let of_it = kip_snapshot::path_of(&copying.proc.dir, generation);
        copying.proc.shared.fills.put_of(&of_it, None).map_err(|e| chain(&e))?;
        copying.generation(generation)
    });
    let done = done.await;
    // It goes on, whatever came of the copy.
    let still = Some(still).filter(|_| stays);
    done.map_err(|why| purpose.refuse(&name, Code::Failed, &why))?;
    let (mut record, was_awake) = (stilled.record, stilled.was_awake);
    if was_awake && !stays {
        runs_again(source).await;
    }
    if generation.is_none() {
        record.state = State::Stopped { exit: None };
    }
    let still_us = if was_awake { stood.elapsed().as_micros() as u64 } else { 0 };
    let inspected = match inspecting {
        Some(inspecting) => blocking(move || inspecting.join().ok().flatten()).await,
        None => None,
    };
    Ok(SourceCopy { record, was_awake, still_us, still, inspected, behind: None })
}

/// Fetches what a generation of a proc has in a store. One that is not there has nothing.
fn fetch_all(proc: &Proc, generation: Generation) -> Result<(), String> {
    let path = kip_snapshot::path_of(&proc.dir, generation);
    let Ok(map) = PageMap::load(&path) else { return Ok(()) };
    match &proc.shared.archive {
        Some(archive) if map.files.iter().any(|file| file.remote.is_some_and(|pages| pages > 0)) => {
            archive.fetch_pages(&path, None).map_err(|e| chain(&e))
        }
        _ => Ok(()),
    }
}

/// The generation in which a source stands still; none of one that is stopped.
fn generation_of(source: &Handle, stilled: &Stilled, purpose: Purpose) -> Result<Option<Generation>, Refusal> {
    let name = source.proc.name.clone();
    let refuse = |why: String| Err(purpose.refuse(&name, Code::State, &why));
    if let Some(why) = &stilled.runs {
        return refuse(why.clone());
    }
    match &stilled.record.state {
        State::Parked { generation } => Ok(Some(*generation)),
        State::Stopped { .. } if matches!(purpose, Purpose::Clone | Purpose::Template) => {
            let what = purpose.noun();
            refuse(format!("it is stopped, and a {what} goes on from where its source is: start it"))
        }
        State::Stopped { .. } | State::Restarting { .. } if source.proc.dir.join(ASIDE).exists() => {
            refuse("it fell back to older files, and a start puts the newest ones back: start it first".into())
        }
        State::Stopped { .. } => Ok(None),
        State::Restarting { .. } if !matches!(purpose, Purpose::Clone | Purpose::Template) => Ok(None),
        state => refuse(format!("it is {}: try again", state.name())),
    }
}

/// Notes which random number generators of a copy with that generation have to draw new seeds.
/// Returns what its owner should know.
///
/// # Errors
/// It could not be woken.
pub(crate) fn finish_copy(
    source: &ProcName,
    directory: &Path,
    generation: Generation,
    inspected: Option<InspectedGeneration>,
    purpose: Purpose,
) -> Result<Vec<String>, Refusal> {
    let read = || InspectedGeneration::read(directory, generation, &Fills::default());
    let why = match inspected.map_or_else(read, Ok) {
        Ok(InspectedGeneration { barred: None, patches, notes }) => {
            match kip_snapshot::note_cloned(directory, generation, &patches) {
                Ok(()) => return Ok(notes),
                Err(e) => chain(&e),
            }
        }
        // What is held for the source alone, and is made anew by neither way.
        Ok(InspectedGeneration { barred: Some(what), .. }) => what,
        Err(e) => chain(&e),
    };
    Err(purpose.refuse(source, Code::State, &why))
}

/// Makes clones whose memory is copied procs like any other.
pub(crate) fn finish_clones(procs: &[Arc<Proc>], unsynced: &[UnsyncedFiles]) -> Result<(), String> {
    for proc in procs {
        let alone = proc.settling.write();
        if let Err(e) = kip_snapshot::settle_cloned(&proc.dir) {
            tracing::debug!(proc = %proc.name, error = chain(&e), "page files are read as ones that are filled");
        }
        drop(alone);
        if let Err(e) = proc.shared.pager.copied(proc.key.as_str()) {
            tracing::debug!(proc = %proc.name, error = chain(&e), "the pager keeps copies of a clone open");
        }
    }
    // All of them are, or none: what a crash of the machine leaves half done has its mark.
    unsynced.iter().try_for_each(UnsyncedFiles::sync).map_err(|e| chain(&e))?;
    // One may have been removed meanwhile, as any other proc.
    for proc in procs.iter().filter(|proc| is_unfinished(&proc.dir)) {
        unmark_unfinished(&proc.dir).map_err(|e| chain(&e))?;
        match sync_published(&proc.dir) {
            Err(e) if proc.dir.exists() => return Err(chain(&e)),
            _ => {}
        }
    }
    Ok(())
}

/// Notes of a clone that it is one only when [`finish_clones`] has made it durable. Returns what
/// that makes so, opened before the clone's program runs.
pub(crate) fn begin_unfinished(directory: &Path) -> Result<UnsyncedFiles, String> {
    mark_unfinished(directory).map_err(|e| chain(&e))?;
    let generation = kip_snapshot::cloned_generation(directory);
    UnsyncedFiles::open(directory, generation.as_deref()).map_err(|e| chain(&e))
}

/// Waits until the source runs.
async fn runs_again(source: &Handle) {
    let mut status = source.status.clone();
    let runs = status.wait_for(|status| !matches!(status.record.state, State::Parked { .. } | State::Waking { .. }));
    let _ = tokio::time::timeout(RUNS_WITHIN, runs).await;
}
