//! Facts as they should and should not be, and images as CRIU writes them, with what an attacker
//! that has the keys might change.

use super::*;
use kip_criu_images::codes::seccomp;
use kip_criu_images::fields::{
    core_entry, creds_entry, file_entry, ghost_file_entry, mnt_entry, pstree_entry, reg_file_entry, seccomp_entry,
    seccomp_filter, task_core_entry, thread_core_entry, uid_gid_extent, unix_sk_entry, userns_entry,
};
use kip_criu_images::{FieldValue, Images, Message};
use proptest::prelude::*;
use std::fs;
use std::path::Path;

const FILTER: &[u8] = &[6, 0, 0, 0, 0, 0, 0xff, 0x7f];

fn thread(id: u32) -> ThreadFacts {
    ThreadFacts {
        id,
        uids: [100; 4],
        gids: [5; 4],
        groups: vec![65_535],
        capabilities: 0b101,
        no_new_privileges: true,
        filter: Some(FILTER.to_vec()),
        has_profile: false,
        is_real_time: false,
        nice: 0,
        oom_score: 0,
    }
}

fn file(path: &str) -> FileFact {
    FileFact { kind: 1, path: Some(path.into()), is_device: false, is_external: false }
}

fn mount(point: &str, kind: u64, external: Option<&str>) -> MountFact {
    MountFact { point: point.into(), kind, external: external.map(Into::into), is_plain: true, flags: 0 }
}

fn facts() -> Facts {
    Facts {
        images: ["core", "pages", "pstree"].map(str::to_owned).into(),
        id_maps: [vec![(0, 536_000_000, 65_536)], vec![(0, 536_000_000, 65_536)]],
        threads: vec![thread(1), thread(2)],
        divided: BTreeSet::new(),
        mounts: vec![
            mount("/", 17, None),
            mount("/usr", 17, Some("usr")),
            mount("/proc", 1, None),
            mount("/proc/kmsg", 5, Some("proc-kmsg")),
        ],
        files: vec![
            file("/usr/bin/redis-server"),
            file("/socket:[77]"),
            FileFact { is_device: true, ..file("/dev/null") },
            FileFact { kind: 5, path: None, ..file("") },
        ],
        carried: vec![CarriedFact { name: "ghost-file-1.img".into(), owner: (0, 7), mode: 0o100_600 }],
    }
}

fn policy() -> Policy {
    Policy {
        ids: (536_000_000, 65_536),
        capabilities: 0b111,
        no_new_privileges: true,
        filters: vec![b"an earlier".to_vec(), FILTER.to_vec()],
        masks: ["/proc/kmsg".to_owned()].into(),
        volumes: [("volume-0".to_owned(), ("/data".to_owned(), true)), ("volume-1".into(), ("/log".into(), false))]
            .into(),
        sockets: [77].into(),
        devices: ["/dev/null".to_owned()].into(),
        own_ipc: false,
        nice: 0,
        oom_score: 0,
    }
}

fn refused(change: impl FnOnce(&mut Facts)) -> Refused {
    let mut facts = facts();
    change(&mut facts);
    check(&facts, &policy()).unwrap_err()
}

#[test]
fn what_a_sandbox_gives_is_allowed() {
    assert_eq!(check(&facts(), &policy()), Ok(()));
    let setuid = Policy { no_new_privileges: false, ..policy() };
    let mut other = facts();
    other.threads[1].no_new_privileges = false;
    assert_eq!(check(&other, &setuid), Ok(()));
    assert_eq!(check(&other, &policy()), Err(Refused::Unconfined { id: 2, missing: "the no_new_privs" }));
    let mut ipc = facts();
    ipc.images.insert("ipcns-shm".into());
    assert_eq!(check(&ipc, &Policy { own_ipc: true, ..policy() }), Ok(()));
    assert_eq!(check(&ipc, &policy()), Err(Refused::Image { name: "ipcns-shm".into() }));
    assert_eq!(check(&Facts::default(), &policy()), Err(Refused::Empty));
}

#[test]
fn more_rights_are_refused() {
    let message = refused(|f| f.threads[1].uids[2] = 65_536).to_string();
    assert_eq!(message, "thread 2 has the user id 65536, beyond those of its sandbox");
    assert!(matches!(refused(|f| f.threads[0].groups[0] = u32::MAX), Refused::Id { what: "group", .. }));
    assert_eq!(refused(|f| f.threads[0].capabilities = 0b1001), Refused::Capabilities { id: 1, extra: 0b1000 });
    assert!(matches!(refused(|f| f.threads[0].filter = None), Refused::Unconfined { id: 1, .. }));
    assert!(matches!(refused(|f| f.threads[0].filter = Some(vec![0; 8])), Refused::Unconfined { id: 1, .. }));
    let mut older = facts();
    older.threads.iter_mut().for_each(|thread| thread.filter = Some(b"an earlier".to_vec()));
    assert_eq!(check(&older, &policy()), Ok(()));
    for change in [
        (|t| t.has_profile = true) as fn(&mut ThreadFacts),
        |t| t.is_real_time = true,
        |t| t.nice = -1,
        |t| t.oom_score = -1000,
    ] {
        assert!(matches!(refused(|f| change(&mut f.threads[1])), Refused::Privileged { id: 2, .. }));
    }
    let message = refused(|f| f.id_maps[0][0].1 = 0).to_string();
    assert!(message.contains("maps user ids in another way") && message.contains("65536 from 536000000"), "{message}");
    assert!(matches!(refused(|f| f.id_maps[1].push((70_000, 0, 1))), Refused::IdMap { what: "group", .. }));
    assert!(matches!(refused(|f| f.id_maps[1].clear()), Refused::IdMap { .. }));
    assert_eq!(refused(|f| f.divided = ["mount"].into()), Refused::Namespace { kind: "mount" });
}

#[test]
fn what_is_not_its_sandboxs_is_refused() {
    for name in ["cgroup", "netdev", "autofs", "wake.plan", "tty", "utsns", ""] {
        assert!(matches!(refused(|f| f.images = [name.to_owned()].into()), Refused::Image { .. }), "{name}");
    }
    for bad in [
        mount("/etc", 17, None),
        mount("/", 1, None),
        mount("/proc", 17, None),
        mount("/usr", 17, None),
        mount("/usr", 17, Some("proc-kmsg")),
        mount("/root", 17, Some("usr")),
        mount("/proc/kmsg", 5, Some("proc-keys")),
        mount("/proc/keys", 5, Some("proc-keys")),
        mount("/sys", 5, None),
        MountFact { is_plain: false, ..mount("/", 17, None) },
    ] {
        assert!(matches!(refused(|f| f.mounts.push(bad.clone())), Refused::Mount { .. }), "{bad:?}");
    }
    for path in ["", "etc/passwd", "/a/../b", "/..", "/a\0", "/a/.", "/pipe:[7]"] {
        assert!(matches!(refused(|f| f.files[0] = file(path)), Refused::Path { .. }), "{path:?}");
    }
    for path in ["/socket:[78]", "/socket:[77", "/socket:[]", "/socket:[77]/x"] {
        assert!(matches!(refused(|f| f.files[0] = file(path)), Refused::Foreign { .. }), "{path:?}");
    }
    let device = |path| FileFact { is_device: true, ..file(path) };
    assert!(matches!(refused(|f| f.files[0] = device("/dev/mem")), Refused::Device { .. }));
    let outside =
        |kind, path: Option<&str>| FileFact { kind, path: path.map(Into::into), is_device: false, is_external: true };
    assert!(matches!(refused(|f| f.files[0] = outside(5, None)), Refused::Foreign { .. }));
    assert!(matches!(refused(|f| f.files[0] = outside(1, Some("/x"))), Refused::Foreign { .. }));
    for kind in [0, 4, 10, 11, 14, 15, 16, 19, 21, 99] {
        assert_eq!(refused(|f| f.files[3].kind = kind), Refused::Kind { kind });
    }
    assert!(matches!(refused(|f| f.carried[0].owner.1 = 70_000), Refused::Id { .. }));
    assert!(matches!(refused(|f| f.carried[0].mode = 0o020_666), Refused::Device { .. }));
    assert!(matches!(refused(|f| f.carried[0].mode = 0o060_666), Refused::Device { .. }));
}

proptest! {
    #[test]
    fn no_id_outside_the_block_passes(id: u32, place in 0usize..9) {
        let mut all = facts();
        match place {
            0..4 => all.threads[0].uids[place] = id,
            4..8 => all.threads[0].gids[place - 4] = id,
            _ => all.threads[0].groups.push(id),
        }
        prop_assert_eq!(check(&all, &policy()).is_ok(), id < 65_536);
    }
}

// Images, as CRIU writes them.

fn message(fields: Vec<(u32, FieldValue)>) -> Message {
    Message(fields)
}

fn number(value: u64) -> FieldValue {
    FieldValue::Varint(value)
}

fn inner(fields: Vec<(u32, FieldValue)>) -> FieldValue {
    FieldValue::Bytes(Message(fields).encode())
}

fn write(dir: &Path, name: &str, entries: &[Message]) {
    let mut bytes = [0x5456_4319u32.to_le_bytes(), 7u32.to_le_bytes()].concat();
    for entry in entries {
        let entry = entry.encode();
        bytes.extend_from_slice(&(entry.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&entry);
    }
    fs::write(dir.join(name), bytes).unwrap();
}

fn credentials(uid: u64) -> Vec<(u32, FieldValue)> {
    let mut creds: Vec<(u32, FieldValue)> =
        (1..=8).map(|field| (field, number(if field % 2 == 1 { uid } else { 5 }))).collect();
    for field in
        [creds_entry::CAP_INH, creds_entry::CAP_PRM, creds_entry::CAP_EFF, creds_entry::CAP_BND, creds_entry::CAP_AMB]
    {
        creds.extend([(field, number(0b101)), (field, number(0))]);
    }
    creds.extend([(creds_entry::SECBITS, number(0)), (creds_entry::GROUPS, number(65_535))]);
    creds.push((creds_entry::NO_NEW_PRIVS, number(1)));
    creds
}

fn core(uid: u64, filter: Option<u64>) -> Message {
    let mode = if filter.is_some() { seccomp::FILTER } else { seccomp::DISABLED };
    let mut own = vec![
        (thread_core_entry::SCHED_NICE, number(0)),
        (thread_core_entry::SCHED_POLICY, number(0)),
        (thread_core_entry::CREDS, inner(credentials(uid))),
        (thread_core_entry::SECCOMP_MODE, number(mode)),
    ];
    own.extend(filter.map(|index| (thread_core_entry::SECCOMP_FILTER, number(index))));
    let tc = vec![(task_core_entry::TASK_STATE, number(1)), (task_core_entry::OOM_SCORE_ADJ, number(0))];
    message(vec![(core_entry::MTYPE, number(1)), (core_entry::TC, inner(tc)), (core_entry::THREAD_CORE, inner(own))])
}

/// Two processes, the second of two threads and with a filter of its own.
fn images(dir: &Path) {
    let task = |pid, threads: &[u64]| {
        let mut fields = vec![(pstree_entry::PID, number(pid))];
        fields.extend(threads.iter().map(|thread| (pstree_entry::THREADS, number(*thread))));
        message(fields)
    };
    write(dir, "pstree.img", &[task(1, &[1]), task(2, &[2, 3])]);
    let ids = message((1..=12).map(|field| (field, number(u64::from(field)))).collect());
    for pid in [1, 2] {
        write(dir, &format!("ids-{pid}.img"), std::slice::from_ref(&ids));
    }
    let filter = |code: &[u8], before: Option<u64>| {
        let mut fields = vec![
            (seccomp_filter::FILTER, FieldValue::Bytes(code.to_vec())),
            (seccomp_filter::FLAGS, number(seccomp::TSYNC)),
        ];
        fields.extend(before.map(|index| (seccomp_filter::PREV, number(index))));
        inner(fields)
    };
    // As CRIU 4.2 writes them: newest first, each leads to the one that is set after it.
    let all = [filter(FILTER, None), filter(&[1; 16], None), filter(FILTER, Some(1))];
    write(
        dir,
        "seccomp.img",
        &[message(all.into_iter().map(|filter| (seccomp_entry::SECCOMP_FILTERS, filter)).collect())],
    );
    write(dir, "core-1.img", &[core(0, Some(0))]);
    write(dir, "core-2.img", &[core(100, Some(2))]);
    write(dir, "core-3.img", &[core(100, None)]);
    let extent = || {
        inner(vec![
            (uid_gid_extent::FIRST, number(0)),
            (uid_gid_extent::LOWER_FIRST, number(536_000_000)),
            (uid_gid_extent::COUNT, number(65_536)),
        ])
    };
    let maps = message(vec![(userns_entry::UID_MAP, extent()), (userns_entry::GID_MAP, extent())]);
    write(dir, "userns-11.img", &[maps]);
    let root = vec![
        (mnt_entry::FSTYPE, number(17)),
        (mnt_entry::ROOT, FieldValue::Bytes(b"/".to_vec())),
        (mnt_entry::MOUNTPOINT, FieldValue::Bytes(b"/".to_vec())),
        (mnt_entry::SHARED_ID, number(0)),
    ];
    write(dir, "mountpoints-10.img", &[message(root)]);
    let reg = |path: &str, mode| {
        let reg = inner(vec![
            (reg_file_entry::FLAGS, number(0)),
            (reg_file_entry::NAME, FieldValue::Bytes(path.into())),
            (reg_file_entry::MODE, number(mode)),
        ]);
        message(vec![(file_entry::TYPE, number(kind::REG)), (file_entry::ID, number(9)), (file_entry::REG, reg)])
    };
    let unix = message(vec![
        (file_entry::TYPE, number(kind::UNIXSK)),
        (file_entry::ID, number(8)),
        (file_entry::USK, inner(vec![(unix_sk_entry::UFLAGS, number(0))])),
    ]);
    write(dir, "files.img", &[reg("/usr/bin/x", 0o100_755), reg("/dev/null", 0o020_666), unix]);
    let ghost = message(vec![
        (ghost_file_entry::UID, number(3)),
        (ghost_file_entry::GID, number(4)),
        (ghost_file_entry::MODE, number(0o100_600)),
    ]);
    write(dir, "ghost-file-1.img", &[ghost]);
    let ghost = dir.join("ghost-file-1.img");
    let contents = [fs::read(&ghost).unwrap(), vec![0xff; 100]].concat();
    fs::write(ghost, contents).unwrap();
    fs::write(dir.join("pages-1.img"), [0; 10]).unwrap();
}

/// CRIU writes their numbers in hexadecimal: the tenth deleted file is `a`.
#[test]
fn deleted_files_are_judged_whatever_their_number() {
    let dir = tempfile::tempdir().unwrap();
    images(dir.path());
    for name in ["ghost-file-a.img", "ghost-file-1f.img"] {
        fs::copy(dir.path().join("ghost-file-1.img"), dir.path().join(name)).unwrap();
    }
    let facts = read(&Images::read(dir.path()).unwrap(), &BTreeSet::new()).unwrap();
    let names: BTreeSet<&str> = facts.carried.iter().map(|carried| carried.name.as_str()).collect();
    assert_eq!(names, ["ghost-file-1.img", "ghost-file-1f.img", "ghost-file-a.img"].into());
}

#[test]
fn facts_are_read_out_of_images() {
    let dir = tempfile::tempdir().unwrap();
    images(dir.path());
    let facts = read(&Images::read(dir.path()).unwrap(), &BTreeSet::new()).unwrap();
    assert_eq!(
        facts.threads.iter().map(|t| (t.id, t.uids[2], t.gids[0])).collect::<Vec<_>>(),
        [(1, 0, 5), (2, 100, 5), (3, 100, 5)]
    );
    assert!(facts.threads.iter().all(|t| t.filter.as_deref() == Some(FILTER)), "the sandbox's below the program's own");
    assert_eq!(facts.carried, [CarriedFact { name: "ghost-file-1.img".into(), owner: (3, 4), mode: 0o100_600 }]);
    assert_eq!(facts.files[1], FileFact { is_device: true, ..file("/dev/null") });
    assert_eq!(
        facts.images.iter().map(String::as_str).collect::<Vec<_>>(),
        ["core", "files", "ghost-file", "ids", "mountpoints", "pages", "pstree", "seccomp", "userns"]
    );
    assert_eq!(check(&facts, &policy()), Ok(()));
}

/// What an attacker with the keys might write, and how each refusal reads.
#[test]
fn images_that_ask_for_more_are_refused() {
    type Change = fn(&Path);
    let with = |core: Message, extra: Vec<(u32, FieldValue)>| {
        let mut core = core;
        core.0.extend(extra);
        core
    };
    let changes: [(Change, &str); 10] = [
        (|dir| write(dir, "core-3.img", &[core(70_000, None)]), "thread 3 has the user id 70000"),
        (|dir| write(dir, "core-2.img", &[core(100, None)]), "thread 2 runs without the system call filter"),
        (|dir| write(dir, "core-1.img", &[core(0, Some(7))]), "thread 1 runs without the system call filter"),
        (|dir| write(dir, "core-1.img", &[core(0, Some(1))]), "thread 1 runs without the system call filter"),
        (|dir| write(dir, "cgroup.img", &[]), "an image \"cgroup\""),
        (|dir| fs::write(dir.join("wake.plan"), b"x").unwrap(), "an image \"wake.plan\""),
        (|dir| write(dir, "seccomp.img", &[]), "image seccomp.img has no entry"),
        (
            |dir| {
                let of = |before| {
                    inner(vec![
                        (seccomp_filter::FILTER, FieldValue::Bytes(FILTER.to_vec())),
                        (seccomp_filter::PREV, number(before)),
                        (seccomp_filter::FLAGS, number(seccomp::TSYNC)),
                    ])
                };
                let all = [of(1), of(0)].map(|filter| (seccomp_entry::SECCOMP_FILTERS, filter));
                write(dir, "seccomp.img", &[message(all.into())]);
            },
            "thread 1 runs without the system call filter",
        ),
        (
            |dir| {
                let ids = message((1..=12).map(|field| (field, number(u64::from(field) + 1))).collect());
                write(dir, "ids-2.img", &[ids]);
            },
            "several cgroup namespaces",
        ),
        (|dir| fs::remove_file(dir.join("core-3.img")).unwrap(), "core-3.img"),
    ];
    for (change, expected) in changes {
        let dir = tempfile::tempdir().unwrap();
        images(dir.path());
        change(dir.path());
        let refusal = match read(&Images::read(dir.path()).unwrap(), &BTreeSet::new()) {
            Err(e) => e.to_string(),
            Ok(facts) => check(&facts, &policy()).unwrap_err().to_string(),
        };
        assert!(refusal.contains(expected), "{refusal:?} does not say {expected:?}");
    }
    // CRIU would merge the two, so that the lists of capabilities follow each other and the first
    // counts.
    let dir = tempfile::tempdir().unwrap();
    images(dir.path());
    let mut more = credentials(0);
    more.retain(|(field, _)| *field != creds_entry::CAP_EFF);
    more.extend([(creds_entry::CAP_EFF, number(u64::from(u32::MAX))), (creds_entry::CAP_EFF, number(0))]);
    let twice = core(0, Some(0)).message(core_entry::THREAD_CORE).unwrap().unwrap();
    let twice = with(twice, vec![(thread_core_entry::CREDS, inner(more))]);
    let mut whole = core(0, Some(0));
    whole.set_bytes(core_entry::THREAD_CORE, twice.encode());
    write(dir.path(), "core-1.img", &[whole]);
    assert!(
        matches!(read(&Images::read(dir.path()).unwrap(), &BTreeSet::new()), Err(FactsError::Repeated { image }) if image == "core-1.img")
    );
}

#[test]
fn volumes_are_where_they_were_and_as_closed() {
    let volume = |point: &str, key: &str, flags| MountFact { flags, ..mount(point, 0, Some(key)) };
    let mut facts = facts();
    // MS_RDONLY 1, MS_NOSUID 2, MS_NODEV 4, MS_RELATIME 1 << 21.
    facts.mounts.extend([volume("/data", "volume-0", 7 | 1 << 21), volume("/log", "volume-1", 6)]);
    assert_eq!(check(&facts, &policy()), Ok(()));
    for bad in [
        volume("/etc", "volume-0", 7),
        volume("/data", "volume-1", 7),
        volume("/data", "volume-2", 7),
        volume("/data", "volume-0", 6),
        volume("/log", "volume-1", 4),
        volume("/log", "volume-1", 2),
        volume("/usr", "volume-1", 6),
    ] {
        assert!(matches!(refused(|f| f.mounts.push(bad.clone())), Refused::Mount { .. }), "{bad:?}");
    }
}
