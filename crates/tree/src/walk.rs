//! From a path to its node, and what must still be so when a change is made.

use crate::error::TreeError;
use crate::layout::{self, Node, ROOT};
use kip_meta::{Condition, KeySet, Meta};
use kip_types::name::Realm;
use kip_types::tree::TreePath;

/// A directory that was found.
pub(crate) struct Directory {
    /// Its id.
    pub(crate) id: String,
    /// That it is where it was, and all directories above it are.
    pub(crate) stays: Vec<Condition>,
}

/// A place in a directory, with the node that is there.
pub(crate) struct Place {
    pub(crate) parent: Directory,
    /// The key of the node's entry.
    pub(crate) key: Vec<u8>,
    pub(crate) node: Option<Node>,
}

impl Place {
    /// That the node is as it was found, or still not there.
    pub(crate) fn unchanged(&self) -> Condition {
        match &self.node {
            Some(node) => Condition::Modified(self.key.clone(), node.modified),
            None => Condition::Absent(KeySet::One(self.key.clone())),
        }
    }

    /// Everything that must still be so.
    pub(crate) fn conditions(&self) -> Vec<Condition> {
        self.parent.stays.iter().cloned().chain([self.unchanged()]).collect()
    }

    /// The node, which must be there.
    pub(crate) fn existing(&self, path: &TreePath) -> Result<&Node, TreeError> {
        self.node.as_ref().ok_or_else(|| TreeError::NotFound(path.clone()))
    }
}

/// Finds a directory.
pub(crate) async fn directory(meta: &dyn Meta, realm: &Realm, path: &TreePath) -> Result<Directory, TreeError> {
    let mut found = Directory { id: ROOT.to_owned(), stays: Vec::new() };
    let mut at = TreePath::root();
    for name in path.names() {
        at = at.join(name);
        let key = layout::entry(realm, &found.id, name);
        let Some(kv) = meta.get(&key).await? else { return Err(TreeError::NotFound(at)) };
        let node = layout::node(&kv)?;
        if !node.entry.is_directory {
            return Err(TreeError::NotADirectory(at));
        }
        found.stays.push(Condition::Modified(key, node.modified));
        found.id = node.entry.id;
    }
    Ok(found)
}

/// Finds a place, and the node there if there is one. The root has no place.
pub(crate) async fn place(meta: &dyn Meta, realm: &Realm, path: &TreePath) -> Result<Place, TreeError> {
    let Some((above, name)) = path.split() else { return Err(TreeError::Root) };
    let parent = directory(meta, realm, &above).await?;
    let key = layout::entry(realm, &parent.id, name);
    let node = meta.get(&key).await?.as_ref().map(layout::node).transpose()?;
    Ok(Place { parent, key, node })
}
