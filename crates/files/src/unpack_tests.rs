//! Tests of archives, friendly and hostile, that are unpacked below a root in a temporary
//! directory.

use super::*;
use crate::pack::PackSource;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use tar::Header;

/// A root to copy to, beside what must not be reached.
struct Place {
    dir: tempfile::TempDir,
    busy: HashSet<EntryName>,
}

impl Place {
    fn new() -> Place {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("root/srv")).unwrap();
        fs::write(dir.path().join("outside"), "outside").unwrap();
        Place { dir, busy: HashSet::new() }
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    fn tree(&self) -> RootTree {
        RootTree::of_proc(fs::File::open(self.root()).unwrap().into())
    }

    fn unpack(&self, to: &str, rename: bool, archive: &[u8]) -> Result<UnpackedEntries, String> {
        let limits = UnpackLimits { bytes: 1 << 20, entries: 100 };
        let request = UnpackRequest { to: Path::new(to), rename, follow: true, busy: &self.busy, limits };
        unpack(&self.tree(), &request, archive).map_err(|e| e.to_string())
    }

    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.root().join(path)).unwrap()
    }
}

/// An entry as an attacker may write it: no path is looked at.
fn entry(kind: EntryType, name: &str, target: &str, contents: &str) -> Vec<u8> {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(0o6755);
    header.set_mtime(1_000_000_000);
    header.set_size(contents.len() as u64);
    header.set_uid(12345);
    header.set_gid(0);
    header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
    header.set_link_name_literal(target).unwrap();
    header.set_cksum();
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend(contents.as_bytes());
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

fn file(name: &str, contents: &str) -> Vec<u8> {
    entry(EntryType::Regular, name, "", contents)
}

fn dir(name: &str) -> Vec<u8> {
    entry(EntryType::Directory, name, "", "")
}

fn link(name: &str, target: &str) -> Vec<u8> {
    entry(EntryType::Symlink, name, target, "")
}

fn archive(entries: &[Vec<u8>]) -> Vec<u8> {
    let mut all = entries.concat();
    all.resize(all.len() + 1024, 0);
    all
}

// promise K14: `kip cp`: no archive writes outside of the proc's root, by links, `..` or absolute
//   names, nor makes devices
// held by: this, `kip_files::unpack::tests::links_lead_nowhere_but_inside`
#[test]
fn a_hostile_archive_is_refused() {
    let place = Place::new();
    let refused = |bad: Vec<u8>| place.unpack("/srv", false, &archive(&[file("first", "1"), bad])).unwrap_err();
    assert!(refused(file("../../outside", "x")).contains("has .. in its path"));
    assert!(refused(file("a/../../../outside", "x")).contains("has .. in its path"));
    assert!(refused(file("/outside", "x")).contains("has an absolute path"));
    assert!(refused(entry(EntryType::Char, "null", "", "")).contains("is a device node"));
    assert!(refused(entry(EntryType::Block, "disk", "", "")).contains("is a device node"));
    assert!(refused(entry(EntryType::Fifo, "pipe", "", "")).contains("is a named pipe"));
    assert!(refused(entry(EntryType::Link, "hard", "../../outside", "")).contains("has .. in its path"));
    assert!(refused(entry(EntryType::Link, "hard", "none", "")).contains("is not there"));
    assert!(refused(file("first/below", "x")).contains("below something that is not a directory"));
    assert_eq!(fs::read_to_string(place.dir.path().join("outside")).unwrap(), "outside");
    assert_eq!(place.read("srv/first"), "1", "what came before stays");
    let names: Vec<_> = fs::read_dir(place.root().join("srv")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["first"], "nothing is left of what was refused");
}

#[test]
fn links_lead_nowhere_but_inside() {
    let place = Place::new();
    let outside = place.dir.path().join("outside");
    symlink(place.dir.path(), place.root().join("srv/up")).unwrap();
    symlink("../../..", place.root().join("srv/high")).unwrap();
    // As the program sees it: from its own root.
    place.unpack("/srv", false, &archive(&[file("high/inside", "in")])).unwrap();
    assert_eq!(place.read("inside"), "in");
    place.unpack("/srv/high", false, &archive(&[file("again", "in")])).unwrap();
    assert_eq!(place.read("again"), "in");
    let error = place.unpack("/srv", false, &archive(&[file("up/outside", "x")])).unwrap_err();
    assert!(error.contains("below a link that leads nowhere"), "{error}");
    // What an archive brings itself: its link is made, and not gone through.
    symlink(&outside, place.root().join("srv/file")).unwrap();
    place.unpack("/srv", false, &archive(&[file("file", "new"), link("l", "/etc"), file("l/x", "y")])).unwrap_err();
    assert_eq!(place.read("srv/file"), "new", "the link is replaced");
    assert_eq!(fs::read_to_string(outside).unwrap(), "outside");
}

#[test]
fn docker_s_rules_for_the_destination() {
    let place = Place::new();
    let one = archive(&[file("one", "1")]);
    let tree = archive(&[dir("d"), file("d/a", "a"), entry(EntryType::Link, "d/b", "d/a", "")]);
    let contents = archive(&[dir("."), file("./a", "a")]);
    let put = |to: &str, archive: &[u8]| place.unpack(to, true, archive);
    // A file: into a directory, under a new name, onto a file.
    put("/srv", &one).unwrap();
    put("/srv/two", &one).unwrap();
    put("srv/two", &archive(&[file("one", "new")])).unwrap();
    assert_eq!((place.read("srv/one"), place.read("srv/two")), ("1".into(), "new".into()));
    assert_eq!(put("/srv/none/", &one).unwrap_err(), "there is no /srv/none/");
    assert_eq!(put("/none/x", &one).unwrap_err(), "there is no /none/x");
    assert_eq!(put("/srv/one/", &one).unwrap_err(), "/srv/one/ is not a directory");
    // A directory.
    put("/srv", &tree).unwrap();
    put("/srv/e/", &tree).unwrap();
    put("/srv/f", &contents).unwrap();
    put("/srv/d", &contents).unwrap();
    assert_eq!(["srv/d/a", "srv/e/a", "srv/e/b", "srv/f/a"].map(|path| place.read(path)), ["a"; 4]);
    assert_eq!(fs::metadata(place.root().join("srv/e/b")).unwrap().nlink(), 2);
    assert!(put("/srv/one", &tree).unwrap_err().contains("a directory is not copied onto it"));
    assert!(put("/srv/new", &archive(&[file("x", ""), file("y", "")])).unwrap_err().contains("beside the first"));
    assert_eq!(place.unpack("/srv/none", false, &one).unwrap_err(), "there is no /srv/none");
    assert!(place.unpack("/srv", false, &[]).unwrap_err().contains("cannot be read"));
}

#[test]
fn the_later_of_two_wins_and_no_bits_but_rwx_come() {
    let place = Place::new();
    let twice = [dir("d"), file("d/a", "1"), file("d/a", "2"), link("d/l", "../../x"), file("d/l", "3")];
    place.unpack("/srv", false, &archive(&twice)).unwrap();
    assert_eq!((place.read("srv/d/a"), place.read("srv/d/l")), ("2".into(), "3".into()));
    let a = fs::metadata(place.root().join("srv/d/a")).unwrap();
    assert_eq!((a.permissions().mode() & 0o7777, a.mtime(), a.uid()), (0o755, 1_000_000_000, 0));
    let d = fs::metadata(place.root().join("srv/d")).unwrap();
    assert_eq!((d.permissions().mode() & 0o7777, d.mtime()), (0o755, 1_000_000_000));
    for bad in [[dir("d/a"), file("x", "")], [file("d", "x"), file("x", "")]] {
        assert!(place.unpack("/srv", false, &archive(&bad)).is_err());
    }
    let much = archive(&[file("big", &"x".repeat((1 << 20) + 1))]);
    assert!(place.unpack("/srv", false, &much).unwrap_err().contains("more than"));
    let short = &archive(&[file("cut", &"x".repeat(5000))])[..2000];
    assert!(place.unpack("/srv", false, short).unwrap_err().contains("cannot be read"));
    assert!(!place.root().join("srv/cut").exists());
}

#[test]
fn what_a_sleeper_has_open_is_not_replaced() {
    let mut place = Place::new();
    fs::write(place.root().join("srv/open"), "old").unwrap();
    symlink("srv", place.root().join("other")).unwrap();
    let names = ["/srv/open", "/srv/gone"].map(|path| name_of(&place.tree(), Path::new(path)).unwrap().unwrap());
    place.busy.extend(names);
    for (to, name) in [("/srv", "open"), ("/other", "open"), ("/srv", "gone")] {
        let error = place.unpack(to, false, &archive(&[file(name, "new")])).unwrap_err();
        assert!(error.contains("wake it first"), "{error}");
    }
    place.unpack("/srv", false, &archive(&[file("beside", "new")])).unwrap();
    assert_eq!(place.read("srv/open"), "old");
}

#[test]
fn what_is_packed_is_unpacked_as_it_was() {
    let (from, to) = (Place::new(), Place::new());
    let srv = from.root().join("srv");
    fs::write(srv.join("file"), "contents").unwrap();
    fs::set_permissions(srv.join("file"), fs::Permissions::from_mode(0o640)).unwrap();
    fs::hard_link(srv.join("file"), srv.join("second")).unwrap();
    let long = "n".repeat(200);
    fs::write(srv.join(&long), "long").unwrap();
    symlink("./../x", srv.join("link")).unwrap();
    symlink(format!("/{long}"), srv.join("far")).unwrap();
    rustix::fs::mknodat(fs::File::open(&srv).unwrap(), "pipe", FileType::Fifo, Mode::from(0o600), 0).unwrap();
    let mut bytes = Vec::new();
    let source = PackSource::find(&from.tree(), Path::new("/srv"), false).unwrap();
    source.pack(&from.tree(), &|id| id, &mut bytes).unwrap();
    to.unpack("/copy", true, &bytes).unwrap();
    let copy = to.root().join("copy");
    let (was, is) = (fs::metadata(srv.join("file")).unwrap(), fs::metadata(copy.join("file")).unwrap());
    assert_eq!((is.mode(), is.mtime(), is.nlink()), (was.mode(), was.mtime(), 2));
    assert_eq!(fs::read_link(copy.join("link")).unwrap(), Path::new("./../x"));
    assert_eq!(fs::read_link(copy.join("far")).unwrap(), PathBuf::from(format!("/{long}")));
    assert_eq!(fs::read_to_string(copy.join(long)).unwrap(), "long");
    assert!(!copy.join("pipe").exists());
    // The link itself, what it leads to, and what is below a path that ends with a dot.
    let names = |path: &str, follow| {
        let mut bytes = Vec::new();
        PackSource::find(&from.tree(), Path::new(path), follow)
            .unwrap()
            .pack(&from.tree(), &|id| id, &mut bytes)
            .unwrap();
        let mut archive = Archive::new(&bytes[..]);
        let names = archive.entries().unwrap().map(|e| e.unwrap().path().unwrap().display().to_string());
        names.take(2).collect::<Vec<_>>()
    };
    symlink("srv/file", from.root().join("short")).unwrap();
    assert_eq!((names("/short", false), names("/short", true)), (vec!["short".into()], vec!["file".into()]));
    assert_eq!(names("/srv/.", false)[0], ".");
    let missing = PackSource::find(&from.tree(), Path::new("/srv/none"), false).unwrap_err();
    assert_eq!(missing.to_string(), "there is no /srv/none");
    let pipe = PackSource::find(&from.tree(), Path::new("/srv/pipe"), false).unwrap_err();
    assert!(pipe.to_string().contains("not a file on a disk"));
}

// A program that could not be executed has its mounts a moment longer than the look at its files.
#[test]
fn what_covers_an_entry_does_so_when_a_mount_on_it_is_gone() {
    let (place, over) = (Place::new(), tempfile::tempdir().unwrap());
    let usr = place.root().join("usr");
    fs::create_dir(&usr).unwrap();
    fs::create_dir(over.path().join("bin")).unwrap();
    let mut tree = place.tree();
    rustix::mount::mount_bind(over.path(), &usr).unwrap();
    let covered = tree.cover(Path::new("/usr"), fs::File::open(over.path()).unwrap().into());
    rustix::mount::unmount(&usr, rustix::mount::UnmountFlags::DETACH).unwrap();
    covered.unwrap();
    assert!(tree.find(Path::new("/usr/bin"), true).unwrap().file.is_some());
}

#[test]
fn mounts_that_are_attached_nowhere_are_crossed() {
    let (place, over) = (Place::new(), tempfile::tempdir().unwrap());
    fs::create_dir_all(place.root().join("usr")).unwrap();
    fs::create_dir_all(place.root().join("proc")).unwrap();
    fs::create_dir(over.path().join("bin")).unwrap();
    symlink("usr/bin", place.root().join("bin")).unwrap();
    let mut tree = place.tree();
    tree.cover(Path::new("/usr"), fs::File::open(over.path()).unwrap().into()).unwrap();
    tree.made_up(Path::new("/proc")).unwrap();
    let busy = HashSet::new();
    let put = |to: &str, name: &str| {
        let request = UnpackRequest {
            to: Path::new(to),
            rename: true,
            follow: true,
            busy: &busy,
            limits: UnpackLimits::default(),
        };
        unpack(&tree, &request, &archive(&[file(name, "x")])[..]).map_err(|e| e.to_string())
    };
    put("/bin", "tool").unwrap();
    put("/usr/../usr/bin/./", "other").unwrap();
    assert!(over.path().join("bin/tool").exists() && over.path().join("bin/other").exists());
    assert_eq!(fs::read_dir(place.root().join("usr")).unwrap().count(), 0);
    assert_eq!(put("/proc/x", "x").unwrap_err(), "/proc/x is not a file on a disk");
    assert!(put("/", "usr").is_err());
    let mut bytes = Vec::new();
    PackSource::find(&tree, Path::new("/"), false).unwrap().pack(&tree, &|_| 0, &mut bytes).unwrap();
    let mut packed = Archive::new(&bytes[..]);
    let names: Vec<String> =
        packed.entries().unwrap().map(|e| e.unwrap().path().unwrap().display().to_string()).collect();
    assert!(names.contains(&"usr/bin/tool".into()) && names.contains(&"proc".into()), "{names:?}");
}

/// A long name without an end, as GNU tar's entries of that kind have it.
#[test]
fn a_header_without_an_end_is_refused() {
    let place = Place::new();
    let mut long = entry(EntryType::GNULongName, "././@LongLink", "", "");
    long[124..136].copy_from_slice(b"17777777777\0");
    long[148..156].fill(b' ');
    let sum: u32 = long[..512].iter().map(|byte| u32::from(*byte)).sum();
    long[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let endless = long.chain(io::repeat(b'a'));
    let limits = UnpackLimits::default();
    let request = UnpackRequest { to: Path::new("/srv"), rename: false, follow: true, busy: &place.busy, limits };
    let error = unpack(&place.tree(), &request, endless).unwrap_err();
    assert!(format!("{error:?}").contains("its headers are too long"), "{error:?}");
}

/// Each has a name of its own until it is whole.
#[test]
fn two_archives_for_one_directory_do_not_meet() {
    let place = Place::new();
    // The first stands still in the middle of its file, while the second comes and goes.
    let (first, second) = (archive(&[file("a", &"1".repeat(600))]), archive(&[file("b", &"2".repeat(600))]));
    let (head, mut rest) = (first[..612].to_vec(), &first[612..]);
    let mut second = Some(second);
    let other = |buffer: &mut [u8]| {
        if let Some(second) = second.take() {
            place.unpack("/srv", false, &second).unwrap();
        }
        rest.read(buffer)
    };
    struct Then<F>(io::Cursor<Vec<u8>>, F);
    impl<F: FnMut(&mut [u8]) -> io::Result<usize>> Read for Then<F> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            match self.0.read(buffer)? {
                0 => (self.1)(buffer),
                read => Ok(read),
            }
        }
    }
    let limits = UnpackLimits { bytes: 1 << 20, entries: 100 };
    let busy = HashSet::new();
    let request = UnpackRequest { to: Path::new("/srv"), rename: false, follow: true, busy: &busy, limits };
    unpack(&place.tree(), &request, Then(io::Cursor::new(head), other)).unwrap();
    assert_eq!((place.read("srv/a"), place.read("srv/b")), ("1".repeat(600), "2".repeat(600)));
    let names = fs::read_dir(place.root().join("srv")).unwrap().count();
    assert_eq!(names, 2, "nothing else is left");
}

/// The working directory of a program that sleeps is busy, and takes files all the same.
#[test]
fn a_busy_directory_takes_files() {
    let mut place = Place::new();
    place.busy.extend(name_of(&place.tree(), Path::new("/srv")).unwrap());
    place.unpack("/", false, &archive(&[dir("srv"), file("srv/a", "1")])).unwrap();
    assert_eq!(place.read("srv/a"), "1");
}
