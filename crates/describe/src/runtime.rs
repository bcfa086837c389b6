//! `--base DIR`: a runtime of this machine that is outside of /usr, as pyenv, nvm, /opt and virtual
//! environments have them, as read-only volumes at the paths that it has here.

use kip_files::interpreter::{MOST_LINKS, is_of_the_machine};
use kip_types::spec::DEFAULT_PATH;
use kip_types::volume::{VolumeSource, VolumeSpec};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// A runtime.
#[derive(Debug, Clone)]
pub struct Runtime {
    /// Where its programs are: to be looked through for a command without a slash.
    pub programs: PathBuf,
    /// It, and what its programs are links to.
    pub volumes: Vec<VolumeSpec>,
}

/// A runtime by its directory, which may be relative to the working directory.
///
/// # Errors
/// One line: the directory is not there, is the root, or is a part of what each proc has.
pub fn find(s: &str) -> Result<Runtime, String> {
    let directory = std::path::absolute(s).map_err(|e| format!("the path {s:?} cannot be made absolute: {e}"))?;
    let directory = plain(&directory);
    if !directory.is_dir() {
        return Err(format!("there is no directory {}", directory.display()));
    }
    if directory == Path::new("/") {
        return Err("the whole machine is no runtime: give the directory that has its bin".to_owned());
    }
    if is_of_the_machine(&directory) {
        return Err(format!("{} is in each proc already: leave it out", directory.display()));
    }
    let mut parts = BTreeMap::new();
    add(&mut parts, directory.clone())?;
    for programs in [directory.clone(), directory.join("bin"), directory.join("sbin")] {
        for entry in fs::read_dir(&programs).into_iter().flatten().flatten() {
            follow(&mut parts, entry.path())?;
        }
    }
    let volume = |(target, source): (PathBuf, PathBuf)| {
        let target = target.to_str().ok_or_else(|| format!("{} is not UTF-8", target.display()))?.to_owned();
        Ok::<_, String>(VolumeSpec { source: VolumeSource::Host(source), target, read_only: true })
    };
    let volumes = parts.into_iter().map(volume).collect::<Result<_, _>>()?;
    let bin = directory.join("bin");
    Ok(Runtime { programs: if bin.is_dir() { bin } else { directory }, volumes })
}

/// Adds what runtimes have to the volumes of a proc, and to its PATH, if it has none of its own.
pub fn give(runtimes: Vec<Runtime>, volumes: &mut Vec<VolumeSpec>, env: &mut BTreeMap<String, String>) {
    if runtimes.is_empty() {
        return;
    }
    let programs = runtimes.iter().map(|runtime| runtime.programs.to_string_lossy());
    let path = programs.chain([DEFAULT_PATH.into()]).collect::<Vec<_>>().join(":");
    env.entry("PATH".to_owned()).or_insert(path);
    for part in runtimes.into_iter().flat_map(|runtime| runtime.volumes) {
        if !volumes.iter().any(|volume| volume.target == part.target) {
            volumes.push(part);
        }
    }
}

/// Gives what a link leads to, each of the links on the way too.
fn follow(parts: &mut BTreeMap<PathBuf, PathBuf>, link: PathBuf) -> Result<(), String> {
    let mut at = link;
    for _ in 0..MOST_LINKS {
        let Ok(target) = fs::read_link(&at) else { return Ok(()) };
        at = plain(&at.parent().unwrap_or(Path::new("/")).join(target));
        if is_of_the_machine(&at) || !at.exists() {
            return Ok(());
        }
        if !parts.keys().any(|part| at.starts_with(part)) {
            add(parts, with_libraries(&at))?;
        }
    }
    Ok(())
}

fn add(parts: &mut BTreeMap<PathBuf, PathBuf>, at: PathBuf) -> Result<(), String> {
    // A volume's own path has no link in it.
    let source = at.canonicalize().map_err(|e| format!("{} cannot be found: {e}", at.display()))?;
    parts.insert(at, source);
    Ok(())
}

/// The directory with all that belongs to a program; of one that is in no `bin` the program alone.
fn with_libraries(program: &Path) -> PathBuf {
    let of_bin = program.parent().filter(|dir| dir.ends_with("bin") || dir.ends_with("sbin")).and_then(Path::parent);
    of_bin.filter(|home| *home != Path::new("/")).unwrap_or(program).to_owned()
}

/// Without `.` and `..`, by its words alone.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            other => plain.push(other),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn what_its_programs_are_links_to_comes_along() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        for directory in ["venv/bin", "versions/3.12/bin", "lone"] {
            fs::create_dir_all(root.join(directory)).unwrap();
        }
        fs::write(root.join("versions/3.12/bin/python3.12"), "x").unwrap();
        fs::write(root.join("lone/tool"), "x").unwrap();
        symlink("3.12", root.join("versions/3")).unwrap();
        symlink(root.join("versions/3/bin/python3.12"), root.join("venv/bin/python3")).unwrap();
        symlink("python3", root.join("venv/bin/python")).unwrap();
        symlink("../../lone/tool", root.join("venv/bin/tool")).unwrap();
        symlink("/usr/bin/env", root.join("venv/bin/env")).unwrap();
        symlink("/nowhere/at/all", root.join("venv/bin/gone")).unwrap();
        let found = find(root.join("venv/../venv").to_str().unwrap()).unwrap();
        let shown: Vec<String> = found.volumes.iter().map(ToString::to_string).collect();
        let at = |path: &str| root.join(path).display().to_string();
        let same = |path: &str| format!("{0}:{0}:ro", at(path));
        let linked = format!("{}:{}:ro", at("versions/3.12"), at("versions/3"));
        assert_eq!(shown, [same("lone/tool"), same("venv"), linked]);
        assert_eq!(found.programs, root.join("venv/bin"));
        let (mut volumes, mut env) = (vec![found.volumes[1].clone()], BTreeMap::new());
        give(vec![found], &mut volumes, &mut env);
        assert_eq!(volumes.len(), 3, "no volume is there twice");
        assert!(env["PATH"].starts_with(&format!("{}:/usr/local/sbin:", at("venv/bin"))), "{env:?}");
    }

    #[test]
    fn what_is_no_runtime_is_refused() {
        for (bad, why) in [("/", "no runtime"), ("/usr/lib", "already"), ("/nowhere", "there is no directory")] {
            let error = find(bad).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
