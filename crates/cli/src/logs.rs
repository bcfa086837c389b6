//! `kip logs`.

use crate::follow;
use crate::names::{self, name};
use clap::Args;
use kip_client::{AnswerFeed, Client};
use kip_text::when;
use kip_text::{now_ms, utc};
use kip_types::api::{LogLine, LogsRequest};
use std::collections::VecDeque;

#[derive(Debug, Args)]
pub struct LogsArgs {
    /// Name of the proc
    #[arg(add = names::known())]
    pub name: String,
    /// Follow new lines
    #[arg(short, long)]
    pub follow: bool,
    /// Number of newest lines, or all
    #[arg(short = 'n', long, value_name = "N", value_parser = parse_tail)]
    pub tail: Option<Tail>,
    /// Only lines written since: a duration back from now, or a time as 2026-11-27T09:30:00Z
    #[arg(long, value_name = "TIME", value_parser = when::parse)]
    pub since: Option<u64>,
    /// Only lines written until this TIME, as for --since
    #[arg(long, value_name = "TIME", value_parser = when::parse, conflicts_with = "follow")]
    pub until: Option<u64>,
    /// Begin each line with its time
    #[arg(short, long)]
    pub timestamps: bool,
}

/// How many of the newest lines; none for all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tail(pub Option<u64>);

fn parse_tail(text: &str) -> Result<Tail, String> {
    match text {
        "all" => Ok(Tail(None)),
        _ => text.parse().map(|lines| Tail(Some(lines))).map_err(|_| "write a number of lines, or all".to_owned()),
    }
}

/// Asks and shows.
pub async fn logs(client: &Client, args: &LogsArgs, json: bool) -> anyhow::Result<()> {
    let tail = args.tail.and_then(|tail| tail.0);
    // A time to come is no end.
    let until = args.until.filter(|until| *until < now_ms());
    // The newest lines until then are known only here.
    let which = LogsRequest { follow: args.follow, tail: tail.filter(|_| until.is_none()), since_ms: args.since };
    let feed = client.logs(&name(&args.name)?, &which).await?;
    let timestamps = args.timestamps;
    let human = move |line: &LogLine| match timestamps {
        true => format!("{} {}\n", utc(line.at_ms), line.text),
        false => format!("{}\n", line.text),
    };
    match until {
        None => follow::show(feed, json, human).await,
        Some(until) => {
            for line in lines_until(feed, until, tail).await? {
                follow::one(&line, json, human)?;
            }
            Ok(())
        }
    }
}

/// The lines that were written until then, the newest of them.
async fn lines_until(
    mut feed: AnswerFeed<LogLine>,
    until_ms: u64,
    tail: Option<u64>,
) -> anyhow::Result<VecDeque<LogLine>> {
    let most = tail.and_then(|lines| usize::try_from(lines).ok()).unwrap_or(usize::MAX);
    let mut lines = VecDeque::new();
    while let Some(line) = feed.next().await? {
        if line.at_ms > until_ms {
            break;
        }
        lines.push_back(line);
        if lines.len() > most {
            lines.pop_front();
        }
    }
    Ok(lines)
}
