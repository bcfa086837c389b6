//! The route of `kip backup`.

use crate::answer::{Answer, Asked};
use crate::describe::{Routes, doc};
use crate::feed;
use crate::state::Api;
use axum::extract::State;
use axum::response::Response;
use kip_types::backup::{BackupProgress, BackupRequest};

/// It.
pub fn routes(routes: Routes) -> Routes {
    routes.post(
        "/v1/backup",
        backup,
        doc(
            "backUp",
            "Writes all that the data directory keeps into a new file of the daemon's machine; ends when the client goes.",
        )
        .body::<BackupRequest>()
        .lines::<BackupProgress>(),
    )
}

async fn backup(State(api): State<Api>, Asked(request): Asked<BackupRequest>) -> Answer<Response> {
    Ok(feed::lines(api.service.backup(request).await?, api.ending()))
}
