//! Tests of [`super`]: which process makes which, on images made up here.

use super::state::{ALIVE, DEAD, STOPPED};
use super::*;
use kip_criu_images::FieldValue;

fn message(fields: &[(u32, u64)]) -> Message {
    Message(fields.iter().map(|(n, v)| (*n, FieldValue::Varint(*v))).collect())
}

/// A tree of (pid, parent, group, session, state, status).
fn tree(processes: &[(u64, u64, u64, u64, u64, u64)]) -> Result<Vec<Task>, PlanError> {
    tree_with(processes, 0, 0)
}

/// The same, where process 2 has a field of its task_core_entry.
fn tree_with(processes: &[(u64, u64, u64, u64, u64, u64)], field: u32, value: u64) -> Result<Vec<Task>, PlanError> {
    let mut images = Images::default();
    let mut entries = Vec::new();
    for (pid, parent, group, session, state, status) in processes {
        entries.push(message(&[
            (pstree_entry::PID, *pid),
            (pstree_entry::PPID, *parent),
            (pstree_entry::PGID, *group),
            (pstree_entry::SID, *session),
            (pstree_entry::THREADS, *pid),
        ]));
        let mut core = message(&[(core_entry::MTYPE, 1)]);
        let mut tc = message(&[(task_core_entry::TASK_STATE, *state), (task_core_entry::EXIT_CODE, *status)]);
        if *pid == 2 && field != 0 {
            tc.set_varint(field, value);
        }
        core.set_bytes(core_entry::TC, tc.encode());
        images.put_entries(&format!("core-{pid}.img"), &[core]);
        let ids = message(&[
            (task_kobj_ids_entry::VM_ID, *pid),
            (task_kobj_ids_entry::FILES_ID, *pid),
            (task_kobj_ids_entry::FS_ID, *pid),
            (task_kobj_ids_entry::SIGHAND_ID, *pid),
        ]);
        images.put_entries(&format!("ids-{pid}.img"), &[ids]);
        for name in ["mm", "fs"] {
            images.put_entries(&format!("{name}-{pid}.img"), &[Message::default()]);
        }
    }
    images.put_entries("pstree.img", &entries);
    read(&images)
}

/// (pid, pid of the maker, sibling, group if it has to join it) of each but pid 1.
fn made(tree: &[Task]) -> Vec<(u32, u32, bool, Option<u64>)> {
    let of = |t: &Task| {
        let maker = t.member.maker?;
        Some((
            t.pid,
            tree[maker.index].pid,
            maker.sibling,
            (t.member.joins != Joins::Inherits).then_some(t.member.group),
        ))
    };
    tree.iter().filter_map(of).collect()
}

fn refused(processes: &[(u64, u64, u64, u64, u64, u64)]) -> String {
    tree(processes).map(|t| made(&t)).unwrap_err().to_string()
}

#[test]
fn parents_make_their_children_wherever_they_stand_in_the_image() {
    let found = tree(&[(4, 2, 2, 2, ALIVE, 0), (2, 1, 2, 2, ALIVE, 0), (1, 0, 1, 1, ALIVE, 0)]).unwrap();
    assert_eq!(made(&found), [(2, 1, false, None), (4, 2, false, None)]);
    assert_eq!((found[1].identity()[4], found[2].identity()[4]), (1, 0), "only 2 leads a session");
}

#[test]
fn groups_within_a_session_are_entered() {
    // A shell with a job of two processes.
    let job = [(1, 0, 1, 1, ALIVE, 0), (2, 1, 2, 2, ALIVE, 0), (5, 2, 5, 2, ALIVE, 0), (6, 2, 5, 2, ALIVE, 0)];
    let found = tree(&job).unwrap();
    assert_eq!(made(&found), [(2, 1, false, None), (5, 2, false, Some(5)), (6, 2, false, Some(5))]);
    let no_leader = [(1, 0, 1, 1, ALIVE, 0), (2, 1, 2, 2, ALIVE, 0), (6, 2, 5, 2, ALIVE, 0)];
    let found = tree(&no_leader).unwrap();
    assert_eq!((made(&found)[1], found[2].member.joins), ((6, 2, false, Some(5)), Joins::Lends));
}

#[test]
fn an_orphan_is_made_by_the_leader_of_its_session() {
    let found = tree(&[(1, 0, 1, 1, ALIVE, 0), (9, 1, 2, 2, ALIVE, 0), (2, 1, 2, 2, ALIVE, 0)]).unwrap();
    assert_eq!(made(&found), [(2, 1, false, None), (9, 2, true, None)]);
}

#[test]
fn a_daemon_s_session_gets_a_leader_for_a_moment() {
    let found = tree(&[(1, 0, 1, 1, ALIVE, 0), (2, 1, 2, 2, ALIVE, 0), (9, 1, 8, 8, ALIVE, 0)]).unwrap();
    assert_eq!(made(&found), [(2, 1, false, None), (8, 1, false, None), (9, 8, true, None)]);
    assert_eq!(found[2].life, Life::Ghost);
    let deep = [(1, 0, 1, 1, ALIVE, 0), (2, 1, 2, 2, ALIVE, 0), (9, 2, 8, 8, ALIVE, 0)];
    assert_eq!(made(&tree(&deep).unwrap()), [(2, 1, false, None), (8, 2, false, None), (9, 8, true, None)]);
    let twice = [(9, 4), (11, 5)].map(|(pid, parent)| (pid, parent, 8, 8, ALIVE, 0));
    let parents = [(4, 2, 2, 2, ALIVE, 0), (5, 2, 2, 2, ALIVE, 0)];
    assert!(refused(&[&deep[..2], &parents, &twice].concat()).contains("session"));
}

/// Field 18 says so, and membarrier(2)'s registrations, field 22, do not.
#[test]
fn a_subreaper_is_known_by_its_own_field() {
    // 9 is pid 1's and in the session of 5: a child of 5 makes it and ends, and it falls to pid 1
    // only if 2 does not take it.
    let processes = [(1, 0, 1, 1, ALIVE, 0), (2, 1, 2, 2, ALIVE, 0), (5, 2, 5, 5, ALIVE, 0), (9, 1, 5, 5, ALIVE, 0)];
    let made_of = |field| tree_with(&processes, field, 1).map(|tree| made(&tree).len());
    assert_eq!(made_of(task_core_entry::MEMBARRIER_REGISTRATION_MASK).unwrap(), 4, "with the one that ends");
    let refused = made_of(task_core_entry::CHILD_SUBREAPER).unwrap_err().to_string();
    assert!(refused.contains("process 9 is in session 5"), "{refused}");
}

#[test]
fn zombies_have_their_status() {
    let found = tree(&[(1, 0, 1, 1, ALIVE, 0), (2, 1, 2, 2, ALIVE, 0), (3, 2, 2, 2, DEAD, 0x700)]).unwrap();
    assert_eq!(found[2].life, Life::Zombie(0x700));
    assert_eq!(found[2].identity(), [3, 1, 0, 0, 0, 0, 0, 1, 0x700]);
}

#[test]
fn a_stopped_process_has_a_place_in_a_plan() {
    let found = tree(&[(1, 0, 1, 1, ALIVE, 0), (2, 1, 2, 2, STOPPED, 0)]).unwrap();
    let task = &found[1];
    assert!(task.check(&task.tc().unwrap()).is_ok());
}
