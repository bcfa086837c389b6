//! `kip check` and `kip run --check`: a trial before a proc is trusted.

use crate::args::{RunArgs, parse_sleep_tier};
use crate::commands::show;
use crate::image;
use crate::text::{self, table};
use anyhow::bail;
use clap::Args;
use kip_client::Client;
use kip_types::api::{CheckRequest, CheckStep, CheckView, RunRequest};
use kip_types::lifecycle::Tier;
use std::process::ExitCode;

/// For commands that start procs.
#[derive(Debug, Clone, Args)]
pub struct TrialArgs {
    /// Start it only if a trial like that of `kip check` shows that it can be parked
    #[arg(long)]
    pub check: bool,
    /// Let that trial write to the volumes
    #[arg(long, requires = "check")]
    pub use_volumes: bool,
}

#[derive(Debug, Args)]
pub struct CheckArgs {
    /// Lowest tier that the trial is sent to: hibernated, parked or archived
    #[arg(long, value_name = "TIER", value_parser = parse_sleep_tier, default_value = "parked")]
    pub to: Tier,
    /// Let the trial write to the volumes
    #[arg(long)]
    pub use_volumes: bool,
    #[command(flatten)]
    pub run: RunArgs,
}

/// Makes the trial and shows what it showed. Exits with 1 if it could not sleep.
pub async fn check(client: &Client, mut args: CheckArgs, json: bool) -> anyhow::Result<ExitCode> {
    if let Some(text) = &args.run.image {
        args.run.image = Some(image::ensure(client, text, args.run.pull, &args.run.registry).await?);
    }
    let request = CheckRequest { run: args.run.into_request()?, to: args.to, volumes: args.use_volumes };
    let view = client.check(&request).await?;
    show(&view, json, lines)?;
    Ok(if view.sleeps { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Refuses what could not sleep in a trial, if one is asked for.
pub async fn require(client: &Client, request: &RunRequest, trial: &TrialArgs) -> anyhow::Result<()> {
    if !trial.check {
        return Ok(());
    }
    let request = CheckRequest { run: request.clone(), to: Tier::Parked, volumes: trial.use_volumes };
    let view = client.check(&request).await?;
    let spec = &request.run.spec;
    let failed = view.steps.iter().find(|step| !step.refused.is_empty());
    if let Some(step) = failed {
        bail!("{} was not started, for its trial could not {}: {}", spec.name, verb(step), step.refused.join("; "));
    }
    Ok(())
}

fn verb(step: &CheckStep) -> String {
    match (step.step.as_str(), step.tier) {
        ("sleep", Some(Tier::Hibernated)) => "hibernate".to_owned(),
        ("sleep", Some(Tier::Parked)) => "be parked".to_owned(),
        ("sleep", Some(Tier::Archived)) => "be archived".to_owned(),
        ("wake", Some(tier)) => format!("wake from {tier}"),
        (step, _) => step.to_owned(),
    }
}

fn lines(view: &CheckView) -> String {
    let mut rows = vec![["STEP", "RESULT", "TIME", "BYTES"].map(str::to_owned).to_vec()];
    for step in &view.steps {
        let result = if step.refused.is_empty() { "ok" } else { "NO" };
        let time = step.us.map(text::micros).unwrap_or_default();
        rows.push(vec![verb(step), result.to_owned(), time, step.bytes.map(text::bytes).unwrap_or_default()]);
    }
    let mut lines = table(&rows);
    for step in &view.steps {
        for why in &step.refused {
            lines += &format!("cannot {}: {why}\n", verb(step));
        }
    }
    lines +=
        if view.sleeps { "It can sleep.\n" } else { "It cannot sleep everywhere it was to; it would run on there.\n" };
    lines += &match view.pinned.as_slice() {
        [] => "Nothing ties it to this machine.\n".to_owned(),
        pins => format!("It is tied to this machine: {}.\n", pins.join("; ")),
    };
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_causes_and_pins_are_shown() {
        let step = |step: &str, tier, us, refused: &[&str]| CheckStep {
            step: step.into(),
            tier,
            us,
            bytes: us.map(|_| 2048),
            refused: refused.iter().map(|why| (*why).to_owned()).collect(),
        };
        let steps =
            vec![step("start", None, Some(9), &[]), step("sleep", Some(Tier::Parked), None, &["fd 3 is a thing"])];
        let view = CheckView { steps, sleeps: false, pinned: vec!["the volume a at /b is here".into()] };
        let text = lines(&view);
        assert!(text.contains("\nbe parked  NO\n") && text.contains("cannot be parked: fd 3 is a thing\n"), "{text}");
        assert!(text.ends_with("It is tied to this machine: the volume a at /b is here.\n"), "{text}");
    }
}
