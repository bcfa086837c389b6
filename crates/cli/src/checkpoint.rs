//! `kip checkpoint` and `kip rollback`: a proc as it was at some moment.

use crate::names;
use crate::output::show;
use crate::view;
use anyhow::Context as _;
use clap::{Args, Subcommand};
use kip_client::Client;
use kip_text::{ago, bytes, micros, table};
use kip_types::api::checkpoint::{CheckpointRequest, CheckpointView, CheckpointsView, RollbackRequest};
use kip_types::{CheckpointTag, ProcName};
use serde::Serialize;
use std::fmt::Write as _;
use std::str::FromStr;

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true, subcommand_value_name = "COMMAND")]
pub struct CheckpointArgs {
    #[command(subcommand)]
    pub command: Option<CheckpointCommand>,
    /// Name of the proc, in any tier; a sleeper is not woken
    #[arg(add = names::known(), required = true)]
    pub name: Option<String>,
    /// Tag of the checkpoint [default: the first free one of c1, c2, ...]
    #[arg(long)]
    pub tag: Option<CheckpointTag>,
}

#[derive(Debug, Subcommand)]
pub enum CheckpointCommand {
    /// List checkpoints as a tree: below each one those that were taken from it on
    Ls {
        /// Name of a proc [default: all]
        #[arg(add = names::known())]
        name: Option<String>,
    },
    /// Remove checkpoints for good
    Rm {
        /// Names of checkpoints: PROC@TAG
        #[arg(required = true, value_name = "PROC@TAG")]
        checkpoints: Vec<CheckpointName>,
    },
}

#[derive(Debug, Args)]
pub struct RollbackArgs {
    /// Name of the proc
    #[arg(add = names::known())]
    pub name: String,
    /// Tag of the checkpoint that it goes on from
    #[arg(long, value_name = "TAG")]
    pub to: CheckpointTag,
}

/// `PROC@TAG`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointName {
    name: ProcName,
    tag: CheckpointTag,
}

impl FromStr for CheckpointName {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<CheckpointName> {
        let (name, tag) =
            text.split_once('@').context("a checkpoint is named PROC@TAG: `kip checkpoint ls` lists them")?;
        Ok(CheckpointName { name: name.parse()?, tag: tag.parse()? })
    }
}

#[derive(Serialize)]
struct Removed {
    name: ProcName,
    removed: CheckpointTag,
}

/// Takes a checkpoint, or carries out one of the commands.
pub async fn call(client: &Client, args: CheckpointArgs, json: bool) -> anyhow::Result<()> {
    match args.command {
        Some(CheckpointCommand::Ls { name }) => {
            let name = name.map(|name| name.parse::<ProcName>()).transpose()?;
            show(&client.checkpoints(name.as_ref()).await?, json, tree)
        }
        Some(CheckpointCommand::Rm { checkpoints }) => {
            for CheckpointName { name, tag } in checkpoints {
                client.remove_checkpoint(&name, &tag).await?;
                let removed = Removed { name, removed: tag };
                show(&removed, json, |done| format!("checkpoint {}@{} removed\n", done.name, done.removed))?;
            }
            Ok(())
        }
        None => {
            let name: ProcName = args.name.context("a name is required")?.parse()?;
            show(&client.checkpoint(&name, &CheckpointRequest { tag: args.tag }).await?, json, taken)
        }
    }
}

/// `kip rollback`
pub async fn rollback(client: &Client, args: RollbackArgs, json: bool) -> anyhow::Result<()> {
    let name: ProcName = args.name.parse()?;
    let done = client.rollback(&name, &RollbackRequest { to: args.to.clone() }).await?;
    show(&done, json, |done| {
        format!(
            "{}rolled back to {} in {}; what {name} was is checkpoint {}\n",
            view::run(&done.proc),
            args.to,
            micros(done.total_us),
            done.kept.tag
        )
    })
}

fn taken(view: &CheckpointView) -> String {
    let stood = match view.still_us {
        0 => String::new(),
        us => format!(", {} stood still {}", view.name, micros(us)),
    };
    format!("{}@{}\ntaken in {}{stood}\n", view.name, view.tag, micros(view.total_us))
}

/// Below each proc its checkpoints, and below each of these the ones that were taken from it on.
fn tree(view: &CheckpointsView) -> String {
    if view.checkpoints.is_empty() {
        return "there are no checkpoints\n".to_owned();
    }
    let mut rows = vec![["CHECKPOINT", "TAKEN", "MEMORY", "FILES", "COMMAND"].map(str::to_owned).to_vec()];
    for of in view.checkpoints.chunk_by(|one, other| one.name == other.name) {
        // A tag that was removed may be that of a newer one.
        let is_below = |one: &CheckpointView, other: &CheckpointView| {
            one.parent.as_ref() == Some(&other.tag) && other.taken_at_ms < one.taken_at_ms
        };
        let is_root = |one: &&CheckpointView| !of.iter().any(|other| is_below(one, other));
        // The next one that is shown lies at the end.
        let mut left: Vec<(usize, &CheckpointView)> = of.iter().filter(is_root).rev().map(|one| (0, one)).collect();
        while let Some((depth, one)) = left.pop() {
            rows.push(row(depth, one));
            let below = of.iter().filter(|other| is_below(other, one));
            left.extend(below.rev().map(|other| (depth + 1, other)));
        }
    }
    table(&rows)
}

fn row(depth: usize, view: &CheckpointView) -> Vec<String> {
    let mut name = "  ".repeat(depth);
    let current = if view.is_current { " *" } else { "" };
    let _ = write!(name, "{}@{}{current}", view.name, view.tag);
    let memory = if view.has_memory { bytes(view.memory_bytes) } else { "-".to_owned() };
    let command = kip_text::short(&view.command.join(" "), 40);
    vec![name, ago(view.taken_at_ms), memory, bytes(view.file_bytes), command]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(tag: &str, parent: Option<&str>) -> CheckpointView {
        CheckpointView {
            name: "web".parse().unwrap(),
            tag: tag.parse().unwrap(),
            parent: parent.map(|tag| tag.parse().unwrap()),
            is_current: tag == "c3",
            taken_at_ms: tag[1..].parse().unwrap(),
            has_memory: tag != "c2",
            memory_bytes: 1 << 20,
            file_bytes: 4096,
            still_us: 0,
            total_us: 1,
            command: vec!["nginx".to_owned()],
        }
    }

    #[test]
    fn checkpoints_are_shown_as_a_tree() {
        let checkpoints =
            vec![view("c1", None), view("c2", Some("c1")), view("c3", Some("c1")), view("c4", Some("gone"))];
        let shown = tree(&CheckpointsView { checkpoints });
        let names: Vec<&str> =
            shown.lines().map(|line| line.split("  ").find(|part| part.contains('@')).unwrap_or("")).collect();
        assert_eq!(names, ["", "web@c1", "web@c2", "web@c3 *", "web@c4"]);
        let indents: Vec<usize> = shown.lines().map(|line| line.len() - line.trim_start().len()).collect();
        assert_eq!(indents, [0, 0, 2, 2, 0], "{shown}");
        assert_eq!(tree(&CheckpointsView::default()), "there are no checkpoints\n");
    }

    #[test]
    fn none_is_hidden_when_a_tag_is_used_again() {
        let again = CheckpointView { taken_at_ms: 9, ..view("c1", Some("c2")) };
        let shown = tree(&CheckpointsView { checkpoints: vec![view("c2", Some("c1")), again] });
        assert_eq!(shown.matches("web@").count(), 2, "{shown}");
    }

    #[test]
    fn a_checkpoint_is_named_by_proc_and_tag() {
        let named: CheckpointName = "web@c1".parse().unwrap();
        assert_eq!((named.name.as_str(), named.tag.as_str()), ("web", "c1"));
        for bad in ["web", "web@", "@c1", "web@C1"] {
            assert!(bad.parse::<CheckpointName>().is_err(), "{bad}");
        }
    }
}
