//! Notification of followers, by threads that wait for no proc.

use super::{Entry, News, Rung, STACK, Service, Slot, by_long_tick, install_us, installed_pages, micros};
use crate::protocol::{PagerEvent, Woken};
use kip_sys::fdpass;
use parking_lot::{Mutex, MutexGuard};
use std::os::fd::AsFd as _;
use std::sync::{Arc, mpsc};

/// Does something with a proc, by a thread of its own if that waits for the proc: those that serve
/// all procs wait for none.
pub(super) fn at_once_or_later(
    slot: Slot,
    what: &str,
    act: impl FnOnce(MutexGuard<'_, Option<Entry>>) + Send + 'static,
) {
    if let Some(entry) = slot.try_lock() {
        return act(entry);
    }
    // Without a thread of its own it waits here.
    let act = Arc::new(Mutex::new(Some(act)));
    let later = {
        let (slot, act) = (Arc::clone(&slot), Arc::clone(&act));
        move || {
            let act = act.lock().take();
            if let Some(act) = act {
                act(slot.lock());
            }
        }
    };
    if let Err(error) = std::thread::Builder::new().name(what.to_owned()).stack_size(STACK).spawn(later) {
        tracing::error!(%error, what, "no thread to wait for a proc that is at work");
        let act = act.lock().take();
        if let Some(act) = act {
            act(slot.lock());
        }
    }
}

impl Service {
    /// Notifies followers of first faults, and worse.
    pub(super) fn report_news(self: &Arc<Service>, heard: &mpsc::Receiver<News>) {
        while let Ok(news) = heard.recv() {
            match news {
                News::Rung(rung) => {
                    let service = Arc::clone(self);
                    let slot = self.known(&rung.name).unwrap_or_default();
                    at_once_or_later(slot, "rung", move |entry| service.report_rung(rung, entry));
                }
                News::Event(event) => self.broadcast(&event),
            }
        }
    }

    fn report_rung(&self, rung: Rung, mut entry: MutexGuard<'_, Option<Entry>>) {
        let Rung { name, number, turn, total_us, at, by } = rung;
        let (install_us, pages, long_tick) = entry.as_mut().map_or((0, 0, false), |entry| {
            self.sets_are_used(entry);
            (install_us(entry), installed_pages(entry), by_long_tick(entry))
        });
        drop(entry);
        let woken = Woken { install_us, total_us: total_us.unwrap_or(install_us), pages, long_tick };
        tracing::debug!(proc = name, told_after_us = micros(at), ?woken, "awake");
        self.broadcast(&PagerEvent::Woke { name, number, turn, woken, by });
    }

    pub(super) fn broadcast(&self, event: &PagerEvent) {
        let bytes = serde_json::to_vec(event).expect("events are plain data");
        self.followers.lock().retain(|socket| fdpass::send(socket.as_fd(), &bytes, &[]).is_ok());
    }
}
