//! What a generation says about the procs that go on from it.

use crate::fill::Fills;
use crate::random;
use kip_criu_images::{CheckpointImageError, Images, bars_criu};
use kip_snapshot::MemoryPatch;
use kip_types::Generation;
use std::path::Path;

/// What was found in a generation and in its memory.
#[derive(Debug)]
pub struct InspectedGeneration {
    /// What keeps it from being woken anywhere else.
    pub barred: Option<String>,
    /// What is another in the memory of a copy.
    pub patches: Vec<MemoryPatch>,
    /// What the owner of a copy should know.
    pub notes: Vec<String>,
}

impl InspectedGeneration {
    /// Reads that generation of a proc in that directory, its images and the memory in which random
    /// number generators are looked for, of which `fills` may have some.
    ///
    /// # Errors
    /// An image is damaged.
    pub fn read(
        directory: &Path,
        generation: Generation,
        fills: &Fills,
    ) -> Result<InspectedGeneration, CheckpointImageError> {
        let known = kip_snapshot::cloned_patches(directory, generation).unwrap_or_default();
        let of_generation = kip_snapshot::path_of(directory, generation);
        let images = Images::read(&of_generation)?;
        let patches = if known.is_empty() { random::find(&of_generation, &images, fills)? } else { known };
        let notes = if patches.is_empty() { random::suspects(&images)? } else { Vec::new() };
        Ok(InspectedGeneration { barred: bars_criu(&images)?, patches, notes })
    }
}
