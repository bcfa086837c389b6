//! Threads that stand ready to do a part of another thread's work, one for each processor: to start
//! a thread takes as long as to install forty pages, and it would begin on its maker's processor.
//!
//! A thread that has work reserves those that are free and does the rest alone: two pieces of work
//! never wait for each other's threads.

use rayon::{ThreadPool, ThreadPoolBuilder};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

const STACK: usize = 256 << 10;

/// The threads of this process.
pub(crate) struct Crew {
    threads: ThreadPool,
    /// So many threads are not reserved.
    free: AtomicUsize,
}

/// Some that are reserved.
struct Reserved<'a>(&'a Crew, usize);

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        self.0.free.fetch_add(self.1, Ordering::Relaxed);
    }
}

/// The crew; made by the first thread that asks. That thread must not be bound to a processor, for
/// then the crew would be of one thread.
pub(crate) fn crew() -> &'static Crew {
    static CREW: OnceLock<Crew> = OnceLock::new();
    CREW.get_or_init(|| {
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        let mut every = CpuSet::new();
        (0..CpuSet::MAX_CPU).for_each(|cpu| every.set(cpu));
        let unbound = move |_| {
            let _ = sched_setaffinity(None, &every);
        };
        let threads = ThreadPoolBuilder::new().num_threads(count).thread_name(|number| format!("crew-{number}"));
        let threads = threads.stack_size(STACK).start_handler(unbound).build().expect("threads can be started");
        Crew { threads, free: count.into() }
    })
}

impl Crew {
    fn reserve(&self, most: usize) -> Reserved<'_> {
        // The thread that asks works too, on a processor. One of ours does the rest of its work
        // alone: while it waited for others it would be given other work, which may take long.
        let most = if rayon::current_thread_index().is_some() { 1 } else { most };
        let wanted = most.min(self.threads.current_num_threads()).saturating_sub(1);
        let mut got = 0;
        let take = |free: usize| {
            got = wanted.min(free);
            Some(free - got)
        };
        let _ = self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        Reserved(self, got)
    }

    /// Does `work` on this thread, as number 0, and on those that are free, on `most` in all;
    /// returns when all of them have returned, and says how many they were.
    pub(crate) fn share(&self, most: usize, work: impl Fn(usize) + Sync) -> usize {
        let helpers = self.reserve(most);
        if helpers.1 == 0 {
            work(0);
            return 1;
        }
        let work = &work;
        self.threads.in_place_scope(|scope| {
            (1..=helpers.1).for_each(|number| scope.spawn(move |_| work(number)));
            work(0);
        });
        1 + helpers.1
    }

    /// Does `work` with each of the items and its place among them, on as many threads as are free.
    pub(crate) fn each<T: Sync>(&self, items: &[T], work: impl Fn(usize, &T) + Sync) {
        let next = AtomicUsize::new(0);
        self.share(items.len(), |_| {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(item) = items.get(index) else { break };
                work(index, item);
            }
        });
    }

    /// Drops something when there is time.
    pub(crate) fn drop_later(&self, what: impl Send + 'static) {
        self.threads.spawn(move || drop(what));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;

    #[test]
    fn work_that_is_shared_while_others_share_theirs_is_done() {
        let count = crew().threads.current_num_threads();
        let outer = crew().share(usize::MAX, |_| {
            let seen = Mutex::new(Vec::new());
            let inner = crew().share(usize::MAX, |number| seen.lock().push(number));
            let mut seen = seen.into_inner();
            seen.sort_unstable();
            assert_eq!(seen, (0..inner).collect::<Vec<_>>(), "each once");
        });
        assert!((1..=count).contains(&outer));
        assert_eq!(crew().share(1, |number| assert_eq!(number, 0)), 1);
    }
}
