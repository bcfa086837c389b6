//! Verifying that generations are still what was sealed: fronts whole, and every pack that they
//! lead to. Only reads.
//!
//! Each object is read once, however many generations lead to it. What is damaged or missing is
//! told by one line; a store that does not answer ends it, for that says nothing of the objects.

use crate::Archive;
use crate::blocking;
use crate::find::{Local, StoredGeneration, ToVerify};
use crate::read_front::FrontReadError;
use futures_util::{StreamExt as _, TryStreamExt as _};
use kip_archive::ids::ProcId;
use kip_archive::names::FrontRef;
use kip_archive::pack::{BlockRef, PACK_MAX, PackReader, PackRef};
use kip_store::{GetError, StoreFailure};
use kip_types::Generation;
use kip_types::api::{Code, Refusal, Verified};
use kip_types::chain;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use tokio::sync::mpsc;

/// Fronts, and packs, that are read at once. Each pack is held in memory, up to 16 MiB.
const AT_ONCE: usize = 4;

/// Where what is found goes.
pub type Findings = mpsc::Sender<Result<Verified, Refusal>>;

/// The client does not listen any more, or the store does not answer.
enum Ended {
    Unheard,
    Store(StoreFailure),
}

/// What has been reported so far.
struct Report {
    out: Findings,
    done: u64,
    of: u64,
    bytes: u64,
    damaged: u64,
}

impl Report {
    async fn send(&self, item: Verified) -> Result<(), Ended> {
        self.out.send(Ok(item)).await.map_err(|_| Ended::Unheard)
    }

    /// One object was checked.
    async fn checked(&mut self, object: &str, label: &str, what: Result<u64, String>) -> Result<(), Ended> {
        self.done += 1;
        match what {
            Ok(bytes) => self.bytes += bytes,
            Err(what) => {
                self.damaged += 1;
                let damage = Verified::Damage { object: object.to_owned(), what, snapshot: label.to_owned() };
                self.send(damage).await?;
            }
        }
        self.send(Verified::Progress { done: self.done, of: self.of, bytes: self.bytes }).await
    }
}

/// What generations refer to in one pack, and the first of them.
type Needed = BTreeMap<PackRef, (BTreeSet<BlockRef>, String)>;

/// Verifies generations in the store, if there is one, and on the local disk, and reports what it
/// finds.
pub async fn verify(archive: Option<&Archive>, what: ToVerify, out: Findings) {
    let ToVerify { stored, unread, local } = what;
    let generations = (stored.len() + local.len()) as u64;
    let of = generations + unread.len() as u64;
    let mut report = Report { out, done: 0, of, bytes: 0, damaged: 0 };
    let verified = async {
        for (object, why) in unread {
            report.checked(&object, "", Err(why)).await?;
        }
        if let Some(archive) = archive {
            let needed = archive.verify_fronts(stored, &mut report).await?;
            report.of += needed.len() as u64;
            archive.verify_packs(needed, &mut report).await?;
        }
        for (one, generation) in local {
            verify_local(one, generation, &mut report).await?;
        }
        let (objects, bytes, damaged) = (report.done, report.bytes, report.damaged);
        report.send(Verified::End { generations, objects, bytes, damaged }).await
    };
    if let Err(Ended::Store(failure)) = verified.await {
        let refusal = Refusal::new(Code::Failed, format!("not everything was verified: {}", chain(&failure)));
        let _ = report.out.send(Err(refusal)).await;
    }
}

impl Archive {
    async fn verify_fronts(&self, found: Vec<StoredGeneration>, report: &mut Report) -> Result<Needed, Ended> {
        let mut needed = Needed::new();
        let read = |one: StoredGeneration| async move {
            let whole = self.whole_front(one.head.proc, one.front, |_| ()).await;
            (one, whole)
        };
        let mut reading = futures_util::stream::iter(found).map(read).buffer_unordered(AT_ONCE);
        while let Some((one, whole)) = reading.next().await {
            let key = self.front_key(one.head.proc, one.front);
            let what = match whole {
                Err(FrontReadError::Get(GetError::Store(failure))) => return Err(Ended::Store(failure)),
                Err(e) => Err(chain(&e)),
                Ok(whole) => {
                    for block in whole.blocks() {
                        let entry = needed.entry(block.pack).or_insert_with(|| (BTreeSet::new(), one.label()));
                        entry.0.insert(*block);
                    }
                    Ok(whole.bytes)
                }
            };
            report.checked(key.as_str(), &one.label(), what).await?;
        }
        Ok(needed)
    }

    /// Whether a generation is as it was stored, all of it. An error is the store's, and says
    /// nothing of it.
    pub async fn is_whole(&self, proc: ProcId, front: FrontRef) -> Result<bool, StoreFailure> {
        let whole = match self.whole_front(proc, front, |_| ()).await {
            Err(FrontReadError::Get(GetError::Store(failure))) => return Err(failure),
            Err(_) => return Ok(false),
            Ok(whole) => whole,
        };
        let mut needed: BTreeMap<PackRef, BTreeSet<BlockRef>> = BTreeMap::new();
        for block in whole.blocks() {
            needed.entry(block.pack).or_default().insert(*block);
        }
        for (pack, blocks) in needed {
            match self.verify_pack(pack, blocks).await {
                Err(GetError::Store(failure)) => return Err(failure),
                Ok(Ok(_)) => {}
                Ok(Err(_)) | Err(_) => return Ok(false),
            }
        }
        Ok(true)
    }

    async fn verify_packs(&self, needed: Needed, report: &mut Report) -> Result<(), Ended> {
        let read = |(pack, (blocks, label)): (PackRef, (BTreeSet<BlockRef>, String))| async move {
            (pack, label, self.verify_pack(pack, blocks).await)
        };
        let mut reading = futures_util::stream::iter(needed).map(read).buffer_unordered(AT_ONCE);
        while let Some((pack, label, what)) = reading.next().await {
            let what = match what {
                Ok(what) => what,
                Err(GetError::Store(failure)) => return Err(Ended::Store(failure)),
                Err(e) => Err(chain(&e)),
            };
            report.checked(self.pack_key(pack.id).as_str(), &label, what).await?;
        }
        Ok(())
    }

    /// Its bytes, or what is wrong with it.
    async fn verify_pack(&self, pack: PackRef, blocks: BTreeSet<BlockRef>) -> Result<Result<u64, String>, GetError> {
        let bytes = match self.whole_pack(pack).await? {
            Ok(bytes) => bytes,
            Err(what) => return Ok(Err(what)),
        };
        let keys = self.keys();
        let check = move || {
            let mut listed = HashSet::new();
            let checked = PackReader::new(&keys).check(pack.id, &bytes, |block, _| {
                listed.insert(block);
            });
            checked.map_err(|e| chain(&e))?;
            match blocks.iter().find(|block| !listed.contains(block)) {
                Some(block) => {
                    Err(format!("the pack has no block at byte {}, although a generation refers to one", block.offset))
                }
                None => Ok(bytes.len() as u64),
            }
        };
        Ok(blocking(check).await)
    }

    /// All of a pack, or what is wrong with it.
    pub(crate) async fn whole_pack(&self, pack: PackRef) -> Result<Result<Vec<u8>, String>, GetError> {
        let object = self.store.get(&self.pack_key(pack.id)).await?;
        if object.size() > PACK_MAX as u64 {
            return Ok(Err(format!("it has {} bytes, a pack has {PACK_MAX} at most", object.size())));
        }
        let mut bytes = Vec::with_capacity(object.size() as usize);
        let mut object = object;
        while let Some(piece) = object.try_next().await? {
            bytes.extend_from_slice(&piece);
        }
        Ok(Ok(bytes))
    }
}

async fn verify_local(one: Local, generation: Generation, report: &mut Report) -> Result<(), Ended> {
    let path = kip_snapshot::path_of(&one.dir, generation);
    let checked = path.clone();
    let what = blocking(move || {
        let manifest = kip_snapshot::open::<serde_json::Value>(&checked).map_err(|e| chain(&e))?;
        kip_snapshot::verify(&checked, &manifest.parts).map_err(|e| chain(&e))?;
        Ok(manifest.parts.iter().map(|part| part.size).sum())
    });
    let what = match what.await {
        // It was replaced by a newer one meanwhile.
        Err(_) if !path.exists() => Ok(0),
        what => what,
    };
    report.checked(&path.display().to_string(), &format!("{}@{generation}", one.name), what).await
}
