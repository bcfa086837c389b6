//! Images for procs: what an image says about running its program is put into a spec, and which
//! procs keep which layers.
//!
//! A proc's spec names its image's layers by digest, so the proc keeps them from the moment it is
//! recorded until it is removed, in whatever tier it is. Between looking for an image and the
//! record, [`InUse`] keeps them.

use crate::rehearse;
use crate::worker::Worker;
use async_trait::async_trait;
use kip_engine::blocking::blocking;
use kip_engine::host::proc::layers_of;
use kip_image::{Digest, ImageError, ImageRecord, InUse, PullOrder};
use kip_service::{Feed, ImageService, feed};
use kip_types::api::{Code, EventKind, Refusal};
use kip_types::chain;
use kip_types::image::{
    ImageConfig, ImageDetails, ImageView, ImagesCollectRequest, ImagesRemoved, LayerView, OciImage, PullProgress,
    PullRequest,
};
use kip_types::spec::parse_signal;
use kip_types::{Image, PortSpec, ProcName, Protocol, Spec, WakeOn};
use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

fn refused(e: ImageError) -> Refusal {
    let code = match &e {
        ImageError::Unknown { .. } | ImageError::NotFound { .. } => Code::Unknown,
        ImageError::Source { source, .. } if source.kind() == ErrorKind::NotFound => Code::Unknown,
        ImageError::Reference { .. } | ImageError::NoImage { .. } | ImageError::Platform { .. } => Code::Invalid,
        // What was named is not what it should be.
        ImageError::Ambiguous { .. } | ImageError::Source { .. } => Code::Invalid,
        ImageError::Damaged { .. } | ImageError::Layer { .. } => Code::Invalid,
        ImageError::Unauthorized { .. } => Code::Forbidden,
        ImageError::Busy | ImageError::Missing { .. } => Code::State,
        // The registry does not answer now.
        ImageError::Registry { .. } => Code::Exhausted,
        ImageError::Io { source, .. } => match source.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::ReadOnlyFilesystem => Code::Exhausted,
            _ => Code::Failed,
        },
    };
    Refusal::new(code, chain(&e))
}

/// Puts what the image says where the spec says nothing.
fn fill(spec: &mut Spec, asked: &OciImage, config: ImageConfig) -> Result<(), Refusal> {
    let name = spec.name.clone();
    let invalid = |message: String| Refusal::new(Code::Invalid, format!("{name}: {message}"));
    // A request for another program does not mean the arguments of the image's own.
    let (mut command, usual) = match &asked.entrypoint {
        Some(other) => (other.clone(), Vec::new()),
        None => (config.entrypoint, config.cmd),
    };
    command.extend(if spec.command.is_empty() { usual } else { std::mem::take(&mut spec.command) });
    if command.first().is_none_or(String::is_empty) {
        return Err(invalid(format!("image {} names no program: write one after `--`", asked.reference)));
    }
    spec.command = command;
    for (key, value) in config.env.iter().filter_map(|line| line.split_once('=')).filter(|(key, _)| !key.is_empty()) {
        spec.env.entry(key.to_owned()).or_insert_with(|| value.to_owned());
    }
    if spec.workdir.is_none() && !config.workdir.is_empty() {
        spec.workdir = Some(PathBuf::from("/").join(&config.workdir));
    }
    if spec.user.is_none() && !config.user.is_empty() {
        spec.user = Some(config.user);
    }
    if spec.stop_signal.is_none() && !config.stop_signal.is_empty() {
        parse_signal(&config.stop_signal).map_err(|e| invalid(format!("its image's stop {e}")))?;
        spec.stop_signal = Some(config.stop_signal);
    }
    // Those of its network dial what the image exposes, published or not.
    let wanted = asked.publish_all || spec.network.is_some();
    for mut port in config.exposed_ports.iter().filter(|_| wanted).filter_map(|text| exposed(text)) {
        port.private = !asked.publish_all;
        if !spec.ports.iter().any(|p| (p.proto, p.port) == (port.proto, port.port)) {
            spec.ports.push(port);
        }
    }
    Ok(())
}

/// Directories that the image wants for data, as far as no volume is there.
///
/// They are the proc's own, not volumes: its own files outlive stops and starts, go with it to the
/// store and to other machines, and count against its disk. A volume would tie it to this machine
/// unasked; an owner who wants that names one.
fn directories(config: &ImageConfig, spec: &Spec) -> Vec<String> {
    let plain = |text: &String| {
        let path = PathBuf::from("/").join(text);
        let is_plain = path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        let path: PathBuf = path.components().collect();
        let closed =
            path == Path::new("/") || ["/proc", "/sys", "/dev", "/.kip"].iter().any(|top| path.starts_with(top));
        (is_plain && !closed).then(|| path.to_string_lossy().into_owned())
    };
    let is_covered = |path: &String| spec.volumes.iter().any(|volume| Path::new(path).starts_with(&volume.target));
    config.volumes.iter().filter_map(plain).filter(|path| !is_covered(path)).collect()
}

/// `80/tcp`, `53/udp` or `80`; none for protocols that are not forwarded.
fn exposed(text: &str) -> Option<PortSpec> {
    let (port, proto) = match text.split_once('/') {
        None | Some((_, "tcp")) => (text.split('/').next()?, Protocol::Tcp),
        Some((port, "udp")) => (port, Protocol::Udp),
        Some(_) => return None,
    };
    let port = port.parse().ok().filter(|port| *port != 0)?;
    Some(PortSpec { proto, port, host_port: None, host_addr: None, wake_on: WakeOn::Connect, private: false })
}

impl Worker {
    /// Completes a spec that names an image or a tarball. What it needs stays here as long as what
    /// is returned with it.
    pub(crate) async fn complete(&self, mut spec: Spec) -> Result<(Spec, Option<InUse>), Refusal> {
        let Image::Oci(asked) = spec.image.clone() else {
            return blocking(move || {
                spec.tar_digest = rehearse::tar_digest(&spec)?;
                Ok((spec, None))
            })
            .await;
        };
        let images = Arc::clone(&self.machine.images);
        let in_use = images.in_use().await;
        blocking(move || {
            let record = images.find(&asked.reference).map_err(refused)?;
            let missing = images.missing(&record.layers);
            if !missing.is_empty() {
                let (reference, of) = (record.reference, record.layers.len());
                return Err(refused(ImageError::Missing { reference, missing, of }));
            }
            let config = images.config(&record).map_err(refused)?.run();
            let volumes = directories(&config, &spec);
            fill(&mut spec, &asked, config)?;
            spec.image = Image::Oci(OciImage {
                reference: record.reference,
                digest: record.digest.to_string(),
                layers: record.layers.iter().map(Digest::to_string).collect(),
                entrypoint: None,
                publish_all: false,
                volumes,
            });
            Ok((spec, Some(in_use)))
        })
        .await
    }

    /// Whether the layers of a proc's image are here; they stay as long as what is returned.
    pub(crate) async fn has_layers(&self, spec: &Spec) -> Result<Option<InUse>, Refusal> {
        let Image::Oci(image) = &spec.image else { return Ok(None) };
        let in_use = self.machine.images.in_use().await;
        let layers = layers_of(spec).unwrap_or_default();
        let missing = self.machine.images.missing(&layers);
        if missing.is_empty() && layers.len() == image.layers.len() {
            return Ok(Some(in_use));
        }
        let (reference, of) = (format!("{} ({})", image.reference, image.digest), image.layers.len());
        let error = chain(&ImageError::Missing { reference: image.reference.clone(), missing, of });
        Err(Refusal::new(Code::State, format!("it needs image {reference}: {error}")))
    }

    /// Procs with an image, with its layers.
    fn image_users(&self) -> Vec<(ProcName, Vec<Digest>)> {
        let procs = self.procs.lock();
        procs.iter().filter_map(|(name, handle)| Some((name.clone(), layers_of(&handle.proc.spec())?))).collect()
    }

    fn image_view(&self, record: &ImageRecord) -> ImageView {
        let of_it = |(_, layers): &(ProcName, Vec<Digest>)| *layers == record.layers;
        ImageView {
            reference: record.reference.clone(),
            digest: record.digest.to_string(),
            id: record.id.to_string(),
            layers: record.layers.iter().map(Digest::to_string).collect(),
            bytes: self.machine.images.bytes(&record.layers),
            at_ms: record.at_ms,
            source: record.source.clone(),
            procs: self.image_users().into_iter().filter(of_it).map(|(name, _)| name).collect(),
        }
    }

    /// What must stay for procs. Refused while there is one of which nothing is known.
    fn layers_in_use(&self) -> Result<BTreeSet<Digest>, Refusal> {
        let users = self.image_users();
        let known = self.procs.lock().len();
        let dir = self.machine.data.join("procs");
        let there = fs::read_dir(&dir)
            .map(|d| d.flatten().filter(|e| !e.file_name().as_encoded_bytes().starts_with(b".")).count());
        if there.is_ok_and(|there| there > known) {
            let message = "a proc is being made or its record cannot be read: what it needs is not known".to_owned();
            return Err(Refusal::new(Code::State, message));
        }
        let unknown = |e| Refusal::new(Code::State, format!("what a checkpoint needs is not known: {}", chain(&e)));
        let checkpointed = self.checkpointed_specs().map_err(unknown)?;
        let of_checkpoints = checkpointed.iter().filter_map(|(spec, _)| layers_of(spec));
        Ok(users.into_iter().map(|(_, layers)| layers).chain(of_checkpoints).flatten().collect())
    }

    fn kept_for(&self, mut removed: ImagesRemoved) -> Result<ImagesRemoved, Refusal> {
        let named: BTreeSet<Digest> =
            self.machine.images.list().map_err(refused)?.into_iter().flat_map(|r| r.layers).collect();
        let kept = |(_, layers): &(ProcName, Vec<Digest>)| layers.iter().any(|layer| !named.contains(layer));
        removed.kept_for = self.image_users().into_iter().filter(kept).map(|(name, _)| name).collect();
        Ok(removed)
    }
}

#[async_trait]
impl ImageService for Worker {
    async fn images(&self) -> Result<Vec<ImageView>, Refusal> {
        let worker = self.clone();
        blocking(move || {
            let all = worker.machine.images.list().map_err(refused)?;
            Ok(all.iter().map(|record| worker.image_view(record)).collect())
        })
        .await
    }

    async fn image(&self, reference: String) -> Result<ImageDetails, Refusal> {
        let worker = self.clone();
        blocking(move || {
            let images = &worker.machine.images;
            let record = images.find(&reference).map_err(refused)?;
            let config = images.config(&record).map_err(refused)?.run();
            let layer = |digest: &Digest| {
                let known = images.layer(digest);
                let (bytes, left_out) = known.map_or((None, Vec::new()), |(bytes, left)| (Some(bytes), left));
                LayerView { digest: digest.to_string(), bytes, left_out }
            };
            let layer_views = record.layers.iter().map(layer).collect();
            Ok(ImageDetails { view: worker.image_view(&record), config, layer_views })
        })
        .await
    }

    async fn pull_image(&self, request: PullRequest) -> Result<Feed<PullProgress>, Refusal> {
        let (out, feed) = feed();
        let worker = self.clone();
        tokio::spawn(async move {
            let PullRequest { source, name, login, plain_http, ca_pem } = request;
            let login = login.map(|login| (login.user, login.password.0));
            let told = out.clone();
            // A client that reads slowly misses some.
            let report = Arc::new(move |progress| drop(told.try_send(Ok(progress))));
            let pull = worker.machine.images.pull(PullOrder { source, name, login, plain_http, ca_pem }, report);
            let pulled = tokio::select! {
                pulled = pull => pulled.map_err(refused),
                () = out.closed() => return,
            };
            let end = match pulled {
                Ok(record) => {
                    worker.machine.events.emit(None, EventKind::Image, format!("{} is here", record.reference));
                    blocking(move || Ok(PullProgress::End { image: Box::new(worker.image_view(&record)) })).await
                }
                Err(refusal) => Err(refusal),
            };
            let _ = out.send(end).await;
        });
        Ok(feed)
    }

    async fn remove_image(&self, reference: String) -> Result<ImagesRemoved, Refusal> {
        let worker = self.clone();
        blocking(move || {
            let used = worker.layers_in_use()?;
            worker.kept_for(worker.machine.images.remove(&reference, &used).map_err(refused)?)
        })
        .await
    }

    async fn collect_images(&self, request: ImagesCollectRequest) -> Result<ImagesRemoved, Refusal> {
        let worker = self.clone();
        blocking(move || {
            let used = worker.layers_in_use()?;
            let removed = worker.machine.images.collect(&used, request.all, request.dry_run).map_err(refused)?;
            worker.kept_for(removed)
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(command: &[&str]) -> Spec {
        let command: Vec<String> = command.iter().map(|w| (*w).to_owned()).collect();
        serde_json::from_value(serde_json::json!({ "name": "web", "command": command })).unwrap()
    }

    fn config() -> ImageConfig {
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect();
        ImageConfig {
            entrypoint: words("/server"),
            cmd: words("--port 80"),
            env: words("A=image B=image PATH=/opt/bin broken"),
            user: "web".into(),
            workdir: "srv".into(),
            exposed_ports: words("80/tcp 53/udp 9/sctp"),
            stop_signal: "SIGQUIT".into(),
            volumes: words("/data"),
        }
    }

    #[test]
    fn each_trouble_with_an_image_has_its_code() {
        let io = |kind: ErrorKind| std::io::Error::from(kind);
        let ours = |kind| ImageError::Io { action: "write", path: "/data/images/x".into(), source: io(kind) };
        let named = |kind| ImageError::Source { action: "open", path: "/x".into(), source: io(kind) };
        let (registry, reference, why) = ("r".to_owned(), "r/x".to_owned(), "refused".to_owned());
        let closed = ImageError::Unauthorized { registry: "r".into(), reference: "r/x".into(), who: "a".into() };
        let digest: Digest = format!("sha256:{}", "0".repeat(64)).parse().unwrap();
        let damaged = ImageError::Damaged {
            what: "a layer".into(),
            reference: "x".into(),
            expected: digest.clone(),
            found: digest,
        };
        for (error, code) in [
            (ours(ErrorKind::StorageFull), Code::Exhausted),
            (ours(ErrorKind::NotFound), Code::Failed),
            (named(ErrorKind::NotFound), Code::Unknown),
            (named(ErrorKind::PermissionDenied), Code::Invalid),
            (ImageError::Registry { registry, reference, why }, Code::Exhausted),
            (closed, Code::Forbidden),
            (damaged, Code::Invalid),
        ] {
            let said = error.to_string();
            assert_eq!(refused(error).code, code, "{said}");
        }
    }

    #[test]
    fn the_owner_s_word_goes_before_the_image_s() {
        let asked = OciImage::default();
        let mut plain = spec(&[]);
        fill(&mut plain, &asked, config()).unwrap();
        assert_eq!(plain.command, ["/server", "--port", "80"]);
        assert_eq!((plain.env["A"].as_str(), plain.env.len()), ("image", 3));
        assert_eq!((plain.user.as_deref(), plain.stop_signal.as_deref()), (Some("web"), Some("SIGQUIT")));
        assert_eq!((plain.workdir, plain.ports), (Some("/srv".into()), vec![]));

        let mut own = spec(&["--port", "81"]);
        own.env.insert("A".into(), "mine".into());
        own.user = Some("0".into());
        own.workdir = Some("/".into());
        own.ports = vec!["8080:80".parse().unwrap()];
        fill(&mut own, &OciImage { publish_all: true, ..OciImage::default() }, config()).unwrap();
        assert_eq!(own.command, ["/server", "--port", "81"]);
        assert_eq!((own.env["A"].as_str(), own.user.as_deref()), ("mine", Some("0")));
        let ports: Vec<_> = own.ports.iter().map(|p| (p.proto, p.host_port, p.port)).collect();
        assert_eq!(ports, [(Protocol::Tcp, Some(8080), 80), (Protocol::Udp, None, 53)]);
    }

    #[test]
    fn directories_for_data_are_those_that_no_volume_covers() {
        let mut own = spec(&["/x"]);
        own.volumes = vec!["kept:/kept".parse().unwrap()];
        let words = "/data srv//more /kept /kept/below /keptnot / /proc/x /a/../b";
        let volumes = words.split_whitespace().map(str::to_owned).collect();
        let config = ImageConfig { volumes, ..ImageConfig::default() };
        assert_eq!(directories(&config, &own), ["/data", "/srv/more", "/keptnot"]);
    }

    #[test]
    fn another_entrypoint_takes_no_arguments_of_the_image() {
        let asked = |words: &[&str]| OciImage {
            entrypoint: Some(words.iter().map(|w| (*w).to_owned()).collect()),
            ..OciImage::default()
        };
        let mut other = spec(&[]);
        fill(&mut other, &asked(&["/bin/sh"]), config()).unwrap();
        assert_eq!(other.command, ["/bin/sh"]);
        let mut none = spec(&["/x"]);
        fill(&mut none, &asked(&[]), config()).unwrap();
        assert_eq!(none.command, ["/x"]);
        assert!(fill(&mut spec(&[]), &asked(&[]), config()).unwrap_err().message.contains("names no program"));
    }
}
