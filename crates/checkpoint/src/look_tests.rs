//! A small tree in images as CRIU writes them.

use super::*;
use crate::images::testing::{self, add_bytes};
use crate::wire::Value;

/// A message of varints, and of bytes and strings.
fn message(numbers: &[(u32, u64)], bytes: &[(u32, &[u8])]) -> Message {
    let numbers = numbers.iter().map(|(field, value)| (*field, Value::Varint(*value)));
    Message(numbers.chain(bytes.iter().map(|(field, value)| (*field, Value::Bytes(value.to_vec())))).collect())
}

fn images() -> Images {
    let mut images = Images::default();
    let mut add = |name: &str, entries: &[Message]| testing::add(&mut images, name, entries);
    add("pstree.img", &[message(&[(1, 2), (2, 1)], &[]), message(&[(1, 1)], &[]), message(&[(1, 3), (2, 2)], &[])]);
    let creds = message(&[(1, 7), (3, 33), (4, 34)], &[]).encode();
    let thread = message(&[], &[(10, &creds)]).encode();
    let core = |state, name: &[u8]| {
        let common = message(&[(1, state)], &[(6, name)]).encode();
        message(&[], &[(3, &common), (5, &thread)])
    };
    add("core-1.img", &[core(1, b"kip-init")]);
    add("core-2.img", &[core(1, b"web")]);
    add("core-3.img", &[core(2, b"gone")]);
    let vma = |start: u64, end: u64, offset, id, status, flags| {
        message(&[(1, start), (2, end), (3, offset), (4, id), (5, 3), (6, flags), (7, status)], &[]).encode()
    };
    let vmas = [
        vma(0x1000, 0x2000, 0x3000, 5, 1 << 6, 2),
        vma(0x5000, 0x6000, 0, 0, 1 << 9, 2),
        vma(0x8000, 0xc000, 0x1000, 77, 1 << 8, 1),
        vma(0xd000, 0xe000, 0, 9, 1 << 14, 1),
        vma(0x10000, 0x12000, 0, 0, 1 << 9, 2),
    ];
    let vmas: Vec<(u32, &[u8])> = vmas.iter().map(|vma| (14, vma.as_slice())).collect();
    let mm =
        [(5, 0x11800), (6, 0x5000), (7, 0x5800), (8, 0x11900), (9, 0x11910), (10, 0x11910), (11, 0x11a00), (12, 4)];
    add("mm-2.img", &[message(&mm, &vmas)]);
    // Two pages of which one is in the mapping.
    add("pagemap-shmem-77.img", &[message(&[(1, 1)], &[]), message(&[(1, 0), (2, 2), (4, 4)], &[])]);
    add("fs-2.img", &[message(&[(1, 6)], &[])]);
    add("ids-2.img", &[message(&[(2, 12)], &[])]);
    let reg = |name: &[u8], flags, offset, mode| message(&[(2, flags), (3, offset), (10, mode)], &[(6, name)]).encode();
    let file = |kind, id, part: u32, bytes: &[u8]| message(&[(1, kind), (2, id)], &[(part, bytes)]);
    let unix = message(&[(2, 501), (3, 1), (4, 1), (5, 0o4002), (8, 502)], &[(11, b"\0name")]).encode();
    let memory = message(&[(2, 2), (3, 9), (5, 55)], &[]).encode();
    add(
        "files.img",
        &[
            file(1, 4, 3, &reg(b"/usr/sbin/web", 0, 0, 0o100755)),
            file(1, 5, 3, &reg(b"/usr/lib/libc.so", 0, 0, 0o100644)),
            file(1, 6, 3, &reg(b"/srv", 0o200000, 0, 0o40755)),
            file(1, 7, 3, &reg(b"/tmp/gone", 0o2002, 1234, 0o100600)),
            file(1, 8, 3, &reg(b"/socket:[4711]", 0o4002, 0, 0)),
            file(5, 10, 16, &unix),
            file(18, 9, 20, &memory),
        ],
    );
    add("memfd.img", &[message(&[(5, 88), (7, 55)], &[(1, b"jit")])]);
    add("remap-fpath.img", &[message(&[(1, 7), (2, 1), (3, 1)], &[])]);
    let open = |id, flags, kind, fd| message(&[(1, id), (2, flags), (3, kind), (4, fd)], &[]);
    add("fdinfo-12.img", &[open(8, 1, 1, 6), open(7, 0, 1, 4), open(10, 0, 5, 7), open(9, 0, 18, 8)]);
    // Two packets of three and four bytes, in a socket's queue.
    let mut queues = vec![0; 8];
    for bytes in [&b"abc"[..], b"defg"] {
        let packet = message(&[(1, 10), (2, bytes.len() as u64)], &[]).encode();
        queues.extend([&(packet.len() as u32).to_le_bytes(), packet.as_slice(), bytes].concat());
    }
    add_bytes(&mut images, "sk-queues.img", queues);
    images
}

#[test]
fn a_tree_is_read() {
    let found = look(&images()).unwrap();
    assert_eq!(
        found.iter().map(|p| (p.pid, p.parent, p.ended)).collect::<Vec<_>>(),
        [(1, 0, false), (2, 1, false), (3, 2, true)]
    );
    let web = &found[1];
    assert_eq!((web.name.as_str(), web.user), ("web", (33, 34)));
    assert_eq!((web.program.as_str(), web.directory.as_str()), ("/usr/sbin/web", "/srv"));
    assert_eq!(web.strings, Strings { arguments: 0x11900..0x11910, environment: 0x11910..0x11a00 });
    let kinds: Vec<_> = web.files.iter().map(|file| (file.fd, file.flags, file.offset, file.deleted)).collect();
    assert_eq!(
        kinds,
        [
            (4, 0o2002, Some(1234), true),
            (6, 0o2_004_002, None, false),
            (7, 0o4002, None, false),
            (8, 2, Some(9), false)
        ]
    );
    assert_eq!(web.files[0].kind, FileKind::Path { kind: "file", path: "/tmp/gone".into() });
    assert_eq!(web.files[1].kind, FileKind::Socket { inode: 4711 });
    let state = UnixState { kind: 1, state: 1, name: "@name".into(), peer: 502, queued: 7 };
    assert_eq!(web.files[2].kind, FileKind::Unix { inode: 501, state: Some(state), id: 10 });
    assert_eq!(web.files[3].kind, FileKind::Memory { name: "jit".into() });
    let maps: Vec<_> = web.mappings.iter().map(|m| (m.range.start, m.shared, m.what.clone())).collect();
    assert_eq!(
        maps,
        [
            (0x1000, false, What::File { path: "/usr/lib/libc.so".into() }),
            (0x5000, false, What::Private { name: "[heap]".into() }),
            (0x8000, true, What::Shared { name: "[shared]".into(), stored: Some(0x1000) }),
            (0xd000, true, What::Shared { name: "/memfd:jit".into(), stored: Some(0) }),
            (0x10000, false, What::Private { name: "[stack]".into() }),
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
        add_bytes(&mut cut, name, bytes);
        let refused = look(&cut).unwrap_err();
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
