//! Where an image comes from, as the steps of a pull see it.

use crate::content::Descriptor;
use crate::error::ImageError;
use crate::local::Local;
use crate::pull::Pull;
use crate::registry::Registry;
use kip_types::image::ImageSource;
use std::path::PathBuf;
use std::sync::Arc;

/// A registry or files.
#[derive(Debug, Clone)]
pub(crate) enum Origin {
    Registry(Arc<Registry>),
    Local(Arc<Local>),
}

/// The packed bytes of a layer.
#[derive(Debug, Clone)]
pub(crate) enum Blob {
    /// By their digest.
    Named(Descriptor),
    /// A file of an archive.
    File(PathBuf),
}

/// What a source says of the image that is meant.
#[derive(Debug)]
pub(crate) struct Found {
    /// What it is called there, complete.
    pub(crate) name: Option<String>,
    /// The manifest or index that it begins with.
    pub(crate) top: Option<Vec<u8>>,
    pub(crate) config: Vec<u8>,
    /// Lowest first.
    pub(crate) layers: Vec<Blob>,
}

impl Origin {
    /// May read a table of contents, so not to be called where nothing may block.
    pub(crate) fn open(request: &Pull) -> Result<Origin, ImageError> {
        let reference = request.source.to_string();
        let local = |path, tag: &Option<String>, saved| {
            Local::open(path, tag.as_deref(), saved, reference.clone()).map(|local| Origin::Local(Arc::new(local)))
        };
        match &request.source {
            ImageSource::Registry(name) => Ok(Origin::Registry(Arc::new(Registry::new(name, request)?))),
            ImageSource::Oci { path, tag } => local(path, tag, false),
            ImageSource::DockerArchive { path, tag } => local(path, tag, true),
        }
    }

    pub(crate) async fn find(&self) -> Result<Found, ImageError> {
        match self {
            Origin::Registry(registry) => registry.find().await,
            Origin::Local(local) => {
                let local = Arc::clone(local);
                crate::pull::blocking(move || local.find()).await
            }
        }
    }
}
