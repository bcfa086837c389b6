//! Whether an archived proc may be restored here: a pure check of facts about its images against what its sandbox
//! allows.
//!
//! **Nobody calls it yet.** Snapshots are root-equivalent (DESIGN, invariant 9): sealing says that one was made by this
//! realm's Kip, this says that it asks for nothing that the realm's procs may not have, so that a worker that was taken
//! over cannot plant one that breaks out elsewhere. The facts are to be read from CRIU's images by whoever knows them
//! (`crates/checkpoint`); this module never reads an image. What is not listed is refused.

use std::collections::BTreeSet;

/// A set of capabilities, a bit for each (capabilities(7)).
pub type Capabilities = u64;

/// A task's rights, as the initial user namespace sees them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskFacts {
    /// Its number inside the sandbox.
    pub pid: u32,
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
    /// It has a seccomp filter.
    pub is_filtered: bool,
    /// Its namespaces.
    pub namespaces: Vec<NamespaceFact>,
}

/// Where a task's namespace comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespaceFact {
    /// As in /proc/PID/ns: `net`, `user`.
    pub kind: String,
    /// The key of one that is given from outside; `None`: the images make it.
    pub external: Option<String>,
}

/// A mount of the images'.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountFact {
    /// Where, inside.
    pub point: String,
    /// The file system.
    pub kind: String,
    /// The key of one that is given from outside; `None`: the images make it.
    pub external: Option<String>,
}

/// A file that is open, mapped, or a directory that a task is in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileFact {
    /// Its path inside.
    pub path: String,
    /// Major and minor number of a device.
    pub device: Option<(u32, u32)>,
}

/// All that the images say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// The tasks.
    pub tasks: Vec<TaskFacts>,
    /// The mounts.
    pub mounts: Vec<MountFact>,
    /// The files.
    pub files: Vec<FileFact>,
}

/// What a sandbox allows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    /// The proc's block of user and group ids: first, how many.
    pub ids: (u32, u32),
    /// Capabilities that tasks may have in the proc's own user namespace.
    pub capabilities: Capabilities,
    /// Tasks must have a seccomp filter and no way to new privileges.
    pub must_be_confined: bool,
    /// Namespaces that must be given from outside: kind and key. All others are refused.
    pub namespaces: BTreeSet<(String, String)>,
    /// Namespaces that images may make, by kind.
    pub own_namespaces: BTreeSet<String>,
    /// Keys of mounts that are given from outside.
    pub mounts: BTreeSet<String>,
    /// File systems that images may mount.
    pub own_mounts: BTreeSet<String>,
    /// Devices that may be open.
    pub devices: BTreeSet<(u32, u32)>,
}

/// A proc may not be restored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Nothing to restore.
    #[error("the snapshot has no task")]
    Empty,
    /// A user or group of somebody else.
    #[error("task {pid} has the {what} id {id}, which is not one of the proc's own ({first} to {last})")]
    Id {
        /// Which task.
        pid: u32,
        /// `user` or `group`.
        what: &'static str,
        /// Its id.
        id: u32,
        /// The first allowed.
        first: u32,
        /// The last allowed.
        last: u32,
    },
    /// Too many rights.
    #[error("task {pid} has capabilities {extra:#x} that its sandbox does not give")]
    Capabilities {
        /// Which task.
        pid: u32,
        /// Those.
        extra: Capabilities,
    },
    /// No filter.
    #[error("task {pid} runs without {missing}")]
    Unconfined {
        /// Which task.
        pid: u32,
        /// What it lacks.
        missing: &'static str,
    },
    /// It would see more than its own.
    #[error("task {pid} wants the {kind} namespace {key:?}, which is not its sandbox's")]
    Namespace {
        /// Which task.
        pid: u32,
        /// Of which kind.
        kind: String,
        /// The key; empty if the images make it.
        key: String,
    },
    /// It would see more than its own.
    #[error("the mount at {point} is not one of its sandbox's")]
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
    #[error("the file {path:?} is the device {major}:{minor}, which its sandbox does not have")]
    Device {
        /// Which.
        path: String,
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
}

/// Whether all of it is allowed.
///
/// # Errors
/// The first that is not.
pub fn check(facts: &Facts, policy: &Policy) -> Result<(), Refused> {
    if facts.tasks.is_empty() {
        return Err(Refused::Empty);
    }
    facts.tasks.iter().try_for_each(|task| check_task(task, policy))?;
    facts.mounts.iter().try_for_each(|mount| check_mount(mount, policy))?;
    facts.files.iter().try_for_each(|file| check_file(file, policy))
}

fn check_task(task: &TaskFacts, policy: &Policy) -> Result<(), Refused> {
    let (first, count) = policy.ids;
    let is_own = |id: u32| id.checked_sub(first).is_some_and(|index| index < count);
    let groups = task.gids.iter().chain(&task.groups).map(|id| ("group", *id));
    let all = task.uids.iter().map(|id| ("user", *id)).chain(groups);
    for (what, id) in all {
        if !is_own(id) {
            let last = first.saturating_add(count.saturating_sub(1));
            return Err(Refused::Id { pid: task.pid, what, id, first, last });
        }
    }
    let extra = task.capabilities & !policy.capabilities;
    if extra != 0 {
        return Err(Refused::Capabilities { pid: task.pid, extra });
    }
    if policy.must_be_confined && !task.no_new_privileges {
        return Err(Refused::Unconfined { pid: task.pid, missing: "no_new_privs" });
    }
    if policy.must_be_confined && !task.is_filtered {
        return Err(Refused::Unconfined { pid: task.pid, missing: "a seccomp filter" });
    }
    for NamespaceFact { kind, external } in &task.namespaces {
        let is_allowed = match external {
            Some(key) => policy.namespaces.contains(&(kind.clone(), key.clone())),
            None => policy.own_namespaces.contains(kind),
        };
        if !is_allowed {
            let key = external.clone().unwrap_or_default();
            return Err(Refused::Namespace { pid: task.pid, kind: kind.clone(), key });
        }
    }
    // A kind that is not told of would be the restorer's own.
    let has = |kind: &str| task.namespaces.iter().any(|namespace| namespace.kind == kind);
    match policy.namespaces.iter().map(|(kind, _)| kind).chain(&policy.own_namespaces).find(|kind| !has(kind)) {
        Some(kind) => Err(Refused::Namespace { pid: task.pid, kind: kind.clone(), key: String::new() }),
        None => Ok(()),
    }
}

fn check_mount(mount: &MountFact, policy: &Policy) -> Result<(), Refused> {
    let is_allowed = match &mount.external {
        Some(key) => policy.mounts.contains(key),
        None => policy.own_mounts.contains(&mount.kind),
    };
    if is_allowed && is_plain(&mount.point) { Ok(()) } else { Err(Refused::Mount { point: mount.point.clone() }) }
}

fn check_file(file: &FileFact, policy: &Policy) -> Result<(), Refused> {
    if !is_plain(&file.path) {
        return Err(Refused::Path { path: file.path.clone() });
    }
    match file.device {
        Some((major, minor)) if !policy.devices.contains(&(major, minor)) => {
            Err(Refused::Device { path: file.path.clone(), major, minor })
        }
        _ => Ok(()),
    }
}

fn is_plain(path: &str) -> bool {
    path.starts_with('/') && !path.contains('\0') && !path.split('/').any(|name| name == "..")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn namespaces() -> Vec<NamespaceFact> {
        let external = |kind: &str| NamespaceFact { kind: kind.into(), external: Some(format!("{kind}-key")) };
        vec![external("net"), external("user"), NamespaceFact { kind: "mnt".into(), external: None }]
    }

    fn task() -> TaskFacts {
        TaskFacts {
            pid: 1,
            uids: [100_000; 4],
            gids: [100_005; 4],
            groups: vec![165_535],
            capabilities: 0b101,
            no_new_privileges: true,
            is_filtered: true,
            namespaces: namespaces(),
        }
    }

    fn facts(task: TaskFacts) -> Facts {
        let mount = |point: &str, kind: &str, external: Option<&str>| MountFact {
            point: point.into(),
            kind: kind.into(),
            external: external.map(Into::into),
        };
        let file = |path: &str, device| FileFact { path: path.into(), device };
        Facts {
            tasks: vec![task],
            mounts: vec![mount("/usr", "overlay", Some("usr")), mount("/dev/shm", "tmpfs", None)],
            files: vec![file("/usr/bin/redis-server", None), file("/dev/null", Some((1, 3)))],
        }
    }

    fn policy() -> Policy {
        Policy {
            ids: (100_000, 65_536),
            capabilities: 0b111,
            must_be_confined: true,
            namespaces: ["net", "user"].map(|kind| (kind.to_owned(), format!("{kind}-key"))).into(),
            own_namespaces: ["mnt".to_owned()].into(),
            mounts: ["usr".to_owned()].into(),
            own_mounts: ["tmpfs".to_owned()].into(),
            devices: [(1, 3)].into(),
        }
    }

    fn refused(change: impl FnOnce(&mut Facts)) -> Refused {
        let mut facts = facts(task());
        change(&mut facts);
        check(&facts, &policy()).unwrap_err()
    }

    #[test]
    fn what_a_sandbox_gives_is_allowed_and_all_else_is_not() {
        assert_eq!(check(&facts(task()), &policy()), Ok(()));
        assert_eq!(refused(|f| f.tasks.clear()), Refused::Empty);
        let told = refused(|f| f.tasks[0].uids[2] = 0).to_string();
        assert_eq!(told, "task 1 has the user id 0, which is not one of the proc's own (100000 to 165535)");
        assert!(matches!(refused(|f| f.tasks[0].groups[0] = 165_536), Refused::Id { what: "group", .. }));
        assert_eq!(refused(|f| f.tasks[0].capabilities = 0b1001), Refused::Capabilities { pid: 1, extra: 0b1000 });
        assert!(matches!(refused(|f| f.tasks[0].is_filtered = false), Refused::Unconfined { .. }));
        assert!(matches!(refused(|f| f.tasks[0].no_new_privileges = false), Refused::Unconfined { .. }));
        assert!(matches!(refused(|f| f.tasks[0].namespaces[0].external = None), Refused::Namespace { .. }));
        assert!(matches!(
            refused(|f| f.tasks[0].namespaces[1].external = Some("net-key".into())),
            Refused::Namespace { .. }
        ));
        let missing = refused(|f| drop(f.tasks[0].namespaces.pop()));
        assert_eq!(missing, Refused::Namespace { pid: 1, kind: "mnt".into(), key: String::new() });
        assert!(matches!(refused(|f| f.mounts[0].external = Some("etc".into())), Refused::Mount { .. }));
        assert!(matches!(refused(|f| f.mounts[1].kind = "proc".into()), Refused::Mount { .. }));
        assert!(matches!(refused(|f| f.mounts[1].point = "/a/../../b".into()), Refused::Mount { .. }));
        for path in ["", "etc/passwd", "/a/../b", "/..", "/a\0"] {
            assert!(matches!(refused(|f| f.files[0].path = path.into()), Refused::Path { .. }), "{path:?}");
        }
        assert!(matches!(refused(|f| f.files[1].device = Some((1, 1))), Refused::Device { major: 1, minor: 1, .. }));
        assert_eq!(
            check(&facts(task()), &Policy::default()).unwrap_err().to_string().split(',').next(),
            Some("task 1 has the user id 100000")
        );
    }

    proptest! {
        #[test]
        fn no_id_outside_the_block_passes(id: u32, place in 0usize..9) {
            let mut task = task();
            match place {
                0..4 => task.uids[place] = id,
                4..8 => task.gids[place - 4] = id,
                _ => task.groups.push(id),
            }
            let is_own = (100_000..165_536).contains(&id);
            prop_assert_eq!(check(&facts(task), &policy()).is_ok(), is_own);
        }
    }
}
