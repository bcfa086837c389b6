//! The steps of a pull: find, bring what is not here, name.
//!
//! The name comes last, when all that it means is here and synced. Until then a pull leaves layers
//! that may be of use to another, and nothing that counts.

use crate::content::{Blob, Descriptor, OciConfig};
use crate::digest::Digest;
use crate::error::ImageError;
use crate::images::{ImageRecord, ImageStore, InUse, full_name};
use crate::origin::Origin;
use crate::registry::Registry;
use crate::request::{PullOrder, blocking};
use futures_util::{StreamExt as _, TryStreamExt as _};
use kip_sandbox::archive::PackedArchive;
use kip_types::image::PullProgress;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Layers that come at the same time.
const AT_ONCE: usize = 3;
/// Progress is told about so often, bytes.
const REPORT_EVERY: u64 = 1 << 20;

/// Told how far a pull is, from any thread.
type ReportProgress = Arc<dyn Fn(PullProgress) + Send + Sync>;

impl ImageStore {
    /// Pulls an image; layers that are here are not fetched again.
    ///
    /// # Errors
    /// See [`ImageError`]. Dropping it ends it: what has come of blobs stays for the next one.
    pub async fn pull(self: &Arc<Self>, request: PullOrder, report: ReportProgress) -> Result<ImageRecord, ImageError> {
        let in_use = Arc::new(self.in_use().await);
        let asked = request.clone();
        let origin = blocking(move || Origin::open(&asked)).await?;
        let found = origin.find().await?;
        let reference = name_of(&request, found.name)?;
        let config = OciConfig::read(&reference, &found.config)?;
        let mut layers = config.layers().to_vec();
        if layers.len() != found.layers.len() {
            let why = format!("its configuration has {} layers and its manifest {}", layers.len(), found.layers.len());
            return Err(ImageError::NoImage { reference, why });
        }
        let mut known = BTreeSet::new();
        let each: Vec<(Digest, Blob)> =
            layers.iter().cloned().zip(found.layers).filter(|(layer, _)| known.insert(layer.clone())).collect();
        let pulls = each.into_iter().map(|(layer, blob)| {
            let coming = ComingLayer {
                images: Arc::clone(self),
                reference: reference.clone(),
                layer,
                report: Arc::clone(&report),
                // What cannot be called off any more keeps it.
                _in_use: Arc::clone(&in_use),
            };
            let origin = origin.clone();
            async move { coming.get(&origin, blob).await }
        });
        futures_util::stream::iter(pulls).buffer_unordered(AT_ONCE).try_collect::<()>().await?;
        let id = Digest::of(&found.config);
        let digest = found.top.as_deref().map_or_else(|| id.clone(), Digest::of);
        let (images, called) = (Arc::clone(self), reference.clone());
        let layers = blocking(move || images.add_parents(&called, &mut layers).map(|()| layers)).await?;
        let at_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64);
        let record = ImageRecord { reference, digest, id, layers, at_ms, source: request.source.to_string() };
        let (images, named) = (Arc::clone(self), record.clone());
        blocking(move || {
            images.write_blob(&found.config)?;
            found.top.iter().try_for_each(|top| images.write_blob(top))?;
            images.write_ref(&named)
        })
        .await?;
        Ok(record)
    }
}

/// A layer of an image on its way.
struct ComingLayer {
    images: Arc<ImageStore>,
    /// The image's name.
    reference: String,
    layer: Digest,
    report: ReportProgress,
    _in_use: Arc<InUse>,
}

impl ComingLayer {
    /// Fetches and unpacks it, unless it is here.
    async fn get(self, origin: &Origin, blob: Blob) -> Result<(), ImageError> {
        let (name, report) = (self.layer.to_string(), Arc::clone(&self.report));
        if self.images.layer_dir(&self.layer).is_dir() {
            report(PullProgress::Here { layer: name });
            return Ok(());
        }
        match (origin, blob) {
            (Origin::Registry(registry), Blob::Named(blob)) => self.fetch(registry, &blob).await?,
            (Origin::Registry(_), Blob::File(_)) => unreachable!("registries have no files"),
            (Origin::Local(local), blob) => {
                let local = Arc::clone(local);
                blocking(move || {
                    let (path, bytes) = local.layer(&blob, &progress(&self.layer, &self.report))?;
                    self.unpack(PackedArchive { name: &path, bytes })
                })
                .await?;
            }
        }
        report(PullProgress::Done { layer: name });
        Ok(())
    }

    async fn fetch(self, registry: &Registry, blob: &Descriptor) -> Result<(), ImageError> {
        let lock = self.images.lock_of(&blob.digest);
        let _alone = lock.lock().await;
        if self.images.layer_dir(&self.layer).is_dir() {
            return Ok(());
        }
        let part = self.images.part(&blob.digest);
        registry.fetch(blob, &part, &progress(&self.layer, &self.report)).await?;
        blocking(move || {
            let bytes = File::open(&part).map_err(ImageError::io("open", &part))?;
            let installed = self.unpack(PackedArchive { name: &part, bytes });
            // It is what its digest says: to fetch it again would change nothing. A full disk needs
            // the room.
            let _ = std::fs::remove_file(&part);
            installed
        })
        .await
    }

    fn unpack(&self, packed: PackedArchive<'_, impl Read>) -> Result<(), ImageError> {
        (self.report)(PullProgress::Unpacking { layer: self.layer.to_string() });
        self.images.install(&self.reference, &self.layer, packed)
    }
}

fn progress(layer: &Digest, report: &ReportProgress) -> impl Fn(u64, u64) + Send + Sync + 'static {
    let (layer, report, told) = (layer.to_string(), Arc::clone(report), AtomicU64::new(0));
    move |done, of| {
        if done >= told.load(Ordering::Relaxed) + REPORT_EVERY || done == of {
            told.store(done, Ordering::Relaxed);
            report(PullProgress::Fetching { layer: layer.clone(), done, of });
        }
    }
}

/// By what an image is called here: what it is to be called, else its own name, else its source.
fn name_of(request: &PullOrder, own: Option<String>) -> Result<String, ImageError> {
    let source = request.source.to_string();
    match &request.name {
        Some(name) if *name == source => Ok(source),
        Some(name) => full_name(name),
        None => Ok(own.unwrap_or(source)),
    }
}
