//! A mapping and where its pages are.

use kip_criu_images::inspect::{MappedRange, MappingKind};
use kip_types::api::{MapView, WhereView};
use std::ops::Range;

/// Where pages lie that are not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PageLocation {
    /// In memory.
    Memory,
    /// In the machine's swap.
    Swapped,
    /// In the proc's swap file.
    Out,
    /// In a generation on the local disk.
    Snapshot,
    /// In the store only.
    Store,
}

/// Where pages of a process lie: ranges of addresses, by address and none over another. What is in
/// none is zeros, or as a file has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct PageLocations {
    pub(super) ranges: Vec<(Range<u64>, PageLocation)>,
    /// What the images have of shared memory is in the store.
    pub(super) is_stored: bool,
}

impl PageLocations {
    /// Adds what lies in `below` where nothing lies yet.
    pub(super) fn add_below(&mut self, below: impl IntoIterator<Item = (Range<u64>, PageLocation)>) {
        let mut below: Vec<_> = below.into_iter().collect();
        below.sort_unstable_by_key(|(range, _)| range.start);
        let mut added = Vec::new();
        let mut above = self.ranges.iter().map(|(range, _)| range.clone()).peekable();
        for (mut range, place) in below {
            while above.next_if(|over| over.end <= range.start).is_some() {}
            while let Some(over) = above.peek().filter(|over| over.start < range.end) {
                if over.start > range.start {
                    added.push((range.start..over.start, place));
                }
                range.start = over.end.min(range.end);
                if over.end > range.end || range.is_empty() {
                    break;
                }
                above.next();
            }
            if !range.is_empty() {
                added.push((range, place));
            }
        }
        self.ranges.extend(added);
        self.ranges.sort_unstable_by_key(|(range, _)| range.start);
    }

    fn within(&self, mapping: &Range<u64>) -> WhereView {
        let mut found = WhereView::default();
        let first = self.ranges.partition_point(|(range, _)| range.end <= mapping.start);
        for (range, place) in self.ranges[first..].iter().take_while(|(range, _)| range.start < mapping.end) {
            let bytes = range.end.min(mapping.end) - range.start.max(mapping.start);
            *match place {
                PageLocation::Memory => &mut found.memory_bytes,
                PageLocation::Swapped => &mut found.swapped_bytes,
                PageLocation::Out => &mut found.out_bytes,
                PageLocation::Snapshot => &mut found.snapshot_bytes,
                PageLocation::Store => &mut found.store_bytes,
            } += bytes;
        }
        found
    }
}

/// What people see of it.
pub(super) fn view(mapping: &MappedRange, places: &PageLocations) -> MapView {
    let bytes = mapping.range.end.saturating_sub(mapping.range.start);
    let mut pages = places.within(&mapping.range);
    let WhereView { memory_bytes, swapped_bytes, out_bytes, snapshot_bytes, store_bytes, .. } = pages;
    let mut left = bytes.saturating_sub(memory_bytes + swapped_bytes + out_bytes + snapshot_bytes + store_bytes);
    let what = match &mapping.kind {
        MappingKind::Private { name } => {
            pages.zero_bytes = left;
            name
        }
        MappingKind::Shared { name, stored } => {
            let stored = stored.map(|stored| stored.min(left));
            left -= stored.unwrap_or(0);
            let place = if places.is_stored { &mut pages.store_bytes } else { &mut pages.snapshot_bytes };
            *place += stored.unwrap_or(0);
            // While a process has the memory open, a page may be there though it is not mapped
            // here.
            let rest = if stored.is_some() { &mut pages.zero_bytes } else { &mut pages.file_bytes };
            *rest = left;
            name
        }
        MappingKind::File { path: name } | MappingKind::Kernel { name } => {
            pages.file_bytes = left;
            name
        }
    };
    let bit = |bit: u64, letter: char| if mapping.protection & bit != 0 { letter } else { '-' };
    MapView {
        start: format!("{:x}", mapping.range.start),
        end: format!("{:x}", mapping.range.end),
        access: [bit(1, 'r'), bit(2, 'w'), bit(4, 'x'), if mapping.shared { 's' } else { 'p' }].iter().collect(),
        what: what.clone(),
        offset: mapping.offset,
        bytes,
        pages,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_below_is_seen_where_nothing_is_above() {
        let ranges = vec![(2..4, PageLocation::Memory), (6..7, PageLocation::Swapped)];
        let mut places = PageLocations { ranges, is_stored: false };
        places.add_below([(8..9, PageLocation::Store), (0..7, PageLocation::Out), (7..8, PageLocation::Snapshot)]);
        let expected = [
            (0..2, PageLocation::Out),
            (2..4, PageLocation::Memory),
            (4..6, PageLocation::Out),
            (6..7, PageLocation::Swapped),
            (7..8, PageLocation::Snapshot),
            (8..9, PageLocation::Store),
        ];
        assert_eq!(places.ranges, expected);
        let mut wide = PageLocations { ranges: vec![(0..10, PageLocation::Memory)], is_stored: false };
        wide.add_below([(1..2, PageLocation::Out), (3..4, PageLocation::Out), (9..12, PageLocation::Out)]);
        assert_eq!(wide.ranges, [(0..10, PageLocation::Memory), (10..12, PageLocation::Out)]);
    }

    #[test]
    fn what_its_pages_are_adds_up_to_a_mapping() {
        let mapping = |range, kind| MappedRange { range, protection: 5, shared: false, offset: 0, kind };
        let places = PageLocations {
            ranges: vec![(0..0x3000, PageLocation::Out), (0x4000..0x5000, PageLocation::Memory)],
            is_stored: true,
        };
        let view = |mapping: &MappedRange| super::view(mapping, &places);
        let private = view(&mapping(0x2000..0x8000, MappingKind::Private { name: "[heap]".into() }));
        assert_eq!(
            (private.access.as_str(), private.what.as_str(), private.start.as_str()),
            ("r-xp", "[heap]", "2000")
        );
        let expected =
            WhereView { out_bytes: 0x1000, memory_bytes: 0x1000, zero_bytes: 0x4000, ..WhereView::default() };
        assert_eq!(private.pages, expected);
        let file = view(&mapping(0x2000..0x4000, MappingKind::File { path: "/x".into() }));
        assert_eq!((file.pages.out_bytes, file.pages.file_bytes), (0x1000, 0x1000));
        let shared = MappingKind::Shared { name: "[shared]".into(), stored: Some(0x2000) };
        let shared = view(&mapping(0x6000..0x9000, shared)).pages;
        assert_eq!((shared.store_bytes, shared.zero_bytes, shared.file_bytes), (0x2000, 0x1000, 0));
    }
}
