//! Rust's test binaries: builds them, and runs a few at a time.
//!
//! `cargo test` runs one binary after the other, and most of what these tests do is to wait: for a
//! process's end, a timer, the disk. The output of a binary is kept until it has ended, so that it
//! is shown in one piece. A binary runs as cargo would run it: in its package's directory.

use crate::check;
use anyhow::Context;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// So many run at once on each processor: half of the time they wait.
const PER_PROCESSOR: usize = 2;
/// Where tests wait nearly all of their time, for leases to run out and for a bad connection: so
/// many of a binary run at once.
const WAITING: [&str; 2] = ["crates/meta/tests", "crates/tree/tests"];
const WAITING_AT_ONCE: &str = "--test-threads=6";
/// A binary that runs longer is ended, and its children with it: ten times what the longest takes.
/// A test that waits for ever is to be one that failed, by name.
const LONGEST: Duration = Duration::from_secs(600);
/// What `timeout` exits with for a binary that it ended.
pub const ENDED: i32 = 124;

/// A test binary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binary {
    /// Its source file, relative to the workspace.
    pub source: PathBuf,
    program: PathBuf,
    directory: PathBuf,
}

/// A line of `cargo test --message-format=json`, as far as it is of use here.
#[derive(Deserialize)]
struct Message {
    manifest_path: Option<PathBuf>,
    executable: Option<PathBuf>,
    target: Option<Target>,
    profile: Option<Profile>,
}

#[derive(Deserialize)]
struct Target {
    src_path: PathBuf,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// Builds all that is tested and all that tests use. All of it at once: built one by one, for the
/// sake of features that only tests ask for, some of it would be built twice. None if it does not
/// build; cargo has said why.
pub fn build(root: &Path) -> anyhow::Result<Option<Vec<Binary>>> {
    // etcd's client needs protoc to build, so what is shipped does without unless it is asked for.
    let tested = ["--workspace", "--locked", "--lib", "--bins", "--tests", "--features=kip-tree/etcd"];
    // Examples are programs of the tests: as tests of their own they would be built twice.
    if !check::cargo(root).arg("build").args(tested).arg("--examples").status()?.success() {
        return Ok(None);
    }
    let output = check::cargo(root)
        .args(["test", "--no-run", "--message-format=json-render-diagnostics"])
        .args(tested)
        .stderr(Stdio::inherit())
        .output()?;
    if !output.status.success() {
        return Ok(None);
    }
    tests_in(root, &String::from_utf8_lossy(&output.stdout)).map(Some)
}

/// The test binaries that cargo tells of; integration tests first, for they take longest.
fn tests_in(root: &Path, messages: &str) -> anyhow::Result<Vec<Binary>> {
    let mut found = Vec::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: Message = serde_json::from_str(line).with_context(|| format!("cargo's message {line}"))?;
        let Message { manifest_path: Some(manifest), executable: Some(program), target: Some(target), profile } =
            message
        else {
            continue;
        };
        if profile.is_some_and(|profile| profile.test) {
            let directory = manifest.parent().context("a manifest lies in a directory")?.to_owned();
            let source = target.src_path.strip_prefix(root).unwrap_or(&target.src_path).to_owned();
            found.push(Binary { source, program, directory });
        }
    }
    found.sort_by_key(|binary| (!binary.source.iter().any(|part| part == "tests"), binary.source.clone()));
    Ok(found)
}

/// Runs them, `prefix` (sudo) before each; `ended` gets each with what it printed, in the order in
/// which they end.
pub fn run(
    binaries: &[Binary],
    prefix: &[&str],
    ended: impl FnMut(&Binary, Output) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let at_once = std::thread::available_parallelism().map_or(1, usize::from) * PER_PROCESSOR;
    let waiting = Mutex::new(binaries.iter());
    let (tell, told) = channel();
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            let (tell, waiting) = (tell.clone(), &waiting);
            scope.spawn(move || {
                loop {
                    let next = waiting.lock().expect("no thread panics while it holds the lock").next();
                    let Some(binary) = next else { return };
                    if tell.send((binary, run_one(binary, prefix, LONGEST))).is_err() {
                        return;
                    }
                }
            });
        }
        drop(tell);
        pass_on(told, ended)
    })
}

fn pass_on(
    told: Receiver<(&Binary, anyhow::Result<Output>)>,
    mut ended: impl FnMut(&Binary, Output) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    for (binary, output) in told {
        ended(binary, output?)?;
    }
    Ok(())
}

fn run_one(binary: &Binary, prefix: &[&str], longest: Duration) -> anyhow::Result<Output> {
    let longest = longest.as_secs().to_string();
    let limit = ["timeout", "--kill-after=10", &longest];
    let words = prefix.iter().chain(&limit).map(|word| word.as_ref()).chain([binary.program.as_os_str()]);
    let mut words = words.collect::<Vec<_>>().into_iter();
    let mut command = Command::new(words.next().expect("at least the program"));
    if WAITING.iter().any(|directory| binary.source.starts_with(directory)) {
        command.args(words).arg(WAITING_AT_ONCE)
    } else {
        command.args(words)
    };
    command.arg("--show-output").current_dir(&binary.directory).stdin(Stdio::null());
    command.output().with_context(|| format!("{} cannot be run", binary.program.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn test_binaries_are_found_among_what_cargo_says() {
        let artifact = |source: &str, executable: &str, test: bool| {
            format!(
                "{{\"reason\":\"compiler-artifact\",\"manifest_path\":\"/w/crates/net/Cargo.toml\",\"target\":{{\"src_path\":\
                 \"/w/crates/net/{source}\"}},\"profile\":{{\"test\":{test}}},\"executable\":{executable}}}\n"
            )
        };
        let text = artifact("src/lib.rs", "null", false)
            + &artifact("src/lib.rs", "\"/t/net-1\"", true)
            + &artifact("src/main.rs", "\"/t/kip\"", false)
            + &artifact("tests/host.rs", "\"/t/host-2\"", true)
            + "{\"reason\":\"build-finished\",\"success\":true}\n";
        let found = tests_in(Path::new("/w"), &text).unwrap();
        let shown: Vec<_> = found.iter().map(|b| (b.source.to_str().unwrap(), b.program.to_str().unwrap())).collect();
        assert_eq!(shown, [("crates/net/tests/host.rs", "/t/host-2"), ("crates/net/src/lib.rs", "/t/net-1")]);
        assert!(found.iter().all(|binary| binary.directory == Path::new("/w/crates/net")));
    }

    #[test]
    fn one_that_does_not_end_is_ended_and_shows_what_it_printed() {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("waits");
        std::fs::write(&program, "#!/bin/sh\necho 'test one ... ok'\nsleep 1000\n").unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        let binary = Binary { source: "waits".into(), program, directory: directory.path().into() };
        let output = run_one(&binary, &[], Duration::from_secs(1)).unwrap();
        assert_eq!((output.status.code(), output.stdout), (Some(ENDED), b"test one ... ok\n".to_vec()));
    }

    #[test]
    fn all_are_run_and_told_of_once() {
        let binary =
            |program: &str| Binary { source: program.into(), program: program.into(), directory: std::env::temp_dir() };
        let binaries = ["echo", "false", "echo"].map(binary);
        let mut told = Vec::new();
        run(&binaries, &[], |binary, output| {
            told.push((binary.source.clone(), output.status.success(), output.stdout));
            Ok(())
        })
        .unwrap();
        told.sort();
        let line = b"--show-output\n".to_vec();
        assert_eq!(
            told,
            [("echo".into(), true, line.clone()), ("echo".into(), true, line), ("false".into(), false, vec![])]
        );
    }
}
