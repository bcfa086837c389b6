//! Mappings that children get by fork(2).
//!
//! The processes of a server that forks its workers have nearly the same mappings: of postgres' 223
//! for each process, all but 1 to 4. To inherit one takes the kernel a part of what it takes to
//! make one (the step `memory` in bench/park-wake). So a process first forks the children that are
//! of another kind, which unmap what they got, then makes the mappings that it has in common with
//! the others, and with all processes of their kind that those fork, and forks them. No page of
//! these mappings is there yet.

use super::family::Maker;
use std::collections::HashSet;

const FLAGS: usize = 3;
const KIND: usize = 6;
const ADVICE: usize = 7;
const MADE: usize = 9;

/// The bits that tell shared from private mappings, and those of a mapping that is one or the
/// other.
const TYPE: u64 = 0xf;
const SHARED_OR_PRIVATE: std::ops::RangeInclusive<u64> = 1..=2;
/// mlock(2) ends at fork(2).
const MAP_LOCKED: u64 = 0x2000;

/// `struct mapping`; the last word says what makes it.
pub(super) type MappingWords = Vec<u64>;

/// What makes a mapping: MADE_ALONE and so on in plan.h.
enum Made {
    /// The process itself, when it has forked.
    Alone = 0,
    /// The process itself, before it forks those of its kind.
    Before = 1,
    /// The process that forked it.
    Inherited = 2,
}

/// Says of each mapping of each process what makes it, and which processes inherit. Processes come
/// after those that make them.
pub(super) fn mark(makers: &[Option<Maker>], mappings: &mut [Vec<MappingWords>]) -> Vec<bool> {
    let key = |mapping: &MappingWords| mapping[..MADE].to_vec();
    let inheritable = |own: &Vec<MappingWords>| own.iter().filter(|m| can_be_inherited(m)).map(key).collect();
    // What it and all of its kind that it forks have.
    let mut had_by_all: Vec<HashSet<Vec<u64>>> = mappings.iter().map(inheritable).collect();
    let (mut inherits, mut makes) = (vec![false; mappings.len()], vec![false; mappings.len()]);
    for index in (0..mappings.len()).rev() {
        let Some(Maker { index: from, early: false, .. }) = makers[index] else { continue };
        let both = &had_by_all[from] & &had_by_all[index];
        // Of the same kind: half of what it has is its maker's, too.
        if !both.is_empty() && both.len() >= mappings[index].len() / 2 {
            (inherits[index], makes[from]) = (true, true);
            had_by_all[from] = both;
        }
    }
    for (index, own) in mappings.iter_mut().enumerate() {
        let inherited = makers[index].filter(|_| inherits[index]).map(|maker| &had_by_all[maker.index]);
        for mapping in own {
            let key = key(mapping);
            mapping[MADE] = if inherited.is_some_and(|inherited| inherited.contains(&key)) {
                Made::Inherited
            } else if makes[index] && had_by_all[index].contains(&key) {
                Made::Before
            } else {
                Made::Alone
            } as u64;
        }
    }
    inherits
}

/// Advice may keep it from children or empty it in them, and guards are put into what is there.
fn can_be_inherited(mapping: &[u64]) -> bool {
    const PLAIN_OR_SHARED: u64 = 1;
    mapping[KIND] <= PLAIN_OR_SHARED
        && mapping[ADVICE] == 0
        && mapping[FLAGS] & MAP_LOCKED == 0
        && SHARED_OR_PRIVATE.contains(&(mapping[FLAGS] & TYPE))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(start: u64) -> MappingWords {
        vec![start, start + 1, 1, 2, 7, 0, 0, 0, 0, 0]
    }

    fn all(starts: &[u64]) -> Vec<MappingWords> {
        starts.iter().copied().map(mapping).collect()
    }

    fn child_of(index: usize) -> Option<Maker> {
        Some(Maker { index, sibling: false, early: false })
    }

    fn made(mappings: &[Vec<MappingWords>]) -> Vec<Vec<u64>> {
        mappings.iter().map(|own| own.iter().map(|mapping| mapping[MADE]).collect()).collect()
    }

    #[test]
    fn workers_inherit_what_all_have() {
        // Pid 1, which has no memory, a server, two workers, the second's own child, a shell.
        let makers = [None, child_of(0), child_of(1), child_of(1), child_of(3), child_of(1)];
        let mut mappings =
            [all(&[]), all(&[1, 2, 3, 4]), all(&[1, 2, 3, 5]), all(&[1, 2, 3, 6]), all(&[2, 3, 6]), all(&[8, 9])];
        assert_eq!(mark(&makers, &mut mappings), [false, false, true, true, true, false]);
        let expected: [&[u64]; 6] = [&[], &[0, 1, 1, 0], &[0, 2, 2, 0], &[0, 2, 2, 1], &[2, 2, 2], &[0, 0]];
        assert_eq!(made(&mappings), expected);
    }

    #[test]
    fn nothing_is_inherited_that_is_another_after_a_fork() {
        let early = Some(Maker { index: 1, sibling: false, early: true });
        let makers = [None, child_of(0), early];
        let mut mappings = [all(&[]), all(&[1, 2]), all(&[1, 2])];
        assert_eq!(mark(&makers, &mut mappings), [false; 3], "before a session begins");
        for (word, value) in [(KIND, 2), (ADVICE, 1 << 10), (FLAGS, 2 | MAP_LOCKED), (FLAGS, 8)] {
            let mut mappings = [all(&[]), all(&[1, 2]), all(&[1, 2])];
            mappings.iter_mut().flatten().for_each(|mapping| mapping[word] = value);
            assert_eq!(mark(&[None, child_of(0), child_of(1)], &mut mappings), [false; 3], "{word} {value}");
        }
    }

    #[test]
    fn whatever_is_there_at_a_fork_belongs_to_the_child() {
        // By a fixed sequence of numbers: any trees of any mappings.
        let mut state = 1u64;
        let mut next = |below: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        for _ in 0..500 {
            let count = 2 + next(8) as usize;
            let makers: Vec<_> = (0..count)
                .map(|index| {
                    (index > 0).then(|| Maker {
                        index: next(index as u64) as usize,
                        sibling: false,
                        early: next(5) == 0,
                    })
                })
                .collect();
            let mut mappings: Vec<_> = (0..count)
                .map(
                    |index| {
                        if index == 0 { Vec::new() } else { all(&(1..9).filter(|_| next(4) > 0).collect::<Vec<_>>()) }
                    },
                )
                .collect();
            let inherits = mark(&makers, &mut mappings);
            for index in 1..count {
                let from = &mappings[makers[index].unwrap().index];
                let there: Vec<u64> = from.iter().filter(|m| m[MADE] != 0).map(|m| m[0]).collect();
                let inherited: Vec<u64> = mappings[index].iter().filter(|m| m[MADE] == 2).map(|m| m[0]).collect();
                assert_eq!(inherited, if inherits[index] { there } else { Vec::new() });
            }
        }
    }
}
