//! Writes a small archive, keys, pack, front and head, into an empty directory: what
//! `tests/fixture.rs` reads of every format version.
//!
//! `cargo run -p kip-archive --example fixture -- crates/archive/tests/data/vN`, once for each
//! version; those of older versions are never written again.

use kip_archive::files::rules::{Ids, Strays};
use kip_archive::files::tree::Files;
use kip_archive::files::walk::{self, SeenContents, Walk};
use kip_archive::front::write::FrontWriter;
use kip_archive::front::{FrontManifest, MetadataFile, Sizes, sets_of};
use kip_archive::head::Head;
use kip_archive::ids::{FrontId, OwnerId, ProcId};
use kip_archive::index::{Index, Known};
use kip_archive::keys::Keyring;
use kip_archive::memory::{self, Areas, Pages};
use kip_archive::names::FrontRef;
use kip_archive::packing::Packing;
use kip_archive::table::Space;
use kip_snapshot::pages::{Expected, PAGE, PageMap, ProcessPages, Run, WorkingSet};
use kip_types::Generation;
use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

fn main() -> Result<(), Box<dyn Error>> {
    let dir = PathBuf::from(std::env::args().nth(1).ok_or("say in which directory")?);
    let keys = Keyring::create(&dir, "blue".parse()?, 1_795_354_137_000)?;
    let files = dir.join("files.tmp");
    fs::create_dir_all(files.join("etc"))?;
    fs::write(files.join("etc/motd"), "hello\n")?;
    std::os::unix::fs::symlink("etc/motd", files.join("motd"))?;

    let index = Index::default();
    let pack = dir.join("pack");
    let mut sink = |finished: kip_archive::pack::Finished| fs::write(&pack, finished.bytes);
    let mut packing = Packing::new(&keys, &index, &|_| true, &mut sink)?;
    let mut map = PageMap::default();
    map.file("pages-1.img");
    let set = vec![Expected { address: 0x4000, confirmed: 2, held_back: false }];
    let sets = vec![WorkingSet { kind: "tcp 80".into(), turn: 3, pages: set }];
    let runs = vec![Run { start: 0x3000, pages: 4, file: 0, first: 0 }];
    map.processes.insert(1, ProcessPages { runs, sets });
    // Pages of 1, 2, 3 and zeros.
    let mut read = |_: u32, first: u32, buffer: &mut [u8]| {
        for (page, bytes) in (first..).zip(buffer.chunks_mut(PAGE)) {
            bytes.fill(((page + 1) % 4) as u8);
        }
        Ok(())
    };
    let shared = BTreeMap::from([(9, vec![Run { start: 0x2000, pages: 1, file: 0, first: 0 }])]);
    let mut areas = Areas::default();
    areas.eager.add(Space::Shared(9), 0..0x4000);
    let mut pages = Pages { map: &map, shared: &shared, areas: &areas, keys: &[None], remote: None, read: &mut read };
    let memory = memory::archive(&mut pages, &Known::default(), &mut packing)?;
    let meta = fs::metadata(&files)?;
    let ids = Ids { first: meta.uid().min(meta.gid()), count: 1 + meta.uid().abs_diff(meta.gid()) };
    let walk =
        Walk { first: &[], ids, strays: Strays::Refuse, linked_elsewhere: false, cancel: &AtomicBool::new(false) };
    let files_archived = walk::archive(&files, &walk, &SeenContents::default(), &mut packing)?;
    let packed = packing.finish()?;

    let (proc, generation) = (ProcId([7; 16]), Generation(4));
    let manifest = FrontManifest {
        generation,
        parent: Some(Generation(3)),
        frozen_at_ms: 1_795_354_137_000,
        engine: "criu 4.2.1".into(),
        kernel: "6.17.0".into(),
        cpu_features: vec!["avx2".into()],
        spec: serde_json::json!({"command": ["server"]}),
        body: serde_json::json!({"sockets": []}),
        metadata: vec![MetadataFile { name: "core-1.img".into(), size: 4 }],
        packs: packed.refers.keys().copied().collect(),
        sizes: Sizes { memory_bytes: 3 * PAGE as u64, set_bytes: PAGE as u64, file_bytes: 6 },
    };
    let mut writer = FrontWriter::begin(&keys, proc, &manifest)?;
    writer.sets(&sets_of(&map.processes))?;
    writer.page_table(&memory.table)?;
    writer.files(&Files { roots: [("upper".to_owned(), files_archived.tree)].into() })?;
    writer.metadata(b"core")?;
    writer.pages_of(&memory, &mut pages)?;
    let front = writer.front();
    fs::write(dir.join("front"), writer.end()?)?;
    let older = FrontRef { generation: Generation(3), id: FrontId([5; 32]) };
    let head = Head::first(proc, "web".parse()?, "blue".parse()?, OwnerId([8; 16]));
    let head = head.advance(head.owner, older, 2)?.advance(head.owner, front, 2)?;
    fs::write(dir.join("head"), head.seal(&keys)?)?;
    fs::remove_dir_all(files)?;
    Ok(())
}
