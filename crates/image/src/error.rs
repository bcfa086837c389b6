//! Why an image is not here.

use crate::digest::Digest;
use kip_sandbox::archive::UnpackError;
use std::io;
use std::path::{Path, PathBuf};

/// An image could not be had, found or removed. Nothing half is left under a name that counts.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// A name that no image can have.
    #[error("{reference:?} is no name of an image: {why}")]
    Reference {
        /// As it was written.
        reference: String,
        /// For people.
        why: String,
    },
    /// The registry wants a login, or does not give the image to the user that asked.
    #[error(
        "registry {registry} does not give {reference} to {who}: log in with `docker login {registry}`, or give --registry-auth USER:PASSWORD"
    )]
    Unauthorized {
        /// Host and port.
        registry: String,
        /// What was asked for.
        reference: String,
        /// The user that asked.
        who: String,
    },
    /// It has no such image.
    #[error("{place} has no image {reference}{hint}")]
    NotFound {
        /// The registry, layout or archive.
        place: String,
        /// What was asked for.
        reference: String,
        /// What it has, if that is known.
        hint: String,
    },
    /// No host answers, or the one that does is no registry.
    #[error("registry {registry} cannot be asked for {reference}: {why}")]
    Registry {
        /// Host and port.
        registry: String,
        /// What was asked for.
        reference: String,
        /// For people.
        why: String,
    },
    /// Content is not what its digest says.
    #[error("{what} of {reference} is damaged: it should be {expected} and is {found}; nothing of it is kept")]
    Damaged {
        /// Which part.
        what: String,
        /// Of which image.
        reference: String,
        /// What led to it.
        expected: Digest,
        /// What came.
        found: Digest,
    },
    /// It is for other machines.
    #[error("{reference} has nothing for linux/amd64; it has {has}")]
    Platform {
        /// What was asked for.
        reference: String,
        /// The platforms that there are.
        has: String,
    },
    /// It is something else than an image of a program.
    #[error("{reference} is no image that can be run: {why}")]
    NoImage {
        /// What was asked for.
        reference: String,
        /// For people.
        why: String,
    },
    /// A layer cannot be unpacked.
    #[error("layer sha256:{} of {reference} cannot be unpacked", layer.short())]
    Layer {
        /// By the digest of what it is unpacked from.
        layer: Digest,
        /// Of which image.
        reference: String,
        /// Why.
        #[source]
        source: Box<UnpackError>,
    },
    /// A file that was named.
    #[error("could not {action} {}", path.display())]
    Source {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A file of ours.
    #[error("could not {action} {}{}", path.display(), room(source))]
    Io {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// There is no such image here.
    #[error("there is no image {reference} here: `kip image pull {reference}`{known}")]
    Unknown {
        /// What was asked for.
        reference: String,
        /// Those that are here.
        known: String,
    },
    /// The beginning of a digest fits several.
    #[error("{reference} may be any of {many} images: write more of it")]
    Ambiguous {
        /// What was asked for.
        reference: String,
        /// How many.
        many: usize,
    },
    /// Layers that ought to be here are not.
    #[error("{} of its {of} layers are not here ({}): `kip image pull {reference}`", missing.len(), list(missing))]
    Missing {
        /// What brings them.
        reference: String,
        /// Which.
        missing: Vec<Digest>,
        /// How many there are in all.
        of: usize,
    },
    /// Images are being pulled or used, and what that needs is not known yet.
    #[error("images are being pulled, or a proc is being made of one: try again when that is done")]
    Busy,
}

fn list(digests: &[Digest]) -> String {
    let some: Vec<&str> = digests.iter().take(3).map(Digest::short).collect();
    let more = if digests.len() > some.len() { ", .." } else { "" };
    format!("{}{more}", some.join(", "))
}

/// What to do about a full disk.
fn room(e: &io::Error) -> &'static str {
    match e.kind() {
        io::ErrorKind::StorageFull => " (make room; `kip image gc` removes what no image needs)",
        _ => "",
    }
}

impl ImageError {
    /// For `map_err`, of a file that was named.
    pub(crate) fn source(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ImageError {
        let path = path.to_owned();
        move |source| ImageError::Source { action, path, source }
    }

    /// For `map_err`.
    pub(crate) fn io<E: Into<io::Error>>(action: &'static str, path: &Path) -> impl FnOnce(E) -> ImageError {
        let path = path.to_owned();
        move |e| ImageError::Io { action, path, source: e.into() }
    }

    /// A layer's, with what to do about a full disk.
    pub(crate) fn layer(layer: &Digest, reference: &str, source: UnpackError) -> ImageError {
        match source {
            UnpackError::Destination { path, source } => ImageError::Io { action: "unpack to", path, source },
            source => {
                ImageError::Layer { layer: layer.clone(), reference: reference.to_owned(), source: Box::new(source) }
            }
        }
    }
}
