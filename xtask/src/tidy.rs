//! The house's own rules (STYLE.md), as far as a program can see them.
//!
//! Reads every file git would commit and hands it to the rules: [`source`] judges one source file,
//! [`crates`] a whole crate, [`documents`] what the documents promise, [`words`] the texts that
//! people read, [`parameters`] what functions take, [`names`] what types are called. Each finding
//! is one line, `path:line: what is wrong`.

mod crates;
mod documents;
mod names;
mod parameters;
mod source;
mod words;

use crate::spec;
use crate::steps::Outcome;
use anyhow::Context;
use std::path::Path;
use std::process::Command;

/// One text file of the project.
#[derive(Debug, Clone)]
pub struct File {
    /// Relative to the workspace, with slashes.
    pub path: String,
    /// Its text.
    pub text: String,
}

/// Every text file that is committed or would be, by its path.
pub fn files(root: &Path) -> anyhow::Result<Vec<File>> {
    let output = Command::new("git")
        .args(["-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .context("git ls-files")?;
    anyhow::ensure!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr).trim());
    let mut found = Vec::new();
    for path in String::from_utf8(output.stdout).context("a file name that is no UTF-8")?.split_terminator('\0') {
        // Deleted but not yet committed, a link to a directory, or no text: nothing to read.
        if let Ok(text) = std::fs::read_to_string(root.join(path)) {
            found.push(File { path: path.to_owned(), text });
        }
    }
    // Those that are not committed yet come last there.
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// Every rule over the whole project.
pub fn run(root: &Path) -> anyhow::Result<Outcome> {
    let files = files(root)?;
    let mut findings: Vec<String> = files.iter().flat_map(source::findings).collect();
    findings.extend(files.iter().flat_map(parameters::findings));
    findings.extend(files.iter().flat_map(words::findings));
    findings.extend(documents::findings(&files, &|path| root.join(path).exists()));
    findings.extend(crates::findings(&files));
    findings.extend(names::findings(&files));
    findings.extend(spec::findings(&files));
    findings.sort();
    Ok(if findings.is_empty() { Outcome::Passed(format!("{} files", files.len())) } else { Outcome::of(&findings) })
}
