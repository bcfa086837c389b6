//! The routes of `kip token`.

use crate::answer::{Answer, Asked};
use crate::describe::{Routes, doc};
use crate::state::Api;
use crate::tokens::Tokens;
use axum::Json;
use axum::extract::{Path as InPath, State};
use axum::http::StatusCode;
use kip_types::api::{Code, NewToken, Refusal, TokenRequest, TokenView};
use std::sync::Arc;

/// The routes below `/v1/tokens`.
pub fn routes(routes: Routes) -> Routes {
    routes
        .get(
            "/v1/tokens",
            list,
            doc("listTokens", "Tokens, by name. On the unix socket only.").json::<Vec<TokenView>>(),
        )
        .post(
            "/v1/tokens",
            create,
            doc("createToken", "Makes a token, which is shown this once. On the unix socket only.")
                .body::<TokenRequest>()
                .json_with::<NewToken>(201),
        )
        .delete(
            "/v1/tokens/{name}",
            remove,
            doc("removeToken", "Removes a token: clients with it are refused from now on. On the unix socket only."),
        )
}

async fn list(State(api): State<Api>) -> Answer<Json<Vec<TokenView>>> {
    Ok(Json(api.tokens.list()))
}

async fn create(State(api): State<Api>, Asked(request): Asked<TokenRequest>) -> Answer<(StatusCode, Json<NewToken>)> {
    let made = blocking(&api, move |tokens| tokens.create(request)).await?;
    Ok((StatusCode::CREATED, Json(made)))
}

async fn remove(State(api): State<Api>, InPath(name): InPath<String>) -> Answer<StatusCode> {
    let name = name.parse().map_err(|_| Refusal::new(Code::Unknown, format!("there is no token {name:?}")))?;
    blocking(&api, move |tokens| tokens.remove(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Files are synced on a thread that may wait.
async fn blocking<T: Send + 'static>(
    api: &Api,
    work: impl FnOnce(&Tokens) -> Result<T, Refusal> + Send + 'static,
) -> Answer<T> {
    let tokens: Arc<Tokens> = api.tokens.clone();
    api.operate(async move {
        let done = tokio::task::spawn_blocking(move || work(&tokens)).await;
        done.unwrap_or_else(|e| Err(Refusal::new(Code::Failed, format!("the change of tokens died: {e}"))))
    })
    .await
}
