//! `cargo xtask test`: builds, checks, and runs Rust's tests and pytest's, shows how long each
//! stage took and ends with one line that counts tests.
//!
//! Tests wait for a part of their time, so `check` runs beside them, at a lower priority, and has
//! ended before those that measure begin. On a new machine the build runs while `scripts/setup`
//! installs what the tests need, if so asked.
//!
//! Without root the build is done as the caller and the tests are run through sudo: they need
//! namespaces and cgroups. A stage that fails without naming a test counts as one failed test, so
//! that the closing line never looks better than the exit code.

use crate::binaries::{self, Binary};
use crate::counts::{self, Counts, Follow};
use crate::{check, steps, tidy};
use anyhow::Context;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const STAGES: [&str; 8] = ["build", "check", "units", "cargo", "smoke", "system", "measures", "soak"];
/// Stages that run only if they are named: others have their tests, or they take hours.
const ON_REQUEST: [&str; 3] = ["units", "smoke", "soak"];
/// Runs `scripts/setup` beside the build.
const SET_UP: &str = "--setup";
/// Runs busy threads beside the tests, [`LOAD`] of them.
const LOADED: &str = "--loaded";
const LOAD: usize = 2;
/// Stages that bear `check` beside them. Those that are neither these nor build and check measure.
const BEARING: [&str; 4] = ["units", "cargo", "smoke", "system"];
/// Runs a program with a third of the weight that a test's program has. Without a session of its
/// own it would share the weight of the scheduler's group (autogroup) with the tests. With the
/// lowest priority it would not come to its end beside two busy programs of another user.
const UNHURRIED: [&str; 5] =
    ["setsid", "--wait", "sh", "-c", "echo 5 >/proc/self/autogroup; exec nice -n 5 \"$@\" 2>&1"];
/// Workers of pytest, twice as many as CI's machine has processors: tests wait for the disk and for
/// time-outs half of the time.
const WORKERS: &str = "4";
/// Of those tests that measure time: each has to have a processor when its time comes.
const MEASURING: &str = "5";
/// The same beside busy threads.
const MEASURING_LOADED: &str = "4";

struct Stage {
    name: &'static str,
    result: &'static str,
    took: Duration,
    counts: Counts,
    remark: String,
}

/// Threads that do nothing but keep processors busy, until it is dropped.
struct Load(Arc<AtomicBool>);

impl Load {
    fn begin() -> Load {
        let goes_on = Arc::new(AtomicBool::new(true));
        for _ in 0..LOAD {
            let goes_on = Arc::clone(&goes_on);
            std::thread::spawn(move || {
                while goes_on.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        Load(goes_on)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// Runs the stages named, or all that are not [`ON_REQUEST`]; with [`LOADED`] in front, tests have
/// busy threads beside them. True if nothing failed.
pub fn run(root: &Path, words: &[String]) -> anyhow::Result<bool> {
    let (flags, chosen): (Vec<&String>, Vec<&String>) = words.iter().partition(|word| word.starts_with("--"));
    let has = |flag: &str| flags.iter().any(|given| *given == flag);
    let loaded = has(LOADED);
    if let Some(unknown) = flags.iter().find(|flag| ![LOADED, SET_UP].contains(&flag.as_str())) {
        anyhow::bail!("there is no option {unknown}; there are: {LOADED} {SET_UP}");
    }
    if let Some(unknown) = chosen.iter().find(|name| !STAGES.contains(&name.as_str())) {
        anyhow::bail!("there is no stage {unknown:?}; there are: {}", STAGES.join(" "));
    }
    let wanted =
        |name: &str| if chosen.is_empty() { !ON_REQUEST.contains(&name) } else { chosen.iter().any(|c| *c == name) };
    let needs_build = STAGES.into_iter().filter(|name| has_tests(name)).any(wanted);
    // Beside busy threads as well it would take a quarter of an hour.
    let is_borne = !loaded && BEARING.into_iter().any(wanted);
    let (mut done, mut binaries, mut load) = (Vec::new(), Vec::new(), None);
    let mut checks: Option<JoinHandle<Stage>> = None;
    let mut tests = SystemTests::new(root, loaded);
    // Asked before the build, which puts another file in its place.
    let program = std::env::current_exe()?;
    let mut setup = if has(SET_UP) && needs_build { Some(beside(root, "setup", &["scripts/setup"])?) } else { None };
    for name in STAGES.into_iter().filter(|name| wanted(name) || *name == "build" && needs_build) {
        if name == "check" && is_borne {
            checks = Some(beside(root, "check", &check_command(&program)?)?);
            continue;
        }
        if !BEARING.contains(&name) {
            done.extend(checks.take().map(ended));
        }
        println!("\n== {name}");
        if loaded && has_tests(name) {
            load.get_or_insert_with(Load::begin);
        }
        if name == "cargo" && wanted("system") {
            // Without it the tests compile themselves, and say what is missing.
            drop(tests.compile_ahead());
        }
        let stage = one(root, name, &mut binaries, &mut tests);
        println!("{}", steps::line(name, stage.result, stage.took, &stage.remark));
        let is_build = name == "build";
        done.push(stage);
        done.extend(setup.take_if(|_| is_build).map(ended));
        if is_build && done.iter().any(|stage| stage.result == "FAILED") {
            break;
        }
    }
    done.extend(checks.take().map(ended));
    done.sort_by_key(|stage| STAGES.iter().position(|name| *name == stage.name));
    println!("\n== in all");
    let mut sum = Counts::default();
    for stage in &done {
        println!("{}", steps::line(stage.name, stage.result, stage.took, &stage.remark));
        sum += stage.counts;
    }
    println!("{sum}");
    Ok(sum.failed == 0)
}

fn one(root: &Path, name: &'static str, binaries: &mut Vec<Binary>, tests: &mut SystemTests) -> Stage {
    let since = Instant::now();
    let ran = match name {
        // Not the optimized build: it takes minutes, and finds nothing that this one does not.
        "build" => binaries::build(root).map(|built| {
            let passed = built.is_some();
            *binaries = built.unwrap_or_default();
            (passed, Counts::default())
        }),
        "check" => check::run(root, &[]).map(|passed| (passed, Counts::default())),
        "units" => {
            let of_a_crate = |binary: &&Binary| binary.source.components().any(|part| part.as_os_str() == "src");
            run_binaries(&binaries.iter().filter(of_a_crate).cloned().collect::<Vec<_>>())
        }
        "cargo" => cargo_tests(root, binaries),
        "smoke" => tests.run("smoke", Some(WORKERS)),
        "system" => tests.run("not soak and not measures", Some(WORKERS)),
        "measures" => tests.run("not soak and measures", Some(if tests.loaded { MEASURING_LOADED } else { MEASURING })),
        "soak" => tests.run("soak", None),
        other => unreachable!("{other} is in STAGES"),
    };
    let (passed, mut counts) = ran.unwrap_or_else(|error| {
        println!("{error:#}");
        (false, Counts::default())
    });
    if !passed && counts.failed == 0 {
        counts.failed = 1;
    }
    let result = if passed && counts.failed == 0 { "ok" } else { "FAILED" };
    let remark = if has_tests(name) { counts.to_string() } else { String::new() };
    Stage { name, result, took: since.elapsed(), counts, remark }
}

/// `cargo xtask check` at a lower priority.
fn check_command(program: &Path) -> anyhow::Result<Vec<&str>> {
    let program = program.to_str().context("the path of xtask is no text")?;
    Ok(UNHURRIED.into_iter().chain(["sh", program, "check"]).collect())
}

/// Begins a stage that runs beside others. What it says is printed in one piece when it ends, but
/// for an installation's, which is there to be looked at.
fn beside(root: &Path, name: &'static str, command: &[&str]) -> anyhow::Result<JoinHandle<Stage>> {
    let since = Instant::now();
    let mut begun = Command::new(command[0]);
    let stdout = if name == "setup" { Stdio::inherit() } else { Stdio::piped() };
    begun.args(&command[1..]).current_dir(root).stdin(Stdio::null()).stdout(stdout);
    let child = begun.spawn().with_context(|| format!("cannot start {}", command[0]))?;
    Ok(std::thread::spawn(move || {
        let (passed, text) = match child.wait_with_output() {
            Ok(output) => (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned()),
            Err(error) => (false, format!("{error}\n")),
        };
        let result = if passed { "ok" } else { "FAILED" };
        let counts = Counts { failed: u64::from(!passed), ..Counts::default() };
        let remark = if name == "setup" { "beside the build" } else { "beside the tests" };
        let stage = Stage { name, result, took: since.elapsed(), counts, remark: remark.into() };
        println!("\n== {name}\n{text}{}", steps::line(stage.name, stage.result, stage.took, &stage.remark));
        stage
    }))
}

/// Waits for a stage that runs beside others.
fn ended(stage: JoinHandle<Stage>) -> Stage {
    stage.join().expect("its thread does not panic")
}

fn has_tests(stage: &str) -> bool {
    !["build", "check"].contains(&stage)
}

fn is_root() -> anyhow::Result<bool> {
    let status = std::fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    let uids = status.lines().find_map(|line| line.strip_prefix("Uid:")).context("Uid in /proc/self/status")?;
    Ok(uids.split_whitespace().nth(1) == Some("0"))
}

fn run_binaries(binaries: &[Binary]) -> anyhow::Result<(bool, Counts)> {
    let prefix: &[&str] = if is_root()? { &[] } else { &["sudo", "-E"] };
    let (mut passed, mut counts) = (true, Counts::default());
    binaries::run(binaries, prefix, |binary, output| {
        println!("\n     Running {}", binary.source.display());
        let mut follower = counts::Cargo::default();
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            if let Some(line) = follower.line(line) {
                println!("{line}");
            }
        }
        print!("{}", String::from_utf8_lossy(&output.stderr));
        if output.status.code() == Some(binaries::ENDED) {
            println!("{} did not come to its end and was ended: see which test has no result", binary.source.display());
        }
        passed &= output.status.success();
        let mut counted = follower.counts();
        // One that was killed has counted nothing.
        counted.failed += u64::from(!output.status.success() && counted.failed == 0);
        counts += counted;
        Ok(())
    })?;
    Ok((passed, counts))
}

fn cargo_tests(root: &Path, binaries: &[Binary]) -> anyhow::Result<(bool, Counts)> {
    let (mut passed, mut counts) = run_binaries(binaries)?;
    // To find out that a crate has no examples in its documentation takes rustdoc seconds for each.
    if tidy::files(root)?.iter().any(|file| file.path.ends_with(".rs") && has_doc_test(&file.text)) {
        let mut command = check::cargo(root);
        command.args(["test", "--workspace", "--locked", "--no-fail-fast", "--doc", "--", "--show-output"]);
        let (good, counted) = followed(&mut command, counts::Cargo::default())?;
        passed &= good;
        counts += counted;
    }
    Ok((passed, counts))
}

/// Whether the documentation in a source file has a block that rustdoc would run: one that says
/// nothing else.
fn has_doc_test(text: &str) -> bool {
    let documentation = text.lines().filter_map(|line| {
        let line = line.trim_start();
        line.strip_prefix("///").or_else(|| line.strip_prefix("//!"))
    });
    let mut inside = false;
    documentation.filter_map(|line| line.trim().strip_prefix("```")).any(|words| {
        inside = !inside;
        let plain = ["text", "ignore", "json", "sh", "console", "toml", "c"];
        inside && !words.split(',').any(|word| plain.contains(&word.trim()))
    })
}

/// The tests of `tests/`.
struct SystemTests {
    root: PathBuf,
    loaded: bool,
    /// Where Python keeps what it has compiled until the end: in the tree it would be files of
    /// root, and without it each of ten processes would compile it all.
    compiled: PathBuf,
    /// Compiles them.
    ahead: Option<Child>,
}

impl SystemTests {
    fn new(root: &Path, loaded: bool) -> SystemTests {
        let compiled = std::env::temp_dir().join(format!("kip-tests-compiled-{}", std::process::id()));
        SystemTests { root: root.to_owned(), loaded, compiled, ahead: None }
    }

    /// pytest as root, which begins at the root of the tree.
    fn pytest(&self) -> anyhow::Result<Command> {
        let python = self.root.join(".kip/venv/bin/python");
        anyhow::ensure!(python.exists(), "{} is not there: run scripts/setup", python.display());
        let mut command = if is_root()? { Command::new(&python) } else { Command::new("sudo") };
        if !is_root()? {
            command.arg("-E").arg(&python);
        }
        command.current_dir(&self.root).env("PYTHONPYCACHEPREFIX", &self.compiled);
        command.args(["-m", "pytest", "-p", "no:cacheprovider"]);
        Ok(command)
    }

    /// Has all of them compiled, beside others.
    fn compile_ahead(&mut self) -> anyhow::Result<()> {
        let mut command = self.pytest()?;
        command.args(["--collect-only", "-q", "tests"]).stdin(Stdio::null()).stdout(Stdio::null());
        self.ahead = Some(command.spawn().context("cannot start pytest")?);
        Ok(())
    }

    /// Runs those with that marker, a file's by one worker (tests/conftest.py).
    fn run(&mut self, marker: &str, workers: Option<&str>) -> anyhow::Result<(bool, Counts)> {
        if let Some(mut ahead) = self.ahead.take() {
            // What is wrong the tests say.
            let _ = ahead.wait();
        }
        let mut command = self.pytest()?;
        let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| self.root.join("target"), PathBuf::from);
        if std::env::var_os("KIP_BIN").is_none() {
            command.env("KIP_BIN", target.join("debug/kip"));
        }
        // Built already: cargo, asked again for one, would look at every crate first.
        command.env("KIP_EXAMPLES", target.join("debug/examples"));
        command.args(["-ra", "--durations=10", "-m", marker]);
        if let Some(workers) = workers {
            command.args(["-n", workers, "--dist", "loadgroup", "--no-loadscope-reorder"]);
        }
        command.arg("tests");
        followed(&mut command, counts::Pytest::default())
    }
}

impl Drop for SystemTests {
    fn drop(&mut self) {
        // Not there if no test was run, and root's if sudo ran them.
        if self.compiled.exists() && std::fs::remove_dir_all(&self.compiled).is_err() {
            let _ = Command::new("sudo").args(["rm", "-rf", "--"]).arg(&self.compiled).status();
        }
    }
}

/// Runs a command, shows its output as it comes and lets `follower` count in it.
fn followed(command: &mut Command, mut follower: impl Follow) -> anyhow::Result<(bool, Counts)> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("cannot start the tests")?;
    let output = child.stdout.take().context("its output is a pipe")?;
    let mut shown = std::io::stdout();
    for line in BufReader::new(output).split(b'\n') {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        if let Some(line) = follower.line(&line) {
            writeln!(shown, "{line}")?;
        }
    }
    Ok((child.wait()?.success(), follower.counts()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doc_tests_are_found() {
        let block = |words: &str| format!("/// Adds.\n///\n/// ```{words}\n/// add(1);\n/// ```\nfn add() {{}}\n");
        for words in ["", "no_run", "rust", "should_panic"] {
            assert!(has_doc_test(&block(words)), "{words}");
        }
        let text = format!("{0}{0}    //! ```text\n    //! a -> b\n    //! ```\n// ```\n", block("text"));
        assert!(!has_doc_test(&text));
        assert!(has_doc_test(&(text + &block("compile_fail"))));
    }
}
