//! The tasks that answer for a proc at its probes.

use tokio::task::JoinHandle;

/// The tasks that answer for one proc. Dropped, they end soon.
#[derive(Debug, Default)]
pub struct Probes(Vec<JoinHandle<()>>);

impl Probes {
    /// Of these tasks.
    pub fn new(tasks: Vec<JoinHandle<()>>) -> Probes {
        Probes(tasks)
    }

    /// Ends them; the ports are free then.
    pub async fn end(&mut self) {
        for task in self.0.drain(..) {
            task.abort();
            let _ = task.await;
        }
    }
}

impl Drop for Probes {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
    }
}
