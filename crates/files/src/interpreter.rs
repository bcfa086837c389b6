//! Why a program that is there cannot be executed: what it wants to be run by is not.
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

/// What is missing: the program, by its path inside, and what it names.
#[derive(Debug, PartialEq, Eq)]
pub struct MissingInterpreter {
    /// The program.
    pub program: PathBuf,
    /// What it names.
    pub interpreter: PathBuf,
    /// It is a script; else it is dynamically linked.
    pub is_script: bool,
}

impl std::fmt::Display for MissingInterpreter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // They come from an image, and may be of any bytes: a carriage return at the end of a
        // script's first line is the most usual.
        let shown = |path: &Path| path.to_string_lossy().escape_debug().to_string();
        let (program, interpreter) = (shown(&self.program), shown(&self.interpreter));
        match self.is_script {
            true => write!(
                f,
                "the script {program} begins with #!{interpreter}, and there is no {interpreter} in the proc's files: put that there (an image that has it, --tar or -v), or change the first line"
            ),
            false => write!(
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
    let (program, file) = candidates.into_iter().find_map(|path| Some((path.clone(), open(tree, &path)?)))?;
    let (interpreter, is_script) = named(&file)?;
    let is_there = open(tree, &workdir.join(&interpreter)).is_some();
    (!is_there).then_some(MissingInterpreter { program, interpreter, is_script })
}

/// A regular file of the tree.
fn open(tree: &RootTree, path: &Path) -> Option<File> {
    let found: OwnedFd = tree.find(path, true).ok()?.file?;
    let is_file = FileType::from_raw_mode(rustix::fs::fstat(&found).ok()?.st_mode) == FileType::RegularFile;
    let again = format!("/proc/self/fd/{}", found.as_raw_fd());
    let open = || rustix::fs::openat(CWD, again, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok();
    is_file.then(open).flatten().map(File::from)
}

/// What a program names, and whether it is a script.
fn named(file: &File) -> Option<(PathBuf, bool)> {
    let mut head = [0; FIRST_LINE];
    let length = file.read_at(&mut head, 0).ok()?;
    let head = &head[..length];
    if let Some(line) = head.strip_prefix(b"#!") {
        let line = line.split(|byte| *byte == b'\n').next()?;
        let mut words = line.split(|byte| matches!(byte, b' ' | b'\t')).filter(|word| !word.is_empty());
        return Some((text(words.next()?), true));
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
            return Some((text(name.split(|byte| *byte == 0).next()?), false));
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
        assert!(!linked.is_script && linked.interpreter.starts_with("/lib64"), "{linked:?}");
        let workdir = super::missing(&tree, "./bad", Some(Path::new("/bin")), path).unwrap();
        assert_eq!(workdir.program.to_str(), Some("/bin/./bad"));
    }
}
