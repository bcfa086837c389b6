//! `kip doctor`: what this machine has and lacks for running procs, what each lack costs, and how
//! to mend it.
//!
//! Owns the list of checks and how they are shown. A check looks, or tries the kernel feature
//! itself on a descriptor or a directory that is gone when it returns; it never changes a setting,
//! and a crash leaves at most an empty `.kip-doctor.*` directory beside the data. Needs no daemon.
//! Without root some checks can only say so.
#![forbid(unsafe_code)]

mod cgroups;
mod check;
mod data;
mod kernel;
mod limits;
mod network;
mod tools;

pub use check::{CheckStatus, DoctorCheck};

use serde::Serialize;
use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// What to look at and how to show it.
pub struct DoctorOptions {
    /// The data directory that `kip up` would use; it need not exist.
    pub data: PathBuf,
    /// `--criu PATH`.
    pub criu: Option<PathBuf>,
    /// JSON in place of a table.
    pub json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    ok: bool,
    checks: &'a [DoctorCheck],
}

/// Runs every check and prints them. Exit code 1 if one fails; warnings alone are 0.
pub fn run(options: &DoctorOptions) -> anyhow::Result<ExitCode> {
    let checks = all(options);
    let ok = checks.iter().all(|check| check.status != CheckStatus::Fail);
    if options.json {
        println!("{}", serde_json::to_string_pretty(&Report { ok, checks: &checks })?);
    } else {
        print!("{}", table(&checks));
    }
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn all(options: &DoctorOptions) -> Vec<DoctorCheck> {
    let mut checks = limits::privileges();
    checks.extend(kernel::checks());
    checks.extend(tools::checks(options.criu.as_deref()));
    checks.extend(cgroups::checks());
    checks.extend(network::checks());
    checks.extend(limits::checks());
    checks.extend(data::checks(&options.data));
    checks
}

/// Name, result and finding in columns; cost and remedy below what lacks.
fn table(checks: &[DoctorCheck]) -> String {
    let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0).max("CHECK".len());
    let mut text = format!("{:<width$}  RESULT  FOUND\n", "CHECK");
    for check in checks {
        let result = match check.status {
            CheckStatus::Ok => "ok",
            CheckStatus::Warn => "warn",
            CheckStatus::Fail => "FAIL",
        };
        let mut row = |name: &str, result: &str, line: &str| {
            let _ = writeln!(text, "{}", format!("{name:<width$}  {result:<6}  {line}").trim_end());
        };
        row(check.name, result, &check.found);
        if let Some(cost) = &check.cost {
            row("", "", &format!("  costs: {cost}"));
        }
        if let Some(mend) = &check.mend {
            row("", "", &format!("  mend:  {mend}"));
        }
    }
    let count = |status| checks.iter().filter(|check| check.status == status).count();
    let _ = writeln!(
        text,
        "{} ok, {} warn, {} fail",
        count(CheckStatus::Ok),
        count(CheckStatus::Warn),
        count(CheckStatus::Fail)
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_aligned_and_says_what_to_do_only_where_something_lacks() {
        let checks = [
            DoctorCheck::ok("kernel", "6.18"),
            DoctorCheck::warn("forwarding", "eth0 off", "no clients", "sysctl"),
            DoctorCheck::fail("nft", "missing", "no ports", "apt"),
        ];
        let text = table(&checks);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "CHECK       RESULT  FOUND",
                "kernel      ok      6.18",
                "forwarding  warn    eth0 off",
                "                      costs: no clients",
                "                      mend:  sysctl",
                "nft         FAIL    missing",
                "                      costs: no ports",
                "                      mend:  apt",
                "1 ok, 1 warn, 1 fail",
            ]
        );
    }

    // promise commands: `kip doctor` says of each lack what it costs and how to mend it
    #[test]
    fn every_check_of_this_machine_says_what_a_lack_costs_and_how_to_mend_it() {
        let options = DoctorOptions { data: std::env::temp_dir().join("kip-doctor-absent"), criu: None, json: false };
        let checks = all(&options);
        assert!(checks.len() > 15, "{}", checks.len());
        for check in &checks {
            assert!(!check.found.is_empty() && !check.found.contains('\n'), "{check:?}");
            let lacks = check.status != CheckStatus::Ok;
            assert_eq!((check.cost.is_some(), check.mend.is_some()), (lacks, lacks), "{check:?}");
        }
        let mut names: Vec<_> = checks.iter().map(|check| check.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), checks.len(), "a name twice");
        assert!(!options.data.exists(), "looking must not make the data directory");
    }
}
