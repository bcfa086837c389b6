//! What a spawned proc gets: what was asked for, and of its parent's what is no grant to it alone.

use kip_types::api::spawn::SpawnRequest;
use kip_types::api::{Code, InFile, LeftOpen, Refusal, RunRequest};
use kip_types::spec::Sandbox;
use kip_types::{Limits, ProcName, Spec};
use ring::rand::{SecureRandom, SystemRandom};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Longest part of a name that is its program's.
const LONGEST_STEM: usize = 40;

/// A name for a program, which no other proc has had or gets: its base name and 40 random bits.
pub(crate) fn new_name(command: &[String]) -> ProcName {
    let program = command.first().map_or("", String::as_str);
    let base = program.rsplit('/').next().unwrap_or(program);
    let letters = base.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' });
    let stem: String = letters.take(LONGEST_STEM).collect();
    let mut random = [0; 5];
    SystemRandom::new().fill(&mut random).expect("the kernel gives random bytes");
    let mut name = Some(stem.trim_matches('-')).filter(|stem| !stem.is_empty()).unwrap_or("proc").to_owned();
    name.push('-');
    random.iter().for_each(|byte| write!(name, "{byte:02x}").expect("a string takes all"));
    name.parse().expect("letters, digits and dashes")
}

/// A spec of a command alone.
fn plain(name: ProcName, command: Vec<String>) -> Spec {
    let fields = serde_json::json!({ "name": name, "command": command });
    serde_json::from_value(fields).expect("all else of a spec has a default")
}

/// The smaller one of those that there are.
fn least<T: PartialOrd>(one: Option<T>, other: Option<T>) -> Option<T> {
    match (one, other) {
        (Some(one), Some(other)) => Some(if other < one { other } else { one }),
        (one, other) => one.or(other),
    }
}

/// Leaves out what a full parent has and a light child has not.
fn within_light(spec: &mut Spec) {
    (spec.network, spec.shm_bytes, spec.limits.disk_bytes) = (None, None, None);
    spec.extra_hosts.clear();
    spec.egress.clear();
    spec.allow_setuid = false;
}

/// The request that makes the proc. From its parent it has the file system, the network, the user,
/// the rules of what it may reach and when it sleeps; and of limits at most the parent's. Volumes,
/// secrets, ports and capabilities are the parent's alone.
///
/// # Errors
/// `Code::Invalid`: more than the parent has was asked for, or nothing to run.
pub(crate) fn run_request(
    request: &SpawnRequest,
    name: ProcName,
    parent: Option<&Spec>,
) -> Result<RunRequest, Refusal> {
    let command = request.command.clone();
    if command.first().is_none_or(String::is_empty) {
        return Err(Refusal::new(Code::Invalid, "no program was given: spawn it by its path, with its arguments"));
    }
    let left = parent.is_none();
    let left_open = LeftOpen { name: false, idle: left, park_after: left, archive_after: left };
    let mut spec = plain(name, command);
    if let Some(parent) = parent {
        spec = Spec {
            image: parent.image.clone(),
            network: parent.network.clone(),
            extra_hosts: parent.extra_hosts.clone(),
            egress: parent.egress.clone(),
            limits: parent.limits.clone(),
            ulimits: parent.ulimits.clone(),
            read_only: parent.read_only,
            shm_bytes: parent.shm_bytes,
            cap_drop: parent.cap_drop.clone(),
            timing: parent.timing,
            allow_setuid: parent.allow_setuid,
            sandbox: parent.sandbox,
            tree: parent.tree,
            spawn: parent.spawn,
            user: parent.user.clone(),
            ..spec
        };
        if request.tree.is_some_and(|asked| asked > parent.tree) {
            let message = format!(
                "{} may do no more to the name tree than its parent {}: {}",
                spec.name, parent.name, parent.tree
            );
            return Err(Refusal::new(Code::Invalid, message));
        }
        if request.sandbox == Some(Sandbox::Full) && !parent.sandbox.is_full() {
            let message = format!("{} is light, and so are its children: leave out the sandbox", parent.name);
            return Err(Refusal::new(Code::Invalid, message));
        }
    }
    let limits = Limits {
        memory_bytes: least(request.memory_bytes, spec.limits.memory_bytes),
        cpus: least(request.cpus, spec.limits.cpus),
        class: request.class,
        ..spec.limits.clone()
    };
    spec = Spec {
        env: request.env.clone(),
        workdir: request.workdir.clone(),
        image: request.image.clone().unwrap_or(spec.image),
        network: request.network.clone().or(spec.network),
        tree: request.tree.unwrap_or(spec.tree),
        sandbox: request.sandbox.unwrap_or(spec.sandbox),
        limits,
        ..spec
    };
    if !spec.sandbox.is_full() {
        within_light(&mut spec);
    }
    Ok(RunRequest { spec, wait_ready: false, secrets: BTreeMap::new(), left_open, in_file: InFile::default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_types::spec::{ProcClass, TreeAccess};

    fn asked(command: &[&str]) -> SpawnRequest {
        SpawnRequest { command: command.iter().map(|word| (*word).to_owned()).collect(), ..SpawnRequest::default() }
    }

    #[test]
    fn names_are_of_the_program_and_new() {
        let command = ["/usr/bin/Python3.11".to_owned()];
        let (one, other) = (new_name(&command), new_name(&command));
        assert!(one.as_str().starts_with("python3-11-") && one != other, "{one} {other}");
        assert!(new_name(&["/..".to_owned()]).as_str().starts_with("proc-"));
        assert_eq!(new_name(&["x".repeat(200)]).as_str().len(), LONGEST_STEM + 11);
    }

    // promise spawn: a child has the file system, the network and the rights of its parent and no
    //   more memory, and none of its volumes, secrets and ports
    #[test]
    fn a_child_has_no_more_than_its_parent() {
        let parent: Spec = serde_json::from_value(serde_json::json!({
            "name": "p", "command": ["x"], "network": "n", "tree": "read", "secrets": ["s"], "cap_add": ["net_admin"],
            "limits": {"memory_bytes": 1000, "cpus": 2.0}, "ports": [{"proto": "tcp", "port": 80, "host_port": null}],
            "egress": ["none"], "user": "7", "env": {"A": "b"},
        }))
        .unwrap();
        let request = SpawnRequest { memory_bytes: Some(5000), class: ProcClass::Be, ..asked(&["/bin/x", "y"]) };
        let spec = run_request(&request, "c".parse().unwrap(), Some(&parent)).unwrap().spec;
        assert_eq!(
            (spec.network.as_deref(), spec.tree, spec.user.as_deref()),
            (Some("n"), TreeAccess::Read, Some("7"))
        );
        assert_eq!(
            (spec.limits.memory_bytes, spec.limits.cpus, spec.limits.class),
            (Some(1000), Some(2.0), ProcClass::Be)
        );
        assert_eq!((spec.egress, spec.command), (parent.egress.clone(), request.command));
        assert!(spec.secrets.is_empty() && spec.ports.is_empty() && spec.cap_add.is_empty() && spec.env.is_empty());
        let more = SpawnRequest { tree: Some(TreeAccess::Write), ..asked(&["x"]) };
        assert!(run_request(&more, "c".parse().unwrap(), Some(&parent)).unwrap_err().message.contains("no more"));
        assert!(run_request(&asked(&[""]), "c".parse().unwrap(), None).is_err());
        let light = SpawnRequest { sandbox: Some(Sandbox::Light), ..asked(&["x"]) };
        let spec = run_request(&light, "c".parse().unwrap(), Some(&parent)).unwrap().spec;
        assert_eq!((spec.sandbox, spec.outside_sandbox()), (Sandbox::Light, None));
        let full = SpawnRequest { sandbox: Some(Sandbox::Full), ..asked(&["x"]) };
        assert!(run_request(&full, "d".parse().unwrap(), Some(&spec)).unwrap_err().message.contains("is light"));
        assert_eq!(
            run_request(&asked(&["x"]), "d".parse().unwrap(), Some(&spec)).unwrap().spec.sandbox,
            Sandbox::Light
        );
    }
}
