//! What the daemon keeps of the memory that it once needed: snapshots of large procs pass through
//! many buffers when they are stored and fetched, and a daemon with little to do is to take little.

use std::time::Duration;

/// Memory of that many bytes and more is the kernel's again as soon as it is freed: what an object
/// of a store is read into and sealed in.
const LARGE: i32 = 256 << 10;
/// The most free memory that the allocator may keep, bytes, and how often that is looked at.
const MOST_FREE: usize = 8 << 20;
const EVERY: Duration = Duration::from_secs(5);

/// To be called before there are threads.
pub(crate) fn map_large_memory() {
    kip_sys::process::map_large_memory(LARGE);
}

/// Gives free memory back as long as this is polled.
pub(crate) async fn give_back() {
    let mut last = 0;
    loop {
        tokio::time::sleep(EVERY).await;
        let release = move || kip_sys::process::release_free_memory(MOST_FREE, last);
        match tokio::task::spawn_blocking(release).await {
            Ok(free) => last = free,
            Err(_) => return,
        }
    }
}
