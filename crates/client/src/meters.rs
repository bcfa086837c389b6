//! The calls of `kip meter`.

use crate::{CallError, Client, with_query};
use kip_types::ProcName;
use kip_types::api::{MeterRequest, MeterView};

impl Client {
    /// What a proc has used.
    pub async fn meter(&self, name: &ProcName, which: &MeterRequest) -> Result<MeterView, CallError> {
        self.get(&with_query(&format!("/v1/procs/{name}/meter"), which)).await
    }

    /// What all procs have used, sorted by name.
    pub async fn meters(&self, which: &MeterRequest) -> Result<Vec<MeterView>, CallError> {
        self.get(&with_query("/v1/meters", which)).await
    }
}
