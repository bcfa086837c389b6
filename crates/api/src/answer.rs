//! How requests are read and answered: JSON both ways, and every refusal a JSON [`Refusal`] with a
//! matching status.

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::header::CONTENT_LENGTH;
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::{Json, RequestPartsExt};
use kip_types::api::{Code, Refusal, Scope};
use kip_types::name::ProcName;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::sync::atomic::{AtomicU64, Ordering};

/// Most bytes in a request's body. More than the arguments and environment that exec takes: 6 MiB,
/// execve(2).
pub const BODY_MAX: usize = 8 << 20;

/// A refusal on its way to the client.
#[derive(Debug)]
pub struct RefusalAnswer(pub Refusal, StatusCode);

/// What a handler returns.
pub type Answer<T> = Result<T, RefusalAnswer>;

impl RefusalAnswer {
    /// The request cannot be understood.
    pub fn invalid(message: impl Into<String>) -> RefusalAnswer {
        Refusal::new(Code::Invalid, message).into()
    }

    /// The same with what to do about it.
    pub fn with_hint(self, hint: &str) -> RefusalAnswer {
        RefusalAnswer(self.0.with_hint(hint), self.1)
    }

    /// The same with another status.
    pub fn with_status(self, status: StatusCode) -> RefusalAnswer {
        RefusalAnswer(self.0, status)
    }
}

impl From<Refusal> for RefusalAnswer {
    fn from(refusal: Refusal) -> RefusalAnswer {
        let status = status(refusal.code);
        RefusalAnswer(refusal, status)
    }
}

impl IntoResponse for RefusalAnswer {
    fn into_response(self) -> Response {
        (self.1, Json(self.0)).into_response()
    }
}

fn status(code: Code) -> StatusCode {
    match code {
        Code::Invalid => StatusCode::BAD_REQUEST,
        Code::Unauthorized => StatusCode::UNAUTHORIZED,
        Code::Forbidden => StatusCode::FORBIDDEN,
        Code::Unknown | Code::NoRoute => StatusCode::NOT_FOUND,
        Code::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        Code::Taken | Code::State => StatusCode::CONFLICT,
        Code::CannotSleep => StatusCode::UNPROCESSABLE_ENTITY,
        Code::Exhausted => StatusCode::SERVICE_UNAVAILABLE,
        Code::Failed => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// Header that names a request in answers and in the daemon's log.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longest one that is taken from a client, bytes.
const REQUEST_ID_MAX: usize = 64;

/// Gives every answer the id that its request came with, or one of its own, and logs both at level
/// debug.
pub async fn with_request_id(request: Request, next: Next) -> Response {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let fits = |id: &&HeaderValue| id.len() <= REQUEST_ID_MAX && id.as_bytes().iter().all(u8::is_ascii_graphic);
    let id = request.headers().get(REQUEST_ID).filter(fits).cloned().unwrap_or_else(|| {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        HeaderValue::from_str(&format!("{}-{number}", std::process::id())).expect("digits are a header's value")
    });
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let mut response = next.run(request).await;
    tracing::debug!(id = ?id, %method, path, status = response.status().as_u16(), "answered");
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// A body as it is.
pub struct BodyBytes(pub Bytes);

impl<S: Send + Sync> FromRequest<S> for BodyBytes {
    type Rejection = RefusalAnswer;

    async fn from_request(request: Request, state: &S) -> Answer<Self> {
        // Before a byte of it is asked for: a client that waits for leave to send it hears at once.
        let length = request.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
        if length.is_some_and(|bytes| bytes > BODY_MAX) {
            return Err(Refusal::new(Code::TooLarge, "the request's body is longer than 8 MiB").into());
        }
        let body = Bytes::from_request(request, state).await.map_err(|e| match e.status() {
            StatusCode::PAYLOAD_TOO_LARGE => {
                Refusal::new(Code::TooLarge, "the request's body is longer than 8 MiB").into()
            }
            _ => RefusalAnswer::invalid(format!("the request's body cannot be read: {}", e.body_text())),
        })?;
        Ok(BodyBytes(body))
    }
}

/// A JSON body, whatever its content type says. An empty one is `{}`.
pub struct Asked<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Asked<T> {
    type Rejection = RefusalAnswer;

    async fn from_request(request: Request, state: &S) -> Answer<Self> {
        let BodyBytes(body) = BodyBytes::from_request(request, state).await?;
        let body: &[u8] = if body.is_empty() { b"{}" } else { &body };
        Ok(Asked(read(body)?))
    }
}

/// Reads JSON and refuses fields that no type here has: a limit with its name misspelt would be no
/// limit. The types themselves pass it over, for records on disk have them too, and may be those of
/// a newer Kip.
fn read<T: DeserializeOwned>(body: &[u8]) -> Answer<T> {
    let wrong =
        |e: serde_json::Error| RefusalAnswer::invalid(format!("the request's body is not what it should be: {e}"));
    let mut unknown = Vec::new();
    let mut json = serde_json::Deserializer::from_slice(body);
    let asked = serde_ignored::deserialize(&mut json, |path| unknown.push(path.to_string())).map_err(wrong)?;
    json.end().map_err(wrong)?;
    check_numbers(&serde_json::from_slice(body).map_err(wrong)?)?;
    match unknown.as_slice() {
        [] => Ok(asked),
        [one] => Err(RefusalAnswer::invalid(format!("the request's body has an unknown field: {one}"))),
        many => Err(RefusalAnswer::invalid(format!("the request's body has unknown fields: {}", many.join(", ")))),
    }
}

/// Refuses integers beyond what the document allows at most: sums with them would leave it, too.
fn check_numbers(value: &Value) -> Answer<()> {
    match value {
        Value::Number(number) if number.as_u64().is_some_and(|number| i64::try_from(number).is_err()) => {
            Err(RefusalAnswer::invalid(format!(
                "the request's body has the number {number}: at most {} is possible",
                i64::MAX
            )))
        }
        Value::Array(values) => values.iter().try_for_each(check_numbers),
        Value::Object(fields) => fields.values().try_for_each(check_numbers),
        _ => Ok(()),
    }
}

/// The query string.
pub struct AskedQuery<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for AskedQuery<T> {
    type Rejection = RefusalAnswer;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Answer<Self> {
        let Query(asked) = Query::try_from_uri(&parts.uri).map_err(|e| {
            RefusalAnswer::invalid(format!("the request's query is not what it should be: {}", e.body_text()))
        })?;
        Ok(AskedQuery(asked))
    }
}

/// What the client is allowed: by TCP what its token allows, on the unix socket everything.
pub struct CallerScope(pub Scope);

impl CallerScope {
    /// Refuses a client that may only read: values of environments are what a secret often is in.
    pub fn may_see_values(&self) -> Answer<()> {
        self.may_see("environments")
    }

    /// Refuses a client that may only read: secrets are in files, too.
    pub fn may_see_files(&self) -> Answer<()> {
        self.may_see("files")
    }

    fn may_see(&self, what: &str) -> Answer<()> {
        match self.0 {
            Scope::Write => Ok(()),
            Scope::Read => Err(Refusal::new(Code::Forbidden, format!("this token does not allow to see {what}"))
                .with_hint("`kip token create --scope write` on the daemon's machine makes one that does")
                .into()),
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for CallerScope {
    type Rejection = RefusalAnswer;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Answer<Self> {
        Ok(CallerScope(parts.extensions.get::<Scope>().copied().unwrap_or(Scope::Write)))
    }
}

/// The proc in the path.
pub struct Name(pub ProcName);

impl<S: Send + Sync> FromRequestParts<S> for Name {
    type Rejection = RefusalAnswer;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Answer<Self> {
        let Path(name) = parts.extract::<Path<String>>().await.map_err(|e| {
            RefusalAnswer::invalid(format!("the request's path is not what it should be: {}", e.body_text()))
        })?;
        name.parse().map(Name).map_err(|e| RefusalAnswer::invalid(format!("{e}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_types::api::{CheckRequest, ExecRequest, RunRequest, ValidateRequest};

    fn refused<T: DeserializeOwned>(json: &str) -> String {
        match read::<T>(json.as_bytes()) {
            Ok(_) => panic!("{json} is taken"),
            Err(refused) => refused.0.message,
        }
    }

    #[test]
    fn an_unread_field_is_refused_by_its_path() {
        let port = r#"{"proto":"tcp","port":80,"hostport":8080}"#;
        for (field, path) in [
            (r#""limits":{"memory":1048576}"#, "spec.limits.memory"),
            (r#""timing":{"idle":5}"#, "spec.timing.idle"),
            (r#""hooks":{"before":"x"}"#, "spec.hooks.before"),
            (&format!(r#""ports":[{port}]"#), "spec.ports.0.hostport"),
            (r#""cmd":["x"]"#, "spec.cmd"),
        ] {
            let run = format!(r#"{{"spec":{{"name":"a","command":["x"],{field}}}}}"#);
            assert_eq!(refused::<RunRequest>(&run), format!("the request's body has an unknown field: {path}"));
            assert!(refused::<ValidateRequest>(&run).ends_with(&format!(": {path}")), "{path}");
            let check = format!(r#"{{"to":"parked","run":{run}}}"#);
            assert!(refused::<CheckRequest>(&check).ends_with(&format!(" run.{path}")), "{path}");
        }
        assert!(
            refused::<ValidateRequest>(r#"{"spec":{"name":"a","command":["x"]},"instead":[]}"#).ends_with(": instead")
        );
        let two = r#"{"spec":{"name":"a","command":["x"],"c":1},"b":2}"#;
        assert_eq!(refused::<RunRequest>(two), "the request's body has unknown fields: spec.c, b");
        assert!(refused::<ExecRequest>(r#"{"command":["x"],"tty":true}"#).ends_with(": tty"));
        assert!(refused::<ExecRequest>(r#"{"command":["x"]} {}"#).contains("trailing"));
        let most = r#"{"spec":{"name":"a","command":["x"],"timing":{"idle_ms":9223372036854775807}}}"#;
        assert!(read::<RunRequest>(most.as_bytes()).is_ok());
        assert!(refused::<RunRequest>(&most.replace("807", "808")).contains("at most 9223372036854775807"));
        assert!(read::<ExecRequest>(br#"{"command":["x"],"env":{"tty":"/"}}"#).is_ok());
    }
}
