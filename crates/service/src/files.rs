//! Files of procs.

use crate::Feed;
use async_trait::async_trait;
use kip_types::api::{FilesWritten, ReadFilesRequest, Refusal, WriteFilesRequest};
use kip_types::name::ProcName;

/// Files of procs, copied as tar archives without a wake.
#[async_trait]
pub trait FileService: Send + Sync + 'static {
    /// What is at a path, as pieces of an archive. What cannot be copied at all is refused before
    /// the first piece; an archive that ends with an error is not complete.
    async fn read_files(&self, name: ProcName, request: ReadFilesRequest) -> Result<Feed<Vec<u8>>, Refusal>;

    /// Puts what is in an archive, which comes in pieces, at a path. An error among the pieces is
    /// the end of the client. What came before something that is refused stays.
    async fn write_files(
        &self,
        name: ProcName,
        request: WriteFilesRequest,
        archive: Feed<Vec<u8>>,
    ) -> Result<FilesWritten, Refusal>;
}
