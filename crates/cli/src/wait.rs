//! `kip wait`: until a proc is ready.

use crate::names::{self, name};
use crate::output::show;
use crate::text;
use anyhow::bail;
use clap::Args;
use kip_client::Client;
use kip_types::StateName;
use kip_types::api::ProcView;
use kip_types::name::ProcName;
use kip_types::spec::parse_duration_ms;
use std::time::{Duration, Instant};

/// Between looks whether a proc is ready.
const POLL_EVERY: Duration = Duration::from_millis(50);

#[derive(Debug, Args)]
pub struct WaitArgs {
    /// Name of the proc
    #[arg(add = names::known())]
    pub name: String,
    /// Until it is ready; without a check of its own, until it runs
    #[arg(long, required = true)]
    pub ready: bool,
    /// For how long at most
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms, default_value = "60s")]
    pub timeout: u64,
}

/// Waits, and says what the proc is then.
pub async fn wait_ready(client: &Client, args: &WaitArgs, json: bool) -> anyhow::Result<()> {
    let view = until_ready(client, &name(&args.name)?, args.timeout).await?;
    show(&view, json, |view| match view.ready {
        Some(_) => format!("{} is ready\n", view.name),
        None => format!("{} is {}\n", view.name, view.state),
    })
}

/// Until it is ready, or, without a check of its own, runs. Looks as often as it takes; nothing of it wakes the proc.
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
