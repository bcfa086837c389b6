//! Which crate of the workspace may depend on which: ideas point down, from the API to worker to
//! mechanisms to `types`.
//!
//! The table is the rule, ARCHITECTURE.md's table of crates its reason. A new edge is a line here,
//! in a commit of its own that says why. Dependencies of tests are free.

use crate::metadata::Package;

const TYPES: &str = "kip-types";
const SYS: &str = "kip-sys";

/// Crate, and what it may depend on.
const ALLOWED: [(&str, &[&str]); 43] = [
    (TYPES, &[]),
    (SYS, &[]),
    // What the API asks of a worker, and what flows between the two.
    ("kip-service", &[TYPES]),
    // What programs in procs say: by a trait of its own it asks for procs, and the tree by its
    // service.
    ("kip-runtime", &[TYPES, SYS, "kip-service"]),
    // What programs in procs are built with: nothing of the daemon but the messages, a file.
    ("kip-sdk", &[]),
    // How many procs serve behind a name: asks for them by a trait of its own.
    ("kip-scale", &[TYPES]),
    // Mechanisms: none knows another, but for what is said.
    ("kip-keeper", &[SYS]),
    ("kip-net", &[TYPES, SYS]),
    // DNS at two sockets: knows no procs.
    ("kip-dns", &[]),
    // Files as a tar stream and back, the same at both ends of `kip cp`: knows no procs.
    ("kip-files", &[SYS]),
    // What may be a name in an archive is one rule.
    ("kip-sandbox", &[TYPES, SYS, "kip-files"]),
    // How much memory there is, and when a wake may begin: looks at cgroups, knows no procs.
    ("kip-pressure", &[TYPES, "kip-sandbox"]),
    ("kip-snapshot", &[TYPES]),
    // Knows a directory and pipes, no procs.
    ("kip-logs", &[TYPES]),
    // Layers are unpacked as tarballs are, by the one code that may do so.
    ("kip-image", &[TYPES, "kip-sandbox"]),
    // Blobs and references in object storage; what they mean is for those above.
    ("kip-store", &[]),
    // Keys with revisions, in a file or in etcd; what they mean is for those above.
    ("kip-meta", &[]),
    // Procs by spawn: asks for procs by a trait of its own, keeps what is known of them as keys.
    ("kip-spawn", &[TYPES, SYS, "kip-service", "kip-meta"]),
    // Files and directories of realms, kept as such keys.
    ("kip-tree", &[TYPES, "kip-meta"]),
    // Archives what a snapshot is: its page map and working sets. Moves no object, which is the
    // store's.
    ("kip-archive", &[TYPES, "kip-snapshot"]),
    // A file format: bytes to messages and back.
    ("kip-criu-images", &[]),
    // Time across a sleep; starts and stops nothing.
    ("kip-clocks", &[SYS, "kip-criu-images"]),
    // Both speak of where the pages of a generation lie: its page map.
    ("kip-checkpoint", &[TYPES, SYS, "kip-criu-images", "kip-clocks", "kip-snapshot"]),
    // Whose descriptors the keeper holds in case it dies: it must do that itself, before anything
    // else may happen. Threads stopped and let go; moves no memory.
    ("kip-stop", &[SYS]),
    ("kip-pager", &[TYPES, SYS, "kip-keeper", "kip-snapshot", "kip-stop"]),
    // Policy: brings the mechanisms together.
    // What has happened, and what was used.
    ("kip-journal", &[TYPES, SYS, "kip-net"]),
    // What was held for a plan, made anew from the images.
    ("kip-remake", &[SYS, "kip-checkpoint", "kip-criu-images"]),
    // What is recorded of procs; starts and stops nothing. What is noted of held objects is what
    // they are made anew by.
    ("kip-records", &[TYPES, "kip-net", "kip-clocks", "kip-checkpoint", "kip-remake"]),
    // Procs, copied: their files, ids, generation and memory; knows of no record. Reads memory of
    // processes while the helper of a dump holds it, and looks for seeds in images.
    (
        "kip-copy",
        &[TYPES, SYS, "kip-archive", "kip-records", "kip-snapshot", "kip-checkpoint", "kip-clocks", "kip-criu-images"],
    ),
    // Generations to and from the store, templates and backups from files; knows no tasks. A
    // directory goes into a file as it is copied: by one way of calling tar.
    (
        "kip-offload",
        &[
            TYPES,
            SYS,
            "kip-records",
            "kip-copy",
            "kip-sandbox",
            "kip-criu-images",
            "kip-clocks",
            "kip-checkpoint",
            "kip-snapshot",
            "kip-archive",
            "kip-store",
        ],
    ),
    // Each step that is taken with one proc; knows no tasks and never decides when. A session of
    // exec is the client's as it is.
    (
        "kip-engine",
        &[
            "kip-journal",
            TYPES,
            "kip-service",
            SYS,
            "kip-keeper",
            "kip-net",
            "kip-dns",
            // A proc has its machine's books of memory.
            "kip-pressure",
            "kip-sandbox",
            "kip-image",
            "kip-criu-images",
            "kip-clocks",
            "kip-checkpoint",
            "kip-snapshot",
            // A running proc is copied in the middle of a freeze.
            "kip-copy",
            "kip-remake",
            "kip-offload",
            "kip-records",
            "kip-files",
            "kip-logs",
            "kip-pager",
            // Limits are lifted for CRIU too.
            "kip-stop",
            "kip-archive",
        ],
    ),
    // What lies between a client's frames and a program's descriptors.
    // Why a program is not executed is said by what its files are.
    ("kip-sessions", &[TYPES, SYS, "kip-service", "kip-sandbox", "kip-files", "kip-logs", "kip-engine"]),
    // One task per proc; touches a process only through the engine. The keeper has the runtime
    // socket of all procs.
    (
        "kip-supervisor",
        &[
            "kip-keeper",
            "kip-journal",
            TYPES,
            SYS,
            "kip-net",
            "kip-pressure",
            "kip-sandbox",
            "kip-criu-images",
            "kip-clocks",
            "kip-checkpoint",
            "kip-snapshot",
            "kip-copy",
            "kip-engine",
            "kip-sessions",
            "kip-offload",
            "kip-records",
            "kip-runtime",
            // Spawned procs are made by the service, and followed by their tasks.
            "kip-service",
            "kip-spawn",
            "kip-pager",
            "kip-archive",
        ],
    ),
    // What people see of one proc: reads, and wakes none.
    (
        "kip-insight",
        &[
            TYPES,
            SYS,
            "kip-net",
            "kip-criu-images",
            "kip-clocks",
            "kip-snapshot",
            "kip-pager",
            "kip-archive",
            "kip-records",
            "kip-offload",
            "kip-engine",
            "kip-supervisor",
        ],
    ),
    (
        "kip-worker",
        &[
            "kip-journal",
            "kip-engine",
            "kip-sessions",
            "kip-supervisor",
            TYPES,
            "kip-service",
            SYS,
            "kip-keeper",
            "kip-net",
            "kip-pressure",
            "kip-sandbox",
            "kip-image",
            "kip-criu-images",
            "kip-clocks",
            "kip-checkpoint",
            "kip-snapshot",
            "kip-offload",
            "kip-records",
            "kip-runtime",
            "kip-files",
            "kip-logs",
            "kip-pager",
            "kip-archive",
            "kip-copy",
            "kip-scale",
            "kip-insight",
            // Its counters are shown with the metrics.
            "kip-store",
        ],
    ),
    // The edge: knows a worker only by that interface.
    ("kip-api", &[TYPES, "kip-service"]),
    // What `kip up` is: wires API and worker together, and the tree, over the store in its file.
    ("kip-daemon", &[TYPES, SYS, "kip-service", "kip-api", "kip-worker", "kip-meta", "kip-tree", "kip-spawn"]),
    ("kip-client", &[TYPES]),
    // Files that describe procs: text to requests and back. What a proc has of the machine without
    // being given it is said by its files.
    ("kip-describe", &[TYPES, "kip-files"]),
    // What people read: numbers, times, tables. Asks nothing.
    ("kip-text", &[TYPES]),
    // Looks at the machine as the daemon will: for CRIU, and for how much memory it would use.
    ("kip-doctor", &[TYPES, SYS, "kip-checkpoint", "kip-daemon"]),
    // The program: is depended on by nothing.
    ("kip-cli", &[TYPES, SYS, "kip-files", "kip-daemon", "kip-client", "kip-describe", "kip-doctor", "kip-text"]),
    ("xtask", &[]),
];

/// Edges that the table does not have, and crates that it does not know.
pub fn findings(packages: &[Package]) -> Vec<String> {
    let own: Vec<&Package> = packages.iter().filter(|package| package.source.is_none()).collect();
    let mut found = Vec::new();
    for package in &own {
        let Some((_, allowed)) = ALLOWED.iter().find(|(name, _)| *name == package.name) else {
            found.push(format!(
                "{} is not in the table of xtask/src/edges.rs: say there what it may depend on",
                package.name
            ));
            continue;
        };
        for dependency in package.dependencies.iter().filter(|d| d.kind.as_deref() != Some("dev")) {
            let ours = own.iter().any(|p| p.name == dependency.name);
            if ours && !allowed.contains(&dependency.name.as_str()) {
                found.push(format!(
                    "{} may not depend on {}: move what it needs down, or add the edge to xtask/src/edges.rs with a reason",
                    package.name, dependency.name
                ));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::Dependency;

    fn package(name: &str, dependencies: &[(&str, Option<&str>)]) -> Package {
        Package {
            id: name.into(),
            name: name.into(),
            version: "0.1.0".into(),
            license: None,
            source: None,
            rust_version: None,
            dependencies: dependencies
                .iter()
                .map(|(name, kind)| Dependency { name: (*name).into(), kind: kind.map(Into::into) })
                .collect(),
        }
    }

    // promise workspace: dependencies between crates point one way
    // held by: this, `xtask::edges::tests::the_table_has_no_cycle`
    #[test]
    fn down_is_allowed_and_up_is_not() {
        let types = package(TYPES, &[]);
        let sys = package(SYS, &[(TYPES, Some("dev"))]);
        let net = package("kip-net", &[(TYPES, None), (SYS, None), ("serde", None)]);
        assert_eq!(findings(&[types.clone(), sys.clone(), net]), Vec::<String>::new());
        let upward = package("kip-net", &[("kip-api", None)]);
        let found = findings(&[types.clone(), package("kip-api", &[]), upward]);
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("kip-net may not depend on kip-api"), "{found:?}");
        assert!(findings(&[types, package(SYS, &[(TYPES, Some("build"))])])[0].starts_with("kip-sys may not"));
    }

    #[test]
    fn an_unknown_crate_is_named() {
        assert!(findings(&[package("kip-new", &[])])[0].starts_with("kip-new is not in the table"));
    }

    #[test]
    fn the_table_has_no_cycle() {
        for (name, allowed) in ALLOWED {
            for dependency in allowed {
                let below = ALLOWED.iter().position(|(n, _)| n == dependency).expect("every name is a row");
                let here = ALLOWED.iter().position(|(n, _)| *n == name).expect("every name is a row");
                assert!(below < here, "{name} -> {dependency} points up the table");
            }
        }
    }
}
