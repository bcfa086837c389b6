//! Changes as text.

use super::plan::{Action, PlannedChange};
use kip_describe::Difference;

/// `idle (is 10s, wanted 5s), port (..)`.
pub fn fields(fields: &[Difference]) -> String {
    let said = |value: &Option<String>| value.clone().unwrap_or_else(|| "not given".to_owned());
    let each = fields.iter().map(|f| format!("{} (is {}, wanted {})", f.field, said(&f.is), said(&f.wanted)));
    each.collect::<Vec<_>>().join(", ")
}

/// What would be done.
pub fn planned(changes: &[PlannedChange], replace: bool) -> String {
    let mut text = String::new();
    for change in changes {
        let name = &change.name;
        match change.action {
            Action::Same => {}
            Action::Create => text.push_str(&format!("+ {name}\n")),
            Action::Start => text.push_str(&format!("~ {name} is stopped: is started\n")),
            Action::Remove => text.push_str(&format!("- {name}\n")),
            Action::Update | Action::Replace => {
                let what = match (change.action, replace) {
                    (Action::Update, _) => "updated",
                    (_, true) => "made anew",
                    (_, false) => "made anew, with --replace",
                };
                text.push_str(&format!("~ {name} is {what}\n"));
                for field in &change.fields {
                    field.is.iter().for_each(|value| text.push_str(&format!("    - {} = {value}\n", field.field)));
                    field.wanted.iter().for_each(|value| text.push_str(&format!("    + {} = {value}\n", field.field)));
                }
            }
        }
    }
    text
}

/// What was done for one.
pub fn done(change: &PlannedChange) -> String {
    let what = match change.action {
        Action::Same => "is as described",
        Action::Create => "made",
        Action::Start => "started",
        Action::Update => "updated",
        Action::Replace => "made anew",
        Action::Remove => "removed",
    };
    format!("{} {what}\n", change.name)
}

/// What was not come to.
pub fn left(changes: &[PlannedChange]) -> String {
    changes.iter().filter(|change| !change.done).map(|change| format!("{} not done\n", change.name)).collect()
}
