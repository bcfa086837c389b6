//! Permits to send a request: so many at once, those in a hurry first.
//!
//! Owns nothing but the order. A permit that is given back goes to the urgent request that has
//! waited longest; if none is urgent, to the one that has waited longest at all. A request that
//! stops waiting, or is dropped with a permit, gives it on. Urgent requests without end let the
//! others wait without end; wakes end.

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

/// A fixed number of permits.
#[derive(Debug, Clone)]
pub(crate) struct Permits(Arc<Mutex<Inside>>);

#[derive(Debug)]
struct Inside {
    free: usize,
    foreground: VecDeque<oneshot::Sender<Permit>>,
    background: VecDeque<oneshot::Sender<Permit>>,
}

/// One of them, held until it is dropped.
#[derive(Debug)]
pub(crate) struct Permit(Option<Permits>);

impl Permits {
    pub(crate) fn new(count: usize) -> Permits {
        let inside = Inside { free: count.max(1), foreground: VecDeque::new(), background: VecDeque::new() };
        Permits(Arc::new(Mutex::new(inside)))
    }

    /// Waits for one.
    pub(crate) async fn take(&self, urgency: Urgency) -> Permit {
        let waiting = {
            let mut inside = self.inside();
            if inside.free > 0 {
                inside.free -= 1;
                return Permit(Some(self.clone()));
            }
            let (sender, receiver) = oneshot::channel();
            match urgency {
                Urgency::Foreground => inside.foreground.push_back(sender),
                Urgency::Background => inside.background.push_back(sender),
            }
            receiver
        };
        waiting.await.expect("a waiter is only forgotten when it is given a permit")
    }

    /// One that is free now.
    pub(crate) fn try_take(&self) -> Option<Permit> {
        let mut inside = self.inside();
        inside.free = inside.free.checked_sub(1)?;
        Some(Permit(Some(self.clone())))
    }

    fn inside(&self) -> parking_lot::MutexGuard<'_, Inside> {
        self.0.lock()
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let Some(mut permits) = self.0.take() else { return };
        loop {
            let next = {
                let mut inside = permits.inside();
                let next = inside.foreground.pop_front().or_else(|| inside.background.pop_front());
                if next.is_none() {
                    inside.free += 1;
                }
                next
            };
            let Some(next) = next else { return };
            // If the waiter is gone, the permit comes back for the next; a waiter that leaves
            // before taking the permit drops it, which comes here again.
            match next.send(Permit(Some(permits))) {
                Ok(()) => return,
                Err(mut back) => permits = back.0.take().expect("it was just put there"),
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
        let permits = Permits::new(1);
        let held = permits.take(Urgency::Background).now_or_never().unwrap();
        assert!(permits.try_take().is_none());
        let mut later = pin!(permits.take(Urgency::Background));
        let mut first = pin!(permits.take(Urgency::Foreground));
        let mut second = pin!(permits.take(Urgency::Foreground));
        for waiting in [&mut later, &mut first, &mut second] {
            assert!(waiting.now_or_never().is_none());
        }
        drop(held);
        assert!(later.as_mut().now_or_never().is_none() && second.as_mut().now_or_never().is_none());
        drop(first.as_mut().now_or_never().unwrap());
        drop(second.as_mut().now_or_never().unwrap());
        drop(later.as_mut().now_or_never().unwrap());
        assert!(permits.try_take().is_some());
    }

    #[test]
    fn who_stops_waiting_gives_its_turn_on() {
        let permits = Permits::new(1);
        let held = permits.try_take().unwrap();
        let mut impatient: Vec<_> = (0..1000).map(|_| Box::pin(permits.take(Urgency::Foreground))).collect();
        for waiting in &mut impatient {
            assert!(waiting.as_mut().now_or_never().is_none());
        }
        let given = impatient.remove(0);
        drop(impatient);
        drop(held);
        assert!(permits.try_take().is_none(), "it was given, though not yet taken");
        drop(given);
        assert!(permits.try_take().is_some());
    }
}
