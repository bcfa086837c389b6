//! The edge: a `run` is checked and completed here, so that what a worker is given makes sense by
//! itself.
//!
//! Never asks the machine: whether a name is free, a file exists or a limit suffices is the
//! worker's to find out.

use kip_types::PortSpec;
use kip_types::api::clone::CloneRequest;
use kip_types::api::{CheckRequest, Code, Refusal, RunRequest, UpdateRequest};
use kip_types::life::Probe;
use kip_types::lifecycle::Tier;
use kip_types::name::{ProcName, Realm};
use kip_types::scale::CloneMethod;
use kip_types::spec::{
    Capability, Egress, Hibernate, Image, LEAST_LOG_BYTES, LONGEST_SECRET, MOST_HOSTS, MOST_LABELS, MOST_LOG_FILES,
    MOST_SECRETS, MOST_TMPFS, Protocol, SECRETS, Spec, Timing, addresses_meet, bad_egress, bad_hostname, bad_label,
    bad_secret, can_be_published_at, parse_signal,
};
use kip_types::volume::{ClonedVolumes, VolumeSource, VolumeSpec};
use kip_types::volume::{MOST_VOLUMES, check_volumes};
use std::collections::BTreeSet;
use std::net::IpAddr;

/// Least memory limit, bytes: below it not even the smallest program can be exec'd and charged for
/// its page tables.
pub const MEMORY_MIN_BYTES: u64 = 1 << 20;
/// Smallest limit of disk space: less is mostly journal.
pub const DISK_MIN_BYTES: u64 = 16 << 20;
/// Smallest /dev/shm, bytes: one page.
pub const SHM_MIN_BYTES: u64 = 4096;
/// Most names that a proc has for others beside its own.
const MOST_ALIASES: usize = 32;

/// Refuses what no worker could do and puts `defaults` where the caller left something open, but
/// for the name. The spec keeps what was asked for: it is what a file that describes the proc is
/// compared with.
pub fn complete(request: &mut RunRequest, defaults: &Timing) -> Result<(), Refusal> {
    (request.spec.asked, request.spec.trial, request.spec.alone, request.spec.tar_digest) = (None, false, false, None);
    (request.spec.replaced, request.spec.lineage, request.spec.replica_of) = (0, None, None);
    request.spec.own_volumes.clear();
    let mut asked = Box::new(request.clone());
    if request.left_open.idle {
        request.spec.timing.idle_ms = defaults.idle_ms;
        request.left_open.idle = false;
    }
    if request.left_open.park_after {
        request.spec.timing.park_after_ms = defaults.park_after_ms;
        request.left_open.park_after = false;
    }
    if request.left_open.archive_after {
        request.spec.timing.archive_after_ms = defaults.archive_after_ms;
        request.spec.timing.archive_by_default = defaults.archive_by_default;
        request.left_open.archive_after = false;
    } else {
        request.spec.timing.resolve_archive_default();
    }
    let checked = check(&request.spec).and_then(|()| check_secrets(request));
    checked.map_err(|line| Refusal::new(Code::Invalid, line))?;
    request.spec.secrets = request.secrets.keys().cloned().collect();
    // Never their contents: those are kept sealed, and nowhere else.
    asked.secrets.clear();
    asked.spec.secrets.clone_from(&request.spec.secrets);
    request.spec.asked = Some(asked);
    Ok(())
}

/// Refuses a change that no worker could make of a proc that has this spec.
pub fn check_update(change: &UpdateRequest, mut spec: Spec) -> Result<(), Refusal> {
    if let Some(none) = change.remove_ports.iter().find(|port| !spec.ports.iter().any(|is| is.inner() == **port)) {
        let message = format!("{} has no {} port {}", spec.name, none.proto, none.port);
        return Err(Refusal::new(Code::Invalid, message).with_hint("`kip port` lists those that it has"));
    }
    let answers_names = spec.has_dns_port();
    change.apply(&mut spec);
    if spec.has_dns_port() != answers_names {
        let message = format!(
            "whether {} has a port 53 is fixed when it is made: Kip answers DNS where there is none",
            spec.name
        );
        return Err(Refusal::new(Code::Invalid, message));
    }
    check_changeable(&spec)
        .and_then(|()| check_ports(&spec.ports, &spec.probes))
        .map_err(|line| Refusal::new(Code::Invalid, line))
}

/// Refuses a trial that would change what is not its own.
pub fn check_trial(request: &CheckRequest) -> Result<(), Refusal> {
    let line = if request.to == Tier::Hot {
        "hot is not asleep: a trial goes to hibernated, parked or archived".to_owned()
    } else if request.to == Tier::Hibernated && request.run.spec.timing.hibernate == Hibernate::Off {
        "nothing would be tried: it does not hibernate (`--hibernate off`); give --to parked".to_owned()
    } else if let Some(volume) = request.run.spec.volumes.iter().find(|v| !v.read_only).filter(|_| !request.volumes) {
        format!(
            "the trial would write to the volume {} at {}: allow it with --use-volumes, or give it another one",
            volume.source, volume.target
        )
    } else {
        return Ok(());
    };
    Err(Refusal::new(Code::Invalid, line))
}

fn check_secrets(request: &RunRequest) -> Result<(), String> {
    let (spec, secrets) = (&request.spec, &request.secrets);
    if let Some(name) = spec.secrets.iter().find(|name| !secrets.contains_key(*name)) {
        return Err(format!("the secret {name:?} comes without its contents: put them into `secrets` of the request"));
    }
    if secrets.is_empty() {
        return Ok(());
    }
    if secrets.len() > MOST_SECRETS {
        return Err(format!("{} secrets are too many: at most {MOST_SECRETS} are possible", secrets.len()));
    }
    if let Some(line) = secrets.keys().find_map(|name| bad_secret(name)) {
        return Err(line);
    }
    if let Some((name, _)) = secrets.iter().find(|(_, contents)| contents.0.len() > LONGEST_SECRET) {
        return Err(format!("the secret {name:?} has more than {LONGEST_SECRET} bytes"));
    }
    let at = |target: &str| target == SECRETS || target.strip_prefix(SECRETS).is_some_and(|rest| rest.starts_with('/'));
    match spec.volumes.iter().find(|volume| at(&volume.target)) {
        Some(volume) => Err(format!("a volume cannot be at {}: its secrets are there", volume.target)),
        None if spec.volumes.len() >= MOST_VOLUMES => {
            Err(format!("{MOST_VOLUMES} volumes are too many for a proc with secrets, which are one more"))
        }
        None => Ok(()),
    }
}

/// The first of `stem-1`, `stem-2`, .. that is not in `taken`.
pub fn free_name(stem: &ProcName, taken: &[ProcName]) -> Result<ProcName, Refusal> {
    let taken: BTreeSet<&str> = taken.iter().map(ProcName::as_str).collect();
    (1u64..)
        .map(|n| format!("{stem}-{n}"))
        .find(|name| !taken.contains(name.as_str()))
        .expect("names in use are finite")
        .parse()
        .map_err(|e| Refusal::new(Code::Invalid, format!("no name can be made from {stem:?}: {e}")))
}

fn check(spec: &Spec) -> Result<(), String> {
    if spec.realm != Realm::default() {
        return Err(format!("there is no realm {}: this daemon has only the realm {}", spec.realm, Realm::default()));
    }
    check_program(spec)?;
    check_ports(&spec.ports, &spec.probes)?;
    check_names(spec)?;
    spec.outside_sandbox().map_or(Ok(()), Err)?;
    check_end(spec)?;
    if let Some(twice) =
        spec.ulimits.iter().enumerate().find(|(at, one)| spec.ulimits[..*at].iter().any(|o| o.name() == one.name()))
    {
        return Err(format!("the limit {} is given twice", twice.1.name()));
    }
    if let Some(never) = spec.cap_add.iter().find(|one| !one.is_given()) {
        return Err(format!("Kip gives the capability {never} to no proc: possible are {}", Capability::given()));
    }
    check_tmpfs(spec)?;
    check_volumes(&spec.volumes).map_err(|e| e.to_string())?;
    if let Image::Tar(path) = &spec.image
        && !path.is_absolute()
    {
        return Err(format!("the tarball's path {} is not absolute", path.display()));
    }
    check_changeable(spec)
}

/// What an update can change, too.
/// Refuses to scale what cannot be behind one name more than once.
fn check_scaling(spec: &Spec) -> Result<(), String> {
    let Some(scaling) = &spec.scale else { return Ok(()) };
    let name = &spec.name;
    if let Some(fault) = scaling.fault() {
        return Err(format!("{name}: {fault}"));
    }
    if scaling.max == 1 {
        return Ok(());
    }
    if let Some(of) = &spec.replica_of {
        return Err(format!("{name} is a replica of {of}: scale that"));
    }
    if spec.ports.is_empty() {
        return Err(format!("{name} has no ports, and connections are all that is spread: give it one (-p) first"));
    }
    if spec.remove {
        return Err(format!("{name} goes when its program ends (--rm), and its replicas would not: run it without"));
    }
    let written = |v: &&VolumeSpec| !v.read_only && v.source != VolumeSource::Secrets;
    let Some(volume) = spec.volumes.iter().find(written) else { return Ok(()) };
    let of_host = spec.volumes.iter().find(|v| written(v) && matches!(v.source, VolumeSource::Host(_)));
    let what = format!("{name} has the volume {} at {}", volume.source, volume.target);
    match (scaling.volumes, scaling.method, of_host) {
        (None, ..) => Err(format!(
            "{what}, which replicas would write to as well: say what they have in its place (--volumes share, copy or drop)"
        )),
        (_, CloneMethod::Warm, _) => {
            Err(format!("{what}, and there is no template of such a proc: leave out --method warm"))
        }
        (Some(ClonedVolumes::Copy), CloneMethod::Cold, _) => Err(format!(
            "{what}, and its files are copied at the moment of a hot clone: leave out --method cold, or --volumes share or drop"
        )),
        (Some(ClonedVolumes::Copy), _, Some(volume)) => Err(format!(
            "{} at {} of {name} is not Kip's own to copy: --volumes share, or drop",
            volume.source, volume.target
        )),
        _ => Ok(()),
    }
}

fn check_changeable(spec: &Spec) -> Result<(), String> {
    check_labels(spec)?;
    check_scaling(spec)?;
    if let Some(Err(e)) = spec.stop_signal.as_deref().map(parse_signal) {
        return Err(format!("stop {e}"));
    }
    if spec.timing.never && spec.timing.dry_run {
        return Err("idle-dry-run cannot be used with never-sleep, which leaves nothing to try".to_owned());
    }
    let limits = &spec.limits;
    if let Some(bytes) = limits.memory_bytes.filter(|b| *b < MEMORY_MIN_BYTES) {
        return Err(format!("a memory limit of {bytes} bytes is too small: give at least {MEMORY_MIN_BYTES}"));
    }
    if let Some(cpus) = limits.cpus.filter(|c| !(c.is_finite() && *c >= 0.01)) {
        return Err(format!("a limit of {cpus} CPUs is too small: give at least 0.01"));
    }
    if let Some(bytes) = limits.disk_bytes.filter(|b| *b < DISK_MIN_BYTES) {
        return Err(format!("a limit of {bytes} bytes of disk space is too small: give at least {DISK_MIN_BYTES}"));
    }
    if limits.log_bytes < LEAST_LOG_BYTES {
        let bytes = limits.log_bytes;
        return Err(format!("log files of {bytes} bytes are too small: give at least {LEAST_LOG_BYTES} by --log-size"));
    }
    if !(1..=MOST_LOG_FILES).contains(&limits.log_files) {
        return Err(format!("a log has 1 to {MOST_LOG_FILES} files, not {} (--log-files)", limits.log_files));
    }
    if limits.pids == 0 {
        return Err("a limit of 0 processes lets nothing run: give at least 1".to_owned());
    }
    Ok(())
}

fn check_program(spec: &Spec) -> Result<(), String> {
    match spec.command.first() {
        // An image may have a program of its own.
        None if matches!(spec.image, Image::Oci(_)) => {}
        None => return Err("no command was given".to_owned()),
        Some(program) if program.is_empty() => return Err("the command's first word is empty".to_owned()),
        Some(_) => {}
    }
    if spec.command.iter().any(|word| word.contains('\0')) {
        return Err("the command contains a NUL byte".to_owned());
    }
    for (key, value) in &spec.env {
        if key.is_empty() || key.contains(['=', '\0']) || value.contains('\0') {
            return Err(format!("the environment variable {key:?} is not valid"));
        }
    }
    match &spec.workdir {
        Some(dir) if !dir.is_absolute() => Err(format!("the working directory {} is not absolute", dir.display())),
        _ => Ok(()),
    }
}

/// Refuses ports of a clone that no proc can have.
///
/// # Errors
/// Which, and why.
pub(crate) fn check_clone(request: &CloneRequest) -> Result<(), Refusal> {
    check_ports(&request.ports, &[]).map_err(|line| Refusal::new(Code::Invalid, line))
}

fn check_ports(ports: &[PortSpec], probes: &[Probe]) -> Result<(), String> {
    let mut inside = BTreeSet::new();
    let mut outside: Vec<(Protocol, u16, Option<IpAddr>)> = Vec::new();
    for port in ports {
        if port.private && (port.host_port.is_some() || port.host_addr.is_some()) {
            return Err(format!("{} port {} is private: it has no port on the host", port.proto, port.port));
        }
        if let Some(addr) = port.host_addr.filter(|addr| !can_be_published_at(*addr)) {
            return Err(format!("{} port {} cannot be published at {addr}", port.proto, port.port));
        }
        if port.port == 0 || port.host_port == Some(0) {
            return Err("port 0 cannot be published".to_owned());
        }
        if !inside.insert((port.proto, port.port)) {
            return Err(format!("{} port {} is published twice", port.proto, port.port));
        }
        let Some(host_port) = port.host_port else { continue };
        outside.push((port.proto, host_port, port.host_addr));
    }
    outside.extend(probes.iter().map(|probe| (Protocol::Tcp, probe.host_port, None)));
    for (at, (proto, port, addr)) in outside.iter().enumerate() {
        let same = |(p, n, a): &&(Protocol, u16, Option<IpAddr>)| (p, n) == (proto, port) && addresses_meet(*a, *addr);
        if outside[..at].iter().any(|other| same(&other)) {
            return Err(format!("{proto} host port {port} is asked for twice"));
        }
    }
    Ok(())
}

/// What goes into /etc/hosts of others.
fn check_names(spec: &Spec) -> Result<(), String> {
    let fits = |name: &str| {
        let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        (1..=253).contains(&name.len()) && name.chars().all(known) && !name.starts_with(['-', '.'])
    };
    if spec.network.is_none() && !spec.aliases.is_empty() {
        return Err("a name for others needs a network: give --network NAME, too".to_owned());
    }
    if let Some(line) = spec.hostname.as_deref().and_then(bad_hostname) {
        return Err(line);
    }
    if spec.extra_hosts.len() > MOST_HOSTS {
        return Err(format!("{} names with addresses are too many: at most {MOST_HOSTS}", spec.extra_hosts.len()));
    }
    if let Some(line) = bad_egress(&spec.egress) {
        return Err(line);
    }
    let by_name = spec.egress.iter().find(|rule| matches!(rule, Egress::Names { .. }));
    if let (Some(rule), true) = (by_name, spec.ports.iter().any(|port| port.port == 53)) {
        return Err(format!(
            "egress {rule} needs the resolver that Kip gives a proc, and this proc has port 53 for itself: name addresses instead"
        ));
    }
    match spec.network.iter().chain(&spec.aliases).find(|name| !fits(name)) {
        Some(name) => Err(format!("{name:?} is no name for others: write letters, digits, '-', '_' and '.'")),
        None if spec.aliases.len() > MOST_ALIASES => Err(format!("more than {MOST_ALIASES} names for others")),
        None => Ok(()),
    }
}

/// What ends with the program, and what begins again.
fn check_end(spec: &Spec) -> Result<(), String> {
    if spec.remove && !spec.restart.is_no() {
        return Err(
            "a proc that is started again when it ends cannot be removed then: leave out --rm or --restart".to_owned()
        );
    }
    Ok(())
}

/// One cannot hide another, nor a volume.
fn check_tmpfs(spec: &Spec) -> Result<(), String> {
    if spec.tmpfs.len() > MOST_TMPFS {
        return Err(format!("{} tmpfs are too many: at most {MOST_TMPFS} are possible", spec.tmpfs.len()));
    }
    if let Some(bytes) = spec.shm_bytes.filter(|bytes| *bytes < SHM_MIN_BYTES) {
        return Err(format!("{bytes} bytes for /dev/shm are too few: give at least {SHM_MIN_BYTES} by --shm-size"));
    }
    let mut places: BTreeSet<&str> = spec.volumes.iter().map(|volume| volume.target.as_str()).collect();
    match spec.tmpfs.iter().find(|one| !places.insert(one.target.as_str())) {
        Some(twice) => Err(format!("a tmpfs cannot be at {}: something else is mounted there", twice.target)),
        None => Ok(()),
    }
}

fn check_labels(spec: &Spec) -> Result<(), String> {
    if spec.labels.len() > MOST_LABELS {
        return Err(format!("{} labels are too many: at most {MOST_LABELS} are possible", spec.labels.len()));
    }
    spec.labels.iter().find_map(|(key, value)| bad_label(key, value)).map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_types::api::LeftOpen;

    fn request(json: &str) -> RunRequest {
        serde_json::from_str(json).unwrap()
    }

    fn refused(json: &str) -> String {
        let refusal = complete(&mut request(json), &Timing::default()).unwrap_err();
        assert_eq!(refusal.code, Code::Invalid);
        refusal.message
    }

    #[test]
    fn fills_in_only_what_was_left_open() {
        let defaults = Timing { idle_ms: 1, park_after_ms: 2, ..Timing::default() };
        let mut left = request(
            r#"{"spec":{"name":"a","command":["x"],"timing":{"idle_ms":7,"park_after_ms":8}},"left_open":{"idle":true}}"#,
        );
        let before = left.clone();
        complete(&mut left, &defaults).unwrap();
        assert_eq!(left.spec.asked.as_deref(), Some(&before), "what was asked for is kept");
        let mut with = before.clone();
        with.secrets.insert("key".to_owned(), kip_types::keys::Hex(b"secret".to_vec()));
        complete(&mut with, &defaults).unwrap();
        let asked = with.spec.asked.unwrap();
        assert_eq!(
            (asked.secrets.len(), &asked.spec.secrets[..]),
            (0, &["key".to_owned()][..]),
            "never what is secret"
        );
        assert_eq!((left.spec.timing.idle_ms, left.spec.timing.park_after_ms), (1, 8));
        assert_eq!(left.left_open, LeftOpen::default());
    }

    // promise invariants: 8 realms are checked at the edge
    #[test]
    fn refuses_what_cannot_work() {
        assert!(refused(r#"{"spec":{"name":"a","command":[]}}"#).contains("no command"));
        assert!(refused(r#"{"spec":{"name":"a","command":[""]}}"#).contains("empty"));
        assert!(refused(r#"{"spec":{"name":"a","command":["x\u0000"]}}"#).contains("NUL"));
        assert!(refused(r#"{"spec":{"name":"a","command":["x"],"realm":"b"}}"#).contains("no realm b"));
        assert!(refused(r#"{"spec":{"name":"a","command":["x"],"workdir":"b"}}"#).contains("not absolute"));
        assert!(refused(r#"{"spec":{"name":"a","command":["x"],"image":{"tar":"b"}}}"#).contains("not absolute"));
        assert!(refused(r#"{"spec":{"name":"a","command":["x"],"env":{"":"b"}}}"#).contains("variable"));
        assert!(refused(r#"{"spec":{"name":"a","command":["x"],"limits":{"memory_bytes":5}}}"#).contains("too small"));
        assert!(refused(r#"{"spec":{"name":"a","command":["x"],"limits":{"cpus":0.0}}}"#).contains("too small"));
        assert!(refused(r#"{"spec":{"name":"a","command":["x"],"limits":{"pids":0}}}"#).contains("processes"));
        assert!(refused(r#"{"spec":{"name":"a","command":["x"],"labels":{"":"b"}}}"#).contains("label"));
        assert!(refused(r#"{"spec":{"name":"a","command":["x"],"hostname":"-"}}"#).contains("host name"));
        let both = r#"{"spec":{"name":"a","command":["x"],"timing":{"never":true,"dry_run":true}}}"#;
        assert!(refused(both).contains("never-sleep"));
        let volume = r#"{"source":{"named":"a"},"target":"/proc"}"#;
        let closed = format!(r#"{{"spec":{{"name":"a","command":["x"],"volumes":[{volume}]}}}}"#);
        assert!(refused(&closed).contains("the sandbox's own"));
        let port = r#"{"proto":"tcp","port":80,"host_port":8080}"#;
        let twice = format!(r#"{{"spec":{{"name":"a","command":["x"],"ports":[{port},{port}]}}}}"#);
        assert!(refused(&twice).contains("twice"));
        let other = r#"{"proto":"tcp","port":81,"host_port":8080}"#;
        let twice = format!(r#"{{"spec":{{"name":"a","command":["x"],"ports":[{port},{other}]}}}}"#);
        assert!(refused(&twice).contains("host port 8080 is asked for twice"));
        let probed = format!(r#"{{"spec":{{"name":"a","command":["x"],"ports":[{port}],"probes":["8080=tcp:80"]}}}}"#);
        assert!(refused(&probed).contains("host port 8080 is asked for twice"));
    }

    // promise command-line: a proc without a name gets the lowest free number
    #[test]
    fn a_name_gets_the_lowest_free_number() {
        let name = |s: &str| s.parse::<ProcName>().unwrap();
        let taken = [name("web-1"), name("web-3"), name("db-2")];
        assert_eq!(free_name(&name("web"), &taken).unwrap(), name("web-2"));
        assert_eq!(free_name(&name("db"), &[]).unwrap(), name("db-1"));
        assert_eq!(free_name(&name(&"x".repeat(63)), &[]).unwrap_err().code, Code::Invalid);
    }
}
