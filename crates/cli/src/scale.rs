//! `kip scale`: several procs behind the name of one.

use crate::names;
use crate::output::show;
use clap::Args;
use kip_client::Client;
use kip_text::table;
use kip_types::ProcName;
use kip_types::api::UpdateRequest;
use kip_types::api::scale::{ReplicaView, ScaleView};
use kip_types::life::Check;
use kip_types::scale::{CloneMethod, Scaling};
use kip_types::spec::parse_duration_ms;
use kip_types::volume::ClonedVolumes;

#[derive(Debug, Args)]
pub struct ScaleArgs {
    /// Name of the proc
    #[arg(add = names::known())]
    pub name: String,
    /// Procs that are there and awake at least, itself included; 0 lets the last one sleep
    /// [default: 0]
    #[arg(long, value_name = "N")]
    pub min: Option<u32>,
    /// Procs that are there at most, itself included, 1 to 32
    #[arg(long, value_name = "N")]
    pub max: Option<u32>,
    /// What a new one begins from: auto, hot, warm or cold [default: auto]
    #[arg(long, value_name = "HOW")]
    pub method: Option<CloneMethod>,
    /// What they have in place of volumes that the proc can write to: share, copy or drop
    #[arg(long, value_name = "HOW")]
    pub volumes: Option<ClonedVolumes>,
    /// Check, asked every 3 s while the proc is awake: tcp:PORT, http:PORT/PATH or exec:COMMAND;
    /// while it fails another one is added
    #[arg(long, value_name = "CHECK")]
    pub probe: Option<Check>,
    /// How long the load has to be low before one is taken away [default: 1m]
    #[arg(long, value_name = "DUR", value_parser = parse_duration_ms)]
    pub calm: Option<u64>,
    /// End it: the replicas are removed
    #[arg(long, conflicts_with_all = ["min", "max", "method", "volumes", "probe", "calm"])]
    pub off: bool,
}

impl ScaleArgs {
    /// What the proc is to be scaled like from now on; none if it is only looked at. What is not
    /// given stays as it is.
    fn change(&self, is: Option<&Scaling>) -> Option<Option<Scaling>> {
        if self.off {
            return Some(None);
        }
        let given = [self.min.is_some(), self.max.is_some(), self.method.is_some(), self.volumes.is_some()];
        if !given.contains(&true) && self.probe.is_none() && self.calm.is_none() {
            return None;
        }
        let mut scaling = is.cloned().unwrap_or_default();
        scaling.min = self.min.unwrap_or(scaling.min);
        scaling.max = self.max.unwrap_or(scaling.max.max(scaling.min));
        scaling.method = self.method.unwrap_or(scaling.method);
        scaling.volumes = self.volumes.or(scaling.volumes);
        scaling.probe = self.probe.clone().or(scaling.probe);
        scaling.calm_ms = self.calm.unwrap_or(scaling.calm_ms);
        Some(Some(scaling))
    }
}

/// Changes how a proc is scaled, and shows it.
pub async fn call(client: &Client, args: ScaleArgs, json: bool) -> anyhow::Result<()> {
    let name: ProcName = args.name.parse()?;
    let mut view = client.scale(&name).await?;
    if let Some(scale) = args.change(view.scaling.as_ref()) {
        client.update(&name, &UpdateRequest { scale: Some(scale), ..UpdateRequest::default() }).await?;
        view = client.scale(&name).await?;
    }
    show(&view, json, text)
}

fn text(view: &ScaleView) -> String {
    let name = &view.name;
    let Some(scaling) = &view.scaling else {
        return format!("{name} serves alone: `kip scale {name} --max 4` lets replicas serve behind its name\n");
    };
    let Scaling { min, max, method, calm_ms, .. } = scaling;
    let mut text = format!(
        "{name} is scaled from {min} to {max}, method {method}; one is taken away after {} s of low load\n",
        *calm_ms as f64 / 1000.0
    );
    if let Some(last) = &view.last {
        text.push_str(&format!("last: {last}\n"));
    }
    let head = ["NAME", "STATE", "CONNECTIONS", "BUSY", "QUEUED"].map(str::to_owned).to_vec();
    let row = |replica: &ReplicaView| {
        let reached = if replica.in_rotation { "new ones" } else { "its own" };
        let busy = format!("{:.0}%", replica.busy * 100.0);
        vec![replica.name.to_string(), replica.state.to_string(), reached.to_owned(), busy, replica.queued.to_string()]
    };
    text + &table(&[head].into_iter().chain(view.replicas.iter().map(row)).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use crate::args::{Cli, Command};
    use kip_types::scale::{CloneMethod, Scaling};

    fn change(words: &str, is: Option<&Scaling>) -> Option<Option<Scaling>> {
        let cli = Cli::read(["kip", "scale", "web"].into_iter().chain(words.split_whitespace())).unwrap();
        let Command::Scale(args) = cli.command else { panic!("another command") };
        args.change(is)
    }

    #[test]
    fn what_is_not_given_stays() {
        assert_eq!(change("", None), None);
        assert_eq!(change("--off", None), Some(None));
        let first = change("--max 8 --calm 5s", None).flatten().unwrap();
        assert_eq!(first, Scaling { max: 8, calm_ms: 5000, ..Scaling::default() });
        let then = change("--min 2 --method warm", Some(&first)).flatten().unwrap();
        assert_eq!(then, Scaling { min: 2, method: CloneMethod::Warm, ..first });
        let more = change("--min 12", Some(&then)).flatten().unwrap();
        assert_eq!((more.min, more.max), (12, 12));
        assert!(Cli::read(["kip", "scale", "web", "--off", "--max", "2"]).is_err());
    }
}
