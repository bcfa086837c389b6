//! Hostile and honest tarballs. Kernel test: needs root, for owners.

use kip_sandbox::archive::{ArchiveLimits, UnpackError, unpack};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use tar::{Builder, EntryType, Header};

struct Try {
    dir: tempfile::TempDir,
}

impl Try {
    fn new() -> Try {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("outside")).unwrap();
        Try { dir }
    }

    fn dest(&self) -> PathBuf {
        self.dir.path().join("layer")
    }

    fn unpack_bytes(&self, bytes: &[u8], limits: &ArchiveLimits) -> Result<(), UnpackError> {
        let file = self.dir.path().join("a.tar");
        std::fs::write(&file, bytes).unwrap();
        unpack(&file, &self.dest(), limits).map(drop)
    }

    /// The archive is refused with `words` in the message, and nothing is left of it, inside or
    /// outside.
    fn refused(&self, bytes: &[u8], limits: &ArchiveLimits, words: &str) {
        let error = self.unpack_bytes(bytes, limits).unwrap_err();
        let mut text = error.to_string();
        if let Some(source) = std::error::Error::source(&error) {
            text += &format!(": {source}");
        }
        assert!(text.contains(words), "{text:?} lacks {words:?}");
        assert!(!text.contains('\n'), "{text:?} is not one line");
        let mut left: Vec<_> = std::fs::read_dir(self.dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["a.tar", "outside"]);
        assert_eq!(std::fs::read_dir(self.dir.path().join("outside")).unwrap().count(), 0);
    }
}

struct Tar(Builder<Vec<u8>>);

impl Tar {
    fn new() -> Tar {
        Tar(Builder::new(Vec::new()))
    }

    /// Writes the name as it is, which the library's own calls would refuse.
    fn entry(mut self, kind: EntryType, name: &str, link: &str, content: &[u8]) -> Tar {
        let mut header = Header::new_gnu();
        let raw = header.as_gnu_mut().unwrap();
        raw.name[..name.len()].copy_from_slice(name.as_bytes());
        raw.linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        header.set_uid(33);
        header.set_gid(44);
        header.set_mtime(1);
        header.set_cksum();
        self.0.append(&header, content).unwrap();
        self
    }

    fn file(self, name: &str, content: &[u8]) -> Tar {
        self.entry(EntryType::Regular, name, "", content)
    }

    fn bytes(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn honest() -> Vec<u8> {
    Tar::new()
        .entry(EntryType::Directory, "./srv/", "", b"")
        .file("./srv/page", b"hello")
        .entry(EntryType::Symlink, "srv/link", "/etc/passwd", b"")
        .entry(EntryType::Link, "srv/hard", "srv/page", b"")
        .file("bin/tool", b"x")
        .entry(EntryType::Symlink, "lib", "usr/lib", b"")
        .file("lib/a.so", b"y")
        .entry(EntryType::Symlink, "srv/dir", "../usr", b"")
        .file("srv/dir/through", b"z")
        .bytes()
}

#[test]
fn honest_archives_are_unpacked_whatever_their_compression() {
    for packed in [honest(), gzip(&honest()), zstd::encode_all(&honest()[..], 3).unwrap()] {
        let t = Try::new();
        t.unpack_bytes(&packed, &ArchiveLimits::default()).unwrap();
        let layer = t.dest();
        assert_eq!(std::fs::read(layer.join("srv/page")).unwrap(), b"hello");
        let meta = std::fs::metadata(layer.join("srv/page")).unwrap();
        assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777, meta.nlink(), meta.mtime()), (33, 44, 0o644, 2, 1));
        assert_eq!(std::fs::read_link(layer.join("srv/link")).unwrap(), Path::new("/etc/passwd"));
        assert_eq!(std::fs::read(layer.join("usr/bin/tool")).unwrap(), b"x", "bin is merged into usr");
        assert_eq!(std::fs::read(layer.join("usr/lib/a.so")).unwrap(), b"y");
        assert!(std::fs::symlink_metadata(layer.join("lib")).is_err());
        assert_eq!(std::fs::read(layer.join("usr/through")).unwrap(), b"z", "a link inside is followed");
        assert!(!t.dir.path().join("layer.new").exists());
    }
}

#[test]
fn the_later_entry_wins() {
    let t = Try::new();
    t.unpack_bytes(&Tar::new().file("a", b"1").file("a", b"2").bytes(), &ArchiveLimits::default()).unwrap();
    assert_eq!(std::fs::read(t.dest().join("a")).unwrap(), b"2");
}

#[test]
fn paths_out_are_refused() {
    let limits = ArchiveLimits::default();
    Try::new().refused(&Tar::new().file("ok", b"").file("/etc/evil", b"x").bytes(), &limits, "absolute path");
    Try::new().refused(&Tar::new().file("a/../../evil", b"x").bytes(), &limits, "..");
    let t = Try::new();
    let outside = t.dir.path().join("outside");
    let absolute = Tar::new().entry(EntryType::Symlink, "d", outside.to_str().unwrap(), b"").file("d/evil", b"x");
    t.refused(&absolute.bytes(), &limits, "\"d/evil\" leads out");
    let up = Tar::new().entry(EntryType::Symlink, "d", "../outside", b"").file("d/evil", b"x");
    Try::new().refused(&up.bytes(), &limits, "leads out");
    let chain = Tar::new()
        .entry(EntryType::Directory, "a", "", b"")
        .entry(EntryType::Symlink, "a/b", "..", b"")
        .entry(EntryType::Symlink, "c", "a/b/../outside", b"")
        .entry(EntryType::Directory, "c/new", "", b"");
    Try::new().refused(&chain.bytes(), &limits, "leads out");
    let round = Tar::new().entry(EntryType::Symlink, "d", "d", b"").file("d/x", b"x");
    Try::new().refused(&round.bytes(), &limits, "loop");
    let nowhere = Tar::new().entry(EntryType::Symlink, "d", "gone", b"").file("d/x", b"x");
    Try::new().refused(&nowhere.bytes(), &limits, "leads nowhere");
}

#[test]
fn a_file_never_writes_through_a_link_of_its_own_name() {
    let t = Try::new();
    let victim = t.dir.path().join("outside/victim");
    let tar = Tar::new().entry(EntryType::Symlink, "d", victim.to_str().unwrap(), b"").file("d", b"x");
    t.unpack_bytes(&tar.bytes(), &ArchiveLimits::default()).unwrap();
    assert!(!victim.exists());
    assert_eq!(std::fs::read(t.dest().join("d")).unwrap(), b"x");
}

#[test]
fn hard_links_out_are_refused() {
    let limits = ArchiveLimits::default();
    let link = |target: &str| Tar::new().entry(EntryType::Link, "h", target, b"").bytes();
    Try::new().refused(&link("/etc/shadow"), &limits, "hard link to something outside");
    Try::new().refused(&link("../outside"), &limits, "hard link to something outside");
    Try::new().refused(&link("gone"), &limits, "not there");
    let through = Tar::new().entry(EntryType::Symlink, "d", "/etc", b"").entry(EntryType::Link, "h", "d/shadow", b"");
    Try::new().refused(&through.bytes(), &limits, "leads out");
    let dir = Tar::new().entry(EntryType::Directory, "d", "", b"").entry(EntryType::Link, "h", "d", b"");
    Try::new().refused(&dir.bytes(), &limits, "directory");
}

#[test]
fn devices_and_reserved_places_are_refused() {
    let limits = ArchiveLimits::default();
    let of = |kind, name: &str| Tar::new().entry(kind, name, "", b"").bytes();
    Try::new().refused(&of(EntryType::Char, "dev/mem"), &limits, "device node");
    Try::new().refused(&of(EntryType::Block, "disk"), &limits, "device node");
    Try::new().refused(&of(EntryType::Fifo, "pipe"), &limits, "named pipe");
    Try::new().refused(&of(EntryType::Regular, ".kip/init"), &limits, "Kip's own");
    Try::new().refused(&of(EntryType::Regular, "usr"), &limits, "must be a directory");
    let link = Tar::new().entry(EntryType::Symlink, "proc", "/", b"").bytes();
    Try::new().refused(&link, &limits, "must be a directory");
    let replaced = Tar::new().file("d/x", b"").file("d", b"").bytes();
    Try::new().refused(&replaced, &limits, "takes the place of a directory");
}

#[test]
fn ids_beyond_the_block_are_refused() {
    let mut header = Header::new_gnu();
    header.set_path("a").unwrap();
    header.set_size(0);
    header.set_mode(0o4755);
    header.set_uid(65_536);
    header.set_gid(0);
    header.set_cksum();
    let mut builder = Builder::new(Vec::new());
    builder.append(&header, &b""[..]).unwrap();
    Try::new().refused(&builder.into_inner().unwrap(), &ArchiveLimits::default(), "65536");
}

#[test]
fn bombs_are_refused() {
    let many = (0..20).fold(Tar::new(), |t, i| t.file(&format!("f{i}"), b"")).bytes();
    Try::new().refused(&many, &ArchiveLimits { entries: 10, ..ArchiveLimits::default() }, "more than 10 entries");
    let zeros = Tar::new().file("zeros", &vec![0; 1 << 20]).bytes();
    Try::new().refused(
        &gzip(&zeros),
        &ArchiveLimits { bytes: 1 << 16, ..ArchiveLimits::default() },
        "more than 65536 bytes",
    );
    // 300 MiB of zeros in 300 KiB.
    let mut large = Header::new_gnu();
    large.set_path("zeros").unwrap();
    large.set_size(300 << 20);
    large.set_mode(0o644);
    large.set_uid(0);
    large.set_gid(0);
    large.set_cksum();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(large.as_bytes()).unwrap();
    std::io::copy(&mut std::io::Read::take(std::io::repeat(0), 300 << 20), &mut encoder).unwrap();
    encoder.write_all(&[0; 1024]).unwrap();
    Try::new().refused(
        &encoder.finish().unwrap(),
        &ArchiveLimits { ratio: 100, ..ArchiveLimits::default() },
        "100 times",
    );
    // A header that only claims to be large.
    large.set_size(1 << 40);
    large.set_cksum();
    Try::new().refused(large.as_bytes(), &ArchiveLimits::default(), "bytes");
}

#[test]
fn truncated_and_damaged_archives_are_refused() {
    let limits = ArchiveLimits::default();
    let whole = honest();
    for cut in [1, 100, 512, 600, 1024, whole.len() - 1024] {
        Try::new().refused(&whole[..cut], &limits, "could not read the archive");
    }
    let packed = gzip(&whole);
    for cut in [5, packed.len() / 2, packed.len() - 4] {
        Try::new().refused(&packed[..cut], &limits, "could not read the archive");
    }
    let mut damaged = packed.clone();
    let last = damaged.len() - 6;
    damaged[last] ^= 1;
    Try::new().refused(&damaged, &limits, "could not read the archive");
    Try::new().refused(b"", &limits, "empty");
    Try::new().refused(&[b'n'; 2048], &limits, "could not read the archive");
    let t = Try::new();
    let missing = unpack(Path::new("/nonexistent.tar"), &t.dest(), &limits).unwrap_err();
    assert!(missing.to_string().contains("/nonexistent.tar"), "{missing}");
}
