//! The route of scaling, below `/v1/procs/NAME`. How a proc is scaled is changed as the rest of its
//! spec is.

use crate::answer::{Answer, Name};
use crate::describe::{Routes, doc};
use crate::state::Api;
use axum::Json;
use axum::extract::State;
use kip_types::api::scale::ScaleView;

/// The route of scaling.
pub fn routes(routes: Routes) -> Routes {
    routes.get(
        "/v1/procs/{name}/scale",
        show,
        doc("showScale", "Shows how a proc is scaled, its replicas and what was decided last. Wakes none.")
            .json::<ScaleView>(),
    )
}

async fn show(State(api): State<Api>, Name(name): Name) -> Answer<Json<ScaleView>> {
    Ok(Json(api.service.scale(name).await?))
}
