//! Images of programs: where they come from, what they say about running them, and the messages of
//! `kip image`.

use crate::keys::Hidden;
use crate::name::ProcName;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Where an image comes from.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImageSource {
    /// A registry: `[docker://][HOST[:PORT]/]NAME[:TAG][@DIGEST]`.
    Registry(String),
    /// `oci:PATH[:TAG]`: an OCI image layout, a directory or a tar of one.
    Oci(ImageFile),
    /// `docker-archive:FILE[:NAME]`: what `docker save` writes.
    DockerArchive(ImageFile),
}

/// Images in files of the daemon's machine.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ImageFile {
    /// Absolute when it reaches the daemon.
    pub path: PathBuf,
    /// Which of its images, if there are several.
    pub tag: Option<String>,
}

/// A source could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} names no image: write [HOST[:PORT]/]NAME[:TAG] for a registry, oci:PATH[:TAG] for a layout, docker-archive:FILE for what `docker save` wrote"
)]
pub struct BadSource(String);

impl FromStr for ImageSource {
    type Err = BadSource;

    fn from_str(text: &str) -> Result<Self, BadSource> {
        let local = |rest: &str| {
            // A colon before the last slash is the path's own.
            let from = rest.rfind('/').map_or(0, |slash| slash + 1);
            let (path, tag) = match rest[from..].split_once(':') {
                Some((name, tag)) => (&rest[..from + name.len()], Some(tag.to_owned()).filter(|t| !t.is_empty())),
                None => (rest, None),
            };
            let file = ImageFile { path: PathBuf::from(path), tag };
            if path.is_empty() { Err(BadSource(text.to_owned())) } else { Ok(file) }
        };
        if let Some(rest) = text.strip_prefix("oci:") {
            return local(rest).map(ImageSource::Oci);
        }
        if let Some(rest) = text.strip_prefix("docker-archive:") {
            return local(rest).map(ImageSource::DockerArchive);
        }
        let name = text.strip_prefix("docker://").unwrap_or(text);
        if name.is_empty() || name.contains(char::is_whitespace) || name.starts_with(['-', '/', '.']) {
            return Err(BadSource(text.to_owned()));
        }
        Ok(ImageSource::Registry(name.to_owned()))
    }
}

impl ImageSource {
    /// The same with an absolute path: the process that reads it may have another working
    /// directory.
    pub fn absolute(self, absolute: impl FnOnce(PathBuf) -> std::io::Result<PathBuf>) -> std::io::Result<ImageSource> {
        let file = |file: ImageFile| Ok(ImageFile { path: absolute(file.path)?, tag: file.tag });
        match self {
            ImageSource::Oci(path) => file(path).map(ImageSource::Oci),
            ImageSource::DockerArchive(path) => file(path).map(ImageSource::DockerArchive),
            registry @ ImageSource::Registry(_) => Ok(registry),
        }
    }

    /// Host and port of the registry; none for others.
    pub fn registry(&self) -> Option<&str> {
        let ImageSource::Registry(name) = self else { return None };
        match name.split_once('/') {
            Some((host, _)) if host.contains(['.', ':']) || host == "localhost" => Some(host),
            _ => Some("docker.io"),
        }
    }
}

impl fmt::Display for ImageSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, ImageFile { path, tag }) = match self {
            ImageSource::Registry(name) => return f.write_str(name),
            ImageSource::Oci(file) => ("oci", file),
            ImageSource::DockerArchive(file) => ("docker-archive", file),
        };
        write!(f, "{kind}:{}", path.display())?;
        tag.iter().try_for_each(|tag| write!(f, ":{tag}"))
    }
}

/// When an image is pulled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pull {
    /// If it is not here.
    #[default]
    Missing,
    /// Each time that the proc is made.
    Always,
    /// Not at all.
    Never,
}

/// The image of a proc.
#[derive(Debug, Clone, PartialEq, Eq, Default, JsonSchema, Serialize, Deserialize)]
pub struct OciImage {
    /// What its owner called it.
    pub reference: String,
    /// The program of the image is another: what comes before the command. Empty, and there is
    /// none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entrypoint: Option<Vec<String>>,
    /// Publish every port that the image exposes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub publish_all: bool,
    /// Digest of its manifest, or of its configuration where it had none. Found by the worker.
    #[serde(default)]
    pub digest: String,
    /// Its layers by the digest of what they are unpacked from, lowest first. Found by the worker.
    #[serde(default)]
    pub layers: Vec<String>,
    /// Directories that it wants for data, each made at a start where it is not there. Found by the
    /// worker.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<String>,
}

/// What an image says about running its program.
#[derive(Debug, Clone, PartialEq, Eq, Default, JsonSchema, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageConfig {
    /// The program, with its first arguments.
    pub entrypoint: Vec<String>,
    /// Arguments that `kip run` replaces.
    pub cmd: Vec<String>,
    /// `NAME=VALUE` each.
    pub env: Vec<String>,
    /// `USER[:GROUP]`, names or numbers; empty for root.
    pub user: String,
    /// Working directory; empty for `/`.
    pub workdir: String,
    /// `PORT/tcp` or `PORT/udp` each.
    pub exposed_ports: Vec<String>,
    /// Name or number; empty for SIGTERM.
    pub stop_signal: String,
    /// Directories meant for data. They are made where they are not there, and are ordinary
    /// directories of the proc's own.
    pub volumes: Vec<String>,
}

/// An image that is here: an element of `GET /v1/images`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ImageView {
    /// By what it is called.
    pub reference: String,
    /// Digest of its manifest, or of its configuration where it had none.
    pub digest: String,
    /// Digest of its configuration.
    pub id: String,
    /// Its layers by the digest of what they are unpacked from, lowest first.
    pub layers: Vec<String>,
    /// What they take unpacked, bytes; other images may share some.
    pub bytes: u64,
    /// When it came, milliseconds since the epoch.
    pub at_ms: u64,
    /// Where it came from.
    pub source: String,
    /// Procs that have one of its layers below their files, sorted.
    pub procs: Vec<ProcName>,
}

/// One of an image's layers.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct LayerView {
    /// Digest of what it is unpacked from.
    pub digest: String,
    /// Contents of its files, bytes; null where it is not here.
    pub bytes: Option<u64>,
    /// What of it was left out, a line each.
    pub left_out: Vec<String>,
}

/// `GET /v1/images/inspect?reference=REF`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ImageDetails {
    /// What `kip image ls` says.
    #[serde(flatten)]
    pub view: ImageView,
    /// How its program is run.
    pub config: ImageConfig,
    /// Its layers, lowest first.
    pub layer_views: Vec<LayerView>,
}

/// Which image, as a query.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageRequest {
    /// What it is called, or its id or digest, or the beginning of one.
    pub reference: String,
}

/// The login for a registry.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegistryLogin {
    /// User name.
    pub user: String,
    /// Password or token.
    pub password: Hidden,
}

/// `POST /v1/images/pull`; answered with one `PullProgress` per line.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PullRequest {
    /// From where.
    pub source: ImageSource,
    /// By what it is called here; none for its own name.
    #[serde(default)]
    pub name: Option<String>,
    /// Anonymous without it.
    #[serde(default)]
    pub login: Option<RegistryLogin>,
    /// Without TLS, which is what registries on this machine are asked anyway, unless `ca_pem` says
    /// how to know them.
    #[serde(default)]
    pub plain_http: bool,
    /// Certificates, PEM, of authorities that may vouch for the registry, beside those that the
    /// daemon's machine trusts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_pem: Option<String>,
}

/// How far a pull is.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "step")]
pub enum PullProgress {
    /// A layer is here already.
    Here {
        /// Digest of what it is unpacked from.
        layer: String,
    },
    /// Of a layer so much has come.
    Fetching {
        /// Digest of what it is unpacked from.
        layer: String,
        /// Bytes.
        done: u64,
        /// Of so many.
        of: u64,
    },
    /// All of it came.
    Unpacking {
        /// Digest of what it is unpacked from.
        layer: String,
    },
    /// It is unpacked.
    Done {
        /// Digest of what it is unpacked from.
        layer: String,
    },
    /// The image is here. Nothing follows.
    End {
        /// It.
        image: Box<ImageView>,
    },
}

/// What `DELETE /v1/images?reference=REF` and `POST /v1/images/collect` answer.
#[derive(Debug, Clone, PartialEq, Eq, Default, JsonSchema, Serialize, Deserialize)]
pub struct ImagesRemoved {
    /// Names that lead nowhere any more.
    pub references: Vec<String>,
    /// Layers that are gone, by digest.
    pub layers: Vec<String>,
    /// What that freed, bytes.
    pub bytes: u64,
    /// Procs that keep layers which nothing else needs, sorted.
    pub kept_for: Vec<ProcName>,
}

/// `POST /v1/images/collect`.
#[derive(Debug, Clone, PartialEq, Eq, Default, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ImagesCollectRequest {
    /// Images that no proc uses go, too.
    pub all: bool,
    /// Only say what would be done.
    pub dry_run: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_read_and_written() {
        let read = |text: &str| text.parse::<ImageSource>().unwrap();
        assert_eq!(
            read("oci:/a:b/c:tag"),
            ImageSource::Oci(ImageFile { path: "/a:b/c".into(), tag: Some("tag".into()) })
        );
        assert_eq!(read("oci:c"), ImageSource::Oci(ImageFile { path: "c".into(), tag: None }));
        let saved = ImageSource::DockerArchive(ImageFile { path: "x.tar".into(), tag: Some("web:1".into()) });
        assert_eq!(read("docker-archive:x.tar:web:1"), saved);
        assert_eq!(read("docker://redis:7"), ImageSource::Registry("redis:7".into()));
        for text in ["oci:/a/c:tag", "docker-archive:/x.tar", "localhost:5000/a/b@sha256:00"] {
            assert_eq!(read(text).to_string(), text);
        }
        for bad in ["", "oci:", "a b", "/etc", "./x", "--all"] {
            assert!(bad.parse::<ImageSource>().is_err(), "{bad}");
        }
    }

    #[test]
    fn registries_are_told_from_names() {
        let registry = |text: &str| text.parse::<ImageSource>().unwrap().registry().map(str::to_owned);
        for (text, host) in [
            ("redis", "docker.io"),
            ("library/redis:7", "docker.io"),
            ("quay.io/a/b", "quay.io"),
            ("localhost/a", "localhost"),
            ("127.0.0.1:5000/a:1", "127.0.0.1:5000"),
        ] {
            assert_eq!(registry(text).as_deref(), Some(host), "{text}");
        }
        assert_eq!(registry("oci:/x"), None);
    }
}
