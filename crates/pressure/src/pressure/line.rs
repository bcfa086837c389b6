//! Places for which wakes queue: the one that is due first comes first, of several that are due at
//! the same time the one that has waited longest.
//!
//! A wait that is given up (its future dropped) leaves nothing behind, also where it had just been
//! given a place.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::oneshot;

/// When a wake is due, and its number among those that came.
type Turn = (Instant, u64);

#[derive(Debug)]
struct State {
    /// Places that are free; none as long as a wake waits.
    free: usize,
    /// How many have waited so far.
    came: u64,
    waiting: BTreeMap<Turn, oneshot::Sender<()>>,
}

/// So many places, and the wakes that wait for one.
#[derive(Debug)]
pub(super) struct Line(Mutex<State>);

/// A place in a line, given to the next one when it is dropped.
#[derive(Debug)]
pub(super) struct Place(Arc<Line>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.give_back();
    }
}

/// A wake that waits.
struct Waiting<'a> {
    line: &'a Arc<Line>,
    turn: Turn,
    /// It has its place.
    served: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if !self.served && self.line.0.lock().waiting.remove(&self.turn).is_none() {
            self.line.give_back();
        }
    }
}

impl Line {
    pub(super) fn new(places: usize) -> Arc<Line> {
        Arc::new(Line(Mutex::new(State { free: places, came: 0, waiting: BTreeMap::new() })))
    }

    /// A place now, if one is free.
    pub(super) fn try_enter(self: &Arc<Line>) -> Option<Place> {
        let mut state = self.0.lock();
        state.free = state.free.checked_sub(1)?;
        Some(Place(Arc::clone(self)))
    }

    /// A place, when all that are due before `due` have had theirs.
    pub(super) async fn enter(self: &Arc<Line>, due: Instant) -> Place {
        let (tell, told) = oneshot::channel();
        let mut waiting = {
            let mut state = self.0.lock();
            if let Some(free) = state.free.checked_sub(1) {
                state.free = free;
                return Place(Arc::clone(self));
            }
            let turn = (due, state.came);
            state.came += 1;
            state.waiting.insert(turn, tell);
            Waiting { line: self, turn, served: false }
        };
        // The line outlives this, so nothing is dropped unsaid.
        waiting.served = told.await.is_ok();
        Place(Arc::clone(self))
    }

    fn give_back(&self) {
        let mut state = self.0.lock();
        match state.waiting.pop_first() {
            // One that is given up at this moment gives it back itself.
            Some((_, tell)) => drop(tell.send(())),
            None => state.free += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test]
    async fn the_one_that_is_due_first_comes_first() {
        let (line, now) = (Line::new(2), Instant::now());
        let held = (line.try_enter().unwrap(), line.try_enter().unwrap());
        assert!(line.try_enter().is_none());
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = Vec::new();
        for due in [30, 10, 20, 10] {
            let (line, order) = (Arc::clone(&line), Arc::clone(&order));
            tasks.push(tokio::spawn(async move {
                let place = line.enter(now + Duration::from_millis(due)).await;
                order.lock().push(due);
                drop(place);
            }));
            tokio::task::yield_now().await;
        }
        drop(held.0);
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(*order.lock(), [10, 10, 20, 30]);
        drop(held.1);
        assert_eq!(line.0.lock().free, 2);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn no_wake_waits_beside_a_free_place() {
        let line = Line::new(1);
        let enter = |n: u64| {
            let line = Arc::clone(&line);
            tokio::spawn(async move {
                for i in 0..5_000 {
                    let due = Instant::now() + Duration::from_micros(n * i % 7);
                    let entering = line.enter(due);
                    // Some give up at once.
                    if (n + i).is_multiple_of(5) {
                        let _ = tokio::time::timeout(Duration::ZERO, entering).await;
                    } else {
                        drop(entering.await);
                    }
                }
            })
        };
        let all = (0..8).map(enter).collect::<Vec<_>>();
        let ended = async {
            for task in all {
                task.await.unwrap();
            }
        };
        tokio::time::timeout(Duration::from_secs(60), ended).await.expect("none waits for ever");
        assert_eq!(line.0.lock().free, 1);
    }

    #[tokio::test]
    async fn a_wait_that_is_given_up_takes_no_place() {
        let (line, now) = (Line::new(1), Instant::now());
        let held = line.try_enter().unwrap();
        let mut first = Box::pin(line.enter(now));
        let mut second = Box::pin(line.enter(now + Duration::from_secs(1)));
        let soon = Duration::from_millis(1);
        assert!(tokio::time::timeout(soon, &mut first).await.is_err());
        assert!(tokio::time::timeout(soon, &mut second).await.is_err());
        // It has been given the place, and does not come to know.
        drop(held);
        drop(first);
        drop(second.await);
        assert_eq!(line.0.lock().free, 1);
        assert!(line.0.lock().waiting.is_empty());
    }
}
