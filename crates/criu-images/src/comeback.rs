//! Whether CRIU can restore the images that it has made: it writes some that it refuses to read.
//!
//! Owns the list of what CRIU 4.2 dumps and cannot restore, each in words for the owner of the
//! program. Asked at the freeze, where an error still means that the program goes on, and before
//! the local copy of a generation is given up. Reads a few small images and decides nothing: what
//! CRIU cannot restore, a plan of kip-checkpoint's may. What is not on the list is taken for
//! restorable.

use crate::codes::{kind, state};
use crate::fields::{core_entry, file_entry, mm_entry, pstree_entry, task_core_entry};
use crate::inspect::carry_descriptors;
use crate::system_v::SystemV;
use crate::{CheckpointImageError, Images, Message};
use std::collections::BTreeMap;

/// A process of the tree, as CRIU's `prepare_pstree_ids` sees it.
#[derive(Debug, Clone, Copy)]
struct Member {
    parent: u64,
    session: u64,
    /// The session that it had before it began its own, if a child of it is still in that.
    born: Option<u64>,
}

/// What of the images CRIU cannot restore, in words that name the process; none if nothing is known
/// to be in its way.
///
/// # Errors
/// An image is missing or damaged.
pub fn bars_criu(images: &Images) -> Result<Option<String>, CheckpointImageError> {
    let tree: Vec<Message> = images.entries("pstree.img")?;
    let members = tree.iter().map(|task| {
        let (parent, session) = (task.number(pstree_entry::PPID), task.number(pstree_entry::SID));
        (task.number(pstree_entry::PID), Member { parent, session, born: None })
    });
    let name = |pid: u64| name_of(images, pid);
    if let Some(pid) = lost_in_session(members.collect()) {
        let name = name(pid)?;
        return Ok(Some(format!(
            "process {pid} ({name}) is in a session that was begun elsewhere, by a process that has ended or is none of its parents, setsid(2)"
        )));
    }
    let files = images.entries("files.img")?;
    if files.iter().any(|file| file.number(file_entry::TYPE) == kind::TTY) {
        return Ok(Some("it has a terminal open, which this machine holds for it, pts(4)".to_owned()));
    }
    if carry_descriptors(images)? {
        return Ok(Some("a descriptor is on its way between two sockets, SCM_RIGHTS of unix(7)".to_owned()));
    }
    let kinds: BTreeMap<u64, u64> =
        files.iter().map(|file| (file.number(file_entry::ID), file.number(file_entry::TYPE))).collect();
    let system_v = SystemV::read(images)?;
    for pid in tree.iter().map(|task| task.number(pstree_entry::PID)) {
        let image = format!("mm-{pid}.img");
        let mm = images.entries_if_any(&image)?;
        if let Some(mm) = mm.first().filter(|_| system_v.segments().next().is_some()) {
            let mappings = mm.messages(mm_entry::VMAS).map_err(images.damaged(&image))?;
            if system_v.is_attached_in_part(&mappings) {
                let name = name(pid)?;
                return Ok(Some(format!("process {pid} ({name}) has System V memory attached in part, shmat(2)")));
            }
        }
        let program = mm.first().map_or(0, |mm| mm.number(mm_entry::EXE_FILE_ID));
        if kinds.get(&program).is_some_and(|kind| *kind != kind::REG) {
            let name = name(pid)?;
            return Ok(Some(format!("process {pid} ({name}) runs a program that is a memory file, memfd_create(2)")));
        }
    }
    Ok(None)
}

/// The first process whose session CRIU cannot give it.
///
/// It gives children of pid 1 any session: a helper that leads it, or a child of the leader, makes
/// them and ends. All others get their session from their parent, before or after that began one of
/// its own; so somewhere above them there has to be the leader.
fn lost_in_session(mut members: BTreeMap<u64, Member>) -> Option<u64> {
    let root = members.get(&1)?.session;
    let made_by_helper = |m: &Member, pid: u64| m.parent == 1 && m.session != root && m.session != pid;
    let all: Vec<(u64, Member)> = members.iter().map(|(pid, member)| (*pid, *member)).collect();
    for (pid, member) in all {
        let Member { parent, session, .. } = member;
        if pid == 1 || session == pid || made_by_helper(&member, pid) {
            continue;
        }
        if members.get(&parent).is_none_or(|parent| parent.session == session) {
            continue;
        }
        let mut above = parent;
        while above != session {
            // A helper ends the way up: it leads the session, or is a child of its leader.
            let Some(at) = members.get_mut(&above) else { return Some(pid) };
            if at.born.is_some_and(|born| born != session) {
                return Some(pid);
            }
            at.born = Some(session);
            let (next, helped) = (at.parent, made_by_helper(at, above));
            if helped {
                if at.session != session {
                    return Some(pid);
                }
                break;
            }
            above = next;
        }
    }
    None
}

fn name_of(images: &Images, pid: u64) -> Result<String, CheckpointImageError> {
    let image = format!("core-{pid}.img");
    let core = images.first(&image)?.unwrap_or_default();
    let common = core.message(core_entry::TC).map_err(images.damaged(&image))?.unwrap_or_default();
    let name = common.string(task_core_entry::COMM).unwrap_or_default();
    let name = name.trim_end_matches('\0');
    let is_dead = common.number(task_core_entry::TASK_STATE) == state::DEAD;
    Ok(if is_dead { format!("{name}, which has ended") } else { name.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By (pid, parent, session).
    fn lost(tree: &[(u64, u64, u64)]) -> Option<u64> {
        lost_in_session(
            tree.iter()
                .map(|(pid, parent, session)| (*pid, Member { parent: *parent, session: *session, born: None }))
                .collect(),
        )
    }

    #[test]
    fn only_children_of_pid_1_may_be_in_a_session_that_none_above_leads() {
        assert_eq!(lost(&[(1, 0, 1), (2, 1, 2), (3, 2, 2), (4, 3, 4)]), None, "leaders and theirs");
        assert_eq!(lost(&[(1, 0, 1), (2, 1, 2), (9, 1, 8), (10, 9, 8)]), None, "a daemon and its child");
        assert_eq!(lost(&[(1, 0, 1), (2, 1, 2), (4, 2, 4), (9, 1, 4)]), None, "the leader lives elsewhere");
        assert_eq!(lost(&[(1, 0, 1), (2, 1, 2), (9, 2, 8)]), Some(9), "below another one that takes orphans");
        assert_eq!(lost(&[(1, 0, 1), (2, 1, 2), (4, 2, 4), (5, 4, 2)]), None, "made before its parent's setsid");
        assert_eq!(
            lost(&[(1, 0, 1), (2, 1, 2), (9, 1, 9), (10, 9, 8)]),
            Some(10),
            "the same in a session without a leader"
        );
        assert_eq!(lost(&[(1, 0, 1), (2, 1, 2), (4, 2, 4), (5, 4, 2), (6, 4, 1)]), Some(6), "of two sessions before");
    }
}
