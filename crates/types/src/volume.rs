//! Volumes: files of the machine that a proc has at a place of its own. They are none of its own
//! files: no snapshot has them, nothing of them is archived, and so they pin the proc to where they
//! are.

use crate::name::ProcName;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

/// Most volumes of a proc: each is a descriptor in the messages by which sandboxes are made.
pub const MOST_VOLUMES: usize = 32;
/// Longest name of a volume, bytes.
pub const LONGEST_VOLUME_NAME: usize = 128;
/// Places inside where nothing may lie: what the sandbox itself mounts or starts from. Nor below
/// the first ones.
const CLOSED: [&str; 4] = ["/proc", "/sys", "/dev", "/.kip"];
const TAKEN: [&str; 2] = ["/", "/usr"];

/// The name of a volume that Kip keeps, unique within its data directory: a file name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[schemars(extend("pattern" = "^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"))]
pub struct VolumeName(String);

/// What no volume can be called.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "volume name {0:?} is not valid: use 1 to {LONGEST_VOLUME_NAME} of A-Z, a-z, 0-9, '-', '_' and '.', starting with a letter or digit"
)]
pub struct BadVolumeName(String);

impl VolumeName {
    /// The name's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for VolumeName {
    type Error = BadVolumeName;
    fn try_from(name: String) -> Result<Self, BadVolumeName> {
        let is_good = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
        let starts = name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
        if starts && name.len() <= LONGEST_VOLUME_NAME && name.bytes().all(is_good) {
            Ok(VolumeName(name))
        } else {
            Err(BadVolumeName(name))
        }
    }
}

impl FromStr for VolumeName {
    type Err = BadVolumeName;
    fn from_str(s: &str) -> Result<Self, BadVolumeName> {
        s.to_owned().try_into()
    }
}

impl From<VolumeName> for String {
    fn from(name: VolumeName) -> String {
        name.0
    }
}

impl fmt::Display for VolumeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Where a volume's files are.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VolumeSource {
    /// Kept by Kip in its data directory, made when the first proc asks for it.
    Named(VolumeName),
    /// A file or directory of the host: absolute, and without symbolic links once the proc exists.
    Host(PathBuf),
    /// The proc's secrets, in memory: Kip's own to say, no request's.
    Secrets,
}

impl fmt::Display for VolumeSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VolumeSource::Named(name) => name.fmt(f),
            VolumeSource::Host(path) => path.display().fmt(f),
            VolumeSource::Secrets => f.write_str("secrets"),
        }
    }
}

/// One volume of a proc, `SRC:DST[:ro|:rw]`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeSpec {
    /// Where its files are.
    pub source: VolumeSource,
    /// Where the proc has them: absolute, without `.`, `..` and doubled slashes.
    pub target: String,
    /// The proc cannot change them.
    #[serde(default)]
    pub read_only: bool,
}

/// A volume that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadVolume {
    /// Not of that form.
    #[error(
        "volume {0:?} is not valid: write SRC:DST[:ro], SRC an absolute path on the host or a name, DST an absolute path inside"
    )]
    Form(String),
    /// The name.
    #[error(transparent)]
    Name(#[from] BadVolumeName),
    /// The path on the host.
    #[error("the path {0:?} on the host is not absolute")]
    Source(PathBuf),
    /// What only Kip makes.
    #[error("a volume cannot be the secrets of a proc: ask for these by their names")]
    Secrets,
    /// The place inside.
    #[error(
        "a volume cannot be at {0:?}: write an absolute path without '..', ':', '[', ']', backslashes and white space"
    )]
    Target(String),
    /// The place inside is needed for something else.
    #[error("a volume cannot be at {0}: that is the sandbox's own")]
    Closed(String),
    /// Two at one place.
    #[error("two volumes are at {0}")]
    Twice(String),
    /// There are too many.
    #[error("{0} volumes are too many: at most {MOST_VOLUMES} are possible")]
    Many(usize),
}

/// The usual form of an absolute path inside, which may come with doubled and trailing slashes.
fn usual(target: &str) -> Option<String> {
    let is_bad = |c: char| c.is_whitespace() || c.is_control() || matches!(c, ':' | '[' | ']' | '\\');
    if !target.starts_with('/') || target.contains(is_bad) {
        return None;
    }
    let mut path = String::new();
    for part in Path::new(target).components() {
        match part {
            Component::RootDir => {}
            Component::Normal(name) => {
                path.push('/');
                path.push_str(name.to_str()?);
            }
            _ => return None,
        }
    }
    Some(if path.is_empty() { "/".to_owned() } else { path })
}

impl FromStr for VolumeSpec {
    type Err = BadVolume;
    fn from_str(s: &str) -> Result<Self, BadVolume> {
        let bad = || BadVolume::Form(s.to_owned());
        let parts: Vec<&str> = s.split(':').collect();
        let (source, target, read_only) = match parts[..] {
            [source, target] | [source, target, "rw"] => (source, target, false),
            [source, target, "ro"] => (source, target, true),
            _ => return Err(bad()),
        };
        let source = match source {
            "" => return Err(bad()),
            path if path.starts_with('/') => VolumeSource::Host(path.into()),
            // `./data` is meant as a path, which only the caller's shell can make absolute.
            path if path.contains('/') => return Err(bad()),
            name => VolumeSource::Named(name.parse()?),
        };
        let target = usual(target).ok_or_else(|| BadVolume::Target(target.to_owned()))?;
        Ok(VolumeSpec { source, target, read_only })
    }
}

impl fmt::Display for VolumeSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}{}", self.source, self.target, if self.read_only { ":ro" } else { "" })
    }
}

impl VolumeSpec {
    fn check(&self) -> Result<(), BadVolume> {
        if let VolumeSource::Host(path) = &self.source
            && !path.is_absolute()
        {
            return Err(BadVolume::Source(path.clone()));
        }
        if self.source == VolumeSource::Secrets {
            return Err(BadVolume::Secrets);
        }
        let target = self.target.as_str();
        if usual(target).as_deref() != Some(target) {
            return Err(BadVolume::Target(target.to_owned()));
        }
        if self.is_closed() { Err(BadVolume::Closed(target.to_owned())) } else { Ok(()) }
    }

    /// Whether it would lie where the sandbox has something of its own.
    pub(crate) fn is_closed(&self) -> bool {
        let target = self.target.as_str();
        let below = |top: &&str| target.strip_prefix(*top).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        CLOSED.iter().any(below) || TAKEN.contains(&target)
    }
}

/// Whether a proc can have these.
///
/// # Errors
/// The first that cannot be.
pub fn check_volumes(volumes: &[VolumeSpec]) -> Result<(), BadVolume> {
    if volumes.len() > MOST_VOLUMES {
        return Err(BadVolume::Many(volumes.len()));
    }
    let mut targets = BTreeSet::new();
    for volume in volumes {
        volume.check()?;
        if !targets.insert(volume.target.as_str()) {
            return Err(BadVolume::Twice(volume.target.clone()));
        }
    }
    Ok(())
}

/// A named volume, `GET /v1/volumes`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct VolumeView {
    /// Its name.
    pub name: VolumeName,
    /// Where it is on the host.
    pub path: PathBuf,
    /// What its files take on the disk, bytes.
    pub bytes: u64,
    /// Procs that have it.
    pub users: Vec<ProcName>,
}

/// What clones have in place of the volumes that their source can write to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClonedVolumes {
    /// The same volumes: source and clones write to the same files.
    Share,
    /// Named volumes of their own, with the files of the moment. Not of a directory of the host.
    Copy,
    /// Empty named volumes of their own. Not where the source has a file open in one.
    Drop,
}

impl FromStr for ClonedVolumes {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "share" => Ok(ClonedVolumes::Share),
            "copy" => Ok(ClonedVolumes::Copy),
            "drop" => Ok(ClonedVolumes::Drop),
            _ => Err("write share, copy or drop".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(text: &str) -> VolumeSpec {
        text.parse().unwrap()
    }

    #[test]
    fn reads_volumes() {
        let VolumeSpec { source, target, read_only } = volume("/srv/data:/var//lib/data/:ro");
        assert_eq!(
            (source, target.as_str(), read_only),
            (VolumeSource::Host("/srv/data".into()), "/var/lib/data", true)
        );
        let named = volume("db_data.1:/data");
        assert_eq!((named.source.to_string().as_str(), named.read_only), ("db_data.1", false));
        assert_eq!(volume("a:/b:rw"), volume("a:/b"));
        for bad in [
            "",
            "/data",
            "a",
            ":/b",
            "a:",
            "a:b",
            "a:/b:rx",
            "a:/b/../c",
            "./a:/b",
            "a/b:/c",
            "-a:/b",
            "a:/b c",
            "a:/b[1]",
        ] {
            assert!(bad.parse::<VolumeSpec>().is_err(), "{bad}");
        }
        let json = serde_json::to_string(&volume("a:/b:ro")).unwrap();
        assert_eq!(json, r#"{"source":{"named":"a"},"target":"/b","read_only":true}"#);
        assert_eq!(serde_json::from_str::<VolumeSpec>(&json).unwrap(), volume("a:/b:ro"));
    }

    #[test]
    fn what_is_the_sandboxs_own_cannot_be_covered() {
        for bad in ["/", "/usr", "/proc", "/proc/1", "/sys/fs", "/dev", "/dev/shm", "/.kip/init"] {
            let refused = check_volumes(&[volume(&format!("a:{bad}"))]);
            assert_eq!(refused, Err(BadVolume::Closed(bad.to_owned())), "{bad}");
        }
        for good in ["/procs", "/usr/share/x", "/devices", "/home"] {
            assert_eq!(check_volumes(&[volume(&format!("a:{good}"))]), Ok(()), "{good}");
        }
        assert_eq!(check_volumes(&[volume("a:/x"), volume("b:/x/")]), Err(BadVolume::Twice("/x".into())));
        let by_hand = VolumeSpec { target: "/a/../proc".into(), ..volume("a:/x") };
        assert!(matches!(check_volumes(&[by_hand]), Err(BadVolume::Target(_))));
        let relative = VolumeSpec { source: VolumeSource::Host("a/b".into()), ..volume("a:/x") };
        assert!(matches!(check_volumes(&[relative]), Err(BadVolume::Source(_))));
        let many: Vec<_> = (0..=MOST_VOLUMES).map(|n| volume(&format!("a:/{n}"))).collect();
        assert_eq!(check_volumes(&many), Err(BadVolume::Many(33)));
    }
}
