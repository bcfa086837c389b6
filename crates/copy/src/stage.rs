//! The directory of a clone: what of its source is copied, what is linked, and what is its own.
//!
//! The generation, the pinned files and the layer of a tarball do not change any more once they are
//! there, and get a second name. The proc's own files are copied, with the ids of the clone's
//! block. Owns the two directories while it works; knows of no record.

use crate::spread::spread;
use crate::tree::{self, How};
use crate::{CopyError, at};
use kip_archive::files::restore::IdShift;
use kip_archive::files::shift::shift;
use kip_records::instance::IDS_PER_BLOCK;
use kip_snapshot::SnapshotError;
use kip_sys::{random, within};
use kip_types::{Generation, generation_id};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// What is copied of a directory, where it is there: without a limit of the disk, and with one.
const OWN: [&str; 2] = ["upper", "disk"];
/// At the top of those, what is made anew.
const MADE_ANEW: [&str; 3] = ["work", "lost+found", "files.new"];
/// What gets a second name.
const LINKED: [&str; 2] = ["pins", "layer"];
/// What a clone's root has its name in.
const NAMED: [&str; 2] = ["root/etc/hostname", "root/etc/hosts"];

/// What is to be copied.
#[derive(Debug, Clone)]
pub struct ProcCopy {
    /// The directory of a proc that does not run.
    pub from: PathBuf,
    /// That of the clone.
    pub to: PathBuf,
    /// First id of the block of each.
    pub ids: (u32, u32),
    /// Host names of each.
    pub names: (String, String),
    /// What the copy is to be.
    pub becomes: Becomes,
}

/// What a copy of a proc's directory becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Becomes {
    /// Nothing that runs: it is kept, and copied from there.
    Kept,
    /// The same proc, as it was.
    TheSame,
    /// Another proc.
    Another,
}

impl ProcCopy {
    /// Gives the copy the generation that it goes on from; a proc that is stopped has none.
    ///
    /// # Errors
    /// As [`ProcCopy::copy_files`].
    pub fn copy_generation(&self, generation: Generation) -> Result<(), CopyError> {
        self.link_generation(generation)?;
        if self.becomes == Becomes::Another {
            spread(&kip_snapshot::path_of(&self.to, generation))?;
        }
        // Of a source that is a copy itself.
        let patches = kip_snapshot::cloned_patches(&self.from, generation).unwrap_or_default();
        kip_snapshot::note_cloned(&self.to, generation, &patches).map_err(at(&self.to))
    }

    /// Copies all but the generation. What an earlier try left there goes.
    ///
    /// # Errors
    /// See [`CopyError`]; what is there by then is the caller's to remove.
    pub fn copy_files(&self) -> Result<(), CopyError> {
        for name in LINKED.iter().chain(&OWN) {
            let path = self.to.join(name);
            match fs::remove_dir_all(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(at(&path)(e)),
                _ => {}
            }
        }
        for name in LINKED.iter().filter(|name| self.from.join(name).is_dir()) {
            tree::copy(&self.from.join(name), &self.to.join(name), How::Linked, &[])?;
        }
        let own: Vec<&str> = OWN.into_iter().filter(|name| self.from.join(name).is_dir()).collect();
        let ids = IdShift { from: self.ids.0, to: self.ids.1, count: IDS_PER_BLOCK };
        for name in own {
            let root = self.to.join(name);
            tree::copy(&self.from.join(name), &root, How::Copied, &MADE_ANEW)?;
            shift(&root, ids).map_err(at(&root))?;
        }
        for upper in ["upper", "disk/upper"] {
            self.rename(&self.to.join(upper));
            self.draw_ids(&self.to.join(upper));
        }
        // A removal takes the directory's name away first.
        match self.from.is_dir() {
            true => Ok(()),
            false => Err(CopyError::Removed),
        }
    }

    fn link_generation(&self, generation: Generation) -> Result<(), CopyError> {
        let from = kip_snapshot::path_of(&self.from, generation);
        let to = kip_snapshot::path_of(&self.to, generation);
        fs::create_dir(&to).map_err(at(&to))?;
        kip_snapshot::link_whole(&from, &to).map_err(|e| match e {
            SnapshotError::Io { source, .. } if source.kind() == io::ErrorKind::WouldBlock => CopyError::Remote,
            other => CopyError::Generation(other),
        })?;
        match kip_snapshot::settle(&to) {
            // Its memory is copied behind the clone.
            Err(SnapshotError::Damaged { .. }) => Ok(()),
            other => other.map_err(CopyError::Generation),
        }
    }

    /// What of the clone's files says its host name, says its own.
    fn rename(&self, upper: &Path) {
        let (from, to) = &self.names;
        for name in NAMED.into_iter().filter(|_| from != to && upper.is_dir()) {
            let change =
                |text: &str| text.split_inclusive('\n').map(|line| renamed(line, from, to)).collect::<String>();
            // Where the program has put something else there, it does not say the host name.
            if let Err(error) = within::rewrite(upper, name, change) {
                tracing::info!(path = %upper.join(name).display(), %error, "a clone's host name is not in its files");
            }
        }
    }

    /// What of the copy's files says which machine it is, and that it is a copy, says so of this
    /// one. What a program has put there in another form is its own.
    fn draw_ids(&self, upper: &Path) {
        let machine = |text: &str| match generation_id::is_machine_id(text) {
            true => generation_id::machine_id(random::drawn()),
            false => text.to_owned(),
        };
        let next = |text: &str| generation_id::next(text, random::drawn()).unwrap_or_else(|| text.to_owned());
        let draw = |path: &str, change: &dyn Fn(&str) -> String| {
            if let Err(error) = within::rewrite(upper, path, change) {
                tracing::debug!(path = %upper.join(path).display(), %error, "an id is not drawn anew");
            }
        };
        if self.becomes == Becomes::Another {
            draw("root/etc/machine-id", &machine);
        }
        if self.becomes != Becomes::Kept {
            draw(&format!("root/{}", generation_id::PATH), &next);
        }
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

/// Copies the files of a volume to another one, which is there; what it had goes.
///
/// # Errors
/// [`CopyError::Io`].
pub fn copy_volume(from: &Path, to: &Path) -> Result<(), CopyError> {
    fs::remove_dir_all(to).map_err(at(to))?;
    tree::copy(from, to, How::Copied, &[])
}

/// Files that stay open until they are made durable: a clone has a dozen, and a process may have
/// only so many.
const MOST_OPEN: usize = 64;

/// Makes all below a directory durable, but for what is linked and, in `without`, what is not
/// needed once the machine has been started anew.
///
/// # Errors
/// [`CopyError::Io`].
pub fn sync(root: &Path, without: Option<&Path>) -> Result<(), CopyError> {
    let sync_one = |file: File, path: &Path| file.sync_all().map_err(at(path));
    each_own(root, without, sync_one)
}

/// Files and directories that are open to be made durable later: a program to which they belong may
/// put anything in their places meanwhile.
#[derive(Debug, Default)]
pub struct UnsyncedFiles(Vec<File>);

impl UnsyncedFiles {
    /// Opens what [`sync`] makes durable. What is beyond `MOST_OPEN` is made durable at once.
    ///
    /// # Errors
    /// [`CopyError::Io`].
    pub fn open(root: &Path, without: Option<&Path>) -> Result<UnsyncedFiles, CopyError> {
        let mut open = Vec::new();
        each_own(root, without, |file, path| {
            if open.len() < MOST_OPEN {
                open.push(file);
                return Ok(());
            }
            file.sync_all().map_err(at(path))
        })?;
        Ok(UnsyncedFiles(open))
    }

    /// Makes them durable, whatever names they have by now.
    ///
    /// # Errors
    /// The file system's.
    pub fn sync(&self) -> io::Result<()> {
        self.0.iter().try_for_each(File::sync_all)
    }
}

/// Opens all that is below a directory and its own.
fn each_own(
    root: &Path,
    without: Option<&Path>,
    mut take: impl FnMut(File, &Path) -> Result<(), CopyError>,
) -> Result<(), CopyError> {
    let mut left = vec![root.to_owned()];
    while let Some(path) = left.pop() {
        let metadata = fs::symlink_metadata(&path).map_err(at(&path))?;
        if metadata.is_dir() {
            for entry in fs::read_dir(&path).map_err(at(&path))? {
                let entry = entry.map_err(at(&path))?;
                let is_linked = path == root && LINKED.iter().any(|name| entry.file_name() == *name);
                if !is_linked && Some(entry.path().as_path()) != without {
                    left.push(entry.path());
                }
            }
        }
        if metadata.is_dir() || metadata.is_file() {
            take(File::open(&path).map_err(at(&path))?, &path)?;
        }
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
