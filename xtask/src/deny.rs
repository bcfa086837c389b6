//! Enforces deny.toml over the packages of the build: licences, duplicate versions, sources. And
//! the promise that the workspace builds with the Rust its `rust-version` names: no package may
//! need a newer one.
//!
//! It reads the part of cargo-deny's format that deny.toml uses. Known vulnerabilities are left to
//! cargo-deny.

use crate::licence;
use crate::metadata::Package;
use anyhow::Context;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// deny.toml.
#[derive(Debug, Deserialize)]
pub struct Policy {
    licenses: Licences,
    bans: Bans,
    sources: Sources,
}

#[derive(Debug, Deserialize)]
struct Licences {
    allow: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Bans {
    skip: Vec<Skip>,
}

#[derive(Debug, Deserialize)]
struct Skip {
    name: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Sources {
    allow_registry: Vec<String>,
}

impl Policy {
    /// Reads the file.
    pub fn read(path: &Path) -> anyhow::Result<Policy> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        toml::from_str(&text).with_context(|| path.display().to_string())
    }
}

/// Packages that need a newer Rust than the workspace promises to build with.
pub fn too_new(packages: &[Package]) -> Vec<String> {
    let number = |version: &str| version.split('.').map(|part| part.parse().unwrap_or(0)).collect::<Vec<u32>>();
    let own = packages.iter().filter(|package| package.source.is_none());
    let Some(promised) = own.filter_map(|package| package.rust_version.as_deref()).min_by_key(|v| number(v)) else {
        return vec!["the workspace names no rust-version".to_owned()];
    };
    let padded = |version: &str| {
        let mut parts = number(version);
        parts.resize(3, 0);
        parts
    };
    let needs = |package: &Package| package.rust_version.clone().filter(|needed| padded(needed) > padded(promised));
    let line = |package: &Package, needed| {
        format!("{} {} needs Rust {needed}, rust-version promises {promised}", package.name, package.version)
    };
    packages.iter().filter_map(|package| needs(package).map(|needed| line(package, needed))).collect()
}

/// What is not as the policy wants it, one line each.
pub fn findings(policy: &Policy, packages: &[Package]) -> Vec<String> {
    let mut found = Vec::new();
    let mut versions: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for package in packages {
        versions.entry(&package.name).or_default().push(&package.version);
        let Some(source) = &package.source else { continue };
        let who = format!("{} {}", package.name, package.version);
        let registry = source.strip_prefix("registry+").or(source.strip_prefix("sparse+")).unwrap_or(source);
        if !policy.sources.allow_registry.iter().any(|allowed| allowed == registry) {
            found.push(format!("{who} comes from {source}, which deny.toml does not allow"));
        }
        found.extend(licence_finding(policy, &who, package.license.as_deref()));
    }
    for (name, versions) in versions {
        if versions.len() > 1 && !policy.bans.skip.iter().any(|skip| skip.name == name) {
            found.push(format!(
                "{name} is there in versions {}: unify them, or say in deny.toml why not",
                versions.join(", ")
            ));
        }
    }
    found
}

fn licence_finding(policy: &Policy, who: &str, expression: Option<&str>) -> Option<String> {
    let Some(expression) = expression else {
        return Some(format!("{who} names no licence"));
    };
    match licence::satisfied(expression, &|l| policy.licenses.allow.iter().any(|allowed| allowed == l)) {
        Ok(true) => None,
        Ok(false) => Some(format!("{who} is under {expression}, which deny.toml does not allow")),
        Err(licence::Unreadable(text)) => Some(format!("{who} names a licence that is no SPDX expression: {text:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> Policy {
        toml::from_str(
            "[licenses]\nallow = [\"MIT\"]\n[bans]\nskip = [{ name = \"syn\", reason = \"x\" }]\n\
             [sources]\nallow-registry = [\"https://registry\"]\n",
        )
        .unwrap()
    }

    fn package(name: &str, version: &str, license: &str, source: Option<&str>) -> Package {
        Package {
            id: format!("{name}@{version}"),
            name: name.into(),
            version: version.into(),
            license: (!license.is_empty()).then(|| license.into()),
            source: source.map(Into::into),
            rust_version: None,
            dependencies: vec![],
        }
    }

    #[test]
    fn what_the_policy_allows_passes() {
        let registry = Some("registry+https://registry");
        let packages = [
            package("a", "1.0.0", "MIT OR GPL-3.0-only", registry),
            package("syn", "2.0.0", "MIT", registry),
            package("syn", "3.0.0", "MIT", registry),
            package("kip-types", "0.1.0", "", None),
        ];
        assert_eq!(findings(&policy(), &packages), Vec::<String>::new());
    }

    #[test]
    fn a_package_that_needs_a_newer_rust_than_promised_is_named() {
        let with = |mut package: Package, version: &str| {
            package.rust_version = Some(version.into());
            package
        };
        let own = with(package("kip", "0.1.0", "", None), "1.85");
        let old = with(package("a", "1.0.0", "MIT", Some("registry")), "1.85.0");
        let new = with(package("b", "1.0.0", "MIT", Some("registry")), "1.100");
        assert_eq!(too_new(&[own.clone(), old.clone()]), Vec::<String>::new());
        assert_eq!(too_new(&[own, old, new]), ["b 1.0.0 needs Rust 1.100, rust-version promises 1.85"]);
    }

    // promise workspace: dependencies have allowed licences, one version, one source
    #[test]
    fn each_breach_is_named() {
        let registry = Some("registry+https://registry");
        let packages = [
            package("a", "1.0.0", "GPL-3.0-only", registry),
            package("b", "1.0.0", "", registry),
            package("c", "1.0.0", "MIT", Some("git+https://elsewhere")),
            package("d", "1.0.0", "MIT", registry),
            package("d", "2.0.0", "MIT", registry),
            package("e", "1.0.0", "MIT or so", registry),
        ];
        let found = findings(&policy(), &packages);
        assert_eq!(found.len(), 5, "{found:#?}");
        for word in [
            "a 1.0.0 is under GPL",
            "b 1.0.0 names no",
            "git+https://elsewhere",
            "d is there in versions 1.0.0, 2.0.0",
            "MIT or so",
        ] {
            assert!(found.iter().any(|line| line.contains(word)), "{word}: {found:#?}");
        }
    }
}
