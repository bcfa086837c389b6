//! The filesystem of a proc: two overlays, `/` and `/usr`, writable, private, over shared lower
//! layers.
//!
//! ```text
//! /      DIR/upper/root  over  pins/root  over  the tarball's layer  over  the base
//! /usr   DIR/upper/usr   over  pins/usr   over  the layer's usr      over  the host's /usr
//! ```
//!
//! With an image nothing of the host is in it, and only Kip's init is ever pinned, for layers of
//! images never change:
//!
//! ```text
//! /      DIR/upper/root  over  pins/root  over  the base for images  over  the image's layers
//! /usr   DIR/upper/usr   over  an empty directory   over  the usr of those layers
//! ```
//!
//! A sealed root has the same lower layers below a directory that all of them share
//! ([`crate::base::Base::sealed`]), no upper ones, and read-only mounts.
//!
//! Lower layers belong to root on disk and are mounted with the proc's mapping of ids; the upper
//! ones belong to its block of ids as they are (a mapped upper directory silently mounts read-only
//! and without nfs_export). The mounts are detached descriptors, made by the launcher in its own
//! mount namespace: nothing ever appears in the host's.
//!
//! An overlay with an index remembers the topmost lower directory it was first mounted over and
//! refuses any other ([`RootfsError::BaseChanged`]), and it refuses to be mounted while an older
//! mount of it is alive ([`RootfsError::InUse`]). So a proc keeps its base, and its pins
//! directories exist from the first mount on.

use crate::launcher::{LaunchError, Launcher};
pub use crate::mounts::Mounts;
use crate::protocol::{Lower, Step};
use kip_sys::random;
use kip_types::generation_id;
use kip_types::spec::RootKind;
use rustix::fs::{CWD, getxattr};
use rustix::io::Errno;
use rustix::mount::{FsPickFlags, OpenTreeFlags, fsconfig_reconfigure, fspick, open_tree};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt as _, chown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The extended attribute of a directory that hides those of its name in lower layers.
pub const OPAQUE: &str = "trusted.overlay.opaque";

/// How long a mount may take to go after the last process in it has ended: the kernel does that
/// later, by a worker.
const OLD_MOUNT_GOES: Duration = Duration::from_millis(1000);

/// Lets go what the kernel remembers of a filesystem's files that no process has open, as a remount
/// does: this cache takes memory and, for files of a lower layer that have been replaced since,
/// disk.
///
/// # Errors
/// fspick(2), fsconfig(2).
pub fn forget_cached(mount: BorrowedFd<'_>) -> io::Result<()> {
    let context = fspick(mount, "", FsPickFlags::FSPICK_EMPTY_PATH | FsPickFlags::FSPICK_CLOEXEC)?;
    Ok(fsconfig_reconfigure(&context)?)
}

/// What a proc's filesystem is made of.
#[derive(Debug, Clone)]
pub struct RootfsSpec {
    /// [`crate::base::Base::root`].
    pub base: PathBuf,
    /// An unpacked tarball.
    pub layer: Option<PathBuf>,
    /// A directory with `root` and `usr`, both there, that hold pinned files of the base.
    pub pins: Option<PathBuf>,
    /// Layers of an image, topmost first, none twice. Then `base` is
    /// [`crate::base::Base::over_image`], and there is no `layer`.
    pub image: Option<Vec<PathBuf>>,
    /// Whether it has files of its own.
    pub kind: RootKind,
    /// The proc's directory: `upper/{root,usr}` and `work/{root,usr}` are made in it. Of a sealed
    /// root it is [`crate::base::Base::sealed`], which stays as it is.
    pub dir: PathBuf,
    /// Host id of its id 0.
    pub uid_base: u32,
    /// Written to /etc/hostname and /etc/hosts when the upper directories are made.
    pub hostname: String,
    /// Further lines of /etc/hosts, written at the same time.
    pub hosts: String,
    /// Written to /etc/resolv.conf at the same time, instead of that of the layers below.
    pub resolv_conf: Option<String>,
}

/// Ids of a proc, from its first one on.
const IDS: u32 = 1 << 16;

/// A proc's filesystem could not be mounted.
#[derive(Debug, thiserror::Error)]
pub enum RootfsError {
    /// A file or directory of ours.
    #[error("could not {action} {}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The filesystem below cannot show files with other owners.
    #[error("the filesystem of {} cannot be mounted with a mapping of user ids: keep it on ext4, xfs or btrfs", path.display())]
    NoMapping {
        /// The lower layer.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The topmost lower layer is another directory than when the proc was first mounted.
    #[error("the files below {} are not those it was first mounted over", dir.display())]
    BaseChanged {
        /// The proc's directory.
        dir: PathBuf,
    },
    /// A layer of its image was removed.
    #[error("layer {} of its image is not there any more: pull the image again", path.display())]
    NoLayer {
        /// Where it was.
        path: PathBuf,
    },
    /// An older mount of the same upper directories is alive, and still is a second later.
    #[error("{} is still mounted", dir.display())]
    InUse {
        /// The proc's directory.
        dir: PathBuf,
    },
    /// They are to be read-only.
    #[error("its files cannot be made read-only")]
    ReadOnly(#[source] io::Error),
    /// Where its own files are to lie is not to be had; why.
    #[error("{0}")]
    Place(String),
    /// The launcher could not mount it.
    #[error(transparent)]
    Launch(#[from] LaunchError),
}

fn failed<E: Into<io::Error>>(action: &'static str, path: &Path) -> impl FnOnce(E) -> RootfsError {
    let path = path.to_owned();
    move |e| RootfsError::Io { action, path, source: e.into() }
}

impl RootfsSpec {
    /// Makes the upper and work directories unless they are there, and mounts both overlays.
    ///
    /// # Errors
    /// See [`RootfsError`]. Directories may have been made; they are harmless.
    pub fn mount(&self, launcher: &Launcher, user_namespace: BorrowedFd<'_>) -> Result<Mounts, RootfsError> {
        if self.kind == RootKind::Writable {
            self.make_dirs()?;
        }
        let until = Instant::now() + OLD_MOUNT_GOES;
        loop {
            match self.try_mount(launcher, user_namespace) {
                Err(RootfsError::InUse { .. }) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                done => return done,
            }
        }
    }

    /// Whether all layers of its image are there.
    ///
    /// # Errors
    /// [`RootfsError::NoLayer`] names the first that is not.
    pub fn check_layers(&self) -> Result<(), RootfsError> {
        match self.image.iter().flatten().find(|layer| !layer.is_dir()) {
            Some(absent) => Err(RootfsError::NoLayer { path: absent.clone() }),
            None => Ok(()),
        }
    }

    fn try_mount(&self, launcher: &Launcher, user_namespace: BorrowedFd<'_>) -> Result<Mounts, RootfsError> {
        let mapped = |path: PathBuf| map_tree(&path, user_namespace);
        let state = match self.kind {
            RootKind::Writable => clone_tree(&self.dir)?,
            RootKind::Sealed => mapped(self.dir.clone())?,
        };
        if let Some(layers) = &self.image {
            self.check_layers()?;
            let pins = self.pins.iter().map(|p| p.join("root"));
            let root = pins.chain([self.base.clone()]).chain(visible(layers, Path::new(""))?);
            let all: Vec<PathBuf> = root.collect();
            let usr: Vec<usize> = visible(&all, Path::new("usr"))?
                .iter()
                .map(|usr| all.iter().position(|layer| usr.starts_with(layer)).expect("each is below one of them"))
                .collect();
            let root = all.into_iter().map(mapped).collect::<Result<Vec<_>, _>>()?;
            let fds: Vec<_> = [&state].into_iter().chain(&root).map(|f| f.as_fd()).collect();
            return launcher.mount(Lower::Image { usr }, self.kind, &fds).map_err(|e| self.explain(e));
        }
        let pins = self.pins.iter();
        let root = pins.clone().map(|p| p.join("root")).chain(self.layer.clone()).chain([self.base.clone()]);
        let layer_usr = self.layer.iter().map(|l| l.join("usr")).filter(|u| u.is_dir());
        let usr = pins.map(|p| p.join("usr")).chain(layer_usr).chain([PathBuf::from("/usr")]);
        let root = root.map(mapped).collect::<Result<Vec<_>, _>>()?;
        let usr = usr.map(mapped).collect::<Result<Vec<_>, _>>()?;
        let fds: Vec<_> = [&state].into_iter().chain(&root).chain(&usr).map(|f| f.as_fd()).collect();
        launcher.mount(Lower::Host { root_layers: root.len() }, self.kind, &fds).map_err(|e| self.explain(e))
    }

    fn explain(&self, error: LaunchError) -> RootfsError {
        match &error {
            LaunchError::Failed(f) if f.step == Step::Overlay => match Errno::from_raw_os_error(f.errno) {
                Errno::STALE => RootfsError::BaseChanged { dir: self.dir.clone() },
                Errno::BUSY => RootfsError::InUse { dir: self.dir.clone() },
                _ => error.into(),
            },
            _ => error.into(),
        }
    }

    /// Lets the upper directories be mounted over other lower ones than before: their memory of
    /// those is taken from them. Only for a cold start, for hard links and file handles of
    /// unchanged files break.
    ///
    /// # Errors
    /// A file could not be changed.
    pub fn forget_base(&self) -> Result<(), RootfsError> {
        for name in ["root", "usr"] {
            let upper = self.dir.join("upper").join(name);
            match rustix::fs::removexattr(&upper, "trusted.overlay.origin") {
                Ok(()) | Err(Errno::NODATA) => {}
                Err(e) => return Err(failed("change", &upper)(e)),
            }
            let work = self.dir.join("work").join(name);
            fs::remove_dir_all(&work).map_err(failed("remove", &work))?;
        }
        self.make_dirs()
    }

    fn make_dirs(&self) -> Result<(), RootfsError> {
        let make = |path: &Path| {
            let made = fs::DirBuilder::new().recursive(true).mode(0o755).create(path);
            made.map_err(failed("create", path))
        };
        for name in ["root", "usr"] {
            make(&self.dir.join("work").join(name))?;
            let upper = self.dir.join("upper").join(name);
            if upper.is_dir() {
                continue;
            }
            // Under its own name only when it is complete: a crash must not leave it with the wrong
            // owner.
            let fresh = self.dir.join("upper").join(format!("{name}.new"));
            let _ = fs::remove_dir_all(&fresh);
            make(&fresh)?;
            self.own(&fresh)?;
            if name == "root" {
                self.write_names(&fresh)?;
                self.write_generation_id(&fresh)?;
            }
            fs::rename(&fresh, &upper).map_err(failed("name", &upper))?;
        }
        Ok(())
    }

    fn own(&self, path: &Path) -> Result<(), RootfsError> {
        chown(path, Some(self.uid_base), Some(self.uid_base)).map_err(failed("give the owner to", path))
    }

    fn write_names(&self, upper: &Path) -> Result<(), RootfsError> {
        let etc = upper.join("etc");
        fs::create_dir(&etc).map_err(failed("create", &etc))?;
        self.own(&etc)?;
        let name = &self.hostname;
        let further = &self.hosts;
        let hosts = format!("127.0.0.1\tlocalhost {name}\n::1\tlocalhost ip6-localhost ip6-loopback {name}\n{further}");
        let own = self.resolv_conf.clone().map(|text| ("resolv.conf", text));
        for (file, text) in [("hosts", hosts), ("hostname", format!("{name}\n"))].into_iter().chain(own) {
            self.write_file(&etc.join(file), &text)?;
        }
        // An image may have one, for a reason of its own.
        if self.below("etc/machine-id").is_none_or(|found| found.len() < 32) {
            self.write_file(&etc.join("machine-id"), &generation_id::machine_id(random::drawn()))?;
        }
        Ok(())
    }

    fn write_file(&self, path: &Path, text: &str) -> Result<(), RootfsError> {
        fs::write(path, text).map_err(failed("write", path))?;
        self.own(path)
    }

    /// What the layers below have there.
    fn below(&self, path: &str) -> Option<fs::Metadata> {
        let layers = self.layer.iter().chain(self.image.iter().flatten()).chain([&self.base]);
        layers.filter_map(|layer| fs::symlink_metadata(layer.join(path)).ok()).next()
    }

    /// Only where /run is a directory, or nothing: a program's files have a shape of their own.
    fn write_generation_id(&self, upper: &Path) -> Result<(), RootfsError> {
        let run = self.below("run");
        if run.as_ref().is_some_and(|run| !run.is_dir()) {
            return Ok(());
        }
        let path = upper.join(generation_id::PATH);
        for directory in [upper.join("run"), upper.join("run/kip")] {
            fs::create_dir(&directory).map_err(failed("create", &directory))?;
            self.own(&directory)?;
        }
        if let Some(run) = run {
            let directory = upper.join("run");
            let [uid, gid] = [run.uid(), run.gid()].map(|id| Some(self.uid_base + id % IDS));
            chown(&directory, uid, gid).map_err(failed("give the owner to", &directory))?;
            fs::set_permissions(&directory, run.permissions()).map_err(failed("change", &directory))?;
        }
        self.write_file(&path, &generation_id::first(random::drawn()))
    }
}

/// The directories `below` of layers, topmost first, as far as none above hides the others.
fn visible(layers: &[PathBuf], below: &Path) -> Result<Vec<PathBuf>, RootfsError> {
    let mut seen = Vec::new();
    for layer in layers {
        let dir = layer.join(below);
        match fs::symlink_metadata(&dir) {
            Ok(meta) if meta.is_dir() => {}
            // A deletion.
            Ok(_) => break,
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(failed("look at", &dir)(e)),
        }
        let opaque = getxattr(&dir, OPAQUE, &mut [0u8; 8][..]).is_ok();
        seen.push(dir);
        if opaque {
            break;
        }
    }
    Ok(seen)
}

/// The tree below a directory, without what is mounted there, as a mount of its own.
fn clone_tree(path: &Path) -> Result<OwnedFd, RootfsError> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    open_tree(CWD, path, flags).map_err(failed("open", path))
}

fn map_tree(path: &Path, user_namespace: BorrowedFd<'_>) -> Result<OwnedFd, RootfsError> {
    let tree = clone_tree(path)?;
    kip_sys::mount::idmap(tree.as_fd(), user_namespace)
        .map_err(|source| RootfsError::NoMapping { path: path.to_owned(), source })?;
    Ok(tree)
}
