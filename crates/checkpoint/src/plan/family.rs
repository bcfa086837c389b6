//! Which process makes which: how each process of a tree gets the parent, the session and the group
//! that it had.
//!
//! A process is made by its parent if that is in its session, or if it leads its own. All others
//! had their session from a process that is not their parent any more, or from their parent before
//! that began a session of its own:
//!
//! ```text
//! child     its parent makes it
//! early     the same, before the parent's setsid(2)
//! sibling   its session's leader makes it as a child of the leader's parent; where the leader has ended, a ghost of that number
//! orphan    a ghost that the session's leader makes, makes it and ends: pid 1 is its parent from then on
//! ```
//!
//! It joins its group when it has made all of its own, which begin with the group that it was made
//! with: a parent may be in the group of a child. Pure: knows numbers, and nothing of images or of
//! the restorer. An error names the first process that it fails for.

use std::collections::BTreeMap;

/// A process, by numbers inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub pid: u64,
    pub parent: u64,
    pub group: u64,
    pub session: u64,
    /// It takes orphans: prctl(2), PR_SET_CHILD_SUBREAPER.
    pub takes_orphans: bool,
}

/// The process that forks another one, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Maker {
    /// Index in the order of making.
    pub index: usize,
    /// The maker's parent is its parent, too.
    pub sibling: bool,
    /// Before the maker begins a session.
    pub early: bool,
}

/// How a process joins its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Joins {
    /// It was made with it, or leads its session.
    Inherits,
    /// It is the group's leader, or there is a process in it already, or will be.
    Enters,
    /// The group's leader has ended: another process leads it until this one is in it.
    Lends,
}

/// A process in the order of making.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Member {
    pub pid: u64,
    /// Place in what was given; none for a ghost, which has ended and gone.
    pub entry: Option<usize>,
    /// None for pid 1.
    pub maker: Option<Maker>,
    pub session: u64,
    pub group: u64,
    pub joins: Joins,
    /// Session and group that it is made with.
    born: (u64, u64),
}

impl Member {
    fn leads_session(&self) -> bool {
        self.session == self.pid
    }

    /// Session and group that those are made with that it makes, but for early ones.
    fn gives(&self) -> (u64, u64) {
        // setsid(2) makes a process lead a group as well.
        (self.session, if self.leads_session() { self.pid } else { self.born.1 })
    }
}

/// What a process is made into.
struct Made {
    maker: Maker,
    born: (u64, u64),
}

/// The order of making.
struct HelperOrder<'a> {
    entries: &'a [Entry],
    made: Vec<Member>,
    /// A number that no thread, session or group has; nor has one above it.
    spare: u64,
}

/// The order in which a tree is made, pid 1 first, makers before what they make. No thread has a
/// number from `spare` on.
///
/// # Errors
/// What cannot be made, in words.
pub(super) fn order(entries: &[Entry], spare: u64) -> Result<Vec<Member>, String> {
    let Some(init) = entries.iter().position(|e| e.pid == 1) else { return Err("a tree without pid 1".to_owned()) };
    let Entry { session, group, .. } = entries[init];
    let joins = Joins::Inherits;
    let first = Member { pid: 1, entry: Some(init), maker: None, session, group, joins, born: (session, group) };
    let mut order = HelperOrder { entries, made: vec![first], spare };
    let mut left: Vec<usize> = (0..entries.len()).filter(|n| *n != init).collect();
    while !left.is_empty() {
        let mut next = None;
        for (place, entry) in left.iter().enumerate() {
            if let Some(made) = order.maker_of(&entries[*entry])? {
                next = Some((place, made));
                break;
            }
        }
        let Some((place, Made { maker, born })) = next else { return Err("a process without a parent".to_owned()) };
        let entry = left.remove(place);
        let Entry { pid, group, session, .. } = entries[entry];
        let joins = if session == pid || born.1 == group { Joins::Inherits } else { Joins::Enters };
        order.made.push(Member { pid, entry: Some(entry), maker: Some(maker), session, group, joins, born });
    }
    order.lend()?;
    Ok(order.made)
}

impl HelperOrder<'_> {
    fn at(&self, pid: u64) -> Option<usize> {
        self.made.iter().position(|member| member.pid == pid)
    }

    /// The maker of a process; none if the maker is not there yet.
    fn maker_of(&mut self, entry: &Entry) -> Result<Option<Made>, String> {
        let Some(parent) = self.at(entry.parent) else { return Ok(None) };
        let (member, leads) = (self.made[parent], entry.session == entry.pid);
        let child = Maker { index: parent, sibling: false, early: false };
        let plain = Made { maker: child, born: member.gives() };
        let wanted = if leads { self.was_born_in(entry).unwrap_or(member.session) } else { entry.session };
        if wanted == member.session {
            return Ok(Some(plain));
        }
        if member.leads_session() && member.born.0 == wanted {
            return Ok(Some(Made { maker: Maker { early: true, ..child }, born: member.born }));
        }
        let leader = match self.at(wanted) {
            // It comes later.
            None if self.entries.iter().any(|e| e.pid == wanted) => return Ok(None),
            None => self.ghost(parent, wanted),
            Some(leader) => leader,
        };
        let session = self.made[leader];
        if session.maker.is_some_and(|maker| maker.index == parent && !maker.sibling) {
            let maker = Maker { index: leader, sibling: true, early: false };
            return Ok(Some(Made { maker, born: session.gives() }));
        }
        // Only pid 1 takes every orphan for certain.
        if parent == 0 && session.entry.is_some() && !self.is_below_another_that_takes(leader) {
            return Ok(Some(self.orphan(leader)));
        }
        if leads {
            return Ok(Some(plain));
        }
        Err(format!(
            "process {} is in session {wanted}, which none of its parents leads and which it cannot be given",
            entry.pid
        ))
    }

    /// The session in which a process had children before it began its own, if others are in that,
    /// too, for then it is to be the same one. Where only its children are, a leader for them will
    /// do.
    fn was_born_in(&self, entry: &Entry) -> Option<u64> {
        let is_of = |pid: u64, session: u64| self.entries.iter().any(|e| e.pid == pid && e.session == session);
        let mut strangers = self
            .entries
            .iter()
            .filter(|c| c.parent == entry.pid && c.session != entry.pid && c.session != c.pid)
            .map(|c| c.session);
        strangers.find(|session| {
            let elsewhere = |m: &&Entry| m.session == *session && m.parent != entry.pid && !is_of(m.parent, *session);
            self.entries.iter().any(|m| elsewhere(&m))
        })
    }

    /// One that is made in the session of a process that is none of its parents.
    fn orphan(&mut self, leader: usize) -> Made {
        let (of, ghost) = (self.made[leader], self.spare);
        self.spare += 1;
        let born = of.gives();
        let (maker, joins) = (Some(Maker { index: leader, sibling: false, early: false }), Joins::Inherits);
        self.made.push(Member { pid: ghost, entry: None, maker, session: born.0, group: born.1, joins, born });
        Made { maker: Maker { index: self.made.len() - 1, sibling: false, early: false }, born }
    }

    /// A child of `parent` that lives only to lead a session.
    fn ghost(&mut self, parent: usize, session: u64) -> usize {
        let born = self.made[parent].gives();
        let (maker, joins) = (Some(Maker { index: parent, sibling: false, early: false }), Joins::Inherits);
        self.made.push(Member { pid: session, entry: None, maker, session, group: session, joins, born });
        self.made.len() - 1
    }

    fn is_below_another_that_takes(&self, member: usize) -> bool {
        let by_pid: BTreeMap<u64, &Entry> = self.entries.iter().map(|e| (e.pid, e)).collect();
        let mut at = self.made[member].entry.map(|entry| self.entries[entry].pid);
        while let Some(entry) = at.and_then(|pid| by_pid.get(&pid)).filter(|entry| entry.pid != 1) {
            if entry.takes_orphans {
                return true;
            }
            at = Some(entry.parent);
        }
        false
    }

    /// Groups that a process has to enter and that have no leader any more get one for a moment.
    fn lend(&mut self) -> Result<(), String> {
        let (mut lent, all) = (Vec::new(), self.made.clone());
        for member in self.made.iter_mut().filter(|m| m.joins == Joins::Enters) {
            let of_it = |m: &&Member| m.entry.is_some() && (m.session, m.group) == (member.session, member.group);
            let has_leader = all.iter().filter(of_it).any(|m| m.pid == m.group);
            let has_heir = all.iter().filter(of_it).any(|m| m.joins == Joins::Inherits);
            if has_leader || has_heir || lent.contains(&member.group) {
                continue;
            }
            if all.iter().any(|m| m.pid == member.group) {
                let Member { pid, group, .. } = *member;
                return Err(format!("process {pid} is in group {group}, whose leader has ended"));
            }
            member.joins = Joins::Lends;
            lent.push(member.group);
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "family_tests.rs"]
mod tests;
