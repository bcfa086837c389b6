//! Files of the procs.

use super::*;
use kip_service::FileService;

/// A path that ends with `none` leads nowhere; what is written is only counted.
#[async_trait]
impl FileService for Fake {
    async fn read_files(&self, name: ProcName, request: ReadFilesRequest) -> Result<Feed<Vec<u8>>, Refusal> {
        self.inspect(name).await?;
        if request.path.ends_with("none") {
            return Err(Refusal::new(Code::Unknown, format!("there is no {}", request.path)));
        }
        let (sender, feed) = mpsc::channel(2);
        tokio::spawn(async move {
            let _ = sender.send(Ok(request.path.into_bytes())).await;
            if request.follow {
                let _ = sender.send(Err(Refusal::new(Code::State, "it ended"))).await;
            }
        });
        Ok(feed)
    }

    async fn write_files(
        &self,
        name: ProcName,
        request: WriteFilesRequest,
        mut archive: Feed<Vec<u8>>,
    ) -> Result<FilesWritten, Refusal> {
        self.inspect(name).await?;
        self.hear(&request);
        let mut written = FilesWritten::default();
        while let Some(piece) = archive.recv().await {
            written.bytes += piece?.len() as u64;
        }
        Ok(written)
    }
}
