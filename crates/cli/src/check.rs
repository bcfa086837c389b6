//! `kip check` and `kip run --check`: a trial before a proc is trusted.

use crate::image;
use crate::output::show;
use crate::run_args::RunArgs;
use anyhow::bail;
use clap::Args;
use kip_client::Client;
use kip_text as text;
use kip_text::table;
use kip_types::api::{CheckAnswer, CheckOperation, CheckRequest, CheckStep, CheckVerdict, CheckView, RunRequest};
use kip_types::lifecycle::Tier;
use std::process::ExitCode;

pub fn parse_sleep_tier(s: &str) -> Result<Tier, String> {
    match s {
        "hibernated" => Ok(Tier::Hibernated),
        "parked" => Ok(Tier::Parked),
        "archived" => Ok(Tier::Archived),
        _ => Err("a proc can be sent to the tiers hibernated, parked and archived".to_owned()),
    }
}

/// For commands that start procs.
#[derive(Debug, Clone, Args)]
pub struct TrialArgs {
    /// Start the proc only if a trial like that of `kip check` shows that it can be parked
    #[arg(long)]
    pub check: bool,
    /// Let that trial write to the volumes
    #[arg(long, requires = "check")]
    pub use_volumes: bool,
    /// Give that trial the network of the proc
    #[arg(long, requires = "check")]
    pub with_network: bool,
}

#[derive(Debug, Args)]
pub struct CheckArgs {
    /// Lowest tier that the trial is sent to: hibernated, parked or archived
    #[arg(long, value_name = "TIER", value_parser = parse_sleep_tier, default_value = "parked")]
    pub to: Tier,
    /// Let the trial write to the volumes, unless a proc that runs or sleeps has them
    #[arg(long)]
    pub use_volumes: bool,
    /// Give the trial the network of the proc; otherwise it has no network
    #[arg(long)]
    pub with_network: bool,
    #[command(flatten)]
    pub run: RunArgs,
}

/// Makes the trial and shows what it showed. Exits with 1 if it could not sleep.
pub async fn check(client: &Client, mut args: CheckArgs, json: bool) -> anyhow::Result<ExitCode> {
    if let Some(text) = &args.run.image {
        let name = image::ensure(client, text, args.run.pull, &args.run.registry).await;
        args.run.image = Some(name.map_err(|e| args.run.meant_program(e))?);
    }
    let (to, volumes, network) = (args.to, args.use_volumes, args.with_network);
    let request = CheckRequest { run: args.run.into_request()?, to, volumes, network };
    let view = client.check(&request).await?;
    show(&view, json, lines)?;
    Ok(if view.sleeps { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Refuses what could not sleep in a trial, if one is asked for.
pub async fn require(client: &Client, request: &RunRequest, trial: &TrialArgs) -> anyhow::Result<()> {
    if !trial.check {
        return Ok(());
    }
    let (volumes, network) = (trial.use_volumes, trial.with_network);
    let request = CheckRequest { run: request.clone(), to: Tier::Parked, volumes, network };
    let view = client.check(&request).await?;
    let spec = &request.run.spec;
    let failed = view.steps.iter().find(|step| !step.refused.is_empty());
    if let Some(step) = failed {
        bail!("{} was not started: its trial could not {}: {}", spec.name, verb(step), step.refused.join("; "));
    }
    Ok(())
}

fn verb(step: &CheckStep) -> String {
    match (step.step, step.tier) {
        (CheckOperation::Sleep, Some(Tier::Hibernated)) => "hibernate".to_owned(),
        (CheckOperation::Sleep, Some(Tier::Parked)) => "be parked".to_owned(),
        (CheckOperation::Sleep, Some(Tier::Archived)) => "be archived".to_owned(),
        (CheckOperation::Wake, Some(tier)) => format!("wake from {tier}"),
        (step, _) => step.to_string(),
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
    lines += &match view.sleeps {
        true => format!("It can sleep: it was {} and woke as it was.\n", slept(view).join(" and ")),
        false => {
            "The program cannot sleep in every tier that was tried; Kip would leave it running there.\n".to_owned()
        }
    };
    lines.extend(view.untried.iter().map(|what| format!("Not tried: {what}.\n")));
    lines += &answer("Can it move to another machine", &view.moves);
    lines += &answer("Can it be cloned", &view.clones);
    lines
}

fn slept(view: &CheckView) -> Vec<String> {
    let slept = view.steps.iter().filter(|step| step.step == CheckOperation::Sleep);
    slept.filter_map(|step| Some(step.tier?.to_string())).collect()
}

fn answer(question: &str, verdict: &CheckVerdict) -> String {
    let word = match verdict.answer {
        CheckAnswer::Yes => "yes",
        CheckAnswer::No => "no",
        CheckAnswer::Untried => "not tried",
    };
    format!("{question}: {word}: {}.\n", verdict.because.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_causes_and_pins_are_shown() {
        let step = |step: CheckOperation, tier, us, refused: &[&str]| CheckStep {
            step,
            tier,
            us,
            bytes: us.map(|_| 2048),
            refused: refused.iter().map(|why| (*why).to_owned()).collect(),
        };
        let steps = vec![
            step(CheckOperation::Start, None, Some(9), &[]),
            step(CheckOperation::Sleep, Some(Tier::Parked), None, &["fd 3 is a thing"]),
        ];
        let pinned = vec!["the volume a at /b is here".to_owned()];
        let moves = CheckVerdict { answer: CheckAnswer::No, because: pinned.clone() };
        let clones = CheckVerdict {
            answer: CheckAnswer::Untried,
            because: vec!["no trial is cloned: `kip clone` of the proc that runs says it".into()],
        };
        let untried = vec!["whether it can be archived: `--to archived` does".to_owned()];
        let view = CheckView { steps, sleeps: false, untried, moves, clones, pinned };
        let text = lines(&view);
        assert!(text.contains("\nbe parked  NO\n") && text.contains("cannot be parked: fd 3 is a thing\n"), "{text}");
        assert!(text.contains("\nNot tried: whether it can be archived: `--to archived` does.\n"), "{text}");
        assert!(text.contains("\nCan it move to another machine: no: the volume a at /b is here.\n"), "{text}");
        assert!(
            text.ends_with(
                "Can it be cloned: not tried: no trial is cloned: `kip clone` of the proc that runs says it.\n"
            ),
            "{text}"
        );
    }
}
