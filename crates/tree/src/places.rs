//! Where directories are, and changes of nodes by their paths.
//!
//! The store tells changes of entries, which have the id of their directory. Where directories are
//! is read at one revision, and kept up with from the same changes.

use crate::error::TreeError;
use crate::layout::{self, DirectoryPlace, ROOT, WatchedKey};
use kip_meta::{ChangeBatch, Meta, RangeRequest};
use kip_types::name::Realm;
use kip_types::tree::{DEEPEST_PATH, TreeChange, TreeChangeKind, TreePath};
use std::collections::HashMap;

/// Where directories are, by their ids.
#[derive(Default)]
pub(crate) struct DirectoryPlaces(HashMap<String, DirectoryPlace>);

impl DirectoryPlaces {
    /// Where all directories were at a revision, or are; and the revision.
    pub(crate) async fn read(
        meta: &dyn Meta,
        realm: &Realm,
        at: Option<u64>,
    ) -> Result<(DirectoryPlaces, u64), TreeError> {
        let mut request = RangeRequest::all(layout::places(realm));
        request.at = at;
        let found = meta.range(&request).await?;
        let mut places = DirectoryPlaces::default();
        for kv in &found.keys {
            if let Some(WatchedKey::Place(id)) = layout::watched_key(realm, &kv.key) {
                places.0.insert(id.to_owned(), layout::decode(&kv.value)?);
            }
        }
        Ok((places, at.unwrap_or(found.revision)))
    }

    /// The path of a directory; none for one that is not there, or too deep for a path.
    fn path(&self, id: &str) -> Option<TreePath> {
        let (mut names, mut at) = (Vec::new(), id);
        while at != ROOT {
            let place = self.0.get(at)?;
            names.push(place.name.as_str());
            at = &place.parent;
            if names.len() > DEEPEST_PATH {
                return None;
            }
        }
        Some(names.into_iter().rev().fold(TreePath::root(), |path, name| path.join(name)))
    }

    /// How many directories are one in the other below this one, at most.
    pub(crate) fn height(&self, id: &str) -> usize {
        let mut children: HashMap<&str, Vec<&str>> = HashMap::new();
        for (id, place) in &self.0 {
            children.entry(&place.parent).or_default().push(id);
        }
        let (mut height, mut level) = (0, vec![id]);
        loop {
            level = level.into_iter().flat_map(|id| children.get(id).into_iter().flatten().copied()).collect();
            if level.is_empty() || height > DEEPEST_PATH {
                return height;
            }
            height += 1;
        }
    }

    /// All changes of a revision, and where directories are after it.
    pub(crate) fn take(&mut self, realm: &Realm, batch: ChangeBatch) -> Result<Vec<TreeChange>, TreeError> {
        let ChangeBatch { revision, changes } = batch;
        let mut entries = Vec::new();
        let mut moved = Vec::new();
        for change in &changes {
            match layout::watched_key(realm, &change.key) {
                Some(WatchedKey::Place(id)) => moved.push((id, change)),
                Some(WatchedKey::Entry(directory, name)) => entries.push((directory, name, change)),
                None => {}
            }
        }
        // Paths of what is gone are those of before, and of what is there those of now.
        let before: Vec<_> = entries.iter().map(|(directory, ..)| self.path(directory)).collect();
        for (id, change) in moved {
            match &change.now {
                Some(kv) => self.0.insert(id.to_owned(), layout::decode(&kv.value)?),
                None => self.0.remove(id),
            };
        }
        let mut all = Vec::new();
        for ((directory, name, change), before) in entries.into_iter().zip(before) {
            let parent = if change.now.is_some() { self.path(directory) } else { before };
            let Some(path) = parent.map(|parent| parent.join(name)) else { continue };
            let was = change.before.as_ref().map(layout::node).transpose()?;
            let is = change.now.as_ref().map(layout::node).transpose()?;
            let kind = match (&was, &is) {
                (_, None) => TreeChangeKind::Removed,
                (Some(_), Some(_)) => TreeChangeKind::Written,
                (None, Some(node)) if node.created == node.modified => TreeChangeKind::Created,
                // The store has forgotten what was before.
                (None, Some(_)) => TreeChangeKind::Written,
            };
            let node = is.as_ref().map(|node| node.stat(path.clone()));
            all.push(Changed {
                change: TreeChange { revision, kind, path, from: None, node },
                before: was.map(|node| node.entry.id),
                now: is.map(|node| node.entry.id),
            });
        }
        Ok(paired(all))
    }
}

/// An entry that is in a batch, before it is known what became of its node.
struct Changed {
    change: TreeChange,
    /// The id of the node that was here, and of that which is.
    before: Option<String>,
    now: Option<String>,
}

/// Makes one change of the two entries of a node that was moved.
fn paired(mut all: Vec<Changed>) -> Vec<TreeChange> {
    let gone: HashMap<String, TreePath> = all
        .iter()
        .filter(|changed| changed.now.is_none())
        .filter_map(|changed| Some((changed.before.clone()?, changed.change.path.clone())))
        .collect();
    let mut left = Vec::new();
    for changed in &mut all {
        let from = changed.now.as_ref().and_then(|id| gone.get(id));
        if let Some(from) = from {
            changed.change.kind = TreeChangeKind::Moved;
            changed.change.from = Some(from.clone());
            left.push(from.clone());
        }
    }
    let stays = |changed: &Changed| changed.now.is_some() || !left.contains(&changed.change.path);
    all.into_iter().filter(stays).map(|changed| changed.change).collect()
}
