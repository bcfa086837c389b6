//! Base files that a sleeper has mapped or open are pinned: kept as they are, whatever the host's
//! packages do.
//!
//! A pin is a hard link (where the file system allows, else a copy) in `pins/usr/..` of the proc's
//! directory. A wake mounts the pins above the base only when the base has changed, so that an
//! unchanged machine keeps the same layers. Crash: a pin too many is harmless and replaced at the
//! next sleep.

use kip_records::body::{Pin, PinId};
use kip_sandbox::init;
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// While this file is there, the proc's file systems are mounted with its pins over the base.
const IN_USE: &str = "in-use";

/// Notes whether the next run has the pins over the base.
pub fn note_use(pins: &Path, in_use: bool) -> io::Result<()> {
    let mark = pins.join(IN_USE);
    if in_use {
        return fs::write(mark, "");
    }
    match fs::remove_file(mark) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Whether the last run had the pins over the base.
pub fn are_in_use(pins: &Path) -> bool {
    pins.join(IN_USE).exists()
}

/// A base file could not be pinned.
#[derive(Debug, thiserror::Error)]
#[error("base file {path} cannot be pinned")]
pub struct PinError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

fn identity(path: &Path) -> io::Result<PinId> {
    let m = fs::symlink_metadata(path)?;
    if !m.is_file() {
        return Err(io::ErrorKind::NotFound.into());
    }
    let stamp = m.mtime() * 1_000_000_000 + m.mtime_nsec();
    Ok(PinId { dev: m.dev(), ino: m.ino(), size: m.size(), stamp })
}

/// Pins those of `paths` that come from the host's /usr, that is, are in none of `above`
/// (directories that lie over /usr).
pub fn pin(paths: &[String], pins: &Path, above: &[PathBuf]) -> Result<Vec<Pin>, PinError> {
    let in_use = are_in_use(pins);
    // Both layers must be there, whatever is in them.
    for layer in ["root", "usr"] {
        let path = pins.join(layer);
        fs::create_dir_all(&path).map_err(|source| PinError { path, source })?;
    }
    let mut made = Vec::new();
    for path in paths {
        let Some(below) = path.strip_prefix("/usr/") else { continue };
        if above.iter().any(|dir| fs::symlink_metadata(dir.join(below)).is_ok()) {
            continue;
        }
        let host = Path::new(path);
        let Ok(id) = identity(host) else { continue };
        let failed = |source| PinError { path: host.to_owned(), source };
        let target = pins.join("usr").join(below);
        match identity(&target) {
            Ok(have) if (have.size, have.stamp) == (id.size, id.stamp) => {
                made.push(Pin { path: path.clone(), id });
                continue;
            }
            // The program runs on the pinned file; the host's is another one.
            Ok(have) if in_use => {
                made.push(Pin { path: path.clone(), id: have });
                continue;
            }
            _ => {}
        }
        make_parents(pins, below).map_err(failed)?;
        let temporary = target.with_extension("kip-new");
        let _ = fs::remove_file(&temporary);
        fs::hard_link(host, &temporary).or_else(|_| copy(host, &temporary)).map_err(failed)?;
        fs::rename(&temporary, &target).map_err(failed)?;
        // rename(2) does nothing when both are links to one file.
        let _ = fs::remove_file(&temporary);
        made.push(Pin { path: path.clone(), id });
    }
    Ok(made)
}

fn init_id(init: &[u8]) -> PinId {
    PinId { dev: 0, ino: 0, size: init.len() as u64, stamp: crc32fast::hash(init).into() }
}

/// Pins the sandbox's init, which pid 1 has mapped: another Kip has another. `base` is what the
/// proc has below its own files.
pub fn pin_init(base: &Path, pins: &Path) -> Result<Pin, PinError> {
    let inside = init::PATH.trim_start_matches('/');
    let (own, target) = (base.join(inside), pins.join("root").join(inside));
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| PinError { path, source }
    };
    let have = fs::read(&target).ok();
    let bytes = match have {
        // It runs on that.
        Some(bytes) if pins.join(IN_USE).exists() => bytes,
        have => {
            let bytes = fs::read(&own).map_err(failed(&own))?;
            if have.as_ref() != Some(&bytes) {
                let temporary = target.with_extension("kip-new");
                fs::create_dir_all(target.parent().unwrap_or(pins)).map_err(failed(&target))?;
                let _ = fs::remove_file(&temporary);
                copy(&own, &temporary).and_then(|()| fs::rename(&temporary, &target)).map_err(failed(&target))?;
            }
            bytes
        }
    };
    Ok(Pin { path: init::PATH.to_owned(), id: init_id(&bytes) })
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let meta = fs::metadata(from)?;
    fs::copy(from, to)?;
    let file = fs::File::open(to)?;
    file.set_modified(meta.modified()?)?;
    std::os::unix::fs::chown(to, Some(meta.uid()), Some(meta.gid()))?;
    file.sync_all()
}

/// Directories of the pins layer hide those of the base, so they get the same mode and owner.
fn make_parents(pins: &Path, below: &str) -> io::Result<()> {
    let mut host = PathBuf::from("/usr");
    let mut dir = pins.join("usr");
    fs::create_dir_all(&dir)?;
    let parts: Vec<&str> = below.split('/').collect();
    for part in &parts[..parts.len() - 1] {
        host.push(part);
        dir.push(part);
        match fs::create_dir(&dir) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
            other => other?,
        }
        let meta = fs::metadata(&host)?;
        fs::set_permissions(&dir, fs::Permissions::from_mode(meta.mode()))?;
        std::os::unix::fs::chown(&dir, Some(meta.uid()), Some(meta.gid()))?;
    }
    Ok(())
}

/// Whether any pinned file is no longer the one that was pinned, of the host or of this Kip.
pub fn base_changed(pins: &[Pin]) -> bool {
    let is_same = |pin: &Pin| match pin.path.as_str() {
        init::PATH => pin.id == init_id(init::BINARY),
        path => identity(Path::new(path)).is_ok_and(|id| id == pin.id),
    };
    !pins.iter().all(is_same)
}

#[cfg(test)]
mod tests {
    use super::*;

    // promise parking: base files are pinned
    // promise invariants: 10 mapped base files are pinned
    // held by: this, `tests/test_upgrade.py::test_a_mapped_file_is_upgraded_under_a_sleeper`
    #[test]
    fn pins_what_the_base_gave_and_notices_its_change() {
        let dir = tempfile::tempdir().unwrap();
        let (pins, above) = (dir.path().join("pins"), dir.path().join("upper"));
        fs::create_dir_all(above.join("bin")).unwrap();
        fs::write(above.join("bin/env"), b"own").unwrap();
        let paths: Vec<String> =
            ["/usr/bin/true", "/usr/bin/env", "/etc/passwd", "/usr/bin/no-such"].map(str::to_owned).to_vec();
        let made = pin(&paths, &pins, std::slice::from_ref(&above)).unwrap();
        assert_eq!(made.iter().map(|p| p.path.as_str()).collect::<Vec<_>>(), ["/usr/bin/true"]);
        assert_eq!(fs::read(pins.join("usr/bin/true")).unwrap(), fs::read("/usr/bin/true").unwrap());
        assert!(!base_changed(&made));
        let mut other = made.clone();
        other[0].id.ino += 1;
        assert!(base_changed(&other));
        fs::create_dir_all(dir.path().join("base/.kip")).unwrap();
        fs::write(dir.path().join("base/.kip/init"), init::BINARY).unwrap();
        let own = pin_init(&dir.path().join("base"), &pins).unwrap();
        assert!(!base_changed(&[own]) && fs::read(pins.join("root/.kip/init")).unwrap() == init::BINARY);
        fs::write(dir.path().join("base/.kip/init"), b"another").unwrap();
        assert!(base_changed(&[pin_init(&dir.path().join("base"), &pins).unwrap()]), "another Kip's");
        note_use(&pins, true).unwrap();
        fs::write(dir.path().join("base/.kip/init"), init::BINARY).unwrap();
        assert!(base_changed(&[pin_init(&dir.path().join("base"), &pins).unwrap()]), "it runs on that");
        note_use(&pins, false).unwrap();
        // A pin that the program runs on is kept when the host's file is replaced.
        note_use(&pins, true).unwrap();
        fs::remove_file(pins.join("usr/bin/true")).unwrap();
        fs::write(pins.join("usr/bin/true"), b"older").unwrap();
        let kept = pin(&paths, &pins, std::slice::from_ref(&above)).unwrap();
        assert_eq!(fs::read(pins.join("usr/bin/true")).unwrap(), b"older");
        assert!(base_changed(&kept));
        note_use(&pins, false).unwrap();
        // Pinning again changes nothing.
        assert_eq!(pin(&paths, &pins, &[above]).unwrap(), made);
    }
}
