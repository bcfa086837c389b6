//! Files of slot maps that are no longer needed, kept to be used again.
//!
//! A wake makes one such file for each process before the program runs, and ext4 takes some 0.3 ms
//! for each that is made within a minute of hundreds being removed, as a sleep removes them: it
//! looks at every inode that was freed meanwhile (recently_deleted in the kernel's
//! fs/ext4/ialloc.c). To rename one takes some microseconds. Owns the directory of spare files; a
//! file that it cannot take or give is made or removed as if there were no spares.

use parking_lot::Mutex;
use std::fs::{self, OpenOptions};
use std::io;
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
        fs::create_dir_all(directory)?;
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

    /// Empties a file that has no user any more, and keeps it.
    fn keep(&self, file: &Path) {
        let Some(number) = self.names.lock().free.pop() else { return drop(fs::remove_file(file)) };
        let emptied = OpenOptions::new().write(true).truncate(true).open(file);
        let kept = emptied.and_then(|_| fs::rename(file, self.path(number))).is_ok();
        let names = &mut *self.names.lock();
        if kept { &mut names.spare } else { &mut names.free }.push(number);
    }
}

/// A file that is a spare once it has been given up and this is dropped: as the last field of what
/// has it open and mapped.
#[derive(Debug)]
pub(crate) struct Spare {
    pub(crate) path: PathBuf,
    spares: Arc<Spares>,
    is_given_up: bool,
}

impl Spare {
    pub(crate) fn new(path: &Path, spares: Arc<Spares>) -> Spare {
        Spare { path: path.into(), spares, is_given_up: false }
    }

    pub(crate) fn spares(&self) -> &Arc<Spares> {
        &self.spares
    }

    pub(crate) fn give_up(&mut self) {
        self.is_given_up = true;
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        if self.is_given_up {
            self.spares.keep(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let mut spare = Spare::new(&file, spares.clone());
        spare.give_up();
        drop(spare);
        assert!(!file.exists());
        let later = Spares::in_directory(&place).unwrap();
        assert!(later.take(&file) && !later.take(&dir.path().join("other")));
        assert_eq!(fs::read(&file).unwrap(), b"");
    }

    #[test]
    fn what_is_too_many_or_cannot_be_kept_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let spares = Spares::in_directory(&dir.path().join("spares")).unwrap();
        let file = dir.path().join("map");
        for _ in 0..MOST + 1 {
            fs::write(&file, b"old").unwrap();
            spares.keep(&file);
            assert!(!file.exists());
        }
        assert_eq!(fs::read_dir(dir.path().join("spares")).unwrap().count(), MOST);
        fs::remove_dir_all(dir.path().join("spares")).unwrap();
        assert!(!spares.take(&file));
        fs::write(&file, b"old").unwrap();
        Spares::default().keep(&file);
        assert!(!file.exists());
    }
}
