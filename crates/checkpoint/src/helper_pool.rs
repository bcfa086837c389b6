//! A few CRIU helpers that wait, one small pool for all procs.
//!
//! A helper serves one request; a thread of this module has the template fork the next while the
//! first still works.

use crate::helper::{Helper, HelperConfig, HelperError, Template};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Helpers that wait: one wake and one sleep may come together; more are forked on demand and wait
/// some milliseconds longer.
const READY: usize = 2;
/// Between tries to start one: at first, and at most.
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
struct Waiting {
    helpers: VecDeque<Helper>,
    closed: bool,
}

/// The pool.
#[derive(Debug)]
pub struct HelperPool {
    config: HelperConfig,
    /// None before the first helper and after the end of the pool.
    template: Mutex<Option<Template>>,
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

impl HelperPool {
    /// Starts filling it.
    pub fn start(config: HelperConfig) -> Arc<HelperPool> {
        let pool = Arc::new(HelperPool {
            config,
            template: Mutex::default(),
            waiting: Mutex::default(),
            changed: Condvar::new(),
        });
        let filler = Arc::clone(&pool);
        std::thread::Builder::new()
            .name("helpers".to_owned())
            .spawn(move || filler.fill())
            .expect("a thread can be started");
        pool
    }

    /// A waiting helper, or one that is started now.
    pub fn take(&self) -> Result<Helper, HelperError> {
        let waiting = {
            let mut waiting = self.waiting.lock();
            // Helpers that waited may have been killed.
            std::iter::from_fn(|| waiting.helpers.pop_front()).find_map(|h| h.is_waiting().then_some(h))
        };
        self.changed.notify_one();
        waiting.map_or_else(|| self.fork(), Ok)
    }

    /// A new helper. A template that has died or does not answer is replaced.
    fn fork(&self) -> Result<Helper, HelperError> {
        let mut template = self.template.lock();
        if self.waiting.lock().closed {
            return Err(HelperError::Died(std::io::ErrorKind::NotConnected.into()));
        }
        match template.as_ref().map(Template::fork) {
            None | Some(Err(HelperError::Died(_))) => {}
            Some(forked) => return forked,
        }
        // One that hangs may take its time to end.
        if let Some(dead) = template.take() {
            std::thread::spawn(move || drop(dead));
        }
        template.insert(Template::start(&self.config)?).fork()
    }

    /// Ends the waiting ones and starts no more.
    pub fn close(&self) {
        let helpers = {
            let mut waiting = self.waiting.lock();
            waiting.closed = true;
            std::mem::take(&mut waiting.helpers)
        };
        self.changed.notify_one();
        drop(helpers);
        *self.template.lock() = None;
    }

    fn fill(&self) {
        let mut pause = SHORTEST_PAUSE;
        loop {
            {
                let mut waiting = self.waiting.lock();
                while !waiting.closed && waiting.helpers.len() >= READY {
                    self.changed.wait(&mut waiting);
                }
                if waiting.closed {
                    return;
                }
            }
            match self.fork() {
                Ok(helper) => {
                    pause = SHORTEST_PAUSE;
                    self.waiting.lock().helpers.push_back(helper);
                }
                Err(e) => {
                    tracing::warn!(error = kip_types::chain(&e), "no CRIU helper can be started now");
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }
}
