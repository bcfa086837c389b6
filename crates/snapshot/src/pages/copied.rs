//! Pages of a page file that copies of processes still hold: each page by its place in the file.
//!
//! Reads the memory of copies and writes nothing. A copy that has ended has no page any more: what
//! reads one gets an error, and finds the page in the file if all had been put there before.

use super::{PAGE, Run};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::FileExt as _;

/// Words of a piece in a table.
const WORDS: usize = 4;

/// A part of a page file that one copy holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopiedPiece {
    /// Which of the copies.
    pub memory: usize,
    /// Where it lies in the copy, and in the file; the number of the file says nothing.
    pub run: Run,
}

/// Where copies hold the pages of a page file.
#[derive(Debug)]
pub struct CopiedPages {
    /// Each copy's /proc/PID/mem.
    memory: Vec<File>,
    /// By place in the file.
    pieces: Vec<CopiedPiece>,
}

impl CopiedPages {
    /// Those pieces, of which none has a page of another.
    pub fn new(memory: Vec<File>, mut pieces: Vec<CopiedPiece>) -> CopiedPages {
        pieces.sort_unstable_by_key(|piece| piece.run.first);
        CopiedPages { memory, pieces }
    }

    /// All pieces, by place in the file.
    pub fn pieces(&self) -> &[CopiedPiece] {
        &self.pieces
    }

    /// The pieces with a page from this one on.
    pub fn from(&self, page: u32) -> &[CopiedPiece] {
        &self.pieces[self.pieces.partition_point(|piece| piece.run.first + piece.run.pages <= page)..]
    }

    /// Reads a part of a piece: whole pages from its page number `page` in the file on.
    ///
    /// # Errors
    /// The copy has ended.
    pub fn read_piece(&self, piece: &CopiedPiece, page: u32, bytes: &mut [u8]) -> io::Result<()> {
        let at = piece.run.start + u64::from(page - piece.run.first) * PAGE as u64;
        self.memory[piece.memory].read_exact_at(bytes, at)
    }

    /// Reads pages of the file that follow each other; `other` reads those that no copy holds.
    ///
    /// # Errors
    /// A copy has ended; those of `other`.
    pub fn read(
        &self,
        mut page: u32,
        mut bytes: &mut [u8],
        mut other: impl FnMut(u32, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        assert!(bytes.len().is_multiple_of(PAGE), "whole pages are read");
        let mut pieces = self.from(page).iter();
        while !bytes.is_empty() {
            let piece = pieces.next();
            let left = (bytes.len() / PAGE) as u32;
            let before = piece.map_or(left, |piece| piece.run.first.saturating_sub(page).min(left));
            let (ahead, rest) = bytes.split_at_mut(before as usize * PAGE);
            if !ahead.is_empty() {
                other(page, ahead)?;
            }
            page += before;
            let of_piece = piece.map_or(0, |piece| (piece.run.first + piece.run.pages - page).min(left - before));
            let (own, rest) = rest.split_at_mut(of_piece as usize * PAGE);
            if let Some(piece) = piece.filter(|_| !own.is_empty()) {
                self.read_piece(piece, page, own)?;
            }
            page += of_piece;
            bytes = rest;
        }
        Ok(())
    }

    /// The descriptors of the copies' memory, in the order in which [`CopiedPages::table`] numbers
    /// them.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.memory.iter().map(|memory| memory.as_fd())
    }

    /// Where all lies, for another process that gets the descriptors.
    pub fn table(&self) -> Vec<u8> {
        let words = |piece: &CopiedPiece| {
            let Run { start, pages, first, .. } = piece.run;
            [piece.memory as u64, start, pages.into(), first.into()]
        };
        self.pieces.iter().flat_map(words).flat_map(u64::to_le_bytes).collect()
    }

    /// What such a table says of these descriptors.
    ///
    /// # Errors
    /// `InvalidData`: it is no such table.
    pub fn read_table(table: &[u8], memory: Vec<File>) -> io::Result<CopiedPages> {
        let words: Vec<u64> =
            table.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes"))).collect();
        let piece = |words: &[u64]| {
            let known = words[0] < memory.len() as u64;
            let (pages, first) = (u32::try_from(words[2]).ok()?, u32::try_from(words[3]).ok()?);
            first.checked_add(pages).filter(|_| known)?;
            Some(CopiedPiece { memory: words[0] as usize, run: Run { start: words[1], pages, file: 0, first } })
        };
        let pieces: Option<Vec<CopiedPiece>> = words.chunks_exact(WORDS).map(piece).collect();
        let is_table = |pages: &CopiedPages| {
            let apart = pages.pieces.windows(2).all(|two| two[0].run.first + two[0].run.pages <= two[1].run.first);
            apart && table.len().is_multiple_of(WORDS * 8)
        };
        match pieces.map(|pieces| CopiedPages::new(memory, pieces)).filter(is_table) {
            Some(pages) => Ok(pages),
            None => Err(io::Error::new(io::ErrorKind::InvalidData, "where copies hold memory is not said")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> File {
        File::open("/proc/self/mem").unwrap()
    }

    #[test]
    fn pages_are_read_where_their_pieces_are_also_by_a_table() {
        let own: Vec<u8> = (0..32 * PAGE).map(|n| (n / PAGE) as u8).collect();
        let piece = |memory, at: u64, pages, first| CopiedPiece {
            memory,
            run: Run { start: own.as_ptr() as u64 + at * PAGE as u64, pages, file: 0, first },
        };
        let pages = CopiedPages::new(vec![memory(), memory()], vec![piece(1, 20, 4, 10), piece(0, 2, 3, 4)]);
        let read = CopiedPages::read_table(&pages.table(), vec![memory(), memory()]).unwrap();
        assert_eq!((read.pieces(), read.descriptors().count()), (pages.pieces(), 2));
        for pages in [&pages, &read] {
            for (first, end) in [(0, 16), (5, 6), (6, 12), (4, 7), (13, 15), (14, 16), (0, 3)] {
                let mut bytes = vec![0xee; (end - first) as usize * PAGE];
                let other = |page: u32, bytes: &mut [u8]| {
                    bytes.chunks_mut(PAGE).zip(page..).for_each(|(bytes, page)| bytes.fill(100 + page as u8));
                    Ok(())
                };
                pages.read(first, &mut bytes, other).unwrap();
                for (page, bytes) in (first..end).zip(bytes.chunks(PAGE)) {
                    let expected = match page {
                        4..7 => page - 2,
                        10..14 => page + 10,
                        _ => 100 + page,
                    };
                    assert!(bytes.iter().all(|byte| u32::from(*byte) == expected), "page {page} of {first}..{end}");
                }
            }
        }
    }

    #[test]
    fn a_copy_that_has_ended_and_a_table_that_is_none_are_errors() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let of_child = File::open(format!("/proc/{}/mem", child.id())).unwrap();
        let run = Run { start: 0x1000, pages: 1, file: 0, first: 0 };
        let pages = CopiedPages::new(vec![of_child], vec![CopiedPiece { memory: 0, run }]);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(pages.read(0, &mut [0; PAGE], |_, _| unreachable!()).is_err());
        let piece = |first| [0u64, 0x1000, 2, first].into_iter().flat_map(u64::to_le_bytes).collect::<Vec<u8>>();
        assert!(CopiedPages::read_table(&[piece(0), piece(2)].concat(), vec![memory()]).is_ok());
        let overlapping = [piece(0), piece(1)].concat();
        for table in [vec![0; 31], vec![1; 32], [vec![0; 16], vec![0xff; 16]].concat(), overlapping] {
            assert!(CopiedPages::read_table(&table, vec![memory()]).is_err());
        }
    }
}
