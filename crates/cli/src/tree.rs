//! `kip tree`: small files under names that all procs of the realm share.

use crate::follow;
use crate::output::{failed, print_json, show};
use anyhow::{Context as _, ensure};
use clap::{Args, Subcommand};
use kip_client::{CallError, Client};
use kip_text::{bytes, millis, table};
use kip_types::api::Code;
use kip_types::api::tree::{
    GrantTreeLeaseRequest, MakeTreeDirectoryRequest, RemoveTreeNodeRequest, RenameTreeNodeRequest, TreeChanges,
    WatchTreeRequest, WriteTreeFileRequest,
};
use kip_types::spec::parse_duration_ms;
use kip_types::tree::{
    MOST_FILE_BYTES, NodeKind, NodeStat, TreeChange, TreeChangeKind, TreeFence, TreeLease, TreeLeaseId, TreePath,
};
use serde::Serialize;
use std::io::{Read, Write as _};
use std::path::PathBuf;
use std::time::Duration;

#[derive(Debug, Subcommand)]
pub enum TreeCommand {
    /// List a directory
    Ls {
        /// Path of the directory, or of a file
        #[arg(default_value = "/")]
        path: TreePath,
        /// With sizes, versions and leases
        #[arg(short, long)]
        long: bool,
    },
    /// Print a file as it is
    Cat {
        /// Path of the file
        path: TreePath,
    },
    /// Write a file of at most 1 MiB
    Put(PutArgs),
    /// Make a directory
    Mkdir {
        /// Path of the directory
        path: TreePath,
        /// Make the directories above it, too; one that is there is no failure
        #[arg(short, long)]
        parents: bool,
        #[command(flatten)]
        fence: FenceArg,
    },
    /// Remove a file or an empty directory
    Rm {
        /// Path of the file or directory
        path: TreePath,
        /// Only if it has the version N
        #[arg(long, value_name = "N")]
        if_version: Option<u64>,
        #[command(flatten)]
        fence: FenceArg,
    },
    /// Move a file, or a directory with all that is in it
    Mv {
        /// Where it is
        from: TreePath,
        /// Where it will be: its whole path
        to: TreePath,
        /// In place of a file that is there
        #[arg(long)]
        replace: bool,
        #[command(flatten)]
        fence: FenceArg,
    },
    /// Show what a node is
    Stat {
        /// Path of the node
        path: TreePath,
    },
    /// Print changes as they come, one on each line; a lost connection is made again and no change
    /// is missed
    Watch {
        /// Path of the node, which need not be there yet
        #[arg(default_value = "/")]
        path: TreePath,
        /// Only the node itself, not what is below it
        #[arg(long)]
        only: bool,
        /// Changes after the revision REV, which is a node's version; without it those from now on
        #[arg(long, value_name = "REV")]
        from: Option<u64>,
    },
    /// Make, keep and end leases: a file that is written with one goes when it ends
    #[command(subcommand)]
    Lease(LeaseCommand),
}

#[derive(Debug, Args)]
pub struct PutArgs {
    /// Path of the file in the tree
    path: TreePath,
    /// File whose contents it gets [default: standard input]
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// Only if it has the version N
    #[arg(long, value_name = "N", conflicts_with = "new")]
    if_version: Option<u64>,
    /// Only if there is none
    #[arg(long)]
    new: bool,
    /// It goes when this lease ends
    #[arg(long, value_name = "ID")]
    lease: Option<TreeLeaseId>,
    #[command(flatten)]
    fence: FenceArg,
}

#[derive(Debug, Args)]
pub struct FenceArg {
    /// Only while the node PATH has the epoch that `kip tree stat` shows as `created`: a leader's
    /// own node
    #[arg(long, value_name = "PATH@EPOCH")]
    fence: Option<TreeFence>,
}

#[derive(Debug, Subcommand)]
pub enum LeaseCommand {
    /// Make a lease that lives for DUR after each keep-alive, and print its number
    Grant {
        /// As 10s or 5m; at least a second
        #[arg(value_name = "DUR", value_parser = parse_duration_ms)]
        ttl: u64,
    },
    /// Give a lease its whole time again
    Keep {
        /// Number of the lease
        id: TreeLeaseId,
        /// Again and again until ctrl-C, also over a daemon that is killed
        #[arg(long)]
        hold: bool,
    },
    /// End a lease, and remove its files
    Revoke {
        /// Number of the lease
        id: TreeLeaseId,
    },
    /// List leases
    Ls,
}

#[derive(Serialize)]
struct RemovedNode {
    removed: TreePath,
}

#[derive(Serialize)]
struct RevokedLease {
    revoked: TreeLeaseId,
}

/// A file with its contents: as text, or in hexadecimal digits where they are none.
#[derive(Serialize)]
struct ShownFile {
    path: TreePath,
    version: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hex: Option<String>,
}

/// Carries out one of them.
pub async fn call(client: &Client, command: TreeCommand, json: bool) -> anyhow::Result<()> {
    match command {
        TreeCommand::Ls { path, long } => {
            let node = client.tree_stat(&path).await?;
            let nodes = match node.kind {
                NodeKind::File => vec![node],
                NodeKind::Directory => client.tree_list(&path).await?,
            };
            show(&nodes, json, |nodes| ls(nodes, long))
        }
        TreeCommand::Cat { path } => cat(client, path, json).await,
        TreeCommand::Put(args) => {
            let contents = contents(&args)?;
            let PutArgs { path, if_version: version, new, lease, fence: FenceArg { fence }, .. } = args;
            let request = WriteTreeFileRequest { path, version, new, lease, fence };
            show(&client.tree_write(&request, contents).await?, json, changed)
        }
        TreeCommand::Mkdir { path, parents, fence: FenceArg { fence } } => {
            if parents {
                make_above(client, &path, fence.as_ref()).await?;
            }
            let request = MakeTreeDirectoryRequest { path, fence };
            let made = match client.tree_make_directory(&request).await {
                Err(CallError::Refused(refusal)) if parents && refusal.code == Code::Taken => {
                    let node = client.tree_stat(&request.path).await?;
                    ensure!(node.kind == NodeKind::Directory, refusal);
                    node
                }
                made => made?,
            };
            show(&made, json, changed)
        }
        TreeCommand::Rm { path, if_version: version, fence: FenceArg { fence } } => {
            client.tree_remove(&RemoveTreeNodeRequest { path: path.clone(), version, fence }).await?;
            show(&RemovedNode { removed: path }, json, |done| format!("{} removed\n", done.removed))
        }
        TreeCommand::Mv { from, to, replace, fence: FenceArg { fence } } => {
            let request = RenameTreeNodeRequest { from, to, replace, fence };
            show(&client.tree_rename(&request).await?, json, changed)
        }
        TreeCommand::Stat { path } => show(&client.tree_stat(&path).await?, json, stat),
        TreeCommand::Watch { path, only, from } => watch(client, WatchTreeRequest { path, only, from }, json).await,
        TreeCommand::Lease(command) => lease(client, command, json).await,
    }
}

/// What is to be written.
fn contents(args: &PutArgs) -> anyhow::Result<Vec<u8>> {
    let (name, source): (_, Box<dyn Read>) = match &args.file {
        Some(file) => {
            let name = file.display().to_string();
            (name.clone(), Box::new(std::fs::File::open(file).with_context(|| format!("cannot read {name}"))?))
        }
        None => ("standard input".to_owned(), Box::new(std::io::stdin().lock())),
    };
    let mut contents = Vec::new();
    let read = source.take(MOST_FILE_BYTES as u64 + 1).read_to_end(&mut contents);
    read.with_context(|| format!("cannot read {name}"))?;
    ensure!(
        contents.len() <= MOST_FILE_BYTES,
        "{name} is too large: a file of the tree has at most {MOST_FILE_BYTES} bytes"
    );
    Ok(contents)
}

async fn cat(client: &Client, path: TreePath, json: bool) -> anyhow::Result<()> {
    let read = client.tree_read(&path).await?;
    if !json {
        let mut out = std::io::stdout().lock();
        return out.write_all(&read.contents).and_then(|()| out.flush()).map_err(failed);
    }
    let (text, hex) = match String::from_utf8(read.contents.to_vec()) {
        Ok(text) => (Some(text), None),
        Err(e) => (None, Some(e.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect())),
    };
    print_json(&ShownFile { path, version: read.version, text, hex })
}

/// Makes the directories above a path that are not there.
async fn make_above(client: &Client, path: &TreePath, fence: Option<&TreeFence>) -> anyhow::Result<()> {
    let parent = |path: &TreePath| path.split().map(|(above, _)| above);
    let mut above = Vec::from_iter(std::iter::successors(parent(path), parent));
    // The last is the root, which is always there.
    above.pop();
    for path in above.into_iter().rev() {
        match client.tree_make_directory(&MakeTreeDirectoryRequest { path, fence: fence.cloned() }).await {
            Err(CallError::Refused(refusal)) if refusal.code == Code::Taken => {}
            made => drop(made?),
        }
    }
    Ok(())
}

async fn lease(client: &Client, command: LeaseCommand, json: bool) -> anyhow::Result<()> {
    match command {
        LeaseCommand::Grant { ttl } => {
            let lease = client.tree_grant_lease(&GrantTreeLeaseRequest { ttl_ms: ttl }).await?;
            show(&lease, json, |lease| format!("{}\n", lease.id))
        }
        LeaseCommand::Keep { id, hold: false } => show(&client.tree_keep_lease(id).await?, json, kept),
        LeaseCommand::Keep { id, hold: true } => {
            let mut enough = std::pin::pin!(tokio::signal::ctrl_c());
            let mut lease = client.tree_keep_lease(id).await?;
            loop {
                let kept = async {
                    tokio::time::sleep(Duration::from_millis(lease.ttl_ms / 3)).await;
                    follow::again(async || client.tree_keep_lease(id).await).await
                };
                lease = tokio::select! {
                    pressed = &mut enough => return Ok(pressed?),
                    kept = kept => kept?,
                };
            }
        }
        LeaseCommand::Revoke { id } => {
            client.tree_revoke_lease(id).await?;
            show(&RevokedLease { revoked: id }, json, |done| format!("lease {} revoked\n", done.revoked))
        }
        LeaseCommand::Ls => show(&client.tree_leases().await?, json, |leases| lease_table(leases)),
    }
}

/// Each change once, also over a connection that breaks.
async fn watch(client: &Client, request: WatchTreeRequest, json: bool) -> anyhow::Result<()> {
    let ask = async |request: &WatchTreeRequest| client.tree_watch(request).await;
    follow::resumed(request, true, ask, |request, TreeChanges { revision, changes }| {
        request.from = Some(revision);
        changes.iter().try_for_each(|change| follow::one(change, json, changed_line))
    })
    .await
}

fn ls(nodes: &[NodeStat], long: bool) -> String {
    let name = |node: &NodeStat| {
        let name = node.path.split().map_or("/", |(_, name)| name);
        format!("{name}{}", if node.kind == NodeKind::Directory { "/" } else { "" })
    };
    if !long {
        return nodes.iter().map(|node| name(node) + "\n").collect();
    }
    let mut rows = vec![["SIZE", "VERSION", "LEASE", "NAME"].map(str::to_owned).to_vec()];
    rows.extend(nodes.iter().map(|node| {
        let size = if node.kind == NodeKind::Directory { "-".to_owned() } else { bytes(node.size_bytes) };
        let lease = node.lease.map_or_else(|| "-".to_owned(), |lease| lease.to_string());
        vec![size, node.version.to_string(), lease, name(node)]
    }));
    table(&rows)
}

fn changed(node: &NodeStat) -> String {
    format!("{} version {}\n", node.path, node.version)
}

fn stat(node: &NodeStat) -> String {
    let kind = if node.kind == NodeKind::Directory { "directory" } else { "file" };
    let mut rows = vec![
        ("path", node.path.to_string()),
        ("kind", kind.to_owned()),
        ("size", bytes(node.size_bytes)),
        ("version", node.version.to_string()),
        ("created", node.created.to_string()),
    ];
    rows.extend(node.lease.map(|lease| ("lease", lease.to_string())));
    table(&rows.into_iter().map(|(what, is)| vec![what.to_owned(), is]).collect::<Vec<_>>())
}

fn changed_line(change: &TreeChange) -> String {
    let kind = match change.kind {
        TreeChangeKind::Created => "created",
        TreeChangeKind::Written => "written",
        TreeChangeKind::Removed => "removed",
        TreeChangeKind::Moved => "moved",
    };
    let from = change.from.as_ref().map(|from| format!("{from} -> ")).unwrap_or_default();
    format!("{:>8}  {kind:<7}  {from}{}\n", change.revision, change.path)
}

fn kept(lease: &TreeLease) -> String {
    format!("lease {} has {}\n", lease.id, millis(lease.left_ms))
}

fn lease_table(leases: &[TreeLease]) -> String {
    if leases.is_empty() {
        return "there are no leases\n".to_owned();
    }
    let mut rows = vec![["LEASE", "TTL", "LEFT"].map(str::to_owned).to_vec()];
    rows.extend(leases.iter().map(|one| vec![one.id.to_string(), millis(one.ttl_ms), millis(one.left_ms)]));
    table(&rows)
}
