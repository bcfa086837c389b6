//! Runs named steps one after the other and prints name, result and duration in aligned columns.
//!
//! A step never stops the following ones, so that one run shows everything that is wrong. Nothing
//! is kept anywhere.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How a step ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// As it should be; a remark for the table, often empty.
    Passed(String),
    /// Not run, and why.
    Skipped(String),
    /// The findings, one per line.
    Failed(String),
}

impl Outcome {
    /// Passed without findings, failed with any.
    pub fn of(findings: &[String]) -> Outcome {
        if findings.is_empty() { Outcome::Passed(String::new()) } else { Outcome::Failed(findings.join("\n")) }
    }
}

/// One line of a table of steps.
pub fn line(name: &str, result: &str, took: Duration, remark: &str) -> String {
    format!("  {name:<14} {result:<8} {:>7.1} s  {remark}", took.as_secs_f64()).trim_end().to_owned()
}

/// Runs one step and prints its line, then its findings. True unless it failed.
pub fn step(name: &str, run: impl FnOnce() -> anyhow::Result<Outcome>) -> bool {
    let since = Instant::now();
    let outcome = run().unwrap_or_else(|error| Outcome::Failed(format!("{error:#}")));
    let took = since.elapsed();
    match outcome {
        Outcome::Passed(remark) => println!("{}", line(name, "ok", took, &remark)),
        Outcome::Skipped(why) => println!("{}", line(name, "skipped", took, &why)),
        Outcome::Failed(findings) => {
            println!("{}", line(name, "FAILED", took, ""));
            println!("{}", findings.trim_end());
            return false;
        }
    }
    true
}

/// Runs a command whose output matters only if it fails.
pub fn quiet(command: &mut Command) -> anyhow::Result<Outcome> {
    let output = command.stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(Outcome::Passed(String::new()));
    }
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    Ok(Outcome::Failed(text))
}
