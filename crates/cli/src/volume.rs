//! `kip volume`: volumes that Kip keeps under a name.

use crate::output::show;
use clap::Subcommand;
use kip_client::Client;
use kip_text::{bytes, table};
use kip_types::ProcName;
use kip_types::volume::{VolumeName, VolumeView};
use serde::Serialize;

#[derive(Debug, Subcommand)]
pub enum VolumeCommand {
    /// List volumes with their disk space and the procs that have them
    Ls,
    /// Delete a volume with its files; refused as long as a proc has it
    Rm {
        /// Name of the volume
        name: VolumeName,
    },
}

#[derive(Serialize)]
struct Removed {
    removed: VolumeName,
}

/// Carries out one of them.
pub async fn call(client: &Client, command: VolumeCommand, json: bool) -> anyhow::Result<()> {
    match command {
        VolumeCommand::Ls => show(&client.volumes().await?, json, |views| ls(views)),
        VolumeCommand::Rm { name } => {
            client.remove_volume(&name).await?;
            show(&Removed { removed: name }, json, |done| format!("volume {} removed\n", done.removed))
        }
    }
}

fn ls(views: &[VolumeView]) -> String {
    if views.is_empty() {
        return "there are no volumes\n".to_owned();
    }
    let mut rows = vec![["NAME", "SIZE", "PROCS", "PATH"].map(str::to_owned).to_vec()];
    rows.extend(views.iter().map(|view| {
        let users: Vec<&str> = view.users.iter().map(ProcName::as_str).collect();
        let users = if users.is_empty() { "-".to_owned() } else { users.join(",") };
        vec![view.name.to_string(), bytes(view.bytes), users, view.path.display().to_string()]
    }));
    table(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_shows_who_has_what() {
        let view = |name: &str, users: &[&str]| VolumeView {
            name: name.parse().unwrap(),
            path: format!("/d/volumes/{name}").into(),
            bytes: 2048,
            users: users.iter().map(|u| u.parse().unwrap()).collect(),
        };
        let text = ls(&[view("a", &["db", "web"]), view("b", &[])]);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["a", "2.0K", "db,web", "/d/volumes/a"]);
        assert_eq!(lines[2], ["b", "2.0K", "-", "/d/volumes/b"]);
        assert_eq!(ls(&[]), "there are no volumes\n");
    }
}
