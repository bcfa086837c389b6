//! Unpacks a tenant's tarball (plain, gzip or zstd) into a directory that becomes a layer over the
//! base, and a layer of an image into one that becomes a layer over that image's other ones.
//!
//! Takes nothing an archive says on trust: every path is resolved by the kernel below the
//! destination (openat2(2), RESOLVE_BENEATH; for layers RESOLVE_IN_ROOT, as a program would see
//! it), whatever links were unpacked before, and what could reach the host or fill its disk is
//! refused with the name of the entry. Owners are kept as the plain ids of the archive, for the
//! layer is mounted with a mapping. Of a tarball's extended attributes none is kept, of a layer's
//! only the user's and file capabilities: overlayfs would believe others. What differs between the
//! two is in [`Form`].
//!
//! The destination appears under its name only when it is complete. A crash leaves `DEST.new`,
//! which the next call for the same destination removes.

mod entries;

use entries::Unpacking;
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// How much an archive may bring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArchiveLimits {
    /// All files together, bytes.
    pub bytes: u64,
    /// Files, directories and links.
    pub entries: u64,
    /// Unpacked bytes per packed byte, beyond the first 256 MiB.
    pub ratio: u64,
}

impl Default for ArchiveLimits {
    fn default() -> Self {
        ArchiveLimits { bytes: 20 << 30, entries: 2_000_000, ratio: 200 }
    }
}

const RATIO_COUNTS_FROM_BYTES: u64 = 256 << 20;

/// What was unpacked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Unpacked {
    /// Contents of files, bytes.
    pub bytes: u64,
    /// Files, directories and links.
    pub entries: u64,
    /// What of a layer was left out, a line each; the first of them.
    pub left_out: Vec<String>,
    /// Directories that had to be made for what is in them, without the archive saying how they
    /// are.
    pub implied: BTreeSet<PathBuf>,
}

/// What an archive is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Lies over the host's files: what it has in `/bin` goes to `/usr/bin`.
    Tarball,
    /// Lies over other layers, of which it may delete something: OCI image specification, "Layer
    /// Filesystem Changeset". Devices are left out, for a proc has its own few.
    Layer,
}

/// An archive was not unpacked, and nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// The archive itself cannot be opened or read, or is cut short or damaged.
    #[error("could not read the archive {}", archive.display())]
    Archive {
        /// The file.
        archive: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// An entry that is not taken.
    #[error("the archive {} is refused: entry {entry:?} {why}", archive.display())]
    Entry {
        /// The file.
        archive: PathBuf,
        /// The entry's name, as the archive has it.
        entry: String,
        /// Why, for people.
        why: String,
    },
    /// All of it is too much.
    #[error("the archive {} is refused: {why}", archive.display())]
    TooMuch {
        /// The file.
        archive: PathBuf,
        /// Which limit was passed.
        why: String,
    },
    /// The destination cannot be written.
    #[error("could not unpack to {}", path.display())]
    Destination {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// What went wrong with one entry, before it has a name.
enum Trouble {
    /// The entry is to blame.
    Refused(String),
    /// The archive's bytes are.
    Archive(io::Error),
    /// A limit.
    TooMuch(String),
    /// Our disk.
    Disk(io::Error),
}

impl From<Errno> for Trouble {
    fn from(e: Errno) -> Self {
        match e {
            Errno::XDEV => Trouble::Refused("leads out of the archive by way of a link".into()),
            Errno::LOOP => Trouble::Refused("goes through a loop of links".into()),
            Errno::NOTDIR => Trouble::Refused("lies below something that is not a directory".into()),
            Errno::NAMETOOLONG | Errno::INVAL | Errno::ILSEQ => {
                Trouble::Refused("has a name that no file can have".into())
            }
            Errno::ISDIR | Errno::NOTEMPTY => Trouble::Refused("takes the place of a directory".into()),
            other => Trouble::Disk(other.into()),
        }
    }
}

/// Unpacks `archive` as the new directory `destination`, whose parent must exist. Needs root, for
/// the owners.
///
/// # Errors
/// See [`UnpackError`]. The destination does not exist then.
pub fn unpack(archive: &Path, destination: &Path, limits: &ArchiveLimits) -> Result<Unpacked, UnpackError> {
    let bad_archive = |source| UnpackError::Archive { archive: archive.to_owned(), source };
    let file = File::open(archive).map_err(bad_archive)?;
    if !file.metadata().map_err(bad_archive)?.is_file() {
        return Err(bad_archive(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")));
    }
    unpack_as(Form::Tarball, PackedArchive { name: archive, bytes: file }, destination, limits, &mut |_| {})
}

/// An archive as it is stored.
#[derive(Debug)]
pub struct PackedArchive<'a, R> {
    /// What it is called in errors.
    pub name: &'a Path,
    /// Its bytes.
    pub bytes: R,
}

/// Unpacks a layer of an image, likewise. `plain` sees every byte of the archive inside, to its
/// end.
///
/// # Errors
/// See [`UnpackError`]. The destination does not exist then.
pub fn unpack_layer(
    packed: PackedArchive<'_, impl Read>,
    destination: &Path,
    limits: &ArchiveLimits,
    plain: &mut dyn FnMut(&[u8]),
) -> Result<Unpacked, UnpackError> {
    unpack_as(Form::Layer, packed, destination, limits, plain)
}

fn unpack_as(
    form: Form,
    packed: PackedArchive<'_, impl Read>,
    destination: &Path,
    limits: &ArchiveLimits,
    plain: &mut dyn FnMut(&[u8]),
) -> Result<Unpacked, UnpackError> {
    let PackedArchive { name: archive, bytes: packed } = packed;
    let bad_archive = |source| UnpackError::Archive { archive: archive.to_owned(), source };
    let bad_destination = |source| UnpackError::Destination { path: destination.to_owned(), source };
    let count = Rc::new(Cell::new(0));
    let stream = open(packed, count.clone()).map_err(bad_archive)?;
    let mut fresh = destination.as_os_str().to_owned();
    fresh.push(".new");
    let fresh = Fresh(PathBuf::from(fresh));
    fresh.clear().and_then(|()| fs::create_dir(&fresh.0)).map_err(bad_destination)?;
    let root = rustix::fs::open(&fresh.0, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| bad_destination(e.into()))?;
    let mut unpacking = Unpacking::new(form, root, limits, count);
    unpacking.all(stream, plain).map_err(|(entry, trouble)| {
        let archive = archive.to_owned();
        match (trouble, entry) {
            (Trouble::Refused(why), entry) => UnpackError::Entry { archive, entry: entry.unwrap_or_default(), why },
            (Trouble::TooMuch(why), _) => UnpackError::TooMuch { archive, why },
            (Trouble::Archive(source), _) => UnpackError::Archive { archive, source },
            (Trouble::Disk(source), _) => UnpackError::Destination { path: destination.to_owned(), source },
        }
    })?;
    rustix::fs::renameat_with(CWD, &fresh.0, CWD, destination, rustix::fs::RenameFlags::NOREPLACE)
        .map_err(|e| bad_destination(e.into()))?;
    Ok(unpacking.done)
}

/// A directory that goes away unless it has been renamed.
struct Fresh(PathBuf);

impl Fresh {
    fn clear(&self) -> io::Result<()> {
        match fs::remove_dir_all(&self.0) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        let _ = self.clear();
    }
}

struct Counted<R> {
    file: R,
    count: Rc<Cell<u64>>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read(buffer)?;
        self.count.set(self.count.get() + n as u64);
        Ok(n)
    }
}

/// The archive's bytes, decompressed according to the magic number.
fn open<'a>(packed: impl Read + 'a, count: Rc<Cell<u64>>) -> io::Result<Box<dyn Read + 'a>> {
    // A first piece of the buffer's size, so that the magic number is in it whole.
    let mut file = BufReader::with_capacity(1 << 16, Whole(Counted { file: packed, count }));
    Ok(match file.fill_buf()? {
        [0x1f, 0x8b, ..] => Box::new(flate2::bufread::MultiGzDecoder::new(file)),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Box::new(zstd::stream::read::Decoder::with_buffer(file)?),
        [] => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it is empty")),
        _ => Box::new(file),
    })
}

/// Fills every buffer to its end as long as there is something.
struct Whole<R>(R);

impl<R: Read> Read for Whole<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.0.read(&mut buffer[filled..]) {
                Ok(0) => break,
                Ok(n) => filled += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(filled)
    }
}

/// Watches the decompressed stream: an archive ends with blocks of zeros, and one that does not was
/// cut short.
struct Watched<'a> {
    stream: Box<dyn Read + 'a>,
    plain: &'a mut dyn FnMut(&[u8]),
    trailing_zeros: Rc<Cell<u64>>,
    left: u64,
}

impl Read for Watched<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.stream.read(buffer)?;
        (self.plain)(&buffer[..n]);
        self.left = self.left.checked_sub(n as u64).ok_or_else(|| io::Error::other("it goes on for ever"))?;
        let zeros = buffer[..n].iter().rev().take_while(|b| **b == 0).count() as u64;
        let before = if zeros == n as u64 { self.trailing_zeros.get() } else { 0 };
        self.trailing_zeros.set(before + zeros);
        Ok(n)
    }
}
