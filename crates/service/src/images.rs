//! OCI images.

use crate::Feed;
use async_trait::async_trait;
use kip_types::api::Refusal;
use kip_types::image::{ImageDetails, ImageView, ImagesCollectRequest, ImagesRemoved, PullProgress, PullRequest};

/// Images: pulled, listed, removed.
#[async_trait]
pub trait ImageService: Send + Sync + 'static {
    /// Images that are here, by name.
    async fn images(&self) -> Result<Vec<ImageView>, Refusal>;

    /// One image: by its name, or its id or digest or the beginning of one.
    async fn image(&self, reference: String) -> Result<ImageDetails, Refusal>;

    /// Pulls an image. The last item is [`PullProgress::End`] or an error; the pull ends when the
    /// feed is dropped.
    async fn pull_image(&self, request: PullRequest) -> Result<Feed<PullProgress>, Refusal>;

    /// Removes an image's name, and of its layers what nothing else needs.
    async fn remove_image(&self, reference: String) -> Result<ImagesRemoved, Refusal>;

    /// Removes what no image and no proc needs.
    async fn collect_images(&self, request: ImagesCollectRequest) -> Result<ImagesRemoved, Refusal>;
}
