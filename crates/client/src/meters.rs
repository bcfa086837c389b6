//! The calls of `kip meter` and `kip metrics`.

use crate::client::{Client, with_query};
use crate::connect::collect;
use crate::error::CallError;
use hyper::Method;
use hyper::body::Bytes;
use kip_types::ProcName;
use kip_types::api::{MeterRequest, MeterView};

impl Client {
    /// What a proc has used.
    pub async fn meter(&self, name: &ProcName, which: &MeterRequest) -> Result<MeterView, CallError> {
        self.get(&with_query(&format!("/v1/procs/{name}/meter"), which)).await
    }

    /// Metrics, in Prometheus' text format.
    pub async fn metrics(&self) -> Result<String, CallError> {
        let body = collect(self.send(Method::GET, "/metrics", Bytes::new()).await?).await?;
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    /// What all procs have used, sorted by name.
    pub async fn meters(&self, which: &MeterRequest) -> Result<Vec<MeterView>, CallError> {
        self.get(&with_query("/v1/meters", which)).await
    }
}
