//! Images in a registry: the words are `oci-client`'s, what comes is checked here.

use crate::content::{self, Blob, Descriptor, MOST_JSON, ResolvedImage, Top};
use crate::digest::{Digest, Hasher};
use crate::error::ImageError;
use crate::images::parse_name;
use crate::request::{PullOrder, blocking};
use futures_util::StreamExt as _;
use oci_client::client::{
    BlobResponse, Certificate, CertificateEncoding, Client, ClientConfig, ClientProtocol, LayerDescriptor,
};
use oci_client::errors::{OciDistributionError, OciErrorCode};
use oci_client::secrets::RegistryAuth;
use oci_client::{Reference, RegistryOperation};
use std::fs::File;
use std::io::{self, Read};
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;
use tokio::io::AsyncWriteExt as _;

const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// Between two pieces of an answer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(60);
/// How often a blob that broke off is gone on with.
const ATTEMPTS: u32 = 4;
/// Before the first of these; then twice as long each time.
const PAUSE: Duration = Duration::from_millis(500);

/// What kinds of manifests are asked for.
const ACCEPTED: [&str; 4] = [
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];

/// One image of one registry.
pub(crate) struct Registry {
    client: Client,
    image: Reference,
    auth: RegistryAuth,
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Registry({})", self.image)
    }
}

impl Registry {
    pub(crate) fn new(name: &str, request: &PullOrder) -> Result<Registry, ImageError> {
        // The client makes another one without asking what it was built with.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let image = parse_name(name)?;
        let here = is_loopback(image.resolve_registry()) && request.ca_pem.is_none();
        let plain = request.plain_http || here;
        let certificate =
            |pem: &String| Certificate { encoding: CertificateEncoding::Pem, data: pem.clone().into_bytes() };
        let config = ClientConfig {
            protocol: if plain { ClientProtocol::Http } else { ClientProtocol::Https },
            connect_timeout: Some(CONNECT_WITHIN),
            read_timeout: Some(ANSWERS_WITHIN),
            extra_root_certificates: request.ca_pem.iter().map(certificate).collect(),
            user_agent: concat!("kip/", env!("CARGO_PKG_VERSION")),
            ..ClientConfig::default()
        };
        let auth = match &request.login {
            Some((user, password)) => RegistryAuth::Basic(user.clone(), password.clone()),
            None => RegistryAuth::Anonymous,
        };
        let client = Client::try_from(config).map_err(|e| ImageError::Registry {
            registry: image.resolve_registry().to_owned(),
            reference: image.whole(),
            why: e.to_string(),
        })?;
        Ok(Registry { client, image, auth })
    }

    fn explain(&self, error: OciDistributionError) -> ImageError {
        let (registry, reference) = (self.image.resolve_registry().to_owned(), self.image.whole());
        let who = match &self.auth {
            RegistryAuth::Basic(user, _) => format!("user {user}"),
            _ => "anonymous users".to_owned(),
        };
        use OciDistributionError as E;
        let other = |why: String| ImageError::Registry {
            registry: registry.clone(),
            reference: reference.clone(),
            why: why.split_whitespace().collect::<Vec<_>>().join(" "),
        };
        let not_found = || ImageError::NotFound {
            place: format!("registry {registry}"),
            reference: reference.clone(),
            hint: String::new(),
        };
        let refused = || ImageError::Unauthorized { registry: registry.clone(), reference: reference.clone(), who };
        match error {
            E::AuthenticationFailure(_) | E::UnauthorizedError { .. } => refused(),
            E::ServerError { code: 401 | 403, .. } => refused(),
            E::ImageManifestNotFoundError(_) | E::ServerError { code: 404, .. } => not_found(),
            E::ServerError { code, message, .. } => {
                other(format!("it answers {code} {}", message.chars().take(200).collect::<String>()))
            }
            E::RegistryError { envelope, .. } => match envelope.errors.first().map(|e| &e.code) {
                Some(OciErrorCode::ManifestUnknown | OciErrorCode::NameUnknown | OciErrorCode::NotFound) => not_found(),
                Some(OciErrorCode::BlobUnknown | OciErrorCode::ManifestBlobUnknown) => not_found(),
                Some(OciErrorCode::Denied | OciErrorCode::Unauthorized) => refused(),
                _ => other(envelope.errors.iter().map(|e| e.message.clone()).collect::<Vec<_>>().join("; ")),
            },
            E::RequestError(e) => other(innermost(&e)),
            E::DigestError(e) => other(format!("what it gave is damaged: {e}")),
            e => other(e.to_string()),
        }
    }

    /// What the name leads to, down to the configuration.
    pub(crate) async fn find(&self) -> Result<ResolvedImage, ImageError> {
        let reference = self.image.whole();
        // Later calls of the client keep silent about why the registry refuses them.
        let entered = self.client.auth(&self.image, &self.auth, RegistryOperation::Pull).await;
        entered.map_err(|e| self.explain(e))?;
        let top = self.manifest(&self.image).await?;
        let (config, layers) = match content::read_top(&reference, &top)? {
            Top::Manifest { config, layers } => (config, layers),
            Top::Index(manifests) => {
                let chosen = content::choose(&reference, &manifests)?.digest.clone();
                let manifest = self.manifest(&self.image.clone_with_digest(chosen.to_string())).await?;
                self.compare("the manifest", &chosen, &manifest)?;
                match content::read_top(&reference, &manifest)? {
                    Top::Manifest { config, layers } => (config, layers),
                    Top::Index(_) => {
                        let why = "its index leads to an index".to_owned();
                        return Err(ImageError::NoImage { reference, why });
                    }
                }
            }
        };
        let config = self.config(&config).await?;
        let layers = layers.into_iter().map(Blob::Named).collect();
        Ok(ResolvedImage { name: Some(reference), top: Some(top), config, layers })
    }

    async fn manifest(&self, image: &Reference) -> Result<Vec<u8>, ImageError> {
        let (bytes, _) =
            self.client.pull_manifest_raw(image, &self.auth, &ACCEPTED).await.map_err(|e| self.explain(e))?;
        Ok(bytes.to_vec())
    }

    fn compare(&self, what: &str, expected: &Digest, bytes: &[u8]) -> Result<(), ImageError> {
        let found = Digest::of(bytes);
        if found == *expected {
            return Ok(());
        }
        let (what, reference) = (what.to_owned(), self.image.whole());
        Err(ImageError::Damaged { what, reference, expected: expected.clone(), found })
    }

    async fn config(&self, config: &Descriptor) -> Result<Vec<u8>, ImageError> {
        let digest = config.digest.to_string();
        let blob = LayerDescriptor { digest: &digest, urls: &None };
        let opened = self.client.pull_blob_stream_partial(&self.image, &blob, 0, None).await;
        let (BlobResponse::Full(mut stream) | BlobResponse::Partial(mut stream)) =
            opened.map_err(|e| self.explain(e))?;
        let mut bytes = Vec::new();
        while let Some(piece) = stream.next().await {
            match piece {
                Ok(piece) if bytes.len() + piece.len() <= MOST_JSON as usize => bytes.extend_from_slice(&piece),
                Ok(_) => return Err(self.broken("its configuration does not end".to_owned())),
                // Its own comparison of digests comes as an error of the stream's end; ours has
                // better words.
                Err(_) if bytes.len() as u64 >= config.size => break,
                Err(e) => return Err(self.broken(innermost(&e))),
            }
        }
        self.compare("the configuration", &config.digest, &bytes)?;
        Ok(bytes)
    }

    fn broken(&self, why: String) -> ImageError {
        ImageError::Registry { registry: self.image.resolve_registry().to_owned(), reference: self.image.whole(), why }
    }

    /// Fetches a layer's blob into the file `part`, going on where an earlier attempt ended, and
    /// compares it.
    pub(crate) async fn fetch(
        &self,
        blob: &Descriptor,
        part: &Path,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<(), ImageError> {
        let mut pause = PAUSE;
        let mut attempt = 1;
        let mut got = resume(part, blob.size).await?;
        while got.bytes < blob.size {
            let before = got.bytes;
            match self.go_on(blob, part, &mut got, progress).await {
                Ok(()) if got.bytes >= blob.size => break,
                Ok(()) | Err(Broken::Off(_)) if got.bytes > before => attempt = 1,
                Ok(()) if attempt >= ATTEMPTS => return Err(self.broken("a layer ends too early".to_owned())),
                Err(Broken::Off(why)) if attempt >= ATTEMPTS => return Err(self.broken(why)),
                Err(Broken::Final(e)) => {
                    // What came is of use, but not as much as the room that it takes.
                    if matches!(&e, ImageError::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull) {
                        let _ = tokio::fs::remove_file(part).await;
                    }
                    return Err(e);
                }
                Ok(()) | Err(Broken::Off(_)) => {}
            }
            tokio::time::sleep(pause).await;
            (pause, attempt) = (pause * 2, attempt + 1);
        }
        let found = got.hasher.finish();
        if got.bytes == blob.size && found == blob.digest {
            return Ok(());
        }
        let _ = tokio::fs::remove_file(part).await;
        let (what, reference) = ("a layer".to_owned(), self.image.whole());
        Err(ImageError::Damaged { what, reference, expected: blob.digest.clone(), found })
    }

    async fn go_on(
        &self,
        blob: &Descriptor,
        part: &Path,
        got: &mut Got,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<(), Broken> {
        let digest = blob.digest.to_string();
        let layer = LayerDescriptor { digest: &digest, urls: &None };
        let opened = self.client.pull_blob_stream_partial(&self.image, &layer, got.bytes, None).await;
        let mut stream = match opened {
            Ok(BlobResponse::Partial(stream)) => stream,
            Ok(BlobResponse::Full(stream)) => {
                // It knows no ranges: from the beginning.
                *got = Got::default();
                stream
            }
            Err(e @ OciDistributionError::RequestError(_)) => return Err(Broken::Off(self.explain(e).to_string())),
            Err(e @ OciDistributionError::ServerError { code: 500.., .. }) => {
                return Err(Broken::Off(self.explain(e).to_string()));
            }
            Err(e) => return Err(Broken::Final(self.explain(e))),
        };
        let disk = |e: io::Error| Broken::Final(ImageError::io("write", part)(e));
        let file =
            tokio::fs::OpenOptions::new().create(true).write(true).truncate(false).open(part).await.map_err(disk)?;
        file.set_len(got.bytes).await.map_err(disk)?;
        let mut file = file;
        tokio::io::AsyncSeekExt::seek(&mut file, io::SeekFrom::Start(got.bytes)).await.map_err(disk)?;
        while let Some(piece) = stream.next().await {
            let piece = match piece {
                Ok(piece) => piece,
                Err(e) => {
                    file.flush().await.map_err(disk)?;
                    // The client's own word about the digest comes last; ours follows.
                    return if got.bytes >= blob.size { Ok(()) } else { Err(Broken::Off(innermost(&e))) };
                }
            };
            got.bytes += piece.len() as u64;
            got.hasher.update(&piece);
            if got.bytes > blob.size {
                // Too long: it cannot be the blob that is wanted, and it may never end.
                return Ok(());
            }
            file.write_all(&piece).await.map_err(disk)?;
            progress(got.bytes, blob.size);
        }
        file.flush().await.map_err(disk)
    }
}

/// Why a blob has not come whole.
enum Broken {
    /// It may come yet.
    Off(String),
    /// It will not.
    Final(ImageError),
}

/// What has come of a blob.
#[derive(Default)]
struct Got {
    hasher: Hasher,
    bytes: u64,
}

/// What has come before.
async fn resume(part: &Path, size: u64) -> Result<Got, ImageError> {
    let part = part.to_owned();
    blocking(move || {
        let mut got = Got::default();
        let mut file = match File::open(&part) {
            Ok(file) => file.take(size),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(got),
            Err(e) => return Err(ImageError::io("open", &part)(e)),
        };
        let mut buffer = vec![0; 1 << 20];
        loop {
            let n = file.read(&mut buffer).map_err(ImageError::io("read", &part))?;
            if n == 0 {
                return Ok(got);
            }
            got.hasher.update(&buffer[..n]);
            got.bytes += n as u64;
        }
    })
    .await
}

/// Whether a registry is on this machine.
fn is_loopback(registry: &str) -> bool {
    let host = match registry.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(rest),
        None => registry.split(':').next().unwrap_or(registry),
    };
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// The last cause: what comes before says only that a request was not answered.
fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_is_asked_without_tls() {
        for here in ["localhost", "localhost:5000", "127.0.0.1:5000", "127.1.2.3", "[::1]:5000"] {
            assert!(is_loopback(here), "{here}");
        }
        for elsewhere in ["docker.io", "10.0.0.1:5000", "localhost.example.org", "127.0.0.1.nip.io"] {
            assert!(!is_loopback(elsewhere), "{elsewhere}");
        }
    }
}
