//! A generation from a file that an export made, into the store: its packs, its front, then a head
//! by which the proc runs nowhere and is free to adopt.
//!
//! Everything is authenticated before it is stored, and read back. Nothing that lives is replaced.
//! It holds the lease of collection, for objects that it refers to may be candidates. A crash
//! leaves objects that no head leads to, and a lease that ends by itself.

use crate::collect::CollectError;
use crate::find::{Local, absolute};
use crate::upload::{UploadError, store_pack};
use crate::{Archive, HeadFailure};
use bytes::Bytes;
use kip_archive::front::read::{FrontEvent, FrontReader};
use kip_archive::gc::GRACE_MS;
use kip_archive::head::{Head, HeadError, HeadState};
use kip_archive::ids::{PackId, ProcId};
use kip_archive::names::FrontRef;
use kip_archive::pack::{Finished, PACK_MAX, PackReader, PackRef};
use kip_archive::seal::UnsealError;
use kip_store::{CheckSwapsError, PutError, StoreFailure};
use kip_types::ProcName;
use kip_types::api::{CarriedView, Code, ImportRequest, Refusal};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;

/// Most bytes of a head in a file.
const HEAD_MAX: u64 = 2 << 20;
/// Bytes of a front that are read at once.
const PIECE: usize = 1 << 20;

/// Nothing leads to what was stored, if anything was.
#[allow(missing_docs, reason = "the text of each is what it means")]
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("cannot read {path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path} is no export of Kip's: {what}")]
    NotOurs { path: PathBuf, what: String },
    #[error("{path}: its {entry} cannot be opened")]
    Open {
        path: PathBuf,
        entry: String,
        #[source]
        source: UnsealError,
    },
    #[error("{path}: its head cannot be opened")]
    SealedHead {
        path: PathBuf,
        #[source]
        source: HeadError,
    },
    #[error(transparent)]
    Unfit(#[from] CheckSwapsError),
    #[error(transparent)]
    Collection(#[from] CollectError),
    #[error(transparent)]
    Store(#[from] StoreFailure),
    #[error(transparent)]
    Put(#[from] PutError),
    #[error(transparent)]
    Upload(#[from] UploadError),
    #[error(transparent)]
    Head(#[from] HeadFailure),
}

/// The file, while it is read.
struct Export<'a> {
    path: PathBuf,
    entries: tar::Entries<'a, File>,
}

impl<'a> Export<'a> {
    fn not_ours(&self, what: impl Into<String>) -> ImportError {
        ImportError::NotOurs { path: self.path.clone(), what: what.into() }
    }

    fn failed(&self, source: io::Error) -> ImportError {
        match source.kind() {
            // The reader of tars says so of what is none, and of what ends too early.
            io::ErrorKind::Other | io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => {
                self.not_ours(source.to_string())
            }
            _ => ImportError::Io { path: self.path.clone(), source },
        }
    }

    /// The next file in it and its name; none at the end.
    fn next(&mut self) -> Result<Option<(String, tar::Entry<'a, File>)>, ImportError> {
        let Some(entry) = self.entries.next() else { return Ok(None) };
        let entry = entry.map_err(|e| self.failed(e))?;
        let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        if entry.header().entry_type() != tar::EntryType::Regular {
            return Err(self.not_ours(format!("{name} is no plain file")));
        }
        Ok(Some((name, entry)))
    }

    /// All of a file in it.
    fn whole(&self, name: &str, entry: &mut tar::Entry<'_, File>, most: u64) -> Result<Vec<u8>, ImportError> {
        if entry.size() > most {
            return Err(self.not_ours(format!("{name} has {} bytes, {most} are the most", entry.size())));
        }
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).map_err(|e| self.failed(e))?;
        if bytes.len() as u64 != entry.size() {
            return Err(self.not_ours(format!("it ends within {name}")));
        }
        Ok(bytes)
    }

    fn opened(&self, entry: &str) -> impl FnOnce(UnsealError) -> ImportError + use<> {
        let (path, entry) = (self.path.clone(), entry.to_owned());
        move |source| ImportError::Open { path, entry, source }
    }
}

impl Archive {
    /// Imports what a file holds. Blocking; not on a thread of the runtime.
    pub fn import(
        &self,
        request: &ImportRequest,
        local: &[Local],
        now_ms: fn() -> u64,
    ) -> Result<CarriedView, ImportError> {
        let path = absolute(&request.file)?.to_owned();
        let file = File::open(&path).map_err(|source| ImportError::Io { path: path.clone(), source })?;
        let mut tar = tar::Archive::new(file);
        let entries = tar.entries().map_err(|source| ImportError::Io { path: path.clone(), source })?;
        let mut export = Export { path, entries };
        let (proc, sealed) = self.sealed_head(&mut export)?;
        let front = sealed.current.ok_or_else(|| export.not_ours("its head leads to nothing"))?;
        let name = request.name.clone().unwrap_or(sealed.name);
        self.runtime.block_on(self.fit.get_or_try_init(|| self.store.check_swaps()))?;
        let _nobody_collects = self.collecting.try_lock().map_err(|_| CollectError::UnderWay)?;
        let (leased, version) = self.runtime.block_on(self.lease(GRACE_MS, now_ms))?;
        let stored = self.runtime.block_on(self.may_import(proc, &name, local)).and_then(|()| {
            let stored = self.import_objects(&mut export, proc, front)?;
            // No data directory has collected since, and none will before the head is there.
            let version = self.runtime.block_on(
                self.note(&leased.begin(self.owner, now_ms(), GRACE_MS).map_err(CollectError::from)?, Some(&version)),
            )?;
            let follow =
                |found: Option<&Head>| Ok(Head::imported(found, proc, name.clone(), self.realm.clone(), front)?);
            self.runtime.block_on(self.change(proc, None, follow))?;
            Ok((stored, version))
        });
        let last = stored.as_ref().map_or(&version, |(_, renewed)| renewed);
        // If that fails the lease ends by itself.
        let _ = self.runtime.block_on(self.note(&leased.end(now_ms()), Some(last)));
        let ((packs, bytes), _) = stored?;
        let (proc, generation) = (proc.to_string(), front.generation);
        Ok(CarriedView { name, proc, generation, packs, bytes, file: request.file.clone() })
    }

    /// Whose it is and which front: opened with the realm's keys.
    fn sealed_head(&self, export: &mut Export<'_>) -> Result<(ProcId, Head), ImportError> {
        let first = export.next()?;
        let (name, mut entry) = first.ok_or_else(|| export.not_ours("it is empty"))?;
        let proc = name.strip_suffix("/head").and_then(|id| id.parse::<ProcId>().ok());
        let proc = proc.ok_or_else(|| export.not_ours(format!("it begins with {name:.60}, not with a head")))?;
        let bytes = export.whole(&name, &mut entry, HEAD_MAX)?;
        let path = export.path.clone();
        let head = Head::open(&self.keys(), proc, None, &bytes);
        Ok((proc, head.map_err(|source| ImportError::SealedHead { path, source })?))
    }

    /// Whether neither the proc nor its name is there.
    async fn may_import(&self, proc: ProcId, name: &ProcName, local: &[Local]) -> Result<(), ImportError> {
        let found = self.head(proc).await?;
        if let Some((head, _)) = &found
            && head.state != HeadState::Removed
        {
            let message = format!("proc {proc} is in the store already, as {}: it is not replaced", head.name);
            return Err(Refusal::new(Code::Taken, message).into());
        }
        let survey = self.survey(&self.store).await?;
        let heads = survey.heads.values().flatten().filter(|head| head.state != HeadState::Removed);
        let mut names = heads.map(|head| &head.name).chain(local.iter().map(|one| &one.name));
        if names.any(|taken| taken == name) {
            let message =
                format!("a proc named {name} is here or in the store already: choose another name with --name");
            return Err(Refusal::new(Code::Taken, message).into());
        }
        Ok(())
    }

    /// Stores the front and those of its packs that are not there. How many it leads to, and the
    /// bytes that were stored.
    fn import_objects(
        &self,
        export: &mut Export<'_>,
        proc: ProcId,
        front: FrontRef,
    ) -> Result<(u64, u64), ImportError> {
        let second = export.next()?;
        let (name, mut entry) = second.ok_or_else(|| export.not_ours("it has no front"))?;
        if name != format!("{proc}/front") {
            return Err(export.not_ours(format!("{name:.100} is where the front should be")));
        }
        let (packs, mut bytes) = self.import_front(export, &mut entry, proc, front)?;
        let there = self.runtime.block_on(self.packs_there())?;
        let mut missing: BTreeMap<PackId, PackRef> = packs.iter().map(|pack| (pack.id, *pack)).collect();
        while let Some((name, mut entry)) = export.next()? {
            let id = name.strip_prefix("packs/").and_then(|id| id.parse::<PackId>().ok());
            let pack = id.and_then(|id| missing.remove(&id));
            let pack = pack.ok_or_else(|| export.not_ours(format!("nothing leads to {name:.100}")))?;
            let content = export.whole(&name, &mut entry, PACK_MAX as u64)?;
            PackReader::new(&self.keys()).check(pack.id, &content, |_, _| {}).map_err(export.opened(&name))?;
            if there.contains(&pack.id) {
                continue;
            }
            bytes += content.len() as u64;
            let (store, key) = (self.store.clone(), self.pack_key(pack.id));
            let finished = Finished { pack, bytes: content };
            self.runtime.block_on(store_pack(store, key, self.keys(), finished))?;
        }
        match missing.keys().next() {
            Some(pack) => Err(export.not_ours(format!("pack {pack} is missing"))),
            None => Ok((packs.len() as u64, bytes)),
        }
    }

    /// Stores the front, once all of it is authentic. The packs that it leads to, and its bytes.
    fn import_front(
        &self,
        export: &Export<'_>,
        entry: &mut tar::Entry<'_, File>,
        proc: ProcId,
        front: FrontRef,
    ) -> Result<(BTreeSet<PackRef>, u64), ImportError> {
        let mut reader = FrontReader::new(self.keys(), proc, front);
        // One that is dropped before its end leaves nothing.
        let mut writer = self.store.writer(&self.front_key(proc, front));
        let (mut packs, mut total) = (BTreeSet::new(), 0);
        let mut piece = vec![0; PIECE];
        loop {
            let count = entry.read(&mut piece).map_err(|e| export.failed(e))?;
            if count == 0 {
                break;
            }
            total += count as u64;
            for event in reader.push(&piece[..count]).map_err(export.opened("front"))? {
                match event {
                    FrontEvent::PageTable(table) => packs.extend(table.packs()),
                    FrontEvent::Files(files) => packs.extend(files.packs()),
                    _ => {}
                }
            }
            self.runtime.block_on(writer.write(Bytes::copy_from_slice(&piece[..count])))?;
        }
        reader.finish().map_err(export.opened("front"))?;
        self.runtime.block_on(writer.finish())?;
        self.runtime.block_on(self.read_front_back(&self.keys(), proc, front))?;
        Ok((packs, total))
    }
}
