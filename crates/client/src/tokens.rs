//! The calls of `kip token`, which are answered on the unix socket only.

use crate::client::Client;
use crate::connect::collect;
use crate::error::CallError;
use hyper::Method;
use hyper::body::Bytes;
use kip_types::api::{NewToken, TokenRequest, TokenView};
use kip_types::name::ProcName;

impl Client {
    /// Tokens, by name.
    pub async fn tokens(&self) -> Result<Vec<TokenView>, CallError> {
        self.get("/v1/tokens").await
    }

    /// Makes a token.
    pub async fn create_token(&self, request: &TokenRequest) -> Result<NewToken, CallError> {
        self.post("/v1/tokens", request).await
    }

    /// Removes a token.
    pub async fn remove_token(&self, name: &ProcName) -> Result<(), CallError> {
        collect(self.send(Method::DELETE, &format!("/v1/tokens/{name}"), Bytes::new()).await?).await?;
        Ok(())
    }
}
