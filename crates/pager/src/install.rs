//! Installs working sets. The pages that are needed first are there before the program runs; a helper thread installs the
//! others beside it, in the order of need, and whoever serves a fault of a page that has not been installed yet installs that
//! page's block out of turn.
//!
//! Every step holds the space's state while it compares pages with the slot map and copies them, and not while bytes are
//! read or unpacked. A set that is no longer the space's own (it sleeps again) is installed no further. What cannot be
//! installed comes by faults.

use crate::memory::{AtHand, Filled, Memory, State, fill};
use crate::slots::Runs;
use crate::stored::{BLOCK, Page, Stored};
use crate::swap::{Aligned, PAGE};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

const PAGE64: u64 = PAGE as u64;

/// Blocks that are installed before the program runs: enough that the helper is ahead of it from then on.
const HEAD: usize = 64 / BLOCK;

/// A set of which all but so many blocks are there is not worth waking a helper for.
const WORTH: usize = 2;

/// How long the kernel may ask a helper to come again with one block.
const PATIENCE: Duration = Duration::from_millis(5);

/// Blocks of a space's set that are taken for a helper.
struct Order {
    memory: Arc<Memory>,
    set: Arc<Stored>,
    blocks: Range<usize>,
}

/// The threads that install beside the running programs; they end with the last clone.
#[derive(Debug, Clone)]
pub struct Helpers {
    orders: mpsc::Sender<Order>,
    count: usize,
}

impl Helpers {
    /// Starts as many as can be of use: one processor has the program.
    ///
    /// # Errors
    /// The kernel's: there are no more threads.
    pub fn start() -> io::Result<Self> {
        let (sender, orders) = mpsc::channel::<Order>();
        let orders = Arc::new(Mutex::new(orders));
        let count = std::thread::available_parallelism()?.get().saturating_sub(1).max(1);
        for number in 0..count {
            let orders = orders.clone();
            let next = move || orders.lock().ok()?.recv().ok();
            let work = move || std::iter::from_fn(&next).for_each(|order| order.memory.clone().help(order));
            std::thread::Builder::new().name(format!("installs-{number}")).spawn(work)?;
        }
        Ok(Self { orders: sender, count })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Free,
    Taken,
    Done,
}

/// A set that is being installed.
#[derive(Debug)]
pub struct Pending {
    set: Arc<Stored>,
    bits: u8,
    blocks: Vec<Block>,
    left: usize,
}

impl Pending {
    fn new(set: Stored, kind: &str) -> Self {
        let count = set.blocks();
        let bits = set.bits(kind);
        Self { set: Arc::new(set), bits, blocks: vec![Block::Free; count], left: count }
    }

    /// The next blocks in order from block `from` on that nobody has taken, as many as are read at once, at most so many.
    fn take(&mut self, from: usize, most: usize) -> Option<Range<usize>> {
        let free = |block: &Block| *block == Block::Free;
        let start = from + self.blocks[from..].iter().position(free)?;
        let most = most.min(self.set.at_once(start));
        let end = start + self.blocks[start..].iter().take(most).take_while(|block| free(block)).count();
        self.blocks[start..end].fill(Block::Taken);
        Some(start..end)
    }

    /// The block of a page that is not done yet.
    fn waits(&self, address: u64) -> Option<usize> {
        self.set.block_of(address).filter(|block| self.blocks[*block] != Block::Done)
    }
}

/// What became of a block.
#[derive(Default)]
struct Installed {
    pages: Vec<u64>,
    at_hand: Vec<(u64, AtHand)>,
    /// So many were looked at before the kernel asked to come again.
    looked_at: usize,
}

/// Installs those of some pages that missing pages still hold, run by run, and gives back those that are held back.
fn install_pages(
    uffd: BorrowedFd<'_>,
    runs: &Runs,
    pages: &[Page],
    bytes: &[u8],
    bits: u8,
) -> io::Result<(Installed, Filled)> {
    let mut installed = Installed::default();
    let valid =
        |page: &Page| page.kinds & bits != 0 && runs.get(page.address).is_some_and(|(slot, _)| slot == page.slot);
    let mut run: Range<usize> = 0..0;
    for index in 0..=pages.len() {
        let page = pages.get(index);
        let good = page.is_some_and(valid);
        let follows = good && !run.is_empty() && pages[run.end - 1].address + PAGE64 == pages[index].address;
        if follows {
            run.end = index + 1;
            continue;
        }
        if !run.is_empty() {
            match fill(uffd, pages[run.start].address, &bytes[run.start * PAGE..run.end * PAGE], true)? {
                Filled::All => {}
                other => {
                    installed.looked_at = run.start;
                    return Ok((installed, other));
                }
            }
            installed.pages.extend(pages[run.clone()].iter().map(|page| page.address));
        }
        run = if good { index..index + 1 } else { 0..0 };
        if let Some(page) = page.filter(|page| page.kinds & bits == 0) {
            let bytes = bytes[index * PAGE..(index + 1) * PAGE].into();
            installed.at_hand.push((page.address, (page.slot, bytes)));
        }
    }
    installed.looked_at = pages.len();
    Ok((installed, Filled::All))
}

impl State {
    /// Installs no more of a set; who waits for a page of it is served again. What has not come is expected the next time.
    pub(crate) fn install_no_more(&mut self) {
        if let Some(pending) = self.pending.take() {
            let open = |block: &usize| pending.blocks[*block] != Block::Done;
            let pages = (0..pending.blocks.len()).filter(open).flat_map(|block| pending.set.pages(block..block + 1));
            self.since.left.extend(pages.map(|page| page.address));
        }
        let waiting = std::mem::take(&mut self.waiting);
        self.again.extend(waiting);
    }

    /// Nothing more comes of these blocks: what they have and is not there comes by faults.
    fn done_with(&mut self, set: &Arc<Stored>, blocks: Range<usize>) {
        let Some(pending) = self.pending_of(set) else { return };
        pending.blocks[blocks.clone()].fill(Block::Done);
        pending.left -= blocks.len();
        if pending.left == 0 {
            self.pending = None;
        }
    }

    /// The set that is being installed, if it still is this one.
    fn pending_of(&mut self, set: &Arc<Stored>) -> Option<&mut Pending> {
        self.pending.as_mut().filter(|pending| Arc::ptr_eq(&pending.set, set))
    }
}

impl Memory {
    /// Begins to install the armed set: what is needed first is there when this returns. From here on the program counts as
    /// awake.
    pub fn install(self: &Arc<Self>, state: &mut State) {
        let began = Instant::now();
        let Some(set) = state.armed.take() else { return };
        state.since.set_pages = set.len();
        state.read_ahead = true;
        let mut pending = Pending::new(set, &state.since.kind);
        let set = Arc::clone(&pending.set);
        let count = pending.blocks.len();
        let helped = count > HEAD + WORTH;
        if helped {
            for _ in 0..self.helpers.count.min((count - HEAD).div_ceil(2 * set.at_once(HEAD))) {
                let Some(blocks) = pending.take(HEAD, usize::MAX) else { break };
                let order = Order { memory: Arc::clone(self), set: Arc::clone(&set), blocks };
                // Nobody hears it if none could be started; the blocks come by faults then.
                let _ = self.helpers.orders.send(order);
            }
        }
        state.pending = Some(pending);
        let mut buffer = Aligned::default();
        let mut done = 0;
        while !helped || done < HEAD {
            let most = if helped { HEAD - done } else { usize::MAX };
            let Some(blocks) = state.pending_of(&set).and_then(|pending| pending.take(0, most)) else { break };
            done += blocks.len();
            let bytes = set.bytes(blocks.clone(), &mut buffer);
            self.put_or_leave(state, &set, blocks, bytes);
        }
        state.since.woke = Some((began, began.elapsed().as_micros() as u64));
    }

    /// Installs what nobody else does, beside the program.
    fn help(&self, Order { set, mut blocks, .. }: Order) {
        let mut buffer = Aligned::default();
        loop {
            let mut bytes = set.bytes(blocks.clone(), &mut buffer);
            let until = Instant::now() + PATIENCE;
            let mut from = 0;
            loop {
                let mut state = self.state();
                let again = Instant::now() < until;
                match self.put(&mut state, &set, blocks.clone(), bytes, from) {
                    Some((place, rest)) if again => (from, bytes) = (place, Ok(rest)),
                    Some(_) => {
                        state.done_with(&set, blocks);
                        break;
                    }
                    None => break,
                }
                drop(state);
                std::thread::sleep(Duration::from_micros(50));
            }
            let mut state = self.state();
            let Some(next) = state.pending_of(&set).and_then(|pending| pending.take(0, usize::MAX)) else { return };
            blocks = next;
        }
    }

    /// Installs some taken blocks; if the kernel wants to be asked again, what is left of them comes by faults.
    fn put_or_leave(&self, state: &mut State, set: &Arc<Stored>, blocks: Range<usize>, bytes: io::Result<&[u8]>) {
        if self.put(state, set, blocks.clone(), bytes, 0).is_some() {
            state.done_with(set, blocks);
        }
    }

    /// Installs pages of some taken blocks, from page number `from` of these on, and says that these are done. If the kernel
    /// wants to be asked again: from where on, with the bytes.
    fn put<'a>(
        &self,
        state: &mut State,
        set: &Arc<Stored>,
        blocks: Range<usize>,
        bytes: io::Result<&'a [u8]>,
        from: usize,
    ) -> Option<(usize, &'a [u8])> {
        let bits = state.pending_of(set)?.bits;
        let pages = &set.pages(blocks.clone())[from..];
        let done = bytes.and_then(|bytes| {
            let rest = &bytes[from * PAGE..];
            install_pages(self.uffd.as_fd(), state.map.runs(), pages, rest, bits).map(|done| (done, bytes))
        });
        let mut again = None;
        match done {
            Ok(((Installed { pages, at_hand, looked_at }, filled), bytes)) => {
                state.since.installed += pages.len();
                state.since.set.extend(pages);
                state.at_hand.extend(at_hand);
                again = (filled == Filled::Again).then_some((from + looked_at, bytes));
            }
            Err(error) => {
                tracing::warn!(space = self.id, %error, "a working set is not installed whole, its pages come one by one");
            }
        }
        if again.is_none() {
            state.done_with(set, blocks);
        }
        again
    }

    /// A page that is waited for, whose block is not done yet, comes with that block. False: it is to come by itself.
    pub(crate) fn out_of_turn(&self, state: &mut State, address: u64, write: bool) -> bool {
        let Some(pending) = state.pending.as_mut() else { return false };
        let (Some(block), set) = (pending.waits(address), Arc::clone(&pending.set)) else { return false };
        if pending.blocks[block] == Block::Taken {
            state.waiting.push((address, write));
            return true;
        }
        pending.blocks[block] = Block::Taken;
        let mut buffer = Aligned::default();
        let bytes = set.bytes(block..block + 1, &mut buffer);
        self.put_or_leave(state, &set, block..block + 1, bytes);
        state.since.set.contains(&address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stored::Keep;

    #[test]
    fn blocks_are_taken_once_and_in_order() {
        let count = 4 * BLOCK;
        let page = |n: usize| Page { address: (n * PAGE) as u64, slot: n as u32, kinds: 1 + (n % 2) as u8 };
        let pages: Vec<Page> = (0..count).map(page).collect();
        let kinds = vec!["tcp 80".to_owned(), "timer".to_owned()];
        let set = Stored::keep(pages, kinds, Aligned::new(count * PAGE), Keep::Memory).unwrap().unwrap();
        let mut pending = Pending::new(set, "timer");
        assert_eq!(pending.bits, 2);
        assert_eq!(
            (pending.take(2, usize::MAX), pending.take(0, 9), pending.take(0, 9)),
            (Some(2..3), Some(0..1), Some(1..2))
        );
        assert_eq!(pending.waits(2 * BLOCK as u64 * PAGE as u64), Some(2), "it is taken and not there yet");
        pending.blocks[2] = Block::Done;
        assert_eq!(pending.waits(2 * BLOCK as u64 * PAGE as u64), None);
        assert_eq!((pending.take(0, 9), pending.take(0, 9)), (Some(3..4), None));
        assert_eq!(pending.waits((count * PAGE) as u64), None, "of another page the set knows nothing");
    }
}
