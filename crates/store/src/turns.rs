//! Whose turn it is to send a request: so many at once, those in a hurry first.
//!
//! Owns nothing but the order. A turn that is given back goes to the urgent request that has waited
//! longest; if none is urgent, to the one that has waited longest at all. A request that stops waiting,
//! or is dropped with a turn, gives it on. Urgent requests without end let the others wait without end;
//! wakes end.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use tokio::sync::oneshot;

/// How much of a hurry a request is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// A wake waits for it.
    Foreground,
    /// Whenever there is room.
    Background,
}

/// So many turns.
#[derive(Debug, Clone)]
pub(crate) struct Turns(Arc<Mutex<Inside>>);

#[derive(Debug)]
struct Inside {
    free: usize,
    foreground: VecDeque<oneshot::Sender<Turn>>,
    background: VecDeque<oneshot::Sender<Turn>>,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn(Option<Turns>);

impl Turns {
    pub(crate) fn new(count: usize) -> Turns {
        let inside = Inside { free: count.max(1), foreground: VecDeque::new(), background: VecDeque::new() };
        Turns(Arc::new(Mutex::new(inside)))
    }

    /// Waits for one.
    pub(crate) async fn take(&self, urgency: Urgency) -> Turn {
        let waiting = {
            let mut inside = self.inside();
            if inside.free > 0 {
                inside.free -= 1;
                return Turn(Some(self.clone()));
            }
            let (sender, receiver) = oneshot::channel();
            match urgency {
                Urgency::Foreground => inside.foreground.push_back(sender),
                Urgency::Background => inside.background.push_back(sender),
            }
            receiver
        };
        waiting.await.expect("who waits is only forgotten when it is given a turn")
    }

    /// One that is free now.
    pub(crate) fn try_take(&self) -> Option<Turn> {
        let mut inside = self.inside();
        inside.free = inside.free.checked_sub(1)?;
        Some(Turn(Some(self.clone())))
    }

    fn inside(&self) -> parking_lot::MutexGuard<'_, Inside> {
        self.0.lock()
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(mut turns) = self.0.take() else { return };
        loop {
            let next = {
                let mut inside = turns.inside();
                let next = inside.foreground.pop_front().or_else(|| inside.background.pop_front());
                if next.is_none() {
                    inside.free += 1;
                }
                next
            };
            let Some(next) = next else { return };
            // If the waiter is gone, the turn comes back for the next; a waiter that leaves before taking
            // the turn drops it, which comes here again.
            match next.send(Turn(Some(turns))) {
                Ok(()) => return,
                Err(mut back) => turns = back.0.take().expect("it was just put there"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use std::pin::pin;

    #[test]
    fn the_urgent_come_first_and_all_come_in_order() {
        let turns = Turns::new(1);
        let held = turns.take(Urgency::Background).now_or_never().unwrap();
        assert!(turns.try_take().is_none());
        let mut later = pin!(turns.take(Urgency::Background));
        let mut first = pin!(turns.take(Urgency::Foreground));
        let mut second = pin!(turns.take(Urgency::Foreground));
        for waiting in [&mut later, &mut first, &mut second] {
            assert!(waiting.now_or_never().is_none());
        }
        drop(held);
        assert!(later.as_mut().now_or_never().is_none() && second.as_mut().now_or_never().is_none());
        drop(first.as_mut().now_or_never().unwrap());
        drop(second.as_mut().now_or_never().unwrap());
        drop(later.as_mut().now_or_never().unwrap());
        assert!(turns.try_take().is_some());
    }

    #[test]
    fn who_stops_waiting_gives_its_turn_on() {
        let turns = Turns::new(1);
        let held = turns.try_take().unwrap();
        let mut impatient: Vec<_> = (0..1000).map(|_| Box::pin(turns.take(Urgency::Foreground))).collect();
        for waiting in &mut impatient {
            assert!(waiting.as_mut().now_or_never().is_none());
        }
        let given = impatient.remove(0);
        drop(impatient);
        drop(held);
        assert!(turns.try_take().is_none(), "it was given, though not yet taken");
        drop(given);
        assert!(turns.try_take().is_some());
    }
}
