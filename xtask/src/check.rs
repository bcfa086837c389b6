//! `cargo xtask check`: format, lints, dependencies, the house's own rules and documentation.

use crate::steps::{self, Outcome};
use crate::{cycles, deny, edges, metadata, tidy};
use std::path::Path;
use std::process::{Command, Stdio};

const STEPS: [&str; 9] = ["fmt", "clippy", "dependencies", "advisories", "edges", "cycles", "tidy", "scripts", "docs"];

/// Runs the steps named, or all. True if none failed.
pub fn run(root: &Path, chosen: &[String]) -> anyhow::Result<bool> {
    if let Some(unknown) = chosen.iter().find(|name| !STEPS.contains(&name.as_str())) {
        anyhow::bail!("there is no check {unknown:?}; there are: {}", STEPS.join(" "));
    }
    let mut all_passed = true;
    for name in STEPS {
        if chosen.is_empty() || chosen.iter().any(|c| c == name) {
            all_passed &= steps::step(name, || one(root, name));
        }
    }
    Ok(all_passed)
}

fn one(root: &Path, name: &str) -> anyhow::Result<Outcome> {
    match name {
        "fmt" => steps::quiet(cargo(root).args(["fmt", "--all", "--check"])),
        "clippy" => clippy(root),
        "dependencies" => {
            let policy = deny::Policy::read(&root.join("deny.toml"))?;
            let packages = metadata::load(root)?;
            let mut findings = deny::findings(&policy, &packages);
            findings.extend(deny::too_new(&packages));
            let foreign = packages.iter().filter(|p| p.source.is_some()).count();
            Ok(if findings.is_empty() {
                Outcome::Passed(format!("{foreign} packages: licences, versions, sources"))
            } else {
                Outcome::of(&findings)
            })
        }
        "advisories" => advisories(root),
        "edges" => Ok(Outcome::of(&edges::findings(&metadata::load(root)?))),
        "cycles" => Ok(Outcome::of(&cycles::findings(&tidy::files(root)?))),
        "tidy" => tidy::run(root),
        "scripts" => scripts(root),
        "docs" => docs(root),
        other => unreachable!("{other} is in STEPS"),
    }
}

/// Cargo as it was called, in the workspace. Its variables about this program's package are not
/// passed on: build scripts of other packages read them, and would run anew by each call of cargo,
/// in turn with ours.
pub fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root);
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")) {
            command.env_remove(name);
        }
    }
    command
}

fn is_there(command: &mut Command) -> bool {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|s| s.success())
}

/// The Rust whose lints the code is held to. A newer one brings new lints, which must not fail an
/// unchanged tree.
const LINTS_OF: (u32, u32) = (1, 95);

/// Whether this Rust is newer than [`LINTS_OF`]; what to say about it.
fn newer_lints() -> anyhow::Result<Option<String>> {
    let release = metadata::rustc("release: ")?;
    let mut numbers = release.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let found = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let remark = format!("Rust {release} is newer than {}.{}: warnings do not count", LINTS_OF.0, LINTS_OF.1);
    Ok((found > LINTS_OF).then_some(remark))
}

/// Adds a remark to a pass.
fn with_remark(outcome: Outcome, remark: Option<String>) -> Outcome {
    match (outcome, remark) {
        (Outcome::Passed(_), Some(remark)) => Outcome::Passed(remark),
        (outcome, _) => outcome,
    }
}

/// All code that is checked. Other packages than these, or other features, would have most of what
/// they depend on compiled once more.
const ALL: [&str; 3] = ["--workspace", "--all-targets", FEATURES];
const FEATURES: &str = "--features=kip-store/gcs,kip-store/azure,kip-tree/etcd";

fn clippy(root: &Path) -> anyhow::Result<Outcome> {
    if !is_there(cargo(root).args(["clippy", "--version"])) {
        return Ok(Outcome::Skipped("this Rust has no clippy".into()));
    }
    let newer = newer_lints()?;
    let strict: &[&str] = if newer.is_none() { &["--", "-D", "warnings"] } else { &[] };
    let run = |what: &[&str]| steps::quiet(cargo(root).args(["clippy", "--locked", "--quiet"]).args(what).args(strict));
    // With what is left out as a rule, and without what can be left out.
    match run(&ALL)? {
        Outcome::Passed(_) => {}
        other => return Ok(other),
    }
    Ok(with_remark(run(&[&ALL[..], &["--no-default-features"]].concat())?, newer))
}

fn docs(root: &Path) -> anyhow::Result<Outcome> {
    let newer = newer_lints()?;
    let mut command = cargo(root);
    // With examples it has the features that tests ask for, as clippy has.
    command.args(["doc", "--workspace", "--no-deps", "--lib", "--bins", "--examples", FEATURES, "--locked", "--quiet"]);
    if newer.is_none() {
        command.env("RUSTDOCFLAGS", "-D warnings");
    }
    Ok(with_remark(steps::quiet(&mut command)?, newer))
}

fn advisories(root: &Path) -> anyhow::Result<Outcome> {
    if !is_there(cargo(root).args(["deny", "--version"])) {
        return Ok(Outcome::Skipped("cargo-deny is not installed: known vulnerabilities are not checked".into()));
    }
    steps::quiet(cargo(root).args(["deny", "check"]))
}

/// Every shell script parses; shellcheck reads them too where it is installed.
fn scripts(root: &Path) -> anyhow::Result<Outcome> {
    let shell: Vec<_> = tidy::files(root)?
        .into_iter()
        .filter(|file| {
            let first = file.text.lines().next().unwrap_or_default();
            first.starts_with("#!") && (first.ends_with("bash") || first.ends_with("/sh")) || file.path.ends_with(".sh")
        })
        .collect();
    let mut findings = Vec::new();
    for file in &shell {
        if let Outcome::Failed(text) = steps::quiet(Command::new("bash").arg("-n").arg(root.join(&file.path)))? {
            findings.push(text);
        }
    }
    let has_shellcheck = is_there(Command::new("shellcheck").arg("--version"));
    if has_shellcheck {
        let paths = shell.iter().map(|file| root.join(&file.path));
        if let Outcome::Failed(text) = steps::quiet(Command::new("shellcheck").arg("--external-sources").args(paths))? {
            findings.push(text);
        }
    }
    Ok(match (findings.is_empty(), has_shellcheck) {
        (false, _) => Outcome::of(&findings),
        (true, true) => Outcome::Passed(format!("{} scripts", shell.len())),
        (true, false) => Outcome::Passed(format!("{} scripts; syntax only, shellcheck is not installed", shell.len())),
    })
}
