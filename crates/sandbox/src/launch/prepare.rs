//! What a sandbox is made of, in advance: namespaces and mounts.

use super::Prepared;
use super::start::enter_cgroups;
use super::template::{LAYERS, MOST_LAYERS};
use crate::protocol::{FILLED, Failure, Lower, Step};
use kip_sys::ns::{Child, Clone, Unshare, clone_child, unshare};
use kip_types::spec::RootKind;
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_string, fsmount, fsopen, move_mount, open_tree, unmount,
};
use rustix::process::{Pid, Signal, WaitOptions, pidfd_send_signal, waitpid};
use rustix::thread::{LinkNameSpaceType, ThreadNameSpaceType, move_into_link_name_space, move_into_thread_name_spaces};
use std::fmt::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Least length of a string that fsconfig(2) does not take.
const MOST_OPTION: usize = 256;

/// Size of a proc's block of ids.
const BLOCK: u32 = 65_536;

/// A user namespace with the block mapped, a uts namespace of the initial user namespace, and an
/// ipc namespace that belongs to the new one: CRIU dumps System V memory only from such.
pub(super) fn namespaces(prepared: &Prepared, uid_base: u32, hostname: &str) -> Result<[OwnedFd; 3], Failure> {
    let user = user_namespace(prepared, uid_base).map_err(Failure::at(Step::NewUser))?;
    let [uts, ipc] = uts_and_ipc(prepared, user.as_fd(), hostname)?;
    Ok([user, uts, ipc])
}

/// A mapping can only be written from outside while a process is inside: a child that waits to be
/// killed.
fn user_namespace(prepared: &Prepared, uid_base: u32) -> std::io::Result<OwnedFd> {
    let mut wait = || {
        let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
        loop {
            std::thread::sleep(std::time::Duration::from_secs(3600));
        }
    };
    let child = clone_child(Clone { new_user: true, ..Clone::default() }, &mut wait)?;
    let made = (|| {
        let proc = prepared.template.proc.as_fd();
        let map = format!("0 {uid_base} {BLOCK}");
        for name in ["uid_map", "gid_map"] {
            let path = format!("{}/{name}", child.pid);
            let file = rustix::fs::openat(proc, path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
            rustix::io::write(&file, map.as_bytes())?;
        }
        let path = format!("{}/ns/user", child.pid);
        rustix::fs::openat(proc, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
    })();
    pidfd_send_signal(&child.pidfd, Signal::KILL)?;
    reap(&child)?;
    Ok(made?)
}

fn uts_and_ipc(prepared: &Prepared, user: BorrowedFd<'_>, hostname: &str) -> Result<[OwnedFd; 2], Failure> {
    let proc = prepared.template.proc.as_fd();
    super::in_child(Step::NewUtsIpc, || {
        let one = |what| unshare(what).map_err(Failure::at(Step::NewUtsIpc));
        one(Unshare { uts: true, ..Unshare::default() })?;
        rustix::system::sethostname(hostname.as_bytes()).map_err(Failure::at(Step::NewUtsIpc))?;
        move_into_link_name_space(user, Some(LinkNameSpaceType::User)).map_err(Failure::at(Step::NewUtsIpc))?;
        one(Unshare { ipc: true, ..Unshare::default() })?;
        let open = |path| {
            rustix::fs::openat(proc, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
                .map_err(Failure::at(Step::NewUtsIpc))
        };
        Ok([open("self/ns/uts")?, open("self/ns/ipc")?])
    })
}

fn reap(child: &Child) -> rustix::io::Result<()> {
    let pid = Pid::from_raw(child.pid as i32);
    rustix::io::retry_on_intr(|| waitpid(pid, WaitOptions::empty())).map(drop)
}

/// Mounts `/` and `/usr` from a tree with `upper/{root,usr}` and `work/{root,usr}` and from lower
/// trees, top first; or a sealed root, with the trees `root` and `usr` of `state` on top.
pub(super) fn mount(
    state: &OwnedFd,
    trees: &[OwnedFd],
    lower: &Lower,
    kind: RootKind,
) -> Result<[OwnedFd; 2], Failure> {
    let place = |n: usize, below: &str| format!("{LAYERS}/{}{below}", n + 1);
    let (root, usr): (Vec<String>, Vec<String>) = match lower {
        Lower::Host { root_layers } => {
            let all = (0..trees.len()).map(|n| place(n, ""));
            (all.clone().take(*root_layers).collect(), all.skip(*root_layers).collect())
        }
        Lower::Image { usr } => {
            ((0..trees.len()).map(|n| place(n, "")).collect(), usr.iter().map(|n| place(*n, "/usr")).collect())
        }
    };
    if trees.len() > MOST_LAYERS || root.is_empty() || usr.is_empty() {
        return Err(Failure::new(Step::Request, Errno::TOOBIG));
    }
    let layers = Layers::attach(std::iter::once(state).chain(trees)).map_err(Failure::at(Step::Layers))?;
    Ok([layers.overlay("root", &root, kind)?, layers.overlay("usr", &usr, kind)?])
}

/// Other mounts of the `/` and `/usr` of a sandbox, detached. The same filesystems: they live on by
/// these, and with them whatever the kernel keeps by inode, when the sandbox is gone. From within,
/// for older kernels copy no detached mount.
pub(super) fn copy(init: &OwnedFd, points: &[String]) -> Result<Vec<OwnedFd>, Failure> {
    super::in_child(Step::Copy, || {
        move_into_thread_name_spaces(init.as_fd(), ThreadNameSpaceType::MOUNT)
            .map_err(Failure::at(Step::Namespaces))?;
        // No process inside can replace what something is mounted on.
        let one = |path: &str| open_tree(CWD, path, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC);
        let mut mounts =
            vec![one("/").map_err(Failure::at(Step::Copy))?, one("/usr").map_err(Failure::at(Step::Copy))?];
        for point in points {
            mounts.push(one(point).map_err(Failure::at(Step::Copy))?);
        }
        if crate::terminals::device(CWD).is_some() {
            mounts.push(one(crate::terminals::TARGET).map_err(Failure::at(Step::Copy))?);
        }
        Ok(mounts)
    })
}

/// Has a child in the cgroups make what is in `contents` in a file system in memory. It has memory
/// of its own, for the kernel charges what it writes to the cgroup of the process whose memory it
/// runs in; and it is not waited for.
pub(super) fn fill(
    mount: &OwnedFd,
    contents: OwnedFd,
    said: OwnedFd,
    cgroups: &[OwnedFd],
    first_id: u32,
) -> Result<(), Failure> {
    let contents = std::fs::File::from(contents);
    let mut make = || {
        let filled = enter_cgroups(cgroups)
            .map_err(|failure| failure.to_string())
            .and_then(|()| kip_files::whole::read(&contents, mount.as_fd(), first_id).map_err(|e| e.to_string()));
        // The daemon may be gone.
        let _ = filled.as_ref().is_err_and(|why| rustix::io::write(&said, why.as_bytes()).is_err());
        // What is not said here was done.
        let _ = filled.is_ok_and(|()| rustix::io::write(&said, FILLED).is_err());
        0
    };
    // The main loop reaps it.
    clone_child(Clone::default(), &mut make).map(drop).map_err(Failure::at(Step::Fill))
}

/// The layers while they are attached in the launcher's mount namespace.
struct Layers;

impl Layers {
    fn attach<'a>(trees: impl Iterator<Item = &'a OwnedFd>) -> rustix::io::Result<Layers> {
        // A mount to hang them all below, so that they go together.
        let base = open_tree(CWD, LAYERS, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)?;
        move_mount(&base, "", CWD, LAYERS, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
        let layers = Layers;
        for (n, tree) in trees.enumerate() {
            let place = format!("{LAYERS}/{n}");
            move_mount(tree, "", CWD, place, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
        }
        Ok(layers)
    }

    fn overlay(&self, name: &str, lower: &[String], kind: RootKind) -> Result<OwnedFd, Failure> {
        // An overlay without upper directory has two layers at least.
        let top = (kind == RootKind::Sealed).then(|| format!("{LAYERS}/0/{name}"));
        let lower: Vec<&str> = top.iter().chain(lower).map(String::as_str).collect();
        let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC).map_err(Failure::at(Step::Overlay))?;
        let mounted = (|| {
            fsconfig_set_string(&context, "source", "kip")?;
            // In one go as long as it fits; one by one from Linux 6.7 on.
            let joined = lower.join(":");
            if joined.len() < MOST_OPTION {
                fsconfig_set_string(&context, "lowerdir", joined.as_str())?;
            } else {
                lower.iter().try_for_each(|dir| fsconfig_set_string(&context, "lowerdir+", *dir))?;
            }
            // With them inotify watches and files open below can be checkpointed.
            fsconfig_set_string(&context, "nfs_export", "on")?;
            let attributes = match kind {
                RootKind::Writable => {
                    fsconfig_set_string(&context, "upperdir", format!("{LAYERS}/0/upper/{name}"))?;
                    fsconfig_set_string(&context, "workdir", format!("{LAYERS}/0/work/{name}"))?;
                    fsconfig_set_string(&context, "index", "on")?;
                    // Directories of the lower layers can be renamed.
                    fsconfig_set_string(&context, "redirect_dir", "on")?;
                    MountAttrFlags::empty()
                }
                RootKind::Sealed => {
                    fsconfig_set_string(&context, "redirect_dir", "nofollow")?;
                    MountAttrFlags::MOUNT_ATTR_RDONLY.union(MountAttrFlags::MOUNT_ATTR_NOSUID)
                }
            };
            fsconfig_create(&context)?;
            fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
        })();
        mounted.map_err(|e| Failure { detail: kernel_says(context.as_fd()), ..Failure::new(Step::Overlay, e) })
    }
}

impl Drop for Layers {
    fn drop(&mut self) {
        // Nothing of ours is open below, and a lazy unmount fails only where nothing is mounted.
        let _ = unmount(LAYERS, UnmountFlags::DETACH);
    }
}

/// The messages of a filesystem context, one per read: fsopen(2).
fn kernel_says(context: BorrowedFd<'_>) -> String {
    let mut text = String::new();
    let mut buffer = [0; 1024];
    while let Ok(n @ 1..) = rustix::io::read(context, &mut buffer) {
        let line = String::from_utf8_lossy(&buffer[..n]);
        let separator = if text.is_empty() { "" } else { "; " };
        write!(text, "{separator}{}", line.trim_end().trim_start_matches("e ")).expect("a String takes anything");
    }
    text
}
