//! File systems of limited size, in a mount namespace of each test's own.

use kip_sandbox::disk::{MIN_BYTES, MountedDisk, create};
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Mounts of this thread are its own from here on.
fn own_mounts() {
    kip_sys::ns::unshare(kip_sys::ns::Unshare { mount: true, ..Default::default() }).expect("root");
    let private = rustix::mount::MountPropagationFlags::PRIVATE | rustix::mount::MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private).unwrap();
}

/// Writes until there is no more room; how much that was.
fn fill(path: &Path) -> u64 {
    let mut file = fs::File::create(path).unwrap();
    let (piece, mut bytes) = (vec![7; 1 << 18], 0);
    loop {
        match file.write(&piece) {
            Ok(count) => bytes += count as u64,
            Err(e) => {
                assert_eq!(e.kind(), std::io::ErrorKind::StorageFull, "{e}");
                return bytes;
            }
        }
    }
}

#[test]
fn as_much_as_was_said_and_little_more() {
    own_mounts();
    let dir = tempfile::tempdir().unwrap();
    for bytes in [MIN_BYTES, 64 << 20, 300 << 20] {
        let (image, at) = (dir.path().join(format!("{bytes}.img")), dir.path().join(format!("{bytes}")));
        create(&image, bytes).unwrap();
        assert!(fs::metadata(&image).unwrap().blocks() * 512 < 2 << 20, "an empty one takes little");
        let disk = MountedDisk::mount(&image, &at).unwrap();
        let room = fill(&at.join("file"));
        assert!(room >= bytes && room < bytes + bytes / 10 + (8 << 20), "{room} of {bytes}");
        fs::remove_file(at.join("file")).unwrap();
        fs::write(at.join("small"), "kept").unwrap();
        drop(disk);
        assert!(!at.join("small").exists(), "it is not mounted any more");
        let disk = MountedDisk::mount(&image, &at).unwrap();
        assert_eq!(fs::read(at.join("small")).unwrap(), b"kept");
        let again = MountedDisk::mount(&image, &dir.path().join("again")).unwrap();
        assert_eq!(fs::read(dir.path().join("again/small")).unwrap(), b"kept", "the same, at another place");
        // Of what was deleted just before it was unmounted it is the next mount that gives back.
        let left = fs::metadata(&image).unwrap().blocks() * 512;
        assert!(left < bytes / 4 + (4 << 20), "what was deleted takes {left} bytes");
        drop((disk, again));
        fs::remove_file(&image).unwrap();
    }
}

#[test]
fn what_is_no_file_system_is_refused() {
    own_mounts();
    let dir = tempfile::tempdir().unwrap();
    let (image, at) = (dir.path().join("image"), dir.path().join("at"));
    let refused = || MountedDisk::mount(&image, &at).unwrap_err().to_string();
    assert!(refused().starts_with("could not open "), "{}", refused());
    fs::write(&image, vec![0; 1 << 20]).unwrap();
    assert!(refused().ends_with("/image cannot be mounted"), "{}", refused());
    let error = create(&dir.path().join("none/image"), MIN_BYTES).unwrap_err().to_string();
    assert!(error.starts_with("could not create "), "{error}");
}
