//! The API by TCP: TLS, a token with every request, and limits on what a stranger may cost.
//!
//! A stranger has [`STRANGER`] for the TLS handshake and as long for each request's head; a token
//! is asked for before a body is read. There are at most [`CONNECTIONS`] at a time; a client that
//! comes later waits in the kernel's queue. A client that does not read holds its own connection
//! and nothing else. One that is gone without a word is noticed after [`SILENCE_MS`].

use crate::answer::RefusalAnswer;
use crate::routes;
use crate::state::Api;
use axum::extract::{Request, State};
use axum::http::Method;
use axum::http::header::{AUTHORIZATION, HeaderMap};
use axum::middleware::Next;
use axum::response::Response;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use kip_types::api::{Code, Refusal, Scope};
use parking_lot::RwLock;
use rustix::net::sockopt;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsAcceptor;

/// Most connections at a time.
const CONNECTIONS: usize = 256;
/// For a handshake, and for the head of a request, which includes waiting for the next one on a
/// connection.
const STRANGER: Duration = Duration::from_secs(10);
/// Longest head of a request, bytes.
const HEAD_MAX: usize = 64 << 10;
/// For so long sent bytes may be unacknowledged, and a silent connection's peer is looked for,
/// milliseconds.
const SILENCE_MS: u32 = 60_000;
/// First byte of every TLS record that begins a handshake (RFC 8446, 5.1).
const HANDSHAKE: u8 = 0x16;

/// The API cannot be offered by TCP.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// A certificate, or its key, could not be read.
    #[error("cannot read {what} {}: it must be a readable PEM file", .path.display())]
    Pem {
        /// What it should have been.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: rustls::pki_types::pem::Error,
    },
    /// There is nothing in the file.
    #[error("there is no certificate in {}: it must be a PEM file", .path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// The two do not belong together, or are of no use to TLS.
    #[error("the certificate {} and the key {} do not fit", .cert.display(), .key.display())]
    Unfit {
        /// The certificate's file.
        cert: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// Why.
        #[source]
        source: rustls::Error,
    },
    /// Without TLS every machine on the way could take the token.
    #[error(
        "{address} is not a loopback address: the API is offered there with TLS only, give --tls-cert and --tls-key"
    )]
    NotLoopback {
        /// The address.
        address: SocketAddr,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A listening TCP socket.
pub struct RemoteListener {
    listener: TcpListener,
    tls: Option<Tls>,
    address: SocketAddr,
}

/// The certificate that is shown, and the files that it is read from.
#[derive(Clone)]
pub struct Tls {
    cert: PathBuf,
    key: PathBuf,
    acceptor: Arc<RwLock<TlsAcceptor>>,
}

impl Tls {
    fn read(cert: &Path, key: &Path) -> Result<Tls, ListenError> {
        let acceptor = Arc::new(RwLock::new(acceptor(cert, key)?));
        Ok(Tls { cert: cert.to_owned(), key: key.to_owned(), acceptor })
    }

    /// Reads the files again; what is connected goes on.
    ///
    /// # Errors
    /// They cannot be used: that of before is shown on.
    pub fn read_again(&self) -> Result<(), ListenError> {
        *self.acceptor.write() = acceptor(&self.cert, &self.key)?;
        Ok(())
    }

    fn now(&self) -> TlsAcceptor {
        self.acceptor.read().clone()
    }
}

impl RemoteListener {
    /// Listens on `address`, with TLS by the PEM files of a certificate and its key. Without them
    /// on loopback only.
    pub async fn bind(address: SocketAddr, tls: Option<(&Path, &Path)>) -> Result<RemoteListener, ListenError> {
        if tls.is_none() && !address.ip().is_loopback() {
            return Err(ListenError::NotLoopback { address });
        }
        let tls = tls.map(|(cert, key)| Tls::read(cert, key)).transpose()?;
        let failed = |source| ListenError::Listen { address, source };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(RemoteListener { listener, tls, address })
    }

    /// Where clients find it, for example `https://127.0.0.1:7070`.
    pub fn url(&self) -> String {
        format!("{}://{}", if self.tls.is_some() { "https" } else { "http" }, self.address)
    }

    /// Its certificate, if it has one.
    pub fn tls(&self) -> Option<Tls> {
        self.tls.clone()
    }

    /// Serves the API until `ending` becomes true and then what was begun. Dropped, it ends at
    /// once.
    pub(crate) async fn serve(self, api: Api, mut ending: watch::Receiver<bool>) {
        let router = routes::router(api.clone()).layer(axum::middleware::from_fn_with_state(api, admit));
        let places = Arc::new(Semaphore::new(CONNECTIONS));
        let mut tasks = tokio::task::JoinSet::new();
        loop {
            while tasks.try_join_next().is_some() {}
            let accepted = async {
                let place = places.clone().acquire_owned().await.expect("it is never closed");
                (place, self.listener.accept().await)
            };
            let (place, stream) = tokio::select! {
                _ = ending.wait_for(|ends| *ends) => break,
                accepted = accepted => accepted,
            };
            match stream {
                Ok((stream, _)) => {
                    let (tls, router, ending) = (self.tls.as_ref().map(Tls::now), router.clone(), ending.clone());
                    tasks.spawn(async move {
                        if let Err(e) = connection(stream, tls, router, ending).await {
                            tracing::debug!(error = %e, "a connection by TCP ended");
                        }
                        drop(place);
                    });
                }
                // The peer is gone already, or there are no descriptors: for that others have to
                // end.
                Err(e) => {
                    tracing::debug!(error = %e, "cannot accept");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
        drop(self.listener);
        while tasks.join_next().await.is_some() {}
    }
}

fn acceptor(cert: &Path, key: &Path) -> Result<TlsAcceptor, ListenError> {
    let chain: Vec<_> = CertificateDer::pem_file_iter(cert)
        .and_then(Iterator::collect)
        .map_err(|e| unreadable("the certificate", cert, e))?;
    if chain.is_empty() {
        return Err(ListenError::Empty { path: cert.to_owned() });
    }
    let private = PrivateKeyDer::from_pem_file(key).map_err(|e| unreadable("the private key", key, e))?;
    let unfit = |source| ListenError::Unfit { cert: cert.to_owned(), key: key.to_owned(), source };
    let mut config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(unfit)?
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .map_err(unfit)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn unreadable(what: &'static str, path: &Path, source: rustls::pki_types::pem::Error) -> ListenError {
    ListenError::Pem { what, path: path.to_owned(), source }
}

async fn connection(
    mut stream: TcpStream,
    tls: Option<TlsAcceptor>,
    router: axum::Router,
    ending: watch::Receiver<bool>,
) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_tcp_user_timeout(&stream, SILENCE_MS)?;
    sockopt::set_socket_keepalive(&stream, true)?;
    sockopt::set_tcp_keepidle(&stream, Duration::from_millis(SILENCE_MS.into()))?;
    let Some(tls) = tls else { return exchange(stream, router, ending).await };
    let late = |_| io::Error::from(io::ErrorKind::TimedOut);
    let mut first = [0];
    if tokio::time::timeout(STRANGER, stream.peek(&mut first)).await.map_err(late)?? == 0 {
        return Ok(());
    }
    if first[0] != HANDSHAKE {
        return not_tls(&mut stream).await;
    }
    let stream = tokio::time::timeout(STRANGER, tls.accept(stream)).await.map_err(late)??;
    exchange(stream, router, ending).await
}

/// Tells a client that speaks HTTP where TLS is spoken what is wrong, in HTTP.
async fn not_tls(stream: &mut TcpStream) -> io::Result<()> {
    let refusal = Refusal::new(Code::Invalid, "this port speaks TLS").with_hint("use https:// instead of http://");
    let body = serde_json::to_string(&refusal).expect("the API's types are JSON");
    // What was sent is read, for closing with it unread would reset the connection and with it this
    // answer.
    let mut unread = [0; 4096];
    let _ = tokio::time::timeout(Duration::from_millis(100), tokio::io::AsyncReadExt::read(stream, &mut unread)).await;
    let answer = format!(
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await
}

async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    router: axum::Router,
    mut ending: watch::Receiver<bool>,
) -> io::Result<()> {
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(STRANGER)
        .max_buf_size(HEAD_MAX)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
        .with_upgrades();
    tokio::pin!(served);
    let early = tokio::select! {
        done = served.as_mut() => Some(done),
        _ = ending.wait_for(|ends| *ends) => None,
    };
    let done = match early {
        Some(done) => done,
        None => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    done.map_err(io::Error::other)
}

/// Lets those in whose token allows what they ask for.
async fn admit(State(api): State<Api>, mut request: Request, next: Next) -> Result<Response, RefusalAnswer> {
    if *request.method() == Method::GET && routes::dashboard::is_public(request.uri().path()) {
        return Ok(next.run(request).await);
    }
    let scope = api.tokens.scope(bearer(request.headers())?)?;
    let path = request.uri().path();
    if path == "/v1/tokens" || path.starts_with("/v1/tokens/") {
        return Err(Refusal::new(Code::Forbidden, "tokens are seen and made on the daemon's machine only")
            .with_hint("run `kip token` there, without --host")
            .into());
    }
    if scope == Scope::Read && !matches!(*request.method(), Method::GET | Method::HEAD) {
        return Err(Refusal::new(Code::Forbidden, "this token allows to look only")
            .with_hint("`kip token create --scope write` on the daemon's machine makes one that allows more")
            .into());
    }
    request.extensions_mut().insert(scope);
    Ok(next.run(request).await)
}

/// The token, RFC 6750 2.1.
fn bearer(headers: &HeaderMap) -> Result<&str, Refusal> {
    let given = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let token = given.and_then(|value| value.split_once(' ')).filter(|(kind, _)| kind.eq_ignore_ascii_case("bearer"));
    token.map(|(_, token)| token.trim()).ok_or_else(|| {
        Refusal::new(Code::Unauthorized, "there is no token with this request").with_hint(
            "send the header `Authorization: Bearer TOKEN`; `kip token create` on the daemon's machine makes one",
        )
    })
}
