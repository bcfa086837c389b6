//! `kip events`.

use crate::filter::{self, KeyFilter};
use crate::follow;
use crate::names;
use clap::Args;
use kip_client::Client;
use kip_text::when;
use kip_types::api::{Event, EventsRequest};

/// Keys of `--filter`.
const KEYS: [&str; 4] = ["kind", "event", "name", "container"];

#[derive(Debug, Args)]
pub struct EventsArgs {
    /// Follow new events; a lost connection is made again and no event is missed
    #[arg(short, long)]
    pub follow: bool,
    /// Only events since: a duration back from now as 1h, a time as 2026-11-27T09:30:00Z, or the id
    /// of an event, which --json shows
    #[arg(long, value_name = "TIME|ID", value_parser = parse_since)]
    pub since: Option<EventsSince>,
    /// Only events until this TIME, as for --since
    #[arg(long, value_name = "TIME", value_parser = when::parse, conflicts_with = "follow")]
    pub until: Option<u64>,
    /// Only events that match: kind, name; may be repeated
    #[arg(long = "filter", value_name = "KEY=VALUE", value_parser = |text: &str| filter::parse(text, &KEYS))]
    pub filters: Vec<KeyFilter>,
    /// Only events of these procs
    #[arg(add = names::known(), value_name = "NAME")]
    pub names: Vec<String>,
}

/// Where to begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventsSince {
    /// After the event with this id.
    Id(u64),
    /// At this time, milliseconds since the epoch.
    AtMs(u64),
}

fn parse_since(text: &str) -> Result<EventsSince, String> {
    match text.parse() {
        Ok(id) => Ok(EventsSince::Id(id)),
        Err(_) => when::parse(text).map(EventsSince::AtMs),
    }
}

impl EventsArgs {
    fn shows(&self, event: &Event) -> bool {
        let is = |key: &str, value: &str| match key {
            "kind" | "event" => event.kind.as_ref() == value,
            _ => event.name.as_ref().is_some_and(|name| name.as_str() == value),
        };
        let named = |name: &String| is("name", name);
        let early = matches!(self.since, Some(EventsSince::AtMs(since)) if event.at_ms < since);
        let late = self.until.is_some_and(|until| event.at_ms > until);
        !early && !late && (self.names.is_empty() || self.names.iter().any(named)) && filter::passes(&self.filters, is)
    }
}

/// Asks and shows.
pub async fn events(client: &Client, args: &EventsArgs, json: bool) -> anyhow::Result<()> {
    let since = match args.since {
        Some(EventsSince::Id(id)) => Some(id),
        _ => None,
    };
    follow::events(client, EventsRequest { follow: args.follow, since }, json, |event| args.shows(event)).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use kip_text::now_ms;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        args: EventsArgs,
    }

    fn shown(words: &str) -> Vec<u64> {
        let args = Only::parse_from(std::iter::once("events").chain(words.split_whitespace())).args;
        let hour = 3_600_000;
        let event = |id, name: Option<&str>, kind: &str, ago_ms| Event {
            id,
            at_ms: now_ms() - ago_ms,
            name: name.map(|name| name.parse().unwrap()),
            kind: kind.parse().unwrap(),
            detail: String::new(),
        };
        let all = [
            event(1, Some("web"), "parked", 3 * hour),
            event(2, Some("web"), "woken", 2 * hour),
            event(3, None, "ready", 60_000),
            event(4, Some("db"), "parked", 1000),
        ];
        all.iter().filter(|event| args.shows(event)).map(|event| event.id).collect()
    }

    #[test]
    fn events_are_chosen_by_time_kind_and_name() {
        for (words, ids) in [
            ("", &[1, 2, 3, 4][..]),
            ("--since 150m", &[2, 3, 4]),
            ("--until 1h", &[1, 2]),
            ("--since 150m --until 30m", &[2]),
            ("--filter kind=parked", &[1, 4]),
            ("--filter kind=parked --filter name=db", &[4]),
            ("--filter event=woken --filter kind=woken", &[2]),
            ("--filter name=web --filter name=db", &[1, 2, 4]),
            ("db", &[4]),
            ("--filter kind=ready", &[3]),
        ] {
            assert_eq!(shown(words), ids, "{words}");
        }
    }

    #[test]
    fn a_number_is_an_id() {
        assert_eq!(parse_since("1764236000000000"), Ok(EventsSince::Id(1_764_236_000_000_000)));
        assert_eq!(parse_since("1970-01-01T00:00:01Z"), Ok(EventsSince::AtMs(1000)));
    }
}
