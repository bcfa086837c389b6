//! Tests of [`super`]: against a model with one entry per page, and across a crash at every record.

use super::*;
use proptest::prelude::*;
use std::collections::HashMap;

fn change() -> impl Strategy<Value = Change> {
    let range = (0u64..64, 1u64..20).prop_map(|(start, pages)| start * PAGE64..(start + pages) * PAGE64);
    prop_oneof![
        range.clone().prop_map(|range| Change::Set(range, 0)),
        range.prop_map(Change::Clear),
        (0u64..30, 40u64..64, 1u64..10).prop_map(|(from, to, pages)| Change::Move {
            from: from * PAGE64,
            to: to * PAGE64,
            length: pages * PAGE64,
        }),
    ]
}

fn model(model: &mut HashMap<u64, u32>, change: &Change) {
    let pages = |range: &Range<u64>| (range.start..range.end).step_by(PAGE);
    match change {
        Change::Set(range, slot) => {
            pages(range).enumerate().for_each(|(i, a)| _ = model.insert(a, slot + i as u32));
        }
        Change::Clear(range) => pages(range).for_each(|a| _ = model.remove(&a)),
        Change::Move { from, to, length } => {
            let moved: Vec<_> = pages(&(*from..from + length)).map(|a| (a, model.remove(&a))).collect();
            pages(&(*to..to + length)).for_each(|a| _ = model.remove(&a));
            moved.into_iter().for_each(|(a, slot)| _ = slot.map(|slot| model.insert(a - from + to, slot)));
        }
    }
}

fn flat(runs: &Runs) -> HashMap<u64, u32> {
    runs.iter().flat_map(|(range, slot)| (range.start..range.end).step_by(PAGE).zip(slot..)).collect()
}

proptest! {
    #[test]
    fn a_map_is_what_a_list_of_pages_would_be(changes in proptest::collection::vec(change(), 1..40), torn in 0usize..RECORD) {
        let dir = tempfile::tempdir().unwrap();
        let swap = Arc::new(Swap::create(&dir.path().join("swap")).unwrap());
        let path = dir.path().join("map");
        let mut map = SlotMap::create(&path, swap.clone(), Runs::default(), None, &Arc::default()).unwrap();
        let mut expected = HashMap::new();
        for mut change in changes {
            if let Change::Set(range, slot) = &mut change {
                // A fresh run of slots at the end of the file.
                *slot = 10_000 + swap.used() as u32 * 100;
                swap.hold(*slot..*slot + ((range.end - range.start) / PAGE64) as u32);
            }
            model(&mut expected, &change);
            map.change(std::slice::from_ref(&change)).unwrap();
            prop_assert_eq!(flat(map.runs()), expected.clone());
        }
        prop_assert_eq!(swap.used(), expected.values().collect::<std::collections::HashSet<_>>().len());
        // A crash in the middle of one more record.
        let record = Change::Clear(0..1 << 40).encode(0);
        map.log.write_all_at(&record[..torn], map.end).unwrap();
        std::mem::forget(map);
        let again = Arc::new(Swap::open(&dir.path().join("swap")).unwrap());
        let map = SlotMap::open(&path, again.clone(), &Arc::default()).unwrap();
        prop_assert_eq!(flat(map.runs()), expected.clone());
        drop(map);
        prop_assert_eq!(again.used(), 0);
    }
}

#[test]
fn an_event_is_done_once() {
    let dir = tempfile::tempdir().unwrap();
    let swap = Arc::new(Swap::create(&dir.path().join("swap")).unwrap());
    let mut map =
        SlotMap::create(&dir.path().join("map"), swap.clone(), Runs::default(), None, &Arc::default()).unwrap();
    let slots = [swap.allocate(1), swap.allocate(1)];
    map.change(&[Change::Set(0..2 * PAGE64, slots[0])]).unwrap();
    let event = Change::Move { from: 0, to: 8 * PAGE64, length: 2 * PAGE64 };
    map.event(3, &event).unwrap();
    let after = map.runs().clone();
    map.event(3, &event).unwrap();
    assert_eq!(*map.runs(), after, "the second time it would have lost the pages");
}

#[test]
fn a_compacted_log_says_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let swap = Arc::new(Swap::create(&dir.path().join("swap")).unwrap());
    let path = dir.path().join("map");
    let mut map = SlotMap::create(&path, swap.clone(), Runs::default(), None, &Arc::default()).unwrap();
    for _ in 0..400 {
        map.change(&[Change::Set(0..PAGE64, swap.allocate(1))]).unwrap();
    }
    let before = map.runs().clone();
    map.set_pid(77).unwrap();
    map.compact().unwrap();
    assert!(path.metadata().unwrap().len() < HEADER + 10 * RECORD as u64);
    assert_eq!((map.runs(), swap.used()), (&before, 1));
    assert_eq!(SlotMap::open(&path, swap.clone(), &Arc::default()).unwrap().pid(), Some(77));
}

#[test]
fn a_map_knows_its_process() {
    let dir = tempfile::tempdir().unwrap();
    let swap = Arc::new(Swap::create(&dir.path().join("swap")).unwrap());
    for (name, pid) in [("known", Some(5)), ("unknown", None)] {
        drop(SlotMap::create(&dir.path().join(name), swap.clone(), Runs::default(), pid, &Arc::default()).unwrap());
        assert_eq!(SlotMap::open(&dir.path().join(name), swap.clone(), &Arc::default()).unwrap().pid(), pid);
    }
    let mut map = SlotMap::open(&dir.path().join("unknown"), swap.clone(), &Arc::default()).unwrap();
    map.set_pid(6).unwrap();
    drop(map);
    assert_eq!(SlotMap::open(&dir.path().join("unknown"), swap, &Arc::default()).unwrap().pid(), Some(6));
}

#[test]
fn a_map_whose_pager_was_killed_before_it_wrote_the_head_is_none_of_another_form() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join("web/pager")).unwrap();
    std::fs::write(dir.path().join("web/pager/space-1.map"), []).unwrap();
    assert_eq!(unreadable(dir.path()), None);
}

#[test]
fn pages_before_one_are_those_whose_slots_follow_each_other() {
    let mut runs = Runs::default();
    runs.alter(&Change::Set(4 * PAGE64..8 * PAGE64, 10));
    runs.alter(&Change::Set(8 * PAGE64..10 * PAGE64, 30));
    assert_eq!(runs.before(7 * PAGE64, 3), Some((5 * PAGE64, 11, 3)));
    assert_eq!(runs.before(7 * PAGE64, 99), Some((4 * PAGE64, 10, 4)), "to the beginning of the run");
    assert_eq!(runs.before(9 * PAGE64, 99), Some((8 * PAGE64, 30, 2)), "not into one whose slots lie elsewhere");
    assert_eq!((runs.before(10 * PAGE64, 2), runs.before(0, 2)), (None, None));
}

#[test]
fn a_map_of_another_form_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let pager = dir.path().join("web/pager");
    std::fs::create_dir_all(&pager).unwrap();
    assert_eq!(unreadable(dir.path()), None);
    std::fs::write(pager.join("swap"), [7; 64]).unwrap();
    std::fs::write(pager.join("space-1.map"), MAGIC.to_le_bytes()).unwrap();
    assert_eq!(unreadable(dir.path()), None);
    std::fs::write(pager.join("space-2.map"), [7; 64]).unwrap();
    assert_eq!(unreadable(dir.path()), Some(pager.join("space-2.map")));
}

#[test]
fn nothing_is_left_in_a_spare_file_that_a_dead_pager_had_not_emptied() {
    let dir = tempfile::tempdir().unwrap();
    let (place, path) = (dir.path().join("spares"), dir.path().join("map"));
    std::fs::create_dir(&place).unwrap();
    std::fs::write(place.join("0"), [0xff; 3 * PAGE]).unwrap();
    let spares = Arc::new(crate::spares::Spares::in_directory(&place).unwrap());
    let swap = Arc::new(Swap::create(&dir.path().join("swap")).unwrap());
    let map = SlotMap::create(&path, swap, Runs::default(), Some(7), &spares).unwrap();
    assert!(!place.join("0").exists() && map.events.left().is_empty());
    let bytes = std::fs::read(&path).unwrap();
    assert!(bytes[12..].iter().all(|byte| *byte == 0) && bytes.len() <= HEADER as usize);
}
