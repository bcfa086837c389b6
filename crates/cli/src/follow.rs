//! Shows a feed until it ends or the user has seen enough.

use crate::output::{print, print_json};
use crate::view;
use kip_client::{AnswerFeed, CallError, Client};
use kip_types::api::{Event, EventsRequest};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::time::{Duration, Instant};

/// For so long a lost connection is made again.
const PATIENCE: Duration = Duration::from_secs(60);

/// Shows each item as it comes. Ctrl-C is an end like any other.
pub async fn show<T: Serialize + DeserializeOwned>(
    mut feed: AnswerFeed<T>,
    json: bool,
    human: impl Fn(&T) -> String,
) -> anyhow::Result<()> {
    let mut enough = std::pin::pin!(tokio::signal::ctrl_c());
    loop {
        let item = tokio::select! {
            biased;
            pressed = &mut enough => return Ok(pressed?),
            item = feed.next() => item?,
        };
        match item {
            None => return Ok(()),
            Some(item) => one(&item, json, &human)?,
        }
    }
}

/// Shows one item.
pub fn one<T: Serialize>(item: &T, json: bool, human: impl Fn(&T) -> String) -> anyhow::Result<()> {
    if json { print_json(item) } else { print(&human(item)) }
}

/// Shows those events that are to be shown. With `--follow` each event is shown once, also over a
/// connection that breaks; the command ends when the daemon does.
pub async fn events(
    client: &Client,
    which: EventsRequest,
    json: bool,
    is_shown: impl Fn(&Event) -> bool,
) -> anyhow::Result<()> {
    let (follows, ask) = (which.follow, async |which: &EventsRequest| client.events(which).await);
    resumed(which, follows, ask, |which, event: Event| {
        which.since = Some(event.id);
        if is_shown(&event) { one(&event, json, view::event) } else { Ok(()) }
    })
    .await
}

/// Takes each item of a feed until the feed ends or the user has seen enough. Where the connection
/// breaks, and it `follows`, it asks again for what `take` has made of the request.
pub async fn resumed<Q, T: DeserializeOwned>(
    mut request: Q,
    follows: bool,
    ask: impl AsyncFn(&Q) -> Result<AnswerFeed<T>, CallError>,
    mut take: impl FnMut(&mut Q, T) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut feed = ask(&request).await?;
    let mut enough = std::pin::pin!(tokio::signal::ctrl_c());
    loop {
        let item = tokio::select! {
            biased;
            pressed = &mut enough => return Ok(pressed?),
            item = feed.next() => item,
        };
        match item {
            Ok(None) => return Ok(()),
            Ok(Some(item)) => take(&mut request, item)?,
            Err(CallError::Lost(_)) if follows => {
                feed = tokio::select! {
                    pressed = &mut enough => return Ok(pressed?),
                    feed = again(async || ask(&request).await) => feed?,
                };
            }
            Err(e) => return Err(e.into()),
        }
    }
}

/// What `ask` asks for, once a daemon answers again.
pub async fn again<T>(ask: impl AsyncFn() -> Result<T, CallError>) -> Result<T, CallError> {
    let until = Instant::now() + PATIENCE;
    loop {
        match ask().await {
            Err(CallError::Lost(_) | CallError::Remote(_) | CallError::NoDaemon { .. }) if Instant::now() < until => {
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            done => return done,
        }
    }
}
