//! Which proc is started before which.

use crate::Described;
use crate::place::{Fault, Faults};

/// The procs, each after those that it depends on; in the file's order otherwise.
///
/// # Errors
/// A proc that is not there, or a cycle, which is named.
pub fn in_order(procs: Vec<Described>) -> Result<Vec<Described>, Faults> {
    let mut faults = Vec::new();
    for one in &procs {
        for needed in &one.depends_on {
            if !procs.iter().any(|other| other.request.spec.name == *needed) {
                let message = format!("{} depends on {needed}, which is not in this file", one.request.spec.name);
                faults.push(Fault::new(&one.place, message));
            }
        }
    }
    if !faults.is_empty() {
        return Err(Faults(faults));
    }
    let mut done: Vec<usize> = Vec::new();
    for at in 0..procs.len() {
        visit(at, &procs, &mut Vec::new(), &mut done)?;
    }
    let mut left: Vec<Option<Described>> = procs.into_iter().map(Some).collect();
    Ok(done.into_iter().filter_map(|at| left[at].take()).collect())
}

/// Appends `at` to `done` after all that it needs; `path` is how it was come to.
fn visit(at: usize, procs: &[Described], path: &mut Vec<usize>, done: &mut Vec<usize>) -> Result<(), Fault> {
    if done.contains(&at) {
        return Ok(());
    }
    if let Some(from) = path.iter().position(|seen| *seen == at) {
        let names: Vec<&str> = path[from..].iter().chain([&at]).map(|i| procs[*i].request.spec.name.as_str()).collect();
        let message = format!("these depend on each other in a circle: {}", names.join(" -> "));
        return Err(Fault::new(&procs[at].place, message));
    }
    path.push(at);
    for needed in &procs[at].depends_on {
        let next = procs.iter().position(|other| other.request.spec.name == *needed);
        visit(next.expect("looked for before"), procs, path, done)?;
    }
    path.pop();
    done.push(at);
    Ok(())
}
