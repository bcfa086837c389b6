//! Files of slot maps that are no longer needed, kept to be used again.
//!
//! A wake makes one such file for each process before the program runs, and ext4 is slow to make
//! one within a minute of hundreds being removed, as a sleep removes them: it looks at every inode
//! that was freed meanwhile (recently_deleted in the kernel's fs/ext4/ialloc.c). The step `set` of
//! postgres' second wake in bench/park-wake shows it. To rename a file is fast.
//!
//! Owns the directory of spare files; a
//! file that it cannot take or give is made or removed as if there were no spares.

use parking_lot::Mutex;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Most files that are kept.
const MOST: usize = 256;

/// Spare files; none, ever, by default.
#[derive(Debug, Default)]
pub struct Spares {
    directory: PathBuf,
    /// Numbers that are free, and those of spare files.
    names: Mutex<Names>,
}

#[derive(Debug, Default)]
struct Names {
    free: Vec<usize>,
    spare: Vec<usize>,
}

impl Spares {
    /// Those in this directory, which is made if need be, and others to come.
    ///
    /// # Errors
    /// The file system's.
    pub fn in_directory(directory: &Path) -> io::Result<Spares> {
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let is_there = |number: &usize| directory.join(number.to_string()).exists();
        let (spare, free) = (0..MOST).partition(is_there);
        Ok(Spares { directory: directory.into(), names: Mutex::new(Names { free, spare }) })
    }

    fn path(&self, number: usize) -> PathBuf {
        self.directory.join(number.to_string())
    }

    /// Gives a spare file this name; false if there is none.
    pub(crate) fn take(&self, to: &Path) -> bool {
        let Some(number) = self.names.lock().spare.pop() else { return false };
        let taken = fs::rename(self.path(number), to).is_ok();
        self.names.lock().free.push(number);
        taken
    }

    /// Gives a file of the caller's a spare one's name, under which it is not used before
    /// [`Spares::is_free`]; it is removed where that cannot be.
    fn keep(&self, file: &Path) -> Option<usize> {
        let number = self.names.lock().free.pop();
        let kept = number.filter(|number| fs::rename(file, self.path(*number)).is_ok());
        if kept.is_none() {
            self.names.lock().free.extend(number);
            let _ = fs::remove_file(file);
        }
        kept
    }

    /// The file of this number has no user any more. It is emptied here, so that no wake has to.
    fn is_free(&self, number: usize) {
        let _ = OpenOptions::new().write(true).truncate(true).open(self.path(number));
        self.names.lock().spare.push(number);
    }
}

/// What a file of a slot map is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Name {
    /// As its proc has it.
    Own,
    /// It is given up, and becomes the spare file of this number; none: it is removed.
    GivenUp(Option<usize>),
}

/// A file of a slot map, which may be given up: as the last field of what has it open and mapped.
#[derive(Debug)]
pub(crate) struct Spare {
    pub(crate) path: PathBuf,
    spares: Arc<Spares>,
    name: Name,
}

impl Spare {
    pub(crate) fn new(path: &Path, spares: Arc<Spares>) -> Spare {
        Spare { path: path.into(), spares, name: Name::Own }
    }

    pub(crate) fn spares(&self) -> &Arc<Spares> {
        &self.spares
    }

    /// The path is another file's from now on.
    pub(crate) fn give_up(&mut self) {
        if self.name == Name::Own {
            self.name = Name::GivenUp(self.spares.keep(&self.path));
        }
    }

    pub(crate) fn is_given_up(&self) -> bool {
        self.name != Name::Own
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        if let Name::GivenUp(Some(number)) = self.name {
            self.spares.is_free(number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given_up(file: &Path, spares: &Arc<Spares>) -> Spare {
        fs::write(file, b"old").unwrap();
        let mut spare = Spare::new(file, spares.clone());
        spare.give_up();
        spare
    }

    #[test]
    fn files_are_kept_empty_and_used_again_by_a_later_pager_too() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("spares");
        let spares = Arc::new(Spares::in_directory(&place).unwrap());
        let file = dir.path().join("map");
        assert!(!spares.take(&file) && !file.exists());
        fs::write(&file, b"old").unwrap();
        drop(Spare::new(&file, spares.clone()));
        assert_eq!(fs::read(&file).unwrap(), b"old", "it was not given up: a later pager adopts it");
        drop(given_up(&file, &spares));
        assert!(!file.exists());
        let later = Spares::in_directory(&place).unwrap();
        assert!(later.take(&file) && !later.take(&dir.path().join("other")));
        assert_eq!(fs::read(&file).unwrap(), b"");
    }

    #[test]
    fn one_that_is_dropped_late_is_no_harm_to_the_next_of_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let spares = Arc::new(Spares::in_directory(&dir.path().join("spares")).unwrap());
        let file = dir.path().join("map");
        let late = given_up(&file, &spares);
        fs::write(&file, b"new").unwrap();
        assert!(!spares.take(&dir.path().join("other")), "it is still used");
        drop(late);
        assert_eq!(fs::read(&file).unwrap(), b"new");
        assert!(spares.take(&dir.path().join("other")));
    }

    #[test]
    fn what_is_too_many_or_cannot_be_kept_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let spares = Arc::new(Spares::in_directory(&dir.path().join("spares")).unwrap());
        let file = dir.path().join("map");
        for _ in 0..MOST + 1 {
            drop(given_up(&file, &spares));
            assert!(!file.exists());
        }
        assert_eq!(fs::read_dir(dir.path().join("spares")).unwrap().count(), MOST);
        fs::remove_dir_all(dir.path().join("spares")).unwrap();
        assert!(!spares.take(&file));
        drop(given_up(&file, &spares));
        assert!(!file.exists(), "there is no directory");
        drop(given_up(&file, &Arc::default()));
        assert!(!file.exists());
    }
}
