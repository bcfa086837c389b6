//! `kip wait`: until procs end, or until they are ready.

use crate::many;
use crate::names;
use crate::output::show;
use anyhow::bail;
use clap::Args;
use kip_client::Client;
use kip_text as text;
use kip_types::api::{EventsRequest, ProcView};
use kip_types::spec::parse_duration_ms;
use kip_types::{ProcName, StateName};
use serde::Serialize;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Between looks whether a proc is ready.
const POLL_EVERY: Duration = Duration::from_millis(50);
/// For how long a proc may take to become ready by default, milliseconds.
const READY_WITHIN_MS: u64 = 60_000;

#[derive(Debug, Args)]
pub struct WaitArgs {
    /// Names of procs
    #[arg(add = names::known(), required = true, value_name = "NAME")]
    pub names: Vec<String>,
    /// Wait until the proc is ready instead of until it ends; a proc without --ready is ready when
    /// it runs
    #[arg(long)]
    pub ready: bool,
    /// Longest wait per proc; default 60s with --ready, else none
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms)]
    pub timeout: Option<u64>,
}

/// A proc that has ended.
#[derive(Debug, Serialize)]
struct Ended<'a> {
    name: &'a ProcName,
    /// As `kip inspect` has it.
    exit: &'a str,
    /// 128 and the number of a signal that ended it; null if it is not known.
    exit_code: Option<i32>,
}

/// Waits for each, and says what it is then.
pub async fn wait(client: &Client, args: &WaitArgs, json: bool) -> anyhow::Result<ExitCode> {
    many::each(&args.names, async |name| {
        if args.ready {
            let view = until_ready(client, name, args.timeout.unwrap_or(READY_WITHIN_MS)).await?;
            return show(&view, json, |view| match view.ready {
                Some(_) => format!("{} is ready\n", view.name),
                None => format!("{} is {}\n", view.name, view.state),
            });
        }
        let ended = until_ended(client, name);
        let view = match args.timeout {
            None => ended.await?,
            Some(ms) => match tokio::time::timeout(Duration::from_millis(ms), ended).await {
                Ok(view) => view?,
                Err(_) => bail!("{name} has not ended within {}", text::millis(ms)),
            },
        };
        let ended = Ended { name, exit: view.exit.as_deref().unwrap_or("unknown"), exit_code: view.exit_code };
        show(&ended, json, |ended| match ended.exit_code {
            Some(code) => format!("{code}\n"),
            None => format!("{}\n", ended.exit),
        })
    })
    .await
}

/// Between inspections of a proc whose end is awaited, whatever events say.
const INSPECT_EVERY: Duration = Duration::from_secs(1);

/// Until it is stopped. One that is started again by its restart policy has not ended. Nothing of
/// it wakes the proc.
async fn until_ended(client: &Client, name: &ProcName) -> anyhow::Result<ProcView> {
    // Before the first look, so that no end comes between that and the events. None that are kept:
    // only what comes.
    let mut events = client.events(&EventsRequest { follow: true, since: Some(u64::MAX) }).await?;
    loop {
        let view = client.inspect(name).await?;
        match view.state {
            StateName::Stopped => return Ok(view),
            StateName::Elsewhere => bail!("{name} is elsewhere: it does not end here"),
            _ => {}
        }
        // An event may come before what it tells of can be seen, or be lost among many.
        let inspect_again = tokio::time::sleep(INSPECT_EVERY);
        tokio::pin!(inspect_again);
        loop {
            let event = tokio::select! {
                event = events.next() => event?,
                () = &mut inspect_again => break,
            };
            match event {
                None => bail!("the daemon has ended, and with it the wait for {name}"),
                Some(event) if event.name.as_ref() == Some(name) => break,
                Some(_) => {}
            }
        }
    }
}

/// Until it is ready, or, without a check of its own, runs. Looks as often as it takes; nothing of
/// it wakes the proc.
pub async fn until_ready(client: &Client, name: &ProcName, within_ms: u64) -> anyhow::Result<ProcView> {
    let until = Instant::now() + Duration::from_millis(within_ms);
    loop {
        let view = client.inspect(name).await?;
        match (view.ready, view.state) {
            (Some(true), _) => return Ok(view),
            (None, state) if state != StateName::Starting && view.tier.is_some() => return Ok(view),
            (_, StateName::Stopped | StateName::Elsewhere) => {
                bail!("{name} is {}: it does not become ready", view.state)
            }
            _ if Instant::now() >= until => {
                bail!("{name} is {} and was not ready within {}", view.state, text::millis(within_ms))
            }
            _ => tokio::time::sleep(POLL_EVERY).await,
        }
    }
}
