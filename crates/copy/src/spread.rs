//! Periodic timers of a clone, moved within their interval, so that the clones of one source do not
//! all fire at once (paper S; FEATURES.md, S3).
//!
//! In the clone's own generation, of whose files those are made anew that say so. A timer that
//! fires once keeps its time, and so does a timerfd that follows the time of day.

use crate::CopyError;
use kip_checkpoint::plan::PLAN;
use kip_criu_images::{CHECKPOINT, Images};
use kip_records::body::Body;
use kip_snapshot::{Manifest, Part};
use kip_sys::random;
use std::fs;
use std::io;
use std::path::Path;

/// Moves the periodic timers of the generation in that directory by a part of their interval that
/// is drawn, if it has any.
///
/// # Errors
/// [`CopyError::Io`], [`CopyError::Generation`], [`CopyError::Images`].
pub(crate) fn spread(directory: &Path) -> Result<(), CopyError> {
    let mut manifest: Manifest<Body> = kip_snapshot::open(directory).map_err(CopyError::Generation)?;
    // An older Kip kept images as they came.
    if !manifest.body.clocks.has_periodic() || !directory.join(CHECKPOINT).exists() {
        return Ok(());
    }
    // What is damaged must not get a checksum anew.
    let part: Vec<Part> = manifest.parts.iter().filter(|part| part.name == CHECKPOINT).cloned().collect();
    kip_snapshot::verify_some(directory, &part, &[]).map_err(CopyError::Generation)?;
    let mut images = Images::read(directory)?;
    let drawn = u32::from_le_bytes(random::drawn::<4>());
    kip_clocks::spread(&mut images, &mut manifest.body.clocks, drawn)?;
    // Their other names are the source's.
    for name in [CHECKPOINT, PLAN] {
        let path = directory.join(name);
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(crate::at(&path)(e)),
            _ => {}
        }
    }
    images.save(directory)?;
    kip_snapshot::replace_part(directory, manifest, CHECKPOINT).map_err(CopyError::Generation)
}
