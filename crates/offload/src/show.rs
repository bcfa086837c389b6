//! All about one generation in the store, for people. Only reads.

use crate::Archive;
use crate::find::StoredGeneration;
use crate::read_front::{FrontReadError, WholeFront};
use kip_archive::front::SUMMARY;
use kip_archive::pack::PackRef;
use kip_archive::table::Home;
use kip_records::body::Body;
use kip_records::due::source_word;
use kip_types::Spec;
use kip_types::api::{FileView, PackView, PagesView, RootView, SnapshotDetails, SnapshotTimer};
use std::collections::BTreeMap;

impl Archive {
    /// Reads the whole front and says what is in it.
    pub async fn show(&self, found: &StoredGeneration) -> Result<SnapshotDetails, FrontReadError> {
        let mut begin = Vec::new();
        let keep = |bytes: &[u8]| {
            let left = (SUMMARY as usize).saturating_sub(begin.len()).min(bytes.len());
            begin.extend_from_slice(&bytes[..left]);
        };
        let whole = self.whole_front(found.head.proc, found.front, keep).await?;
        let format = begin.get(8..10).map_or(0, |at| u16::from_le_bytes([at[0], at[1]]));
        let manifest = whole.manifest.as_ref().expect("a front that is complete has one");
        let spec: Option<Spec> = serde_json::from_value(manifest.spec.clone()).ok();
        let body: Option<Body> = serde_json::from_value(manifest.body.clone()).ok();
        let roots = whole.files.roots.iter().map(|(name, tree)| RootView {
            name: name.clone(),
            entries: tree.entries.len() as u64,
            bytes: tree.bytes(),
            first: tree.order.len() as u64,
        });
        Ok(SnapshotDetails {
            name: found.head.name.clone(),
            proc: found.head.proc.to_string(),
            state: self.state_of(&found.head),
            generation: found.front.generation,
            place: found.place(),
            parent: manifest.parent,
            frozen_at_ms: manifest.frozen_at_ms,
            command: spec.as_ref().map(|spec| spec.command.clone()).unwrap_or_default(),
            ports: spec.map(|spec| spec.ports).unwrap_or_default(),
            engine: manifest.engine.clone(),
            kernel: manifest.kernel.clone(),
            cpu_features: manifest.cpu_features.clone(),
            format: format.into(),
            key: whole.key.map(|key| key.to_string()).unwrap_or_default(),
            bytes: whole.bytes,
            sections: whole.sections.clone(),
            pages: pages(&whole),
            set_pages: whole.sets.values().flatten().map(|set| set.pages.len() as u64).sum(),
            packs: packs(&whole),
            metadata: manifest.metadata.iter().map(|f| FileView { name: f.name.clone(), bytes: f.size }).collect(),
            roots: roots.collect(),
            sockets: body.as_ref().map(|body| body.sockets.len() as u64),
            timers: body.as_ref().map(timers).unwrap_or_default(),
            pinned_by: body.as_ref().map(Body::pinned_by).unwrap_or_default(),
        })
    }
}

fn pages(whole: &WholeFront) -> PagesView {
    let mut pages = PagesView::default();
    for run in whole.table.spaces.values().flatten() {
        let count = match run.home {
            Home::Front => &mut pages.front,
            Home::Zeros => &mut pages.zeros,
            Home::Block { .. } => &mut pages.packs,
        };
        *count += u64::from(run.pages);
    }
    pages
}

fn packs(whole: &WholeFront) -> Vec<PackView> {
    let mut of_packs: BTreeMap<PackRef, (u64, u64)> = BTreeMap::new();
    for block in whole.blocks() {
        let (blocks, bytes) = of_packs.entry(block.pack).or_default();
        (*blocks, *bytes) = (*blocks + 1, *bytes + u64::from(block.sealed));
    }
    let view = |(pack, (blocks, bytes)): (PackRef, _)| PackView {
        pack: pack.id.to_string(),
        key: pack.key.to_string(),
        blocks,
        bytes,
    };
    of_packs.into_iter().map(view).collect()
}

fn timers(body: &Body) -> Vec<SnapshotTimer> {
    let ms = |ns: i64| (ns.max(0) / 1_000_000) as u64;
    let mut dues = body.clocks.dues.clone();
    dues.sort_by_key(|due| due.at_ns);
    let view = |due: kip_clocks::Due| SnapshotTimer {
        kind: source_word(due.source).to_owned(),
        due_ms: ms(due.at_ns.saturating_sub(body.clocks.frozen_ns)),
        every_ms: due.every_ns.map(ms),
    };
    dues.into_iter().map(view).collect()
}
