//! Why a program cannot be executed: it is not there, or what it wants to be run by is not, or what
//! it is a link to, as in a virtual environment of Python.
//!
//! execve(2) has one word for both, ENOENT. Reads a few hundred bytes of the program, below the
//! proc's root, and executes nothing.

use crate::tree::RootTree;
use rustix::fs::{CWD, FileType, Mode, OFlags};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// As much of a script's first line as the kernel reads, `BINPRM_BUF_SIZE`.
const FIRST_LINE: usize = 256;
/// Longest name of an interpreter, bytes.
const LONGEST: usize = 4096;
/// The segment of an ELF file that names its interpreter, elf(5).
const PT_INTERP: u32 = 3;
/// Most segments that are looked at.
const MOST_SEGMENTS: usize = 64;
/// Most links that the kernel follows, path_resolution(7).
pub const MOST_LINKS: usize = 40;
/// Directories of the machine whose programs a proc without an image has.
const OF_THE_MACHINE: [&str; 5] = ["/usr", "/bin", "/sbin", "/lib", "/lib64"];

/// Whether a proc without an image has what is at this path of the machine.
pub fn is_of_the_machine(path: &Path) -> bool {
    OF_THE_MACHINE.iter().any(|dir| path.starts_with(dir))
}

/// What is missing: the program, by its path inside, and what it names.
#[derive(Debug, PartialEq, Eq)]
pub struct MissingInterpreter {
    /// The program.
    pub program: PathBuf,
    /// What it names.
    pub interpreter: PathBuf,
    /// How it names it.
    pub names: NamedBy,
    /// Where that leads as a link, if it is one.
    pub target: Option<PathBuf>,
}

/// How a program names what is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NamedBy {
    /// In the first line of a script.
    Script,
    /// It is dynamically linked.
    Linked,
    /// It is a link to that itself.
    Link,
}

impl std::fmt::Display for MissingInterpreter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // They come from an image, and may be of any bytes: a carriage return at the end of a
        // script's first line is the most usual.
        let shown = |path: &Path| path.to_string_lossy().escape_debug().to_string();
        let (program, interpreter) = (shown(&self.program), shown(&self.interpreter));
        if let Some(target) = self.target.as_deref().filter(|_| self.names != NamedBy::Link) {
            let (target, give) = (shown(target), shown(home(target)));
            return write!(
                f,
                "the program {program} is run by {interpreter}, a link to {target}, which is not in the proc's files: give that, too, with -v {give}:{give}:ro"
            );
        }
        match self.names {
            NamedBy::Link => {
                let give = shown(home(&self.interpreter));
                write!(
                    f,
                    "it is a link to {interpreter}, which is not in the proc's files: give that, too, with -v {give}:{give}:ro"
                )
            }
            NamedBy::Script => write!(
                f,
                "the script {program} begins with #!{interpreter}, and there is no {interpreter} in the proc's files: put that there (an image that has it, --tar or -v), or change the first line"
            ),
            NamedBy::Linked => write!(
                f,
                "the program {program} is linked for {interpreter}, and there is no {interpreter} in the proc's files: use one that is built for this system, or an image that has it"
            ),
        }
    }
}

/// Looks for the program as execvp(3) would; none if it is not there, or what it names is.
/// `path` is the PATH that it has.
pub fn missing(tree: &RootTree, program: &str, workdir: Option<&Path>, path: &str) -> Option<MissingInterpreter> {
    let workdir = workdir.unwrap_or(Path::new("/"));
    let candidates: Vec<PathBuf> = match program.contains('/') {
        true => vec![workdir.join(program)],
        false => path.split(':').map(|dir| workdir.join(dir).join(program)).collect(),
    };
    let found = candidates.iter().find_map(|path| Some((path.clone(), open(tree, path)?)));
    let Some((program, file)) = found else {
        let link = |program: PathBuf| Some((led(tree, &program)?, program));
        let (interpreter, program) = candidates.into_iter().find_map(link)?;
        return Some(MissingInterpreter { program, interpreter, names: NamedBy::Link, target: None });
    };
    let (interpreter, names) = named(&file)?;
    let at = workdir.join(&interpreter);
    let missing = || MissingInterpreter { program, interpreter, names, target: led(tree, &at) };
    open(tree, &at).is_none().then(missing)
}

/// What is said of a program that is not there. `of_machine`: the proc has no image, but files of
/// the machine.
pub fn absent(program: &str, path: &str, of_machine: bool) -> String {
    let begin = format!("command {program:?} is not in the proc's files");
    let at = Path::new(program);
    let elsewhere = at.is_absolute() && !is_of_the_machine(at);
    match program.contains('/') {
        true if of_machine && elsewhere => {
            let give = home(at).display();
            format!(
                "{begin}: of this machine these are /usr and a part of /etc; give the program's directory with -v {give}:{give}:ro"
            )
        }
        true => begin,
        false => format!("{begin} (PATH there is {path})"),
    }
}

/// The directory with all that belongs to a program, its libraries for example.
fn home(program: &Path) -> &Path {
    let above = |path: &'_ Path| path.parent().is_some_and(|parent| parent != Path::new("/"));
    let Some(dir) = program.parent().filter(|_| above(program)) else { return program };
    let is_bin = dir.ends_with("bin") || dir.ends_with("sbin");
    dir.parent().filter(|_| is_bin && above(dir)).unwrap_or(dir)
}

/// Where a link leads to; none for anything else.
fn led(tree: &RootTree, path: &Path) -> Option<PathBuf> {
    let next = |path: &Path| {
        let found = tree.find(path, false).ok()?.file?;
        let target = rustix::fs::readlinkat(found, "", Vec::new()).ok()?;
        Some(path.parent().unwrap_or(Path::new("/")).join(text(target.to_bytes())))
    };
    let first = next(path)?;
    std::iter::successors(Some(first), |path| next(path)).take(MOST_LINKS).last()
}

/// A regular file of the tree.
fn open(tree: &RootTree, path: &Path) -> Option<File> {
    let found: OwnedFd = tree.find(path, true).ok()?.file?;
    let is_file = FileType::from_raw_mode(rustix::fs::fstat(&found).ok()?.st_mode) == FileType::RegularFile;
    let again = format!("/proc/self/fd/{}", found.as_raw_fd());
    let open = || rustix::fs::openat(CWD, again, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok();
    is_file.then(open).flatten().map(File::from)
}

/// What a program names, and how.
fn named(file: &File) -> Option<(PathBuf, NamedBy)> {
    let mut head = [0; FIRST_LINE];
    let length = file.read_at(&mut head, 0).ok()?;
    let head = &head[..length];
    if let Some(line) = head.strip_prefix(b"#!") {
        let line = line.split(|byte| *byte == b'\n').next()?;
        let mut words = line.split(|byte| matches!(byte, b' ' | b'\t')).filter(|word| !word.is_empty());
        return Some((text(words.next()?), NamedBy::Script));
    }
    let half = |at: usize| Some(u16::from_le_bytes(head.get(at..at + 2)?.try_into().ok()?));
    let long = |bytes: &[u8], at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    // 64 bits, little end first.
    if !head.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (table, size, count) = (long(head, 32)?, half(54)?, half(56)?);
    let mut segment = [0; 56];
    for number in 0..u64::from(count).min(MOST_SEGMENTS as u64) {
        file.read_exact_at(&mut segment, table.checked_add(number * u64::from(size))?).ok()?;
        if u32::from_le_bytes(segment[..4].try_into().ok()?) == PT_INTERP {
            let length = usize::try_from(long(&segment, 32)?).ok()?.min(LONGEST);
            let mut name = vec![0; length];
            file.read_exact_at(&mut name, long(&segment, 8)?).ok()?;
            return Some((text(name.split(|byte| *byte == 0).next()?), NamedBy::Linked));
        }
    }
    None
}

fn text(bytes: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStrExt;
    PathBuf::from(std::ffi::OsStr::from_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn scripts_and_programs_name_what_runs_them() {
        let dir = tempfile::tempdir().unwrap();
        for (name, contents) in
            [("bin/ok", "#!/bin/sh\n"), ("bin/bad", "#! /opt/py thon\n"), ("bin/sh", "x"), ("bin/plain", "words")]
        {
            fs::create_dir_all(dir.path().join("bin")).unwrap();
            fs::write(dir.path().join(name), contents).unwrap();
        }
        fs::copy("/proc/self/exe", dir.path().join("linked")).unwrap();
        let root = rustix::fs::open(dir.path(), OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        let tree = RootTree::of_proc(root);
        let path = "/none:bin";
        let missing = |program| missing(&tree, program, None, path);
        for fine in ["ok", "plain", "nothing", "/bin/none"] {
            assert_eq!(missing(fine), None, "{fine}");
        }
        let bad = missing("bad").unwrap();
        assert_eq!((bad.program.to_str(), bad.interpreter.to_str()), (Some("/bin/bad"), Some("/opt/py")));
        let linked = missing("./linked").unwrap();
        assert!(linked.names == NamedBy::Linked && linked.interpreter.starts_with("/lib64"), "{linked:?}");
        let workdir = super::missing(&tree, "./bad", Some(Path::new("/bin")), path).unwrap();
        assert_eq!(workdir.program.to_str(), Some("/bin/./bad"));
        std::os::unix::fs::symlink("/opt/py/bin/python3", dir.path().join("bin/python3")).unwrap();
        std::os::unix::fs::symlink("python3", dir.path().join("bin/python")).unwrap();
        fs::write(dir.path().join("bin/tool"), "#!/bin/python\n").unwrap();
        let linked = |program| missing(program).unwrap().to_string();
        let give = "/opt/py/bin/python3, which is not in the proc's files: give that, too, with -v /opt/py:/opt/py:ro";
        assert_eq!(linked("/bin/python"), format!("it is a link to {give}"));
        assert_eq!(linked("tool"), format!("the program /bin/tool is run by /bin/python, a link to {give}"));
    }

    #[test]
    fn absent_programs_are_given_by_directory() {
        let give = |program: &str| absent(program, "/bin", true).rsplit("-v ").next().unwrap().to_owned();
        for (program, dir) in [
            ("/opt/py/bin/python", "/opt/py"),
            ("/root/venv/bin/python", "/root/venv"),
            ("/opt/tool", "/opt"),
            ("/tool", "/tool"),
            ("/bin2/tool", "/bin2"),
        ] {
            assert_eq!(give(program), format!("{dir}:{dir}:ro"));
        }
        for (program, of_machine) in [("/usr/bin/none", true), ("./none", true), ("/opt/none", false)] {
            assert!(absent(program, "/bin", of_machine).ends_with("is not in the proc's files"));
        }
        assert!(absent("none", "/bin", true).ends_with("(PATH there is /bin)"));
    }
}
