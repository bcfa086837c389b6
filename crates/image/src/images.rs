//! Names of images and what is where on disk: [`ImageStore`].

use crate::content::OciConfig;
use crate::digest::{Digest, Hasher};
use crate::error::ImageError;
use oci_client::Reference;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::{OwnedRwLockReadGuard, RwLock};

/// Least digits of a digest that stand for it.
const SHORTEST: usize = 6;

/// A name and what it means.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRecord {
    /// The name, complete: host, repository, tag.
    pub reference: String,
    /// Of its manifest, or of its configuration where it had none.
    pub digest: Digest,
    /// Of its configuration.
    pub id: Digest,
    /// Its layers by the digest of what they are unpacked from, lowest first; maybe with one of
    /// ours on top, see [`crate::parents`].
    pub layers: Vec<Digest>,
    /// When it came, milliseconds since the epoch.
    pub at_ms: u64,
    /// Where it came from.
    pub source: String,
}

/// What is known of a layer that is here.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct LayerRecord {
    pub(crate) bytes: u64,
    pub(crate) entries: u64,
    #[serde(default)]
    pub(crate) left_out: Vec<String>,
    /// Directories of which it does not say how they are.
    #[serde(default)]
    pub(crate) implied: BTreeSet<PathBuf>,
}

/// As long as it is there nothing is removed.
#[derive(Debug)]
pub struct InUse(#[allow(dead_code, reason = "held, never looked at")] OwnedRwLockReadGuard<()>);

/// The images of one data directory.
#[derive(Debug)]
pub struct ImageStore {
    pub(crate) dir: PathBuf,
    /// Held for reading by a task that brings or needs images, for writing by one that removes
    /// them.
    pub(crate) gate: Arc<RwLock<()>>,
    /// One at a time brings a blob.
    fetching: Mutex<HashMap<Digest, Arc<tokio::sync::Mutex<()>>>>,
}

impl ImageStore {
    /// Opens `dir`, making it, and removes what the last daemon left half done.
    ///
    /// # Errors
    /// A directory cannot be made or read.
    pub fn open(dir: &Path) -> Result<ImageStore, ImageError> {
        for name in ["blobs", "layers", "refs"] {
            let path = dir.join(name);
            fs::create_dir_all(&path).map_err(ImageError::io("create", &path))?;
            for entry in fs::read_dir(&path).map_err(ImageError::io("read", &path))?.flatten() {
                let left = entry.path();
                if left.extension().is_some_and(|e| e == "new" || e == "gone") {
                    let removed = if left.is_dir() { fs::remove_dir_all(&left) } else { fs::remove_file(&left) };
                    removed.map_err(ImageError::io("remove", &left))?;
                }
            }
        }
        Ok(ImageStore { dir: dir.to_owned(), gate: Arc::default(), fetching: Mutex::default() })
    }

    /// Keeps everything that is here from being removed.
    pub async fn in_use(&self) -> InUse {
        InUse(Arc::clone(&self.gate).read_owned().await)
    }

    /// All names, sorted. One that cannot be read is passed over, with a line in the log.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn list(&self) -> Result<Vec<ImageRecord>, ImageError> {
        let dir = self.dir.join("refs");
        let mut all = Vec::new();
        for entry in fs::read_dir(&dir).map_err(ImageError::io("read", &dir))?.flatten() {
            let path = entry.path();
            if path.extension().is_none_or(|e| e != "json") {
                continue;
            }
            match fs::read(&path).and_then(|text| Ok(serde_json::from_slice::<ImageRecord>(&text)?)) {
                Ok(record) => all.push(record),
                Err(error) => tracing::warn!(path = %path.display(), %error, "an image's name cannot be read"),
            }
        }
        all.sort_by(|a, b| a.reference.cmp(&b.reference));
        Ok(all)
    }

    /// The image of that name, id or digest, or the beginning of one.
    ///
    /// # Errors
    /// There is none, or there are several.
    pub fn find(&self, text: &str) -> Result<ImageRecord, ImageError> {
        let all = self.list()?;
        let full = full_name(text).ok();
        if let Some(found) = all.iter().find(|r| r.reference == text || Some(&r.reference) == full.as_ref()) {
            return Ok(found.clone());
        }
        let hex = text.strip_prefix("sha256:").unwrap_or(text);
        if hex.len() >= SHORTEST && hex.bytes().all(|b| b.is_ascii_hexdigit()) {
            let of = |r: &&ImageRecord| r.id.hex().starts_with(hex) || r.digest.hex().starts_with(hex);
            let fits: Vec<&ImageRecord> = all.iter().filter(of).collect();
            let ids: BTreeSet<&Digest> = fits.iter().map(|r| &r.id).collect();
            if ids.len() > 1 {
                return Err(ImageError::Ambiguous { reference: text.to_owned(), many: ids.len() });
            }
            if let Some(found) = fits.first() {
                return Ok((*found).clone());
            }
        }
        let some: Vec<&str> = all.iter().take(3).map(|r| r.reference.as_str()).collect();
        let known = if some.is_empty() { String::new() } else { format!(" (here are {})", some.join(", ")) };
        Err(ImageError::Unknown { reference: text.to_owned(), known })
    }

    /// An image's configuration.
    ///
    /// # Errors
    /// It cannot be read, or is not what was stored.
    pub fn config(&self, record: &ImageRecord) -> Result<OciConfig, ImageError> {
        OciConfig::read(&record.reference, &self.read_blob("the configuration", &record.reference, &record.id)?)
    }

    /// Those of `layers` that are not here.
    pub fn missing(&self, layers: &[Digest]) -> Vec<Digest> {
        layers.iter().filter(|layer| !self.layer_dir(layer).is_dir()).cloned().collect()
    }

    /// Where layers are unpacked, topmost first, as an overlay takes them: each once, where it is
    /// topmost, for there it hides all that it says below.
    pub fn layer_dirs(&self, layers: &[Digest]) -> Vec<PathBuf> {
        let mut seen = BTreeSet::new();
        layers.iter().rev().filter(|l| seen.insert(*l)).map(|l| self.layer_dir(l).join("files")).collect()
    }

    pub(crate) fn layer_dir(&self, layer: &Digest) -> PathBuf {
        self.dir.join("layers").join(layer.hex())
    }

    /// Contents of a layer's files and what of it was left out; none where it is not here.
    pub fn layer(&self, layer: &Digest) -> Option<(u64, Vec<String>)> {
        self.layer_record(layer).ok().map(|record| (record.bytes, record.left_out))
    }

    pub(crate) fn layer_record(&self, layer: &Digest) -> Result<LayerRecord, ImageError> {
        let path = self.layer_dir(layer).join("layer.json");
        let read = fs::read(&path).and_then(|text| Ok(serde_json::from_slice(&text)?));
        read.map_err(ImageError::io("read", &path))
    }

    /// What an image's layers take, each once; bytes.
    pub fn bytes(&self, layers: &[Digest]) -> u64 {
        let each: BTreeSet<&Digest> = layers.iter().collect();
        each.into_iter().filter_map(|layer| self.layer(layer)).map(|(bytes, _)| bytes).sum()
    }

    pub(crate) fn blob(&self, digest: &Digest) -> PathBuf {
        self.dir.join("blobs").join(digest.hex())
    }

    /// What has come of a layer's blob.
    pub(crate) fn part(&self, digest: &Digest) -> PathBuf {
        self.dir.join("blobs").join(format!("{}.part", digest.hex()))
    }

    /// The lock of that blob: only the task that holds it brings the blob.
    pub(crate) fn lock_of(&self, blob: &Digest) -> Arc<tokio::sync::Mutex<()>> {
        let mut fetching = self.fetching.lock();
        fetching.retain(|_, lock| Arc::strong_count(lock) > 1);
        Arc::clone(fetching.entry(blob.clone()).or_default())
    }

    fn read_blob(&self, what: &str, reference: &str, digest: &Digest) -> Result<Vec<u8>, ImageError> {
        let path = self.blob(digest);
        let mut bytes = Vec::new();
        let read = File::open(&path).and_then(|file| file.take(crate::content::MOST_JSON).read_to_end(&mut bytes));
        read.map_err(ImageError::io("read", &path))?;
        let found = Digest::of(&bytes);
        if found != *digest {
            return Err(ImageError::Damaged {
                what: what.to_owned(),
                reference: reference.to_owned(),
                expected: digest.clone(),
                found,
            });
        }
        Ok(bytes)
    }

    /// Keeps a manifest or configuration.
    pub(crate) fn write_blob(&self, bytes: &[u8]) -> Result<(), ImageError> {
        write_whole(&self.blob(&Digest::of(bytes)), bytes)
    }

    /// Gives a name its meaning; what it meant before it means no more.
    pub(crate) fn write_ref(&self, record: &ImageRecord) -> Result<(), ImageError> {
        let text = serde_json::to_vec_pretty(record).expect("it is plain data");
        write_whole(&self.ref_file(&record.reference), &text)
    }

    pub(crate) fn ref_file(&self, reference: &str) -> PathBuf {
        let mut hasher = Hasher::default();
        hasher.update(reference.as_bytes());
        self.dir.join("refs").join(format!("{}.json", hasher.finish().hex()))
    }
}

/// Host, repository and tag or digest of what a person wrote: `redis` is
/// `docker.io/library/redis:latest`.
///
/// # Errors
/// It cannot be a name.
pub(crate) fn full_name(text: &str) -> Result<String, ImageError> {
    Ok(parse_name(text)?.whole())
}

pub(crate) fn parse_name(text: &str) -> Result<Reference, ImageError> {
    text.parse().map_err(|e: oci_client::ParseError| ImageError::Reference {
        reference: text.to_owned(),
        why: format!("{e}; write [HOST[:PORT]/]NAME[:TAG] in small letters"),
    })
}

/// Temporary name, sync, rename, sync of the directory.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), ImageError> {
    static TURN: AtomicU64 = AtomicU64::new(0);
    // Two may write the same.
    let name = path.file_stem().expect("it has a name").to_string_lossy();
    let fresh = path.with_file_name(format!("{name}-{}.new", TURN.fetch_add(1, Ordering::Relaxed)));
    let written = (|| {
        let mut file = File::create(&fresh)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&fresh, path)?;
        sync_parent(path)
    })();
    written.map_err(|source| {
        let _ = fs::remove_file(&fresh);
        ImageError::Io { action: "write", path: path.to_owned(), source }
    })
}

pub(crate) fn sync_parent(path: &Path) -> io::Result<()> {
    File::open(path.parent().expect("it is in a directory of ours"))?.sync_all()
}
