//! `kip snapshot`.

mod view;

use crate::args::SnapshotCommand;
use crate::commands::{name, show};
use crate::output::{print, print_json};
use crate::text::bytes;
use anyhow::Context;
use kip_client::Client;
use kip_types::api::{CollectRequest, ImportRequest, SnapshotName, Verified, VerifyRequest};
use std::io::{IsTerminal as _, Write as _};
use std::path::Path;
use std::process::ExitCode;

/// Carries out `command`.
pub async fn call(client: &Client, command: SnapshotCommand, json: bool) -> anyhow::Result<ExitCode> {
    match command {
        SnapshotCommand::Ls { name: only } => {
            let only = only.as_deref().map(name).transpose()?;
            show(&client.snapshots(only).await?, json, |views| view::ls(views))?;
        }
        SnapshotCommand::Show { which } => show(&client.snapshot(&which.parse()?).await?, json, view::details)?,
        SnapshotCommand::Verify { which, all } => {
            let which = which.map(|text| text.parse::<SnapshotName>()).transpose()?;
            return verify(client, &VerifyRequest { which, all }, json).await;
        }
        SnapshotCommand::Export { which, file } => {
            show(&client.export(&which.parse()?, absolute(&file)?).await?, json, view::exported)?;
        }
        SnapshotCommand::Import { file, name } => {
            show(&client.import(&ImportRequest { file: absolute(&file)?, name }).await?, json, view::imported)?;
        }
        SnapshotCommand::Gc { dry_run, grace } => {
            show(&client.collect(&CollectRequest { dry_run, grace_ms: grace }).await?, json, view::collected)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The daemon's working directory is another.
fn absolute(file: &Path) -> anyhow::Result<String> {
    let path = std::path::absolute(file).with_context(|| format!("{} is no file", file.display()))?;
    path.into_os_string().into_string().map_err(|path| anyhow::anyhow!("{} is not UTF-8", path.display()))
}

/// Damage goes to stdout, a line each; how far it is to stderr, if that is a terminal.
async fn verify(client: &Client, request: &VerifyRequest, json: bool) -> anyhow::Result<ExitCode> {
    let mut feed = client.verify(request).await?;
    let watched = std::io::stderr().is_terminal() && !json;
    let progress = |text: &str| {
        if watched {
            // It may be gone: then no terminal shows it.
            let _ = write!(std::io::stderr(), "\r\x1b[K{text}");
        }
    };
    while let Some(item) = feed.next().await? {
        match &item {
            Verified::Progress { done, of, bytes: read } => {
                progress(&format!("{done} of {of} objects, {}", bytes(*read)));
                continue;
            }
            Verified::Damage { .. } => progress(""),
            Verified::End { .. } => progress(""),
        }
        if json {
            print_json(&item)?
        } else {
            print(&view::verified(&item))?
        }
        if let Verified::End { damaged, .. } = item {
            return Ok(if damaged == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
    }
    anyhow::bail!("the daemon ended before all was verified")
}
