//! The directory of a clone: what of its source is copied, what is linked, and what is its own.
//!
//! The generation, the pinned files and the layer of a tarball do not change any more once they are
//! there, and get a second name. The proc's own files are copied, with the ids of the clone's
//! block. Owns the two directories while it works; knows of no record.

use crate::{BOUND, Said, TAR};
use kip_archive::files::restore::IdShift;
use kip_archive::files::shift::shift;
use kip_records::instance::IDS_PER_BLOCK;
use kip_types::Generation;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What is copied of a directory, where it is there: without a limit of the disk, and with one.
const OWN: [&str; 2] = ["upper", "disk"];
/// Below those, what is made anew.
const MADE_ANEW: [&str; 3] = ["disk/work", "disk/lost+found", "disk/files.new"];
/// What gets a second name.
const LINKED: [&str; 2] = ["pins", "layer"];
/// Ends the names of notes about page files of which pages are still in a store.
const REMOTE: &str = "-remote.table";
/// What a clone's root has its name in.
const NAMED: [&str; 2] = ["root/etc/hostname", "root/etc/hosts"];

/// A directory is not there as a whole.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each is what it means")]
pub enum CopyError {
    #[error("cannot read or write {path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("some of its memory is still in the store: wake it, and clone it when all of it has come")]
    Remote,
    #[error("{program} cannot be started: install it")]
    Missing {
        program: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("{program} failed: {said}")]
    Failed { program: &'static str, said: String },
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> CopyError {
    let path = path.to_owned();
    move |source| CopyError::Io { path, source }
}

fn missing(program: &'static str) -> impl Fn(io::Error) -> CopyError {
    move |source| CopyError::Missing { program, source }
}

/// What is to be copied.
#[derive(Debug)]
pub struct ProcCopy {
    /// The directory of a proc that does not run.
    pub from: PathBuf,
    /// That of the clone.
    pub to: PathBuf,
    /// First id of the block of each.
    pub ids: (u32, u32),
    /// The generation that the clone goes on from.
    pub generation: Generation,
    /// Host names of each.
    pub names: (String, String),
}

impl ProcCopy {
    /// Copies.
    ///
    /// # Errors
    /// See [`CopyError`]; what is there by then is the caller's to remove.
    pub fn copy(&self) -> Result<(), CopyError> {
        self.link_generation()?;
        for name in LINKED.iter().filter(|name| self.from.join(name).is_dir()) {
            self.link(name)?;
        }
        let own: Vec<&str> = OWN.into_iter().filter(|name| self.from.join(name).is_dir()).collect();
        if own.is_empty() {
            return Ok(());
        }
        self.copy_files(&own)?;
        let ids = IdShift { from: self.ids.0, to: self.ids.1, count: IDS_PER_BLOCK };
        for name in own {
            let root = self.to.join(name);
            shift(&root, ids).map_err(at(&root))?;
        }
        for upper in ["upper", "disk/upper"] {
            self.rename(&self.to.join(upper))?;
        }
        Ok(())
    }

    fn link_generation(&self) -> Result<(), CopyError> {
        let from = kip_snapshot::path_of(&self.from, self.generation);
        let to = kip_snapshot::path_of(&self.to, self.generation);
        fs::create_dir(&to).map_err(at(&to))?;
        for entry in fs::read_dir(&from).map_err(at(&from))? {
            let entry = entry.map_err(at(&from))?;
            // Pages of such a file come when its proc asks for them, from where that proc has them.
            if entry.file_name().to_string_lossy().ends_with(REMOTE) {
                return Err(CopyError::Remote);
            }
            let link = to.join(entry.file_name());
            fs::hard_link(entry.path(), &link).map_err(at(&link))?;
        }
        Ok(())
    }

    /// A directory with the same attributes, of the same files.
    fn link(&self, name: &str) -> Result<(), CopyError> {
        let output =
            Command::new("cp").args(["--archive", "--link", "--"]).arg(self.from.join(name)).arg(&self.to).output();
        let output = output.map_err(missing("cp"))?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr).lines().next().unwrap_or("it was killed").to_owned();
        Err(CopyError::Failed { program: "cp", said })
    }

    fn copy_files(&self, own: &[&str]) -> Result<(), CopyError> {
        let io = at(&self.to);
        let (mut packer_said, mut unpacker_said) = match (Said::new(), Said::new()) {
            (Ok(packer), Ok(unpacker)) => (packer, unpacker),
            (Err(e), _) | (_, Err(e)) => return Err(io(e)),
        };
        let mut packer = Command::new("tar");
        packer.args(["--create", "--file=-", "--format=posix", "--sparse", "--no-check-device"]).args(TAR);
        for name in BOUND {
            packer.args(["trusted", "user"].map(|space| format!("--xattrs-exclude={space}.overlay.{name}")));
        }
        packer.args(["--anchored", "--no-wildcards"]).args(MADE_ANEW.map(|name| format!("--exclude={name}")));
        packer.arg("--directory").arg(&self.from).arg("--").args(own);
        packer.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(packer_said.hand().map_err(at(&self.to))?);
        let mut packer = packer.spawn().map_err(missing("tar"))?;
        let mut unpacker = Command::new("tar");
        unpacker.args(["--extract", "--file=-", "--sparse", "--preserve-permissions", "--same-owner"]);
        unpacker.arg("--delay-directory-restore").args(TAR).arg("--directory").arg(&self.to);
        unpacker.stdin(packer.stdout.take().expect("it is piped")).stdout(Stdio::null());
        let unpacked = unpacker_said.hand().and_then(|said| unpacker.stderr(said).status());
        let packed = packer.wait().map_err(missing("tar"))?;
        let failed = |said: &mut Said| Err(CopyError::Failed { program: "tar", said: said.line() });
        match unpacked.map_err(missing("tar"))?.success() {
            false => failed(&mut unpacker_said),
            true if !packed.success() => failed(&mut packer_said),
            true => Ok(()),
        }
    }

    /// What of the clone's files says its host name, says its own.
    fn rename(&self, upper: &Path) -> Result<(), CopyError> {
        let (from, to) = &self.names;
        for path in NAMED.map(|name| upper.join(name)) {
            // A link that the program has made there would lead anywhere.
            if from == to || !fs::symlink_metadata(&path).is_ok_and(|found| found.is_file()) {
                continue;
            }
            let text = fs::read_to_string(&path).map_err(at(&path))?;
            let new: Vec<String> = text.split_inclusive('\n').map(|line| renamed(line, from, to)).collect();
            fs::write(&path, new.concat()).map_err(at(&path))?;
        }
        Ok(())
    }
}

/// A line of /etc/hostname, or of /etc/hosts that names the proc itself, with another name.
fn renamed(line: &str, from: &str, to: &str) -> String {
    let mut words = line.split_whitespace();
    let own = words.next().is_some_and(|first| first == from || ["127.0.0.1", "127.0.1.1", "::1"].contains(&first));
    if !own {
        return line.to_owned();
    }
    let end = if line.ends_with('\n') { "\n" } else { "" };
    let word = |word: &str| if word == from { to.to_owned() } else { word.to_owned() };
    let words: Vec<String> =
        line.trim_end().split('\t').map(|part| part.split(' ').map(word).collect::<Vec<_>>().join(" ")).collect();
    format!("{}{end}", words.join("\t"))
}

/// Makes all below a directory durable, but for what is linked.
///
/// # Errors
/// [`CopyError::Io`].
pub fn sync(root: &Path) -> Result<(), CopyError> {
    let metadata = fs::symlink_metadata(root).map_err(at(root))?;
    if metadata.is_dir() {
        for entry in fs::read_dir(root).map_err(at(root))? {
            let entry = entry.map_err(at(root))?;
            let linked = LINKED.iter().any(|name| entry.file_name() == *name);
            if !linked {
                sync(&entry.path())?;
            }
        }
    }
    if metadata.is_dir() || metadata.is_file() {
        File::open(root).and_then(|file| file.sync_all()).map_err(at(root))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_name_the_source_name_the_clone() {
        for (line, new) in [
            ("db\n", "db-1\n"),
            ("db", "db-1"),
            ("127.0.0.1\tlocalhost db\n", "127.0.0.1\tlocalhost db-1\n"),
            ("::1\tlocalhost ip6-localhost db\n", "::1\tlocalhost ip6-localhost db-1\n"),
            ("10.213.0.1\tdb\n", "10.213.0.1\tdb\n"),
            ("127.0.0.1 dbs db\n", "127.0.0.1 dbs db-1\n"),
            ("\n", "\n"),
        ] {
            assert_eq!(renamed(line, "db", "db-1"), new);
        }
    }
}
