//! One layer: its bytes checked, unpacked, named.

use crate::digest::{Digest, Hasher};
use crate::error::ImageError;
use crate::images::{ImageStore, LayerRecord, sync_parent};
use kip_sandbox::archive::{ArchiveLimits, PackedArchive, UnpackError, Unpacked, unpack_layer};
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

/// A directory that goes away unless it has been renamed.
struct Fresh(PathBuf);

impl Drop for Fresh {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl ImageStore {
    /// Unpacks a layer unless it is here already. Two at the same time are no harm.
    ///
    /// # Errors
    /// Nothing of it is here then.
    pub(crate) fn install(
        &self,
        reference: &str,
        layer: &Digest,
        packed: PackedArchive<'_, impl Read>,
    ) -> Result<(), ImageError> {
        static TURN: AtomicU64 = AtomicU64::new(0);
        let place = self.layer_dir(layer);
        if place.is_dir() {
            return Ok(());
        }
        let turn = TURN.fetch_add(1, Ordering::Relaxed);
        let fresh = Fresh(place.with_file_name(format!("{}-{turn}.new", layer.hex())));
        fs::create_dir(&fresh.0).map_err(ImageError::io("create", &fresh.0))?;
        let mut hasher = Hasher::default();
        let files = fresh.0.join("files");
        let unpacked = unpack_layer(packed, &files, &ArchiveLimits::default(), &mut |bytes| hasher.update(bytes));
        let unpacked = unpacked.map_err(|e| match e {
            // The name of the temporary directory tells the user nothing.
            UnpackError::Destination { source, .. } => {
                ImageError::layer(layer, reference, UnpackError::Destination { path: place.clone(), source })
            }
            other => ImageError::layer(layer, reference, other),
        })?;
        let found = hasher.finish();
        if found != *layer {
            let what = "the content of a layer".to_owned();
            return Err(ImageError::Damaged { what, reference: reference.to_owned(), expected: layer.clone(), found });
        }
        let Unpacked { bytes, entries, left_out, implied } = unpacked;
        let record = LayerRecord { bytes, entries, left_out, implied };
        let text = serde_json::to_vec(&record).expect("it is plain data");
        let named = (|| {
            File::create(fresh.0.join("layer.json"))?.write_all(&text)?;
            // Some thousand small files: one sync for all.
            rustix::fs::syncfs(File::open(&fresh.0)?)?;
            match rustix::fs::renameat_with(CWD, &fresh.0, CWD, &place, RenameFlags::NOREPLACE) {
                // Another task was faster with the same layer.
                Err(Errno::EXIST) => Ok(()),
                done => done.map_err(std::io::Error::from),
            }?;
            sync_parent(&place)
        })();
        named.map_err(ImageError::io("write", &place))
    }
}
