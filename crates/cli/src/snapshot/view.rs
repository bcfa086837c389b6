//! What `kip snapshot` shows, as people read it.

use kip_text::{ago, bytes, millis, one_line, table, utc};
use kip_types::api::{
    CarriedView, CollectView, RootView, SnapshotDetails, SnapshotTimer, SnapshotView, SnapshotsView, UnusedView,
    Verified,
};
use std::fmt::Write as _;

/// Digits of an id that are shown: enough to name it by.
const ID: usize = 12;
/// Metadata files that are shown one by one.
const MOST_FILES: usize = 40;

fn dash() -> String {
    "-".to_owned()
}

fn short(id: &str) -> String {
    id.chars().take(ID).collect()
}

/// `kip snapshot ls`.
pub fn ls(views: &[SnapshotsView]) -> String {
    let head = ["NAME", "PROC", "GENERATION", "PLACE", "STATE", "AGE", "SIZE", "PACKS", "FORMAT"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let mut troubles = String::new();
    for proc in views {
        let name = proc.name.as_ref().map_or_else(dash, ToString::to_string);
        let id = proc.proc.as_deref().map_or_else(dash, short);
        let packs = format!("{}, {}", proc.packs, bytes(proc.pack_bytes));
        let row = |generation: String, place: String, rest: [String; 4]| {
            let [age, size, packs, format] = rest;
            vec![name.clone(), id.clone(), generation, place, proc.state.to_string(), age, size, packs, format]
        };
        if let Some(trouble) = &proc.trouble {
            rows.push(row(dash(), dash(), [dash(), dash(), dash(), dash()]));
            report_trouble(&mut troubles, &format!("{name} {id}"), trouble);
        }
        for (place, one) in proc.generations.iter().enumerate() {
            // Packs are those of all generations together: they stand beside the first.
            let packs = if place == 0 && proc.packs > 0 { packs.clone() } else { dash() };
            let rest = [
                one.frozen_at_ms.map_or_else(dash, |at| ago(at).trim_end_matches(" ago").to_owned()),
                one.bytes.map_or_else(dash, bytes),
                packs,
                one.format.map_or_else(dash, |format| format.to_string()),
            ];
            rows.push(row(one.generation.to_string(), one.place.to_string(), rest));
            trouble_of(&mut troubles, &name, one);
        }
    }
    if rows.len() == 1 {
        return "there are no snapshots\n".to_owned();
    }
    table(&rows) + &troubles
}

fn trouble_of(troubles: &mut String, name: &str, one: &SnapshotView) {
    if let Some(trouble) = &one.trouble {
        report_trouble(troubles, &format!("{name}@{}", one.generation), trouble);
    }
}

fn report_trouble(troubles: &mut String, what: &str, trouble: &str) {
    writeln!(troubles, "{what}: {}", one_line(trouble)).expect("a String takes every write");
}

/// `kip snapshot show`.
pub fn details(view: &SnapshotDetails) -> String {
    let mut text = format!("{}@{}\n", view.name, view.generation);
    let mut section = |title: &str, rows: Vec<(String, String)>| {
        if rows.is_empty() {
            return;
        }
        let rows: Vec<_> = rows.into_iter().map(|(key, value)| vec![format!("  {key}"), one_line(&value)]).collect();
        let title = if title.is_empty() { String::new() } else { format!("\n{title}\n") };
        write!(text, "{title}{}", table(&rows)).expect("a String takes every write");
    };
    let row = |key: &str, value: String| (key.to_owned(), value);
    let ports = view.ports.iter().map(|port| format!("{}/{}", port.port, port.proto)).collect::<Vec<_>>().join(" ");
    section(
        "",
        vec![
            row("proc", view.proc.clone()),
            row("state", view.state.to_string()),
            row("place", view.place.to_string()),
            row("parent", view.parent.map_or_else(dash, |parent| parent.to_string())),
            row("frozen", format!("{}, {}", utc(view.frozen_at_ms), ago(view.frozen_at_ms))),
            row("command", if view.command.is_empty() { dash() } else { view.command.join(" ") }),
            row("ports", if ports.is_empty() { dash() } else { ports }),
            row("engine", view.engine.clone()),
            row("kernel", view.kernel.clone()),
            row("processor", format!("{} features", view.cpu_features.len())),
            row("format", view.format.to_string()),
            row("sealed by key", view.key.clone()),
            row("sockets", view.sockets.map_or_else(dash, |count| count.to_string())),
        ],
    );
    section("pinned by", view.pinned_by.iter().map(|line| row("volume", line.clone())).collect());
    let sections = view.sections.iter().map(|one| row(&one.name, bytes(one.bytes)));
    section(&format!("front, {}", bytes(view.bytes)), sections.collect());
    let pages = view.pages;
    section(
        "pages of 4 KiB",
        vec![
            row("in the front", pages.front.to_string()),
            row("in packs", pages.packs.to_string()),
            row("zeros", pages.zeros.to_string()),
            row("in working sets", view.set_pages.to_string()),
        ],
    );
    let packs = view.packs.iter();
    let packs = packs.map(|pack| row(&pack.pack, format!("{} blocks, {}", pack.blocks, bytes(pack.bytes))));
    section("packs", packs.collect());
    let metadata = view.metadata.iter().take(MOST_FILES).map(|file| row(&file.name, bytes(file.bytes)));
    let more = view.metadata.len().saturating_sub(MOST_FILES);
    let more = (more > 0).then(|| row(&format!("and {more} more"), String::new()));
    section("metadata", metadata.chain(more).collect());
    let roots = view.roots.iter();
    let root = |r: &RootView| format!("{} entries, {}, {} needed first", r.entries, bytes(r.bytes), r.first);
    section("files", roots.map(|r| row(&r.name, root(r))).collect());
    section("timers", view.timers.iter().map(|one| row(&one.kind, timer(one))).collect());
    text
}

fn timer(timer: &SnapshotTimer) -> String {
    let every = timer.every_ms.map(|ms| format!(", every {}", millis(ms)));
    format!("{} after the freeze{}", millis(timer.due_ms), every.unwrap_or_default())
}

/// A line of `kip snapshot verify`.
pub fn verified(item: &Verified) -> String {
    match item {
        Verified::Progress { .. } => String::new(),
        Verified::Damage { object, what, snapshot } => {
            let of = if snapshot.is_empty() { String::new() } else { format!(" ({snapshot})") };
            format!("{object}{of}: {}\n", one_line(what))
        }
        Verified::End { generations, objects, bytes: read, damaged } => {
            let end = if *damaged == 0 { "all as sealed".to_owned() } else { format!("{damaged} damaged") };
            format!("{generations} generations, {objects} objects, {}: {end}\n", bytes(*read))
        }
    }
}

/// `kip snapshot export`.
pub fn exported(view: &CarriedView) -> String {
    format!("{}@{} in {}, {} packs, {}\n", view.name, view.generation, view.file, view.packs, bytes(view.bytes))
}

/// `kip snapshot import`.
pub fn imported(view: &CarriedView) -> String {
    let (name, generation) = (&view.name, view.generation);
    format!("{name}@{generation} is in the store, free to adopt; {} stored, {} packs\n", bytes(view.bytes), view.packs)
}

/// `kip snapshot gc`.
pub fn collected(view: &CollectView) -> String {
    let sum = |objects: &[UnusedView]| {
        format!("{} objects, {}", objects.len(), bytes(objects.iter().map(|object| object.bytes).sum()))
    };
    let done = if view.dry_run { "to be deleted" } else { "deleted" };
    let due = view.waiting.iter().filter_map(|object| object.due_at_ms).min();
    let due = due.map(|at| format!(", the first until {}", utc(at))).unwrap_or_default();
    let waiting = if view.waiting.is_empty() { String::new() } else { due };
    format!("{done}: {}; waiting: {}{waiting}; in use: {}\n", sum(&view.deleted), sum(&view.waiting), view.used)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_list_shows_what_cannot_be_read_and_goes_on() {
        let generation = |number, place, trouble: Option<&str>| json!({"generation": number, "place": place, "frozen_at_ms": null, "bytes": 2048, "format": 1, "trouble": trouble});
        let views = json!([
            {"name": null, "proc": "00".repeat(16), "state": "unreadable", "owner": null, "generations": [],
             "packs": 0, "pack_bytes": 0, "trouble": "the object\nis damaged"},
            {"name": "web", "proc": "ab".repeat(16), "state": "archived", "owner": "cd".repeat(16),
             "generations": [generation(7, "current", None), generation(6, "kept", Some("cut short"))],
             "packs": 2, "pack_bytes": 3 << 20, "trouble": null},
        ]);
        let views: Vec<SnapshotsView> = serde_json::from_value(views).unwrap();
        let text = ls(&views);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 6, "{text}");
        assert!(lines[2].starts_with("web   abababababab  7           current  archived, free to adopt"), "{text}");
        assert!(lines[2].contains("2, 3.0M") && !lines[3].contains("3.0M"), "{text}");
        assert_eq!(lines[4], "- 000000000000: the object is damaged");
        assert_eq!(lines[5], "web@6: cut short");
        assert_eq!(ls(&[]), "there are no snapshots\n");
    }

    #[test]
    fn damage_and_collection_are_one_line_each() {
        let damage =
            Verified::Damage { object: "realms/x".into(), what: "it is\ncut".into(), snapshot: "web@7".into() };
        assert_eq!(verified(&damage), "realms/x (web@7): it is cut\n");
        let end = Verified::End { generations: 2, objects: 5, bytes: 2048, damaged: 1 };
        assert_eq!(verified(&end), "2 generations, 5 objects, 2.0K: 1 damaged\n");
        let unused = |due_at_ms| UnusedView { object: "x".into(), bytes: 1024, due_at_ms };
        let mut view =
            CollectView { dry_run: true, used: 3, waiting: vec![unused(Some(0)), unused(None)], deleted: vec![] };
        assert_eq!(
            collected(&view),
            "to be deleted: 0 objects, 0; waiting: 2 objects, 2.0K, the first until 1970-01-01T00:00:00.000Z; in use: 3\n"
        );
        (view.dry_run, view.waiting, view.deleted) = (false, vec![], vec![unused(None)]);
        assert_eq!(collected(&view), "deleted: 1 objects, 1.0K; waiting: 0 objects, 0; in use: 3\n");
    }
}
