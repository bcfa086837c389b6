//! Traces of wakes, by OTLP over HTTP: each wake is a trace of its own, with a span for each of its
//! steps.
//!
//! Owns what is in a span and the way to the collector; queueing, encoding and the variables
//! `OTEL_*` are the OpenTelemetry library's
//! (<https://opentelemetry.io/docs/specs/otel/protocol/exporter>). A collector that does not answer
//! costs no caller anything: spans are dropped, and one line says so.

use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper_rustls::{ConfigBuilderExt as _, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use kip_types::api::WakeView;
use kip_types::{ProcName, Tier};
use kip_worker::WakeObserver;
use opentelemetry::trace::{Span as _, SpanKind, Status, TraceContextExt as _, Tracer as _, TracerProvider as _};
use opentelemetry::{Context, KeyValue};
use opentelemetry_http::{HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{ExporterBuildError, Protocol, SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};
use tokio::runtime::Handle;

/// Where spans go, by the variables of OpenTelemetry.
const VARIABLES: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];
/// Below an endpoint.
const PATH: &str = "v1/traces";
/// A collector that has not answered by then is not waited for.
const WITHIN: Duration = Duration::from_secs(5);

/// Traces cannot be sent.
#[derive(Debug, thiserror::Error)]
pub enum TracesError {
    /// An endpoint that cannot be read.
    #[error("--traces {0}: this is no URL")]
    NoUrl(String),
    /// An endpoint that is no collector's.
    #[error("--traces {0}: write http://HOST:PORT or https://HOST:PORT, of a collector that takes OTLP")]
    NoCollector(String),
    /// TLS.
    #[error(transparent)]
    Tls(#[from] rustls::Error),
    /// The library's way to the collector.
    #[error("the connection to the collector of traces cannot be set up")]
    Exporter(#[from] ExporterBuildError),
}

/// Sends a span for each wake and each of its steps.
#[derive(Debug)]
pub struct Traces {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

impl Traces {
    /// To the collector at `url`, or where the variables say; none if neither says. To be called in
    /// a runtime.
    pub fn open(url: Option<&str>, data: &Path) -> Result<Option<Arc<Traces>>, TracesError> {
        let by_variable = || VARIABLES.iter().any(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty()));
        if url.is_none() && !by_variable() {
            return Ok(None);
        }
        let mut exporter = SpanExporter::builder().with_http().with_protocol(Protocol::HttpBinary);
        exporter = exporter.with_http_client(Wire::new()?).with_timeout(WITHIN);
        if let Some(url) = url {
            exporter = exporter.with_endpoint(endpoint(url)?);
        }
        let exporter = exporter.build()?;
        let resource = Resource::builder().with_attributes([
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
            KeyValue::new("host.name", rustix::system::uname().nodename().to_string_lossy().into_owned()),
            KeyValue::new("kip.data", data.display().to_string()),
        ]);
        // The library's own word for one without a name is `unknown_service`.
        let named = std::env::var_os("OTEL_SERVICE_NAME").is_some_and(|name| !name.is_empty());
        let resource = if named { resource } else { resource.with_service_name("kip") };
        let provider =
            SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource.build()).build();
        let tracer = provider.tracer("kip");
        Ok(Some(Arc::new(Traces { provider, tracer })))
    }

    /// Sends what is not sent yet. Blocking, for 5 s at most.
    pub fn close(&self) {
        if let Err(e) = self.provider.shutdown_with_timeout(WITHIN) {
            tracing::debug!(error = %e, "the last traces are lost");
        }
    }
}

/// An endpoint is where paths for all kinds of data begin, unless it has one.
fn endpoint(url: &str) -> Result<String, TracesError> {
    let uri: hyper::Uri = url.parse().map_err(|_| TracesError::NoUrl(url.to_owned()))?;
    let known = matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some();
    if !known {
        return Err(TracesError::NoCollector(url.to_owned()));
    }
    Ok(match uri.path() {
        "" | "/" => format!("{}/{PATH}", url.trim_end_matches('/')),
        _ => url.to_owned(),
    })
}

fn word(tier: Tier) -> &'static str {
    match tier {
        Tier::Hot => "hot",
        Tier::Hibernated => "hibernated",
        Tier::Parked => "parked",
        Tier::Archived => "archived",
    }
}

impl WakeObserver for Traces {
    fn woke(&self, name: &ProcName, wake: &WakeView) {
        let end = SystemTime::now();
        let begin = end - Duration::from_micros(wake.total_us);
        let attributes = vec![
            KeyValue::new("kip.proc", name.to_string()),
            KeyValue::new("kip.tier", word(wake.from)),
            KeyValue::new("kip.trigger", wake.trigger.clone()),
        ];
        let root = self.tracer.span_builder("wake").with_kind(SpanKind::Internal).with_start_time(begin);
        let root = root.with_attributes(attributes).start_with_context(&self.tracer, &Context::new());
        let context = Context::new().with_span(root);
        let mut at = begin;
        for step in &wake.steps {
            let span = self.tracer.span_builder(step.name.clone()).with_start_time(at);
            at += Duration::from_micros(step.us);
            span.start_with_context(&self.tracer, &context).end_with_timestamp(at);
        }
        context.span().end_with_timestamp(end);
    }

    fn failed(&self, name: &ProcName, from: Tier, why: &str) {
        let attributes = vec![KeyValue::new("kip.proc", name.to_string()), KeyValue::new("kip.tier", word(from))];
        let span = self.tracer.span_builder("wake").with_attributes(attributes);
        let mut span = span.start_with_context(&self.tracer, &Context::new());
        span.set_status(Status::error(why.to_owned()));
        span.end();
    }
}

/// The way to the collector. The library asks from a thread of its own, the connection lives in the
/// runtime.
#[derive(Debug)]
struct Wire {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    runtime: Handle,
    /// The last one did not arrive.
    lost: AtomicBool,
}

impl Wire {
    fn new() -> Result<Wire, TracesError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        // A machine that trusts no authority can still send to its own collector.
        let trusted = tls.clone().with_native_roots();
        let tls = trusted.unwrap_or_else(|_| tls.with_root_certificates(rustls::RootCertStore::empty()));
        let tls = tls.with_no_client_auth();
        let connector = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1().build();
        let client = Client::builder(TokioExecutor::new()).build(connector);
        Ok(Wire { client, runtime: Handle::current(), lost: AtomicBool::new(false) })
    }

    async fn exchange(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let client = self.client.clone();
        let (head, body) = request.into_parts();
        let request = hyper::Request::from_parts(head, Full::new(body));
        let exchanged = self.runtime.spawn(async move {
            let response = tokio::time::timeout(WITHIN, client.request(request)).await;
            let response = response.map_err(|_| HttpError::from("it does not answer"))??;
            let (head, body) = response.into_parts();
            Ok::<_, HttpError>(Response::from_parts(head, body.collect().await?.to_bytes()))
        });
        let response = exchanged.await??;
        match response.status().is_success() {
            true => Ok(response),
            false => Err(format!("it answers {}", response.status()).into()),
        }
    }
}

#[async_trait::async_trait]
impl HttpClient for Wire {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let to = request.uri().to_string();
        let response = self.exchange(request).await;
        match &response {
            Err(e) if !self.lost.swap(true, Ordering::Relaxed) => {
                let causes = std::iter::successors(e.source(), |cause| cause.source());
                let why = causes.fold(e.to_string(), |why, cause| format!("{why}: {cause}"));
                // The log has it on one line.
                let why: String = why.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
                tracing::warn!(to, error = why, "traces are lost until the collector takes them again");
            }
            Ok(_) if self.lost.swap(false, Ordering::Relaxed) => tracing::info!(to, "traces arrive again"),
            _ => {}
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_a_url_with_or_without_a_path() {
        assert_eq!(endpoint("http://127.0.0.1:4318").unwrap(), "http://127.0.0.1:4318/v1/traces");
        assert_eq!(endpoint("https://traces.example/").unwrap(), "https://traces.example/v1/traces");
        assert_eq!(endpoint("http://a/otlp/x").unwrap(), "http://a/otlp/x");
        for wrong in ["127.0.0.1:4318", "ftp://a", "", "http://"] {
            assert!(endpoint(wrong).unwrap_err().to_string().starts_with("--traces"), "{wrong}");
        }
    }
}
