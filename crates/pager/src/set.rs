//! Working sets: which pages came back between two sleeps, which are expected the next time, and their bytes.
//!
//! A page that was installed ahead leaves no trace of whether it was used (there is no cheap accessed bit), unless it
//! was written. So that a page that is not needed falls out, each page that nobody was seen to touch is left out of one in
//! [`History::TURNS`] sets: one that is needed comes back by a fault then and is known again.
//!
//! Prediction is pure. [`Stored`] owns the bytes, each page with the slot that it had: whoever installs it leaves out
//! what the slot map says otherwise by then. A set is a hint: losing it loses time only.

use crate::swap::{Aligned, PAGE, open_direct};
use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// What came back between two sleeps.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Record {
    /// Pages that were touched for certain, by faults in their order, then those that were written.
    pub touched: Vec<u64>,
    /// Pages that were installed ahead and may have been of no use.
    pub unknown: Vec<u64>,
}

/// How a set is predicted from the last records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Predictor {
    /// What the last one had.
    LastUse,
    /// What at least `k` of the last `n` had.
    KOfN {
        /// At least.
        k: usize,
        /// Of these.
        n: usize,
    },
    /// What any of the last `n` had.
    Union {
        /// Of these.
        n: usize,
    },
}

/// The last records of one address space, and what to expect from them.
#[derive(Debug)]
pub struct History {
    records: VecDeque<Record>,
    predictor: Predictor,
    turn: u64,
}

impl History {
    /// One page that nobody was seen to touch is left out in one of this many sets.
    pub const TURNS: u64 = 32;

    /// An empty one.
    pub fn new(predictor: Predictor) -> Self {
        Self { records: VecDeque::new(), predictor, turn: 0 }
    }

    fn depth(&self) -> usize {
        match self.predictor {
            Predictor::LastUse => 1,
            Predictor::KOfN { n, .. } | Predictor::Union { n } => n.max(1),
        }
    }

    /// Adds what came back since the last sleep.
    pub fn push(&mut self, record: Record) {
        self.records.push_front(record);
        self.records.truncate(self.depth());
        self.turn += 1;
    }

    /// Pages that are expected next, those first that were touched first the last time.
    pub fn predict(&self) -> Vec<u64> {
        let least = match self.predictor {
            Predictor::KOfN { k, .. } => k.max(1).min(self.records.len().max(1)),
            _ => 1,
        };
        let mut seen: HashMap<u64, usize> = HashMap::new();
        let mut order = Vec::new();
        for page in self.records.iter().flat_map(|r| r.touched.iter().chain(&r.unknown)) {
            let count = seen.entry(*page).or_insert(0);
            *count += 1;
            if *count == 1 {
                order.push(*page);
            }
        }
        let certain: HashSet<u64> =
            self.records.front().map(|r| r.touched.iter().copied().collect()).unwrap_or_default();
        order.retain(|page| seen[page] >= least && (certain.contains(page) || !self.left_out(*page)));
        order
    }

    fn left_out(&self, page: u64) -> bool {
        let mixed = (page / PAGE as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        mixed % Self::TURNS == self.turn % Self::TURNS
    }
}

/// Where the bytes of a set are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep<'a> {
    /// In memory as they are.
    Memory,
    /// In memory, compressed, if that takes at most so many bytes; else in this file, which is made anew.
    Packed(usize, &'a Path),
    /// In this file, which is made anew.
    File(&'a Path),
    /// Nowhere: every page comes by a fault.
    Nowhere,
}

#[derive(Debug)]
enum Data {
    Plain(Aligned),
    Packed(Vec<u8>),
    File(File),
}

fn written(path: &Path, bytes: &Aligned) -> io::Result<File> {
    let file = open_direct(path, true)?;
    file.write_all_at(bytes, 0)?;
    Ok(file)
}

/// A set with its bytes.
#[derive(Debug)]
pub struct Stored {
    /// Address and slot of each page, by address.
    pub pages: Vec<(u64, u32)>,
    data: Data,
}

impl Stored {
    /// Keeps a set; `bytes` are those of `pages` one behind the other.
    ///
    /// # Errors
    /// The file system's.
    pub fn keep(pages: Vec<(u64, u32)>, bytes: Aligned, how: Keep<'_>) -> io::Result<Option<Self>> {
        if pages.is_empty() {
            return Ok(None);
        }
        assert_eq!(pages.len() * PAGE, bytes.len(), "each page has its bytes");
        let data = match how {
            Keep::Nowhere => return Ok(None),
            Keep::Memory => Data::Plain(bytes),
            Keep::Packed(most, path) => match zstd::bulk::compress(&bytes, 1)? {
                packed if packed.len() <= most => Data::Packed(packed),
                _ => Data::File(written(path, &bytes)?),
            },
            Keep::File(path) => Data::File(written(path, &bytes)?),
        };
        Ok(Some(Self { pages, data }))
    }

    /// Bytes of memory that it takes.
    pub fn memory(&self) -> usize {
        let data = match &self.data {
            Data::Plain(bytes) => bytes.len(),
            Data::Packed(bytes) => bytes.len(),
            Data::File(_) => 0,
        };
        data + self.pages.len() * size_of::<(u64, u32)>()
    }

    /// The pages' bytes, in one large read.
    ///
    /// # Errors
    /// The file system's; `InvalidData`.
    pub fn load(self) -> io::Result<(Vec<(u64, u32)>, Aligned)> {
        let length = self.pages.len() * PAGE;
        let bytes = match self.data {
            Data::Plain(bytes) => bytes,
            Data::Packed(packed) => {
                let mut bytes = Aligned::new(length);
                let got = zstd::bulk::decompress_to_buffer(&packed, &mut bytes[..])?;
                if got != length {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "a working set has shrunk"));
                }
                bytes
            }
            Data::File(file) => {
                let mut bytes = Aligned::new(length);
                file.read_exact_at(&mut bytes, 0)?;
                bytes
            }
        };
        Ok((self.pages, bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(list: &[u64]) -> Vec<u64> {
        list.iter().map(|p| p * PAGE as u64).collect()
    }

    fn history(predictor: Predictor, records: &[&[u64]]) -> Vec<u64> {
        let mut history = History::new(predictor);
        records.iter().for_each(|r| history.push(Record { touched: pages(r), unknown: Vec::new() }));
        history.predict()
    }

    #[test]
    fn predictors_count_records_and_keep_the_order() {
        let records: [&[u64]; 3] = [&[1, 2], &[3, 2], &[4, 2, 3]];
        assert_eq!(history(Predictor::LastUse, &records), pages(&[4, 2, 3]));
        assert_eq!(history(Predictor::KOfN { k: 2, n: 3 }, &records), pages(&[2, 3]));
        assert_eq!(history(Predictor::Union { n: 2 }, &records), pages(&[4, 2, 3]));
        assert_eq!(history(Predictor::Union { n: 3 }, &records), pages(&[4, 2, 3, 1]));
        assert_eq!(history(Predictor::KOfN { k: 2, n: 3 }, &records[..1]), pages(&[1, 2]), "one record is all we know");
        assert_eq!(history(Predictor::LastUse, &[]), Vec::<u64>::new());
    }

    #[test]
    fn pages_of_no_use_fall_out_and_others_stay() {
        let mut history = History::new(Predictor::LastUse);
        let (useful, useless) = (pages(&(0..50).collect::<Vec<_>>()), pages(&(100..150).collect::<Vec<_>>()));
        history.push(Record { touched: useful.iter().chain(&useless).copied().collect(), unknown: Vec::new() });
        for _ in 0..=History::TURNS {
            let set = history.predict();
            let touched = useful.iter().copied().filter(|p| !set.contains(p)).collect();
            history.push(Record { touched, unknown: set });
        }
        let set = history.predict();
        assert!(useless.iter().all(|p| !set.contains(p)));
        assert!(useful.iter().filter(|p| set.contains(p)).count() >= 40);
    }

    #[test]
    fn bytes_come_back_from_everywhere() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("set");
        for how in [Keep::Memory, Keep::Packed(usize::MAX, &path), Keep::Packed(10, &path), Keep::File(&path)] {
            let mut bytes = Aligned::new(3 * PAGE);
            bytes.iter_mut().enumerate().for_each(|(i, b)| *b = (i / 1000) as u8);
            let expected = bytes.to_vec();
            let list = vec![(0, 5), (PAGE as u64, 9), (9 * PAGE as u64, 1)];
            let (pages, got) = Stored::keep(list.clone(), bytes, how).unwrap().unwrap().load().unwrap();
            assert_eq!((pages, got.to_vec()), (list, expected));
        }
    }
}
