//! A file that a client asked for gets its name when it is whole and on the disk; nothing is
//! replaced.

use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// Syncs what has grown at `growing` and names it.
///
/// # Errors
/// `AlreadyExists`: something has that name. The file system's.
pub fn publish(file: &File, growing: &Path, name: &Path) -> io::Result<()> {
    file.sync_all()?;
    rustix::fs::renameat_with(CWD, growing, CWD, name, RenameFlags::NOREPLACE)?;
    File::open(name.parent().unwrap_or(Path::new("/")))?.sync_all()
}

/// A file for its owner alone that has no name until it is whole: a process that is killed leaves
/// nothing. Where the file system has no such files it grows as `.NAME.MARK` beside its name, and
/// is removed if it is dropped.
#[derive(Debug)]
pub struct Unnamed {
    file: File,
    name: PathBuf,
    growing: Option<PathBuf>,
}

impl Unnamed {
    /// One that is to have that name. By open(2) with O_TMPFILE, Linux 3.11.
    ///
    /// # Errors
    /// `AlreadyExists`: something has that name. The file system's.
    pub fn create(name: &Path, mark: &str) -> io::Result<Unnamed> {
        if fs::symlink_metadata(name).is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let directory = name.parent().unwrap_or(Path::new("/"));
        let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
        match rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR) {
            Ok(file) => Ok(Unnamed { file: file.into(), name: name.to_owned(), growing: None }),
            // EISDIR of a kernel, EOPNOTSUPP of a file system without.
            Err(Errno::OPNOTSUPP | Errno::ISDIR) => {
                let last = name.file_name().unwrap_or_default().to_string_lossy();
                let growing = name.with_file_name(format!(".{last}.{mark}"));
                let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&growing)?;
                Ok(Unnamed { file, name: name.to_owned(), growing: Some(growing) })
            }
            Err(e) => Err(e.into()),
        }
    }

    /// To write to.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Syncs it and gives it its name. By linkat(2) with AT_SYMLINK_FOLLOW, Linux 2.6.18.
    ///
    /// # Errors
    /// As [`publish`].
    pub fn publish(mut self) -> io::Result<()> {
        if let Some(growing) = self.growing.take() {
            return publish(&self.file, &growing, &self.name).inspect_err(|_| drop(fs::remove_file(&growing)));
        }
        self.file.sync_all()?;
        let own = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        rustix::fs::linkat(CWD, own, CWD, &self.name, AtFlags::SYMLINK_FOLLOW)?;
        File::open(self.name.parent().unwrap_or(Path::new("/")))?.sync_all()
    }
}

impl Drop for Unnamed {
    fn drop(&mut self) {
        if let Some(growing) = &self.growing {
            let _ = fs::remove_file(growing);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn a_file_has_a_name_when_it_is_whole_and_replaces_none() {
        let place = std::env::temp_dir().join(format!("kip-publish-{}", std::process::id()));
        fs::create_dir_all(&place).unwrap();
        let name = place.join("file");
        let one = Unnamed::create(&name, "kip-test").unwrap();
        let other = Unnamed::create(&name, "kip-test").unwrap();
        one.file().write_all(b"whole").unwrap();
        if one.growing.is_none() {
            assert_eq!(fs::read_dir(&place).unwrap().count(), 0);
        }
        one.publish().unwrap();
        assert_eq!(fs::metadata(&name).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(other.publish().unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(Unnamed::create(&name, "kip-test").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        // Where there are no files without a name.
        let growing = place.join(".named.kip-test");
        let file = File::create(&growing).unwrap();
        let named = Unnamed { file, name: place.join("named"), growing: Some(growing.clone()) };
        named.publish().unwrap();
        let file = File::create(&growing).unwrap();
        drop(Unnamed { file, name: place.join("dropped"), growing: Some(growing) });
        let mut names: Vec<_> = fs::read_dir(&place).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!((names, fs::read(&name).unwrap()), (vec!["file".into(), "named".into()], b"whole".to_vec()));
        fs::remove_dir_all(&place).unwrap();
    }
}
