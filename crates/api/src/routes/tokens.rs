//! The routes of `kip token`.

use crate::answer::{Answer, Asked};
use crate::describe::{Routes, doc};
use crate::service::Service;
use crate::state::Api;
use crate::tokens::Tokens;
use axum::Json;
use axum::extract::{Path as InPath, State};
use axum::http::StatusCode;
use kip_types::api::{Code, NewToken, Refusal, TokenRequest, TokenView};
use std::sync::Arc;

/// The routes below `/v1/tokens`.
pub fn routes<S: Service>(routes: Routes<S>) -> Routes<S> {
    routes
        .get(
            "/v1/tokens",
            list::<S>,
            doc("listTokens", "Tokens, by name. On the unix socket only.").json::<Vec<TokenView>>(),
        )
        .post(
            "/v1/tokens",
            create::<S>,
            doc("createToken", "Makes a token, which is shown this once. On the unix socket only.")
                .body::<TokenRequest>()
                .json_with::<NewToken>(201),
        )
        .delete(
            "/v1/tokens/{name}",
            remove::<S>,
            doc("removeToken", "Removes a token: clients with it are refused from now on. On the unix socket only."),
        )
}

async fn list<S: Service>(State(api): State<Api<S>>) -> Answer<Json<Vec<TokenView>>> {
    Ok(Json(api.tokens.list()))
}

async fn create<S: Service>(
    State(api): State<Api<S>>,
    Asked(request): Asked<TokenRequest>,
) -> Answer<(StatusCode, Json<NewToken>)> {
    let made = blocking(&api, move |tokens| tokens.create(request)).await?;
    Ok((StatusCode::CREATED, Json(made)))
}

async fn remove<S: Service>(State(api): State<Api<S>>, InPath(name): InPath<String>) -> Answer<StatusCode> {
    let name = name.parse().map_err(|_| Refusal::new(Code::Unknown, format!("there is no token {name:?}")))?;
    blocking(&api, move |tokens| tokens.remove(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Files are synced on a thread that may wait.
async fn blocking<S: Service, T: Send + 'static>(
    api: &Api<S>,
    work: impl FnOnce(&Tokens) -> Result<T, Refusal> + Send + 'static,
) -> Answer<T> {
    let tokens: Arc<Tokens> = api.tokens.clone();
    api.operate(async move {
        let done = tokio::task::spawn_blocking(move || work(&tokens)).await;
        done.unwrap_or_else(|e| Err(Refusal::new(Code::Failed, format!("the change of tokens died: {e}"))))
    })
    .await
}
