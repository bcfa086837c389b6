//! Hostile and honest layers of images. Kernel test: needs root, for owners, deletions and
//! attributes.

use kip_sandbox::archive::{ArchiveLimits, PackedArchive, UnpackError, Unpacked, unpack_layer};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use tar::{Builder, EntryType, Header};

struct Try {
    dir: tempfile::TempDir,
}

impl Try {
    fn new() -> Try {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("outside")).unwrap();
        std::fs::write(dir.path().join("outside/file"), "untouched").unwrap();
        Try { dir }
    }

    fn dest(&self) -> PathBuf {
        self.dir.path().join("layer")
    }

    fn unpack(&self, bytes: &[u8]) -> Result<Unpacked, UnpackError> {
        let limits = ArchiveLimits { bytes: 1 << 30, ..ArchiveLimits::default() };
        let mut seen = Vec::new();
        let done = unpack_layer(PackedArchive { name: Path::new("a layer"), bytes }, &self.dest(), &limits, &mut |b| {
            seen.extend_from_slice(b)
        });
        assert!(done.is_err() || seen == bytes, "every byte is seen, to the end");
        done
    }

    /// What is unpacked is nothing, or at least nothing outside.
    fn harmless(&self) {
        assert_eq!(std::fs::read(self.dir.path().join("outside/file")).unwrap(), b"untouched");
        let meta = std::fs::metadata(self.dir.path().join("outside/file")).unwrap();
        assert_eq!((meta.nlink(), meta.uid()), (1, 0));
        let mut left: Vec<_> = std::fs::read_dir(self.dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.retain(|name| name != "layer" && name != "outside");
        assert!(left.is_empty(), "{left:?}");
        assert_eq!(std::fs::read_dir(self.dir.path().join("outside")).unwrap().count(), 1);
    }

    fn refused(&self, bytes: &[u8], words: &str) {
        let text = self.unpack(bytes).expect_err(words).to_string();
        assert!(text.contains(words) && !text.contains('\n'), "{text:?} lacks {words:?}");
        assert!(!self.dest().exists());
        self.harmless();
    }
}

struct Layer(Builder<Vec<u8>>);

impl Layer {
    fn new() -> Layer {
        Layer(Builder::new(Vec::new()))
    }

    /// Writes the name as it is, which the library's own calls would refuse.
    fn entry(mut self, kind: EntryType, name: &str, link: &str, content: &[u8]) -> Layer {
        let mut header = Header::new_gnu();
        let raw = header.as_gnu_mut().unwrap();
        raw.name[..name.len()].copy_from_slice(name.as_bytes());
        raw.linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_size(content.len() as u64);
        header.set_mode(0o4755);
        header.set_uid(33);
        header.set_gid(44);
        header.set_mtime(1);
        header.set_cksum();
        self.0.append(&header, content).unwrap();
        self
    }

    fn file(self, name: &str, content: &[u8]) -> Layer {
        self.entry(EntryType::Regular, name, "", content)
    }

    fn dir(self, name: &str) -> Layer {
        self.entry(EntryType::Directory, name, "", b"")
    }

    fn bytes(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }
}

fn is_deletion(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_char_device() && m.rdev() == 0)
}

fn is_opaque(path: &Path) -> bool {
    let mut value = [0; 8];
    rustix::fs::getxattr(path, "trusted.overlay.opaque", &mut value[..]) == Ok(1) && value[0] == b'y'
}

#[test]
fn deletions_become_overlayfs_s() {
    let t = Try::new();
    let layer = Layer::new()
        .dir("etc/")
        .file("etc/.wh.gone", b"")
        .file("srv/deep/.wh..wh..opq", b"")
        .file("srv/deep/new", b"x")
        .file(".wh.opt", b"")
        // What the layer itself brings stays, whatever comes first.
        .file("var/both", b"here")
        .file("var/.wh.both", b"")
        .file("var/.wh.later", b"")
        .file("var/later", b"here")
        .dir("var/dir")
        .file("var/dir/x", b"x")
        .file("var/.wh.dir", b"")
        .file("var/.wh.again", b"")
        .file("var/again/x", b"x")
        .file("var/.wh.made", b"")
        .dir("var/made")
        .file("var/.wh..wh.plnk", b"")
        .bytes();
    t.unpack(&layer).unwrap();
    let dir = t.dest();
    for gone in ["etc/gone", "opt"] {
        assert!(is_deletion(&dir.join(gone)), "{gone}");
    }
    for closed in ["srv/deep", "var/dir", "var/again", "var/made"] {
        assert!(is_opaque(&dir.join(closed)), "{closed}");
    }
    assert!(!is_opaque(&dir.join("var")) && !is_opaque(&dir.join("srv")));
    for (file, content) in [("var/both", "here"), ("var/later", "here"), ("var/again/x", "x"), ("srv/deep/new", "x")] {
        assert_eq!(std::fs::read_to_string(dir.join(file)).unwrap(), content);
    }
    let names: Vec<_> = std::fs::read_dir(dir.join("var")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(!names.iter().any(|n| n.to_string_lossy().starts_with(".wh.")), "{names:?}");
}

#[test]
fn owners_modes_links_and_attributes_are_kept_and_devices_left_out() {
    let t = Try::new();
    let mut layer = Layer::new().dir("srv/");
    layer
        .0
        .append_pax_extensions([
            ("SCHILY.xattr.user.note", &b"value"[..]),
            ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
            ("SCHILY.xattr.trusted.overlay.redirect", b"/etc"),
            ("SCHILY.xattr.user.overlay.opaque", b"y"),
            ("SCHILY.xattr.security.selinux", b"x"),
        ])
        .unwrap();
    let layer = layer
        .file("srv/tool", b"#!")
        .entry(EntryType::Link, "srv/hard", "/srv/tool", b"")
        .entry(EntryType::Symlink, "srv/soft", "/etc/passwd", b"")
        .entry(EntryType::Fifo, "srv/pipe", "", b"")
        .entry(EntryType::Char, "srv/null", "", b"")
        .entry(EntryType::Block, "dev/sda", "", b"")
        .file("/absolute", b"x")
        .bytes();
    let done = t.unpack(&layer).unwrap();
    let dir = t.dest();
    let meta = std::fs::metadata(dir.join("srv/tool")).unwrap();
    assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777, meta.nlink(), meta.mtime()), (33, 44, 0o4755, 2, 1));
    let mut list = [0; 256];
    let length = rustix::fs::listxattr(dir.join("srv/tool"), &mut list[..]).unwrap();
    assert_eq!(&list[..length], b"user.note\0");
    assert!(std::fs::symlink_metadata(dir.join("srv/pipe")).unwrap().file_type().is_fifo());
    assert_eq!(std::fs::read_link(dir.join("srv/soft")).unwrap(), Path::new("/etc/passwd"));
    assert!(!dir.join("srv/null").exists() && !dir.join("dev/sda").exists());
    assert_eq!(done.left_out, ["/srv/null is a device node", "/dev/sda is a device node"]);
    assert_eq!(std::fs::read(dir.join("absolute")).unwrap(), b"x", "seen from the layer's root");
}

#[test]
fn nothing_leaves_the_layer() {
    let file = |name: &str| Layer::new().file(name, b"x").bytes();
    for (bytes, words) in [
        (file("../outside/file"), "has .. in its path"),
        (file("srv/../../outside/file"), "has .. in its path"),
        (file("srv/.wh..."), "deletes what is no name"),
        (file("srv/.wh.."), "deletes what is no name"),
        (file(".wh."), "deletes what is no name"),
        (file("../.wh.outside"), "has .. in its path"),
        (Layer::new().entry(EntryType::Link, "a", "../outside/file", b"").bytes(), "hard link to something outside"),
        (Layer::new().entry(EntryType::Link, "a", "/etc/passwd", b"").bytes(), "which is not there"),
        (Layer::new().dir("d").entry(EntryType::Link, "a", "d", b"").bytes(), "hard link to a directory"),
        (Layer::new().entry(EntryType::Symlink, "usr", "/", b"").bytes(), "must be a directory"),
        (Layer::new().file("f", b"").file("f/below", b"x").bytes(), "below something that is not a directory"),
        (Layer::new().entry(EntryType::Symlink, "l", "l", b"").file("l/x", b"x").bytes(), "loop of links"),
    ] {
        Try::new().refused(&bytes, words);
    }
}

#[test]
fn links_are_followed_as_a_program_inside_would() {
    let t = Try::new();
    let outside = t.dir.path().join("outside");
    let outside = outside.to_str().unwrap();
    let layer = Layer::new()
        .dir("target")
        .dir("in")
        .entry(EntryType::Symlink, "abs", "/target", b"")
        .file("abs/a", b"a")
        .entry(EntryType::Symlink, "up", "../../../../target", b"")
        .file("up/b", b"b")
        .entry(EntryType::Symlink, "in/link", "../target", b"")
        .file("in/link/.wh.c", b"")
        .entry(EntryType::Symlink, "in/over", "/target/a", b"")
        .file("in/over", b"a file of its own")
        .bytes();
    t.unpack(&layer).unwrap();
    let dir = t.dest();
    assert_eq!(std::fs::read(dir.join("target/a")).unwrap(), b"a");
    assert_eq!(std::fs::read(dir.join("target/b")).unwrap(), b"b");
    assert!(is_deletion(&dir.join("target/c")));
    assert_eq!(std::fs::read(dir.join("in/over")).unwrap(), b"a file of its own");
    t.harmless();
    // The host's own path means nothing inside.
    let t = Try::new();
    let layer = Layer::new().entry(EntryType::Symlink, "way", outside, b"").file("way/file", b"taken").bytes();
    t.refused(&layer, "leads nowhere");
}

#[test]
fn what_is_too_much_or_nobody_s_is_refused() {
    let huge = |size: u64| {
        let mut header = Header::new_gnu();
        header.set_path("huge").unwrap();
        header.set_entry_type(EntryType::GNUSparse);
        header.set_size(512);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        let gnu = header.as_gnu_mut().unwrap();
        gnu.set_real_size(size);
        // A block of content, and a hole that is as long as the test likes.
        gnu.sparse[0].set_offset(0);
        gnu.sparse[0].set_length(512);
        gnu.sparse[1].set_offset(size);
        gnu.sparse[1].set_length(0);
        header.set_cksum();
        let mut builder = Builder::new(Vec::new());
        builder.append(&header, &[7; 512][..]).unwrap();
        builder.into_inner().unwrap()
    };
    Try::new().refused(&huge(1 << 50), "more than 1073741824 bytes");
    let mut header = Header::new_gnu();
    header.set_path("file").unwrap();
    header.set_size(0);
    header.set_mode(0o644);
    header.set_uid(1_000_660_000);
    header.set_gid(0);
    header.set_cksum();
    let mut builder = Builder::new(Vec::new());
    builder.append(&header, &b""[..]).unwrap();
    Try::new().refused(&builder.into_inner().unwrap(), "belongs to id 1000660000");
    let whole = Layer::new().file("a", &[7; 4096]).bytes();
    let t = Try::new();
    let error = t.unpack(&whole[..3000]).unwrap_err();
    assert!(matches!(error, UnpackError::Archive { .. }), "{error:?}");
    t.harmless();
}
