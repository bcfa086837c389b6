//! Finds a CRIU that can do the work and says how to start it.
//!
//! Owns the search order (an explicit path, the private prefix that `scripts/setup-criu` fills,
//! PATH) and the oldest version that will do. It runs `criu --version` of each candidate, about 5
//! ms, so callers search once and keep the answer. Never dumps or restores anything and changes
//! nothing on disk: a crash leaves nothing behind.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where `scripts/setup-criu` unpacks CRIU together with its own libraries.
pub const PRIVATE_PREFIX: &str = "/usr/local/lib/kip/criu";

/// The oldest CRIU that will do: 4.1 cannot dump any socket on kernels from 6.16.
pub const OLDEST: CriuVersion = CriuVersion { major: 4, minor: 2, patch: 0 };

/// A CRIU release.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CriuVersion {
    /// 4 of 4.2.1.
    pub major: u32,
    /// 2 of 4.2.1.
    pub minor: u32,
    /// 1 of 4.2.1; 0 where it is not given.
    pub patch: u32,
}

impl CriuVersion {
    /// Reads what `criu --version` prints: a line `Version: 4.2.1`, others ignored.
    pub fn parse(output: &str) -> Option<CriuVersion> {
        let text = output.lines().find_map(|line| line.strip_prefix("Version:"))?.trim();
        let mut numbers = text.split('.').map(|part| {
            let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
            part[..digits].parse::<u32>().ok()
        });
        let (major, minor) = (numbers.next()??, numbers.next()??);
        Some(CriuVersion { major, minor, patch: numbers.next().flatten().unwrap_or(0) })
    }
}

impl fmt::Display for CriuVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)?;
        if self.patch > 0 { write!(f, ".{}", self.patch) } else { Ok(()) }
    }
}

/// Which rule of the search found it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// `--criu PATH`.
    Explicit,
    /// [`PRIVATE_PREFIX`].
    PrivatePrefix,
    /// A directory of PATH, or /usr/local/sbin, /usr/sbin, /sbin.
    Path,
}

/// How to start CRIU: `program args.. SUBCOMMAND..` with `env` added to the environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CriuCommand {
    /// The executable; for a private tree its own dynamic loader.
    pub program: PathBuf,
    /// What comes before the subcommand (`swrk`, `check`, ..).
    pub args: Vec<OsString>,
    /// Variables to add.
    pub env: Vec<(OsString, OsString)>,
    /// The version it reported.
    pub version: CriuVersion,
    /// Which rule found it.
    pub origin: Origin,
    /// What a person would call it: the file or the private tree.
    pub path: PathBuf,
}

impl CriuCommand {
    /// A command to which the subcommand and its arguments are still to be added.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args).envs(self.env.iter().map(|(k, v)| (k, v)));
        command
    }
}

/// No usable CRIU. The message says what was found and what to do.
#[derive(Debug, thiserror::Error)]
pub enum LocateError {
    /// Nothing at any of the places.
    #[error("no CRIU in {}: `kip doctor` says how to install it, or give --criu PATH", list(.searched))]
    NotFound {
        /// The places, in the order of the search.
        searched: Vec<PathBuf>,
    },
    /// The newest one found is too old.
    #[error("CRIU {found} in {} is too old, {OLDEST} or newer is needed: `kip doctor` says how to install it, or give --criu PATH", path.display())]
    TooOld {
        /// Where.
        path: PathBuf,
        /// What it reported.
        found: CriuVersion,
    },
    /// It could not be started.
    #[error("CRIU in {} cannot be started", path.display())]
    NotStarted {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It started but did not report a version.
    #[error("{} does not report a CRIU version: {output}", path.display())]
    NotCriu {
        /// Where.
        path: PathBuf,
        /// The first line it printed.
        output: String,
    },
    /// The directory is no tree as `scripts/setup-criu` unpacks it.
    #[error("{} holds no usr/sbin/criu with its libraries in usr/lib/*: give the program itself, or run scripts/setup-criu --prefix DIR", path.display())]
    NotATree {
        /// Where.
        path: PathBuf,
    },
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// Searches for CRIU: `explicit` alone if given (a program, or a tree as `scripts/setup-criu`
/// unpacks it), else the private prefix, then PATH. The first that is new enough is taken.
pub fn locate(explicit: Option<&Path>) -> Result<CriuCommand, LocateError> {
    match explicit {
        Some(path) => probe(path, Origin::Explicit),
        None => search(Path::new(PRIVATE_PREFIX), std::env::var_os("PATH").as_deref()),
    }
}

fn search(prefix: &Path, path: Option<&OsStr>) -> Result<CriuCommand, LocateError> {
    let mut searched = vec![prefix.to_owned()];
    let mut failure = None;
    let mut candidates = Vec::new();
    if prefix.exists() {
        candidates.push((prefix.to_owned(), Origin::PrivatePrefix));
    }
    for dir in path_dirs(path) {
        let file = dir.join("criu");
        if file.is_file() {
            candidates.push((file, Origin::Path));
        }
        searched.push(dir);
    }
    for (candidate, origin) in candidates {
        match probe(&candidate, origin) {
            Ok(command) => return Ok(command),
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    Err(failure.unwrap_or(LocateError::NotFound { searched }))
}

/// PATH's directories, then those where distributions put CRIU and which PATH often lacks.
fn path_dirs(path: Option<&OsStr>) -> Vec<PathBuf> {
    let mut dirs: Vec<PathBuf> = path.map(|p| std::env::split_paths(p).collect()).unwrap_or_default();
    dirs.extend(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from));
    let mut seen = std::collections::HashSet::new();
    dirs.retain(|dir| dir.is_absolute() && seen.insert(dir.clone()));
    dirs
}

/// Asks one candidate for its version.
fn probe(path: &Path, origin: Origin) -> Result<CriuCommand, LocateError> {
    let (program, args, env) = if path.is_dir() { tree(path)? } else { (path.to_owned(), vec![], vec![]) };
    let mut found = CriuCommand { program, args, env, version: OLDEST, origin, path: path.to_owned() };
    let output = found
        .command()
        .arg("--version")
        .output()
        .map_err(|source| LocateError::NotStarted { path: path.to_owned(), source })?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    found.version = CriuVersion::parse(&stdout).ok_or_else(|| LocateError::NotCriu {
        path: path.to_owned(),
        output: stdout.lines().chain(stderr.lines()).next().unwrap_or("(nothing)").to_owned(),
    })?;
    if found.version < OLDEST {
        return Err(LocateError::TooOld { path: path.to_owned(), found: found.version });
    }
    Ok(found)
}

type Start = (PathBuf, Vec<OsString>, Vec<(OsString, OsString)>);

/// How to start the CRIU of a private tree: by the tree's own loader, with the tree's libraries and
/// no others, and without the machine's plugins, which belong to another version: CRIU insists on a
/// directory of plugins, so it is given one that has none.
fn tree(root: &Path) -> Result<Start, LocateError> {
    let not_a_tree = || LocateError::NotATree { path: root.to_owned() };
    let criu = root.join("usr/sbin/criu");
    if !criu.is_file() {
        return Err(not_a_tree());
    }
    let mut libs: Vec<PathBuf> = entries(&root.join("usr/lib")).filter(|dir| dir.join("libc.so.6").exists()).collect();
    libs.sort();
    let lib = libs.into_iter().next().ok_or_else(not_a_tree)?;
    let loader = entries(&lib).find(|file| is_loader(file)).ok_or_else(not_a_tree)?;
    let args = vec!["--inhibit-cache".into(), "--library-path".into(), lib.into_os_string(), criu.into_os_string()];
    let plugins = root.join("usr/sbin");
    Ok((loader, args, vec![("CRIU_LIBS_DIR".into(), plugins.into_os_string())]))
}

fn entries(dir: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// ld-linux-x86-64.so.2, ld-linux-aarch64.so.1, ld64.so.2: glibc's loader by its name on each
/// architecture.
fn is_loader(file: &Path) -> bool {
    let name = file.file_name().and_then(OsStr::to_str).unwrap_or_default();
    (name.starts_with("ld-linux") || name.starts_with("ld64.")) && name.contains(".so.")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory that goes when the test ends, however it ends.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let dir = std::env::temp_dir().join(format!("kip-locate-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&dir).unwrap();
            Scratch(dir)
        }

        /// A program named criu that reports `version`.
        fn criu(&self, dir: &str, version: &str) -> PathBuf {
            let file = self.0.join(dir).join("criu");
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            program(&file, &format!("echo 'Version: {version}'"));
            file
        }
    }

    /// Writes a shell program. Another process does it: a file this one has open for writing, and a
    /// thread's child inherits for a moment, cannot be executed.
    fn program(file: &Path, body: &str) {
        let write = "printf '#!/bin/sh\\n%s\\n' \"$1\" >\"$0\" && chmod 755 \"$0\"";
        assert!(Command::new("sh").args(["-c", write]).arg(file).arg(body).status().unwrap().success());
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn reads_versions() {
        let v = |major, minor, patch| Some(CriuVersion { major, minor, patch });
        assert_eq!(CriuVersion::parse("Version: 4.2.1\n"), v(4, 2, 1));
        assert_eq!(CriuVersion::parse("Warn  (x.c:1): y\nVersion: 4.2\nGitID: v4.2-3-g1\n"), v(4, 2, 0));
        assert_eq!(CriuVersion::parse("Version: 4.3-rc1\n"), v(4, 3, 0));
        assert_eq!(CriuVersion::parse("Version: 10.0\n"), v(10, 0, 0));
        for bad in ["", "4.2", "Version: x.y", "Version: 4"] {
            assert_eq!(CriuVersion::parse(bad), None, "{bad}");
        }
        assert!(CriuVersion::parse("Version: 10.0") > CriuVersion::parse("Version: 4.2.1"));
        assert_eq!(CriuVersion { major: 4, minor: 2, patch: 0 }.to_string(), "4.2");
    }

    // promise commands: CRIU: `--criu`, then the private prefix, then PATH; 4.2 or newer
    // held by: this,
    //   `kip_checkpoint::locate::tests::the_private_prefix_is_preferred_and_started_by_its_own_loader`,
    //   `kip_checkpoint::locate::tests::path_is_searched_in_order_and_too_old_ones_are_passed_over`
    #[test]
    fn explicit_is_the_only_one_asked() {
        let scratch = Scratch::new("explicit");
        let old = scratch.criu("old", "3.17.1");
        match locate(Some(&old)) {
            Err(LocateError::TooOld { path, found }) => {
                assert_eq!((path, found.to_string()), (old, "3.17.1".to_owned()));
            }
            other => panic!("{other:?}"),
        }
        let missing = scratch.0.join("none");
        assert!(matches!(locate(Some(&missing)), Err(LocateError::NotStarted { .. })));
        assert!(matches!(locate(Some(&scratch.0)), Err(LocateError::NotATree { .. })));
        assert!(matches!(locate(Some(Path::new("/bin/true"))), Err(LocateError::NotCriu { .. })));
    }

    #[test]
    fn path_is_searched_in_order_and_too_old_ones_are_passed_over() {
        let scratch = Scratch::new("path");
        scratch.criu("a", "3.17");
        let good = scratch.criu("b", "4.2");
        scratch.criu("c", "5.0");
        let dirs = ["a", "b", "c"].map(|d| scratch.0.join(d));
        let found = search(&scratch.0.join("no-prefix"), Some(&std::env::join_paths(&dirs).unwrap())).unwrap();
        assert_eq!((found.path, found.origin, found.args.len()), (good, Origin::Path, 0));
        let refused = search(&scratch.0.join("no-prefix"), Some(dirs[0].as_os_str()));
        // The machine's own CRIU, if there is one, comes after PATH's.
        if let Err(error) = refused {
            assert!(error.to_string().contains("CRIU 3.17"), "{error}");
        }
    }

    #[test]
    fn the_private_prefix_is_preferred_and_started_by_its_own_loader() {
        let scratch = Scratch::new("tree");
        let lib = scratch.0.join("tree/usr/lib/some-linux-gnu");
        std::fs::create_dir_all(&lib).unwrap();
        std::fs::create_dir_all(scratch.0.join("tree/usr/sbin")).unwrap();
        std::fs::write(lib.join("libc.so.6"), "").unwrap();
        std::fs::write(scratch.0.join("tree/usr/sbin/criu"), "").unwrap();
        let loader = lib.join("ld-linux-some.so.1");
        program(&loader, "echo \"Version: 4.9\"; echo \"$@ $CRIU_LIBS_DIR\"");
        let on_path = scratch.criu("bin", "5.0");
        let found = search(&scratch.0.join("tree"), on_path.parent().map(Path::as_os_str)).unwrap();
        assert_eq!((&found.program, found.origin), (&loader, Origin::PrivatePrefix));
        let output = found.command().arg("swrk").output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        let tree = scratch.0.join("tree").display().to_string();
        let expected = format!(
            "--inhibit-cache --library-path {tree}/usr/lib/some-linux-gnu {tree}/usr/sbin/criu swrk {tree}/usr/sbin"
        );
        assert_eq!(said.lines().nth(1), Some(expected.as_str()));
    }

    #[test]
    fn this_machine_has_one_after_set_up() {
        assert!(Path::new(PRIVATE_PREFIX).exists(), "scripts/setup has not put a CRIU into {PRIVATE_PREFIX}");
        let found = locate(None).unwrap();
        assert!(found.version >= OLDEST);
        assert_eq!(found.origin, Origin::PrivatePrefix);
    }
}
