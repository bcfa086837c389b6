//! Where an image comes from, as the steps of a pull see it.

use crate::content::ResolvedImage;
use crate::error::ImageError;
use crate::local::Local;
use crate::registry::Registry;
use crate::request::{PullOrder, blocking};
use kip_types::image::{ImageFile, ImageSource};
use std::sync::Arc;

/// A registry or files.
#[derive(Debug, Clone)]
pub(crate) enum Origin {
    Registry(Arc<Registry>),
    Local(Arc<Local>),
}

impl Origin {
    /// May read a table of contents, so not to be called where nothing may block.
    pub(crate) fn open(request: &PullOrder) -> Result<Origin, ImageError> {
        let reference = request.source.to_string();
        let local = |path, tag: &Option<String>, saved| {
            Local::open(path, tag.as_deref(), saved, reference.clone()).map(|local| Origin::Local(Arc::new(local)))
        };
        match &request.source {
            ImageSource::Registry(name) => Ok(Origin::Registry(Arc::new(Registry::new(name, request)?))),
            ImageSource::Oci(ImageFile { path, tag }) => local(path, tag, false),
            ImageSource::DockerArchive(ImageFile { path, tag }) => local(path, tag, true),
        }
    }

    pub(crate) async fn find(&self) -> Result<ResolvedImage, ImageError> {
        match self {
            Origin::Registry(registry) => registry.find().await,
            Origin::Local(local) => {
                let local = Arc::clone(local);
                blocking(move || local.find()).await
            }
        }
    }
}
