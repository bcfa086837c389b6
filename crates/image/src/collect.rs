//! What may go: names by request, and what no name and no proc leads to.

use crate::digest::Digest;
use crate::error::ImageError;
use crate::images::{ImageRecord, ImageStore};
use kip_types::image::ImagesRemoved;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

impl ImageStore {
    /// Removes a name, and with it the layers that neither another name nor `used` leads to. An id
    /// stands for all its names.
    ///
    /// # Errors
    /// There is no such name; images are being pulled; a file cannot be removed.
    pub fn remove(&self, text: &str, used: &BTreeSet<Digest>) -> Result<ImagesRemoved, ImageError> {
        let _alone = self.gate.try_write().map_err(|_| ImageError::Busy)?;
        let found = self.find(text)?;
        let by_name = found.reference == text || crate::images::full_name(text).is_ok_and(|n| n == found.reference);
        let gone = |r: &ImageRecord| if by_name { r.reference == found.reference } else { r.id == found.id };
        self.sweep(&gone, used, false, false)
    }

    /// Removes what no name and nothing in `used` leads to: layers, partial blobs, manifests. With
    /// `all` names that nothing in `used` belongs to go as well.
    ///
    /// # Errors
    /// Images are being pulled; a file cannot be removed.
    pub fn collect(&self, used: &BTreeSet<Digest>, all: bool, dry_run: bool) -> Result<ImagesRemoved, ImageError> {
        let _alone = self.gate.try_write().map_err(|_| ImageError::Busy)?;
        // Procs are known by their layers: an image is used if all of its layers are.
        let unused = |r: &ImageRecord| all && !r.layers.iter().all(|layer| used.contains(layer));
        self.sweep(&unused, used, dry_run, true)
    }

    fn sweep(
        &self,
        gone: &dyn Fn(&ImageRecord) -> bool,
        used: &BTreeSet<Digest>,
        dry_run: bool,
        partial: bool,
    ) -> Result<ImagesRemoved, ImageError> {
        let (going, staying): (Vec<_>, Vec<_>) = self.list()?.into_iter().partition(gone);
        let mut removed = ImagesRemoved::default();
        for record in going {
            if !dry_run {
                let path = self.ref_file(&record.reference);
                fs::remove_file(&path).map_err(ImageError::io("remove", &path))?;
            }
            removed.references.push(record.reference);
        }
        let mut needed = used.clone();
        needed.extend(staying.iter().flat_map(|r| r.layers.iter().cloned()));
        for (hex, path) in entries(&self.dir.join("layers"))? {
            let Ok(layer) = format!("sha256:{hex}").parse::<Digest>() else { continue };
            if needed.contains(&layer) {
                continue;
            }
            removed.bytes += self.layer(&layer).map_or(0, |(bytes, _)| bytes);
            removed.layers.push(layer.to_string());
            if !dry_run {
                // First its name: half of a layer must not look like one.
                let gone = path.with_extension("gone");
                fs::rename(&path, &gone).map_err(ImageError::io("remove", &path))?;
                fs::remove_dir_all(&gone).map_err(ImageError::io("remove", &gone))?;
            }
        }
        let blobs: BTreeSet<&str> = staying.iter().flat_map(|r| [r.id.hex(), r.digest.hex()]).collect();
        for (name, path) in entries(&self.dir.join("blobs"))? {
            let part = name.ends_with(".part");
            if blobs.contains(name.as_str()) || (part && !partial) {
                continue;
            }
            removed.bytes += fs::metadata(&path).map_or(0, |m| m.len());
            if !dry_run {
                fs::remove_file(&path).map_err(ImageError::io("remove", &path))?;
            }
        }
        removed.layers.sort();
        Ok(removed)
    }
}

fn entries(dir: &Path) -> Result<Vec<(String, std::path::PathBuf)>, ImageError> {
    let read = fs::read_dir(dir).map_err(ImageError::io("read", dir))?;
    Ok(read.flatten().map(|e| (e.file_name().to_string_lossy().into_owned(), e.path())).collect())
}
