//! `kip snapshot`.

mod view;

use crate::names::name;
use crate::output::show;
use crate::output::{print, print_json};
use anyhow::Context;
use clap::{Args, Subcommand};
use kip_client::Client;
use kip_text::bytes;
use kip_types::api::{CollectRequest, ImportRequest, SnapshotName, Verified, VerifyRequest};
use kip_types::name::ProcName;
use kip_types::spec::parse_duration_ms;
use std::io::{IsTerminal as _, Write as _};
use std::path::Path;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Debug, Args)]
pub struct SnapshotArgs {
    #[command(subcommand)]
    pub command: SnapshotCommand,
}

#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    /// List generations in the store and on the local disk, by proc
    Ls {
        /// Only generations of this proc
        name: Option<String>,
    },
    /// Show everything about one generation in the store
    Show {
        /// NAME is the newest of that proc; an id from `ls` will do for NAME
        #[arg(value_name = "NAME[@GENERATION]")]
        which: String,
    },
    /// Read all data of generations and check that it is undamaged; exits with 1 if not
    Verify {
        /// NAME is the newest of that proc, in the store and on the local disk
        #[arg(value_name = "NAME[@GENERATION]", required_unless_present = "all")]
        which: Option<String>,
        /// All generations that are kept; without a name, of every proc
        #[arg(long)]
        all: bool,
    },
    /// Write one generation into a file, sealed as it is in the store
    Export {
        /// NAME is the newest of that proc
        #[arg(value_name = "NAME[@GENERATION]")]
        which: String,
        /// The file to make; it must not exist
        file: PathBuf,
    },
    /// Import a generation from an exported file into the store, free to adopt; the realm's keys
    /// must be here
    Import {
        /// The file
        file: PathBuf,
        /// New name of the proc
        #[arg(long)]
        name: Option<ProcName>,
    },
    /// Delete objects of the store that no generation uses
    Gc {
        /// Only show what would be done
        #[arg(long)]
        dry_run: bool,
        /// How long an object must have been unused; a short time endangers uploads of other data
        /// directories
        #[arg(long, value_name = "DUR", value_parser = parse_duration_ms, default_value = "24h")]
        grace: u64,
    },
}

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
pub fn absolute(file: &Path) -> anyhow::Result<String> {
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
