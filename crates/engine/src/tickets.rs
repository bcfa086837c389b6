//! Leave to keep a proc awake.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// While one lives the proc does not go to sleep by itself, nor by request.
#[derive(Debug)]
pub struct Ticket(pub Arc<AtomicUsize>);

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
