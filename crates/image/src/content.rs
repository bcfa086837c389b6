//! What manifests, indexes and configurations say: the parts of them that matter here, of OCI's
//! kind and of Docker's.

use crate::digest::Digest;
use crate::error::ImageError;
use kip_types::image::ImageConfig;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Most bytes of a manifest, index or configuration.
pub(crate) const MOST_JSON: u64 = 8 << 20;
/// Most layers. Builders stop at 127.
const MOST_LAYERS: usize = 128;
/// What runs here.
const PLATFORM: (&str, &str) = ("linux", "amd64");
/// Where a layout has the tag of an image.
const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// Where others have its whole name.
const IMAGE_NAME: &str = "io.containerd.image.name";

/// Leads to content.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    #[serde(default)]
    pub(crate) media_type: String,
    pub(crate) digest: Digest,
    pub(crate) size: u64,
    #[serde(default)]
    platform: Option<Platform>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Deserialize)]
struct Platform {
    os: String,
    architecture: String,
    #[serde(default)]
    variant: Option<String>,
}

/// A manifest or an index: which of the two is seen by what it has.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    #[serde(default)]
    schema_version: u32,
    #[serde(default)]
    manifests: Option<Vec<Descriptor>>,
    #[serde(default)]
    config: Option<Descriptor>,
    #[serde(default)]
    layers: Vec<Descriptor>,
}

/// What a reference leads to.
#[derive(Debug)]
pub(crate) enum Top {
    Index(Vec<Descriptor>),
    Manifest { config: Descriptor, layers: Vec<Descriptor> },
}

fn no_image(reference: &str, why: impl Into<String>) -> ImageError {
    ImageError::NoImage { reference: reference.to_owned(), why: why.into() }
}

/// Reads a manifest or an index.
pub(crate) fn read_top(reference: &str, bytes: &[u8]) -> Result<Top, ImageError> {
    let document: Document =
        serde_json::from_slice(bytes).map_err(|e| no_image(reference, format!("its manifest cannot be read: {e}")))?;
    if document.schema_version != 2 {
        return Err(no_image(reference, format!("its manifest is of version {}", document.schema_version)));
    }
    if let Some(manifests) = document.manifests {
        return Ok(Top::Index(manifests));
    }
    let config = document.config.ok_or_else(|| no_image(reference, "its manifest has no configuration"))?;
    if !matches!(
        config.media_type.as_str(),
        "" | "application/vnd.oci.image.config.v1+json" | "application/vnd.docker.container.image.v1+json"
    ) {
        return Err(no_image(reference, format!("its configuration is {}", config.media_type)));
    }
    for layer in &document.layers {
        let kind = layer.media_type.as_str();
        let known = kind.starts_with("application/vnd.oci.image.layer.") || kind.starts_with("application/vnd.docker.");
        let form = kind.rsplit_once('+').map_or("", |(_, form)| form);
        if !known || !matches!(form, "" | "gzip" | "zstd") {
            return Err(no_image(reference, format!("it has a layer of type {kind:?}")));
        }
    }
    Ok(Top::Manifest { config, layers: document.layers })
}

/// The one of an index that runs here.
pub(crate) fn choose<'a>(reference: &str, manifests: &'a [Descriptor]) -> Result<&'a Descriptor, ImageError> {
    let fits =
        |d: &&Descriptor| d.platform.as_ref().is_some_and(|p| (p.os.as_str(), p.architecture.as_str()) == PLATFORM);
    // Some builders leave it out where there is no choice; the configuration is looked at, too.
    let alone = || if manifests.len() == 1 { manifests.first().filter(|d| d.platform.is_none()) } else { None };
    manifests.iter().find(fits).or_else(alone).ok_or_else(|| {
        let named = |p: &Platform| match &p.variant {
            Some(variant) => format!("{}/{}/{variant}", p.os, p.architecture),
            None => format!("{}/{}", p.os, p.architecture),
        };
        // What is no image says "unknown".
        let has: Vec<String> =
            manifests.iter().filter_map(|d| d.platform.as_ref()).filter(|p| p.os != "unknown").map(named).collect();
        let has = if has.is_empty() { "none that says for what it is".to_owned() } else { has.join(", ") };
        ImageError::Platform { reference: reference.to_owned(), has }
    })
}

impl Descriptor {
    /// What an index calls it: its whole name, its tag.
    pub(crate) fn names(&self) -> (Option<&str>, Option<&str>) {
        let get = |key: &str| self.annotations.get(key).map(String::as_str);
        (get(IMAGE_NAME), get(REF_NAME))
    }
}

/// An image's configuration.
#[derive(Debug, Clone, Deserialize)]
pub struct OciConfig {
    #[serde(default)]
    os: String,
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    config: Option<Run>,
    rootfs: RootFs,
}

#[derive(Debug, Clone, Deserialize)]
struct RootFs {
    #[serde(default)]
    diff_ids: Vec<Digest>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct Run {
    user: Option<String>,
    exposed_ports: Option<BTreeMap<String, serde_json::Value>>,
    env: Option<Vec<String>>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    volumes: Option<BTreeMap<String, serde_json::Value>>,
    working_dir: Option<String>,
    stop_signal: Option<String>,
}

impl OciConfig {
    /// Reads one.
    pub(crate) fn read(reference: &str, bytes: &[u8]) -> Result<OciConfig, ImageError> {
        let config: OciConfig = serde_json::from_slice(bytes)
            .map_err(|e| no_image(reference, format!("its configuration cannot be read: {e}")))?;
        let other = |is: &str, wanted: &str| !is.is_empty() && is != wanted;
        if other(&config.os, PLATFORM.0) || other(&config.architecture, PLATFORM.1) {
            let has = format!("{}/{}", config.os, config.architecture);
            return Err(ImageError::Platform { reference: reference.to_owned(), has });
        }
        match config.rootfs.diff_ids.len() {
            0 => Err(no_image(reference, "it has no layers")),
            n if n > MOST_LAYERS => {
                Err(no_image(reference, format!("it has {n} layers; at most {MOST_LAYERS} can be")))
            }
            _ => Ok(config),
        }
    }

    /// Its layers by the digest of what they are unpacked from, lowest first.
    pub(crate) fn layers(&self) -> &[Digest] {
        &self.rootfs.diff_ids
    }

    /// How its program is run.
    pub fn run(&self) -> ImageConfig {
        let run = self.config.clone().unwrap_or_default();
        let keys = |map: Option<BTreeMap<String, serde_json::Value>>| map.unwrap_or_default().into_keys().collect();
        ImageConfig {
            entrypoint: run.entrypoint.unwrap_or_default(),
            cmd: run.cmd.unwrap_or_default(),
            env: run.env.unwrap_or_default(),
            user: run.user.unwrap_or_default(),
            workdir: run.working_dir.unwrap_or_default(),
            exposed_ports: keys(run.exposed_ports),
            stop_signal: run.stop_signal.unwrap_or_default(),
            volumes: keys(run.volumes),
        }
    }
}

/// The packed bytes of a layer.
#[derive(Debug, Clone)]
pub(crate) enum Blob {
    /// By their digest.
    Named(Descriptor),
    /// A file of an archive.
    File(PathBuf),
}

/// What a source says of the image that is meant.
#[derive(Debug)]
pub(crate) struct ResolvedImage {
    /// What it is called there, complete.
    pub(crate) name: Option<String>,
    /// The manifest or index that it begins with.
    pub(crate) top: Option<Vec<u8>>,
    pub(crate) config: Vec<u8>,
    /// Lowest first.
    pub(crate) layers: Vec<Blob>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEX: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn manifest(config: &str, layer: &str) -> String {
        format!(
            r#"{{"schemaVersion":2,"config":{{"mediaType":"{config}","digest":"sha256:{HEX}","size":1}},
            "layers":[{{"mediaType":"{layer}","digest":"sha256:{HEX}","size":1}}]}}"#
        )
    }

    #[test]
    fn only_images_of_programs_are_taken() {
        let oci = "application/vnd.oci.image.config.v1+json";
        for layer in [
            "application/vnd.oci.image.layer.v1.tar+zstd",
            "application/vnd.docker.image.rootfs.diff.tar.gzip",
            "application/vnd.oci.image.layer.nondistributable.v1.tar",
        ] {
            assert!(matches!(read_top("x", manifest(oci, layer).as_bytes()), Ok(Top::Manifest { .. })), "{layer}");
        }
        for (config, layer) in [
            ("application/vnd.cncf.helm.config.v1+json", "application/vnd.oci.image.layer.v1.tar"),
            (oci, "application/vnd.oci.image.layer.v1.tar+gzip+encrypted"),
            (oci, "application/vnd.wasm.content.layer.v1+wasm"),
        ] {
            let error = read_top("x", manifest(config, layer).as_bytes()).unwrap_err();
            assert!(matches!(error, ImageError::NoImage { .. }), "{error}");
        }
        assert!(read_top("x", br#"{"schemaVersion":1}"#).unwrap_err().to_string().contains("version 1"));
        assert!(read_top("x", b"<html>").is_err());
    }

    #[test]
    fn an_index_gives_what_runs_here() {
        let entry = |os: &str, arch: &str, n: usize| {
            let hex = format!("{n:064}");
            format!(r#"{{"digest":"sha256:{hex}","size":1,"platform":{{"os":"{os}","architecture":"{arch}"}}}}"#)
        };
        let index = |entries: &[String]| match read_top(
            "x",
            format!(r#"{{"schemaVersion":2,"manifests":[{}]}}"#, entries.join(",")).as_bytes(),
        ) {
            Ok(Top::Index(entries)) => entries,
            other => panic!("{other:?}"),
        };
        let several = index(&[entry("linux", "arm64", 1), entry("linux", "amd64", 2), entry("unknown", "unknown", 3)]);
        assert!(choose("x", &several).unwrap().digest.hex().ends_with('2'));
        let others = index(&[entry("linux", "arm64", 1), entry("windows", "amd64", 2), entry("unknown", "unknown", 3)]);
        let error = choose("x", &others).unwrap_err().to_string();
        assert_eq!(error, "x has nothing for linux/amd64; it has linux/arm64, windows/amd64");
    }

    #[test]
    fn configurations_say_how_to_run() {
        let text = format!(
            r#"{{"os":"linux","architecture":"amd64","rootfs":{{"type":"layers","diff_ids":["sha256:{HEX}"]}},
            "config":{{"User":"web:www","Env":["A=b"],"Entrypoint":["/x"],"Cmd":null,"WorkingDir":"/srv",
            "ExposedPorts":{{"80/tcp":{{}}}},"Volumes":{{"/data":{{}}}},"StopSignal":"SIGQUIT"}}}}"#
        );
        let run = OciConfig::read("x", text.as_bytes()).unwrap().run();
        assert_eq!((run.user.as_str(), run.workdir.as_str(), run.stop_signal.as_str()), ("web:www", "/srv", "SIGQUIT"));
        assert_eq!((run.entrypoint, run.cmd), (vec!["/x".to_owned()], vec![]));
        assert_eq!((run.exposed_ports, run.volumes), (vec!["80/tcp".to_owned()], vec!["/data".to_owned()]));
        let arm = text.replace("amd64", "arm64");
        assert!(matches!(OciConfig::read("x", arm.as_bytes()), Err(ImageError::Platform { .. })));
    }
}
