//! The dashboard: one page over this API, of our own files only. Any client gets the files; what
//! they show needs a token, so by TCP the page asks for a token and sends it with each of its
//! requests, in a header and nowhere else.

use crate::answer::Answer;
use crate::describe::{Routes, doc};
use crate::state::Api;
use axum::extract::State;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Json, Router};
use kip_types::api::HistoryView;

/// Nothing from elsewhere, nothing inline, and no page may frame it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
const FILES: [(&str, &str, &str); 3] = [
    ("/", "text/html; charset=utf-8", include_str!("dashboard/index.html")),
    ("/dashboard.js", "text/javascript; charset=utf-8", include_str!("dashboard/dashboard.js")),
    ("/dashboard.css", "text/css; charset=utf-8", include_str!("dashboard/dashboard.css")),
];

/// Whether a client without a token may have it.
pub fn is_public(path: &str) -> bool {
    FILES.iter().any(|(public, ..)| *public == path)
}

/// Adds the page's files.
pub fn files<S: Send + Sync + Clone + 'static>(router: Router<S>) -> Router<S> {
    FILES.into_iter().fold(router, |router, (path, content, text)| {
        let headers = [
            (CONTENT_TYPE, content),
            (CONTENT_SECURITY_POLICY, POLICY),
            (X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (X_FRAME_OPTIONS, "DENY"),
            (CACHE_CONTROL, "no-cache"),
        ];
        router.route(path, get(move || async move { (headers, text).into_response() }))
    })
}

/// The route of what it draws.
pub fn routes(routes: Routes) -> Routes {
    let lately = doc("readHistory", "How procs were spread over the tiers in the last hour. Wakes none.");
    routes.get("/v1/history", history, lately.json::<HistoryView>())
}

async fn history(State(api): State<Api>) -> Answer<Json<HistoryView>> {
    Ok(Json(api.service.history().await?))
}
