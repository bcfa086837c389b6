use crate::*;
use kip_sandbox::quota::OwnFilesPlace;
use kip_snapshot::pages::{Expected, PAGE, PageMap, ProcessPages, Run, WorkingSet};
use kip_snapshot::{Contents, Manifest};
use kip_types::Generation;
use std::collections::BTreeMap;

/// A generation as parking leaves it: two page files, one process in both, zeros and duplicates
/// among the pages.
pub(crate) fn generation(dir: &Path, number: u64) -> PathBuf {
    let growing = kip_snapshot::begin(dir, Generation(number)).unwrap();
    let page = |seed: u64, n: u64| -> Vec<u8> {
        let mut bytes = vec![0; PAGE];
        let mixed = (seed * 1000 + n).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
        if !n.is_multiple_of(7) {
            bytes.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&mixed));
        }
        bytes
    };
    let mut map = PageMap::default();
    for (name, seed, pages) in [("pages-1.img", number, 300), ("g0-swap", 0, 100)] {
        fs::write(growing.join(name), (0..pages).flat_map(|n| page(seed, n)).collect::<Vec<u8>>()).unwrap();
        map.file(name);
    }
    fs::write(growing.join("core-2.img"), vec![number as u8; 5000]).unwrap();
    fs::write(growing.join("empty.img"), b"").unwrap();
    let run = |start: u64, pages, file, first| Run { start: start * PAGE as u64, pages, file, first };
    let runs = vec![run(16, 200, 0, 0), run(300, 100, 1, 0), run(5000, 100, 0, 200)];
    let expected =
        |page: u64| Expected { address: page * PAGE as u64, confirmed: 2, held_back: page.is_multiple_of(2) };
    let set = WorkingSet { kind: "tcp 80".into(), turn: 3, pages: vec![expected(5001), expected(17), expected(303)] };
    map.processes.insert(2, ProcessPages { runs, sets: vec![set] });
    kip_snapshot::carry::write_sets(&mut map, &growing).unwrap();
    let contents = Contents { engine: "criu 4.2.1".into(), body: serde_json::json!({"sockets": [7]}), pages: map };
    kip_snapshot::seal(&growing, Generation(number), contents).unwrap().path
}

pub(crate) type PagesOf = BTreeMap<(u32, u64), Vec<u8>>;

/// Every page that is not zeros, and all that is beside the pages.
pub(crate) fn contents(path: &Path) -> (PagesOf, BTreeMap<String, Vec<u8>>, String) {
    let manifest: Manifest<serde_json::Value> = kip_snapshot::open(path).unwrap();
    kip_snapshot::verify(path, &manifest.parts).unwrap();
    let map = PageMap::load(path).unwrap();
    let files: Vec<Vec<u8>> = map.files.iter().map(|file| fs::read(path.join(&file.name)).unwrap()).collect();
    let mut pages = BTreeMap::new();
    for (number, process) in &map.processes {
        for run in &process.runs {
            for index in 0..u64::from(run.pages) {
                let bytes = &files[run.file as usize][(u64::from(run.first) + index) as usize * PAGE..][..PAGE];
                if bytes.iter().any(|byte| *byte != 0) {
                    pages.insert((*number, run.start + index * PAGE as u64), bytes.to_vec());
                }
            }
        }
    }
    let beside = manifest.parts.iter().filter(|part| part.name.ends_with(".img") && !part.name.starts_with("pages"));
    let beside = beside.map(|part| (part.name.clone(), fs::read(path.join(&part.name)).unwrap())).collect();
    let sets = format!("{:?} {} {:?}", map.processes[&2].sets, manifest.engine, manifest.body);
    (pages, beside, sets)
}

/// Waits for what the front brings beside a wake: pages, and its copy in the cache.
fn front_came(archive: &Archive, path: &Path) {
    let map = PageMap::load(path).unwrap();
    for file in map.files.iter().filter(|file| file.remote.is_some()) {
        archive.runtime.block_on(archive.filling(path, file).unwrap().front_came());
    }
}

/// Of a proc with that directory.
pub(crate) fn own(dir: &Path) -> Own {
    Own {
        dir: dir.to_owned(),
        place: OwnFilesPlace::unlimited(dir),
        first_id: 0x2000_0000,
        first: Vec::new(),
        woke: Arc::default(),
    }
}

/// Its own files, as an overlay leaves them.
fn furnish(dir: &Path, first_id: u32) {
    use std::os::unix::fs::{PermissionsExt, chown};
    for (path, uid) in [("upper/root", first_id), ("upper/usr", first_id), ("layer", 0), ("pins/usr", 0)] {
        let path = dir.join(path);
        fs::create_dir_all(path.join("sub")).unwrap();
        fs::write(path.join("sub/file"), format!("{uid} {}", path.file_name().unwrap().display()).repeat(5000))
            .unwrap();
        fs::hard_link(path.join("sub/file"), path.join("again")).unwrap();
        fs::set_permissions(path.join("again"), fs::Permissions::from_mode(0o4750)).unwrap();
        let whiteout = rustix::fs::makedev(0, 0);
        let (kind, mode) = (rustix::fs::FileType::CharacterDevice, rustix::fs::Mode::empty());
        rustix::fs::mknodat(rustix::fs::CWD, path.join("gone"), kind, mode, whiteout).unwrap();
        for name in ["", "sub", "sub/file", "gone"] {
            chown(path.join(name), Some(uid), Some(uid + 7)).unwrap();
        }
    }
}

#[test]
fn the_procs_own_files_come_along_and_unchanged_ones_are_not_stored_again() {
    use std::os::unix::fs::MetadataExt;
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _inside = runtime.enter();
    let temporary = tempfile::tempdir().unwrap();
    let (data, to, store) = (temporary.path().join("a"), temporary.path().join("b"), temporary.path().join("store"));
    [&data, &to, &store].into_iter().for_each(|dir| fs::create_dir_all(dir).unwrap());
    let archive = Archive::open(store.to_str().unwrap(), &data, "default".parse().unwrap(), 1).unwrap();
    let (proc, name): (ProcId, ProcName) = (ProcId::random(), "web".parse().unwrap());
    furnish(&data, 0x2000_0000);
    std::thread::sleep(Duration::from_millis(30)); // so that their times tell them apart
    let first = archive.store(proc, &name, &generation(&data, 1), serde_json::json!({}), &own(&data)).unwrap();
    // Unreadable they would be an error.
    let cold = |name: &str| data.join(format!("archive-seen-{name}"));
    assert!(["root", "usr", "layer", "pins-usr"].iter().all(|name| cold(name).exists()));
    fs::write(data.join("upper/root/new"), "new").unwrap();
    std::os::unix::fs::chown(data.join("upper/root/new"), Some(0x2000_0003), Some(0x2000_0003)).unwrap();
    let second = archive.store(proc, &name, &generation(&data, 2), serde_json::json!({}), &own(&data)).unwrap();
    assert!(second.front_bytes > 0 && first.front != second.front);
    for _ in 0..2 {
        archive
            .restore_files(proc, second.front, &to, &OwnFilesPlace::unlimited(&to), (0x2000_0000, 0x2001_0000))
            .unwrap();
        for (path, by) in [("upper/root", 0x1_0000), ("upper/usr", 0x1_0000), ("layer", 0), ("pins/usr", 0)] {
            for name in ["", "sub", "sub/file", "gone", "again"] {
                let [old, new] = [&data, &to].map(|dir| fs::symlink_metadata(dir.join(path).join(name)).unwrap());
                assert_eq!((new.uid(), new.gid()), (old.uid() + by, old.gid() + by), "{path}/{name}");
                assert_eq!((new.mode(), new.rdev(), new.nlink()), (old.mode(), old.rdev(), old.nlink()));
            }
            let read = |dir: &Path| fs::read(dir.join(path).join("again")).unwrap();
            assert_eq!(read(&to), read(&data));
        }
        assert_eq!(fs::read(to.join("upper/root/new")).unwrap(), b"new");
        // What is there of an earlier try is replaced.
        fs::write(to.join("layer/stray"), "").unwrap();
    }
    assert!(to.join("layer/stray").exists() && !to.join("files.new").exists());
    // A file that no proc may have: which one is said, and nothing of the generation stands.
    std::os::unix::fs::chown(data.join("upper/root/new"), Some(5), Some(5)).unwrap();
    let refused = archive.store(proc, &name, &generation(&data, 3), serde_json::json!({}), &own(&data)).unwrap_err();
    let told = kip_types::chain(&refused);
    assert!(told.starts_with("upper/root of its own files cannot be archived: file new belongs to"), "{told}");
    // One that woke meanwhile.
    let overtaken = own(&data);
    overtaken.woke.store(true, std::sync::atomic::Ordering::SeqCst);
    let path = kip_snapshot::path_of(&data, Generation(3));
    let refused = archive.store(proc, &name, &path, serde_json::json!({}), &overtaken).unwrap_err();
    assert!(matches!(refused, upload::UploadError::Files(files::ArchiveFilesError::Woke)), "{refused}");
    assert_eq!(runtime.block_on(archive.head(proc)).unwrap().unwrap().0.current, Some(second.front));
}

#[test]
fn a_generation_comes_back_from_a_store() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _inside = runtime.enter();
    let temporary = tempfile::tempdir().unwrap();
    let (data, store) = (temporary.path().join("data"), temporary.path().join("store"));
    fs::create_dir_all(&data).unwrap();
    fs::create_dir_all(&store).unwrap();
    let realm: Realm = "default".parse().unwrap();
    let archive = Archive::open(store.to_str().unwrap(), &data, realm.clone(), 1).unwrap();
    let (proc, name): (ProcId, ProcName) = (ProcId::random(), "web".parse().unwrap());
    let (mut before, mut fronts) = (Vec::new(), Vec::new());
    for number in [1, 2] {
        let path = generation(&data, number);
        before.push(contents(&path));
        let uploaded = archive.store(proc, &name, &path, serde_json::json!({"name": "web"}), &own(&data)).unwrap();
        assert!(uploaded.front_bytes > 0 && (number > 1 || uploaded.pack_bytes > 0));
        fronts.push(uploaded.front);
        if number == 1 {
            runtime.block_on(archive.release(proc, uploaded.front)).unwrap();
            assert_eq!(runtime.block_on(archive.adopt(proc, uploaded.front)).unwrap().owner.epoch, 2);
        }
    }
    // Another daemon of the same directory.
    let archive = Archive::open(store.to_str().unwrap(), &data, realm, 2).unwrap();
    for number in [2, 1] {
        fs::remove_dir_all(kip_snapshot::path_of(&data, Generation(number))).unwrap();
        let path = archive.fetch(proc, fronts[number as usize - 1], &data, |_| ()).unwrap().0;
        assert!(lacking(&path) > 0, "what is not needed first is left in the store");
        archive.fetch_pages(&path, None).unwrap();
        assert_eq!(lacking(&path), 0);
        assert!(contents(&path) == before[number as usize - 1], "generation {number}");
    }
    let head = runtime.block_on(archive.head(proc)).unwrap().unwrap().0;
    assert_eq!((head.current, head.kept), (Some(fronts[1]), vec![fronts[0]]));
}

/// Pages that are not here.
fn lacking(path: &Path) -> usize {
    let map = PageMap::load(path).unwrap();
    let remote = map.files.iter().find(|file| file.remote.is_some()).unwrap();
    let file = kip_snapshot::remote::RemoteFile::open(path, remote).unwrap();
    let runs = map.processes.values().flat_map(|process| &process.runs);
    let lacks = |run: &Run| file.here(run.first, run.pages).unwrap().iter().filter(|here| !**here).count();
    runs.filter(|run| map.files[run.file as usize].remote.is_some()).map(lacks).sum()
}

/// Pages that are needed come when they are asked for, with those behind them if it goes on like
/// that; the next generation takes over what never came, and stores none of it again.
#[test]
fn what_is_needed_is_fetched_and_the_rest_is_taken_over() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _inside = runtime.enter();
    let temporary = tempfile::tempdir().unwrap();
    let (data, store) = (temporary.path().join("data"), temporary.path().join("store"));
    fs::create_dir_all(&data).unwrap();
    fs::create_dir_all(&store).unwrap();
    let archive = Arc::new(Archive::open(store.to_str().unwrap(), &data, "default".parse().unwrap(), 1).unwrap());
    let (proc, name): (ProcId, ProcName) = (ProcId::random(), "web".parse().unwrap());
    let path = generation(&data, 1);
    let before = contents(&path);
    let front = archive.store(proc, &name, &path, serde_json::json!({}), &own(&data)).unwrap().front;
    fs::remove_dir_all(&path).unwrap();
    let path = archive.fetch(proc, front, &data, |_| ()).unwrap().0;
    let map = PageMap::load(&path).unwrap();
    let (number, remote) = (0..).zip(&map.files).find(|(_, file)| file.remote.is_some()).unwrap();
    front_came(&archive, &path);
    let all = lacking(&path);
    // One process waits for a page; a block of pages comes.
    let first = map.processes[&2].runs.iter().find(|run| run.file == number).unwrap().first;
    let ask = |page| runtime.block_on(archive.fetch_missing(&path, &remote.name, page..page + 1));
    assert_eq!(ask(first + 3), Fetched::All);
    let one = all - lacking(&path);
    assert!(one > 0 && one <= 32, "{one} pages came");
    // It goes on behind that, and again: more and more comes.
    for turn in 2..5 {
        let file = kip_snapshot::remote::RemoteFile::open(&path, remote).unwrap();
        let here = file.here(0, file.pages()).unwrap();
        let Some(next) = here.iter().rposition(|here| *here).map(|last| last as u32 + 1) else { panic!("some came") };
        if next < file.pages() {
            assert_eq!(ask(next), Fetched::All, "turn {turn}");
        }
    }
    let some = lacking(&path);
    assert!(some > 0 && some < all - one);
    // Callers that ask for the same pages at once wait for one request.
    runtime.block_on(async {
        let both =
            (archive.fetch_missing(&path, &remote.name, 0..90), archive.fetch_missing(&path, &remote.name, 0..90));
        let (a, b) = tokio::join!(both.0, both.1);
        assert_eq!((a, b), (Fetched::All, Fetched::All));
    });
    let growing = kip_snapshot::begin(&data, Generation(2)).unwrap();
    let mut next = PageMap::default();
    let carried = PageMap { processes: map.processes.clone(), files: map.files.clone() };
    let into = kip_snapshot::carry::Growing { generation: Generation(2), is_kept: true, still_written: None };
    kip_snapshot::carry::carry(&mut next, &growing, &carried, &path, into).unwrap();
    kip_snapshot::carry::write_sets(&mut next, &growing).unwrap();
    for part in ["core-2.img", "empty.img"] {
        fs::copy(path.join(part), growing.join(part)).unwrap();
    }
    next.processes.get_mut(&2).unwrap().sets.clone_from(&map.processes[&2].sets);
    let sealed: Manifest<serde_json::Value> = kip_snapshot::open(&path).unwrap();
    let told = Contents { engine: sealed.engine, body: sealed.body, pages: next };
    let second = kip_snapshot::seal(&growing, Generation(2), told).unwrap().path;
    fs::remove_dir_all(&path).unwrap();
    assert!(lacking(&second) > 0, "the file is the same, with what is missing of it");
    let uploaded = archive.store(proc, &name, &second, serde_json::json!({}), &own(&data)).unwrap();
    assert_eq!(uploaded.pack_bytes, 0, "nothing is stored again");
    assert!(lacking(&second) > 0, "nothing is fetched to be stored");
    fs::remove_dir_all(&second).unwrap();
    let path = archive.fetch(proc, uploaded.front, &data, |_| ()).unwrap().0;
    archive.fetch_pages(&path, None).unwrap();
    let after = contents(&path);
    assert!(after.0 == before.0 && after.1 == before.1);
}

/// What was stored here, and what was fetched, is read from the store once at most; what is damaged
/// here once more.
#[test]
fn what_the_cache_has_is_not_fetched() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _inside = runtime.enter();
    let temporary = tempfile::tempdir().unwrap();
    let (data, store) = (temporary.path().join("data"), temporary.path().join("store"));
    [&data, &store].into_iter().for_each(|dir| fs::create_dir_all(dir).unwrap());
    let archive = Archive::open(store.to_str().unwrap(), &data, "default".parse().unwrap(), 1).unwrap();
    let archive = archive.with_cache(&data, Some(100 << 20));
    let (proc, name): (ProcId, ProcName) = (ProcId::random(), "web".parse().unwrap());
    let mut path = generation(&data, 1);
    let before = contents(&path);
    let front = archive.store(proc, &name, &path, serde_json::json!({}), &own(&data)).unwrap().front;
    let mut wake = || {
        fs::remove_dir_all(&path).unwrap();
        path = archive.fetch(proc, front, &data, |_| ()).unwrap().0;
        archive.fetch_pages(&path, None).unwrap();
        front_came(&archive, &path);
        assert!(contents(&path) == before);
        let came = archive.fetched(&data).unwrap();
        (came.requests, came.store_bytes > 0, came.cache_bytes > 0)
    };
    assert_eq!(wake(), (0, false, true), "it was stored here");
    archive.cache.as_ref().unwrap().forget(|_| true);
    let (requests, ..) = wake();
    assert!(requests > 1);
    assert_eq!(wake(), (0, false, true), "it was fetched");
    let spoil = |how: fn(&mut Vec<u8>)| {
        for file in fs::read_dir(data.join("cache")).unwrap().map(|file| file.unwrap().path()) {
            let mut bytes = fs::read(&file).unwrap();
            how(&mut bytes);
            fs::write(&file, bytes).unwrap();
        }
    };
    spoil(|bytes| {
        let middle = bytes.len() / 2;
        bytes[middle] ^= 4;
    });
    assert!(wake().0 > 1);
    assert_eq!(wake(), (0, false, true), "what is damaged is replaced");
    spoil(|bytes| bytes.truncate(bytes.len() / 2));
    assert!(wake().0 > 1);
    assert_eq!(wake(), (0, false, true));
    fs::remove_dir_all(data.join("cache")).unwrap();
    assert!(wake().0 > 1);
    assert_eq!(wake(), (0, false, true));
}

// promise archive: one data directory at a time may wake a proc; one that lost it can neither wake,
//   store nor remove it
// held by: this, `tests/test_adopt.py::test_redis_with_its_data_and_the_fence`,
//   `tests/test_adopt.py::test_traffic_finds_the_fence`
/// Of two data directories with the same keys the one that adopts a proc has it; the other can do
/// nothing any more.
#[test]
fn whoever_adopts_it_has_it() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _inside = runtime.enter();
    let temporary = tempfile::tempdir().unwrap();
    let store = temporary.path().join("store");
    let datas = ["a", "b"].map(|name| temporary.path().join(name));
    let realm: Realm = "default".parse().unwrap();
    let open = |data: &Path| Archive::open(store.to_str().unwrap(), data, realm.clone(), 1).unwrap();
    datas.iter().chain([&store]).for_each(|dir| fs::create_dir_all(dir).unwrap());
    let a = open(&datas[0]);
    fs::create_dir_all(datas[1].join(DIRECTORY)).unwrap();
    fs::copy(datas[0].join("archive/default.keys"), datas[1].join("archive/default.keys")).unwrap();
    let b = open(&datas[1]);
    let (proc, name): (ProcId, ProcName) = (ProcId::random(), "web".parse().unwrap());
    let store_one = |archive: &Archive, data: &Path, number| {
        let path = generation(data, number);
        archive.store(proc, &name, &path, serde_json::json!({}), &own(data)).map(|uploaded| uploaded.front)
    };
    let first = store_one(&a, &datas[0], 1).unwrap();
    let fenced = runtime.block_on(b.adopt(proc, first)).unwrap_err();
    assert!(matches!(fenced, HeadFailure::Refused(HeadRefused::Fenced { .. })), "it may run: {fenced}");
    runtime.block_on(a.release(proc, first)).unwrap();
    runtime.block_on(b.adopt(proc, first)).unwrap();
    assert!(matches!(runtime.block_on(a.adopt(proc, first)), Err(HeadFailure::Refused(HeadRefused::Fenced { .. }))));
    let late = store_one(&a, &datas[0], 2).unwrap_err();
    assert!(late.to_string().contains("it was adopted meanwhile"), "{late}");
    b.fetch(proc, first, &datas[1], |_| ()).unwrap();
    let second = store_one(&b, &datas[1], 2).unwrap();
    assert!(matches!(runtime.block_on(a.release(proc, first)), Err(HeadFailure::Other { .. })));
    assert!(matches!(runtime.block_on(a.remove(proc)), Err(HeadFailure::Refused(HeadRefused::Fenced { .. }))));
    runtime.block_on(b.remove(proc)).unwrap();
    assert!(matches!(runtime.block_on(b.adopt(proc, second)), Err(HeadFailure::Other { .. })));
}

// promise archive: a wake begins before all of its front has come: the sets follow, and are
//   installed as they come; what breaks off is read again, and told if it is damaged
// held by: this, `kip_pager::stored::tests::a_set_that_comes_is_read_as_it_comes_in_order_of_need`;
//   through the tier all of `tests/test_archive.py`
/// The rest of a front that broke off comes once a thread needs it; a damaged front is reported as
/// that.
#[test]
fn a_front_that_breaks_off_is_read_again() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _inside = runtime.enter();
    let temporary = tempfile::tempdir().unwrap();
    let (data, store) = (temporary.path().join("data"), temporary.path().join("store"));
    fs::create_dir_all(&data).unwrap();
    fs::create_dir_all(&store).unwrap();
    let archive = Arc::new(Archive::open(store.to_str().unwrap(), &data, "default".parse().unwrap(), 1).unwrap());
    let (proc, name): (ProcId, ProcName) = (archive.id_of(&data).unwrap(), "web".parse().unwrap());
    let path = generation(&data, 1);
    let before = contents(&path);
    let front = archive.store(proc, &name, &path, serde_json::json!({}), &own(&data)).unwrap().front;
    fs::write(data.join(crate::ARCHIVED), serde_json::json!({ "front": front }).to_string()).unwrap();
    let object = store.join(archive.front_key(proc, front).as_str());
    let whole = fs::read(&object).unwrap();
    // The last page of the set is missing.
    let short = &whole[..whole.len() - 100];
    let mut damaged = whole.clone();
    damaged[whole.len() - 110] ^= 1;
    for broken in [short, &damaged] {
        fs::remove_dir_all(&path).unwrap();
        fs::write(&object, broken).unwrap();
        archive.fetch(proc, front, &data, |_| ()).unwrap();
        let map = PageMap::load(&path).unwrap();
        let remote = &map.files[0];
        let ask = || runtime.block_on(archive.fetch_missing(&path, &remote.name, 0..remote.remote.unwrap()));
        let Fetched::Damaged(told) = ask() else { panic!("it is damaged") };
        assert!(told.starts_with("the archived gen-1-") && told.contains("cannot be opened"), "{told}");
        assert_eq!(ask(), Fetched::Later { report: None }, "told once");
        let refused = kip_types::chain(&archive.fetch_pages(&path, None).unwrap_err());
        assert_eq!(refused, told);
        // Gone, and there again.
        fs::remove_file(&object).unwrap();
        assert!(matches!(ask(), Fetched::Later { report: Some(_) }));
        fs::write(&object, &whole).unwrap();
        assert_eq!(ask(), Fetched::All);
        assert_eq!(lacking(&path), 0);
        assert!(contents(&path) == before);
    }
}

// promise K5: what a proc was in the store is forgotten whole then
#[test]
fn what_a_proc_was_in_the_store_is_forgotten_whole() {
    for (parted, word) in [(Archive::forget as fn(&Path) -> io::Result<()>, ENDED), (Archive::set_aside, ASIDE)] {
        let dir = tempfile::tempdir().unwrap();
        parted(dir.path()).expect("it never was there");
        fs::write(dir.path().join(ID), "its id").unwrap();
        fs::write(dir.path().join(crate::ARCHIVED), "of which its generations are numbered").unwrap();
        parted(dir.path()).unwrap();
        let [left] = &fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().path()).collect::<Vec<_>>()[..] else {
            panic!("more than the note is left");
        };
        assert!(left.file_name().is_some_and(|name| name.to_string_lossy().starts_with(word)), "{}", left.display());
        assert_eq!(fs::read_to_string(left).unwrap(), "its id");
    }
}
