//! Which proc of the store is this data directory's, and which may be taken over.

use crate::{Archive, HeadFailure};
use futures_util::TryStreamExt as _;
use kip_archive::head::{Head, HeadState};
use kip_archive::ids::{OwnerId, ProcId};
use kip_archive::names::{FrontRef, ObjectName};
use kip_store::Key;
use kip_types::api::{Code, Refusal};
use kip_types::chain;

impl Archive {
    /// Whether the head is this data directory's, at that front.
    pub async fn is_ours(&self, proc: ProcId, front: FrontRef) -> Result<bool, HeadFailure> {
        let head = self.head(proc).await?;
        let ours =
            |head: Head| head.owner.id == self.owner && head.state == HeadState::Owned && head.current == Some(front);
        Ok(head.is_some_and(|(head, _)| ours(head)))
    }

    /// The data directory that owns the proc, if it is not this one.
    pub async fn other_owner(&self, proc: ProcId) -> Result<Option<OwnerId>, HeadFailure> {
        Ok(self.head(proc).await?.map(|(head, _)| head.owner.id).filter(|owner| *owner != self.owner))
    }

    /// The heads of all procs that have this name, or id; and why others cannot be read, if they
    /// cannot.
    async fn heads_of(&self, wanted: &str) -> Result<(Vec<Head>, Option<HeadFailure>), kip_store::StoreFailure> {
        let procs = Key::new(format!("{}/procs", ObjectName::of_realm(&self.realm))).expect("a realm is letters");
        let mut listed = self.store.list(Some(&procs));
        let (mut found, mut unread) = (Vec::new(), None);
        while let Some(object) = listed.try_next().await? {
            let ObjectName::Head { proc, .. } = ObjectName::parse(object.key.as_str()) else { continue };
            match self.head(proc).await {
                Ok(Some((head, _))) if head.state == HeadState::Removed => {}
                Ok(Some((head, _))) if head.name.as_str() == wanted || proc.to_string() == wanted => found.push(head),
                Ok(_) => {}
                Err(e) => unread = Some(e),
            }
        }
        Ok((found, unread))
    }

    /// The proc of this name or id that runs nowhere.
    pub async fn free(&self, wanted: &str, unknown: &Refusal) -> Result<(Head, FrontRef), Refusal> {
        let refuse = |code, message: String| Err(Refusal::new(code, message));
        let (found, unread) = match self.heads_of(wanted).await {
            Ok(found) => found,
            Err(e) => {
                return refuse(
                    Code::Failed,
                    format!("{}; the store cannot be searched: {}", unknown.message, chain(&e)),
                );
            }
        };
        let is_free = |head: &&Head| head.state == HeadState::Archived;
        let free: Vec<&Head> = found.iter().filter(is_free).collect();
        match (&free[..], &found[..], unread) {
            ([head], ..) => {
                let front = head.current.expect("a head that is archived has a front");
                Ok(((*head).clone(), front))
            }
            ([], [], None) => {
                refuse(Code::Unknown, format!("{}; nor is it in store {}", unknown.message, self.store.name()))
            }
            ([], [], Some(e)) => {
                let message = format!("{}; not everything in the store can be read: {}", unknown.message, chain(&e));
                refuse(Code::Unknown, message)
            }
            ([], [head, ..], _) if head.owner.id == self.owner => {
                let message = format!(
                    "proc {wanted} in the store is this data directory's and may be running; it is not taken over"
                );
                refuse(Code::State, message)
            }
            ([], [head, ..], _) => {
                let message = format!(
                    "proc {wanted} is in the store, but data directory {} may be running it: `kip sleep {wanted} --to archived` there first",
                    head.owner.id
                );
                refuse(Code::State, message)
            }
            (several, ..) => {
                let ids: Vec<String> = several.iter().map(|head| head.proc.to_string()).collect();
                let message = format!(
                    "the store has {} procs {wanted} that run nowhere: choose by `kip wake NAME --id ID` from {}",
                    ids.len(),
                    ids.join(", ")
                );
                refuse(Code::State, message)
            }
        }
    }
}
