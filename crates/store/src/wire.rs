//! HTTP for `object_store`: connections, TLS with ring, and what became of each exchange.
//!
//! One request in, one answer out: it never tries again and never decides whether trying helps.
//! Every answer that is not a success comes back as a [`Misfortune`] inside the error, so that
//! [`crate::failure`] can read the status and the store's own error code, which `object_store` only
//! has as text. HTTP/1.1 only: it is what S3 speaks, and connections are independent, so a lost
//! packet delays one stream and not all. Proxies are not used.

mod sending;

pub(crate) use sending::Patience;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use http::uri::Authority;
use http::{HeaderMap, Method, StatusCode, Uri};
use http_body_util::{BodyExt, Limited};
use hyper_rustls::{ConfigBuilderExt, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::{Client, connect::HttpConnector as TcpConnector};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody, HttpService,
};
use object_store::{ClientConfigKey, ClientOptions};
use sending::Watched;
use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Longest answer that is inspected before it is passed on: a page of a listing has about a
/// thousand keys.
const LONGEST_INSPECTED: usize = 16 << 20;
/// Idle connections are closed after this long; S3 itself does so after about 20 s.
const IDLE: Duration = Duration::from_secs(15);

/// Why an exchange gave no success.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{what}")]
pub(crate) struct Misfortune {
    /// False of requests for credentials.
    pub(crate) with_the_store: bool,
    #[source]
    pub(crate) what: TransportError,
}

/// How a request failed on its way.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum TransportError {
    /// Nothing was sent.
    #[error("no connection")]
    Connect(#[source] Cause),
    /// The other side's certificate is not one to trust. Nothing was sent.
    #[error("the certificate is not trusted")]
    Certificate(#[source] Cause),
    /// The connection ended in the middle; the request may have been acted on.
    #[error("the connection broke")]
    Broken(#[source] Cause),
    /// Nothing moved for too long; the request may have been acted on.
    #[error("nothing moved for too long, after {} ms", .0.as_millis())]
    Stalled(Duration),
    /// A success, but not the words of an object store.
    #[error("that is no answer to a listing")]
    Senseless,
    /// A clear no.
    #[error("it answered {}", .0.status)]
    Answered(Answer),
}

/// An answer that is not a success.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    /// S3's code, for example `NoSuchKey`; empty if there is none.
    pub(crate) code: String,
    /// Answers to HEAD have no room for a code.
    pub(crate) to_head: bool,
    pub(crate) message: String,
    /// `x-amz-bucket-region`.
    pub(crate) bucket_region: Option<String>,
    /// Of a range beyond the end: how long the object is.
    pub(crate) object_size: Option<u64>,
}

/// An error of the libraries below, shared.
#[derive(Debug, Clone)]
pub struct Cause(Arc<dyn Error + Send + Sync>);

impl Cause {
    pub(crate) fn new(error: impl Error + Send + Sync + 'static) -> Cause {
        Cause(Arc::new(error))
    }

    fn boxed(error: Box<dyn Error + Send + Sync>) -> Cause {
        Cause(error.into())
    }
}

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for Cause {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}

/// Makes clients.
#[derive(Debug)]
pub(crate) struct Connector {
    /// Host and port of the store; every other host is asked for credentials.
    pub(crate) store: Option<Authority>,
    pub(crate) connect_timeout: Duration,
    pub(crate) patience: Patience,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let plain_allowed =
            options.get_config_value(&ClientConfigKey::AllowHttp).is_some_and(|allowed| allowed == "true");
        let mut tcp = TcpConnector::new();
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(self.connect_timeout));
        tcp.set_keepalive(Some(Duration::from_secs(30)));
        // If bytes stay unacknowledged, the other side is gone, or takes nothing more.
        tcp.set_tcp_user_timeout(Some(self.patience.idle));
        tcp.enforce_http(false);
        let tls = tls(plain_allowed)
            .map_err(|source| object_store::Error::Generic { store: "TLS", source: Box::new(source) })?;
        let builder = HttpsConnectorBuilder::new().with_tls_config(tls);
        let builder = if plain_allowed { builder.https_or_http() } else { builder.https_only() };
        let client = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(IDLE)
            .pool_timer(TokioTimer::new())
            .build(builder.enable_http1().wrap_connector(tcp));
        Ok(HttpClient::new(Exchanger {
            client,
            store: self.store.clone(),
            connect_timeout: self.connect_timeout,
            patience: self.patience,
        }))
    }
}

/// The system's certificates, ring's ciphers. A machine without certificates can still use plain
/// HTTP.
fn tls(plain_allowed: bool) -> io::Result<rustls::ClientConfig> {
    let builder = || {
        rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("ring speaks TLS 1.2 and 1.3")
    };
    match builder().with_native_roots() {
        Ok(builder) => Ok(builder.with_no_client_auth()),
        Err(_) if plain_allowed => {
            Ok(builder().with_root_certificates(rustls::RootCertStore::empty()).with_no_client_auth())
        }
        Err(source) => Err(source),
    }
}

#[derive(Debug)]
struct Exchanger {
    client: Client<HttpsConnector<TcpConnector>, Watched>,
    store: Option<Authority>,
    connect_timeout: Duration,
    patience: Patience,
}

impl Exchanger {
    fn error(&self, uri: &Uri, what: TransportError) -> HttpError {
        let with_the_store = self.store.is_none() || self.store.as_ref() == uri.authority();
        HttpError::new(HttpErrorKind::Unknown, Misfortune { with_the_store, what })
    }

    /// All of an answer, as long as it moves. S3 sends blanks while it puts an object together.
    async fn whole(&self, body: hyper::body::Incoming) -> Result<Bytes, TransportError> {
        let mut body = Limited::new(body, LONGEST_INSPECTED);
        let mut text = BytesMut::new();
        loop {
            let next = tokio::time::timeout(self.patience.idle, body.frame()).await;
            match next.map_err(|_| TransportError::Stalled(self.patience.idle))? {
                None => return Ok(text.freeze()),
                Some(Err(error)) => return Err(TransportError::Broken(Cause::boxed(error))),
                Some(Ok(frame)) => text.extend_from_slice(frame.data_ref().unwrap_or(&Bytes::new())),
            }
        }
    }
}

#[async_trait]
impl HttpService for Exchanger {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let uri = request.uri().clone();
        let claim = Claim::of(request.method(), &uri);
        let to_head = request.method() == Method::HEAD;
        let (parts, body) = request.into_parts();
        let (body, progress) = Watched::new(body);
        let response = tokio::select! {
            response = self.client.request(http::Request::from_parts(parts, body)) => response,
            waited = progress.stalls(self.patience) => return Err(self.error(&uri, TransportError::Stalled(waited))),
        };
        let response = response.map_err(|error| {
            let error = match (error.is_connect(), distrusted(&error)) {
                (true, true) => TransportError::Certificate(Cause::new(error)),
                (true, false) => TransportError::Connect(Cause::new(error)),
                (false, _) => TransportError::Broken(Cause::new(error)),
            };
            self.error(&uri, error)
        })?;
        let (parts, body) = response.into_parts();
        let with_the_store = self.store.is_none() || self.store.as_ref() == uri.authority();
        let broken = move |error| {
            let what = TransportError::Broken(Cause::new(error));
            HttpError::new(HttpErrorKind::Unknown, Misfortune { with_the_store, what })
        };
        if parts.status.is_success() && claim == Claim::Plain {
            return Ok(HttpResponse::from_parts(parts, HttpResponseBody::new(body.map_err(broken))));
        }
        if parts.status.is_success() {
            let text = self.whole(body).await.map_err(|what| self.error(&uri, what))?;
            return match claim.fits(&text) {
                Ok(()) => Ok(HttpResponse::from_parts(parts, text.into())),
                Err(None) => Err(self.error(&uri, TransportError::Senseless)),
                Err(Some(())) => {
                    let answer = answer(parts.status, &parts.headers, &text, to_head);
                    Err(self.error(&uri, TransportError::Answered(answer)))
                }
            };
        }
        let text = tokio::time::timeout(self.connect_timeout, Limited::new(body, LONGEST_INSPECTED).collect()).await;
        let text = match text {
            Ok(Ok(collected)) => collected.to_bytes(),
            // What is missing must be told from what else has this status. Of others the status is
            // enough.
            _ if parts.status == StatusCode::NOT_FOUND => {
                let ended = Cause::new(io::Error::from(io::ErrorKind::UnexpectedEof));
                return Err(self.error(&uri, TransportError::Broken(ended)));
            }
            _ => Bytes::new(),
        };
        Err(self.error(&uri, TransportError::Answered(answer(parts.status, &parts.headers, &text, to_head))))
    }
}

/// What a success must look like to be one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Claim {
    /// Its status says it all.
    Plain,
    /// S3 may find out that it failed after it has said success.
    Completion,
    /// A page of another kind would pass for a listing of nothing.
    Listing,
}

impl Claim {
    fn of(method: &Method, uri: &Uri) -> Claim {
        let query = uri.query().unwrap_or_default();
        match *method {
            Method::POST if query.contains("uploadId=") => Claim::Completion,
            Method::GET if query.contains("list-type=2") => Claim::Listing,
            _ => Claim::Plain,
        }
    }

    /// An error inside, or none if it is something else altogether.
    fn fits(self, text: &[u8]) -> Result<(), Option<()>> {
        let has = |word: &[u8]| text.windows(word.len()).any(|there| there == word);
        match self {
            Claim::Completion if has(b"<Error>") => Err(Some(())),
            Claim::Listing if !has(b"<ListBucketResult") => Err(None),
            _ => Ok(()),
        }
    }
}

fn answer(status: StatusCode, headers: &HeaderMap, text: &[u8], to_head: bool) -> Answer {
    let text = String::from_utf8_lossy(text);
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let object_size = || header("content-range")?.strip_prefix("bytes */")?.parse().ok();
    Answer {
        status,
        to_head,
        code: element(&text, "Code").or_else(|| header("x-ms-error-code")).unwrap_or_default(),
        message: element(&text, "Message").unwrap_or_default(),
        bucket_region: header("x-amz-bucket-region").or_else(|| element(&text, "Region")),
        object_size: object_size(),
    }
}

/// The text of an element of a flat XML answer, short and in one line: it ends up in messages.
fn element(xml: &str, name: &str) -> Option<String> {
    let (_, rest) = xml.split_once(&format!("<{name}>"))?;
    let (text, _) = rest.split_once(&format!("</{name}>"))?;
    Some(text.chars().filter(|c| !c.is_control()).take(200).collect())
}

/// Whether TLS failed over the certificate. `io::Error` hides its content from `source()`.
fn distrusted(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        let tls = inner.and_then(|inner| inner.downcast_ref::<rustls::Error>());
        if matches!(tls, Some(rustls::Error::InvalidCertificate(_))) {
            return true;
        }
        if inner.is_some_and(|inner| distrusted(inner)) {
            return true;
        }
        next = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_and_the_hints_of_an_error_are_read() {
        let mut headers = HeaderMap::new();
        headers.insert("x-amz-bucket-region", "eu-west-1".parse().unwrap());
        headers.insert("content-range", "bytes */4711".parse().unwrap());
        let text = b"<?xml version=\"1.0\"?>\n<Error><Code>SlowDown</Code><Message>Please\nwait</Message></Error>";
        let answer = answer(StatusCode::SERVICE_UNAVAILABLE, &headers, text, false);
        assert_eq!((answer.code.as_str(), answer.message.as_str()), ("SlowDown", "Pleasewait"));
        assert_eq!((answer.bucket_region.as_deref(), answer.object_size), (Some("eu-west-1"), Some(4711)));
    }

    #[test]
    fn an_answer_without_xml_has_no_code() {
        let answer = answer(StatusCode::BAD_GATEWAY, &HeaderMap::new(), b"\xff<html><Code>never closed", false);
        assert_eq!((answer.code.as_str(), answer.object_size), ("", None));
    }
}
