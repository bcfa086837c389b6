//! What all requests share: the service, the tokens, and how far the end of the API is.

use crate::answer::RefusalAnswer;
use crate::tokens::Tokens;
use kip_service::{SpawnService, TreeService, WorkerService};
use kip_types::api::{Code, Refusal};
use kip_types::spec::Timing;
use std::future::Future;
use std::sync::Arc;
use tokio::sync::watch;

/// What an API asks.
pub struct ApiServices {
    /// Everything about procs.
    pub service: Arc<dyn WorkerService>,
    /// The name tree.
    pub tree: Arc<dyn TreeService>,
    /// Procs by spawn.
    pub spawner: Arc<dyn SpawnService>,
}

/// The API of one data directory. Clones share it.
#[derive(Clone)]
pub struct Api {
    pub(crate) service: Arc<dyn WorkerService>,
    pub(crate) tree: Arc<dyn TreeService>,
    pub(crate) spawner: Arc<dyn SpawnService>,
    pub(crate) defaults: Timing,
    pub(crate) tokens: Arc<Tokens>,
    /// True once `down` was carried out.
    pub(crate) down: watch::Sender<bool>,
    /// True once the API is ending for any reason.
    pub(crate) ending: watch::Sender<bool>,
    /// Operations under way.
    pub(crate) operations: watch::Sender<usize>,
}

/// Counts an operation as under way while it lives.
struct UnderWay(watch::Sender<usize>);

impl UnderWay {
    fn begin(count: &watch::Sender<usize>) -> UnderWay {
        count.send_modify(|n| *n += 1);
        UnderWay(count.clone())
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n -= 1);
    }
}

impl Api {
    /// An API before `services`. `defaults` is what procs get whose owner does not say when they
    /// sink, `tokens` decides which clients are let in by TCP.
    pub fn new(services: ApiServices, defaults: Timing, tokens: Tokens) -> Api {
        let ApiServices { service, tree, spawner } = services;
        Api {
            service,
            tree,
            spawner,
            defaults,
            tokens: Arc::new(tokens),
            down: watch::Sender::new(false),
            ending: watch::Sender::new(false),
            operations: watch::Sender::new(0),
        }
    }

    /// Carries out `work` to its end, whether or not the caller is still there to hear of it.
    pub(crate) async fn operate<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, Refusal>> + Send + 'static,
    ) -> Result<T, RefusalAnswer> {
        let under_way = UnderWay::begin(&self.operations);
        let task = tokio::spawn(async move {
            let done = work.await;
            drop(under_way);
            done
        });
        match task.await {
            Ok(done) => Ok(done?),
            Err(e) => {
                tracing::error!(error = %e, "an operation died");
                Err(Refusal::new(Code::Failed, "the daemon failed at this; its log says where").into())
            }
        }
    }

    /// Whether the API is ending.
    pub(crate) fn ending(&self) -> watch::Receiver<bool> {
        self.ending.subscribe()
    }

    /// Makes [`Api::serve`] end with [`Ending::Down`].
    pub(crate) fn went_down(&self) {
        self.down.send_replace(true);
    }
}
