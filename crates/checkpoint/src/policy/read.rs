//! Facts out of CRIU's images.

use super::{CarriedFact, Facts, FileFact, IdRange, MountFact, ThreadFacts};
use crate::plan::PLAN;
use kip_criu_images::codes::{kind, seccomp, state};
use kip_criu_images::fields::{
    core_entry, creds_entry, file_entry, ghost_file_entry, memfd_inode_entry, mnt_entry, pstree_entry, reg_file_entry,
    seccomp_entry, seccomp_filter, task_core_entry, task_kobj_ids_entry, thread_core_entry, uid_gid_extent,
    unix_sk_entry, userns_entry,
};
use kip_criu_images::processes::filter_chain;
use kip_criu_images::{CheckpointImageError, Images, Malformed, Message};
use std::collections::{BTreeMap, BTreeSet};

/// The kinds of namespaces, and the field of each.
const NAMESPACES: [(u32, &str); 8] = [
    (task_kobj_ids_entry::PID_NS_ID, "pid"),
    (task_kobj_ids_entry::NET_NS_ID, "net"),
    (task_kobj_ids_entry::IPC_NS_ID, "ipc"),
    (task_kobj_ids_entry::UTS_NS_ID, "uts"),
    (task_kobj_ids_entry::MNT_NS_ID, "mount"),
    (task_kobj_ids_entry::USER_NS_ID, "user"),
    (task_kobj_ids_entry::CGROUP_NS_ID, "cgroup"),
    (task_kobj_ids_entry::TIME_NS_ID, "time"),
];

/// The images cannot be judged.
#[derive(Debug, thiserror::Error)]
pub enum FactsError {
    /// An image.
    #[error(transparent)]
    Image(#[from] CheckpointImageError),
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

/// The embedded message of that number. Readers merge messages that come twice, each reader in its
/// own way; no writer makes such.
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

/// Takes the facts out of images; [`crate::sockets`] has turned sockets into files already. `but`
/// has names of files of the generation that are no images, such as page files, and are not judged.
///
/// # Errors
/// An image is missing, damaged, or lacks what all have.
pub fn read(images: &Images, but: &BTreeSet<String>) -> Result<Facts, FactsError> {
    let mut facts = Facts { images: names(images, but), ..Facts::default() };
    for (_, name) in images.numbered("userns") {
        let map = one(images, &name)?;
        for (which, into) in [userns_entry::UID_MAP, userns_entry::GID_MAP].into_iter().zip(&mut facts.id_maps) {
            into.extend(map.messages(which).map_err(damaged(&name))?.iter().map(range));
        }
    }
    let filters = filters(images)?;
    let mut namespaces: BTreeMap<&'static str, BTreeSet<u64>> = BTreeMap::new();
    for task in images.entries("pstree.img")? {
        let pid = task.number(pstree_entry::PID) as u32;
        let leader = format!("core-{pid}.img");
        let core = one(images, &leader)?;
        let tc = sole(&core, core_entry::TC, &leader)?.unwrap_or_default();
        if tc.number(task_core_entry::TASK_STATE) == state::DEAD {
            continue;
        }
        let ids = one(images, &format!("ids-{pid}.img"))?;
        for (number, kind) in NAMESPACES {
            namespaces.entry(kind).or_default().insert(ids.number(number));
        }
        let threads = task.varints(pstree_entry::THREADS).map_err(damaged("pstree.img"))?;
        let others = threads.into_iter().map(|id| id as u32).filter(|id| *id != pid);
        // CRIU leaves the filter of the others out where the first thread's is all threads'.
        let mut of_all = None;
        for id in [pid].into_iter().chain(others) {
            let name = format!("core-{id}.img");
            let core = if id == pid { core.clone() } else { one(images, &name)? };
            let (mut thread, flags) = thread(&name, id, &core, &filters)?;
            thread.oom_score = tc.varint(task_core_entry::OOM_SCORE_ADJ).map_or(0, |score| score as i32);
            if id == pid && flags & seccomp::TSYNC != 0 {
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
    let word = |number| extent.number(number) as u32;
    (word(uid_gid_extent::FIRST), word(uid_gid_extent::LOWER_FIRST), word(uid_gid_extent::COUNT))
}

fn filters(images: &Images) -> Result<Vec<Message>, FactsError> {
    let name = "seccomp.img";
    if images.bytes(name).is_none() {
        return Ok(Vec::new());
    }
    one(images, name)?.messages(seccomp_entry::SECCOMP_FILTERS).map_err(damaged(name))
}

/// A thread, without its process's score, and the flags of its filters.
fn thread(name: &str, id: u32, core: &Message, filters: &[Message]) -> Result<(ThreadFacts, u64), FactsError> {
    let missing = |what| move || FactsError::Missing { image: name.to_owned(), what };
    let own = sole(core, core_entry::THREAD_CORE, name)?.ok_or_else(missing("state of its thread"))?;
    let creds = sole(&own, thread_core_entry::CREDS, name)?.ok_or_else(missing("credentials"))?;
    let word = |number| creds.number(number) as u32;
    let mut capabilities = 0;
    for number in
        [creds_entry::CAP_INH, creds_entry::CAP_PRM, creds_entry::CAP_EFF, creds_entry::CAP_BND, creds_entry::CAP_AMB]
    {
        for (shift, half) in [0, 32].into_iter().zip(creds.varints(number).map_err(damaged(name))?) {
            capabilities |= (half & u64::from(u32::MAX)) << shift;
        }
    }
    let groups = creds.varints(creds_entry::GROUPS).map_err(damaged(name))?;
    let has_filter = own.number(thread_core_entry::SECCOMP_MODE) == seccomp::FILTER;
    let named = own.varint(thread_core_entry::SECCOMP_FILTER).filter(|_| has_filter);
    let chain = named.and_then(|first| filter_chain(filters, first)).unwrap_or_default();
    let first = chain.first().copied();
    let flags = first.map_or(0, |filter| filter.number(seccomp_filter::FLAGS));
    // A sint32 is stored folded: 0, -1, 1, -2 ..
    let nice = own.number(thread_core_entry::SCHED_NICE);
    let nice = (nice >> 1) as i32 ^ -((nice & 1) as i32);
    let facts = ThreadFacts {
        id,
        uids: [creds_entry::UID, creds_entry::EUID, creds_entry::SUID, creds_entry::FSUID].map(word),
        gids: [creds_entry::GID, creds_entry::EGID, creds_entry::SGID, creds_entry::FSGID].map(word),
        groups: groups.into_iter().map(|group| group as u32).collect(),
        capabilities,
        no_new_privileges: creds.number(creds_entry::NO_NEW_PRIVS) == 1,
        filter: first.and_then(|filter| filter.bytes(seccomp_filter::FILTER)).map(<[u8]>::to_vec),
        has_profile: [creds_entry::LSM_PROFILE, creds_entry::LSM_SOCKCREATE, creds_entry::APPARMOR_DATA]
            .into_iter()
            .any(|number| creds.bytes(number).is_some()),
        is_real_time: matches!(own.number(thread_core_entry::SCHED_POLICY), 1 | 2 | 6),
        nice,
        oom_score: 0,
    };
    Ok((facts, flags))
}

fn mount(entry: &Message) -> MountFact {
    let shares = [
        mnt_entry::SHARED_ID,
        mnt_entry::MASTER_ID,
        mnt_entry::WITH_PLUGIN,
        mnt_entry::EXT_MOUNT,
        mnt_entry::INTERNAL_SHARING,
        mnt_entry::DELETED,
    ];
    let shares = shares.into_iter().any(|number| entry.number(number) != 0);
    MountFact {
        point: entry.string(mnt_entry::MOUNTPOINT).unwrap_or_default(),
        kind: entry.number(mnt_entry::FSTYPE),
        external: entry.string(mnt_entry::EXT_KEY),
        is_plain: !shares && entry.string(mnt_entry::ROOT).as_deref() == Some("/"),
        flags: entry.number(mnt_entry::FLAGS),
    }
}

fn file_of(file: &Message) -> Result<FileFact, FactsError> {
    const TYPE: u64 = 0o170_000;
    const CHARACTER: u64 = 0o020_000;
    const BLOCK: u64 = 0o060_000;
    let missing = || FactsError::Missing { image: "files.img".to_owned(), what: "description of a file" };
    let described = |number| sole(file, number, "files.img");
    let mut fact = FileFact { kind: file.number(file_entry::TYPE), path: None, is_device: false, is_external: false };
    if fact.kind == kind::REG {
        let reg = described(file_entry::REG)?.ok_or_else(missing)?;
        fact.path = Some(reg.string(reg_file_entry::NAME).ok_or_else(missing)?);
        fact.is_external = reg.number(reg_file_entry::EXT) != 0;
        fact.is_device = matches!(reg.number(reg_file_entry::MODE) & TYPE, CHARACTER | BLOCK);
    } else if fact.kind == kind::UNIXSK {
        // Connected to a socket outside, or inherited.
        fact.is_external = described(file_entry::USK)?.ok_or_else(missing)?.number(unix_sk_entry::UFLAGS) != 0;
    }
    Ok(fact)
}

/// Deleted files and memory files.
fn carried(images: &Images) -> Result<Vec<CarriedFact>, FactsError> {
    let mut all = Vec::new();
    // Their numbers are hexadecimal.
    for name in images.names().filter(|name| name.starts_with("ghost-file-")).map(str::to_owned) {
        let Some(ghost) = images.first(&name)? else { continue };
        let word = |number| ghost.number(number) as u32;
        let owner = (word(ghost_file_entry::UID), word(ghost_file_entry::GID));
        all.push(CarriedFact { name, owner, mode: word(ghost_file_entry::MODE) });
    }
    for file in images.entries_if_any("memfd.img")? {
        let word = |number| file.number(number) as u32;
        let owner = (word(memfd_inode_entry::UID), word(memfd_inode_entry::GID));
        all.push(CarriedFact { name: "memfd.img".to_owned(), owner, mode: word(memfd_inode_entry::MODE) });
    }
    Ok(all)
}
