//! Shows a feed until it ends or the user has seen enough.

use crate::output::{print, print_json};
use kip_client::Feed;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Shows each item as it comes. Ctrl-C is an end like any other.
pub async fn show<T: Serialize + DeserializeOwned>(
    mut feed: Feed<T>,
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
            Some(item) if json => print_json(&item)?,
            Some(item) => print(&human(&item))?,
        }
    }
}
