//! `kip template`: what procs of one kind begin from.

use crate::key::FileArgs;
use crate::names;
use crate::output::show;
use crate::snapshot::absolute;
use anyhow::{Context as _, ensure};
use clap::Subcommand;
use kip_client::Client;
use kip_text::{ago, bytes, micros, short, table};
use kip_types::api::template::{TemplateFileRequest, TemplateFileView, TemplateRequest, TemplateView, TemplatesView};
use kip_types::{Image, ProcName, TemplateId};
use serde::Serialize;
use std::fmt::Write as _;

#[derive(Debug, Subcommand)]
pub enum TemplateCommand {
    /// Take one from a proc that is ready; `kip run --template auto` does it by itself
    Take {
        /// Name of the proc
        #[arg(add = names::known())]
        name: String,
        /// Shell command to run inside before, to warm what the program keeps
        #[arg(long, value_name = "CMD")]
        after: Option<String>,
    },
    /// List templates
    Ls,
    /// Show what a template was taken from, and what is frozen in it
    Show {
        /// Id of the template
        id: TemplateId,
    },
    /// Write a template into a new file, encrypted, for another data directory to import; the file
    /// has all that was in the program's memory
    Export {
        /// Id of the template
        id: TemplateId,
        #[command(flatten)]
        file: FileArgs,
    },
    /// Import a template from an exported file; from then on `kip run --template auto` of what it
    /// was taken from begins from it here
    Import(FileArgs),
    /// Remove templates for good; procs that have begun from them stay
    Rm {
        /// Ids of templates
        #[arg(required = true, value_name = "ID")]
        ids: Vec<TemplateId>,
    },
}

#[derive(Serialize)]
struct RemovedTemplate {
    removed: TemplateId,
}

/// Carries out one of the commands.
pub async fn call(client: &Client, command: TemplateCommand, json: bool) -> anyhow::Result<()> {
    match command {
        TemplateCommand::Take { name, after } => {
            let name: ProcName = name.parse()?;
            show(&client.take_template(&name, &TemplateRequest { after }).await?, json, |view| {
                let stood = match view.still_us {
                    0 => String::new(),
                    us => format!(", {name} stood still {}", micros(us)),
                };
                format!("{}\ntaken in {}{stood}\n", view.id, micros(view.total_us))
            })
        }
        TemplateCommand::Ls => show(&client.templates().await?, json, list),
        TemplateCommand::Show { id } => {
            let known = client.templates().await?.templates;
            let found = known.into_iter().find(|template| template.id == id);
            let found = found.with_context(|| format!("there is no template {id}: `kip template ls` lists them"))?;
            show(&found, json, details)
        }
        TemplateCommand::Export { id, file } => {
            // Before anything is typed.
            ensure!(!file.file.exists(), "{} is there already: give another name", file.file.display());
            let request = TemplateFileRequest { file: absolute(&file.file)?, wrap: file.wrap(true)? };
            show(&client.export_template(&id, &request).await?, json, exported)
        }
        TemplateCommand::Import(file) => {
            let request = TemplateFileRequest { file: absolute(&file.file)?, wrap: file.wrap(false)? };
            show(&client.import_template(&request).await?, json, imported)
        }
        TemplateCommand::Rm { ids } => {
            for id in ids {
                client.remove_template(&id).await?;
                show(&RemovedTemplate { removed: id }, json, |done| format!("template {} removed\n", done.removed))?;
            }
            Ok(())
        }
    }
}

fn exported(view: &TemplateFileView) -> String {
    format!("{}: template {} of {}, {}\n", view.file, view.template.id, view.template.name, bytes(view.file_bytes))
}

fn imported(view: &TemplateFileView) -> String {
    let was = match view.exported_id == view.template.id {
        true => String::new(),
        false => format!(", which was {} where it was exported", view.exported_id),
    };
    format!("template {} of {} imported{was}\n", view.template.id, view.template.name)
}

fn list(view: &TemplatesView) -> String {
    if view.templates.is_empty() {
        return "there are no templates\n".to_owned();
    }
    let mut rows =
        vec![["TEMPLATE", "FROM", "TAKEN", "USED", "MEMORY", "FILES", "COMMAND"].map(str::to_owned).to_vec()];
    rows.extend(view.templates.iter().map(|one| {
        vec![
            one.id.to_string(),
            one.name.to_string(),
            ago(one.taken_at_ms),
            one.used_at_ms.map_or_else(|| "-".to_owned(), ago),
            bytes(one.memory_bytes),
            bytes(one.file_bytes),
            short(&one.spec.command.join(" "), 40),
        ]
    }));
    table(&rows)
}

fn details(view: &TemplateView) -> String {
    let spec = &view.spec;
    let mut text = String::new();
    let mut line = |what: &str, is: String| _ = writeln!(text, "{what:<12}{is}");
    line("template", view.id.to_string());
    line("from", view.name.to_string());
    line("taken", format!("{} ago, in {}", ago(view.taken_at_ms), micros(view.total_us)));
    line("used", view.used_at_ms.map_or_else(|| "never".to_owned(), |at| format!("{} ago", ago(at))));
    line("memory", bytes(view.memory_bytes));
    line("files", bytes(view.file_bytes));
    line("command", spec.command.join(" "));
    let image = match &spec.image {
        Image::Oci(image) => image.reference.clone(),
        Image::Tar(path) => path.display().to_string(),
        Image::Host => "files of this machine".to_owned(),
    };
    line("image", image);
    let names = |names: Vec<String>| if names.is_empty() { "-".to_owned() } else { names.join(" ") };
    // What its memory has of them may be what they were.
    line("frozen env", names(spec.env.keys().cloned().collect()));
    line("secrets", names(spec.secrets.clone()));
    text
}
