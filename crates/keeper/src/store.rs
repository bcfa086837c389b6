//! What is held, under which names: a map whose every change is all or nothing. Does no I/O and
//! knows nothing of descriptors, which are handles of any type here.
//!
//! A handle is shared: it lives until the name is dropped and the last snapshot taken of it is.

use crate::protocol::{BadHandleName, Select, check_name};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::rc::Rc;

/// A name with one of its handles.
pub type HandleEntry<H> = (Rc<str>, Rc<H>);

/// A rename would overwrite a name, or make one that is not a name.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RenameError {
    /// The new name is in use.
    #[error("{0:?} is in use already")]
    Taken(String),
    /// The new name is not one.
    #[error(transparent)]
    BadName(#[from] BadHandleName),
}

/// Handles under names.
#[derive(Debug)]
pub struct HandleStore<H> {
    names: BTreeMap<Rc<str>, Vec<Rc<H>>>,
    handles: usize,
    changed: BTreeSet<Rc<str>>,
}

impl<H> Default for HandleStore<H> {
    fn default() -> Self {
        HandleStore { names: BTreeMap::new(), handles: 0, changed: BTreeSet::new() }
    }
}

impl<H> HandleStore<H> {
    /// Names in use.
    pub fn names(&self) -> usize {
        self.names.len()
    }

    /// Names of which something has changed since the last call: what they hold, or that they are.
    pub fn take_changed(&mut self) -> BTreeSet<Rc<str>> {
        std::mem::take(&mut self.changed)
    }

    /// Handles held.
    pub fn handles(&self) -> usize {
        self.handles
    }

    /// Drops what `clear` selects, then sets each name of `entries` to its handles there. Returns
    /// how many names were set.
    pub fn put(&mut self, clear: Option<&Select>, entries: Vec<(String, H)>) -> usize {
        if let Some(select) = clear {
            self.remove(select);
        }
        let mut new: BTreeMap<Rc<str>, Vec<Rc<H>>> = BTreeMap::new();
        for (name, handle) in entries {
            new.entry(name.into()).or_default().push(Rc::new(handle));
        }
        let count = new.len();
        for (name, handles) in new {
            self.handles += handles.len();
            self.changed.insert(Rc::clone(&name));
            if let Some(old) = self.names.insert(name, handles) {
                self.handles -= old.len();
            }
        }
        count
    }

    /// Everything selected, in the order of names, as it is now.
    pub fn snapshot(&self, select: &Select) -> Vec<HandleEntry<H>> {
        let entries = |(name, handles): (&Rc<str>, &Vec<Rc<H>>)| {
            let name = name.clone();
            handles.iter().map(move |h| (name.clone(), h.clone())).collect::<Vec<_>>()
        };
        self.range(select).flat_map(entries).collect()
    }

    /// Up to `most` names that start with `prefix` and come after `after`, with how many handles
    /// each holds, and whether there are more.
    pub fn list(&self, prefix: &str, after: Option<&str>, most: usize) -> (Vec<(String, usize)>, bool) {
        let from = match after {
            Some(after) if after >= prefix => Bound::Excluded(after),
            _ => Bound::Included(prefix),
        };
        let mut found = self
            .names
            .range::<str, _>((from, Bound::Unbounded))
            .take_while(|(name, _)| name.starts_with(prefix))
            .map(|(name, handles)| (name.to_string(), handles.len()));
        let part: Vec<_> = found.by_ref().take(most).collect();
        let more = found.next().is_some();
        (part, more)
    }

    /// Lets go of everything selected. Returns how many names that were.
    pub fn remove(&mut self, select: &Select) -> usize {
        let names: Vec<Rc<str>> = self.range(select).map(|(name, _)| name.clone()).collect();
        self.changed.extend(names.iter().cloned());
        for name in &names {
            let handles = self.names.remove(name).expect("the name was found a moment ago");
            self.handles -= handles.len();
        }
        names.len()
    }

    /// Replaces the prefix `from` of all names that have it by `to`. Returns how many names that
    /// were.
    ///
    /// # Errors
    /// [`RenameError`], and nothing is changed.
    pub fn rename(&mut self, from: &str, to: &str) -> Result<usize, RenameError> {
        let select = Select::Prefix(from.to_owned());
        let mut renamed: Vec<(Rc<str>, Rc<str>)> = Vec::new();
        for (old, _) in self.range(&select) {
            let new: Rc<str> = format!("{to}{}", &old[from.len()..]).into();
            check_name(&new)?;
            if self.names.contains_key(&new) && !select.matches(&new) {
                return Err(RenameError::Taken(new.to_string()));
            }
            renamed.push((old.clone(), new));
        }
        let mut moved = Vec::with_capacity(renamed.len());
        for (old, new) in renamed {
            self.changed.extend([Rc::clone(&old), Rc::clone(&new)]);
            moved.push((new, self.names.remove(&old).expect("the name was found a moment ago")));
        }
        let count = moved.len();
        self.names.extend(moved);
        Ok(count)
    }

    fn range<'a>(&'a self, select: &'a Select) -> impl Iterator<Item = (&'a Rc<str>, &'a Vec<Rc<H>>)> {
        let from = match select {
            Select::Name(name) => name,
            Select::Prefix(prefix) => prefix,
        };
        self.names
            .range::<str, _>((Bound::Included(from.as_str()), Bound::Unbounded))
            .take_while(|(name, _)| select.matches(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefix(p: &str) -> Select {
        Select::Prefix(p.to_owned())
    }

    fn filled(names: &[(&str, u32)]) -> HandleStore<u32> {
        let mut store = HandleStore::default();
        store.put(None, names.iter().map(|(n, h)| ((*n).to_owned(), *h)).collect());
        store
    }

    fn all(store: &HandleStore<u32>) -> Vec<(String, u32)> {
        store.snapshot(&prefix("")).into_iter().map(|(n, h)| (n.to_string(), *h)).collect()
    }

    fn owned(names: &[(&str, u32)]) -> Vec<(String, u32)> {
        names.iter().map(|(n, h)| ((*n).to_owned(), *h)).collect()
    }

    #[test]
    fn a_put_replaces_its_names_and_nothing_else() {
        let mut store = filled(&[("a/x", 1), ("a/x", 2), ("b", 3)]);
        assert_eq!((store.names(), store.handles()), (2, 3));
        store.put(None, owned(&[("a/x", 4), ("c", 5)]));
        assert_eq!(all(&store), owned(&[("a/x", 4), ("b", 3), ("c", 5)]));
        assert_eq!((store.names(), store.handles()), (3, 3));
        store.put(Some(&prefix("a/")), owned(&[("a/y", 6)]));
        assert_eq!(all(&store), owned(&[("a/y", 6), ("b", 3), ("c", 5)]));
    }

    #[test]
    fn prefixes_select_neighbours_only() {
        let mut store = filled(&[("web", 1), ("web/a", 2), ("web/b", 3), ("web2/a", 4)]);
        assert_eq!(store.list("web/", None, 10), (vec![("web/a".to_owned(), 1), ("web/b".to_owned(), 1)], false));
        assert_eq!(store.remove(&Select::Name("web".to_owned())), 1);
        assert_eq!(store.remove(&prefix("web/")), 2);
        assert_eq!(store.remove(&prefix("web/")), 0);
        assert_eq!(all(&store), owned(&[("web2/a", 4)]));
        assert_eq!(store.handles(), 1);
    }

    #[test]
    fn listings_continue_where_they_stopped() {
        let store = filled(&[("a/1", 1), ("a/1", 1), ("a/2", 2), ("a/3", 3), ("b", 4)]);
        assert_eq!(store.list("a/", None, 2), (vec![("a/1".to_owned(), 2), ("a/2".to_owned(), 1)], true));
        assert_eq!(store.list("a/", Some("a/2"), 2), (vec![("a/3".to_owned(), 1)], false));
        assert_eq!(store.list("a/", Some("A"), 1).0[0].0, "a/1");
        assert_eq!(store.list("a/", Some("z"), 1), (vec![], false));
    }

    #[test]
    fn renames_are_all_or_nothing() {
        let mut store = filled(&[("new/1", 1), ("new/2", 2), ("web/2", 3)]);
        let before = all(&store);
        assert_eq!(store.rename("new/", "web/"), Err(RenameError::Taken("web/2".to_owned())));
        let long = "l".repeat(200);
        assert!(matches!(store.rename("new/", &long), Err(RenameError::BadName(_))));
        assert_eq!(all(&store), before);
        assert_eq!(store.rename("new/", "new/deep/"), Ok(2));
        assert_eq!(store.rename("new/deep/", ""), Ok(2));
        assert_eq!(all(&store), owned(&[("1", 1), ("2", 2), ("web/2", 3)]));
        assert_eq!(store.handles(), 3);
        assert_eq!(store.rename("nothing", "x"), Ok(0));
    }

    #[test]
    fn a_snapshot_outlives_the_name() {
        let mut store = filled(&[("a", 1)]);
        let snapshot = store.snapshot(&Select::Name("a".to_owned()));
        store.remove(&prefix(""));
        assert_eq!(*snapshot[0].1, 1);
        assert_eq!(store.handles(), 0);
    }
}
