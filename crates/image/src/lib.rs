//! Images: from a registry, an OCI layout or what `docker save` wrote, into layers that procs
//! share.
//!
//! Owns `DIR/images/`:
//!
//! ```text
//! blobs/HEX           manifests and configurations, by the digest of their bytes
//! blobs/HEX.part      what has come of a layer's blob; a later pull goes on there
//! layers/HEX/files    a layer unpacked, by the digest of the archive it was unpacked from
//! layers/HEX/layer.json
//! refs/HEX.json       a name and what it means
//! ```
//!
//! | module | owns |
//! | --- | --- |
//! | [`images`] | names, and what is where on disk |
//! | [`pull`] | the steps of a pull |
//! | [`origin`], [`registry`], [`local`] | where images come from |
//! | [`content`], [`digest`] | what manifests say, and that they say it |
//! | [`layer`] | one layer: its bytes checked, unpacked, named |
//! | [`parents`] | directories that a layer implies |
//! | [`collect`] | what may go |
//!
//! Never runs anything and never knows of procs: which layers are needed it is told.
//!
//! Nothing is trusted: every blob is compared with the digest that led to it, every layer also with
//! the digest of its contents, and unpacking is `kip-sandbox`'s. Everything has its name only when
//! it is complete and synced; a crash leaves names that end in `.new` or `.gone`, which the next
//! start removes, and partial blobs, which are of use.
#![forbid(unsafe_code)]

mod collect;
mod content;
pub mod digest;
mod error;
mod images;
mod layer;
mod local;
mod origin;
mod parents;
mod pull;
mod registry;
mod request;

pub use content::OciConfig;
pub use digest::Digest;
pub use error::ImageError;
pub use images::{ImageRecord, ImageStore, InUse};
pub use request::PullOrder;
