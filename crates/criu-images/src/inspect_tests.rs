//! A small tree in images as CRIU writes them.

use super::*;
use crate::codes::{kind, status};
use crate::fields::{
    fdinfo_entry, file_entry, memfd_file_entry, memfd_inode_entry, netlink_sk_entry, pagemap_entry, pagemap_head,
    reg_file_entry, remap_file_path_entry, sk_packet_entry, unix_sk_entry, vma_entry,
};
use crate::wire::FieldValue;

/// A message of varints, and of bytes and strings.
fn message(numbers: &[(u32, u64)], bytes: &[(u32, &[u8])]) -> Message {
    let numbers = numbers.iter().map(|(field, value)| (*field, FieldValue::Varint(*value)));
    Message(numbers.chain(bytes.iter().map(|(field, value)| (*field, FieldValue::Bytes(value.to_vec())))).collect())
}

fn images() -> Images {
    let mut images = Images::default();
    let mut add = |name: &str, entries: &[Message]| images.put_entries(name, entries);
    let task = |pid, parent| message(&[(pstree_entry::PID, pid), (pstree_entry::PPID, parent)], &[]);
    add("pstree.img", &[task(2, 1), message(&[(pstree_entry::PID, 1)], &[]), task(3, 2)]);
    let creds = message(&[(creds_entry::UID, 7), (creds_entry::EUID, 33), (creds_entry::EGID, 34)], &[]).encode();
    let thread = message(&[], &[(thread_core_entry::CREDS, &creds)]).encode();
    let core = |state, name: &[u8]| {
        let common = message(&[(task_core_entry::TASK_STATE, state)], &[(task_core_entry::COMM, name)]).encode();
        message(&[], &[(core_entry::TC, &common), (core_entry::THREAD_CORE, &thread)])
    };
    add("core-1.img", &[core(state::ALIVE, b"kip-init")]);
    add("core-2.img", &[core(state::ALIVE, b"web")]);
    add("core-3.img", &[core(state::DEAD, b"gone")]);
    let vma = |start: u64, end: u64, offset, id, status, flags| {
        let fields = [
            (vma_entry::START, start),
            (vma_entry::END, end),
            (vma_entry::PGOFF, offset),
            (vma_entry::SHMID, id),
            (vma_entry::PROT, 3),
            (vma_entry::FLAGS, flags),
            (vma_entry::STATUS, status),
        ];
        message(&fields, &[]).encode()
    };
    let vmas = [
        vma(0x1000, 0x2000, 0x3000, 5, status::FILE_PRIVATE, 2),
        vma(0x5000, 0x6000, 0, 0, status::ANON_PRIVATE, 2),
        vma(0x8000, 0xc000, 0x1000, 77, status::ANON_SHARED, 1),
        vma(0xd000, 0xe000, 0, 9, status::MEMFD, 1),
        vma(0x10000, 0x12000, 0, 0, status::ANON_PRIVATE, 2),
    ];
    let vmas: Vec<(u32, &[u8])> = vmas.iter().map(|vma| (mm_entry::VMAS, vma.as_slice())).collect();
    let mm = [
        (mm_entry::MM_START_STACK, 0x11800),
        (mm_entry::MM_START_BRK, 0x5000),
        (mm_entry::MM_BRK, 0x5800),
        (mm_entry::MM_ARG_START, 0x11900),
        (mm_entry::MM_ARG_END, 0x11910),
        (mm_entry::MM_ENV_START, 0x11910),
        (mm_entry::MM_ENV_END, 0x11a00),
        (mm_entry::EXE_FILE_ID, 4),
    ];
    add("mm-2.img", &[message(&mm, &vmas)]);
    // Two pages of which one is in the mapping.
    let pages = [(pagemap_entry::VADDR, 0), (pagemap_entry::COMPAT_NR_PAGES, 2), (pagemap_entry::FLAGS, 4)];
    add("pagemap-shmem-77.img", &[message(&[(pagemap_head::PAGES_ID, 1)], &[]), message(&pages, &[])]);
    add("fs-2.img", &[message(&[(fs_entry::CWD_ID, 6)], &[])]);
    add("ids-2.img", &[message(&[(task_kobj_ids_entry::FILES_ID, 12)], &[])]);
    let reg = |name: &[u8], flags, offset, mode| {
        let numbers = [(reg_file_entry::FLAGS, flags), (reg_file_entry::POS, offset), (reg_file_entry::MODE, mode)];
        message(&numbers, &[(reg_file_entry::NAME, name)]).encode()
    };
    let file = |kind, id, part: u32, bytes: &[u8]| {
        message(&[(file_entry::TYPE, kind), (file_entry::ID, id)], &[(part, bytes)])
    };
    let unix = [
        (unix_sk_entry::INO, 501),
        (unix_sk_entry::TYPE, 1),
        (unix_sk_entry::STATE, 1),
        (unix_sk_entry::FLAGS, 0o4002),
        (unix_sk_entry::PEER, 502),
    ];
    let unix = message(&unix, &[(unix_sk_entry::NAME, b"\0name")]).encode();
    let memory = [(memfd_file_entry::FLAGS, 2), (memfd_file_entry::POS, 9), (memfd_file_entry::INODE_ID, 55)];
    let memory = message(&memory, &[]).encode();
    let netlink = [(netlink_sk_entry::INO, 503), (netlink_sk_entry::PROTOCOL, 15), (netlink_sk_entry::FLAGS, 0o4002)];
    let netlink = message(&netlink, &[]).encode();
    let regular = |id, bytes: Vec<u8>| file(kind::REG, id, file_entry::REG, &bytes);
    add(
        "files.img",
        &[
            regular(4, reg(b"/usr/sbin/web", 0, 0, 0o100755)),
            regular(5, reg(b"/usr/lib/libc.so", 0, 0, 0o100644)),
            regular(6, reg(b"/srv", 0o200000, 0, 0o40755)),
            regular(7, reg(b"/tmp/gone", 0o2002, 1234, 0o100600)),
            regular(8, reg(b"/socket:[4711]", 0o4002, 0, 0)),
            file(kind::UNIXSK, 10, file_entry::USK, &unix),
            file(kind::MEMFD, 9, file_entry::MEMFD, &memory),
            file(kind::NETLINKSK, 11, file_entry::NLSK, &netlink),
        ],
    );
    let jit = [(memfd_inode_entry::SHMID, 88), (memfd_inode_entry::INODE_ID, 55)];
    add("memfd.img", &[message(&jit, &[(memfd_inode_entry::NAME, b"jit")])]);
    let gone = [(remap_file_path_entry::ORIG_ID, 7), (2, 1), (remap_file_path_entry::REMAP_TYPE, 1)];
    add("remap-fpath.img", &[message(&gone, &[])]);
    let open = |id, flags, kind, fd| {
        let fields =
            [(fdinfo_entry::ID, id), (fdinfo_entry::FLAGS, flags), (fdinfo_entry::TYPE, kind), (fdinfo_entry::FD, fd)];
        message(&fields, &[])
    };
    let table = [
        open(8, 1, kind::REG, 6),
        open(7, 0, kind::REG, 4),
        open(10, 0, kind::UNIXSK, 7),
        open(9, 0, kind::MEMFD, 8),
        open(11, 0, kind::NETLINKSK, 12),
    ];
    add("fdinfo-12.img", &table);
    // Two packets of three and four bytes, in a socket's queue.
    let mut queues = vec![0; 8];
    for bytes in [&b"abc"[..], b"defg"] {
        let packet = [(sk_packet_entry::ID_FOR, 10), (sk_packet_entry::LENGTH, bytes.len() as u64)];
        let packet = message(&packet, &[]).encode();
        queues.extend([&(packet.len() as u32).to_le_bytes(), packet.as_slice(), bytes].concat());
    }
    images.put_bytes("sk-queues.img", queues);
    images
}

#[test]
fn a_tree_is_read() {
    let found = processes(&images()).unwrap();
    assert_eq!(
        found.iter().map(|p| (p.pid, p.parent, p.ended)).collect::<Vec<_>>(),
        [(1, 0, false), (2, 1, false), (3, 2, true)]
    );
    let web = &found[1];
    assert_eq!((web.name.as_str(), web.user), ("web", (33, 34)));
    assert_eq!((web.program.as_str(), web.directory.as_str()), ("/usr/sbin/web", "/srv"));
    assert_eq!(web.strings, StringRanges { arguments: 0x11900..0x11910, environment: 0x11910..0x11a00 });
    let kinds: Vec<_> = web.files.iter().map(|file| (file.fd, file.flags, file.offset, file.deleted)).collect();
    assert_eq!(
        kinds,
        [
            (4, 0o2002, Some(1234), true),
            (6, 0o2_004_002, None, false),
            (7, 0o4002, None, false),
            (8, 2, Some(9), false),
            (12, 0o4002, None, false)
        ]
    );
    assert_eq!(web.files[0].kind, FileKind::Path { kind: "file", path: "/tmp/gone".into() });
    assert_eq!(web.files[1].kind, FileKind::Socket { inode: 4711 });
    let state = UnixState { kind: 1, state: 1, name: "@name".into(), peer: 502, queued: 7 };
    assert_eq!(web.files[2].kind, FileKind::Unix { inode: 501, state: Some(state), id: 10 });
    assert_eq!(web.files[3].kind, FileKind::Memory { name: "jit".into() });
    let maps: Vec<_> = web.mappings.iter().map(|m| (m.range.start, m.shared, m.kind.clone())).collect();
    assert_eq!(
        maps,
        [
            (0x1000, false, MappingKind::File { path: "/usr/lib/libc.so".into() }),
            (0x5000, false, MappingKind::Private { name: "[heap]".into() }),
            (0x8000, true, MappingKind::Shared { name: "[shared]".into(), stored: Some(0x1000) }),
            (0xd000, true, MappingKind::Shared { name: "/memfd:jit".into(), stored: Some(0) }),
            (0x10000, false, MappingKind::Private { name: "[stack]".into() }),
        ]
    );
}

#[test]
fn what_is_cut_short_is_damaged() {
    let whole = images();
    for name in ["files.img", "mm-2.img", "fdinfo-12.img", "sk-queues.img"] {
        let mut cut = whole.clone();
        let mut bytes = whole.bytes(name).unwrap().to_vec();
        bytes.truncate(bytes.len() - 8);
        cut.put_bytes(name, bytes);
        let refused = processes(&cut).unwrap_err();
        assert_eq!(refused.to_string(), format!("image {name} is damaged"));
    }
}

#[test]
fn only_what_says_something_is_wanted() {
    for name in ["checkpoint.tar", "core-2.img", "files.img", "pagemap-shmem-7.img", "fdinfo-12.img"] {
        assert!(is_wanted(name), "{name}");
    }
    for name in ["pages-1.img", "pagemap-2.img", "ghost-file-3.img", "core-2.img.new", "pages.map"] {
        assert!(!is_wanted(name), "{name}");
    }
}
