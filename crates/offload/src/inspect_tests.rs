//! A stored generation, looked at.

use super::*;
use crate::Archive;
use crate::tests::{contents, generation, own};
use kip_snapshot::pages::PageMap;
use std::fs;

/// What is looked at is what was stored, wherever it lies; and a look leaves no trace.
#[test]
fn pages_are_seen_where_they_lie_and_stay_there() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _inside = runtime.enter();
    let temporary = tempfile::tempdir().unwrap();
    let (data, store) = (temporary.path().join("data"), temporary.path().join("store"));
    [&data, &store].into_iter().for_each(|dir| fs::create_dir_all(dir).unwrap());
    let archive = Archive::open(store.to_str().unwrap(), &data, "default".parse().unwrap(), 1).unwrap();
    let (proc, name) = (ProcId::random(), "web".parse().unwrap());
    let path = generation(&data, 1);
    let pages = contents(&path).0;
    let front = archive.store(proc, &name, &path, serde_json::json!({}), &own(&data)).unwrap().front;
    // One of a working set, one of a block, one of zeros, one that is nowhere.
    let page = |number: u64| (2, number * PAGE as u64);
    let wanted = Wanted::from([page(17), page(18), page(16), page(9)]);
    let seen = archive
        .peek(proc, front, |images| {
            assert_eq!(format!("{images:?}").matches("core-2.img").count(), 1);
            Ok(wanted.clone())
        })
        .unwrap();
    assert_eq!(seen.pages.keys().copied().collect::<Vec<_>>(), [page(17), page(18)]);
    assert!(seen.pages.iter().all(|(at, bytes)| pages[at] == *bytes));
    assert_eq!(seen.table.pages(), archive.peek(proc, front, |_| Ok(Wanted::new())).unwrap().table.pages());
    // Back on the disk, with what did not come still in the store; pages of the front may be coming
    // meanwhile.
    fs::remove_dir_all(&path).unwrap();
    fs::write(data.join(crate::ID), proc.to_string()).unwrap();
    fs::write(data.join(crate::ARCHIVED), serde_json::json!({ "front": front }).to_string()).unwrap();
    let path = archive.fetch(proc, front, &data, |_| ()).unwrap().0;
    let map = PageMap::load(&path).unwrap();
    let (number, file) = (0..).zip(&map.files).find(|(_, file)| file.remote.is_some()).unwrap();
    let mut of_blocks = None;
    for run in map.processes[&2].runs.iter().filter(|run| run.file == number) {
        for index in 0..run.pages {
            let at = (2, run.start + u64::from(index) * PAGE as u64);
            of_blocks = of_blocks.or((at == page(18)).then_some(run.first + index));
            let bytes = archive.remote_page(&path, file, run.first + index).unwrap();
            assert_eq!(pages.get(&at).cloned().unwrap_or_else(|| vec![0; PAGE]), bytes, "{at:x?}");
        }
    }
    let remote = kip_snapshot::remote::RemoteFile::open(&path, file).unwrap();
    assert_eq!(remote.here(of_blocks.unwrap(), 1).unwrap(), [false], "it was seen and did not come");
}
