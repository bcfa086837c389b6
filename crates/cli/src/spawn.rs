//! `kip spawn`, `kip procs`, `kip evict`: procs that run once, their parents and their ends.

use crate::follow;
use crate::many;
use crate::names;
use crate::output::show;
use anyhow::bail;
use clap::Args;
use kip_client::{CallError, Client};
use kip_text::{millis, now_ms, one_line, short, table};
use kip_types::api::Code;
use kip_types::api::spawn::{
    EvictRequest, SpawnEnd, SpawnEndKind, SpawnMoment, SpawnRequest, SpawnedRequest, SpawnedState, SpawnedView,
};
use kip_types::image::OciImage;
use kip_types::name::ProcName;
use kip_types::spec::{Image, ProcClass, Sandbox, TreeAccess, parse_duration_ms, parse_size};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Longest that one request waits, milliseconds.
const ASK_MS: u64 = 30_000;
/// Between requests while a daemon ends.
const ASK_AGAIN: Duration = Duration::from_millis(200);
/// Longest end and longest command of a row, characters.
const LONGEST_CELL: usize = 60;

#[derive(Debug, Args)]
pub struct SpawnArgs {
    /// How it shares CPUs: lc (latency-critical; what it asks for is reserved) or be (best effort;
    /// what others leave)
    #[arg(long, value_name = "CLASS", default_value = "lc")]
    class: ProcClass,
    /// At most so many CPUs, 0.5 for half of one
    #[arg(long, value_name = "N")]
    cpus: Option<f64>,
    /// At most so much memory: 256M, 2G
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    mem: Option<u64>,
    /// Variable of its environment; may be repeated
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = variable)]
    env: Vec<(String, String)>,
    /// Working directory inside
    #[arg(short, long, value_name = "DIR")]
    workdir: Option<PathBuf>,
    /// Files of an image instead of the parent's, or the host's
    #[arg(long, value_name = "REF")]
    image: Option<String>,
    /// Its sandbox, full or light; without this that of its parent
    #[arg(long, value_name = "KIND")]
    sandbox: Option<Sandbox>,
    /// The network that it is in
    #[arg(long, value_name = "NAME")]
    network: Option<String>,
    /// What it may do to the name tree, over the runtime socket: none, read or write
    #[arg(long, value_name = "ACCESS")]
    tree: Option<TreeAccess>,
    /// The failure domain to run in: the name of a machine
    #[arg(long, value_name = "MACHINE")]
    domain: Option<String>,
    /// The proc that it is a child of, with which it ends
    #[arg(long, value_name = "NAME", add = names::known())]
    parent: Option<ProcName>,
    /// It goes on when its parent ends
    #[arg(long, requires = "parent")]
    detached: bool,
    /// It has started when its program says so over the runtime socket, not once it was executed
    #[arg(long)]
    says_started: bool,
    /// Return at once, and leave it in the queue if there is no room
    #[arg(long, conflicts_with = "wait")]
    queue: bool,
    /// Wait until it has ended, and exit with its program's code
    #[arg(long)]
    wait: bool,
    /// Program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    command: Vec<String>,
}

#[derive(Debug, Args)]
pub struct ProcsArgs {
    /// Also those that have ended, as long as their ends are kept
    #[arg(short, long)]
    all: bool,
}

#[derive(Debug, Args)]
pub struct EvictArgs {
    /// Names of procs by spawn
    #[arg(add = names::known(), required = true, value_name = "NAME")]
    names: Vec<String>,
    /// Time between the word to end and SIGKILL; 10s
    #[arg(short = 't', long, value_name = "DUR", value_parser = parse_duration_ms)]
    grace: Option<u64>,
    /// Why, for those that wait for its end
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
}

fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("write NAME=VALUE".to_owned()),
    }
}

impl SpawnArgs {
    fn request(self) -> SpawnRequest {
        let image = self.image.map(|reference| Image::Oci(OciImage { reference, ..OciImage::default() }));
        SpawnRequest {
            command: self.command,
            env: self.env.into_iter().collect(),
            workdir: self.workdir,
            class: self.class,
            cpus: self.cpus,
            memory_bytes: self.mem,
            domain: self.domain,
            parent: self.parent,
            detached: self.detached,
            says_started: self.says_started,
            image,
            sandbox: self.sandbox,
            network: self.network,
            tree: self.tree,
        }
    }
}

/// Spawns one, and waits for its start or its end.
pub async fn spawn(client: &Client, args: SpawnArgs, json: bool) -> anyhow::Result<ExitCode> {
    let moment = match (args.queue, args.wait) {
        (true, _) => None,
        (_, true) => Some(SpawnMoment::Exit),
        _ => Some(SpawnMoment::Start),
    };
    let mut view = client.spawn(&args.request()).await?;
    if let Some(moment) = moment {
        view = until(client, &view.name, moment).await?;
    }
    if let Some(end) = view.end.as_ref().filter(|end| moment == Some(SpawnMoment::Start) && !has_run(end)) {
        bail!("{} has not started: {}", view.name, end_words(end));
    }
    if moment != Some(SpawnMoment::Exit) {
        show(&view, json, |view| format!("{}\n", view.name))?;
        return Ok(ExitCode::SUCCESS);
    }
    show(&view, json, |view| {
        let end = view.end.as_ref().map(end_words).unwrap_or_default();
        format!("{}  {end}\n", view.name)
    })?;
    let code = view.end.as_ref().map_or(1, SpawnEnd::shell_code);
    Ok(u8::try_from(code).map_or(ExitCode::FAILURE, ExitCode::from))
}

fn has_run(end: &SpawnEnd) -> bool {
    matches!(end.why, SpawnEndKind::Exited | SpawnEndKind::Killed) || end.exit_code.is_some() || end.signal.is_some()
}

/// Waits for a moment in its life, also over daemons that are killed.
async fn until(client: &Client, name: &ProcName, moment: SpawnMoment) -> anyhow::Result<SpawnedView> {
    let request = SpawnedRequest { wait: Some(moment), within_ms: Some(ASK_MS) };
    loop {
        match follow::again(async || client.wait_spawned(name, &request).await).await {
            // The daemon ends.
            Err(CallError::Refused(refusal)) if refusal.code == Code::Exhausted => {
                tokio::time::sleep(ASK_AGAIN).await;
            }
            Err(error) => return Err(error.into()),
            Ok(view) => {
                let has_come = match moment {
                    SpawnMoment::Start => view.started,
                    SpawnMoment::Exit => false,
                    SpawnMoment::Evict => view.evicted.is_some(),
                };
                if has_come || view.end.is_some() {
                    return Ok(view);
                }
            }
        }
    }
}

/// Has each end.
pub async fn evict(client: &Client, args: &EvictArgs, json: bool) -> anyhow::Result<ExitCode> {
    let request = EvictRequest { grace_ms: args.grace, reason: args.reason.clone() };
    many::each(&args.names, async |name| {
        show(&client.evict(name, &request).await?, json, |view| match &view.end {
            Some(end) => format!("{} has ended: {}\n", view.name, end_words(end)),
            None => format!("{} is to end\n", view.name),
        })
    })
    .await
}

/// Lists them.
pub async fn procs(client: &Client, args: &ProcsArgs, json: bool) -> anyhow::Result<()> {
    let mut views = client.spawned().await?;
    views.retain(|view| args.all || view.end.is_none());
    show(&views, json, |views| as_tree(views))
}

/// How it ended, in a few words.
fn end_words(end: &SpawnEnd) -> String {
    let is_said = matches!(end.why, SpawnEndKind::Exited | SpawnEndKind::Killed);
    let mut how = Vec::from_iter((!is_said).then(|| end.why.to_string()));
    how.extend(end.exit_code.map(|code| format!("exit code {code}")));
    how.extend(end.signal.map(|signal| format!("signal {signal}")));
    how.extend(end.status.map(|status| format!("status {status}")));
    let message = end.message.as_deref().map(|message| format!(": {}", one_line(message))).unwrap_or_default();
    format!("{}{message}", how.join(", "))
}

/// Children below their parents, a parent that was not spawned as a row of its own.
fn as_tree(views: &[SpawnedView]) -> String {
    if views.is_empty() {
        return "there are no procs by spawn\n".to_owned();
    }
    let known: BTreeSet<&ProcName> = views.iter().map(|view| &view.name).collect();
    let mut below: BTreeMap<Option<&ProcName>, Vec<&SpawnedView>> = BTreeMap::new();
    for view in views {
        below.entry(view.parent.as_ref()).or_default().push(view);
    }
    let mut rows = vec![["NAME", "CLASS", "STATE", "AGE", "END", "COMMAND"].map(str::to_owned).to_vec()];
    for view in below.get(&None).into_iter().flatten() {
        add(&mut rows, view, 0, &below);
    }
    for (parent, children) in below.iter().filter_map(|(parent, children)| Some(((*parent)?, children))) {
        if !known.contains(parent) {
            let dash = || "-".to_owned();
            rows.push(vec![parent.to_string(), dash(), dash(), dash(), dash(), dash()]);
            children.iter().for_each(|view| add(&mut rows, view, 1, &below));
        }
    }
    table(&rows)
}

fn add(
    rows: &mut Vec<Vec<String>>,
    view: &SpawnedView,
    depth: usize,
    below: &BTreeMap<Option<&ProcName>, Vec<&SpawnedView>>,
) {
    let state = match (view.state, view.tier) {
        (SpawnedState::Live, Some(tier)) => tier.to_string(),
        (state, _) => state.to_string(),
    };
    let waits = view.waits_for.as_ref().map(|what| format!("waits for {what}"));
    let end = view.end.as_ref().map(end_words).or(waits).unwrap_or_else(|| "-".to_owned());
    rows.push(vec![
        format!("{}{}", "  ".repeat(depth), view.name),
        view.class.to_string(),
        state,
        millis(now_ms().saturating_sub(view.spawned_at_ms)),
        short(&end, LONGEST_CELL),
        short(&one_line(&view.command.join(" ")), LONGEST_CELL),
    ]);
    for child in below.get(&Some(&view.name)).into_iter().flatten() {
        add(rows, child, depth + 1, below);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(name: &str, parent: Option<&str>, end: Option<SpawnEnd>) -> SpawnedView {
        let state = if end.is_some() { SpawnedState::Ended } else { SpawnedState::Queued };
        SpawnedView {
            name: name.parse().unwrap(),
            command: vec![format!("/bin/{name}"), "x\ny".to_owned()],
            parent: parent.map(|parent| parent.parse().unwrap()),
            detached: false,
            class: ProcClass::Be,
            state,
            tier: None,
            waits_for: None,
            started: true,
            evicted: None,
            spawned_at_ms: u64::MAX,
            end,
        }
    }

    // promise spawn: `kip procs` shows children below their parents and how each has ended
    // held by: this, `tests/test_spawn.py::test_parents`
    #[test]
    fn children_are_below_their_parents() {
        let end = |why, exit_code, message: Option<&str>| {
            Some(SpawnEnd { why, exit_code, signal: None, status: None, message: message.map(Into::into), at_ms: 1 })
        };
        let lost = end(SpawnEndKind::Lost, None, Some("the machine"));
        let views = [
            view("a", Some("web"), lost),
            view("b", None, end(SpawnEndKind::Exited, Some(3), None)),
            view("c", Some("b"), None),
        ];
        let text = as_tree(&views);
        let lines: Vec<String> =
            text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(lines[1], "b be ended 0ms exit code 3 /bin/b x y");
        assert_eq!(lines[2], "c be queued 0ms - /bin/c x y");
        assert!(text.lines().nth(2).unwrap().starts_with("  c "), "{text}");
        assert_eq!(lines[3], "web - - - - -");
        assert_eq!(lines[4], "a be ended 0ms lost: the machine /bin/a x y");
    }
}
