//! Routes of meters and metrics.

use crate::answer::{Answer, AskedQuery, Name};
use crate::describe::{Routes, doc};
use crate::state::Api;
use axum::Json;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use kip_types::api::{MeterRequest, MeterView};

/// What Prometheus calls its text format.
const EXPOSITION: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The routes of meters and metrics.
pub fn routes(routes: Routes) -> Routes {
    let one = doc("readMeter", "What a proc has used, by tier. Does not wake it.");
    let all = doc("readMeters", "What all procs have used, by tier, sorted by name. Wakes none.");
    let numbers = doc("readMetrics", "Metrics, in Prometheus' text format; docs/metrics.md lists them. Wakes none.");
    routes
        .get("/v1/procs/{name}/meter", meter, one.query::<MeterRequest>().json::<MeterView>())
        .get("/v1/meters", meters, all.query::<MeterRequest>().json::<Vec<MeterView>>())
        .get("/metrics", metrics, numbers.text("text/plain"))
}

async fn metrics(State(api): State<Api>) -> Answer<impl IntoResponse> {
    Ok(([(CONTENT_TYPE, EXPOSITION)], api.service.metrics().await?))
}

async fn meter(
    State(api): State<Api>,
    Name(name): Name,
    AskedQuery(asked): AskedQuery<MeterRequest>,
) -> Answer<Json<MeterView>> {
    Ok(Json(api.service.meter(name, asked.since_ms).await?))
}

async fn meters(State(api): State<Api>, AskedQuery(asked): AskedQuery<MeterRequest>) -> Answer<Json<Vec<MeterView>>> {
    Ok(Json(api.service.meters(asked.since_ms).await?))
}
