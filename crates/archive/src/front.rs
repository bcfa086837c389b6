//! The front of a generation: one object with all that a wake needs until the first reply, in the
//! order in which it needs it.
//!
//! Owns the sections and their order ([`mod@write`] and [`mod@read`]). What the worker needs to
//! bring processes back is opaque here. A front refers to packs and is complete only together with
//! them; it is written when they are stored.
//!
//! ```text
//! manifest -> sets -> page table -> files -> metadata -> eager pages -> set pages -> end
//! ```
//!
//! So a reader knows where all memory and all files are before the first page comes. Eager pages
//! are those that cannot wait for a fault; once they have come the processes may be made, while the
//! sets follow.

pub mod read;
pub mod write;

use crate::files::tree::is_name;
use crate::pack::PackRef;
use crate::table::Space;
use crate::wire::{self, Reader};
use kip_snapshot::pages::{Expected, PAGE, ProcessPages, WorkingSet};
use kip_types::Generation;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Bytes from the start that hold a manifest of ordinary size.
pub const SUMMARY: u64 = 64 << 10;
/// Bytes of a chunk of metadata or of set pages, unpacked: small enough to be installed early,
/// large enough to compress.
pub const CHUNK: usize = 256 << 10;
/// Pages of a chunk of eager or set pages.
pub const SET_PAGES: usize = 32;
/// Most bytes of a section that is understood whole: manifest, sets, page table, files.
pub const SECTION_MAX: usize = 256 << 20;

/// The sections, in their order. All are there; each ends with a chunk that says so.
pub(crate) mod section {
    pub(crate) const MANIFEST: u8 = 1;
    pub(crate) const SETS: u8 = 2;
    pub(crate) const TABLE: u8 = 3;
    pub(crate) const FILES: u8 = 4;
    pub(crate) const METADATA: u8 = 5;
    pub(crate) const EAGER: u8 = 6;
    pub(crate) const SET_PAGES: u8 = 7;
    pub(crate) const END: u8 = 8;
}

/// A file beside the memory, such as one of CRIU's images.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetadataFile {
    /// Its name, of one component.
    pub name: String,
    /// Its bytes.
    pub size: u64,
}

/// How large things are, for people.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// Pages that are not zeros, in bytes.
    pub memory_bytes: u64,
    /// Pages of working sets, in bytes.
    pub set_bytes: u64,
    /// All regular files, in bytes.
    pub file_bytes: u64,
}

/// What a generation is. The proc, the realm and the number are those of the header as well.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrontManifest {
    /// Its number.
    pub generation: Generation,
    /// The one that it replaced.
    pub parent: Option<Generation>,
    /// When it was frozen, Unix time in milliseconds.
    pub frozen_at_ms: u64,
    /// The engine that must read it, for example `criu 4.2.1`.
    pub engine: String,
    /// `uname -r` of the machine that made it.
    pub kernel: String,
    /// What the processor must be able to do, as /proc/cpuinfo spells it.
    pub cpu_features: Vec<String>,
    /// The proc's spec, opaque.
    pub spec: serde_json::Value,
    /// What the owner of the processes needs to bring them back, opaque: mappings, sockets, due
    /// timers.
    pub body: serde_json::Value,
    /// The metadata files, in the order in which they follow.
    pub metadata: Vec<MetadataFile>,
    /// Every pack that page table and files lead to.
    pub packs: Vec<PackRef>,
    /// How large it is.
    pub sizes: Sizes,
}

impl FrontManifest {
    /// Why a reader would refuse the manifest, if it would: metadata files that have no names, or
    /// two the same; sizes that nothing has.
    pub fn fault(&self) -> Option<&'static str> {
        let mut names = std::collections::HashSet::new();
        if !self.metadata.iter().all(|file| is_name(file.name.as_bytes()) && names.insert(&file.name)) {
            return Some("name of a metadata file");
        }
        let total = self.metadata.iter().try_fold(0u64, |sum, file| sum.checked_add(file.size));
        total.is_none().then_some("size of the metadata")
    }
}

/// The working sets of each process.
pub type WorkingSets = BTreeMap<u32, Vec<WorkingSet>>;

/// Those of a page map.
pub fn sets_of(processes: &BTreeMap<u32, ProcessPages>) -> WorkingSets {
    let with_sets = processes.iter().filter(|(_, process)| !process.sets.is_empty());
    with_sets.map(|(number, process)| (*number, process.sets.clone())).collect()
}

fn encode_sets(sets: &WorkingSets) -> Vec<u8> {
    let mut out = Vec::new();
    wire::put(&mut out, sets.len() as u64);
    for (process, sets) in sets {
        wire::put(&mut out, (*process).into());
        wire::put(&mut out, sets.len() as u64);
        for set in sets {
            wire::put_bytes(&mut out, set.kind.as_bytes());
            wire::put(&mut out, set.turn);
            wire::put(&mut out, set.pages.len() as u64);
            let mut before = 0i64;
            for page in &set.pages {
                let number = (page.address / PAGE as u64) as i64;
                wire::put_signed(&mut out, number - before);
                out.push(page.confirmed & 7 | u8::from(page.held_back) << 3);
                before = number;
            }
        }
    }
    out
}

fn decode_sets(bytes: &[u8]) -> Option<WorkingSets> {
    let mut reader = Reader(bytes);
    let mut all = WorkingSets::new();
    for _ in 0..reader.count()? {
        let process = reader.small()?;
        let mut sets = Vec::new();
        for _ in 0..reader.count()? {
            let mut set = WorkingSet { kind: reader.text()?, turn: reader.number()?, pages: Vec::new() };
            let mut number = 0i64;
            for _ in 0..reader.count()? {
                number = number.checked_add(reader.signed()?)?;
                let address = u64::try_from(number).ok()?.checked_mul(PAGE as u64)?;
                let [flags] = reader.array()?;
                set.pages.push(Expected { address, confirmed: flags & 7, held_back: flags & 8 != 0 });
            }
            sets.push(set);
        }
        all.insert(process, sets);
    }
    reader.end()?;
    Some(all)
}

/// A chunk of pages: whose, count, differences of page numbers, bytes.
fn encode_pages(space: Space, addresses: &[u64], bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len() + addresses.len() * 4 + 16);
    space.put(&mut out);
    wire::put(&mut out, addresses.len() as u64);
    let mut before = 0i64;
    for address in addresses {
        let number = (address / PAGE as u64) as i64;
        wire::put_signed(&mut out, number - before);
        before = number;
    }
    out.extend_from_slice(bytes);
    out
}

/// Addresses and bytes.
type PageList = Vec<(u64, Vec<u8>)>;

fn decode_pages(bytes: &[u8]) -> Option<(Space, PageList)> {
    let mut reader = Reader(bytes);
    let space = Space::take(&mut reader)?;
    let count = reader.count()?;
    let mut addresses = Vec::new();
    let mut number = 0i64;
    for _ in 0..count {
        number = number.checked_add(reader.signed()?)?;
        addresses.push(u64::try_from(number).ok()?.checked_mul(PAGE as u64)?);
    }
    let pages = reader.take(count.checked_mul(PAGE)?)?;
    reader.end()?;
    Some((space, addresses.into_iter().zip(pages.chunks(PAGE).map(<[u8]>::to_vec)).collect()))
}
