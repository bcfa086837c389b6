//! Objects that older versions wrote are still read: every directory below `tests/data`, made by
//! `examples/fixture.rs` when its version was the newest.

use kip_archive::files::tree::Node;
use kip_archive::front::read::{FrontEvent, FrontReader, summary};
use kip_archive::head::{Head, HeadState};
use kip_archive::ids::{FrontId, ProcId};
use kip_archive::keys::Keyring;
use kip_archive::names::FrontRef;
use kip_archive::pack::PackReader;
use kip_archive::table::{Found, Space};
use kip_snapshot::pages::PAGE;
use kip_types::Generation;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const PROCESS: Space = Space::Process(1);
const SHARED: Space = Space::Shared(9);

fn check(dir: &Path) {
    let keys = Arc::new(Keyring::load(dir, &"blue".parse().unwrap()).unwrap());
    let read = |name: &str| fs::read(dir.join(name)).unwrap();
    let (front, pack, proc) = (read("front"), read("pack"), ProcId([7; 16]));

    let head = Head::open(&keys, proc, Some(3), &read("head")).unwrap();
    assert_eq!((head.name.as_str(), head.generation(), head.kept.len()), ("web", Generation(4), 1));
    assert_eq!(head.kept[0], FrontRef { generation: Generation(3), id: FrontId([5; 32]) });
    assert_eq!((head.owner.epoch, head.state), (1, HeadState::Owned));

    let manifest = summary(&keys, Some(proc), head.current, &front).unwrap().unwrap();
    assert_eq!((manifest.engine.as_str(), manifest.frozen_at_ms), ("criu 4.2.1", 1_795_354_137_000));
    let mut blocks = PackReader::new(&keys);
    let mut whole = 0;
    blocks.check(manifest.packs[0].id, &pack, |_, bytes| whole += bytes.len()).unwrap();
    assert_eq!(whole, 2 * PAGE + 6);
    let mut block = |place: kip_archive::index::ContentPlace| {
        let range = place.block.range();
        blocks.open_block(&place.block, &pack[range.start as usize..range.end as usize]).unwrap()[place.at as usize..]
            .to_vec()
    };

    let mut reader = FrontReader::new(keys.clone(), proc, head.current.unwrap());
    let events = reader.push(&front).unwrap();
    reader.finish().unwrap();
    let [
        FrontEvent::Manifest(_),
        FrontEvent::Sets(sets),
        FrontEvent::PageTable(table),
        FrontEvent::Files(files),
        FrontEvent::Metadata { name, bytes, is_complete: true },
        FrontEvent::EagerPages { space: SHARED, pages: eager },
        FrontEvent::Eager,
        FrontEvent::SetPages { space: PROCESS, pages },
        FrontEvent::End,
    ] = &events[..]
    else {
        panic!("{events:?}");
    };
    assert_eq!((sets[&1][0].kind.as_str(), sets[&1][0].turn, sets[&1][0].pages[0].address), ("tcp 80", 3, 0x4000));
    assert_eq!((name.as_str(), &bytes[..]), ("core-1.img", &b"core"[..]));
    assert_eq!(*pages, [(0x4000, vec![2; PAGE])]);
    assert_eq!(*eager, [(0x2000, vec![1; PAGE])]);
    assert_eq!((table.find(PROCESS, 0x4000), table.find(PROCESS, 0x6000)), (Found::Front, Found::Zeros));
    assert_eq!((table.find(PROCESS, 0x7000), table.find(SHARED, 0x2000)), (Found::Absent, Found::Front));
    for (address, byte) in [(0x3000, 1), (0x5000, 3)] {
        let Found::Block(place) = table.find(PROCESS, address) else { panic!("{address:#x} is in a block") };
        assert_eq!(block(place)[..PAGE], [byte; PAGE]);
    }
    let tree = &files.roots["upper"];
    let names: Vec<String> =
        (1..tree.entries.len() as u32).map(|index| String::from_utf8(tree.path(index).join(&b'/')).unwrap()).collect();
    assert_eq!(names, ["etc", "motd", "etc/motd"]);
    assert_eq!(tree.entries[2].node, Node::Symlink(b"etc/motd".to_vec()));
    let Node::File { size: 6, extents } = &tree.entries[3].node else { panic!("{:?}", tree.entries[3]) };
    let place = kip_archive::index::ContentPlace { block: tree.blocks[extents[0].block as usize], at: extents[0].at };
    assert_eq!(block(place)[..6], *b"hello\n");
}

// promise format: every format version that there was is still read
#[test]
fn every_version_is_still_read() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let mut versions: Vec<PathBuf> = fs::read_dir(data).unwrap().map(|entry| entry.unwrap().path()).collect();
    versions.sort();
    assert_eq!(versions.len(), usize::from(kip_archive::seal::FORMAT), "a directory for each version");
    versions.iter().for_each(|dir| check(dir));
}
