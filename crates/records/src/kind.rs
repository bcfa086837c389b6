//! What determines a template: files that a proc begins with, its command, its environment, its
//! secrets, its limits. Procs of one kind may begin from the template of one of them.

use kip_types::keys::Hex;
use kip_types::spec::DEFAULT_PATH;
use kip_types::{Image, Spec, TemplateId, VolumeSource};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Bytes of the hash that an id shows.
const ID_BYTES: usize = 8;
/// What of a spec is one proc's own, or is about it from the outside: procs of one kind differ in
/// it. What a spec gets in addition counts as its kind until it is named here.
const OWN: [&str; 21] = [
    "own_volumes",
    "checkpoints",
    "scale",
    "replica_of",
    "name",
    "aliases",
    "hostname",
    "labels",
    "timing",
    "restart",
    "stop_signal",
    "stop_grace_ms",
    "template",
    "probes",
    "egress",
    "remove",
    "file",
    "trial",
    "replaced",
    "lineage",
    "asked",
];
/// Files and directories of the host that change when its packages do, whatever manages them.
const OF_PACKAGES: [&str; 10] = [
    "/var/lib/dpkg/status",
    "/var/lib/rpm",
    "/usr/bin",
    "/usr/sbin",
    "/usr/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/local/bin",
    "/usr/local/lib",
    "/usr/local/lib/node_modules",
];
/// Below these lie directories of languages, with their packages in `dist-packages` or
/// `site-packages`.
const OF_LANGUAGES: [&str; 2] = ["/usr/lib", "/usr/local/lib"];
/// Files of a volume that are looked at: of more a change may not be noticed.
const MOST_LOOKED_AT: usize = 2000;

/// What determines it.
#[derive(Debug, Clone)]
pub struct Kind<'a> {
    /// What the proc is asked to be.
    pub spec: &'a Spec,
    /// The skeleton that its files lie over.
    pub base: &'a Path,
    /// Where named volumes are.
    pub volumes: PathBuf,
    /// Contents of its secrets, by their names.
    pub secrets: &'a BTreeMap<String, Hex>,
}

impl Kind<'_> {
    /// The same for procs that may begin from each other's template.
    pub fn id(&self) -> TemplateId {
        self.id_for(&self.asked())
    }

    /// A hash of what determines it on each machine alike: all but the files of this one.
    pub fn asked(&self) -> String {
        let Kind { spec, secrets, .. } = self;
        let mut kind = serde_json::to_value(spec).expect("a spec is recorded as JSON");
        let fields = kind.as_object_mut().expect("it is a table");
        OWN.iter().for_each(|own| _ = fields.remove(*own));
        let ports = spec.ports.iter().map(|port| json!([port.proto, port.port]));
        fields.insert("ports".into(), Value::Array(ports.collect()));
        // Paths of a request may have links in them, which those of a proc have not.
        let volumes = spec.volumes.iter().filter(|volume| volume.source != VolumeSource::Secrets).map(|volume| {
            let source = match &volume.source {
                VolumeSource::Host(path) => fs::canonicalize(path).unwrap_or_else(|_| path.clone()),
                other => PathBuf::from(other.to_string()),
            };
            json!([source, volume.target, volume.read_only])
        });
        fields.insert("volumes".into(), Value::Array(volumes.collect()));
        let after = spec.template.as_ref().and_then(|template| template.after.as_ref());
        fields.insert("template_after".into(), json!(after));
        let secrets = secrets.iter().map(|(name, contents)| json!([name, blake3::hash(&contents.0).to_hex().as_str()]));
        fields.insert("contents of secrets".into(), Value::Array(secrets.collect()));
        blake3::hash(kind.to_string().as_bytes()).to_hex().to_string()
    }

    /// The id on this machine of what has that hash: [`Kind::asked`], of which the secrets may be
    /// unknown here. A skeleton is known by its name, wherever the data directory is.
    pub fn id_for(&self, asked: &str) -> TemplateId {
        let stamps = stamps(self.spec, &self.volumes).into_iter().map(|(path, stamp)| json!([path, stamp]));
        let base = self.base.file_name().map(|name| name.to_string_lossy());
        let kind = json!({"asked": asked, "base": base, "files": Value::Array(stamps.collect())});
        let hash = blake3::hash(kind.to_string().as_bytes());
        let hex: String = hash.as_bytes()[..ID_BYTES].iter().map(|byte| format!("{byte:02x}")).collect();
        format!("t{hex}").parse().expect("a letter and digits are a name")
    }

    /// What of the files has changed since a moment, milliseconds since the epoch.
    pub fn changed_since(&self, moment_ms: u64) -> Option<PathBuf> {
        changed_since(self.spec, &self.volumes, moment_ms)
    }
}

/// When files changed that a proc begins with and that no image fixes: seconds and nanoseconds of
/// the clock, and a size; null of what is not there.
fn stamps(spec: &Spec, named: &Path) -> Vec<(PathBuf, Value)> {
    let mut stamps = Vec::new();
    for volume in &spec.volumes {
        let path = match &volume.source {
            VolumeSource::Named(name) => named.join(name.as_str()),
            VolumeSource::Host(path) => path.clone(),
            VolumeSource::Secrets => continue,
        };
        let path = fs::canonicalize(&path).unwrap_or(path);
        let stamp = newest_below(&path);
        stamps.push((path, stamp));
    }
    if matches!(spec.image, Image::Oci(_)) {
        return stamps;
    }
    let path = spec.env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
    let program = Path::new(spec.command.first().map_or("", String::as_str));
    let mut candidates = std::env::split_paths(path).map(|directory| directory.join(program));
    let program = if program.is_absolute() { Some(program.to_owned()) } else { candidates.find(|path| path.is_file()) };
    let of_languages =
        OF_LANGUAGES.iter().flat_map(|directory| fs::read_dir(directory).into_iter().flatten().flatten());
    let packages = of_languages.flat_map(|of| ["dist-packages", "site-packages"].map(|name| of.path().join(name)));
    let mut packages: Vec<PathBuf> = packages.filter(|path| path.is_dir()).collect();
    packages.sort();
    let places = OF_PACKAGES.iter().map(PathBuf::from).chain(packages).chain(program);
    stamps.extend(places.map(|place| {
        let stamp = fs::metadata(&place).map_or(Value::Null, |known| stamp_of(&known));
        (place, stamp)
    }));
    stamps
}

/// Not by the time of its inode, which another name for it changes, as those that Kip gives. A file
/// that is replaced by an older one changes the time of its directory.
fn stamp_of(known: &fs::Metadata) -> Value {
    json!([known.mtime(), known.mtime_nsec(), if known.is_dir() { 0 } else { known.size() }])
}

/// The newest of a file or directory and what lies below, and how many there are.
fn newest_below(path: &Path) -> Value {
    let (mut left, mut newest, mut count) = (vec![path.to_owned()], (0, 0), 0_usize);
    while let Some(path) = left.pop() {
        let Ok(known) = fs::symlink_metadata(&path) else { continue };
        newest = newest.max((known.mtime(), known.mtime_nsec()));
        count += 1;
        if count > MOST_LOOKED_AT {
            break;
        }
        if known.is_dir() {
            let mut below: Vec<PathBuf> =
                fs::read_dir(&path).into_iter().flatten().flatten().map(|e| e.path()).collect();
            below.sort();
            left.extend(below);
        }
    }
    json!([newest.0, newest.1, count])
}

/// What has changed of that since a moment, milliseconds since the epoch.
fn changed_since(spec: &Spec, named: &Path, moment_ms: u64) -> Option<PathBuf> {
    let changed = |(path, stamp): (PathBuf, Value)| {
        let part = |n: usize| stamp.get(n).and_then(Value::as_u64).unwrap_or(0);
        (part(0) * 1000 + part(1) / 1_000_000 > moment_ms).then_some(path)
    };
    stamps(spec, named).into_iter().find_map(changed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_types::life::Templating;

    fn spec() -> Spec {
        let json = json!({"name": "web", "command": ["/bin/sh", "-c", "true"], "ports": [{"proto": "tcp", "port": 80, "host_port": 8080}]});
        serde_json::from_value(json).unwrap()
    }

    fn id_of(spec: &Spec, base: &str, secrets: &BTreeMap<String, Hex>) -> TemplateId {
        Kind { spec, base: Path::new(base), volumes: "/data".into(), secrets }.id()
    }

    #[test]
    fn a_kind_is_what_determines_memory_and_files() {
        let none = BTreeMap::new();
        let id = |spec: &Spec| id_of(spec, "/a/base", &none);
        let usual = id(&spec());
        let mut same = Spec { template: Some(Templating::default()), hostname: Some("h".into()), ..spec() };
        same.name = "other".parse().unwrap();
        same.ports[0].host_port = None;
        same.labels.insert("a".into(), "b".into());
        assert_eq!(id(&same), usual);
        let mut differing = vec![spec(), spec(), spec(), spec(), spec(), spec()];
        differing[0].command.push("x".into());
        differing[1].env.insert("A".into(), "b".into());
        differing[2].limits.memory_bytes = Some(1 << 30);
        differing[3].ports[0].port = 81;
        differing[4].hooks.before_sleep = Some("true".into());
        differing[5].template = Some(Templating { after: Some("true".into()) });
        for other in &differing {
            assert_ne!(id(other), usual);
        }
        assert_ne!(id_of(&spec(), "/a/other", &none), usual);
        let secrets = |contents: &str| BTreeMap::from([("key".to_owned(), Hex(contents.into()))]);
        let with = |contents| id_of(&spec(), "/a/base", &secrets(contents));
        assert!(with("1") != usual && with("1") != with("2") && with("1") == with("1"));
        // Where the data directory is another, and its secrets are not known.
        let of = |secrets| Kind { spec: &same, base: Path::new("/b/base"), volumes: "/other".into(), secrets };
        assert_eq!(of(&none).id_for(&of(&secrets("1")).asked()), with("1"));
    }

    #[test]
    fn files_of_a_volume_count_wherever_they_lie() {
        let dir = tempfile::tempdir().unwrap();
        let below = dir.path().join("a/b");
        fs::create_dir_all(&below).unwrap();
        fs::write(below.join("main.py"), "one").unwrap();
        let mut spec = spec();
        let source = VolumeSource::Host(dir.path().to_owned());
        spec.volumes.push(kip_types::VolumeSpec { source, target: "/app".into(), read_only: true });
        let id = || id_of(&spec, "/a/base", &BTreeMap::new());
        let before = id();
        assert_eq!(id(), before);
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as u64;
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert_eq!(changed_since(&spec, Path::new("/data"), now), None);
        fs::write(below.join("main.py"), "two").unwrap();
        assert_ne!(id(), before);
        assert_eq!(
            changed_since(&spec, Path::new("/data"), now).as_deref(),
            Some(&*dir.path().canonicalize().unwrap())
        );
    }

    #[test]
    fn what_is_a_procs_own_is_a_field_of_its_spec() {
        let full = schemars::schema_for!(Spec);
        let fields = full.get("properties").and_then(Value::as_object).unwrap();
        for own in OWN {
            assert!(fields.contains_key(own), "{own}");
        }
    }
}
