//! The commands that are calls of the daemon.

use crate::args::{Command, DownArgs, InspectArgs, LogsArgs, RunArgs};
use crate::life::WaitArgs;
use crate::output::{print, print_json};
use crate::{apply, backup, check, details, exec, follow, image, key, meter, snapshot, text, token, top, view, volume};
use anyhow::{Context, bail};
use kip_client::Client;
use kip_types::api::{DownRequest, DownView, EventsRequest, LogsRequest, ProcView, SleepRequest, StartRequest};
use kip_types::name::ProcName;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::Serialize;
use std::os::fd::OwnedFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Between looks whether a proc is ready.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long the daemon may take to end after it said that it will, seconds.
const DOWN_WITHIN_S: i64 = 30;

/// Carries out `command`.
pub async fn call(client: &Client, command: Command, json: bool) -> anyhow::Result<ExitCode> {
    match command {
        Command::Up(_)
        | Command::Restore(_)
        | Command::Doctor(_)
        | Command::Completion(_)
        | Command::Man(_)
        | Command::Profiles => {
            unreachable!("these are not calls of a daemon")
        }
        Command::Down(args) => return down(client, &args, json).await,
        Command::Run { trial, args } => run(client, *args, &trial, json).await?,
        Command::Check(args) => return check::check(client, *args, json).await,
        Command::Apply(args) => return apply::apply(client, &args, json).await,
        Command::Diff(args) => return apply::diff(client, &args, json).await,
        Command::Export(args) => apply::export(client, &args, json).await?,
        Command::Start(args) => {
            show(&client.start(&name(&args.name)?, &StartRequest::default()).await?, json, view::run)?
        }
        Command::Top(args) => top::top(client, &args, json).await?,
        Command::Ps => show(&client.list().await?, json, |views| view::ps(views))?,
        Command::Inspect(args) => inspect(client, &args, json).await?,
        Command::Wait(args) => wait_ready(client, &args, json).await?,
        Command::Stop(args) => show(&client.stop(&name(&args.name)?, args.grace).await?, json, stopped)?,
        Command::Rm(args) => {
            let name = name(&args.name)?;
            client.remove(&name, args.force).await?;
            show(&Removed { removed: name }, json, |done| format!("{} removed\n", done.removed))?;
        }
        Command::Sleep(args) => {
            let how = SleepRequest { to: args.to, clock: args.clock };
            show(&client.sleep(&name(&args.name)?, how).await?, json, view::sleep)?;
        }
        Command::Wake(args) => show(&client.wake(&name(&args.name)?, args.id.as_deref()).await?, json, view::wake)?,
        Command::Why(args) => show(&client.why(&name(&args.name)?).await?, json, view::why)?,
        Command::Meter(args) => meter::meter(client, &args, json).await?,
        Command::Metrics => print(&client.metrics().await?)?,
        Command::Logs(args) => logs(client, &args, json).await?,
        Command::Events(args) => {
            follow::events(client, EventsRequest { follow: args.follow, since: args.since }, json).await?;
        }
        Command::Snapshot(args) => return snapshot::call(client, args.command, json).await,
        Command::Image(command) => image::call(client, command, json).await?,
        Command::Key(command) => key::call(client, command, json).await?,
        Command::Backup(args) => backup::backup(client, &args, json).await?,
        Command::Volume(command) => volume::call(client, command, json).await?,
        Command::Token(command) => token::call(client, command, json).await?,
        Command::Exec(args) => return exec::exec(client, &name(&args.name)?, args).await,
    }
    Ok(ExitCode::SUCCESS)
}

/// Brings the image first, if there is one and that is wanted.
async fn run(client: &Client, mut args: RunArgs, trial: &check::TrialArgs, json: bool) -> anyhow::Result<()> {
    if let Some(text) = &args.image {
        let name = image::ensure(client, text, args.pull, &args.registry).await?;
        args.image = Some(name);
    }
    let request = args.into_request()?;
    check::require(client, &request, trial).await?;
    show(&client.run(&request).await?, json, view::run)
}

#[derive(Serialize)]
struct Removed {
    removed: ProcName,
}

pub fn show<T: Serialize>(value: &T, json: bool, human: impl FnOnce(&T) -> String) -> anyhow::Result<()> {
    if json { print_json(value) } else { print(&human(value)) }
}

pub fn name(text: &str) -> anyhow::Result<ProcName> {
    text.parse().with_context(|| format!("there is no proc {text:?}"))
}

async fn inspect(client: &Client, args: &InspectArgs, json: bool) -> anyhow::Result<()> {
    let name = name(&args.name)?;
    match args.detail() {
        None => show(&client.inspect(&name).await?, json, view::inspect),
        Some(of) => show(&client.details(&name, of).await?, json, details::details),
    }
}

async fn wait_ready(client: &Client, args: &WaitArgs, json: bool) -> anyhow::Result<()> {
    let view = until_ready(client, &name(&args.name)?, args.timeout).await?;
    show(&view, json, |view| match view.ready {
        Some(_) => format!("{} is ready\n", view.name),
        None => format!("{} is {}\n", view.name, view.state),
    })
}

/// Until it is ready, or, without a check of its own, runs. Looks as often as it takes; nothing of it wakes the proc.
pub async fn until_ready(client: &Client, name: &ProcName, within_ms: u64) -> anyhow::Result<ProcView> {
    let until = Instant::now() + Duration::from_millis(within_ms);
    loop {
        let view = client.inspect(name).await?;
        match (view.ready, view.state.as_str()) {
            (Some(true), _) => return Ok(view),
            (None, state) if state != "starting" && view.tier.is_some() => return Ok(view),
            (_, "stopped" | "elsewhere") => bail!("{name} is {}: it does not become ready", view.state),
            _ if Instant::now() >= until => {
                bail!("{name} is {} and was not ready within {}", view.state, text::millis(within_ms))
            }
            _ => tokio::time::sleep(LOOK_EVERY).await,
        }
    }
}

fn stopped(view: &ProcView) -> String {
    match &view.exit {
        Some(exit) => format!("{} {} ({exit})\n", view.name, view.state),
        None => format!("{} {}\n", view.name, view.state),
    }
}

async fn logs(client: &Client, args: &LogsArgs, json: bool) -> anyhow::Result<()> {
    let since_ms = args.since.map(|ms| text::now_ms().saturating_sub(ms));
    let which = LogsRequest { follow: args.follow, tail: args.tail, since_ms };
    let feed = client.logs(&name(&args.name)?, &which).await?;
    let timestamps = args.timestamps;
    let human = move |line: &kip_types::api::LogLine| match timestamps {
        true => format!("{} {}\n", text::utc(line.at_ms), line.text),
        false => format!("{}\n", line.text),
    };
    follow::show(feed, json, human).await
}

/// Returns when the daemon is gone, so that the next one can be started at once.
async fn down(client: &Client, args: &DownArgs, json: bool) -> anyhow::Result<ExitCode> {
    let daemon = client.daemon_pid().await?;
    // None where the daemon is not visible from here or not ours to watch: then its word has to do.
    let watched = daemon.and_then(Pid::from_raw).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let view = client.down(&DownRequest { park: args.park, within_ms: args.within }).await?;
    if let Some(pidfd) = watched {
        wait_for_end(&pidfd).with_context(|| format!("watching the daemon (pid {})", daemon.unwrap_or(0)))?;
    }
    show(&view, json, if args.park { parked } else { ended })?;
    Ok(if view.awake.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn wait_for_end(pidfd: &OwnedFd) -> anyhow::Result<()> {
    let patience = Timespec { tv_sec: DOWN_WITHIN_S, tv_nsec: 0 };
    match poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&patience))? {
        0 => bail!("it has done that, but the daemon itself has not ended within {DOWN_WITHIN_S} s"),
        _ => Ok(()),
    }
}

fn ended(view: &DownView) -> String {
    let names: Vec<_> = view.ended.iter().map(ProcName::as_str).collect();
    match names.as_slice() {
        [] => "ended; there were no procs\n".to_owned(),
        names => format!("ended, and with it {}\n", names.join(", ")),
    }
}

fn parked(view: &DownView) -> String {
    let names: Vec<_> = view.asleep.iter().map(ProcName::as_str).collect();
    let mut text = match names.as_slice() {
        [] => "the daemon has ended; no proc is asleep\n".to_owned(),
        names => format!("the daemon has ended; asleep until the next `kip up`: {}\n", names.join(", ")),
    };
    for (name, why) in &view.awake {
        text += &format!("{name} runs on: {why}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn down_waits_for_the_daemon_to_be_gone() {
        // Ends when its stdin does.
        let mut daemon = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let pidfd = pidfd_open(Pid::from_child(&daemon), PidfdFlags::empty()).unwrap();
        let waiting = std::thread::spawn(move || wait_for_end(&pidfd));
        assert!(!waiting.is_finished());
        drop(daemon.stdin.take());
        waiting.join().unwrap().unwrap();
        assert!(daemon.try_wait().unwrap().is_some(), "it had ended when the wait did");
    }

    #[test]
    fn down_tells_what_it_ended() {
        assert_eq!(ended(&DownView::default()), "ended; there were no procs\n");
        let two = DownView { ended: vec!["a".parse().unwrap(), "b".parse().unwrap()], ..DownView::default() };
        assert_eq!(ended(&two), "ended, and with it a, b\n");
    }
}
