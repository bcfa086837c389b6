//! Which generations there are, and which one a request means. Only reads.
//!
//! A head or front that cannot be opened is told of by itself and is not the end of the list.

use crate::survey::{Summary, SummaryError, Survey};
use crate::{Archive, HeadFailure, ID};
use kip_archive::gc::Object;
use kip_archive::head::{Head, HeadState};
use kip_archive::ids::{PackId, ProcId};
use kip_archive::names::FrontRef;
use kip_store::StoreFailure;
use kip_types::api::{Code, Refusal, SnapshotName, SnapshotPlace, SnapshotState, SnapshotView, SnapshotsView};
use kip_types::chain;
use kip_types::{Generation, ProcName};
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::Path;

/// Digits of an id that are enough to mean it, if no other id begins with them.
const FEWEST_DIGITS: usize = 8;

/// A proc on the local disk.
#[derive(Debug, Clone)]
pub struct Local {
    /// Its name.
    pub name: ProcName,
    /// Its directory.
    pub dir: std::path::PathBuf,
}

impl Local {
    /// Its id in the store, if it was ever there.
    pub fn id(&self) -> Option<ProcId> {
        fs::read_to_string(self.dir.join(ID)).ok()?.trim().parse().ok()
    }

    /// Its generations on the local disk, newest first.
    pub fn generations(&self) -> Vec<Generation> {
        let names = fs::read_dir(&self.dir).into_iter().flatten().flatten().map(|entry| entry.file_name());
        let number = |name: std::ffi::OsString| name.to_str()?.strip_prefix("gen-")?.parse().ok().map(Generation);
        let numbers: BTreeSet<Generation> = names.filter_map(number).collect();
        numbers.into_iter().rev().collect()
    }

    /// Each of them with what it is of.
    pub fn each(&self) -> impl Iterator<Item = (Local, Generation)> + '_ {
        self.generations().into_iter().map(|generation| (self.clone(), generation))
    }
}

/// A generation in the store.
#[derive(Debug, Clone)]
pub struct StoredGeneration {
    /// The head of its proc.
    pub head: Head,
    /// Its front.
    pub front: FrontRef,
}

impl StoredGeneration {
    /// `NAME@GENERATION`
    pub(crate) fn label(&self) -> String {
        format!("{}@{}", self.head.name, self.front.generation)
    }

    pub(crate) fn place(&self) -> SnapshotPlace {
        place(&self.head, self.front)
    }
}

fn place(head: &Head, front: FrontRef) -> SnapshotPlace {
    match () {
        () if head.current == Some(front) => SnapshotPlace::Current,
        () if head.kept.contains(&front) => SnapshotPlace::Kept,
        () => SnapshotPlace::Unused,
    }
}

/// The name of a proc here, where it may have another one since it was archived, or in the store.
fn name_of<'a>(head: &'a Result<Head, HeadFailure>, local: Option<&'a Local>) -> Option<&'a ProcName> {
    local.map(|one| &one.name).or_else(|| head.as_ref().ok().map(|head| &head.name))
}

pub(crate) fn unknown(which: &SnapshotName) -> Refusal {
    Refusal::new(
        Code::Unknown,
        format!("there is no snapshot {which} in the store: `kip snapshot ls` shows what there is"),
    )
}

impl Archive {
    pub(crate) fn state_of(&self, head: &Head) -> SnapshotState {
        match head.state {
            HeadState::Owned if head.owner.id == self.owner => SnapshotState::OwnedHere,
            HeadState::Owned => SnapshotState::OwnedElsewhere,
            HeadState::Archived => SnapshotState::Archived,
            HeadState::Removed => SnapshotState::Removed,
        }
    }

    /// All procs of the realm and what they have, by name; with `only`, those of this name. The
    /// dead that have left nothing are left out.
    pub async fn list(&self, only: Option<&ProcName>, local: &[Local]) -> Result<Vec<SnapshotsView>, StoreFailure> {
        let survey = self.survey(&self.store).await?;
        let ids: HashMap<ProcId, &Local> = local.iter().filter_map(|one| Some((one.id()?, one))).collect();
        let wanted = |proc: &ProcId, head: &Result<Head, HeadFailure>| {
            only.is_none() || name_of(head, ids.get(proc).copied()) == only
        };
        let mut asked = BTreeSet::new();
        for (proc, head) in survey.heads.iter().filter(|(proc, head)| wanted(proc, head)) {
            let named = head.iter().flat_map(Head::fronts);
            let all = named.chain(survey.fronts.get(proc).into_iter().flatten().copied());
            asked.extend(all.map(|front| (*proc, front)));
        }
        let summaries: HashMap<_, _> = self.summaries(&self.store, asked).await.into_iter().collect();
        let mut views = Vec::new();
        for (proc, head) in survey.heads.iter().filter(|(proc, head)| wanted(proc, head)) {
            let view = self.view(*proc, head, &survey, &summaries, ids.get(proc).copied());
            if !(view.state == SnapshotState::Removed && view.generations.is_empty()) {
                views.push(view);
            }
        }
        let in_store = |one: &Local| one.id().is_some_and(|id| survey.heads.contains_key(&id));
        let elsewhere = local.iter().filter(|one| only.is_none_or(|name| *name == one.name) && !in_store(one));
        views.extend(elsewhere.filter_map(only_local));
        views.sort_by(|a, b| (&a.name, &a.proc).cmp(&(&b.name, &b.proc)));
        Ok(views)
    }

    fn view(
        &self,
        proc: ProcId,
        head: &Result<Head, HeadFailure>,
        survey: &Survey,
        summaries: &HashMap<(ProcId, FrontRef), Result<Summary, SummaryError>>,
        local: Option<&Local>,
    ) -> SnapshotsView {
        let mut fronts: BTreeSet<FrontRef> = survey.fronts.get(&proc).cloned().unwrap_or_default();
        fronts.extend(head.iter().flat_map(Head::fronts));
        let mut packs: BTreeSet<PackId> = BTreeSet::new();
        let mut generations = Vec::new();
        for front in fronts.into_iter().rev() {
            let summary = summaries.get(&(proc, front));
            let mut view = SnapshotView {
                generation: front.generation,
                place: head.as_ref().map_or(SnapshotPlace::Unused, |head| place(head, front)),
                frozen_at_ms: None,
                bytes: survey.bytes.get(&Object::Front(proc, front)).copied(),
                format: None,
                trouble: None,
            };
            match summary {
                Some(Ok(summary)) => {
                    packs.extend(summary.manifest.packs.iter().map(|pack| pack.id));
                    (view.frozen_at_ms, view.format) = (Some(summary.manifest.frozen_at_ms), Some(summary.format));
                }
                Some(Err(e)) => view.trouble = Some(chain(e)),
                None => {}
            }
            generations.push(view);
        }
        generations.extend(local.into_iter().flat_map(local_views));
        let bytes = |pack: &PackId| survey.bytes.get(&Object::Pack(*pack)).copied().unwrap_or(0);
        SnapshotsView {
            name: name_of(head, local).cloned(),
            proc: Some(proc.to_string()),
            state: head.as_ref().map_or(SnapshotState::Unreadable, |head| self.state_of(head)),
            owner: head.as_ref().ok().map(|head| head.owner.id.to_string()),
            generations,
            packs: packs.len() as u64,
            pack_bytes: packs.iter().map(bytes).sum(),
            trouble: head.as_ref().err().map(|e| chain(e)),
        }
    }

    /// The head that a request means: of the local proc of that name, of the only living proc of
    /// that name in the store, or by the first digits of its id.
    pub async fn head_of(&self, which: &SnapshotName, local: &[Local]) -> Result<Head, Refusal> {
        let failed = |e: &dyn std::error::Error| Refusal::new(Code::Failed, format!("{which}: {}", chain(e)));
        // It was asked of the owner before the key was destroyed, so that is no failure.
        let unread = |e: &HeadFailure| match e.is_of_destroyed_key() {
            true => Refusal { code: Code::State, ..failed(e) },
            false => failed(e),
        };
        let own = local.iter().find(|one| one.name.as_str() == which.proc).and_then(Local::id);
        if let Some(id) = own
            && let Some((head, _)) = self.head(id).await.map_err(|e| unread(&e))?
        {
            return Ok(head);
        }
        let survey = self.survey(&self.store).await.map_err(|e| failed(&e))?;
        let heads = || survey.heads.values().flatten();
        let living = |head: &&Head| head.state != HeadState::Removed && head.name.as_str() == which.proc;
        let mut found: Vec<&Head> = heads().filter(living).collect();
        if found.is_empty() && which.proc.len() >= FEWEST_DIGITS {
            found = heads().filter(|head| head.proc.to_string().starts_with(&which.proc)).collect();
        }
        match found[..] {
            [head] => Ok(head.clone()),
            [] => {
                // Maybe it is what cannot be read.
                let by_id = survey.heads.iter().find_map(|(proc, head)| {
                    let is_meant = which.proc.len() >= FEWEST_DIGITS && proc.to_string().starts_with(&which.proc);
                    head.as_ref().err().filter(|_| is_meant)
                });
                Err(by_id.map_or_else(|| unknown(which), unread))
            }
            [first, second, ..] => Err(Refusal::new(
                Code::Invalid,
                format!(
                    "several procs in the store are called {}: write {:.12} or {:.12}",
                    which.proc,
                    first.proc.to_string(),
                    second.proc.to_string()
                ),
            )),
        }
    }

    /// The generation in the store that a request means.
    pub async fn find(&self, which: &SnapshotName, local: &[Local]) -> Result<StoredGeneration, Refusal> {
        let head = self.head_of(which, local).await.map_err(|refusal| {
            let parked = local.iter().find(|one| one.name.as_str() == which.proc && !one.generations().is_empty());
            match (refusal.code, parked) {
                (Code::Unknown, Some(one)) => Refusal::new(
                    Code::State,
                    format!("{which} is on the local disk only: `kip sleep {} --to archived` stores it", one.name),
                ),
                _ => refusal,
            }
        })?;
        let front = match which.generation {
            None => head.current,
            Some(number) => head.fronts().find(|front| front.generation == number),
        };
        match front {
            Some(front) => Ok(StoredGeneration { head, front }),
            None => Err(unknown(which)),
        }
    }
}

fn local_views(one: &Local) -> Vec<SnapshotView> {
    let view = |generation| {
        let path = kip_snapshot::path_of(&one.dir, generation);
        let manifest = kip_snapshot::open::<serde_json::Value>(&path);
        SnapshotView {
            generation,
            place: SnapshotPlace::Local,
            frozen_at_ms: Some(crate::upload::sealed_at_ms(&path)).filter(|at| *at > 0),
            bytes: manifest.as_ref().ok().map(|manifest| manifest.parts.iter().map(|part| part.size).sum()),
            format: manifest.as_ref().ok().map(|manifest| manifest.format),
            trouble: manifest.err().map(|e| chain(&e)),
        }
    };
    one.generations().into_iter().map(view).collect()
}

/// A proc that the store knows nothing of; none if it has no generation.
pub fn only_local(one: &Local) -> Option<SnapshotsView> {
    let generations = local_views(one);
    (!generations.is_empty()).then(|| SnapshotsView {
        name: Some(one.name.clone()),
        proc: one.id().map(|id| id.to_string()),
        state: SnapshotState::Local,
        owner: None,
        generations,
        packs: 0,
        pack_bytes: 0,
        trouble: None,
    })
}

/// Those of one name, or all.
pub fn all_local(only: Option<&ProcName>, local: &[Local]) -> Vec<SnapshotsView> {
    let wanted = local.iter().filter(|one| only.is_none_or(|name| *name == one.name));
    wanted.filter_map(only_local).collect()
}

/// A path that is asked for must be one that does not depend on where the daemon is.
pub fn absolute(file: &str) -> Result<&Path, Refusal> {
    let path = Path::new(file);
    match path.is_absolute() {
        true => Ok(path),
        false => Err(Refusal::new(Code::Invalid, format!("{file} is no absolute path"))),
    }
}

/// What is to be verified.
#[derive(Debug, Default)]
pub struct ToVerify {
    /// Generations in the store.
    pub stored: Vec<StoredGeneration>,
    /// Heads that cannot be read, and why.
    pub unread: Vec<(String, String)>,
    /// Generations on the local disk.
    pub local: Vec<(Local, Generation)>,
}

impl Archive {
    /// Every generation that a head keeps.
    pub async fn all_kept(&self) -> Result<ToVerify, StoreFailure> {
        let mut all = ToVerify::default();
        for (proc, head) in self.survey(&self.store).await?.heads {
            match head {
                Ok(head) => {
                    all.stored.extend(head.fronts().map(|front| StoredGeneration { head: head.clone(), front }))
                }
                Err(e) => all.unread.push((self.head_key(proc).as_str().to_owned(), chain(&e))),
            }
        }
        Ok(all)
    }
}
