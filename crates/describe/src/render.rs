//! A `kip.toml` made of requests.

use crate::table::ProcTable;
use kip_types::api::RunRequest;
use kip_types::name::ProcName;
use serde::Serialize;
use std::collections::BTreeMap;

#[derive(Serialize)]
struct Rendered {
    #[serde(skip_serializing_if = "Option::is_none")]
    project: Option<String>,
    proc: BTreeMap<ProcName, ProcTable>,
}

/// A `kip.toml` with these procs: what they depend on is named as far as it is among them,
/// and the project if all are of the same.
///
/// # Errors
/// What TOML cannot say: there is nothing of the kind in a spec.
pub fn render(procs: impl IntoIterator<Item = (ProcName, RunRequest)>) -> Result<String, toml::ser::Error> {
    let requests: BTreeMap<ProcName, RunRequest> = procs.into_iter().collect();
    let mut projects = requests.values().map(|request| &request.in_file.project);
    let first = projects.next().cloned().flatten();
    let project = first.filter(|first| projects.all(|other| other.as_ref() == Some(first)));
    let table = |(name, request): (&ProcName, &RunRequest)| {
        let mut table = ProcTable::of(request);
        table.depends_on.retain(|needed| requests.contains_key(needed));
        (name.clone(), table)
    };
    toml::to_string(&Rendered { project, proc: requests.iter().map(table).collect() })
}
