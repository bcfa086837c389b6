//! What two descriptions of a proc differ in, by the keys of a `kip.toml`.

use crate::table::ProcTable;
use kip_types::api::RunRequest;
use kip_types::spec::PortSpec;
use serde::Serialize;
use std::collections::BTreeMap;

/// A key in which two descriptions differ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// The key, as in a `kip.toml`.
    pub field: String,
    /// What the proc has; null if nothing is said there. Values of environment variables are not
    /// shown.
    pub is: Option<String>,
    /// What the file says; null if it says nothing.
    pub wanted: Option<String>,
}

/// Keys that say how a proc is made, not what it is.
const ON_THE_WAY: [&str; 4] = ["depends-on", "plain-http", "pull", "wait-ready"];

/// What has to change for a proc that was made by `is` to be one that is made by `wanted`.
pub fn differences(is: &RunRequest, wanted: &RunRequest) -> Vec<Difference> {
    let (is, wanted) = (fields(is), fields(wanted));
    let keys: std::collections::BTreeSet<&String> = is.keys().chain(wanted.keys()).collect();
    // Kip does nothing by labels, and older ones made procs without: what has none stays as it is.
    let is_without_labels = |key: &str| key == "label" && !is.contains_key(key);
    let differ = |key: &&String| is.get(*key) != wanted.get(*key) && !is_without_labels(key);
    let shown = |key: &str, value: Option<&String>| match key.starts_with("env.") {
        true => value.map(|_| "(not shown)".to_owned()),
        false => value.cloned(),
    };
    keys.into_iter()
        .filter(differ)
        .map(|key| Difference { field: key.clone(), is: shown(key, is.get(key)), wanted: shown(key, wanted.get(key)) })
        .collect()
}

/// Keys with their values as text, variables one by one.
fn fields(request: &RunRequest) -> BTreeMap<String, String> {
    let mut request = request.clone();
    // Their order means nothing.
    request.spec.ports.sort_by_key(PortSpec::inner);
    let table = serde_json::to_value(ProcTable::of(&request)).expect("a table is JSON");
    let mut all = BTreeMap::new();
    for (key, value) in table.as_object().expect("a table is an object") {
        match value.as_object().filter(|_| key == "env") {
            Some(variables) => {
                let each = variables.iter().map(|(name, value)| (format!("env.{name}"), text(value)));
                all.extend(each);
            }
            None if ON_THE_WAY.contains(&key.as_str()) => {}
            None => drop(all.insert(key.clone(), text(value))),
        }
    }
    all
}

fn text(value: &serde_json::Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
