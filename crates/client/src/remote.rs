//! The way to a daemon by TCP: its address, the CAs to trust for its certificate, and the token.

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{CertificateError, ClientConfig, RootCertStore};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// What an exchange goes over.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin + std::fmt::Debug {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin + std::fmt::Debug> Stream for T {}

/// For the connection and for the TLS handshake, each.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why a daemon cannot be reached by TCP. Each Display is one line for a person.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// It is no URL of a daemon.
    #[error("{host:?} is no address of a daemon: write https://HOST:PORT")]
    BadHost {
        /// What was given.
        host: String,
    },
    /// The token has characters that none has.
    #[error("this is no token: a token begins with kip_ and is printed by `kip token create`")]
    BadToken,
    /// The file of trusted certificates cannot be used.
    #[error("cannot read trusted certificates from {}: it must be a PEM file", .path.display())]
    Ca {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// This machine has no certificates to trust.
    #[error("this machine trusts no certificates: give the daemon's CA with --ca or KIP_CA")]
    NoRoots,
    /// TLS cannot be set up.
    #[error("TLS cannot be used")]
    Tls(#[source] rustls::Error),
    /// No connection.
    #[error("cannot reach {host}: see whether its daemon runs with `kip up --listen`")]
    Unreachable {
        /// Where.
        host: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Its certificate leads to no CA that is trusted.
    #[error("the certificate of {host} is not trusted: give its CA with --ca or KIP_CA")]
    Untrusted {
        /// Where.
        host: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Its certificate is for another host.
    #[error("the certificate of {host} is for another name: use the name that it was made for")]
    OtherName {
        /// Where.
        host: String,
    },
    /// Its certificate is not valid any more, or not yet.
    #[error(
        "the certificate of {host} has expired or is not valid yet: compare the clocks, or give the daemon a new one"
    )]
    Expired {
        /// Where.
        host: String,
    },
    /// Something else than TLS answers.
    #[error("{host} does not speak TLS: if it is a daemon on this machine without TLS, use http://")]
    NotTls {
        /// Where.
        host: String,
    },
    /// The handshake failed for another reason.
    #[error("TLS with {host} failed")]
    Handshake {
        /// Where.
        host: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A daemon that listens by TCP.
#[derive(Clone)]
pub struct Remote {
    /// HOST:PORT.
    host: String,
    name: ServerName<'static>,
    tls: Option<Arc<ClientConfig>>,
    token: String,
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remote").field("host", &self.host).finish_non_exhaustive()
    }
}

impl Remote {
    /// The daemon at `url`, `https://HOST:PORT`, whose certificate leads to one of those in the PEM
    /// file `ca` or, without it, to one that this machine trusts. `http://` is without TLS and
    /// shows the token to all that listen on the way.
    pub fn new(url: &str, ca: Option<&Path>, token: &str) -> Result<Remote, RemoteError> {
        let bad = || RemoteError::BadHost { host: url.to_owned() };
        let (scheme, host) = url.split_once("://").ok_or_else(bad)?;
        let host = host.trim_end_matches('/');
        let (address, port) = host.rsplit_once(':').ok_or_else(bad)?;
        port.parse::<u16>().map_err(|_| bad())?;
        let address = address.trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(address.to_owned()).map_err(|_| bad())?;
        let tls = match scheme {
            "https" => Some(Arc::new(config(ca)?)),
            "http" => None,
            _ => return Err(bad()),
        };
        let token = token.trim();
        if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(RemoteError::BadToken);
        }
        Ok(Remote { host: host.to_owned(), name, tls, token: token.to_owned() })
    }

    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    pub(crate) fn bearer(&self) -> String {
        format!("Bearer {}", self.token)
    }

    pub(crate) async fn connect(&self) -> Result<Box<dyn Stream>, RemoteError> {
        let unreachable = |source| RemoteError::Unreachable { host: self.host.clone(), source };
        let late = |_| io::Error::from(io::ErrorKind::TimedOut);
        let connected = tokio::time::timeout(PATIENCE, TcpStream::connect(&self.host)).await.map_err(late);
        let stream = connected.and_then(|done| done).map_err(unreachable)?;
        stream.set_nodelay(true).map_err(unreachable)?;
        let Some(tls) = &self.tls else { return Ok(Box::new(stream)) };
        let connector = TlsConnector::from(tls.clone());
        let shaken = tokio::time::timeout(PATIENCE, connector.connect(self.name.clone(), stream)).await.map_err(late);
        match shaken.and_then(|done| done) {
            Ok(stream) => Ok(Box::new(stream)),
            Err(e) => Err(self.refused(e)),
        }
    }

    fn refused(&self, source: io::Error) -> RemoteError {
        use CertificateError as C;
        let host = self.host.clone();
        match source.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            Some(rustls::Error::InvalidCertificate(C::NotValidForName | C::NotValidForNameContext { .. })) => {
                RemoteError::OtherName { host }
            }
            Some(rustls::Error::InvalidCertificate(
                C::Expired | C::ExpiredContext { .. } | C::NotValidYet | C::NotValidYetContext { .. },
            )) => RemoteError::Expired { host },
            Some(rustls::Error::InvalidCertificate(_)) => RemoteError::Untrusted { host, source },
            Some(rustls::Error::InvalidMessage(_)) => RemoteError::NotTls { host },
            _ => RemoteError::Handshake { host, source },
        }
    }
}

fn config(ca: Option<&Path>) -> Result<ClientConfig, RemoteError> {
    let mut roots = RootCertStore::empty();
    match ca {
        Some(path) => {
            let failed = |e: Box<dyn std::error::Error + Send + Sync>| RemoteError::Ca {
                path: path.to_owned(),
                source: io::Error::other(e),
            };
            let found: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
            for certificate in found.map_err(|e| failed(e.into()))? {
                roots.add(certificate).map_err(|e| failed(e.into()))?;
            }
            if roots.is_empty() {
                return Err(failed("there is no certificate in it".into()));
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            if roots.is_empty() {
                return Err(RemoteError::NoRoots);
            }
        }
    }
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(RemoteError::Tls)?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}
