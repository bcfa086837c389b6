//! The routes of `kip image`. Each handler parses, has the service do it and answers.

use crate::answer::{Answer, Asked, AskedQuery, Refused};
use crate::feed;
use crate::server::Hub;
use crate::service::Service;
use axum::extract::State;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use kip_types::image::{
    ImageDetails, ImageRequest, ImageSource, ImageView, ImagesCollectRequest, ImagesRemoved, PullRequest,
};

/// Its routes.
pub fn routes<S: Service>() -> Router<Hub<S>> {
    Router::new()
        .route("/v1/images", get(list::<S>).delete(remove::<S>))
        .route("/v1/images/inspect", get(inspect::<S>))
        .route("/v1/images/pull", post(pull::<S>))
        .route("/v1/images/collect", post(collect::<S>))
}

async fn list<S: Service>(State(hub): State<Hub<S>>) -> Answer<Json<Vec<ImageView>>> {
    Ok(Json(hub.service.images().await?))
}

async fn inspect<S: Service>(
    State(hub): State<Hub<S>>,
    AskedQuery(which): AskedQuery<ImageRequest>,
) -> Answer<Json<ImageDetails>> {
    Ok(Json(hub.service.image(which.reference).await?))
}

async fn pull<S: Service>(State(hub): State<Hub<S>>, Asked(request): Asked<PullRequest>) -> Answer<Response> {
    if let ImageSource::Oci { path, .. } | ImageSource::DockerArchive { path, .. } = &request.source
        && !path.is_absolute()
    {
        return Err(Refused::invalid(format!("the path {} is not absolute", path.display())));
    }
    Ok(feed::lines(hub.service.pull_image(request).await?, hub.ending()))
}

async fn remove<S: Service>(
    State(hub): State<Hub<S>>,
    AskedQuery(which): AskedQuery<ImageRequest>,
) -> Answer<Json<ImagesRemoved>> {
    let service = hub.service.clone();
    Ok(Json(hub.operate(async move { service.remove_image(which.reference).await }).await?))
}

async fn collect<S: Service>(
    State(hub): State<Hub<S>>,
    Asked(request): Asked<ImagesCollectRequest>,
) -> Answer<Json<ImagesRemoved>> {
    let service = hub.service.clone();
    Ok(Json(hub.operate(async move { service.collect_images(request).await }).await?))
}
