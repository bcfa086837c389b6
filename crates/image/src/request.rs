//! What is asked of a pull, and where it may block.

use kip_types::image::ImageSource;

/// What is to be pulled.
#[derive(Debug, Clone)]
pub struct PullOrder {
    /// From where. Paths are absolute.
    pub source: ImageSource,
    /// By what it is called here; none for its own name.
    pub name: Option<String>,
    /// User and password.
    pub login: Option<(String, String)>,
    /// Without TLS, wherever the registry is.
    pub plain_http: bool,
    /// Certificates, PEM, of authorities that are trusted to vouch for a registry, beside those of
    /// the machine.
    pub ca_pem: Option<String>,
}

/// Runs it where it may block.
pub(crate) async fn blocking<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(f).await {
        Ok(done) => done,
        Err(e) => std::panic::resume_unwind(e.into_panic()),
    }
}
