//! Whether images may be restored here: what they ask for against what their sandbox allows.
//!
//! Images are root-equivalent (ARCHITECTURE.md, Invariants): a seal says that they were made by
//! this realm's Kip, this says that they ask for nothing that the realm's procs may not have, so
//! that a worker that was taken over cannot plant some that break out elsewhere. [`read`] takes the
//! facts out of CRIU's images, [`check`] is pure. What is not listed is refused: images of other
//! names, kinds of files, mounts, namespaces. Never reads memory: whatever a program does with what
//! it may have is its own affair.

mod read;

pub use read::{FactsError, read};

use kip_criu_images::codes::kind;
use kip_types::runtime;
use std::collections::{BTreeMap, BTreeSet};

/// A set of capabilities, a bit for each (capabilities(7)).
pub type Capabilities = u64;

/// A thread's rights, as its own user namespace sees them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThreadFacts {
    /// Its number inside the sandbox.
    pub id: u32,
    /// Real, effective, saved and file-system user ids.
    pub uids: [u32; 4],
    /// The same of groups.
    pub gids: [u32; 4],
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Permitted, inheritable, effective, bounding and ambient capabilities together.
    pub capabilities: Capabilities,
    /// prctl(2), PR_SET_NO_NEW_PRIVS.
    pub no_new_privileges: bool,
    /// The system call filter that was set first, below all others: instructions of classic BPF.
    pub filter: Option<Vec<u8>>,
    /// It has a profile of a security module.
    pub has_profile: bool,
    /// sched(7): a class that goes before others (1, 2 and 6).
    pub is_real_time: bool,
    /// sched(7): the lower, the more processor time.
    pub nice: i32,
    /// proc_pid_oom_score_adj(5); of the process.
    pub oom_score: i32,
}

/// A mount of the images'.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountFact {
    /// Where, inside.
    pub point: String,
    /// The file system, by CRIU's number.
    pub kind: u64,
    /// The key of one that is given from outside; `None`: the images make it.
    pub external: Option<String>,
    /// Nothing but a whole file system that shares nothing.
    pub is_plain: bool,
    /// MS_* flags, mount(2).
    pub flags: u64,
}

/// A file that is open, mapped, or a directory that a task is in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileFact {
    /// By CRIU's number.
    pub kind: u64,
    /// Its path inside, if it has one.
    pub path: Option<String>,
    /// It is a device.
    pub is_device: bool,
    /// It is connected to, or taken from, something outside.
    pub is_external: bool,
}

/// A file whose contents are in the images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CarriedFact {
    /// The image.
    pub name: String,
    /// Whose, inside.
    pub owner: (u32, u32),
    /// Its type and permissions, inode(7).
    pub mode: u32,
}

/// Ids inside from, ids outside from, how many.
pub type IdRange = (u32, u32, u32);

/// All that the images say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Their names, without numbers.
    pub images: BTreeSet<String>,
    /// Mappings of users, and of groups.
    pub id_maps: [Vec<IdRange>; 2],
    /// The threads.
    pub threads: Vec<ThreadFacts>,
    /// Kinds of namespaces of which the tasks have more than one.
    pub divided: BTreeSet<&'static str>,
    /// The mounts.
    pub mounts: Vec<MountFact>,
    /// The files.
    pub files: Vec<FileFact>,
    /// Files that are made of images.
    pub carried: Vec<CarriedFact>,
}

/// What a sandbox allows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    /// First id outside of the proc's block, and how many; inside they begin with 0.
    pub ids: (u32, u32),
    /// Capabilities that threads may have in the proc's own user namespace.
    pub capabilities: Capabilities,
    /// Threads must have no way to new privileges.
    pub no_new_privileges: bool,
    /// The filters of which all threads must have one below others.
    pub filters: Vec<Vec<u8>>,
    /// Paths inside that are masked.
    pub masks: BTreeSet<String>,
    /// Volumes by the keys of their mounts: where each is inside, and whether it is read-only.
    pub volumes: BTreeMap<String, (String, bool)>,
    /// Inodes of sockets that are held for it.
    pub sockets: BTreeSet<u32>,
    /// Paths of devices that may be open.
    pub devices: BTreeSet<String>,
    /// System V IPC is in the images.
    pub own_ipc: bool,
    /// Lowest niceness that threads may have.
    pub nice: i32,
    /// Lowest out-of-memory score that threads may have.
    pub oom_score: i32,
}

/// Flags of mounts, mount(2).
const RDONLY: u64 = 1;
const NOSUID: u64 = 2;
const NODEV: u64 = 4;
/// Images that every snapshot may have; those of TCP are not read, for sockets are held.
const IMAGES: [&str; 22] = [
    "core",
    "fdinfo",
    "fifo-data",
    "filelocks",
    "files",
    "fs",
    "ghost-file",
    "ids",
    "inventory",
    "memfd",
    "mm",
    "mountpoints",
    "pagemap",
    "pagemap-shmem",
    "pages",
    "pipes-data",
    "pstree",
    "remap-fpath",
    "seccomp",
    "sk-queues",
    "tcp-stream",
    "userns",
];
/// Images of System V IPC.
const IPC_IMAGES: [&str; 4] = ["ipcns-msg", "ipcns-sem", "ipcns-shm", "ipcns-var"];
/// CRIU's kinds of files that programs of a sandbox may have open. Directories are regular files to
/// CRIU. INET sockets are held, and the images have them as regular files, too. Pidfds are opened
/// inside and find no other processes.
const KINDS: [u64; 12] = [
    kind::REG,
    kind::PIPE,
    kind::FIFO,
    kind::UNIXSK,
    kind::EVENTFD,
    kind::EVENTPOLL,
    kind::INOTIFY,
    kind::SIGNALFD,
    kind::NETLINKSK,
    kind::TIMERFD,
    kind::MEMFD,
    kind::PIDFD,
];
/// CRIU's number of proc(5) and of overlayfs.
const PROC: u64 = 1;
const OVERLAY: u64 = 17;

/// Images may not be restored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Nothing to restore.
    #[error("the snapshot has no process")]
    Empty,
    /// What Kip never makes.
    #[error("the snapshot has an image {name:?}, which none of its kind has")]
    Image {
        /// Its name, without numbers.
        name: String,
    },
    /// Another block of ids.
    #[error("the snapshot maps {what} ids in another way than its sandbox, which has {count} from {first} on")]
    IdMap {
        /// `user` or `group`.
        what: &'static str,
        /// The first allowed, outside.
        first: u32,
        /// How many.
        count: u32,
    },
    /// A user or group that is not one of the sandbox's.
    #[error("{whose} has the {what} id {id}, beyond those of its sandbox")]
    Id {
        /// Which thread or image.
        whose: String,
        /// `user` or `group`.
        what: &'static str,
        /// Its id, inside.
        id: u32,
    },
    /// Too many rights.
    #[error("thread {id} has capabilities {extra:#x} that its sandbox does not give")]
    Capabilities {
        /// Which.
        id: u32,
        /// Those.
        extra: Capabilities,
    },
    /// Too few bounds.
    #[error("thread {id} runs without {missing} of its sandbox")]
    Unconfined {
        /// Which.
        id: u32,
        /// What it lacks.
        missing: &'static str,
    },
    /// More than its share.
    #[error("thread {id} has {what} that its sandbox does not give")]
    Privileged {
        /// Which.
        id: u32,
        /// What.
        what: &'static str,
    },
    /// It would see more than its own.
    #[error("its processes are in several {kind} namespaces, its sandbox has one")]
    Namespace {
        /// Of which kind.
        kind: &'static str,
    },
    /// It would see more than its own.
    #[error("the mount at {point:?} is not one of its sandbox's")]
    Mount {
        /// Where.
        point: String,
    },
    /// A path that is none, or leads upwards.
    #[error("the file {path:?} is not named by a plain absolute path")]
    Path {
        /// Which.
        path: String,
    },
    /// A device that is not allowed.
    #[error("the file {path:?} is a device that its sandbox does not have")]
    Device {
        /// Which.
        path: String,
    },
    /// A kind of file that is not allowed.
    #[error("an open file is of CRIU's type {kind}, which its sandbox does not give")]
    Kind {
        /// By CRIU's number.
        kind: u64,
    },
    /// A file that is not held for the proc.
    #[error("an open file is {what}, which is not held for it")]
    Foreign {
        /// What it would be.
        what: String,
    },
}

/// Whether all of it is allowed.
///
/// # Errors
/// The first that is not.
pub fn check(facts: &Facts, policy: &Policy) -> Result<(), Refused> {
    if facts.threads.is_empty() {
        return Err(Refused::Empty);
    }
    let may_be = |name: &str| IMAGES.contains(&name) || policy.own_ipc && IPC_IMAGES.contains(&name);
    if let Some(name) = facts.images.iter().find(|name| !may_be(name)) {
        return Err(Refused::Image { name: name.clone() });
    }
    let (first, count) = policy.ids;
    for (what, map) in ["user", "group"].into_iter().zip(&facts.id_maps) {
        if map[..] != [(0, first, count)] {
            return Err(Refused::IdMap { what, first, count });
        }
    }
    if let Some(kind) = facts.divided.first() {
        return Err(Refused::Namespace { kind });
    }
    facts.threads.iter().try_for_each(|thread| check_thread(thread, policy))?;
    facts.mounts.iter().try_for_each(|mount| check_mount(mount, policy))?;
    facts.files.iter().try_for_each(|file| check_file(file, policy))?;
    facts.carried.iter().try_for_each(|file| check_carried(file, policy))
}

fn check_id(whose: impl FnOnce() -> String, what: &'static str, id: u32, policy: &Policy) -> Result<(), Refused> {
    if id < policy.ids.1 { Ok(()) } else { Err(Refused::Id { whose: whose(), what, id }) }
}

fn check_thread(thread: &ThreadFacts, policy: &Policy) -> Result<(), Refused> {
    let id = thread.id;
    let users = thread.uids.iter().map(|id| ("user", *id));
    let groups = thread.gids.iter().chain(&thread.groups).map(|id| ("group", *id));
    for (what, number) in users.chain(groups) {
        check_id(|| format!("thread {id}"), what, number, policy)?;
    }
    let extra = thread.capabilities & !policy.capabilities;
    if extra != 0 {
        return Err(Refused::Capabilities { id, extra });
    }
    if policy.no_new_privileges && !thread.no_new_privileges {
        return Err(Refused::Unconfined { id, missing: "the no_new_privs" });
    }
    if !thread.filter.as_ref().is_some_and(|filter| policy.filters.contains(filter)) {
        return Err(Refused::Unconfined { id, missing: "the system call filter" });
    }
    let privileges = [
        (thread.has_profile, "a profile of a security module"),
        (thread.is_real_time, "a scheduling class"),
        (thread.nice < policy.nice, "a niceness"),
        (thread.oom_score < policy.oom_score, "an out-of-memory score"),
    ];
    match privileges.into_iter().find(|(has, _)| *has) {
        Some((_, what)) => Err(Refused::Privileged { id, what }),
        None => Ok(()),
    }
}

fn check_mount(mount: &MountFact, policy: &Policy) -> Result<(), Refused> {
    let point = mount.point.as_str();
    let is_ours = match (&mount.external, mount.kind) {
        (Some(key), _) if point == "/usr" => key == "usr",
        (Some(key), _) if point == "/dev/pts" => key == "terminals",
        (Some(key), _) if point == "/sys" || point.starts_with("/sys/") || point == runtime::PATH => {
            let wanted = NOSUID | NODEV | RDONLY;
            mount.flags & wanted == wanted && *key == mount_key(point)
        }
        (Some(key), _) if policy.volumes.contains_key(key) => {
            let (at, read_only) = &policy.volumes[key];
            let wanted = NOSUID | NODEV | if *read_only { RDONLY } else { 0 };
            at == point && mount.flags & wanted == wanted
        }
        (Some(key), _) => policy.masks.contains(point) && *key == mount_key(point),
        (None, PROC) => point == "/proc" && mount.is_plain,
        (None, OVERLAY) => point == "/" && mount.is_plain,
        (None, _) => false,
    };
    if is_ours { Ok(()) } else { Err(Refused::Mount { point: mount.point.clone() }) }
}

/// CRIU's key of a mount of the kernel's, by its mount point.
pub fn mount_key(point: &str) -> String {
    point.trim_start_matches('/').replace('/', "-")
}

/// The inode of a socket that stands among the files, if it is named like one.
fn socket_of(path: &str) -> Option<Option<u32>> {
    let rest = path.strip_prefix("/socket:[")?;
    Some(rest.strip_suffix(']').and_then(|number| number.parse().ok()))
}

fn check_file(file: &FileFact, policy: &Policy) -> Result<(), Refused> {
    if !KINDS.contains(&file.kind) {
        return Err(Refused::Kind { kind: file.kind });
    }
    let Some(path) = &file.path else {
        return if file.is_external { Err(Refused::Foreign { what: "outside".to_owned() }) } else { Ok(()) };
    };
    if let Some(inode) = socket_of(path) {
        let is_held = inode.is_some_and(|inode| policy.sockets.contains(&inode)) && !file.is_external;
        return if is_held { Ok(()) } else { Err(Refused::Foreign { what: path[1..].to_owned() }) };
    }
    let is_plain = |part: &str| part != ".." && part != ".";
    // What inherited descriptors are called by: `pipe:[7]`.
    if !path.starts_with('/') || path.contains('\0') || path.starts_with("/pipe:[") || !path.split('/').all(is_plain) {
        return Err(Refused::Path { path: path.clone() });
    }
    if file.is_external {
        return Err(Refused::Foreign { what: path.clone() });
    }
    if file.is_device && !policy.devices.contains(path) {
        return Err(Refused::Device { path: path.clone() });
    }
    Ok(())
}

fn check_carried(file: &CarriedFact, policy: &Policy) -> Result<(), Refused> {
    const TYPE: u32 = 0o170_000;
    const CHARACTER: u32 = 0o020_000;
    const BLOCK: u32 = 0o060_000;
    check_id(|| file.name.clone(), "user", file.owner.0, policy)?;
    check_id(|| file.name.clone(), "group", file.owner.1, policy)?;
    match file.mode & TYPE {
        CHARACTER | BLOCK => Err(Refused::Device { path: file.name.clone() }),
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
