//! How requests are read and answered: JSON both ways, and every refusal a JSON [`Refusal`] with a matching status.

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use axum::{Json, RequestPartsExt};
use kip_types::api::{Code, Refusal};
use kip_types::name::ProcName;
use serde::de::DeserializeOwned;

/// A refusal on its way to the client.
#[derive(Debug)]
pub struct Refused(pub Refusal, StatusCode);

/// What a handler returns.
pub type Answer<T> = Result<T, Refused>;

impl Refused {
    /// The request cannot be understood.
    pub fn invalid(message: impl Into<String>) -> Refused {
        Refusal::new(Code::Invalid, message).into()
    }

    /// The same with another status.
    pub fn with_status(self, status: StatusCode) -> Refused {
        Refused(self.0, status)
    }
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Refused {
        let status = status(refusal.code);
        Refused(refusal, status)
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        (self.1, Json(self.0)).into_response()
    }
}

fn status(code: Code) -> StatusCode {
    match code {
        Code::Invalid => StatusCode::BAD_REQUEST,
        Code::Unknown => StatusCode::NOT_FOUND,
        Code::Taken | Code::State => StatusCode::CONFLICT,
        Code::CannotSleep => StatusCode::UNPROCESSABLE_ENTITY,
        Code::Exhausted => StatusCode::SERVICE_UNAVAILABLE,
        Code::Failed => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// A JSON body, whatever its content type says. An empty one is `{}`.
pub struct Asked<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Asked<T> {
    type Rejection = Refused;

    async fn from_request(request: Request, state: &S) -> Answer<Self> {
        let body = Bytes::from_request(request, state)
            .await
            .map_err(|e| Refused::invalid(format!("the request's body cannot be read: {}", e.body_text())))?;
        let body: &[u8] = if body.is_empty() { b"{}" } else { &body };
        let asked = serde_json::from_slice(body)
            .map_err(|e| Refused::invalid(format!("the request's body is not what it should be: {e}")))?;
        Ok(Asked(asked))
    }
}

/// The query string.
pub struct AskedQuery<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for AskedQuery<T> {
    type Rejection = Refused;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Answer<Self> {
        let Query(asked) = Query::try_from_uri(&parts.uri).map_err(|e| {
            Refused::invalid(format!("the request's query is not what it should be: {}", e.body_text()))
        })?;
        Ok(AskedQuery(asked))
    }
}

/// The proc in the path.
pub struct Name(pub ProcName);

impl<S: Send + Sync> FromRequestParts<S> for Name {
    type Rejection = Refused;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Answer<Self> {
        let Path(name) = parts
            .extract::<Path<String>>()
            .await
            .map_err(|e| Refused::invalid(format!("the request's path is not what it should be: {}", e.body_text())))?;
        name.parse().map(Name).map_err(|e| Refused::invalid(format!("{e}")))
    }
}
