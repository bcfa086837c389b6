//! One generation as a file, sealed as it is in the store: a tar of its head, its front and its
//! packs.
//!
//! ```text
//! PROC/head   a head of its own, as if the proc had just been left: says name, id and which front
//! PROC/front
//! packs/PACK  each that the front leads to
//! ```
//!
//! Everything is authenticated on the way. The file gets its name when it is whole and on the disk;
//! nothing is replaced. A crash leaves `.NAME.kip-export` beside it, which the next export to that
//! name writes anew.

use crate::Archive;
use crate::find::{StoredGeneration, absolute};
use crate::read_front::FrontReadError;
use kip_archive::head::{Head, HeadRefused, HeadSealError};
use kip_archive::pack::{PackReader, PackRef};
use kip_archive::seal::UnsealError;
use kip_store::GetError;
use kip_sys::publish::publish;
use kip_types::api::{CarriedView, Refusal};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// Tar's unit.
const RECORD: usize = 512;

/// There is no file.
#[allow(missing_docs, reason = "the text of each is what it means")]
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    #[error("{path} is there already: choose another name, or delete it")]
    Exists { path: PathBuf },
    #[error("cannot write {path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Head(#[from] HeadRefused),
    #[error(transparent)]
    Seal(#[from] HeadSealError),
    #[error("{object} cannot be read")]
    Front {
        object: String,
        #[source]
        source: FrontReadError,
    },
    #[error("{object} cannot be fetched")]
    Get {
        object: String,
        #[source]
        source: GetError,
    },
    #[error("{object} cannot be opened")]
    Open {
        object: String,
        #[source]
        source: UnsealError,
    },
    #[error("{object}: {what}")]
    Damaged { object: String, what: String },
}

/// A tar that grows.
struct TarFile {
    file: BufWriter<File>,
    path: PathBuf,
    /// Bytes of the entry that is being written.
    written: u64,
    /// Of which the first failure is kept, for those that are written from within a callback.
    failed: Option<io::Error>,
}

impl TarFile {
    fn begin(&mut self, name: &str, size: u64) -> io::Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_path(name)?;
        header.set_size(size);
        header.set_mode(0o600);
        header.set_entry_type(tar::EntryType::Regular);
        header.set_cksum();
        self.written = 0;
        self.file.write_all(header.as_bytes())
    }

    fn push(&mut self, bytes: &[u8]) {
        self.written += bytes.len() as u64;
        if self.failed.is_none() {
            self.failed = self.file.write_all(bytes).err();
        }
    }

    fn end(&mut self) -> io::Result<()> {
        if let Some(failed) = self.failed.take() {
            return Err(failed);
        }
        let pad = (RECORD - (self.written % RECORD as u64) as usize) % RECORD;
        self.file.write_all(&[0; RECORD][..pad])
    }

    fn add(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.begin(name, bytes.len() as u64)?;
        self.push(bytes);
        self.end()
    }

    /// Makes it durable under its name.
    fn finish(mut self, name: &Path) -> Result<(), ExportError> {
        let at = |path: &Path| {
            let path = path.to_owned();
            move |source| ExportError::Io { path, source }
        };
        self.file.write_all(&[0; 2 * RECORD]).and_then(|()| self.file.flush()).map_err(at(&self.path))?;
        publish(self.file.get_ref(), &self.path, name).map_err(|e| match e.kind() {
            io::ErrorKind::AlreadyExists => ExportError::Exists { path: name.to_owned() },
            _ => at(name)(e),
        })
    }
}

impl Archive {
    /// Writes a generation into a file. Blocking; not on a thread of the runtime.
    pub fn export(&self, found: &StoredGeneration, file: &str) -> Result<CarriedView, ExportErrorOrRefusal> {
        let path = absolute(file)?;
        if fs::symlink_metadata(path).is_ok() {
            return Err(ExportError::Exists { path: path.to_owned() }.into());
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let growing = path.with_file_name(format!(".{name}.kip-export"));
        let written = self.write_export(found, &growing, path);
        if written.is_err() {
            // What it was made for has failed.
            let _ = fs::remove_file(&growing);
        }
        let (packs, bytes) = written?;
        let (name, proc) = (found.head.name.clone(), found.head.proc.to_string());
        Ok(CarriedView { name, proc, generation: found.front.generation, packs, bytes, file: file.to_owned() })
    }

    /// How many packs, and the bytes of all objects.
    fn write_export(&self, found: &StoredGeneration, growing: &Path, path: &Path) -> Result<(u64, u64), ExportError> {
        let at = |source| ExportError::Io { path: growing.to_owned(), source };
        let opened = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(growing);
        let file = BufWriter::with_capacity(1 << 20, opened.map_err(at)?);
        let mut tar = TarFile { file, path: growing.to_owned(), written: 0, failed: None };
        let (proc, front) = (found.head.proc, found.front);
        let head = Head::imported(None, proc, found.head.name.clone(), self.realm.clone(), front)?;
        let head = head.seal(&self.keys())?;
        tar.add(&format!("{proc}/head"), &head).map_err(at)?;
        let key = self.front_key(proc, front);
        let of_front = |source: FrontReadError| ExportError::Front { object: key.as_str().to_owned(), source };
        let size = self.runtime.block_on(self.store.size(&key)).map_err(|e| of_front(e.into()))?;
        tar.begin(&format!("{proc}/front"), size).map_err(at)?;
        let whole = self.runtime.block_on(self.whole_front(proc, front, |bytes| tar.push(bytes))).map_err(of_front)?;
        if whole.bytes != size {
            return Err(of_front(UnsealError::Truncated { at: size }.into()));
        }
        tar.end().map_err(at)?;
        let packs: BTreeSet<PackRef> = whole.blocks().map(|block| block.pack).collect();
        let mut bytes = head.len() as u64 + size;
        for pack in &packs {
            bytes += self.export_pack(*pack, &mut tar)?;
        }
        tar.finish(path)?;
        Ok((packs.len() as u64, bytes))
    }

    fn export_pack(&self, pack: PackRef, tar: &mut TarFile) -> Result<u64, ExportError> {
        let object = || self.pack_key(pack.id).as_str().to_owned();
        let read = self.runtime.block_on(self.whole_pack(pack));
        let read = read.map_err(|source| ExportError::Get { object: object(), source })?;
        let bytes = read.map_err(|what| ExportError::Damaged { object: object(), what })?;
        let checked = PackReader::new(&self.keys()).check(pack.id, &bytes, |_, _| {});
        checked.map_err(|source| ExportError::Open { object: object(), source })?;
        let added = tar.add(&format!("packs/{}", pack.id), &bytes);
        added.map_err(|source| ExportError::Io { path: tar.path.clone(), source })?;
        Ok(bytes.len() as u64)
    }
}

/// What the caller asked for is wrong, or it failed.
#[allow(missing_docs, reason = "the text of each is what it means")]
#[derive(Debug, thiserror::Error)]
pub enum ExportErrorOrRefusal {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Failed(#[from] ExportError),
}
