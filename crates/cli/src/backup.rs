//! `kip backup`, which the daemon does, and `kip restore`, which needs none: it makes the data
//! directory for one.

use crate::key::FileArgs;
use crate::output::{print, print_json};
use anyhow::{Context, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use kip_client::Client;
use kip_text as text;
use kip_types::backup::{BackedUpAs, BackedUpProc, BackupProgress, BackupRequest};
use serde::Serialize;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

#[derive(Debug, Args)]
pub struct BackupArgs {
    #[command(flatten)]
    pub file: FileArgs,
}

#[derive(Debug, Args)]
pub struct RestoreArgs {
    #[command(flatten)]
    pub file: FileArgs,
}

#[derive(Serialize)]
struct RestoredView {
    data: String,
    of: String,
    made_at_ms: u64,
    procs: Vec<RestoredProc>,
}

#[derive(Serialize)]
struct RestoredProc {
    name: String,
    /// It sleeps with its memory.
    asleep: bool,
}

/// Progress is shown on a terminal only.
fn bar(template: &str, length: Option<u64>) -> ProgressBar {
    let bar = length.map_or_else(ProgressBar::no_length, ProgressBar::new);
    bar.set_style(ProgressStyle::with_template(template).expect("a constant template"));
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

/// Has the daemon write a backup.
pub async fn backup(client: &Client, args: &BackupArgs, json: bool) -> anyhow::Result<()> {
    let path = std::path::absolute(&args.file.file)?;
    anyhow::ensure!(!path.exists(), "{} is there already: give another name", path.display());
    let file =
        path.into_os_string().into_string().map_err(|path| anyhow::anyhow!("{} is not UTF-8", path.display()))?;
    let mut feed = client.backup(&BackupRequest { file, wrap: args.file.wrap(true)? }).await?;
    let bar = bar("{spinner} {bytes} ({bytes_per_sec}) {msg}", None);
    let mut procs = Vec::new();
    while let Some(item) = feed.next().await? {
        match &item {
            BackupProgress::At { part, bytes } => {
                bar.set_position(*bytes);
                bar.set_message(part.clone());
            }
            BackupProgress::Proc(proc) => procs.push(proc.clone()),
            BackupProgress::End { .. } => bar.finish_and_clear(),
        }
        if json {
            print_json(&item)?;
        }
        if let BackupProgress::End { .. } = &item {
            return if json { Ok(()) } else { print(&backed_up(&procs, &item)) };
        }
    }
    bail!("the daemon ended before the backup was whole")
}

fn backed_up(procs: &[BackedUpProc], end: &BackupProgress) -> String {
    let BackupProgress::End { file, volumes, left_out, bytes, file_bytes, .. } = end else { return String::new() };
    let mut rows = vec![["PROC", "IN IT", "STOOD STILL", "WHY"].map(str::to_owned).to_vec()];
    rows.extend(procs.iter().map(|proc| {
        let how = match proc.how {
            BackedUpAs::Asleep => "files, memory",
            BackedUpAs::InTheStore => "what is not in the store",
            BackedUpAs::Stopped => "files",
            BackedUpAs::FilesOnly => "files as it ran",
        };
        let still = if proc.still_us == 0 { "-".to_owned() } else { text::micros(proc.still_us) };
        vec![proc.name.to_string(), how.to_owned(), still, proc.cause.clone().unwrap_or_else(|| "-".to_owned())]
    }));
    let mut said = if procs.is_empty() { String::new() } else { text::table(&rows) };
    for path in left_out {
        said.push_str(&format!("not in it: {path}, which is the host's\n"));
    }
    let count = |number: u64, what: &str| format!("{number} {what}{}", if number == 1 { "" } else { "s" });
    said.push_str(&format!(
        "{file}: {}, {}, {} in {}\n",
        count(procs.len() as u64, "proc"),
        count(*volumes, "volume"),
        text::bytes(*bytes),
        text::bytes(*file_bytes),
    ));
    said
}

/// Makes the data directory of a backup.
pub fn restore(data: &Path, args: &RestoreArgs, json: bool) -> anyhow::Result<ExitCode> {
    anyhow::ensure!(
        rustix::process::geteuid().is_root(),
        "a restore gives files to their owners, for which it must be root: use sudo kip restore"
    );
    let file = &args.file.file;
    let length = std::fs::metadata(file).with_context(|| file.display().to_string())?.len();
    let wrap = args.file.wrap(false)?;
    let bar = bar("{bar:30} {bytes} of {total_bytes} ({bytes_per_sec})", Some(length));
    let restored = kip_daemon::restore(data, file, &wrap, |bytes| bar.set_position(bytes));
    bar.finish_and_clear();
    let restored = restored?;
    let view = RestoredView {
        data: data.display().to_string(),
        of: restored.of.display().to_string(),
        made_at_ms: restored.made_at_ms,
        procs: restored
            .procs
            .iter()
            .map(|(name, asleep)| RestoredProc { name: name.to_string(), asleep: *asleep })
            .collect(),
    };
    if json {
        print_json(&view)?;
    } else {
        let asleep = view.procs.iter().filter(|proc| proc.asleep).count();
        print(&format!(
            "{}: {} procs, {asleep} of them asleep with their memory, as they were in {} at {}; `kip up` starts the daemon\n",
            view.data,
            view.procs.len(),
            view.of,
            text::utc(view.made_at_ms)
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
