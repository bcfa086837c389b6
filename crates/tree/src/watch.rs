//! Watches of nodes.
//!
//! All watches of a realm have one reading of its changes, and with it one knowledge of where
//! directories are (`follow`). A watch that begins in the past, or was too slow, reads for itself
//! until it is where that is.

use crate::error::TreeError;
use crate::follow::{RealmFollower, RealmFollowers, RevisionChanges};
use crate::layout;
use crate::places::DirectoryPlaces;
use crate::tree::NameTree;
use kip_meta::{KeySet, Meta, MetaError, MetaWatch, RangeRequest};
use kip_types::name::Realm;
use kip_types::tree::{TreeChange, TreeChangeKind, TreePath};
use std::sync::{Arc, Weak};
use tokio::sync::broadcast;

/// Where a watch has its changes from.
enum WatchSource {
    /// Its own reading.
    Own { watch: MetaWatch, places: DirectoryPlaces },
    /// That of all watches of its realm.
    Shared(broadcast::Receiver<Arc<RevisionChanges>>),
}

/// Changes of a node, or of a whole subtree.
pub struct TreeWatch {
    /// Not held: the store is closed when the trees are dropped, whatever is watched.
    meta: Weak<dyn Meta>,
    followers: Arc<RealmFollowers>,
    follower: Arc<RealmFollower>,
    source: WatchSource,
    realm: Realm,
    path: TreePath,
    with_all_below: bool,
    /// The revision up to which everything was given.
    seen: u64,
}

impl NameTree {
    /// Changes after the revision `after`, or from now on. They concern the node at `path`, and all
    /// below it if so asked, whether or not there is one now. A directory above it that is moved
    /// concerns it, too.
    ///
    /// # Errors
    /// [`TreeError::Forgotten`], [`TreeError::NotYet`].
    pub async fn watch(
        &self,
        realm: &Realm,
        path: &TreePath,
        after: Option<u64>,
        with_all_below: bool,
    ) -> Result<TreeWatch, TreeError> {
        let follower = self.followers.of(&*self.meta, realm).await?;
        // What comes between this and the revision of now is left out.
        let new = follower.all_new();
        let nothing = RangeRequest::all(KeySet::One(layout::entry(realm, "", ""))).limit(1);
        let newest = self.meta.range(&nothing).await?.revision;
        if let Some(wanted) = after.filter(|after| *after > newest) {
            return Err(TreeError::NotYet { wanted, newest });
        }
        let seen = after.unwrap_or(newest);
        let shared = if after.is_none() { new } else { follower.after(seen) };
        let source = match shared {
            Some(changes) => WatchSource::Shared(changes),
            None => own_source(&*self.meta, realm, seen).await?,
        };
        let (meta, followers) = (Arc::downgrade(&self.meta), Arc::clone(&self.followers));
        let (realm, path) = (realm.clone(), path.clone());
        Ok(TreeWatch { meta, followers, follower, source, realm, path, with_all_below, seen })
    }
}

/// A reading of a watch's own after a revision.
async fn own_source(meta: &dyn Meta, realm: &Realm, seen: u64) -> Result<WatchSource, TreeError> {
    let (places, _) = DirectoryPlaces::read(meta, realm, Some(seen)).await?;
    let watch = meta.watch(layout::watched(realm), seen + 1).await?;
    Ok(WatchSource::Own { watch, places })
}

impl TreeWatch {
    /// The revision up to which everything was given: another watch can go on after it.
    pub fn seen(&self) -> u64 {
        self.seen
    }

    /// The changes of the next revision that has some; waits for them. Cancel safe.
    ///
    /// # Errors
    /// [`TreeError::Forgotten`] if the watch is too slow; those of the store.
    pub async fn next(&mut self) -> Result<Vec<TreeChange>, TreeError> {
        loop {
            let all = match &mut self.source {
                WatchSource::Own { watch, places } => {
                    let batch = watch.next().await?;
                    let revision = batch.revision;
                    let changes = places.take(&self.realm, batch)?;
                    self.seen = revision;
                    if let Some(shared) = self.follower.after(revision) {
                        self.source = WatchSource::Shared(shared);
                    }
                    self.of_it(&changes)
                }
                WatchSource::Shared(changes) => match changes.recv().await {
                    Ok(of_revision) if of_revision.revision <= self.seen => continue,
                    Ok(of_revision) => {
                        self.seen = of_revision.revision;
                        self.of_it(&of_revision.changes)
                    }
                    // It was too slow, or the reading has failed.
                    Err(_) => {
                        let meta = self.meta.upgrade().ok_or(TreeError::Store(MetaError::Closed))?;
                        self.source = own_source(&*meta, &self.realm, self.seen).await?;
                        self.follower = self.followers.of(&*meta, &self.realm).await?;
                        continue;
                    }
                },
            };
            if !all.is_empty() {
                return Ok(all);
            }
        }
    }

    /// Those that concern it.
    fn of_it(&self, changes: &[TreeChange]) -> Vec<TreeChange> {
        changes.iter().filter(|change| self.concerns(change)).cloned().collect()
    }

    fn concerns(&self, change: &TreeChange) -> bool {
        [Some(&change.path), change.from.as_ref()].into_iter().flatten().any(|path| {
            *path == self.path
                || self.with_all_below && path.is_within(&self.path)
                || change.kind == TreeChangeKind::Moved && self.path.is_within(path)
        })
    }
}
