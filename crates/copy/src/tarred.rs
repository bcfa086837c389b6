//! Directories as tar streams and back, by GNU tar: with holes, owners as numbers, access lists and
//! extended attributes.
//!
//! Owns how tar is called, alike at both ends, and what tar says when it fails. Never opens the
//! file that a stream comes from or goes to. Crash: tar ends when its pipe does.

use crate::BOUND;
use rustix::fs::MemfdFlags;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::process::{self, ChildStdout, Stdio};

/// What tar has to do alike at both ends.
const ALIKE: &[&str] = &["--numeric-owner", "--acls", "--xattrs", "--xattrs-include=*", "--warning=none"];
/// Most characters of what tar says.
const SAID_MAX: usize = 300;
/// Bytes that are handed to tar at once.
const PIECE: usize = 256 << 10;

/// There is no stream.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each is what it means")]
pub enum TarError {
    #[error("tar cannot be started: install it")]
    NoTar(#[source] io::Error),
    #[error("tar of {part} failed: {said}")]
    Tar { part: String, said: String },
}

/// A stream was not taken apart.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each is what it means")]
pub enum UntarError {
    #[error("tar cannot be started: install it")]
    NoTar(#[source] io::Error),
    #[error("tar failed: {said}")]
    Tar { said: String },
    /// The stream's own error.
    #[error(transparent)]
    Read(io::Error),
}

/// What tar says, in memory: a full disk may be what it complains of.
struct Said(File);

impl Said {
    fn new() -> io::Result<Said> {
        Ok(Said(rustix::fs::memfd_create(c"tar", MemfdFlags::CLOEXEC)?.into()))
    }

    /// For tar.
    fn hand(&self) -> io::Result<File> {
        self.0.try_clone()
    }

    /// The first thing that it said.
    fn line(&mut self) -> String {
        let mut text = String::new();
        let read = self.0.seek(SeekFrom::Start(0)).and_then(|_| self.0.read_to_string(&mut text));
        let line = text.lines().next().filter(|_| read.is_ok()).unwrap_or("it was killed");
        line.chars().take(SAID_MAX).collect()
    }
}

/// Runs tar over `paths` below `directory`, with more arguments, and has `take` read what tar
/// writes. Files that change meanwhile are no error. `part` names the whole for people.
///
/// # Errors
/// [`TarError`]; those of `take`.
pub fn pack<E: From<TarError>>(
    part: &str,
    directory: &Path,
    arguments: &[OsString],
    paths: &[PathBuf],
    take: impl FnOnce(&mut ChildStdout) -> Result<(), E>,
) -> Result<(), E> {
    let mut said = Said::new().map_err(TarError::NoTar)?;
    let mut command = process::Command::new("tar");
    command.args(["--create", "--file=-", "--format=posix", "--sparse", "--no-check-device"]).args(ALIKE);
    for name in BOUND {
        command.args(["trusted", "user"].map(|space| format!("--xattrs-exclude={space}.overlay.{name}")));
    }
    command.arg("--directory").arg(directory).args(arguments).arg("--").args(paths);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(said.hand().map_err(TarError::NoTar)?);
    let mut tar = command.spawn().map_err(TarError::NoTar)?;
    let taken = take(&mut tar.stdout.take().expect("it is piped"));
    if taken.is_err() {
        let _ = tar.kill();
    }
    let status = tar.wait().map_err(TarError::NoTar)?;
    taken?;
    // 1: something changed while it was read.
    if status.code().is_some_and(|code| code <= 1) {
        return Ok(());
    }
    Err(TarError::Tar { part: part.to_owned(), said: said.line() }.into())
}

/// Takes streams apart, one behind the other, into a directory.
///
/// # Errors
/// [`UntarError`]; what was unpacked until then is the caller's to remove.
pub fn unpack(from: &mut impl Read, to: &Path) -> Result<(), UntarError> {
    let mut said = Said::new().map_err(UntarError::NoTar)?;
    let mut command = process::Command::new("tar");
    command.args(["--extract", "--file=-", "--ignore-zeros", "--listed-incremental=/dev/null", "--sparse"]);
    command.args(["--preserve-permissions", "--same-owner", "--delay-directory-restore"]).args(ALIKE);
    command.arg("--directory").arg(to).stdin(Stdio::piped()).stdout(Stdio::null());
    command.stderr(said.hand().map_err(UntarError::NoTar)?);
    let mut tar = command.spawn().map_err(UntarError::NoTar)?;
    let mut pipe = tar.stdin.take().expect("it is piped");
    let mut piece = vec![0; PIECE];
    let copied = loop {
        match from.read(&mut piece) {
            Ok(0) => break Ok(()),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => break Err(UntarError::Read(e)),
            // It has ended, and says why.
            Ok(count) if pipe.write_all(&piece[..count]).is_err() => break Ok(()),
            Ok(_) => {}
        }
    };
    drop(pipe);
    if copied.is_err() {
        let _ = tar.kill();
    }
    let status = tar.wait().map_err(UntarError::NoTar)?;
    copied?;
    if status.success() {
        return Ok(());
    }
    // tar says how much it wrote, and not why no more.
    let full = rustix::fs::statvfs(to).is_ok_and(|found| found.f_bavail * found.f_frsize < PIECE as u64);
    let why = if full { ": no space is left there" } else { "" };
    Err(UntarError::Tar { said: format!("{}{why}", said.line()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::MetadataExt as _;

    fn packed(directory: &Path, arguments: &[&str]) -> Vec<u8> {
        let arguments: Vec<OsString> = arguments.iter().map(OsString::from).collect();
        let mut stream = Vec::new();
        let taken = pack("it", directory, &arguments, &[".".into()], |from: &mut ChildStdout| {
            from.read_to_end(&mut stream).map(drop).map_err(TarError::NoTar)
        });
        taken.unwrap();
        stream
    }

    #[test]
    fn a_directory_comes_back_with_holes_owners_and_attributes() {
        let place = tempfile::tempdir().unwrap();
        let (from, to) = (place.path().join("from"), place.path().join("to"));
        for path in [&from, &from.join("in"), &to] {
            fs::create_dir(path).unwrap();
        }
        let file = File::create(from.join("in/file")).unwrap();
        file.set_len(64 << 20).unwrap();
        fs::write(from.join("left-out"), "x").unwrap();
        std::os::unix::fs::chown(from.join("in/file"), Some(70_000), Some(70_001)).unwrap();
        rustix::fs::lsetxattr(from.join("in"), "user.own", b"value", rustix::fs::XattrFlags::empty()).unwrap();
        let stream = packed(&from, &["--exclude=./left-out"]);
        unpack(&mut &stream[..], &to).unwrap();
        let found = fs::metadata(to.join("in/file")).unwrap();
        assert_eq!((found.len(), found.uid(), found.gid()), (64 << 20, 70_000, 70_001));
        assert!(found.blocks() < 100 && !to.join("left-out").exists());
        let mut value = [0; 16];
        let length = rustix::fs::lgetxattr(to.join("in"), "user.own", &mut value[..]).unwrap();
        assert_eq!(&value[..length], b"value");
    }

    #[test]
    fn what_fails_says_why() {
        let place = tempfile::tempdir().unwrap();
        let none = pack("it", place.path(), &[], &["nothing".into()], |from: &mut ChildStdout| {
            io::copy(from, &mut io::sink()).map(drop).map_err(TarError::NoTar)
        });
        assert!(none.unwrap_err().to_string().starts_with("tar of it failed: "));
        let garbage = unpack(&mut &[7; 4096][..], place.path()).unwrap_err().to_string();
        assert!(garbage.starts_with("tar failed: "), "{garbage}");
    }
}
