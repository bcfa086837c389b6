//! The calls of `kip image`.

use crate::client::{Client, json, parse};
use crate::connect::collect;
use crate::error::CallError;
use crate::feed::AnswerFeed;
use hyper::Method;
use hyper::body::Bytes;
use kip_types::image::{ImageDetails, ImageView, ImagesCollectRequest, ImagesRemoved, PullProgress, PullRequest};

impl Client {
    /// Images that are here, by name.
    pub async fn images(&self) -> Result<Vec<ImageView>, CallError> {
        self.get("/v1/images").await
    }

    /// One image.
    pub async fn image(&self, reference: &str) -> Result<ImageDetails, CallError> {
        self.get(&format!("/v1/images/inspect?reference={}", escaped(reference))).await
    }

    /// Brings an image. The last item is [`PullProgress::End`]; to drop the feed ends the pull.
    pub async fn pull_image(&self, request: &PullRequest) -> Result<AnswerFeed<PullProgress>, CallError> {
        Ok(AnswerFeed::new(self.send(Method::POST, "/v1/images/pull", json(request)).await?))
    }

    /// Removes an image.
    pub async fn remove_image(&self, reference: &str) -> Result<ImagesRemoved, CallError> {
        let path = format!("/v1/images?reference={}", escaped(reference));
        parse(&collect(self.send(Method::DELETE, &path, Bytes::new()).await?).await?)
    }

    /// Removes what no image and no proc needs.
    pub async fn collect_images(&self, request: &ImagesCollectRequest) -> Result<ImagesRemoved, CallError> {
        self.post("/v1/images/collect", request).await
    }
}

/// As a value of a query: it may be anything that a person wrote.
fn escaped(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~/:@".contains(&b);
    text.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anything_is_a_value() {
        assert_eq!(escaped("a/b:1@sha256:0"), "a/b:1@sha256:0");
        assert_eq!(escaped("a b&c=\u{e4}+%"), "a%20b%26c%3D%C3%A4%2B%25");
    }
}
