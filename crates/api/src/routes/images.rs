//! The routes of `kip image`. Each handler parses, has the service do it and answers.

use crate::answer::{Answer, Asked, AskedQuery, RefusalAnswer};
use crate::describe::{Routes, doc};
use crate::feed;
use crate::state::Api;
use axum::Json;
use axum::extract::State;
use axum::response::Response;

use kip_types::image::{
    ImageDetails, ImageFile, ImageRequest, ImageSource, ImageView, ImagesCollectRequest, ImagesRemoved, PullProgress,
    PullRequest,
};

/// Its routes. References have slashes, so they are no segment of a path.
pub fn routes(routes: Routes) -> Routes {
    routes
        .get("/v1/images", list, doc("listImages", "Images that are here, by name.").json::<Vec<ImageView>>())
        .delete(
            "/v1/images",
            remove,
            doc("removeImage", "Removes an image's name, and of its layers what nothing else needs.")
                .query::<ImageRequest>()
                .json::<ImagesRemoved>(),
        )
        .get(
            "/v1/images/inspect",
            inspect,
            doc("inspectImage", "One image.").query::<ImageRequest>().json::<ImageDetails>(),
        )
        .post(
            "/v1/images/pull",
            pull,
            doc("pullImage", "Brings an image; ends when the client goes.")
                .body::<PullRequest>()
                .lines::<PullProgress>(),
        )
        .post(
            "/v1/images/collect",
            collect,
            doc("collectImages", "Removes what no image and no proc needs.")
                .body::<ImagesCollectRequest>()
                .json::<ImagesRemoved>(),
        )
}

async fn list(State(api): State<Api>) -> Answer<Json<Vec<ImageView>>> {
    Ok(Json(api.service.images().await?))
}

async fn inspect(State(api): State<Api>, AskedQuery(which): AskedQuery<ImageRequest>) -> Answer<Json<ImageDetails>> {
    Ok(Json(api.service.image(which.reference).await?))
}

async fn pull(State(api): State<Api>, Asked(request): Asked<PullRequest>) -> Answer<Response> {
    if let ImageSource::Oci(ImageFile { path, .. }) | ImageSource::DockerArchive(ImageFile { path, .. }) =
        &request.source
        && !path.is_absolute()
    {
        return Err(RefusalAnswer::invalid(format!("the path {} is not absolute", path.display())));
    }
    Ok(feed::lines(api.service.pull_image(request).await?, api.ending()))
}

async fn remove(State(api): State<Api>, AskedQuery(which): AskedQuery<ImageRequest>) -> Answer<Json<ImagesRemoved>> {
    let service = api.service.clone();
    Ok(Json(api.operate(async move { service.remove_image(which.reference).await }).await?))
}

async fn collect(State(api): State<Api>, Asked(request): Asked<ImagesCollectRequest>) -> Answer<Json<ImagesRemoved>> {
    let service = api.service.clone();
    Ok(Json(api.operate(async move { service.collect_images(request).await }).await?))
}
