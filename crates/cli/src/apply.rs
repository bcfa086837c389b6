//! `kip apply`, `kip diff` and `kip export`: files that describe procs, against what a daemon has.
//!
//! Everything is looked at before anything is changed: the file, what would have to be replaced,
//! images, and whether what is to be made could be started. Then those that are not described any
//! more go, and procs are made one after the other, each when those that it depends on are ready. A
//! proc that goes is stopped in order, one that is replaced when the new one is ready. A failure in
//! the middle leaves what was done, says what that is, and the next apply goes on from there.
//! Sleepers are looked at and not woken.

mod plan;
mod view;

use crate::check::{TrialArgs, require};
use crate::image::{RegistryArgs, When, ensure};
use crate::names::{self, name};
use crate::output::{print, print_json};
use crate::wait::until_ready;
use anyhow::{Context, bail};
use clap::Args;
use kip_client::Client;
use kip_describe::{
    Described, Document, Fault, Faults, Pull, Reading, Weight, choose, overrides_beside, render, update_between,
};
use kip_text::one_line;
use kip_types::StateName;
use kip_types::api::{RunRequest, StartRequest};
use kip_types::life::READY_WITHIN_MS;
use kip_types::name::ProcName;
use plan::{Action, ApplyPlan, PlannedChange};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Looked for in the working directory, in this order.
const USUAL: [&str; 5] = ["kip.toml", "compose.yaml", "compose.yml", "docker-compose.yaml", "docker-compose.yml"];
/// As diff(1): the comparison itself failed.
const TROUBLE: u8 = 2;

#[derive(Debug, Args)]
pub struct ApplyArgs {
    #[command(flatten)]
    pub what: FileArgs,
    /// Only show what would be done
    #[arg(long)]
    pub dry_run: bool,
    /// Remove procs that this file made and that it does not describe any more, with all they have
    #[arg(long, conflicts_with = "names")]
    pub prune: bool,
    /// Recreate procs that differ from the file; their own files are lost. Clients are not refused
    /// meanwhile, and the old proc stays if the new one does not get ready
    #[arg(long)]
    pub replace: bool,
    #[command(flatten)]
    pub trial: TrialArgs,
    #[command(flatten)]
    pub registry: RegistryArgs,
}

#[derive(Debug, Args)]
pub struct DiffArgs {
    #[command(flatten)]
    pub what: FileArgs,
    /// Show what `apply --prune` would remove, too
    #[arg(long, conflicts_with = "names")]
    pub prune: bool,
}

#[derive(Debug, Args)]
pub struct FileArgs {
    /// The file; without it kip.toml, compose.yaml or docker-compose.yml here. Of several Compose
    /// files (`.yaml`, `.yml`) each is laid over those before it
    #[arg(short, long, value_name = "FILE")]
    pub file: Vec<PathBuf>,
    /// Only these procs, and the procs that they depend on
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
    /// Compose: name of the project, instead of `name:` and COMPOSE_PROJECT_NAME; default: the name
    /// of the file's directory
    #[arg(short, long, value_name = "NAME")]
    pub project_name: Option<String>,
    /// Compose: include services of this profile; may be repeated
    #[arg(long, value_name = "NAME")]
    pub profile: Vec<String>,
    /// Compose: go on without features that Kip lacks, although the program may notice
    #[arg(long)]
    pub ignore_missing: bool,
}

#[derive(Debug, Args)]
pub struct ExportArgs {
    /// Names of procs
    #[arg(required = true, value_name = "NAME", add = names::known())]
    pub names: Vec<String>,
}

/// Everything that was wrong, one line each; told before.
#[derive(Debug)]
struct Reported;

/// What a file says, and what its procs are marked with.
struct Asked {
    mark: String,
    document: Document,
    /// Not only some of its procs.
    whole: bool,
}

/// `kip apply`.
pub async fn apply(client: &Client, args: &ApplyArgs, json: bool) -> anyhow::Result<ExitCode> {
    let Ok(asked) = read(&args.what)? else { return Ok(ExitCode::FAILURE) };
    if !args.dry_run {
        // What they lead to now is what is compared.
        let is_elsewhere = |one: &&Described| client.is_remote() && plan::file_of_the_daemon(one).is_some();
        let always = asked.document.procs.iter().filter(|one| one.pull == Pull::Always);
        for described in always.filter(|one| !is_elsewhere(one)) {
            pull_image(client, described, &args.registry).await?;
        }
    }
    let mut plan = ApplyPlan::new(client, &asked, args.prune).await?;
    let (mut faults, without_image) = plan.refused(client, args.replace || args.dry_run).await?;
    if faults.is_empty() && !args.dry_run {
        let made = plan.both().filter_map(|(change, described)| described.filter(|_| change.makes()));
        for described in made.filter(|one| one.pull != Pull::Always) {
            pull_image(client, described, &args.registry).await?;
        }
        faults = plan.invalid(client, &without_image).await?;
    }
    if !faults.is_empty() {
        report(faults.iter());
        return Ok(ExitCode::FAILURE);
    }
    report(plan.left_over().iter());
    if args.dry_run {
        show(plan.changes(), json, |changes| view::planned(changes, args.replace))?;
        return Ok(ExitCode::SUCCESS);
    }
    let done = carry_out(client, &mut plan, args, json).await;
    match json {
        true => print_json(&Changes { changes: plan.changes() })?,
        false => print(&view::left(plan.changes()))?,
    }
    done.map(|()| ExitCode::SUCCESS)
}

/// `kip diff`.
pub async fn diff(client: &Client, args: &DiffArgs, json: bool) -> anyhow::Result<ExitCode> {
    let compare = async {
        let Ok(asked) = read(&args.what)? else { return Ok(ExitCode::from(TROUBLE)) };
        let plan = ApplyPlan::new(client, &asked, args.prune).await?;
        report(plan.left_over().iter());
        let same = plan.changes().iter().all(|change| change.action == Action::Same);
        show(plan.changes(), json, |changes| view::planned(changes, true))?;
        Ok(if same { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    };
    let compared: anyhow::Result<ExitCode> = compare.await;
    match compared {
        Err(e) if !e.is::<crate::output::StdoutGone>() => {
            report([format!("{e:#}")].iter());
            Ok(ExitCode::from(TROUBLE))
        }
        done => done,
    }
}

/// `kip export`.
pub async fn export(client: &Client, args: &ExportArgs, json: bool) -> anyhow::Result<()> {
    let mut procs: Vec<(ProcName, RunRequest)> = Vec::new();
    for text in &args.names {
        let view = client.inspect_with_env(&name(text)?).await?;
        if view.spec.asked.is_none() {
            report(
                [format!(
                    "{} was made by an older Kip: what its image and the daemon said then is part of it",
                    view.name
                )]
                .iter(),
            );
        }
        procs.push((view.name.clone(), plan::asked(&view.spec)));
    }
    for (name, request) in &procs {
        let missing =
            request.in_file.depends_on.iter().filter(|needed| !procs.iter().any(|(other, _)| other == *needed));
        report(missing.map(|needed| format!("{name} depends on {needed}, which is left out: export it, too")));
    }
    let text = render(procs).context("the procs cannot be written as TOML")?;
    if json { print_json(&Exported { toml: text }) } else { print(&text) }
}

#[derive(Serialize)]
struct Exported {
    toml: String,
}

#[derive(Serialize)]
struct Changes<'a> {
    changes: &'a [PlannedChange],
}

fn show(changes: &[PlannedChange], json: bool, human: impl FnOnce(&[PlannedChange]) -> String) -> anyhow::Result<()> {
    if json { print_json(&Changes { changes }) } else { print(&human(changes)) }
}

/// One line of standard error each.
fn report<T: std::fmt::Display>(lines: impl Iterator<Item = T>) {
    for line in lines {
        eprintln!("kip: {}", one_line(&line.to_string()));
    }
}

/// Reads the file that is meant. What is wrong with it is told here, so that each mistake has a
/// line of its own.
fn read(args: &FileArgs) -> anyhow::Result<Result<Asked, Reported>> {
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        anyhow::Ok((path, text))
    };
    let files: Vec<_> = files(args)?.into_iter().map(read).collect::<anyhow::Result<_>>()?;
    let ((path, text), overrides) = files.split_first().expect("a file is named or found");
    let lookup = |key: &str| std::env::var(key).ok();
    let project = args.project_name.as_deref();
    let reading = Reading { path, text, overrides, lookup: &lookup, project, profiles: &args.profile };
    let document = kip_describe::read(&reading);
    let mut document = match document {
        Ok(document) => document,
        Err(Faults(faults)) => {
            report(faults.iter());
            return Ok(Err(Reported));
        }
    };
    let refused = !args.ignore_missing && document.notes.iter().any(|note| note.weight == Weight::Changes);
    report(document.notes.iter());
    if refused {
        report(["nothing was done; --ignore-missing goes on without what Kip lacks"].iter());
        return Ok(Err(Reported));
    }
    choose(&mut document, &args.names, path).map_err(anyhow::Error::msg)?;
    let mark = match &document.project {
        Some(project) => project.clone(),
        None => own_mark(path)?,
    };
    Ok(Ok(Asked { mark, document, whole: args.names.is_empty() }))
}

/// The file that is meant, and those that are laid over it.
fn files(args: &FileArgs) -> anyhow::Result<Vec<PathBuf>> {
    if !args.file.is_empty() {
        return Ok(args.file.clone());
    }
    let usual = USUAL.iter().map(PathBuf::from).find(|path| path.exists());
    let found = usual.with_context(|| format!("there is no {} here: name the file with -f", USUAL.join(", ")))?;
    let over = overrides_beside(&found).find(|path| path.exists());
    Ok([found].into_iter().chain(over).collect())
}

/// A file without a name of its own is known by its path and its machine: two clients may have the
/// same path.
fn own_mark(path: &Path) -> anyhow::Result<String> {
    let path = path.canonicalize().with_context(|| format!("cannot find {}", path.display()))?;
    let machine = rustix::system::uname();
    Ok(format!("{}:{}", machine.nodename().to_string_lossy(), path.display()))
}

/// One proc after the other.
async fn carry_out(client: &Client, plan: &mut ApplyPlan, args: &ApplyArgs, json: bool) -> anyhow::Result<()> {
    for (change, described) in plan.both() {
        let name = change.name.clone();
        match (change.action, described) {
            (Action::Same, _) => {}
            (Action::Remove, _) => remove(client, &name).await?,
            (_, None) => unreachable!("what is made or started is described"),
            (_, Some(described)) => {
                let done = apply_change(client, change, described, args).await;
                done.map_err(|e| Fault::new(&described.place, format!("{e:#}")))?;
            }
        }
        change.done = true;
        // At once: the next may take its time to become ready.
        if !json {
            print(&view::done(change))?;
        }
    }
    Ok(())
}

/// Makes or starts one.
async fn apply_change(
    client: &Client,
    change: &PlannedChange,
    described: &Described,
    args: &ApplyArgs,
) -> anyhow::Result<()> {
    let name = &change.name;
    for needed in &described.depends_on {
        let waited = wait_for(client, needed).await;
        waited.with_context(|| format!("{name} depends on {needed}"))?;
    }
    if change.makes() {
        // Only now is there what it depends on, and still what it replaces.
        require(client, &described.request, &args.trial).await?;
    }
    match change.action {
        Action::Start => {
            client.start(name, &StartRequest { wait_ready: described.request.wait_ready }).await?;
            wait_for(client, name).await
        }
        Action::Update => {
            let is = plan::asked(&client.inspect_with_env(name).await?.spec);
            let Some(update) = update_between(&is, &described.request) else {
                bail!("{name} has changed meanwhile: apply again");
            };
            if client.update(name, &update).await?.state == StateName::Stopped {
                client.start(name, &StartRequest { wait_ready: described.request.wait_ready }).await?;
            }
            wait_for(client, name).await
        }
        Action::Replace => Ok(client.replace(&described.request).await.map(drop)?),
        _ => Ok(client.run(&described.request).await.map(drop)?),
    }
}

/// Until it is ready, if it says what that is. Wakes no proc.
async fn wait_for(client: &Client, name: &ProcName) -> anyhow::Result<()> {
    let view = client.inspect(name).await?;
    if view.spec.ready.is_some() || view.state == StateName::Starting {
        let within_ms = view.spec.ready.map_or(READY_WITHIN_MS, |ready| ready.within_ms);
        until_ready(client, name, within_ms).await?;
    }
    Ok(())
}

/// In order, as `kip stop` and `kip rm` do: it is woken for its stop signal, and has its grace.
async fn remove(client: &Client, name: &ProcName) -> anyhow::Result<()> {
    // Nothing of one that another data directory has taken over runs here.
    if client.inspect(name).await?.state != StateName::Elsewhere {
        client.stop(name, None).await?;
    }
    Ok(client.remove(name, false).await?)
}

async fn pull_image(client: &Client, described: &Described, registry: &RegistryArgs) -> anyhow::Result<()> {
    let kip_types::spec::Image::Oci(image) = &described.request.spec.image else { return Ok(()) };
    let when = match described.pull {
        Pull::Missing => When::Missing,
        Pull::Always => When::Always,
        Pull::Never => When::Never,
    };
    let registry = RegistryArgs { plain_http: registry.plain_http || described.plain_http, ..registry.clone() };
    let pulled = ensure(client, &image.reference, when, &registry).await;
    pulled.map(drop).map_err(|e| Fault::new(&described.place, format!("{e:#}")).into())
}
