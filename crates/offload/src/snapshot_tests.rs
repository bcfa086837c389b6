//! Collection, verifying, export and import over a directory.

use crate::collect::CollectError;
use crate::find::{Local, StoredGeneration, ToVerify};
use crate::tests::{contents, generation, own};
use crate::upload::UploadError;
use crate::*;
use kip_types::Generation;
use kip_types::api::{
    CollectRequest, CollectView, ImportRequest, SnapshotName, SnapshotPlace, SnapshotState, Verified,
};
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::runtime::Runtime;

/// How far the collectors' clock is ahead of the machine's, milliseconds.
static AHEAD_MS: AtomicU64 = AtomicU64::new(0);

fn ahead() -> u64 {
    now() + 3 * DAY_MS
}

fn now() -> u64 {
    kip_sys::clock::now_ms() + AHEAD_MS.load(Ordering::Relaxed)
}

const DAY_MS: u64 = 24 * 3600 * 1000;

struct Lab {
    runtime: Runtime,
    temporary: tempfile::TempDir,
}

impl Lab {
    fn new() -> Lab {
        let lab = Lab { runtime: Runtime::new().unwrap(), temporary: tempfile::tempdir().unwrap() };
        fs::create_dir_all(lab.store()).unwrap();
        lab
    }

    fn store(&self) -> PathBuf {
        self.temporary.path().join("store")
    }

    fn data(&self, name: &str) -> PathBuf {
        let path = self.temporary.path().join(name);
        fs::create_dir_all(path.join(DIRECTORY)).unwrap();
        path
    }

    fn open(&self, name: &str) -> Archive {
        self.open_at(name, &self.store())
    }

    fn open_at(&self, name: &str, store: &Path) -> Archive {
        let _inside = self.runtime.enter();
        Archive::open(store.to_str().unwrap(), &self.data(name), "default".parse().unwrap(), 1).unwrap()
    }

    /// Another data directory with the keys of this one.
    fn with_keys_of(&self, from: &str, to: &str) {
        let name = "archive/default.keys";
        fs::copy(self.data(from).join(name), self.data(to).join(name)).unwrap();
    }

    /// Stores these generations of a proc.
    fn store_all(&self, archive: &Archive, proc: ProcId, numbers: impl IntoIterator<Item = u64>) -> Vec<FrontRef> {
        let dir = self.data("procs");
        let store = |number| {
            let path = generation(&dir, number);
            let stored =
                archive.store(proc, &"web".parse().unwrap(), &path, serde_json::json!({}), &own(&dir)).unwrap();
            fs::remove_dir_all(path).unwrap();
            stored.front
        };
        numbers.into_iter().map(store).collect()
    }

    fn collect(&self, archive: &Archive, grace_ms: u64) -> Result<CollectView, CollectError> {
        self.collect_at(archive, grace_ms, now)
    }

    fn collect_at(&self, archive: &Archive, grace_ms: u64, clock: fn() -> u64) -> Result<CollectView, CollectError> {
        self.runtime.block_on(archive.collect(&CollectRequest { dry_run: false, grace_ms }, clock))
    }

    /// Names of what is in the store, without its directories.
    fn objects(&self) -> Vec<String> {
        let realm = self.store().join("realms/default");
        let in_dir = |dir: PathBuf| fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
        let procs = in_dir(realm.join("procs")).flat_map(in_dir);
        let all = in_dir(realm.join("packs")).chain(procs).map(|path| path.file_name().unwrap().to_owned());
        all.map(|name| name.into_string().unwrap()).filter(|name| !name.contains('#')).collect()
    }

    fn find(&self, archive: &Archive, which: &str) -> StoredGeneration {
        let which: SnapshotName = which.parse().unwrap();
        self.runtime.block_on(archive.find(&which, &[])).unwrap()
    }

    fn verify(&self, archive: &Archive) -> (Vec<(String, String)>, u64) {
        let (out, mut feed) = tokio::sync::mpsc::channel(1000);
        self.runtime.block_on(async {
            let what: ToVerify = archive.all_kept().await.unwrap();
            crate::verify::verify(Some(archive), what, out).await;
        });
        let mut damage = Vec::new();
        while let Some(item) = feed.blocking_recv() {
            match item.unwrap() {
                Verified::Damage { object, what, .. } => damage.push((object, what)),
                Verified::End { damaged, objects, .. } => {
                    assert_eq!(damaged, damage.len() as u64);
                    return (damage, objects);
                }
                Verified::Progress { .. } => {}
            }
        }
        panic!("it has no end");
    }
}

#[test]
fn what_nothing_leads_to_goes_and_what_is_kept_wakes() {
    let lab = Lab::new();
    let archive = lab.open("a");
    let proc = ProcId::random();
    let fronts = lab.store_all(&archive, proc, 1..=5);
    let before = lab.objects().len();
    let dry = CollectRequest { dry_run: true, grace_ms: 0 };
    let seen = lab.runtime.block_on(archive.collect(&dry, now)).unwrap();
    assert!(seen.deleted.is_empty() && seen.waiting.len() >= 2, "nothing was known as unused: {seen:?}");
    let noted = lab.collect(&archive, 0).unwrap();
    assert_eq!((noted.deleted.len(), lab.objects().len()), (0, before), "the first look only notes");
    assert_eq!(
        noted.waiting.iter().map(|w| &w.object).collect::<Vec<_>>(),
        seen.waiting.iter().map(|w| &w.object).collect::<Vec<_>>()
    );
    let would = lab.runtime.block_on(archive.collect(&dry, now)).unwrap();
    assert_eq!((would.deleted.len(), lab.objects().len()), (noted.waiting.len(), before));
    let done = lab.collect(&archive, 0).unwrap();
    assert_eq!((done.deleted.len(), done.waiting.len()), (noted.waiting.len(), 0));
    let left = lab.objects();
    assert_eq!(left.len(), before - done.deleted.len());
    for front in &fronts[..2] {
        assert!(!left.contains(&front.to_string()), "{front}");
    }
    let dir = lab.data("back");
    for (number, front) in (3..).zip(&fronts[2..]) {
        let back = archive.fetch(proc, *front, &dir, |_| ()).unwrap().0;
        archive.fetch_pages(&back, None).unwrap();
        let expected = generation(&lab.data("expected"), number);
        assert!(contents(&back) == contents(&expected), "generation {number}");
    }
    assert_eq!(lab.verify(&archive).0, []);
    // What the index knew of packs that are gone is not referred to.
    lab.store_all(&archive, proc, [6]);
    assert_eq!(lab.verify(&archive).0, []);
}

#[test]
fn the_wait_is_kept_and_the_removed_lose_everything_but_their_head() {
    let lab = Lab::new();
    let archive = lab.open("a");
    let (gone, stays) = (ProcId::random(), ProcId::random());
    lab.store_all(&archive, gone, 1..=2);
    lab.store_all(&archive, stays, 2..=2);
    lab.runtime.block_on(archive.remove(gone)).unwrap();
    let before = lab.objects();
    for _ in 0..3 {
        let noted = lab.collect(&archive, DAY_MS).unwrap();
        assert!(noted.deleted.is_empty() && noted.waiting.len() >= 2, "{noted:?}");
        let due = noted.waiting.iter().map(|w| w.due_at_ms.unwrap()).min().unwrap();
        assert!(due > now() + DAY_MS - 60_000, "it was noted just now");
    }
    assert_eq!(lab.objects().len(), before.len());
    let done = lab.collect_at(&archive, DAY_MS, ahead).unwrap();
    assert!(done.deleted.len() >= 2, "{done:?}");
    let left = lab.objects();
    assert_eq!(left.iter().filter(|name| *name == "head").count(), 2, "the head stays");
    assert_eq!(left.iter().filter(|name| name.starts_with("gen-")).count(), 1);
    assert_eq!(lab.verify(&archive).0, [], "what is shared stays");
    let head = lab.runtime.block_on(archive.head(gone)).unwrap().unwrap().0;
    assert_eq!(head.state, HeadState::Removed);
}

// promise snapshots: one collects at a time; nothing is deleted if any head or front cannot be
//   read, but for those whose key was destroyed
// held by: this, `kip_archive::gc::record::tests::one_collects_at_a_time`; destroyed keys:
//   `kip_offload::snapshot_tests::destroyed_keys_keep_nobody_from_collecting`
#[test]
fn one_collects_at_a_time_and_only_if_all_can_be_read() {
    let lab = Lab::new();
    let a = lab.open("a");
    lab.with_keys_of("a", "b");
    let b = lab.open("b");
    let proc = ProcId::random();
    lab.store_all(&a, proc, 1..=5);
    let (leased, version) = lab.runtime.block_on(a.lease(DAY_MS, now)).unwrap();
    let busy = lab.collect(&b, 0).unwrap_err();
    assert!(matches!(busy, CollectError::Busy(_)), "{busy}");
    lab.collect(&a, 0).expect("what it took before it died is its own");
    let late = lab.runtime.block_on(a.note(&leased, Some(&version))).unwrap_err();
    assert!(matches!(late, CollectError::Overtaken), "an old look changes nothing: {late}");
    let damaged = lab.store().join(a.front_key(proc, lab.find(&a, "web@4").front).as_str());
    let whole = fs::read(&damaged).unwrap();
    fs::write(&damaged, &whole[..100]).unwrap();
    let before = lab.objects().len();
    for _ in 0..2 {
        let refused = lab.collect(&b, 0).unwrap_err();
        assert!(
            refused.to_string().contains("nothing is collected") && refused.to_string().contains("gen-4-"),
            "{refused}"
        );
    }
    assert_eq!(lab.objects().len(), before);
    fs::write(&damaged, whole).unwrap();
    assert!(!lab.collect(&b, 0).unwrap().deleted.is_empty(), "the lease was given back, and the candidates were kept");
    // One with other keys understands no head, and takes nothing.
    let stranger = lab.open("stranger");
    let refused = lab.collect(&stranger, 0).unwrap_err();
    assert!(matches!(refused, CollectError::Head { .. }), "{refused}");
    assert_eq!(lab.verify(&b).0, []);
}

/// An upload beside a collection that does not wait publishes nothing that refers to what is gone.
#[test]
fn who_stores_meanwhile_hears_of_it() {
    let lab = Lab::new();
    let a = lab.open("a");
    lab.with_keys_of("a", "b");
    let b = lab.open("b");
    let proc = ProcId::random();
    let front = a.front_key(proc, lab.store_all(&a, proc, [1])[0]);
    let there: Vec<PackId> = lab.runtime.block_on(a.packs_there()).unwrap().into_iter().collect();
    assert!(!there.is_empty());
    let begin = || lab.runtime.block_on(a.begin_writing()).unwrap();
    let still_there = |begun| lab.runtime.block_on(a.still_there(begun, &front, &there));
    let [quiet, first, second, third, fourth] = [(); 5].map(|()| begin());
    assert!(there.iter().all(|pack| first.writing.may_use(pack)));
    still_there(quiet).expect("nobody has collected");
    lab.runtime.block_on(a.remove(proc)).unwrap();
    lab.collect(&b, DAY_MS).unwrap();
    still_there(first).expect("what was noted now stays for a day");
    let later = begin();
    assert!(!there.iter().any(|pack| later.writing.may_use(pack)), "a candidate");
    let (leased, version) = lab.runtime.block_on(b.lease(0, now)).unwrap();
    let hurried = still_there(second).unwrap_err();
    assert!(matches!(hurried, UploadError::Hurried), "{hurried}");
    let own = lab.runtime.block_on(b.begin_writing()).unwrap();
    own.writing.may_publish(boot_ms()).expect("a lease that was left by a dead one of its own is nothing");
    lab.runtime.block_on(b.note(&leased.end(now()), Some(&version))).unwrap();
    assert_eq!(lab.collect(&b, 0).unwrap().deleted.len(), there.len() + 1);
    let gone = still_there(third).unwrap_err();
    assert!(matches!(gone, UploadError::Collected { .. }), "{gone}");
    let gone = lab.runtime.block_on(a.still_there(fourth, &front, &[])).unwrap_err();
    assert!(gone.to_string().contains("gen-1-"), "its front too: {gone}");
}

#[test]
fn a_flipped_bit_is_found_and_named() {
    let lab = Lab::new();
    let archive = lab.open("a");
    let proc = ProcId::random();
    lab.store_all(&archive, proc, 1..=2);
    let (none, objects) = lab.verify(&archive);
    assert_eq!(none, []);
    assert!(objects >= 3, "{objects}");
    let packs = lab.runtime.block_on(archive.packs_there()).unwrap();
    let keys = [
        archive.front_key(proc, lab.find(&archive, "web@1").front),
        archive.pack_key(*packs.first().unwrap()),
        archive.head_key(proc),
    ];
    for key in keys {
        let path = lab.store().join(key.as_str());
        let whole = fs::read(&path).unwrap();
        for at in [whole.len() - 300, whole.len() - 3] {
            let mut bad = whole.clone();
            bad[at] ^= 4;
            fs::write(&path, bad).unwrap();
            let (damage, _) = lab.verify(&archive);
            assert_eq!(damage.iter().map(|d| &d.0[..]).collect::<Vec<_>>(), [key.as_str()], "byte {at}");
        }
        fs::write(&path, &whole).unwrap();
    }
    let front = lab.store().join(archive.front_key(proc, lab.find(&archive, "web").front).as_str());
    fs::remove_file(front).unwrap();
    let (damage, _) = lab.verify(&archive);
    assert!(damage.len() == 1 && damage[0].1.contains("has no object"), "{damage:?}");
}

#[test]
fn a_list_goes_on_behind_what_cannot_be_read() {
    let lab = Lab::new();
    let archive = lab.open("a");
    let [fine, removed, unread] = [(); 3].map(|()| ProcId::random());
    for proc in [fine, removed, unread] {
        lab.store_all(&archive, proc, 1..=5);
    }
    lab.runtime.block_on(archive.remove(removed)).unwrap();
    let head = lab.store().join(archive.head_key(unread).as_str());
    fs::write(&head, &fs::read(&head).unwrap()[..150]).unwrap();
    let front = lab.store().join(archive.front_key(fine, lab.find(&archive, "web@4").front).as_str());
    fs::write(&front, b"KIPARCHV").unwrap();
    let dir = lab.data("procs");
    generation(&dir, 9);
    let local = [Local { name: "parked".parse().unwrap(), dir }];
    let list = lab.runtime.block_on(archive.list(None, &local)).unwrap();
    let of = |proc: ProcId| list.iter().find(|view| view.proc == Some(proc.to_string())).unwrap();
    let places = of(fine).generations.iter().map(|g| (g.generation.0, g.place, g.trouble.is_some(), g.format));
    use SnapshotPlace::{Current, Kept, Local as OnDisk, Unused};
    let expected = [
        (5, Current, false, Some(2)),
        (4, Kept, true, None),
        (3, Kept, false, Some(2)),
        (2, Unused, false, Some(2)),
        (1, Unused, false, Some(2)),
    ];
    assert_eq!(places.collect::<Vec<_>>(), expected);
    assert!(of(fine).packs > 0 && of(fine).pack_bytes > 0);
    assert_eq!((of(removed).state, of(unread).state), (SnapshotState::Removed, SnapshotState::Unreadable));
    assert!(of(unread).trouble.is_some() && of(unread).generations.len() == 5);
    let parked = list.iter().find(|view| view.state == SnapshotState::Local).unwrap();
    assert_eq!((parked.generations[0].generation, parked.generations[0].place), (Generation(9), OnDisk));
    let named = lab.runtime.block_on(archive.list(Some(&"parked".parse().unwrap()), &local)).unwrap();
    assert_eq!(named.len(), 1);
    // An id means what cannot be meant by name; the living are meant before the dead.
    assert_eq!(lab.find(&archive, "web").head.proc, fine);
    let by_id = |id: ProcId| format!("{:.12}", id.to_string()).parse::<SnapshotName>().unwrap();
    let refused = lab.runtime.block_on(archive.find(&by_id(unread), &local)).unwrap_err();
    assert!(refused.message.contains("cut short"), "{refused}");
    assert_eq!(lab.runtime.block_on(archive.head_of(&by_id(removed), &local)).unwrap().state, HeadState::Removed);
    let refused = lab.runtime.block_on(archive.find(&"parked".parse().unwrap(), &local)).unwrap_err();
    assert!(refused.message.contains("--to archived"), "{refused}");
}

#[test]
fn what_a_generation_is_made_of_is_shown() {
    let lab = Lab::new();
    let archive = lab.open("a");
    let proc = ProcId::random();
    lab.store_all(&archive, proc, 1..=2);
    let view = lab.runtime.block_on(archive.show(&lab.find(&archive, "web"))).unwrap();
    assert_eq!((view.generation, view.parent, view.format), (Generation(2), Some(Generation(1)), 2));
    let names: Vec<&str> = view.sections.iter().map(|section| &section.name[..]).collect();
    assert_eq!(names, ["manifest", "sets", "page table", "files", "metadata", "eager pages", "set pages", "end"]);
    assert_eq!(view.sections.iter().map(|section| section.bytes).sum::<u64>(), view.bytes, "nothing is left out");
    assert_eq!(view.metadata.iter().map(|file| file.bytes).sum::<u64>(), 5000);
    assert_eq!((view.pages.front + view.pages.packs > 300, view.set_pages), (true, 3), "{:?}", view.pages);
    assert!(!view.packs.is_empty() && view.packs.iter().all(|pack| pack.blocks > 0 && pack.bytes > 0));
}

#[test]
fn an_export_comes_back_elsewhere_with_the_same_keys_only() {
    let lab = Lab::new();
    let a = lab.open("a");
    let proc = ProcId::random();
    let fronts = lab.store_all(&a, proc, 1..=3);
    let file = lab.temporary.path().join("web.kip");
    let export = |which: &str| a.export(&lab.find(&a, which), file.to_str().unwrap());
    let written = export("web@2").unwrap();
    assert_eq!((written.generation, written.packs > 0), (Generation(2), true));
    assert!(export("web@2").unwrap_err().to_string().contains("is there already"));
    let elsewhere = lab.temporary.path().join("elsewhere");
    fs::create_dir_all(&elsewhere).unwrap();
    let import = |archive: &Archive, file: &Path, name: Option<&str>| {
        let name = name.map(|name| name.parse().unwrap());
        archive.import(&ImportRequest { file: file.to_str().unwrap().into(), name }, &[], now)
    };
    let stranger = lab.open_at("stranger", &elsewhere);
    let refused = import(&stranger, &file, None).unwrap_err();
    assert!(kip_types::chain(&refused).contains("does not have the key"), "{}", kip_types::chain(&refused));
    lab.with_keys_of("a", "b");
    let b = lab.open_at("b", &elsewhere);
    // Every way in which the file can be bad: nothing leads to what was stored of it.
    let whole = fs::read(&file).unwrap();
    let bad = lab.temporary.path().join("bad.kip");
    for at in [700, 1600, whole.len() / 3, whole.len() - 3000] {
        let mut flipped = whole.clone();
        flipped[at] ^= 4;
        for bytes in [&flipped[..], &whole[..at]] {
            fs::write(&bad, bytes).unwrap();
            import(&b, &bad, None).unwrap_err();
        }
    }
    assert!(lab.runtime.block_on(b.head(proc)).unwrap().is_none());
    let view = import(&b, &file, Some("copy")).unwrap();
    assert_eq!((view.name.as_str(), view.generation), ("copy", Generation(2)));
    let head = lab.runtime.block_on(b.head(proc)).unwrap().unwrap().0;
    assert_eq!((head.state, head.current, head.owner.id), (HeadState::Archived, Some(fronts[1]), OwnerId::NOBODY));
    let list = lab.runtime.block_on(b.list(None, &[])).unwrap();
    assert_eq!((list.len(), list[0].state), (1, SnapshotState::Archived));
    assert_eq!(lab.verify(&b).0, []);
    let refused = import(&b, &file, Some("again")).unwrap_err().to_string();
    assert!(refused.contains("in the store already, as copy"), "{refused}");
    lab.runtime.block_on(b.adopt(proc, fronts[1])).unwrap();
    let back = b.fetch(proc, fronts[1], &lab.data("back"), |_| ()).unwrap().0;
    b.fetch_pages(&back, None).unwrap();
    assert!(contents(&back) == contents(&generation(&lab.data("expected"), 2)));
    // Where it came from it is there already; once it was removed it may come back, and is not
    // collected then.
    import(&a, &file, Some("other")).unwrap_err();
    lab.runtime.block_on(a.remove(proc)).unwrap();
    lab.collect(&a, 0).unwrap();
    import(&a, &file, None).unwrap();
    let done = lab.collect(&a, 0).unwrap();
    assert!(!done.deleted.is_empty(), "the generations that did not come back");
    assert_eq!(lab.verify(&a).0, []);
    lab.runtime.block_on(a.adopt(proc, fronts[1])).unwrap();
}

/// What can no longer be read leads to nothing; what else there is of such a proc stays.
#[test]
fn destroyed_keys_keep_nobody_from_collecting() {
    let lab = Lab::new();
    let a = lab.open("a");
    let (old, new) = (ProcId::random(), ProcId::random());
    lab.store_all(&a, old, 1..=5);
    let dir = lab.data("a").join(DIRECTORY);
    let mut keys = Keyring::load(&dir, &a.realm).unwrap();
    let first = keys.current().unwrap();
    keys.rotate(2);
    keys.destroy(first, 3).unwrap();
    keys.save(&dir).unwrap();
    let a = lab.open("a");
    let refused = lab.runtime.block_on(a.head(old)).unwrap_err();
    assert!(refused.is_destroyed(), "{refused}");
    let path = generation(&lab.data("procs"), 1);
    let own = own(&lab.data("procs"));
    let stored = a.store(new, &"new".parse().unwrap(), &path, serde_json::json!({}), &own).unwrap();
    lab.collect(&a, 0).unwrap();
    lab.collect(&a, 0).unwrap();
    let left = lab.objects();
    assert_eq!(left.iter().filter(|name| name.starts_with("gen-")).count(), 6, "which are kept is not known: {left:?}");
    let back = a.fetch(new, stored.front, &lab.data("back"), |_| ()).unwrap().0;
    a.fetch_pages(&back, None).unwrap();
    let packs = lab.runtime.block_on(a.packs_there()).unwrap();
    let summary = lab.runtime.block_on(a.summary(&a.store, new, stored.front)).unwrap();
    let needed: Vec<PackId> = summary.manifest.packs.iter().map(|pack| pack.id).collect();
    assert_eq!(
        packs.into_iter().collect::<Vec<_>>().len(),
        needed.len(),
        "what only unreadable fronts lead to is gone"
    );
}
