//! Facts out of CRIU's images. Numbers of fields are those of CRIU's `images/*.proto`.

use super::{CarriedFact, Facts, FileFact, IdRange, MountFact, ThreadFacts};
use crate::image::ImageError;
use crate::images::Images;
use crate::plan::PLAN;
use crate::wire::{Malformed, Message};
use std::collections::{BTreeMap, BTreeSet};

/// `task_state` of a zombie.
const DEAD: u64 = 2;
/// `seccomp_mode`: none, a filter.
const FILTER: u64 = 2;
/// Flag of a filter that all threads of its process have.
const TSYNC: u64 = 1;
/// `fd_types` of regular files and of unix sockets.
const REG: u64 = 1;
const UNIX: u64 = 5;

/// The images cannot be judged.
#[derive(Debug, thiserror::Error)]
pub enum FactsError {
    /// An image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A message in an image.
    #[error("image {image} is damaged")]
    Damaged {
        /// Which.
        image: String,
        /// Where.
        #[source]
        source: Malformed,
    },
    /// Two readers could understand it differently.
    #[error("image {image} says something twice")]
    Repeated {
        /// Which.
        image: String,
    },
    /// What every snapshot has.
    #[error("image {image} has no {what}")]
    Missing {
        /// Which.
        image: String,
        /// What it should have.
        what: &'static str,
    },
}

fn damaged(image: &str) -> impl FnOnce(Malformed) -> FactsError + '_ {
    move |source| FactsError::Damaged { image: image.to_owned(), source }
}

/// The embedded message of that number. Readers merge messages that come twice, each reader in its own
/// way; no writer makes such.
fn sole(message: &Message, number: u32, image: &str) -> Result<Option<Message>, FactsError> {
    let mut all = message.messages(number).map_err(damaged(image))?;
    match all.len() {
        0 | 1 => Ok(all.pop()),
        _ => Err(FactsError::Repeated { image: image.to_owned() }),
    }
}

/// The only entry of an image.
fn one(images: &Images, name: &str) -> Result<Message, FactsError> {
    let missing = || FactsError::Missing { image: name.to_owned(), what: "entry" };
    images.entries(name)?.into_iter().next().ok_or_else(missing)
}

/// Takes the facts out of images: sockets are turned into files already ([`crate::sockets`]). Files of these names beside
/// them are no images and not looked at.
///
/// # Errors
/// An image is missing, damaged, or lacks what all have.
pub fn read(images: &Images, but: &BTreeSet<String>) -> Result<Facts, FactsError> {
    let mut facts = Facts { images: names(images, but), ..Facts::default() };
    for (_, name) in images.numbered("userns") {
        let map = one(images, &name)?;
        for (which, into) in (1..).zip(&mut facts.id_maps) {
            into.extend(map.messages(which).map_err(damaged(&name))?.iter().map(range));
        }
    }
    let filters = filters(images)?;
    let mut namespaces: BTreeMap<&'static str, BTreeSet<u64>> = BTreeMap::new();
    for task in images.entries("pstree.img")? {
        let pid = task.number(1) as u32;
        let leader = format!("core-{pid}.img");
        let core = one(images, &leader)?;
        let tc = sole(&core, 3, &leader)?.unwrap_or_default();
        if tc.number(1) == DEAD {
            continue;
        }
        let ids = one(images, &format!("ids-{pid}.img"))?;
        for (number, kind) in (5..).zip(["pid", "net", "ipc", "uts", "mount", "user", "cgroup", "time"]) {
            namespaces.entry(kind).or_default().insert(ids.number(number));
        }
        let threads = task.varints(5).map_err(damaged("pstree.img"))?;
        let others = threads.into_iter().map(|id| id as u32).filter(|id| *id != pid);
        // CRIU leaves the filter of the others out where the first thread's is all threads'.
        let mut of_all = None;
        for id in [pid].into_iter().chain(others) {
            let name = format!("core-{id}.img");
            let core = if id == pid { core.clone() } else { one(images, &name)? };
            let (mut thread, flags) = thread(&name, id, &core, &filters)?;
            thread.oom_score = tc.varint(14).map_or(0, |score| score as i32);
            if id == pid && flags & TSYNC != 0 {
                of_all = thread.filter.clone();
            } else if thread.filter.is_none() {
                thread.filter = of_all.clone();
            }
            facts.threads.push(thread);
        }
    }
    facts.divided = namespaces.into_iter().filter(|(_, ids)| ids.len() > 1).map(|(kind, _)| kind).collect();
    for (_, name) in images.numbered("mountpoints") {
        facts.mounts.extend(images.entries(&name)?.iter().map(mount));
    }
    for file in images.entries("files.img")? {
        facts.files.push(file_of(&file)?);
    }
    facts.carried = carried(images)?;
    Ok(facts)
}

/// Names of images without their numbers; of other files those that a wake would use.
fn names(images: &Images, but: &BTreeSet<String>) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let plan = Some(PLAN).filter(|plan| !but.contains(*plan) && images.directory().join(plan).exists());
    names.extend(plan.map(str::to_owned));
    for name in images.names().filter(|name| !but.contains(*name)) {
        let stem = name.strip_suffix(".img").unwrap_or(name);
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let plain = stem.rsplit_once('-').filter(|(_, number)| is_number(number) && number.len() < 20);
        // `fifo-data` ends with what could be a number.
        let plain = plain.filter(|_| !stem.ends_with("-data")).map_or(stem, |(plain, _)| plain);
        names.insert(plain.to_owned());
    }
    names
}

fn range(extent: &Message) -> IdRange {
    (extent.number(1) as u32, extent.number(2) as u32, extent.number(3) as u32)
}

fn filters(images: &Images) -> Result<Vec<Message>, FactsError> {
    let name = "seccomp.img";
    if images.length(name).is_none() {
        return Ok(Vec::new());
    }
    one(images, name)?.messages(1).map_err(damaged(name))
}

/// A thread, without its process's score, and the flags of its filters.
fn thread(name: &str, id: u32, core: &Message, filters: &[Message]) -> Result<(ThreadFacts, u64), FactsError> {
    let missing = |what| move || FactsError::Missing { image: name.to_owned(), what };
    let own = sole(core, 5, name)?.ok_or_else(missing("state of its thread"))?;
    let creds = sole(&own, 10, name)?.ok_or_else(missing("credentials"))?;
    let word = |number| creds.number(number) as u32;
    let mut capabilities = 0;
    for number in [9, 10, 11, 12, 19] {
        for (shift, half) in [0, 32].into_iter().zip(creds.varints(number).map_err(damaged(name))?) {
            capabilities |= (half & u64::from(u32::MAX)) << shift;
        }
    }
    let groups = creds.varints(14).map_err(damaged(name))?;
    let first = own.varint(12).filter(|_| own.number(11) == FILTER).map(|index| index as usize);
    let flags = first.and_then(|index| filters.get(index)).map_or(0, |filter| filter.number(3));
    // A sint32 is stored folded: 0, -1, 1, -2 ..
    let nice = own.number(3);
    let nice = (nice >> 1) as i32 ^ -((nice & 1) as i32);
    let facts = ThreadFacts {
        id,
        uids: [word(1), word(3), word(5), word(7)],
        gids: [word(2), word(4), word(6), word(8)],
        groups: groups.into_iter().map(|group| group as u32).collect(),
        capabilities,
        no_new_privileges: creds.number(18) == 1,
        filter: first.and_then(|index| first_of(filters, index)),
        has_profile: [15, 16, 17].into_iter().any(|number| creds.bytes(number).is_some()),
        is_real_time: matches!(own.number(4), 1 | 2 | 6),
        nice,
        oom_score: 0,
    };
    Ok((facts, flags))
}

/// The filter that is set first, of those that a thread begins with at `first`: what CRIU calls the previous one of a filter is the one
/// that it sets after that.
fn first_of(filters: &[Message], first: usize) -> Option<Vec<u8>> {
    let mut filter = filters.get(first)?;
    // More steps than there are filters lead in a circle.
    for _ in 0..filters.len() {
        match filter.varint(2) {
            None => return filters[first].bytes(1).map(<[u8]>::to_vec),
            Some(next) => filter = filters.get(next as usize)?,
        }
    }
    None
}

fn mount(entry: &Message) -> MountFact {
    let shares = [10, 11, 12, 13, 15, 16].into_iter().any(|number| entry.number(number) != 0);
    MountFact {
        point: entry.string(7).unwrap_or_default(),
        kind: entry.number(1),
        external: entry.string(18),
        is_plain: !shares && entry.string(6).as_deref() == Some("/"),
        flags: entry.number(5),
    }
}

fn file_of(file: &Message) -> Result<FileFact, FactsError> {
    const TYPE: u64 = 0o170_000;
    const CHARACTER: u64 = 0o020_000;
    const BLOCK: u64 = 0o060_000;
    let missing = || FactsError::Missing { image: "files.img".to_owned(), what: "description of a file" };
    let described = |number| sole(file, number, "files.img");
    let mut fact = FileFact { kind: file.number(1), path: None, is_device: false, is_external: false };
    if fact.kind == REG {
        let reg = described(3)?.ok_or_else(missing)?;
        fact.path = Some(reg.string(6).ok_or_else(missing)?);
        fact.is_external = reg.number(9) != 0;
        fact.is_device = matches!(reg.number(10) & TYPE, CHARACTER | BLOCK);
    } else if fact.kind == UNIX {
        // Connected to a socket outside, or inherited.
        fact.is_external = described(16)?.ok_or_else(missing)?.number(6) != 0;
    }
    Ok(fact)
}

/// Deleted files and memory files.
fn carried(images: &Images) -> Result<Vec<CarriedFact>, FactsError> {
    let mut all = Vec::new();
    for (_, name) in images.numbered("ghost-file") {
        let Some(ghost) = images.first(&name)? else { continue };
        let owner = (ghost.number(1) as u32, ghost.number(2) as u32);
        all.push(CarriedFact { name, owner, mode: ghost.number(3) as u32 });
    }
    for file in images.entries_if_any("memfd.img")? {
        let owner = (file.number(2) as u32, file.number(3) as u32);
        all.push(CarriedFact { name: "memfd.img".to_owned(), owner, mode: file.number(9) as u32 });
    }
    Ok(all)
}
