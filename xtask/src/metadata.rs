//! What `cargo metadata` says about the packages of this build, cut down to what the checks ask.

use anyhow::Context;
use serde::Deserialize;
use std::collections::HashSet;
use std::path::Path;

/// One package that is built on this platform.
#[derive(Debug, Clone, Deserialize)]
pub struct Package {
    /// Cargo's id.
    pub id: String,
    /// Name.
    pub name: String,
    /// Version.
    pub version: String,
    /// SPDX expression, if it has one.
    pub license: Option<String>,
    /// Where it comes from; none for the workspace's own.
    pub source: Option<String>,
    /// The oldest Rust it promises to build with, if it says so.
    pub rust_version: Option<String>,
    /// What it asks for.
    pub dependencies: Vec<Dependency>,
}

/// One dependency as a manifest states it.
#[derive(Debug, Clone, Deserialize)]
pub struct Dependency {
    /// Name of the package.
    pub name: String,
    /// None for a normal one, `dev` or `build`.
    pub kind: Option<String>,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
}

/// Every package that is part of the build on this machine's platform.
pub fn load(root: &Path) -> anyhow::Result<Vec<Package>> {
    let platform = host()?;
    let output = crate::check::cargo(root)
        .args(["metadata", "--format-version", "1", "--locked", "--filter-platform", &platform])
        .output()
        .context("cargo metadata")?;
    anyhow::ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim());
    let metadata: Metadata = serde_json::from_slice(&output.stdout).context("cargo metadata's JSON")?;
    let used: HashSet<String> = metadata.resolve.nodes.into_iter().map(|node| node.id).collect();
    Ok(metadata.packages.into_iter().filter(|package| used.contains(&package.id)).collect())
}

/// The platform this toolchain builds for, for example `x86_64-unknown-linux-gnu`.
pub fn host() -> anyhow::Result<String> {
    rustc("host: ")
}

/// What `rustc -vV` says after a label.
pub fn rustc(label: &str) -> anyhow::Result<String> {
    let output = std::process::Command::new("rustc").arg("-vV").output().context("rustc -vV")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let value = text.lines().find_map(|line| line.strip_prefix(label));
    Ok(value.with_context(|| format!("rustc -vV says no {label:?}"))?.to_owned())
}
