//! How a proc lives, as `kip run` takes it: how it is ended, whether it is started again, what it
//! is told.

use anyhow::Context;
use clap::Args;
use kip_describe::env_file;
use kip_types::keys::Hex;
use kip_types::life::{
    Check, HOOK_WITHIN_MS, Hooks, KEPT_CHECKPOINTS, PeriodicCheckpoints, Probe, READY_WITHIN_MS, Ready, Restart,
    TemplateWhen, Templating,
};
use kip_types::spec::{LONGEST_SECRET, bad_secret, parse_duration_ms};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub struct LifeArgs {
    /// Set those of a file, NAME=VALUE a line, as docker has them; may be repeated, and --env goes
    /// before it
    #[arg(long = "env-file", value_name = "FILE")]
    pub env_files: Vec<PathBuf>,
    // Not a doc comment: rustdoc would take the brackets for links.
    #[arg(
        help = "Give it the file's contents as /run/secrets/NAME, in memory; kept sealed, never shown; may be repeated",
        long = "secret",
        value_name = "NAME=FILE",
        value_parser = parse_secret
    )]
    pub secrets: Vec<(String, PathBuf)>,
    /// Stop signal that `kip stop` sends first, instead of SIGTERM
    #[arg(long, value_name = "SIGNAL")]
    pub stop_signal: Option<String>,
    /// Time between the stop signal and SIGKILL, unless `kip stop --grace` says otherwise; default
    /// 10s
    #[arg(long, alias = "stop-timeout", value_name = "DUR", value_parser = parse_duration_ms)]
    pub stop_grace: Option<u64>,
    // Not a doc comment: rustdoc would take the brackets for links.
    #[arg(
        help = "Start it again when its program ends: no, on-failure[:MAX] or always (unless-stopped is the same); after 100ms, then twice as long each time up to 30s, until it ran 10s",
        long,
        value_name = "POLICY",
        default_value = "no",
        value_parser = parse_restart
    )]
    pub restart: Restart,
    /// Return only when the proc is ready: tcp:PORT takes a connection, http:PORT/PATH is answered,
    /// exec:COMMAND succeeds inside
    #[arg(long, value_name = "CHECK")]
    pub ready: Option<Check>,
    /// Longest wait for --ready; default 60s. After that `kip run` fails, and the proc runs on
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms, requires = "ready")]
    pub ready_timeout: Option<u64>,
    /// Shell command to run inside the proc before each sleep; if it fails the proc stays awake,
    /// `kip why` says so, and Kip tries again
    #[arg(long, value_name = "CMD", value_parser = parse_command)]
    pub before_sleep: Option<String>,
    /// Shell command to run inside the proc after each wake, beside the program
    #[arg(long, value_name = "CMD", value_parser = parse_command)]
    pub after_wake: Option<String>,
    /// Shell command to run inside the proc before a clone, a checkpoint or a template is taken of
    /// it while it is awake; one that fails refuses that
    #[arg(long, value_name = "CMD", value_parser = parse_command)]
    pub before_checkpoint: Option<String>,
    /// Shell command to run inside each clone of the proc before clients reach it; one that fails
    /// undoes the clone
    #[arg(long, value_name = "CMD", value_parser = parse_command)]
    pub after_clone: Option<String>,
    /// Whether the proc begins from the template of its kind, or leaves one when it is ready:
    /// auto or off (default)
    #[arg(long, value_name = "WHEN")]
    pub template: Option<TemplateWhen>,
    /// Shell command to run inside the proc before its template is taken, to warm what it keeps; if
    /// it fails there is no template
    #[arg(long, value_name = "CMD", value_parser = parse_command, requires = "template")]
    pub template_after: Option<String>,
    /// Take a checkpoint of the proc by itself every DUR, unless it has slept all the while
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms)]
    pub checkpoint_every: Option<u64>,
    /// How many of those checkpoints are kept; default 3
    #[arg(long, value_name = "N", requires = "checkpoint_every")]
    pub checkpoint_keep: Option<u32>,
    /// Longest run of each of these commands and of an exec: check; default 10s. In place of a
    /// command http:PORT/PATH asks the program itself, which is to answer with a status from 200 to
    /// 399
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms)]
    pub hook_timeout: Option<u64>,
    /// Serve the proc's health over HTTP on this host port; asking neither wakes the proc nor keeps
    /// it awake; CHECK as in --ready; may be repeated
    #[arg(long = "probe", value_name = "HOST_PORT=CHECK")]
    pub probes: Vec<Probe>,
}

/// A proc that was stopped by hand stays stopped in any case, so that both of Docker's words mean
/// the same.
pub fn parse_restart(text: &str) -> Result<Restart, String> {
    let text = if text == "unless-stopped" { "always" } else { text };
    text.parse().map_err(|e| format!("{e}"))
}

fn parse_command(text: &str) -> Result<String, String> {
    if text.trim().is_empty() { Err("write a command for the shell".to_owned()) } else { Ok(text.to_owned()) }
}

impl LifeArgs {
    /// The variables of its files, with those of the command line above them.
    pub fn environment(&self, given: Vec<(String, String)>) -> anyhow::Result<BTreeMap<String, String>> {
        let mut env = BTreeMap::new();
        self.env_files.iter().try_for_each(|file| env_file::read(file, &mut env))?;
        env.extend(given);
        Ok(env)
    }

    /// When it is ready.
    pub fn ready(&self) -> Option<Ready> {
        let check = self.ready.clone()?;
        Some(Ready { check, within_ms: self.ready_timeout.unwrap_or(READY_WITHIN_MS) })
    }

    /// What is run when it sleeps and wakes.
    pub fn hooks(&self) -> Hooks {
        Hooks {
            before_sleep: self.before_sleep.clone(),
            after_wake: self.after_wake.clone(),
            before_checkpoint: self.before_checkpoint.clone(),
            after_clone: self.after_clone.clone(),
            within_ms: self.hook_timeout.unwrap_or(HOOK_WITHIN_MS),
        }
    }

    /// Which checkpoints are taken by themselves.
    pub fn checkpoints(&self) -> Option<PeriodicCheckpoints> {
        let every_ms = self.checkpoint_every?;
        Some(PeriodicCheckpoints { every_ms, keep: self.checkpoint_keep.unwrap_or(KEPT_CHECKPOINTS) })
    }

    /// Whether it begins from a template.
    pub fn template(&self) -> Option<Templating> {
        (self.template == Some(TemplateWhen::Auto)).then(|| Templating { after: self.template_after.clone() })
    }

    /// Contents of secrets by their names.
    pub fn secrets(&self) -> anyhow::Result<BTreeMap<String, Hex>> {
        let mut secrets = BTreeMap::new();
        for (name, file) in &self.secrets {
            let contents = read_secret(name, file)?;
            anyhow::ensure!(secrets.insert(name.clone(), contents).is_none(), "the secret {name} is given twice");
        }
        Ok(secrets)
    }
}

fn parse_secret(s: &str) -> Result<(String, PathBuf), String> {
    let (name, file) = s.split_once('=').filter(|(_, file)| !file.is_empty()).ok_or("write NAME=FILE")?;
    bad_secret(name).map_or_else(|| Ok((name.to_owned(), file.into())), Err)
}

fn read_secret(name: &str, file: &Path) -> anyhow::Result<Hex> {
    let mut contents = Vec::new();
    // One byte more says that there is too much, also of what never ends.
    let read = File::open(file).and_then(|f| f.take(LONGEST_SECRET as u64 + 1).read_to_end(&mut contents));
    read.with_context(|| format!("the secret {name} cannot be read from {}", file.display()))?;
    anyhow::ensure!(
        contents.len() <= LONGEST_SECRET,
        "the secret {name} ({}) has more than {LONGEST_SECRET} bytes",
        file.display()
    );
    Ok(Hex(contents))
}
