//! The skeleton: the lowest layer of every sandbox's root, made from an allowlist of the host's
//! files.
//!
//! Owns `DIR/<fingerprint>/`, one directory per state of the host's files, never changed once it
//! has that name, because a sleeping proc may have it below its root. Copies only regular files,
//! directories and links that every user may read, and of /etc only what is on the list, so never
//! shadow, private keys or another server's settings. /etc/shadow is made, with the host's users
//! and no password. /usr is not in it but mounted from the host; of /var/lib, /var/log, /var/cache
//! and /var/spool there are the directories that packages bring, empty, so that a server finds a
//! place that its own user may write to.
//!
//! Beside it `DIR/image-<fingerprint>/`, which lies *above* the layers of an image: only what every
//! sandbox needs to run at all, our pid 1, the devices, places for mounts and the name servers.
//! Nothing else of the host is in a proc that has an image.
//!
//! A crash leaves `DIR/.new-*`, which the next call removes.

use crate::init;
use crate::rootfs::OPAQUE;
use kip_types::runtime;
use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, Timespec, Timestamps, Uid, XattrFlags, chownat, mknodat, setxattr, utimensat,
};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// What of the host's /etc every sandbox has: files, links and whole directories. What the host
/// lacks is left out.
pub const ETC: &[&str] = &[
    "adduser.conf",
    "alternatives",
    "bash.bashrc",
    "bindresvport.blacklist",
    "ca-certificates.conf",
    "chromium",
    "chromium.d",
    "debian_version",
    "environment",
    "ethertypes",
    "fonts",
    "gai.conf",
    "group",
    "host.conf",
    "inputrc",
    "java-11-openjdk",
    "java-17-openjdk",
    "java-21-openjdk",
    "ld-musl-x86_64.d",
    "ld-musl-x86_64.path",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "libaudit.conf",
    "locale.alias",
    "locale.conf",
    "localtime",
    "login.defs",
    "lsb-release",
    "magic",
    "magic.mime",
    "mime.types",
    "nanorc",
    "netconfig",
    "networks",
    "nsswitch.conf",
    "os-release",
    "pam.conf",
    "pam.d",
    "passwd",
    "perl",
    "profile",
    "profile.d",
    "protocols",
    "python3",
    "python3.10",
    "python3.11",
    "python3.12",
    "python3.13",
    "rpc",
    "security",
    "services",
    "shells",
    "skel",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
    "vim",
];

/// Directories, with their modes. Those of /etc come with their files.
const DIRS: &[(&str, u32)] = &[
    ("etc", 0o755),
    ("dev", 0o755),
    ("dev/pts", 0o755),
    ("dev/shm", 0o1777),
    ("home", 0o755),
    ("media", 0o755),
    ("mnt", 0o755),
    ("opt", 0o755),
    ("proc", 0o555),
    ("root", 0o700),
    ("run", 0o755),
    ("run/lock", 0o1777),
    ("srv", 0o755),
    ("sys", 0o555),
    ("tmp", 0o1777),
    ("usr", 0o755),
    ("var", 0o755),
    ("var/backups", 0o755),
    ("var/cache", 0o755),
    ("var/lib", 0o755),
    ("var/local", 0o755),
    ("var/log", 0o755),
    ("var/mail", 0o1777),
    ("var/opt", 0o755),
    ("var/spool", 0o755),
    ("var/tmp", 0o1777),
    (".kip", 0o755),
];

/// Those above the layers of an image.
const OVER_IMAGE: &[(&str, u32)] = &[
    ("etc", 0o755),
    ("dev", 0o755),
    ("dev/pts", 0o755),
    ("dev/shm", 0o1777),
    ("proc", 0o555),
    ("sys", 0o555),
    ("usr", 0o755),
    (".kip", 0o755),
];

/// Links, where they lead to, relative or seen from inside.
const LINKS: &[(&str, &str)] = &[
    ("etc/mtab", "/proc/mounts"),
    ("var/run", "/run"),
    ("var/lock", "/run/lock"),
    ("dev/fd", "/proc/self/fd"),
    ("dev/stdin", "/proc/self/fd/0"),
    ("dev/stdout", "/proc/self/fd/1"),
    ("dev/stderr", "/proc/self/fd/2"),
    ("dev/ptmx", "pts/ptmx"),
];

/// Links of a merged /usr; made where the host has that directory under /usr.
pub const USR_LINKS: &[&str] = &["bin", "sbin", "lib", "lib32", "lib64", "libx32"];

/// Name of the directory for sealed roots; another one for other contents.
const SEALED: &str = "sealed-1";

/// Character devices: name, major, minor (Linux Documentation/admin-guide/devices.txt).
pub const DEVICES: &[(&str, u32, u32)] =
    &[("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0)];

/// The skeleton could not be built.
#[derive(Debug, thiserror::Error)]
#[error("could not {action} {} for the base of sandboxes", path.display())]
pub struct BaseError {
    action: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

fn failed<E: Into<io::Error>>(action: &'static str, path: &Path) -> impl FnOnce(E) -> BaseError {
    let path = path.to_owned();
    move |e| BaseError { action, path, source: e.into() }
}

/// A skeleton on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Base {
    /// The directory that is to be the lowest layer of `/`. Procs remember it: an overlay accepts
    /// no other afterwards.
    pub root: PathBuf,
    /// The directory that is to lie above the layers of an image, with an empty `usr`; remembered
    /// likewise.
    pub over_image: PathBuf,
    /// The directory with the topmost layers of sealed roots, `root` and `usr`: places for mounts.
    pub sealed: PathBuf,
}

impl Base {
    /// Gives the skeleton for the host's present files, building it in `dir` unless it is there.
    ///
    /// # Errors
    /// Naming the file that could not be read or made. Needs root, for device nodes and owners.
    pub fn prepare(dir: &Path) -> Result<Base, BaseError> {
        Self::prepare_from(dir, Path::new("/"))
    }

    fn prepare_from(dir: &Path, host: &Path) -> Result<Base, BaseError> {
        fs::create_dir_all(dir).map_err(failed("create", dir))?;
        remove_remains(dir);
        let root = dir.join(format!("{:016x}", fingerprint(host)));
        ensure(dir, &root, |fresh| build(fresh, host))?;
        let over_image = dir.join(format!("image-{:016x}", fingerprint_over_image(host)));
        ensure(dir, &over_image, |fresh| build_over_image(fresh, host))?;
        let sealed = dir.join(SEALED);
        ensure(dir, &sealed, build_sealed)?;
        Ok(Base { root, over_image, sealed })
    }

    /// Removes the skeletons in `dir` that are neither this one nor in `used`.
    ///
    /// # Errors
    /// A directory could not be read or removed.
    pub fn remove_others(&self, dir: &Path, used: &[PathBuf]) -> Result<(), BaseError> {
        for entry in fs::read_dir(dir).map_err(failed("read", dir))?.flatten() {
            let path = entry.path();
            if path != self.root && path != self.over_image && path != self.sealed && !used.contains(&path) {
                fs::remove_dir_all(&path).map_err(failed("remove", &path))?;
            }
        }
        Ok(())
    }
}

/// Builds a skeleton unless it is there.
fn ensure(dir: &Path, root: &Path, build: impl FnOnce(&Path) -> Result<(), BaseError>) -> Result<(), BaseError> {
    if root.is_dir() {
        return Ok(());
    }
    let fresh = dir.join(format!(".new-{}", std::process::id()));
    build(&fresh).inspect_err(|_| {
        let _ = fs::remove_dir_all(&fresh);
    })?;
    sync_tree(&fresh)?;
    match fs::rename(&fresh, root) {
        // Another build of the same was faster.
        Err(_) if root.is_dir() => drop(fs::remove_dir_all(&fresh)),
        done => done.map_err(failed("name", root))?,
    }
    Ok(())
}

/// No other process builds in this directory: it belongs to one daemon, which holds a lock.
fn remove_remains(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().as_bytes().starts_with(b".new-") {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Changes when any file on the list, its place in the tree, or our own program changes.
fn fingerprint(host: &Path) -> u64 {
    let mut hasher = DefaultHasher::new();
    (init::BINARY, DIRS, LINKS, DEVICES).hash(&mut hasher);
    for name in USR_LINKS {
        host.join("usr").join(name).is_dir().hash(&mut hasher);
    }
    resolv_conf(host).map(|p| fs::read(p).ok()).hash(&mut hasher);
    for name in ETC {
        fingerprint_of(&host.join("etc").join(name), &mut hasher);
    }
    for (name, meta) in state_directories(host) {
        (name, meta.mode(), meta.uid(), meta.gid()).hash(&mut hasher);
    }
    hasher.finish()
}

fn fingerprint_over_image(host: &Path) -> u64 {
    let mut hasher = DefaultHasher::new();
    (init::BINARY, OVER_IMAGE, LINKS, DEVICES).hash(&mut hasher);
    resolv_conf(host).map(|p| fs::read(p).ok()).hash(&mut hasher);
    hasher.finish()
}

fn fingerprint_of(path: &Path, hasher: &mut DefaultHasher) {
    let Ok(meta) = fs::symlink_metadata(path) else { return };
    (path.as_os_str(), meta.mode(), meta.uid(), meta.gid()).hash(hasher);
    if meta.is_dir() {
        let mut names: Vec<_> = fs::read_dir(path).into_iter().flatten().flatten().map(|e| e.path()).collect();
        names.sort();
        names.iter().for_each(|p| fingerprint_of(p, hasher));
    } else if meta.is_symlink() {
        fs::read_link(path).ok().hash(hasher);
    } else {
        (meta.len(), meta.mtime(), meta.mtime_nsec(), meta.ino()).hash(hasher);
    }
}

fn build_sealed(dir: &Path) -> Result<(), BaseError> {
    let socket = dir.join("root").join(runtime::PATH.trim_start_matches('/'));
    let place = socket.parent().expect("it is not the root");
    for directory in [place, &dir.join("usr")] {
        fs::DirBuilder::new().recursive(true).mode(0o755).create(directory).map_err(failed("create", directory))?;
    }
    fs::write(&socket, "").map_err(failed("write", &socket))
}

fn build(root: &Path, host: &Path) -> Result<(), BaseError> {
    make_dir(root, 0o755)?;
    for (name, mode) in DIRS {
        make_dir(&root.join(name), *mode)?;
    }
    for (name, target) in LINKS {
        let path = root.join(name);
        symlink(target, &path).map_err(failed("link", &path))?;
    }
    for name in USR_LINKS.iter().filter(|n| host.join("usr").join(n).is_dir()) {
        let path = root.join(name);
        symlink(Path::new("usr").join(name), &path).map_err(failed("link", &path))?;
    }
    make_devices(root)?;
    for name in ETC {
        copy(&host.join("etc").join(name), &root.join("etc").join(name))?;
    }
    write_shadow(root)?;
    for (name, meta) in state_directories(host) {
        let path = root.join(name);
        make_dir(&path, meta.mode() & 0o7777)?;
        keep_owner_and_time(&path, &meta)?;
    }
    write(&root.join("etc/hosts"), b"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n", 0o644)?;
    write(&root.join("etc/hostname"), b"localhost\n", 0o644)?;
    write(&root.join("etc/fstab"), b"", 0o644)?;
    write_own(root, host)
}

/// Where packages have their state, logs, caches and queues.
const STATE: [&str; 4] = ["var/cache", "var/lib", "var/log", "var/spool"];
/// Users of packages: below the first of people, adduser.conf(5).
const SYSTEM_USERS: std::ops::Range<u32> = 1..1000;

/// The directories of packages below [`STATE`], parents first: those that dpkg knows, and those
/// directly below that belong to a user of the system's.
fn state_directories(host: &Path) -> Vec<(PathBuf, Metadata)> {
    let mut names = named_by_packages(host);
    for state in STATE {
        for entry in fs::read_dir(host.join(state)).into_iter().flatten().flatten() {
            if entry.metadata().is_ok_and(|meta| SYSTEM_USERS.contains(&meta.uid())) {
                names.insert(Path::new(state).join(entry.file_name()));
            }
        }
    }
    let mut found: Vec<(PathBuf, Metadata)> = Vec::new();
    for name in names {
        let Ok(meta) = fs::symlink_metadata(host.join(&name)) else { continue };
        let parent = name.parent();
        let has_parent = STATE.iter().any(|state| parent == Some(Path::new(state)))
            || found.iter().any(|(known, _)| parent == Some(known));
        if meta.is_dir() && has_parent && !name.file_name().is_none_or(private) {
            found.push((name, meta));
        }
    }
    found
}

/// Paths below [`STATE`] in the lists of dpkg(1), without the leading slash.
fn named_by_packages(host: &Path) -> BTreeSet<PathBuf> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(host.join("var/lib/dpkg/info")).into_iter().flatten().flatten() {
        if !entry.file_name().as_bytes().ends_with(b".list") {
            continue;
        }
        let list = fs::read_to_string(entry.path()).unwrap_or_default();
        // A list has a line for each file of a package: most are told apart by their first letters.
        let paths = list.lines().filter(|line| line.starts_with("/var/")).map(|line| Path::new(&line[1..]));
        names.extend(paths.filter(|path| STATE.iter().any(|state| path.starts_with(state))).map(PathBuf::from));
    }
    names
}

/// A shadow(5) for the users of the sandbox, in which no user has a password.
fn write_shadow(root: &Path) -> Result<(), BaseError> {
    let users = fs::read_to_string(root.join("etc/passwd")).unwrap_or_default();
    let names = users.lines().filter_map(|line| line.split(':').next()).filter(|name| !name.is_empty());
    let text: String = names.map(|name| format!("{name}:*:19000:0:99999:7:::\n")).collect();
    let path = root.join("etc/shadow");
    write(&path, text.as_bytes(), 0o640)?;
    let groups = fs::read_to_string(root.join("etc/group")).unwrap_or_default();
    let id = groups.lines().find_map(|line| line.strip_prefix("shadow:")?.split(':').nth(1)?.parse().ok());
    let group = Gid::from_raw(id.unwrap_or(0));
    chownat(CWD, &path, Some(Uid::ROOT), Some(group), AtFlags::empty()).map_err(failed("give the owner to", &path))
}

/// What lies above the layers of an image.
fn build_over_image(root: &Path, host: &Path) -> Result<(), BaseError> {
    make_dir(root, 0o755)?;
    for (name, mode) in OVER_IMAGE {
        make_dir(&root.join(name), *mode)?;
    }
    for (name, target) in LINKS.iter().filter(|(name, _)| name.starts_with("dev/")) {
        let path = root.join(name);
        symlink(target, &path).map_err(failed("link", &path))?;
    }
    make_devices(root)?;
    // An image's own devices are none of the proc's.
    for name in ["dev", ".kip"] {
        let path = root.join(name);
        setxattr(&path, OPAQUE, b"y", XattrFlags::empty()).map_err(failed("close", &path))?;
    }
    write_own(root, host)
}

fn make_devices(root: &Path) -> Result<(), BaseError> {
    for (name, major, minor) in DEVICES {
        let path = root.join("dev").join(name);
        let device = rustix::fs::makedev(*major, *minor);
        mknodat(CWD, &path, FileType::CharacterDevice, Mode::from(0o666), device).map_err(failed("make", &path))?;
        set_mode(&path, 0o666)?;
    }
    Ok(())
}

/// The host's name servers and our pid 1.
fn write_own(root: &Path, host: &Path) -> Result<(), BaseError> {
    if let Some(text) = resolv_conf(host).and_then(|p| fs::read(p).ok()) {
        write(&root.join("etc/resolv.conf"), &text, 0o644)?;
    }
    write(&root.join(init::PATH.trim_start_matches('/')), init::BINARY, 0o755)
}

/// The host's name servers. A resolver on the host's loopback cannot be reached from inside, so
/// where there is one the servers behind it are used (systemd-resolved keeps them in /run).
pub fn resolv_conf(host: &Path) -> Option<PathBuf> {
    let usable = |path: &PathBuf| {
        let text = fs::read_to_string(path).unwrap_or_default();
        text.lines()
            .filter_map(|l| l.strip_prefix("nameserver"))
            .any(|a| !matches!(a.trim(), "::1") && !a.trim().starts_with("127."))
    };
    ["etc/resolv.conf", "run/systemd/resolve/resolv.conf"].iter().map(|p| host.join(p)).find(usable)
}

fn make_dir(path: &Path, mode: u32) -> Result<(), BaseError> {
    fs::DirBuilder::new().recursive(true).mode(mode).create(path).map_err(failed("create", path))?;
    set_mode(path, mode)
}

fn set_mode(path: &Path, mode: u32) -> Result<(), BaseError> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(failed("set the mode of", path))
}

fn write(path: &Path, bytes: &[u8], mode: u32) -> Result<(), BaseError> {
    fs::write(path, bytes).map_err(failed("write", path))?;
    set_mode(path, mode)
}

/// Copies what every user may read, with owner, mode and time; leaves out the rest without a word.
fn copy(from: &Path, to: &Path) -> Result<(), BaseError> {
    let meta = match fs::symlink_metadata(from) {
        Ok(meta) => meta,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(failed("read", from)(e)),
    };
    let parent = to.parent().expect("it is below the root");
    if !parent.is_dir() {
        make_dir(parent, 0o755)?;
    }
    if meta.is_symlink() {
        let target = fs::read_link(from).map_err(failed("read", from))?;
        symlink(target, to).map_err(failed("link", to))?;
    } else if meta.is_dir() && meta.mode() & 0o005 == 0o005 {
        make_dir(to, meta.mode() & 0o7777)?;
        for entry in fs::read_dir(from).map_err(failed("read", from))? {
            let entry = entry.map_err(failed("read", from))?;
            if !private(&entry.file_name()) {
                copy(&entry.path(), &to.join(entry.file_name()))?;
            }
        }
    } else if meta.is_file() && meta.mode() & 0o004 != 0 {
        let bytes = fs::read(from).map_err(failed("read", from))?;
        write(to, &bytes, meta.mode() & 0o777)?;
    } else {
        return Ok(());
    }
    keep_owner_and_time(to, &meta)
}

/// Names that are not copied even where every user may read them.
fn private(name: &OsStr) -> bool {
    let name = name.as_bytes();
    name == b"private" || name.ends_with(b".key") || name.ends_with(b"-") || name.starts_with(b"ssh_host")
}

fn keep_owner_and_time(to: &Path, meta: &Metadata) -> Result<(), BaseError> {
    let (uid, gid) = (Uid::from_raw(meta.uid()), Gid::from_raw(meta.gid()));
    chownat(CWD, to, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW).map_err(failed("give the owner to", to))?;
    if !meta.is_symlink() && meta.mode() & 0o7000 != 0 {
        set_mode(to, meta.mode() & 0o7777)?;
    }
    let time = Timespec { tv_sec: meta.mtime(), tv_nsec: meta.mtime_nsec() };
    let times = Timestamps { last_access: time, last_modification: time };
    utimensat(CWD, to, &times, AtFlags::SYMLINK_NOFOLLOW).map_err(failed("set the time of", to))
}

/// One syncfs(2) for some hundred small files.
fn sync_tree(dir: &Path) -> Result<(), BaseError> {
    let file = fs::File::open(dir).map_err(failed("open", dir))?;
    rustix::fs::syncfs(&file).map_err(failed("sync", dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fake_host() -> tempfile::TempDir {
        let host = tempfile::tempdir().unwrap();
        let etc = host.path().join("etc");
        for dir in ["ssl/certs", "ssl/private", "ssh", "skel"] {
            fs::create_dir_all(etc.join(dir)).unwrap();
        }
        fs::create_dir_all(host.path().join("usr/bin")).unwrap();
        for (name, mode) in
            [("passwd", 0o644), ("shadow", 0o640), ("ssh/ssh_host_rsa_key", 0o600), ("ssl/certs/a.pem", 0o644)]
        {
            write(&etc.join(name), name.as_bytes(), mode).unwrap();
        }
        write(&etc.join("group"), b"root:x:0:\nshadow:x:42:\n", 0o644).unwrap();
        for (name, uid) in [("of-package", 0), ("of-user", 105), ("mine", 0), ("persons", 1000)] {
            let path = host.path().join("var/lib").join(name);
            make_dir(&path, 0o750).unwrap();
            chownat(CWD, &path, Some(Uid::from_raw(uid)), None, AtFlags::empty()).unwrap();
            write(&path.join("secret"), b"x", 0o644).unwrap();
        }
        make_dir(&host.path().join("var/lib/dpkg/info"), 0o755).unwrap();
        let list = b"/.\n/var\n/var/lib\n/var/lib/of-package\n/var/lib/mine/below\n/var/spool\n/var/spool/jobs\n/var/spool/jobs/tabs\n";
        make_dir(&host.path().join("var/spool/jobs/tabs"), 0o730).unwrap();
        write(&host.path().join("var/lib/dpkg/info/p.list"), list, 0o644).unwrap();
        write(&etc.join("skel/.secret"), b"x", 0o600).unwrap();
        write(&etc.join("ssl/certs/server.key"), b"x", 0o644).unwrap();
        write(&etc.join("ssl/private/k"), b"x", 0o644).unwrap();
        write(&etc.join("resolv.conf"), b"nameserver 127.0.0.53\n", 0o644).unwrap();
        host
    }

    #[test]
    fn only_public_files_on_the_list_are_copied() {
        let (host, dir) = (fake_host(), tempfile::tempdir().unwrap());
        let base = Base::prepare_from(dir.path(), host.path()).unwrap();
        for there in ["etc/passwd", "etc/ssl/certs/a.pem", "dev/null", ".kip/init", "etc/hosts", "tmp"] {
            assert!(base.root.join(there).exists(), "{there}");
        }
        for not in
            ["etc/ssh", "etc/ssl/private", "etc/ssl/certs/server.key", "etc/skel/.secret", "etc/resolv.conf", "sbin"]
        {
            assert!(fs::symlink_metadata(base.root.join(not)).is_err(), "{not}");
        }
        assert_eq!(fs::read(base.root.join("etc/shadow")).unwrap(), b"passwd:*:19000:0:99999:7:::\n");
        let meta = fs::metadata(base.root.join("etc/shadow")).unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.uid(), meta.gid()), (0o640, 0, 42));
        assert_eq!(fs::read_link(base.root.join("bin")).unwrap(), Path::new("usr/bin"));
        assert_eq!(fs::metadata(base.root.join("tmp")).unwrap().mode() & 0o7777, 0o1777);
    }

    #[test]
    fn directories_of_packages_are_there_empty_and_their_users() {
        let (host, dir) = (fake_host(), tempfile::tempdir().unwrap());
        let base = Base::prepare_from(dir.path(), host.path()).unwrap();
        let state = base.root.join("var/lib");
        let mut names: Vec<_> = fs::read_dir(&state).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["of-package", "of-user"]);
        let meta = fs::metadata(state.join("of-user")).unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.uid()), (0o750, 105));
        assert!(fs::read_dir(state.join("of-user")).unwrap().next().is_none());
        let below = fs::metadata(base.root.join("var/spool/jobs/tabs")).unwrap();
        assert_eq!(below.mode() & 0o7777, 0o730);
    }

    #[test]
    fn it_is_built_once_and_again_when_the_host_changes() {
        let (host, dir) = (fake_host(), tempfile::tempdir().unwrap());
        let first = Base::prepare_from(dir.path(), host.path()).unwrap();
        let made = fs::metadata(&first.root).unwrap().ino();
        fs::create_dir(dir.path().join(".new-crashed")).unwrap();
        assert_eq!(Base::prepare_from(dir.path(), host.path()).unwrap(), first);
        assert_eq!(fs::metadata(&first.root).unwrap().ino(), made);
        assert!(!dir.path().join(".new-crashed").exists());
        write(&host.path().join("etc/passwd"), b"changed", 0o644).unwrap();
        let second = Base::prepare_from(dir.path(), host.path()).unwrap();
        assert_ne!(second, first);
        assert_eq!(fs::read(second.root.join("etc/passwd")).unwrap(), b"changed");
        assert_eq!(fs::read(first.root.join("etc/passwd")).unwrap(), b"passwd");
        second.remove_others(dir.path(), &[]).unwrap();
        assert!(!first.root.exists() && second.root.exists());
    }
}
