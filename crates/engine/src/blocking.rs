//! Work that may wait, beside the tasks that must not.

/// Runs `work` on a blocking thread.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(e) => match e.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime ends, and with it whatever waits for this.
            Err(_) => std::future::pending().await,
        },
    }
}
