//! `kip key`: the realm's keys as people ask for them. What a ring is, and how it is changed, is in
//! [`kip_offload`].

use crate::worker::Worker;
use async_trait::async_trait;
use kip_archive::ids::KeyId;
use kip_archive::keys::{KeyFileError, Wrap};
use kip_engine::blocking::blocking;
use kip_engine::secrets;
use kip_offload::with_wrap;
use kip_offload::{Archive, KeyChangeError};
use kip_service::KeyService;
use kip_supervisor::task::{Handle, archived};
use kip_sys::clock::now_ms;
use kip_types::api::{Code, EventKind, Refusal};
use kip_types::chain;
use kip_types::keys::{
    DestroyedKeyView, ExportKeysRequest, ExportedKeys, Hex, ImportKeysRequest, ImportedKeysView, KeyView, KeysWrap,
};
use kip_types::{ProcName, State};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Procs that a refusal names.
const NAMED: usize = 5;

/// A proc and the keys that it needs; none if that is not known.
type Needs = Vec<(ProcName, BTreeSet<KeyId>)>;

fn refused(e: KeyChangeError) -> Refusal {
    let code = match e {
        KeyChangeError::Unknown { .. } => Code::Unknown,
        KeyChangeError::Current(_) | KeyChangeError::NoKey(_) => Code::State,
        KeyChangeError::File(KeyFileError::OtherRing { .. }) => Code::State,
        KeyChangeError::Ambiguous { .. } | KeyChangeError::OtherRealm { .. } | KeyChangeError::Wrap(_) => Code::Invalid,
        KeyChangeError::KeyLength(_) => Code::Invalid,
        KeyChangeError::File(_) | KeyChangeError::Io { .. } => Code::Failed,
    };
    Refusal::new(code, chain(&e))
}

impl Worker {
    fn keyed(&self) -> Result<Arc<Archive>, Refusal> {
        let none = "there is no store, and so there are no keys; `kip up --store URL` gives one";
        self.machine.archive.clone().ok_or_else(|| Refusal::new(Code::State, none))
    }

    /// Which procs need which keys: archived ones, and those here of whose memory some is in the
    /// store only.
    async fn needs(&self, archive: &Arc<Archive>) -> Needs {
        let handles: Vec<_> = self.procs.lock().values().cloned().collect();
        let archive = Arc::clone(archive);
        let needs = move |handle: Handle| {
            let sealed = secrets::key_needed(&handle.proc.dir);
            let only_secrets = sealed.map(|key| (handle.proc.name.clone(), BTreeSet::from([key])));
            let record = handle.status.borrow().record.clone();
            let proc = &handle.proc;
            let keys = match record.state {
                State::Archived { .. } => archived(proc).map(|archived| archived.keys).unwrap_or_default(),
                State::Stopped { .. } => return only_secrets,
                _ => {
                    // Awake it needs what its newest generation has not brought yet; without one it
                    // is whole.
                    let directory = kip_snapshot::path_of(&proc.dir, record.generation());
                    if !directory.exists() {
                        return only_secrets;
                    }
                    let keys = archive.keys_of_missing(&directory).ok();
                    if keys.as_ref().is_some_and(BTreeSet::is_empty) {
                        return only_secrets;
                    }
                    keys.unwrap_or_default()
                }
            };
            // None are all of them: what it needs is not known.
            let keys = if keys.is_empty() { keys } else { keys.into_iter().chain(sealed).collect() };
            Some((proc.name.clone(), keys))
        };
        blocking(move || handles.into_iter().filter_map(needs).collect()).await
    }

    fn emit(&self, detail: String) {
        self.machine.events.emit(None, EventKind::Key, detail);
    }
}

#[async_trait]
impl KeyService for Worker {
    async fn keys(&self) -> Result<Vec<KeyView>, Refusal> {
        let archive = self.keyed()?;
        let needs = self.needs(&archive).await;
        let ring = archive.keys();
        let view = |fact: kip_archive::keys::KeyFact| KeyView {
            id: fact.id.to_string(),
            realm: ring.realm().clone(),
            created_at_ms: fact.created_ms,
            destroyed_at_ms: fact.destroyed_ms,
            current: fact.is_current,
            procs: who_needs(&needs, fact.id),
        };
        Ok(ring.facts().into_iter().map(view).collect())
    }

    async fn rotate_keys(&self) -> Result<KeyView, Refusal> {
        let archive = self.keyed()?;
        let changing = archive.change_keys().await;
        let id = blocking(move || changing.rotate(now_ms())).await.map_err(refused)?;
        self.emit(format!("{id} seals what is archived from now on"));
        let ring = archive.keys();
        let created_at_ms = ring.facts().iter().find(|fact| fact.id == id).and_then(|fact| fact.created_ms);
        let (id, realm) = (id.to_string(), ring.realm().clone());
        Ok(KeyView { id, realm, created_at_ms, destroyed_at_ms: None, current: true, procs: Vec::new() })
    }

    async fn destroy_key(&self, key: String, yes: bool) -> Result<DestroyedKeyView, Refusal> {
        let archive = self.keyed()?;
        // From here on no proc becomes archived.
        let changing = archive.change_keys().await;
        let fact = archive.find_key(&key).map_err(refused)?;
        archive.keys().check(fact.id).map_err(|e| refused(e.into()))?;
        if fact.is_current {
            return Err(refused(KeyChangeError::Current(fact.id)));
        }
        let procs = who_needs(&self.needs(&archive).await, fact.id);
        if !yes {
            return Err(Refusal::new(Code::State, what_it_costs(fact.id, &procs)));
        }
        blocking(move || changing.destroy(fact.id, now_ms())).await.map_err(refused)?;
        let lost = if procs.is_empty() { String::new() } else { format!("; it was needed by {}", names(&procs)) };
        self.emit(format!("{} was destroyed{lost}", fact.id));
        Ok(DestroyedKeyView { id: fact.id.to_string(), realm: archive.keys().realm().clone(), procs })
    }

    async fn export_keys(&self, how: ExportKeysRequest) -> Result<ExportedKeys, Refusal> {
        let ring = self.keyed()?.keys();
        let (realm, facts) = (ring.realm().clone(), ring.facts());
        let closed = blocking(move || with(&how.wrap, |wrap| Ok(ring.export(wrap)?))).await.map_err(refused)?;
        Ok(ExportedKeys { realm, keys: facts.iter().filter(|f| f.destroyed_ms.is_none()).count(), bytes: Hex(closed) })
    }

    async fn import_keys(&self, what: ImportKeysRequest) -> Result<ImportedKeysView, Refusal> {
        let archive = self.keyed()?;
        let changing = archive.change_keys().await;
        let done = blocking(move || with(&what.wrap, |wrap| changing.import(&what.bytes.0, wrap, now_ms())));
        let done = done.await.map_err(refused)?;
        self.emit(format!("{} imported", count(done.added.len(), "key")));
        let ids = |keys: &[KeyId]| keys.iter().map(KeyId::to_string).collect();
        Ok(ImportedKeysView {
            realm: archive.keys().realm().clone(),
            added: ids(&done.added),
            destroyed: ids(&done.destroyed),
            current: done.current.map(|id| id.to_string()),
        })
    }
}

fn with<T>(wrap: &KeysWrap, work: impl FnOnce(&Wrap<'_>) -> Result<T, KeyChangeError>) -> Result<T, KeyChangeError> {
    with_wrap(wrap, work)?
}

fn who_needs(needs: &Needs, key: KeyId) -> Vec<ProcName> {
    let needs_it = |(_, keys): &&(ProcName, BTreeSet<KeyId>)| keys.is_empty() || keys.contains(&key);
    let mut names: Vec<_> = needs.iter().filter(needs_it).map(|(name, _)| name.clone()).collect();
    names.sort();
    names
}

fn count(number: usize, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

/// `3 procs (a, b, c)`.
fn names(procs: &[ProcName]) -> String {
    let mut named: Vec<&str> = procs.iter().take(NAMED).map(ProcName::as_str).collect();
    if procs.len() > NAMED {
        named.push("..");
    }
    format!("{} ({})", count(procs.len(), "proc"), named.join(", "))
}

fn what_it_costs(key: KeyId, procs: &[ProcName]) -> String {
    let cost = match procs {
        [] => "no proc needs it now, older generations of any may".to_owned(),
        procs => format!("{} would be lost, for their memory is sealed by it", names(procs)),
    };
    format!("key {key} was not destroyed: {cost}; --yes destroys it for good")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_who_would_be_lost() {
        let (key, other) = (KeyId::random(), KeyId::random());
        let name = |text: &str| text.parse::<ProcName>().unwrap();
        let needs: Needs = vec![
            (name("web"), [key].into()),
            (name("db"), [key, other].into()),
            (name("mail"), [other].into()),
            (name("old"), BTreeSet::new()),
        ];
        let procs = who_needs(&needs, key);
        assert_eq!(procs, [name("db"), name("old"), name("web")], "of one nothing is known");
        let told = what_it_costs(key, &procs);
        assert!(told.contains("3 procs (db, old, web) would be lost"), "{told}");
        let many: Vec<ProcName> = (0..7).map(|n| name(&format!("p{n}"))).collect();
        assert_eq!(names(&many), "7 procs (p0, p1, p2, p3, p4, ..)");
        assert!(what_it_costs(key, &[]).contains("no proc needs it"));
    }
}
