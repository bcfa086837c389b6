//! The route of `kip backup`.

use crate::answer::{Answer, Asked};
use crate::describe::{Routes, doc};
use crate::feed;
use crate::server::Hub;
use crate::service::Service;
use axum::extract::State;
use axum::response::Response;
use kip_types::backup::{BackupProgress, BackupRequest};

/// It.
pub fn routes<S: Service>(routes: Routes<S>) -> Routes<S> {
    routes.post(
        "/v1/backup",
        backup::<S>,
        doc(
            "backUp",
            "Writes all that the data directory keeps into a new file of the daemon's machine; ends when the client goes.",
        )
        .body::<BackupRequest>()
        .lines::<BackupProgress>(),
    )
}

async fn backup<S: Service>(State(hub): State<Hub<S>>, Asked(request): Asked<BackupRequest>) -> Answer<Response> {
    Ok(feed::lines(hub.service.backup(request).await?, hub.ending()))
}
