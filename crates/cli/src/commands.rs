//! The commands that are calls of the daemon.

use crate::args::{CloneArgs, Command, DownArgs, InspectArgs, KillArgs};
use crate::image::ImageCommand;
use crate::many::each;
use crate::names::name;
use crate::output::{print, show};
use crate::run_args::RunArgs;
use crate::snapshot::SnapshotCommand;
use crate::{
    apply, attach, backup, check, checkpoint, cp, details, events, exec, image, key, logs, meter, port, ps, scale,
    snapshot, spawn, stats, template, token, top, tree, update, view, volume, wait,
};
use anyhow::{Context, bail};
use kip_client::Client;
use kip_types::StateName;
use kip_types::api::clone::{CloneMethod, CloneRequest};
use kip_types::api::{DownRequest, DownView, ProcView, SignalRequest, SleepRequest, StartRequest};
use kip_types::name::ProcName;
use kip_types::spec::parse_signal;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};
use serde::Serialize;
use std::cell::Cell;
use std::io::IsTerminal;
use std::os::fd::OwnedFd;
use std::process::ExitCode;

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
        Command::Run { trial, args } => return run(client, *args, &trial, json).await,
        Command::Check(args) => return check::check(client, *args, json).await,
        Command::Apply(args) => return apply::apply(client, &args, json).await,
        Command::Diff(args) => return apply::diff(client, &args, json).await,
        Command::Export(args) => apply::export(client, &args, json).await?,
        Command::Start(args) => {
            let how = StartRequest { wait_ready: args.wait_ready };
            let start = async |name: &_| show(&client.start(name, &how).await?, json, view::run);
            return each(&args.names, start).await;
        }
        Command::Restart(args) => {
            let restart = async |name: &_| {
                if client.inspect(name).await?.spec.remove {
                    bail!("{name} is removed when it ends (--rm): it cannot be ended and started again");
                }
                client.stop(name, args.grace).await?;
                let started = client.start(name, &StartRequest::default()).await;
                show(&started.with_context(|| format!("{name} is stopped, and not started again"))?, json, view::run)
            };
            return each(&args.names, restart).await;
        }
        Command::Rename(args) => {
            let renamed = client.rename(&name(&args.name)?, &args.new).await?;
            show(&renamed, json, |view| format!("{} is {} now\n", args.name, view.name))?;
        }
        Command::Clone(args) => {
            let CloneArgs { source, name: clone, count, ports, hot: _, warm, cold, by, explain, volumes, asleep } =
                args;
            if explain {
                show(&client.clone_advice(&name(&source)?).await?, json, view::clone_advice)?;
                return Ok(ExitCode::SUCCESS);
            }
            let method = match (warm, cold) {
                (true, _) => CloneMethod::Warm,
                (_, true) => CloneMethod::Cold,
                _ => by.unwrap_or_default(),
            };
            let (proc, checkpoint) = match source.split_once('@') {
                Some((proc, tag)) => (proc, Some(tag.parse()?)),
                None => (&*source, None),
            };
            let request =
                CloneRequest { name: clone, checkpoint, count, ports, method, volumes, asleep, replica_of: None };
            show(&client.clone_proc(&name(proc)?, &request).await?, json, |made| view::clones(&source, made))?;
        }
        Command::Checkpoint(args) => checkpoint::call(client, args, json).await?,
        Command::Rollback(args) => checkpoint::rollback(client, args, json).await?,
        Command::Scale(args) => scale::call(client, args, json).await?,
        Command::Template(command) => template::call(client, command, json).await?,
        Command::Update(args) => return update::update(client, &args, json).await,
        Command::Top(args) => top::top(client, &args, json).await?,
        Command::Ps(args) => ps::ps(client, &args, json).await?,
        Command::Port(args) => port::port(client, &args, json).await?,
        Command::Stats(args) => stats::stats(client, &args, json).await?,
        Command::Inspect(args) => {
            // One below the other, with a line between them that belongs to neither.
            let first = Cell::new(true);
            let show_one = async |name: &_| {
                if !first.replace(false) && !json {
                    print("\n")?;
                }
                inspect(client, name, &args, json).await
            };
            return each(&args.names, show_one).await;
        }
        Command::Cp(args) => cp::cp(client, &args, json).await?,
        Command::Wait(args) => return wait::wait(client, &args, json).await,
        Command::Stop(args) => return stop(client, &args.names, args.grace, json).await,
        Command::Kill(args) => return kill(client, &args, json).await,
        Command::Rm(args) => {
            let remove = async |name: &ProcName| {
                client.remove(name, args.force).await?;
                show(&Removed { removed: name.clone() }, json, |done| format!("{} removed\n", done.removed))
            };
            return each(&args.names, remove).await;
        }
        Command::Sleep(args) => {
            let sleep = async |name: &_| {
                let how = SleepRequest { to: args.to, clock: args.clock };
                show(&client.sleep(name, how).await?, json, view::sleep)
            };
            return each(&args.names, sleep).await;
        }
        Command::Wake(args) => {
            if args.id.is_some() && args.names.len() > 1 {
                bail!("--id is of one proc: give one name with it");
            }
            let wake = async |name: &_| show(&client.wake(name, args.id.as_deref()).await?, json, view::wake);
            return each(&args.names, wake).await;
        }
        Command::Why(args) => show(&client.why(&name(&args.name)?).await?, json, view::why)?,
        Command::Meter(args) => meter::meter(client, &args, json).await?,
        Command::Metrics => print(&client.metrics().await?)?,
        Command::Logs(args) => logs::logs(client, &args, json).await?,
        Command::Events(args) => events::events(client, &args, json).await?,
        Command::Spawn(args) => return spawn::spawn(client, *args, json).await,
        Command::Procs(args) => spawn::procs(client, &args, json).await?,
        Command::Evict(args) => return spawn::evict(client, &args, json).await,
        Command::Snapshot(args) => return snapshot::call(client, args.command, json).await,
        Command::Image(command) => image::call(client, command, json).await?,
        Command::Key(command) => key::call(client, command, json).await?,
        Command::Backup(args) => backup::backup(client, &args, json).await?,
        Command::Volume(command) => volume::call(client, command, json).await?,
        Command::Tree(command) => tree::call(client, command, json).await?,
        Command::Token(command) => token::call(client, command, json).await?,
        Command::Exec(args) => return exec::exec(client, &name(&args.name)?, args).await,
        Command::Attach(args) => return attach::attach(client, &args).await,
    }
    Ok(ExitCode::SUCCESS)
}

/// Brings the image first, if there is one and that is wanted. Stays attached where that is asked
/// for.
async fn run(client: &Client, mut args: RunArgs, trial: &check::TrialArgs, json: bool) -> anyhow::Result<ExitCode> {
    let stays = (args.attach || args.interactive || args.tty) && !args.detach;
    if stays && json {
        bail!("--json is for a run that returns: add -d, or leave out -i, -t and -a");
    }
    let seat = attach::Attachment::of_run(&args, stays)?;
    if let Some(text) = &args.image {
        let name = image::ensure(client, text, args.pull, &args.registry).await;
        args.image = Some(name.map_err(|e| args.meant_program(e))?);
    }
    let request = args.into_request()?;
    check::require(client, &request, trial).await?;
    let view = client.run(&request).await?;
    match seat {
        Some(seat) => seat.sit(client, &view.name).await,
        None => show(&view, json, view::run).map(|()| ExitCode::SUCCESS),
    }
}

#[derive(Serialize)]
struct Removed {
    removed: ProcName,
}

async fn inspect(client: &Client, name: &ProcName, args: &InspectArgs, json: bool) -> anyhow::Result<()> {
    match args.detail() {
        None => show(&client.inspect(name).await?, json, view::inspect),
        Some(of) => show(&client.details(name, of).await?, json, details::details),
    }
}

async fn stop(client: &Client, names: &[String], grace_ms: Option<u64>, json: bool) -> anyhow::Result<ExitCode> {
    each(names, async |name| show(&client.stop(name, grace_ms).await?, json, stopped)).await
}

#[derive(Serialize)]
struct Signalled {
    name: ProcName,
    signal: i32,
}

async fn kill(client: &Client, args: &KillArgs, json: bool) -> anyhow::Result<ExitCode> {
    let signal = parse_signal(&args.signal)?;
    if signal == Signal::KILL.as_raw() {
        return stop(client, &args.names, Some(0), json).await;
    }
    let send = async |name: &ProcName| {
        client.signal(name, &SignalRequest { signal: signal.to_string() }).await?;
        show(&Signalled { name: name.clone(), signal }, json, |sent| {
            format!("{} got signal {}\n", sent.name, sent.signal)
        })
    };
    each(&args.names, send).await
}

fn stopped(view: &ProcView) -> String {
    match &view.exit {
        Some(exit) => format!("{} {} ({exit})\n", view.name, view.state),
        None => format!("{} {}\n", view.name, view.state),
    }
}

/// Returns when the daemon is gone, so that the next one can be started at once.
async fn down(client: &Client, args: &DownArgs, json: bool) -> anyhow::Result<ExitCode> {
    if !args.park && !args.all && !may_end(client, json).await? {
        return Ok(ExitCode::FAILURE);
    }
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

/// Whether the procs that are awake or asleep may be ended, by the word of the person at the
/// terminal.
///
/// # Errors
/// There are some, and no terminal.
async fn may_end(client: &Client, json: bool) -> anyhow::Result<bool> {
    /// More names than these are counted.
    const MOST_NAMES: usize = 8;
    let procs = client.list().await?;
    let there: Vec<&str> = procs
        .iter()
        .filter(|view| !matches!(view.state, StateName::Stopped | StateName::Restarting | StateName::Elsewhere))
        .map(|view| view.name.as_str())
        .collect();
    if there.is_empty() {
        return Ok(true);
    }
    let more = there.len().saturating_sub(MOST_NAMES);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    let names = format!("{}{more}", there[..there.len().min(MOST_NAMES)].join(", "));
    let what = if there.len() == 1 { "proc that is" } else { "procs that are" };
    let ends = format!("this ends {} {what} awake or asleep, with all in memory: {names}", there.len());
    if json || !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        bail!("{ends}; give --all if that is meant, or --park to have them again at the next `kip up`");
    }
    eprint!("{ends}\n`kip down --park` keeps them for the next `kip up`. End them? [y/N] ");
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    let yes = matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes");
    if !yes {
        eprintln!("nothing was ended");
    }
    Ok(yes)
}

fn wait_for_end(pidfd: &OwnedFd) -> anyhow::Result<()> {
    let patience = Timespec { tv_sec: DOWN_WITHIN_S, tv_nsec: 0 };
    match poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&patience))? {
        0 => bail!("the daemon has carried out the request, but its process still runs {DOWN_WITHIN_S} s later"),
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

/// Why `command` cannot be asked for from elsewhere: files that it names are the daemon's.
pub fn at_home_only(command: &Command) -> Option<&'static str> {
    let run = match command {
        Command::Run { args, .. } => Some(&**args),
        Command::Check(args) => Some(&args.run),
        _ => None,
    };
    if let Some(args) = run {
        let file_of = |image: &str| is_file(image).then_some("this image is a file of");
        let relative = args.volumes.iter().any(|volume| volume.is_relative);
        return match (args.tar.is_some(), relative, args.bases.is_empty()) {
            (true, ..) => Some("--tar takes a file of"),
            (_, true, _) => Some("-v with a path that begins with a dot takes a directory of"),
            (.., false) => Some("--base takes a directory of"),
            _ => args.image.as_deref().and_then(file_of),
        };
    }
    match command {
        Command::Token(_) => Some("`kip token` works only on"),
        Command::Backup(_) => Some("`kip backup` writes a file of"),
        Command::Image(ImageCommand::Load(_)) => Some("`kip image load` takes files of"),
        Command::Snapshot(args) => match args.command {
            SnapshotCommand::Export { .. } => Some("`kip snapshot export` writes a file of"),
            SnapshotCommand::Import { .. } => Some("`kip snapshot import` takes a file of"),
            _ => None,
        },
        _ => None,
    }
}

fn is_file(image: &str) -> bool {
    image.starts_with("oci:") || image.starts_with("docker-archive:")
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
    fn down_reports_what_it_ended() {
        assert_eq!(ended(&DownView::default()), "ended; there were no procs\n");
        let two = DownView { ended: vec!["a".parse().unwrap(), "b".parse().unwrap()], ..DownView::default() };
        assert_eq!(ended(&two), "ended, and with it a, b\n");
    }
}
