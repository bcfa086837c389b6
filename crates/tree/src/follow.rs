//! The reading of a realm's changes that all its watches share. Ends with the last of them.

use crate::error::TreeError;
use crate::layout;
use crate::places::DirectoryPlaces;
use kip_meta::{Meta, MetaWatch};
use kip_types::name::Realm;
use kip_types::tree::TreeChange;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use tokio::sync::{broadcast, oneshot};

/// Revisions that a watch may be behind the others before it reads for itself.
const BEHIND: usize = 256;

/// What was changed at a revision in a realm.
pub(crate) struct RevisionChanges {
    pub(crate) revision: u64,
    pub(crate) changes: Vec<TreeChange>,
}

/// One reading of a realm's changes, for all its watches. It ends with the last of them.
pub(crate) struct RealmFollower {
    followed: Arc<Mutex<Followed>>,
    /// Closed when this is dropped.
    _needed: oneshot::Sender<()>,
}

/// How far a reading is.
struct Followed {
    /// The revision of the last changes that were sent, or that at which it began.
    seen: u64,
    /// None: it has failed.
    sender: Option<broadcast::Sender<Arc<RevisionChanges>>>,
}

impl RealmFollower {
    fn begin(realm: Realm, mut places: DirectoryPlaces, seen: u64, mut watch: MetaWatch) -> RealmFollower {
        let (needed, mut over) = oneshot::channel();
        let (sender, _) = broadcast::channel(BEHIND);
        let followed = Arc::new(Mutex::new(Followed { seen, sender: Some(sender) }));
        let follows = Arc::clone(&followed);
        tokio::spawn(async move {
            loop {
                let batch = tokio::select! {
                    batch = watch.next() => batch,
                    _ = &mut over => return,
                };
                let taken = batch.map_err(TreeError::from).and_then(|batch| {
                    let revision = batch.revision;
                    Ok(RevisionChanges { revision, changes: places.take(&realm, batch)? })
                });
                let mut followed = follows.lock();
                let Ok(taken) = taken else {
                    // Each watch finds out by itself what is wrong.
                    followed.sender = None;
                    return;
                };
                followed.seen = taken.revision;
                if let Some(sender) = &followed.sender {
                    // None may watch just now.
                    let _ = sender.send(Arc::new(taken));
                }
            }
        });
        RealmFollower { followed, _needed: needed }
    }

    fn is_over(&self) -> bool {
        self.followed.lock().sender.is_none()
    }

    /// All changes after a revision that it has not passed yet. None if it has, or has failed.
    pub(crate) fn after(&self, revision: u64) -> Option<broadcast::Receiver<Arc<RevisionChanges>>> {
        let followed = self.followed.lock();
        followed.sender.as_ref().filter(|_| followed.seen <= revision).map(broadcast::Sender::subscribe)
    }

    /// All that it sends from now on.
    pub(crate) fn all_new(&self) -> Option<broadcast::Receiver<Arc<RevisionChanges>>> {
        self.followed.lock().sender.as_ref().map(broadcast::Sender::subscribe)
    }
}

/// The readings of all realms that have watches.
#[derive(Default)]
pub(crate) struct RealmFollowers(Mutex<HashMap<Realm, Weak<RealmFollower>>>);

impl RealmFollowers {
    /// The reading of a realm, begun if there is none.
    pub(crate) async fn of(&self, meta: &dyn Meta, realm: &Realm) -> Result<Arc<RealmFollower>, TreeError> {
        if let Some(follower) = self.known(realm) {
            return Ok(follower);
        }
        let (places, seen) = DirectoryPlaces::read(meta, realm, None).await?;
        let watch = meta.watch(layout::watched(realm), seen + 1).await?;
        let begun = Arc::new(RealmFollower::begin(realm.clone(), places, seen, watch));
        // Another watch may have been faster.
        let mut all = self.0.lock();
        let other = all.get(realm).and_then(Weak::upgrade).filter(|other| !other.is_over());
        if let Some(other) = other {
            return Ok(other);
        }
        all.retain(|_, follower| follower.strong_count() > 0);
        all.insert(realm.clone(), Arc::downgrade(&begun));
        Ok(begun)
    }

    fn known(&self, realm: &Realm) -> Option<Arc<RealmFollower>> {
        self.0.lock().get(realm).and_then(Weak::upgrade).filter(|follower| !follower.is_over())
    }
}
