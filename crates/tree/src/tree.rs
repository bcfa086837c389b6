//! The tree: read, write, make, remove, move.

use crate::error::TreeError;
use crate::follow::RealmFollowers;
use crate::layout::{self, DirectoryPlace, Node, NodeEntry};
use crate::places::DirectoryPlaces;
use crate::walk;
use kip_meta::{Condition, KeySet, LeaseId, Meta, RangeRequest, Transaction, TransactionOutcome};
use kip_types::name::Realm;
use kip_types::tree::{
    DEEPEST_PATH, ExpectedNode, MOST_FILE_BYTES, NodeKind, NodeStat, TreeFence, TreeLeaseId, TreePath,
};
use prost::Message;
use std::sync::Arc;

/// How often a change begins again because others changed the same nodes.
const ATTEMPTS: usize = 200;
/// Nodes that are read at once.
const AT_ONCE: usize = 1000;

/// The trees of all realms in a metadata store. Clones share it.
#[derive(Clone)]
pub struct NameTree {
    pub(crate) meta: Arc<dyn Meta>,
    pub(crate) followers: Arc<RealmFollowers>,
}

/// How a file is written.
#[derive(Debug, Clone, Default)]
pub struct FileWrite {
    /// What must be there.
    pub expected: ExpectedNode,
    /// The lease with which the file goes from now on; without one it keeps what it has.
    pub lease: Option<TreeLeaseId>,
    /// What must be so elsewhere.
    pub fence: Option<TreeFence>,
}

/// One attempt at a change: its conditions, and then its changes.
pub(crate) struct Attempt {
    conditions: Vec<Condition>,
}

impl Attempt {
    pub(crate) fn new(conditions: Vec<Condition>) -> Attempt {
        Attempt { conditions }
    }

    pub(crate) fn and(mut self, conditions: Vec<Condition>) -> Attempt {
        // What two paths have in common is compared once.
        for condition in conditions {
            if !self.conditions.contains(&condition) {
                self.conditions.push(condition);
            }
        }
        self
    }

    fn begin(self) -> Transaction {
        let mut conditions = self.conditions.into_iter();
        let first = conditions.next().expect("each attempt has the condition of its node");
        conditions.fold(Transaction::when(first), Transaction::and)
    }
}

impl NameTree {
    /// Trees in this store.
    pub fn new(meta: Arc<dyn Meta>) -> NameTree {
        NameTree { meta, followers: Arc::default() }
    }

    /// A node, without its contents.
    ///
    /// # Errors
    /// [`TreeError::NotFound`], [`TreeError::NotADirectory`].
    pub async fn stat(&self, realm: &Realm, path: &TreePath) -> Result<NodeStat, TreeError> {
        if path.split().is_none() {
            return Ok(root());
        }
        let place = walk::place(&*self.meta, realm, path).await?;
        Ok(place.existing(path)?.stat(path.clone()))
    }

    /// The nodes of a directory, sorted by name.
    ///
    /// # Errors
    /// [`TreeError::NotFound`], [`TreeError::NotADirectory`].
    pub async fn list(&self, realm: &Realm, path: &TreePath) -> Result<Vec<NodeStat>, TreeError> {
        let directory = walk::directory(&*self.meta, realm, path).await?;
        let all = layout::entries(realm, &directory.id);
        let (prefix, end) = (all.first().len(), all.end().expect("it is no prefix of bytes 0xff"));
        let (mut nodes, mut from, mut at) = (Vec::new(), all.first().to_vec(), None);
        loop {
            let keys = KeySet::interval(from, end.clone());
            let found = self.meta.range(&RangeRequest { keys, limit: Some(AT_ONCE), at }).await?;
            // Further nodes are read as they were when the first ones were.
            at.get_or_insert(found.revision);
            for kv in &found.keys {
                let name = String::from_utf8_lossy(&kv.key[prefix..]);
                nodes.push(layout::node(kv)?.stat(path.join(&name)));
            }
            match found.keys.last().filter(|_| found.more) {
                Some(last) => from = [last.key.as_slice(), &[0]].concat(),
                None => return Ok(nodes),
            }
        }
    }

    /// A file with its contents.
    ///
    /// # Errors
    /// [`TreeError::NotFound`], [`TreeError::NotADirectory`], [`TreeError::IsADirectory`].
    pub async fn read(&self, realm: &Realm, path: &TreePath) -> Result<(NodeStat, Vec<u8>), TreeError> {
        if path.split().is_none() {
            return Err(TreeError::IsADirectory(path.clone()));
        }
        for _ in 0..ATTEMPTS {
            let place = walk::place(&*self.meta, realm, path).await?;
            let node = place.existing(path)?;
            if node.entry.is_directory {
                return Err(TreeError::IsADirectory(path.clone()));
            }
            // Contents that are gone were written anew: the entry names others by now.
            if let Some(kv) = self.meta.get(&layout::contents(realm, &node.entry.id)).await? {
                return Ok((node.stat(path.clone()), kv.value));
            }
        }
        Err(TreeError::Contended(path.clone()))
    }

    /// Writes a file: makes it, or gives it other contents.
    ///
    /// # Errors
    /// [`TreeError::TooLarge`], [`TreeError::NotFound`] for its directory or for a version that was
    /// expected, [`TreeError::Exists`], [`TreeError::Stale`], [`TreeError::IsADirectory`],
    /// [`TreeError::Fenced`], [`TreeError::LeaseGone`].
    pub async fn write(
        &self,
        realm: &Realm,
        path: &TreePath,
        contents: &[u8],
        how: &FileWrite,
    ) -> Result<NodeStat, TreeError> {
        if contents.len() > MOST_FILE_BYTES {
            return Err(TreeError::TooLarge { path: path.clone(), bytes: contents.len() });
        }
        for _ in 0..ATTEMPTS {
            let place = walk::place(&*self.meta, realm, path).await?;
            check_expected(path, place.node.as_ref(), how.expected)?;
            if place.node.as_ref().is_some_and(|node| node.entry.is_directory) {
                return Err(TreeError::IsADirectory(path.clone()));
            }
            let lease = how.lease.map(|lease| LeaseId(lease.0)).or(place.node.as_ref().and_then(|node| node.lease));
            let entry = NodeEntry { is_directory: false, id: layout::new_id(), size_bytes: contents.len() as u64 };
            let fence = self.fence(realm, how.fence.as_ref()).await?;
            let attempt = Attempt::new(place.conditions()).and(fence).and(self.owned(realm, how.lease).await?);
            let mut change = attempt.begin().put_leased(place.key.clone(), entry.encode_to_vec(), lease).put_leased(
                layout::contents(realm, &entry.id),
                contents,
                lease,
            );
            if let Some(old) = &place.node {
                change = change.delete(KeySet::One(layout::contents(realm, &old.entry.id)));
            }
            match self.meta.transact(&change).await {
                Ok(TransactionOutcome::Done { revision }) => {
                    let created = place.node.map_or(revision, |node| node.created);
                    return Ok(Node { entry, modified: revision, created, lease }.stat(path.clone()));
                }
                Ok(TransactionOutcome::Refused { .. }) => {}
                // The lease that the file had, which goes with it: it is gone, too.
                Err(kip_meta::MetaError::LeaseGone(gone)) if how.lease.is_none_or(|given| given.0 != gone.0) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(TreeError::Contended(path.clone()))
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// [`TreeError::Exists`], [`TreeError::NotFound`] for the directory it is to be in,
    /// [`TreeError::Fenced`].
    pub async fn make_directory(
        &self,
        realm: &Realm,
        path: &TreePath,
        fence: Option<&TreeFence>,
    ) -> Result<NodeStat, TreeError> {
        let Some((_, name)) = path.split() else { return Err(TreeError::Exists(path.clone())) };
        for _ in 0..ATTEMPTS {
            let place = walk::place(&*self.meta, realm, path).await?;
            check_expected(path, place.node.as_ref(), ExpectedNode::Absent)?;
            let entry = NodeEntry { is_directory: true, id: layout::new_id(), size_bytes: 0 };
            let at = DirectoryPlace { parent: place.parent.id.clone(), name: name.to_owned() };
            let change = Attempt::new(place.conditions())
                .and(self.fence(realm, fence).await?)
                .begin()
                .put(place.key.clone(), entry.encode_to_vec())
                .put(layout::place(realm, &entry.id), at.encode_to_vec());
            if let Some(revision) = self.meta.transact(&change).await?.done() {
                return Ok(Node { entry, modified: revision, created: revision, lease: None }.stat(path.clone()));
            }
        }
        Err(TreeError::Contended(path.clone()))
    }

    /// Removes a file or an empty directory.
    ///
    /// # Errors
    /// [`TreeError::NotFound`], [`TreeError::NotEmpty`], [`TreeError::Stale`], [`TreeError::Root`],
    /// [`TreeError::Fenced`].
    pub async fn remove(
        &self,
        realm: &Realm,
        path: &TreePath,
        version: Option<u64>,
        fence: Option<&TreeFence>,
    ) -> Result<(), TreeError> {
        for _ in 0..ATTEMPTS {
            let place = walk::place(&*self.meta, realm, path).await?;
            let node = place.existing(path)?;
            check_expected(path, Some(node), version.map_or(ExpectedNode::Any, ExpectedNode::Version))?;
            let attempt = Attempt::new(place.conditions()).and(self.fence(realm, fence).await?);
            let change = if node.entry.is_directory {
                let inside = layout::entries(realm, &node.entry.id);
                if !self.meta.range(&RangeRequest::all(inside.clone()).limit(1)).await?.keys.is_empty() {
                    return Err(TreeError::NotEmpty(path.clone()));
                }
                let attempt = attempt.and(vec![Condition::Absent(inside)]);
                attempt.begin().delete(KeySet::One(layout::place(realm, &node.entry.id)))
            } else {
                attempt.begin().delete(KeySet::One(layout::contents(realm, &node.entry.id)))
            };
            if self.meta.transact(&change.delete(KeySet::One(place.key.clone()))).await?.done().is_some() {
                return Ok(());
            }
        }
        Err(TreeError::Contended(path.clone()))
    }

    /// Moves a file, or a directory with all that is in it. With `replace` a file takes the place
    /// of a file that is there.
    ///
    /// # Errors
    /// [`TreeError::NotFound`], [`TreeError::Exists`], [`TreeError::IntoItself`],
    /// [`TreeError::TooDeep`], [`TreeError::Root`], [`TreeError::Fenced`].
    pub async fn rename(
        &self,
        realm: &Realm,
        from: &TreePath,
        to: &TreePath,
        replace: bool,
        fence: Option<&TreeFence>,
    ) -> Result<NodeStat, TreeError> {
        let Some((_, name)) = to.split() else { return Err(TreeError::Root) };
        for _ in 0..ATTEMPTS {
            let source = walk::place(&*self.meta, realm, from).await?;
            let node = source.existing(from)?.clone();
            if from == to {
                return Ok(node.stat(to.clone()));
            }
            if to.is_within(from) {
                return Err(TreeError::IntoItself { from: from.clone(), to: to.clone() });
            }
            let target = walk::place(&*self.meta, realm, to).await?;
            if target.node.as_ref().is_some_and(|old| !replace || !can_be_replaced(old, &node)) {
                return Err(TreeError::Exists(to.clone()));
            }
            if node.entry.is_directory {
                self.check_depth(realm, &node.entry.id, to).await?;
            }
            let attempt = Attempt::new(source.conditions()).and(target.conditions());
            let mut change = attempt
                .and(self.fence(realm, fence).await?)
                .begin()
                .delete(KeySet::One(source.key.clone()))
                .put_leased(target.key.clone(), node.entry.encode_to_vec(), node.lease);
            if node.entry.is_directory {
                let at = DirectoryPlace { parent: target.parent.id.clone(), name: name.to_owned() };
                change = change.put(layout::place(realm, &node.entry.id), at.encode_to_vec());
            }
            if let Some(old) = &target.node {
                change = change.delete(KeySet::One(layout::contents(realm, &old.entry.id)));
            }
            match self.meta.transact(&change).await {
                Ok(TransactionOutcome::Done { revision }) => {
                    let created = target.node.map_or(revision, |old| old.created);
                    return Ok(Node { modified: revision, created, ..node }.stat(to.clone()));
                }
                // The lease of the file, which is gone with it.
                Ok(TransactionOutcome::Refused { .. }) | Err(kip_meta::MetaError::LeaseGone(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(TreeError::Contended(from.clone()))
    }

    /// Refuses a move after which nodes would be deeper than a path can say.
    async fn check_depth(&self, realm: &Realm, id: &str, to: &TreePath) -> Result<(), TreeError> {
        let (places, _) = DirectoryPlaces::read(&*self.meta, realm, None).await?;
        // Files are one deeper than the directories that they are in.
        let depth = to.names().count() + places.height(id) + 1;
        if depth > DEEPEST_PATH { Err(TreeError::TooDeep(to.clone())) } else { Ok(()) }
    }

    /// That the node of a fence is the one that its epoch names.
    async fn fence(&self, realm: &Realm, fence: Option<&TreeFence>) -> Result<Vec<Condition>, TreeError> {
        let Some(TreeFence { path, epoch }) = fence else { return Ok(Vec::new()) };
        let over = || TreeError::Fenced { path: path.clone(), epoch: *epoch };
        let place = match walk::place(&*self.meta, realm, path).await {
            Ok(place) => place,
            Err(TreeError::NotFound(_) | TreeError::NotADirectory(_)) => return Err(over()),
            Err(error) => return Err(error),
        };
        if place.node.as_ref().is_none_or(|node| node.created != *epoch) {
            return Err(over());
        }
        let mut conditions = place.parent.stays;
        conditions.push(Condition::Created(place.key, *epoch));
        Ok(conditions)
    }

    /// That a lease is one of this realm.
    async fn owned(&self, realm: &Realm, lease: Option<TreeLeaseId>) -> Result<Vec<Condition>, TreeError> {
        let Some(id) = lease else { return Ok(Vec::new()) };
        let key = layout::lease(realm, id);
        match self.meta.get(&key).await? {
            Some(_) => Ok(vec![Condition::Exists(key)]),
            None => Err(TreeError::LeaseGone(id)),
        }
    }
}

/// The root is always there, and never changes.
fn root() -> NodeStat {
    let (path, kind) = (TreePath::root(), NodeKind::Directory);
    NodeStat { path, kind, size_bytes: 0, version: 0, created: 0, lease: None }
}

/// A file that goes with a lease is not replaced: its epoch would pass to another node.
fn can_be_replaced(old: &Node, by: &Node) -> bool {
    !old.entry.is_directory && !by.entry.is_directory && old.lease.is_none()
}

fn check_expected(path: &TreePath, node: Option<&Node>, expected: ExpectedNode) -> Result<(), TreeError> {
    match (expected, node) {
        (ExpectedNode::Absent, Some(_)) => Err(TreeError::Exists(path.clone())),
        (ExpectedNode::Version(_), None) => Err(TreeError::NotFound(path.clone())),
        (ExpectedNode::Version(wanted), Some(node)) if node.modified != wanted => {
            Err(TreeError::Stale { path: path.clone(), wanted, found: node.modified })
        }
        _ => Ok(()),
    }
}
