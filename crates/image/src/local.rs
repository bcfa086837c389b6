//! Images in files: an OCI layout (a directory or a tar of one) and what `docker save` writes.
//! Reads, never writes.

use crate::content::{self, Blob, Descriptor, MOST_JSON, ResolvedImage, Top};
use crate::digest::{Digest, Hasher};
use crate::error::ImageError;
use crate::images::full_name;
use serde::Deserialize;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Component, Path, PathBuf};

/// Most names that a message lists.
const NAMES: usize = 10;

/// The files that an image is in.
#[derive(Debug)]
pub(crate) struct Local {
    path: PathBuf,
    /// Of a tar: where each file begins and how long it is.
    index: Option<HashMap<PathBuf, (u64, u64)>>,
    /// What `docker save` writes, rather than a layout.
    saved: bool,
    tag: Option<String>,
    /// The source, as a person wrote it.
    reference: String,
}

/// An element of `manifest.json`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Saved {
    config: PathBuf,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<PathBuf>,
}

#[derive(Debug, Deserialize)]
struct Index {
    manifests: Vec<Descriptor>,
}

impl Local {
    /// Opens it, and reads the table of contents of a tar.
    pub(crate) fn open(path: &Path, tag: Option<&str>, saved: bool, reference: String) -> Result<Local, ImageError> {
        let mut local = Local { path: path.to_owned(), index: None, saved, tag: tag.map(str::to_owned), reference };
        if path.is_dir() {
            return Ok(local);
        }
        let mut file = File::open(path).map_err(ImageError::source("open", path))?;
        let mut magic = [0; 4];
        let packed =
            file.read_exact(&mut magic).is_ok() && (magic[..2] == [0x1f, 0x8b] || magic == [0x28, 0xb5, 0x2f, 0xfd]);
        if packed {
            return Err(local.no_image("the archive is compressed as a whole: unpack it first".to_owned()));
        }
        file.rewind().map_err(ImageError::source("read", path))?;
        local.index = Some(index(file).map_err(ImageError::source("read the archive", path))?);
        Ok(local)
    }

    fn no_image(&self, why: String) -> ImageError {
        ImageError::NoImage { reference: self.reference.clone(), why }
    }

    fn not_found(&self, what: &str, has: &[String]) -> ImageError {
        let some = has.iter().take(NAMES).cloned().collect::<Vec<_>>().join(", ");
        let hint = if has.is_empty() { String::new() } else { format!("; it has {some}: name one after a colon") };
        ImageError::NotFound { place: self.path.display().to_string(), reference: what.to_owned(), hint }
    }

    /// A file of it, and its size.
    pub(crate) fn file(&self, name: &Path) -> Result<(Box<dyn Read + Send>, u64), ImageError> {
        let whole = self.path.join(name);
        let absent = || self.no_image(format!("{} has no {}", self.path.display(), name.display()));
        let failed = |e: io::Error| match e.kind() {
            io::ErrorKind::NotFound => absent(),
            _ => ImageError::Source { action: "read", path: whole.clone(), source: e },
        };
        let Some(index) = &self.index else {
            let name = plain(name).ok_or_else(absent)?;
            let file = File::open(self.path.join(name)).map_err(failed)?;
            let meta = file.metadata().map_err(failed)?;
            if !meta.is_file() {
                return Err(self.no_image(format!("{} is no file", whole.display())));
            }
            return Ok((Box::new(file), meta.len()));
        };
        let (at, size) = *plain(name).and_then(|name| index.get(&name)).ok_or_else(absent)?;
        let mut file = File::open(&self.path).map_err(failed)?;
        file.seek(SeekFrom::Start(at)).map_err(failed)?;
        Ok((Box::new(file.take(size)), size))
    }

    fn json(&self, name: &Path) -> Result<Vec<u8>, ImageError> {
        let (file, size) = self.file(name)?;
        if size > MOST_JSON {
            return Err(self.no_image(format!("{} has {size} bytes", name.display())));
        }
        let mut bytes = Vec::new();
        file.take(MOST_JSON).read_to_end(&mut bytes).map_err(ImageError::source("read", &self.path.join(name)))?;
        Ok(bytes)
    }

    fn parse<T: for<'a> Deserialize<'a>>(&self, name: &str) -> Result<T, ImageError> {
        let bytes = self.json(Path::new(name))?;
        serde_json::from_slice(&bytes).map_err(|e| self.no_image(format!("{name} cannot be read: {e}")))
    }

    fn blob(&self, what: &str, blob: &Descriptor) -> Result<Vec<u8>, ImageError> {
        let bytes = self.json(&path_of(&blob.digest))?;
        let found = Digest::of(&bytes);
        if found != blob.digest {
            let (what, reference) = (what.to_owned(), self.reference.clone());
            return Err(ImageError::Damaged { what, reference, expected: blob.digest.clone(), found });
        }
        Ok(bytes)
    }

    /// The image that is meant.
    pub(crate) fn find(&self) -> Result<ResolvedImage, ImageError> {
        if self.saved { self.find_saved() } else { self.find_in_layout() }
    }

    fn find_saved(&self) -> Result<ResolvedImage, ImageError> {
        let all: Vec<Saved> = self.parse("manifest.json")?;
        let tags: Vec<String> = all.iter().flat_map(|s| s.repo_tags.clone().unwrap_or_default()).collect();
        let one = match &self.tag {
            Some(tag) => {
                let full = full_name(tag).ok();
                let is = |t: &String| t == tag || (full.is_some() && full_name(t).ok() == full);
                let has = |s: &&Saved| s.repo_tags.iter().flatten().any(is);
                all.iter().find(has).ok_or_else(|| self.not_found(tag, &tags))?
            }
            None if all.len() == 1 => &all[0],
            None => return Err(self.not_found("without a name", &tags)),
        };
        let own = self.tag.clone().or_else(|| one.repo_tags.iter().flatten().next().cloned());
        let config = self.json(&one.config)?;
        let layers = one.layers.iter().cloned().map(Blob::File).collect();
        Ok(ResolvedImage { name: own.and_then(|name| full_name(&name).ok()), top: None, config, layers })
    }

    fn find_in_layout(&self) -> Result<ResolvedImage, ImageError> {
        let index: Index = self.parse("index.json")?;
        let names = |d: &Descriptor| {
            let (whole, tag) = d.names();
            [tag, whole].into_iter().flatten().map(str::to_owned).collect::<Vec<_>>()
        };
        let all: Vec<String> = index.manifests.iter().flat_map(|d| names(d).into_iter().take(1)).collect();
        let one = match &self.tag {
            Some(tag) => {
                let fits = |d: &&Descriptor| names(d).iter().any(|n| n == tag);
                index.manifests.iter().find(fits).ok_or_else(|| self.not_found(tag, &all))?
            }
            None => match &index.manifests[..] {
                [] => return Err(self.no_image("its index is empty".to_owned())),
                [one] => one,
                // Images for several platforms may be listed without names.
                several if all.is_empty() => content::choose(&self.reference, several)?,
                _ => return Err(self.not_found("without a tag", &all)),
            },
        };
        let top = self.blob("the manifest", one)?;
        let (config, layers) = match content::read_top(&self.reference, &top)? {
            Top::Manifest { config, layers } => (config, layers),
            Top::Index(manifests) => {
                let chosen = content::choose(&self.reference, &manifests)?;
                match content::read_top(&self.reference, &self.blob("the manifest", chosen)?)? {
                    Top::Manifest { config, layers } => (config, layers),
                    Top::Index(_) => return Err(self.no_image("its index leads to an index".to_owned())),
                }
            }
        };
        let name = one.names().0.and_then(|name| full_name(name).ok());
        let config = self.blob("the configuration", &config)?;
        Ok(ResolvedImage { name, top: Some(top), config, layers: layers.into_iter().map(Blob::Named).collect() })
    }

    /// A layer's packed bytes: what they are called and they. Those that have a digest are compared
    /// with it first.
    pub(crate) fn layer(
        &self,
        blob: &Blob,
        progress: &dyn Fn(u64, u64),
    ) -> Result<(PathBuf, Box<dyn Read + Send>), ImageError> {
        let name = match blob {
            Blob::File(path) => path.clone(),
            Blob::Named(descriptor) => path_of(&descriptor.digest),
        };
        if let Blob::Named(descriptor) = blob {
            let (mut file, size) = self.file(&name)?;
            let mut hasher = Hasher::default();
            let (mut buffer, mut done) = (vec![0; 1 << 20], 0);
            loop {
                let n = file.read(&mut buffer).map_err(ImageError::source("read", &self.path.join(&name)))?;
                if n == 0 {
                    break;
                }
                hasher.update(&buffer[..n]);
                done += n as u64;
                progress(done, size);
            }
            let found = hasher.finish();
            if found != descriptor.digest {
                let (what, reference) = ("a layer".to_owned(), self.reference.clone());
                return Err(ImageError::Damaged { what, reference, expected: descriptor.digest.clone(), found });
            }
        }
        Ok((self.path.join(&name), self.file(&name)?.0))
    }
}

fn path_of(digest: &Digest) -> PathBuf {
    Path::new("blobs/sha256").join(digest.hex())
}

/// A path without dots; none for one that leads out.
fn plain(path: &Path) -> Option<PathBuf> {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(part) => plain.push(part),
            Component::CurDir => {}
            Component::ParentDir if plain.pop() => {}
            _ => return None,
        }
    }
    Some(plain)
}

/// Where in a tar its files are. Links, by which older `docker save` writes a layer once, lead to
/// them.
fn index(file: File) -> io::Result<HashMap<PathBuf, (u64, u64)>> {
    let mut archive = tar::Archive::new(BufReader::new(file));
    let (mut files, mut links) = (HashMap::new(), Vec::new());
    for entry in archive.entries_with_seek()? {
        let entry = entry?;
        let Some(name) = plain(&entry.path()?) else { continue };
        let kind = entry.header().entry_type();
        if kind.is_file() {
            files.insert(name, (entry.raw_file_position(), entry.size()));
        } else if let (true, Some(target)) = (kind.is_symlink() || kind.is_hard_link(), entry.link_name()?) {
            let from = if kind.is_symlink() { name.parent().unwrap_or(Path::new("")) } else { Path::new("") };
            links.extend(plain(&from.join(target)).map(|target| (name, target)));
        }
    }
    for (name, target) in links {
        if let Some(place) = files.get(&target).copied() {
            files.insert(name, place);
        }
    }
    Ok(files)
}
