//! Deleted files: `ghost-file-NUMBER.img`, the number in hexadecimal.
//!
//! Such an image has an entry of what stat(2) says of the file, and behind it the contents, whole
//! or in chunks, each with an entry of its own. Source: ghost-file.proto of CRIU.

use crate::fields::{ghost_chunk_entry, ghost_file_entry};
use crate::file::{CheckpointImageError, Mixed};
use crate::images::Images;
use crate::wire::Malformed;
use std::io;
use std::path::Path;

/// `S_IFMT` and `S_IFREG` of inode(7).
const KIND: u32 = 0o170_000;
const REGULAR: u32 = 0o100_000;

/// A regular file whose last name was gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GhostFile {
    /// User and group, as numbered inside.
    pub owner: (u32, u32),
    /// `st_mode` of stat(2).
    pub mode: u32,
    /// Bytes.
    pub size: u64,
    /// The image, as a file of the images' directory.
    pub image: String,
    /// Where contents are: place in the image, place in the file, length; bytes. What none has is a
    /// hole.
    pub pieces: Vec<(u64, u64, u64)>,
}

impl Images {
    /// The deleted file of that number; none if it is no regular file, or its image has more than
    /// `most` bytes.
    ///
    /// # Errors
    /// There is none of that number; its image is damaged.
    pub fn ghost(&self, number: u64, most: u64) -> Result<Option<GhostFile>, CheckpointImageError> {
        let image = format!("ghost-file-{number:x}.img");
        let path = self.directory().join(&image);
        let Some(bytes) = read(&path, most).map_err(|source| CheckpointImageError::Io { path, source })? else {
            return Ok(None);
        };
        parse(&image, &bytes).map_err(self.damaged(&image))
    }
}

fn read(path: &Path, most: u64) -> io::Result<Option<Vec<u8>>> {
    Ok(if path.metadata()?.len() > most { None } else { Some(std::fs::read(path)?) })
}

fn parse(image: &str, bytes: &[u8]) -> Result<Option<GhostFile>, Malformed> {
    let mut contents = Mixed::new(bytes)?;
    let entry = contents.entry()?.ok_or(Malformed { at: bytes.len() })?;
    let word = |number| entry.number(number) as u32;
    let mode = word(ghost_file_entry::MODE);
    if mode & KIND != REGULAR {
        return Ok(None);
    }
    let owner = (word(ghost_file_entry::UID), word(ghost_file_entry::GID));
    let mut pieces = Vec::new();
    let size = if entry.number(ghost_file_entry::CHUNKS) == 0 {
        let (at, length) = contents.rest();
        pieces.extend((length > 0).then_some((at, 0, length)));
        length
    } else {
        while let Some(chunk) = contents.entry()? {
            let length = chunk.number(ghost_chunk_entry::LENGTH);
            let (at, _) = contents.rest();
            contents.contents(length as usize)?;
            pieces.push((at, chunk.number(ghost_chunk_entry::OFFSET), length));
        }
        entry.number(ghost_file_entry::SIZE)
    };
    let beyond = |(_, offset, length): &(u64, u64, u64)| offset.checked_add(*length).is_none_or(|end| end > size);
    if pieces.iter().any(beyond) {
        return Err(Malformed { at: bytes.len() });
    }
    Ok(Some(GhostFile { owner, mode, size, image: image.to_owned(), pieces }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Message;

    type Fields<'a> = &'a [(u32, u64)];

    fn image(entries: &[(Fields<'_>, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![0; 8];
        for (fields, contents) in entries {
            let mut entry = Message::default();
            fields.iter().for_each(|(field, value)| entry.set_varint(*field, *value));
            let entry = entry.encode();
            bytes.extend_from_slice(&(entry.len() as u32).to_le_bytes());
            bytes.extend_from_slice(&entry);
            bytes.extend_from_slice(contents);
        }
        // The magic number of an image without a common one is one word.
        bytes.split_off(4)
    }

    const FILE: [(u32, u64); 3] =
        [(ghost_file_entry::UID, 3), (ghost_file_entry::GID, 4), (ghost_file_entry::MODE, 0o100_640)];

    #[test]
    fn a_file_is_whole_or_in_chunks() {
        let whole = image(&[(&FILE, b"contents")]);
        let found = parse("whole", &whole).unwrap().unwrap();
        assert_eq!((found.owner, found.mode, found.size), ((3, 4), 0o100_640, 8));
        let [(at, 0, 8)] = found.pieces[..] else { panic!("{found:?}") };
        assert_eq!(&whole[at as usize..][..8], b"contents");

        let head = [FILE.as_slice(), &[(ghost_file_entry::CHUNKS, 1), (ghost_file_entry::SIZE, 9000)]].concat();
        let chunk =
            |offset: u64, length: u64| [(ghost_chunk_entry::LENGTH, length), (ghost_chunk_entry::OFFSET, offset)];
        let chunks = image(&[(&head, b""), (&chunk(4096, 3), b"one"), (&chunk(8990, 5), b"other")]);
        let found = parse("chunks", &chunks).unwrap().unwrap();
        assert_eq!(found.size, 9000);
        let read = |(at, offset, length): (u64, u64, u64)| (offset, chunks[at as usize..][..length as usize].to_vec());
        let read: Vec<_> = found.pieces.into_iter().map(read).collect();
        assert_eq!(read, [(4096, b"one".to_vec()), (8990, b"other".to_vec())]);
    }

    // promise waking: the image of a deleted file that is damaged, or has contents beyond the end
    //   of the file, is refused
    #[test]
    fn what_is_no_deleted_file_is_refused() {
        let head = [FILE.as_slice(), &[(ghost_file_entry::CHUNKS, 1), (ghost_file_entry::SIZE, 10)]].concat();
        for (offset, length) in [(8, 3), (u64::MAX, 3), (0, 4), (0, u64::MAX)] {
            let chunk = [(ghost_chunk_entry::LENGTH, length), (ghost_chunk_entry::OFFSET, offset)];
            assert!(parse("", &image(&[(&head, b""), (&chunk, b"one")])).is_err(), "{offset} {length}");
        }
        assert!(parse("", &image(&[])).is_err());
        let mut directory = FILE;
        directory[2].1 = 0o040_755;
        assert_eq!(parse("", &image(&[(&directory, b"")])).unwrap(), None);
        let images = tempfile::tempdir().unwrap();
        std::fs::write(images.path().join("ghost-file-1f.img"), image(&[(&FILE, b"contents")])).unwrap();
        let images = Images::read(images.path()).unwrap();
        assert_eq!(images.ghost(0x1f, 100).unwrap().unwrap().size, 8);
        assert_eq!(images.ghost(0x1f, 10).unwrap(), None, "too long");
        assert!(images.ghost(0x1e, 100).is_err());
    }
}
