//! `kip image`, and what `kip run --image` does before it runs: bring the image if it is not here.

mod login;
mod progress;
mod view;

use crate::output::show;
use anyhow::{Context, bail};
use clap::{Args, Subcommand, ValueEnum};
use kip_client::{CallError, Client};
use kip_types::api::Code;
use kip_types::image::{ImageSource, ImageView, ImagesCollectRequest, Pull, PullProgress, PullRequest};
use login::LoginArgs;
use progress::Progress;
use std::path::{Path, PathBuf};

#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Pull an image from a registry, or update it
    Pull(PullArgs),
    /// Load an image from files: an OCI layout, or the output of `docker save`
    Load(LoadArgs),
    /// List the images that are here
    Ls,
    /// Show how an image's program is run, and its layers
    Inspect(ReferenceArg),
    /// Remove an image; layers that a proc or another image needs stay
    Rm(ReferenceArg),
    /// Remove layers that no image and no proc needs, and what is left of broken-off pulls
    Gc(GcArgs),
}

#[derive(Debug, Args)]
pub struct ReferenceArg {
    /// Its name, or its id or digest, or the beginning of one
    #[arg(value_name = "IMAGE")]
    pub reference: String,
}

#[derive(Debug, Args)]
pub struct PullArgs {
    // Not a doc comment: rustdoc would take the brackets for links.
    #[arg(help = "[HOST[:PORT]/]NAME[:TAG][@DIGEST]; docker.io is the usual host", value_name = "IMAGE")]
    pub source: ImageSource,
    #[command(flatten)]
    pub registry: RegistryArgs,
}

#[derive(Debug, Args)]
pub struct LoadArgs {
    #[arg(help = "oci:PATH[:TAG], a directory or a tar; docker-archive:FILE[:NAME]", value_name = "SOURCE")]
    pub source: ImageSource,
    /// What it is called here; without it its own name, or SOURCE where it has none
    #[arg(long, value_name = "IMAGE")]
    pub name: Option<String>,
}

#[derive(Debug, Args)]
pub struct GcArgs {
    /// Images that no proc uses, too
    #[arg(long)]
    pub all: bool,
    /// Only show what would be done
    #[arg(long)]
    pub dry_run: bool,
}

/// How a registry is asked.
#[derive(Debug, Clone, Default, Args)]
pub struct RegistryArgs {
    #[command(flatten)]
    pub login: LoginArgs,
    /// Without TLS; registries on this machine are asked so anyway
    #[arg(long)]
    pub plain_http: bool,
    /// PEM file of the authority behind the registry's certificate, beside those that the daemon's
    /// machine trusts
    #[arg(long, value_name = "FILE", conflicts_with = "plain_http")]
    pub registry_ca: Option<PathBuf>,
}

/// When `kip run` brings the image.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum When {
    /// If it is not here.
    #[default]
    Missing,
    /// Each time.
    Always,
    /// Not at all.
    Never,
}

impl When {
    /// What was said, where that is not what is usual.
    pub fn said(self) -> Option<Pull> {
        match self {
            When::Missing => None,
            When::Always => Some(Pull::Always),
            When::Never => Some(Pull::Never),
        }
    }
}

/// Carries out `command`.
pub async fn call(client: &Client, command: ImageCommand, json: bool) -> anyhow::Result<()> {
    match command {
        ImageCommand::Pull(args) => {
            if !matches!(args.source, ImageSource::Registry(_)) {
                bail!("{} is in files: `kip image load {}`", args.source, args.source);
            }
            let image = pull(client, args.source, None, &args.registry).await?;
            show(&image, json, view::pulled)
        }
        ImageCommand::Load(args) => {
            if matches!(args.source, ImageSource::Registry(_)) {
                bail!(
                    "{} is in a registry: `kip image pull {}`; files are oci:PATH or docker-archive:FILE",
                    args.source,
                    args.source
                );
            }
            let image = pull(client, args.source, args.name, &RegistryArgs::default()).await?;
            show(&image, json, view::pulled)
        }
        ImageCommand::Ls => show(&client.images().await?, json, |views| view::ls(views)),
        ImageCommand::Inspect(args) => show(&client.image(&args.reference).await?, json, view::inspect),
        ImageCommand::Rm(args) => {
            show(&client.remove_image(&args.reference).await?, json, |done| view::removed(done, false))
        }
        ImageCommand::Gc(GcArgs { all, dry_run }) => {
            let done = client.collect_images(&ImagesCollectRequest { all, dry_run }).await?;
            show(&done, json, |done| view::removed(done, dry_run))
        }
    }
}

/// Brings the image of a `kip run` if that is wanted; its name here.
pub async fn ensure(client: &Client, text: &str, when: When, registry: &RegistryArgs) -> anyhow::Result<String> {
    let source: ImageSource = text.parse()?;
    let files = !matches!(source, ImageSource::Registry(_));
    let source = absolute(source)?;
    // What comes from files is called as they are; of others any name or id will do.
    let here = client.image(&if files { source.to_string() } else { text.to_owned() }).await;
    let name = source.to_string();
    match (here, when) {
        (Ok(found), When::Missing | When::Never) => Ok(found.view.reference),
        (Err(CallError::Refused(refusal)), When::Missing) if refusal.code == Code::Unknown => {
            Ok(pull(client, source, files.then_some(name), registry).await?.reference)
        }
        (Err(e), When::Missing | When::Never) => Err(e.into()),
        (_, When::Always) => Ok(pull(client, source, files.then_some(name), registry).await?.reference),
    }
}

fn absolute(source: ImageSource) -> anyhow::Result<ImageSource> {
    let text = source.to_string();
    // The daemon's working directory is another.
    source.absolute(std::path::absolute).with_context(|| format!("{text} is no path"))
}

fn read_ca(file: &Path) -> anyhow::Result<String> {
    let pem = std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    if !pem.contains("-----BEGIN CERTIFICATE-----") {
        bail!("there is no certificate in {}: --registry-ca takes a PEM file", file.display());
    }
    Ok(pem)
}

/// Progress goes to stderr, if that is a terminal.
async fn pull(
    client: &Client,
    source: ImageSource,
    name: Option<String>,
    registry: &RegistryArgs,
) -> anyhow::Result<ImageView> {
    let login = source.registry().map(|host| registry.login.find(host)).transpose()?.flatten();
    let source = absolute(source)?;
    let ca_pem = registry.registry_ca.as_deref().map(read_ca).transpose()?;
    let request = PullRequest { source, name, login, plain_http: registry.plain_http, ca_pem };
    let mut feed = client.pull_image(&request).await?;
    let mut progress = Progress::new();
    while let Some(item) = feed.next().await? {
        if let PullProgress::End { image } = item {
            progress.end();
            return Ok(*image);
        }
        progress.report(&item);
    }
    bail!("the daemon ended before the image was here")
}
