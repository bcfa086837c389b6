//! What `kip inspect --files`, `--env`, `--sockets` and `--maps` show, as people read it.

use kip_text::{bytes, one_line, table};
use kip_types::api::{
    Details, EnvView, FilesView, Inspected, MapView, MapsView, OpenFileView, OpenSocketView, OwnFileKind, OwnFilesView,
    ProcessEnv, ProcessMaps, SocketsView, WhereView,
};
use std::fmt::Write as _;

fn dash(text: String) -> String {
    if text.is_empty() { "-".to_owned() } else { text }
}

/// Rows below a head, indented.
fn rows(head: &[&str], rows: Vec<Vec<String>>) -> String {
    let head = head.iter().map(|word| (*word).to_owned()).collect();
    let all: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    table(&all).lines().map(|line| format!("  {line}\n")).collect()
}

fn head(inspected: &Inspected) -> String {
    format!("{}, {}, generation {}\n", inspected.name, inspected.tier, inspected.generation)
}

/// Any of them.
pub fn details(details: &Details) -> String {
    match details {
        Details::Files(view) => files(view),
        Details::Env(view) => env(view),
        Details::Sockets(view) => sockets(view),
        Details::Maps(view) => maps(view),
    }
}

fn files(view: &FilesView) -> String {
    let mut text = head(&view.inspected);
    for process in &view.processes {
        let title = format!("\n{} (pid {})\n", one_line(&process.name), process.pid);
        let files = process.files.iter().map(open_file).collect();
        text += &title;
        text += &rows(&["FD", "KIND", "ACCESS", "OFFSET", "FLAGS", "WHAT"], files);
    }
    text + &own(&view.own)
}

fn open_file(file: &OpenFileView) -> Vec<String> {
    let peer = file.peer.as_ref().map(|peer| format!(" with {peer}")).unwrap_or_default();
    let deleted = if file.deleted { " (deleted)" } else { "" };
    vec![
        file.fd.to_string(),
        file.kind.clone(),
        file.access.clone(),
        dash(file.offset.map(|at| at.to_string()).unwrap_or_default()),
        dash(file.flags.join(",")),
        dash(one_line(&format!("{}{peer}{deleted}", file.what))),
    ]
}

fn own(own: &OwnFilesView) -> String {
    if own.files == 0 {
        return "\nown files: none, all are its base's\n".to_owned();
    }
    let least = if own.complete { "" } else { "at least " };
    let mut text =
        format!("\nown files: {least}{}, {}, {} of them deletions\n", own.files, bytes(own.bytes), own.deleted);
    let files = own.entries.iter();
    let files = files.map(|file| {
        let size = if file.kind == OwnFileKind::File { bytes(file.bytes) } else { "-".to_owned() };
        vec![file.kind.to_string(), size, one_line(&file.path)]
    });
    text += &rows(&["KIND", "SIZE", "PATH"], files.collect());
    let more = own.files.saturating_sub(own.entries.len() as u64);
    if more > 0 || !own.complete {
        writeln!(text, "  and {least}{more} more").expect("a String takes every write");
    }
    text
}

fn env(view: &EnvView) -> String {
    view.processes.iter().fold(head(&view.inspected), |text, process| text + &environment(process))
}

fn environment(process: &ProcessEnv) -> String {
    let title = format!("\n{} (pid {}, parent {})\n", one_line(&process.name), process.pid, process.parent);
    if process.ended {
        return title + "  has ended\n";
    }
    let row = |key: &str, value: &str| vec![format!("  {key}"), dash(one_line(value))];
    let mut all = vec![
        row("program", &process.program),
        row("command", &process.command.join(" ")),
        row("directory", &process.directory),
        row("user", &format!("{}, group {}", process.uid, process.gid)),
    ];
    let named = |n: usize| if n == 0 { "environment" } else { "" };
    all.extend(process.env.iter().enumerate().map(|(n, text)| row(named(n), text)));
    title + &table(&all)
}

fn sockets(view: &SocketsView) -> String {
    if view.sockets.is_empty() {
        return head(&view.inspected) + "  no sockets\n";
    }
    let sockets = view.sockets.iter().map(socket).collect();
    let columns = ["PROTO", "STATE", "UNREAD", "UNSENT", "HELD", "LOCAL", "PEER", "OPEN IN"];
    head(&view.inspected) + &rows(&columns, sockets)
}

fn socket(socket: &OpenSocketView) -> Vec<String> {
    let number = |n: Option<u64>| dash(n.map(|n| n.to_string()).unwrap_or_default());
    let held = socket.held.map(|held| if held { "yes" } else { "no" });
    let open = socket.open.iter().map(|at| format!("{} (pid {}, fd {})", at.name, at.pid, at.fd));
    vec![
        socket.proto.to_string(),
        socket.state.clone(),
        number(socket.unread),
        number(socket.unsent),
        dash(held.unwrap_or_default().to_owned()),
        dash(one_line(&socket.local)),
        dash(one_line(socket.peer.as_deref().unwrap_or_default())),
        dash(one_line(&open.collect::<Vec<_>>().join(", "))),
    ]
}

/// Names of columns, and which of [`WhereView`] each shows.
type Column = (&'static str, fn(&WhereView) -> u64);
const COLUMNS: [Column; 7] = [
    ("MEMORY", |pages| pages.memory_bytes),
    ("SWAPPED", |pages| pages.swapped_bytes),
    ("OUT", |pages| pages.out_bytes),
    ("SNAPSHOT", |pages| pages.snapshot_bytes),
    ("STORE", |pages| pages.store_bytes),
    ("ZERO", |pages| pages.zero_bytes),
    ("FILE", |pages| pages.file_bytes),
];

fn maps(view: &MapsView) -> String {
    view.processes.iter().fold(head(&view.inspected), |text, process| text + &memory(process))
}

/// Columns in which something is, and a line with sums.
fn memory(process: &ProcessMaps) -> String {
    let title = format!("\n{} (pid {})\n", one_line(&process.name), process.pid);
    let maps = &process.maps;
    let shown: Vec<&Column> = COLUMNS.iter().filter(|(_, of)| maps.iter().any(|map| of(&map.pages) > 0)).collect();
    let size = |n: u64| if n == 0 { "-".to_owned() } else { bytes(n) };
    let line = |range: [&str; 2], length: u64, pages: &dyn Fn(&Column) -> u64, what: String| {
        let mut row = vec![range[0].to_owned(), range[1].to_owned(), size(length)];
        row.extend(shown.iter().map(|column| size(pages(column))));
        row.push(what);
        row
    };
    let one = |map: &MapView| {
        let range = format!("{}-{}", map.start, map.end);
        line([&range, &map.access], map.bytes, &|(_, of)| of(&map.pages), one_line(&map.what))
    };
    let mut all: Vec<Vec<String>> = maps.iter().map(one).collect();
    let sum = |of: &dyn Fn(&MapView) -> u64| maps.iter().map(of).sum::<u64>();
    let length = sum(&|map| map.bytes);
    all.push(line(["all", ""], length, &|(_, of)| sum(&|map| of(&map.pages)), String::new()));
    let names = shown.iter().map(|(name, _)| *name);
    let columns: Vec<&str> = ["RANGE", "ACCESS", "SIZE"].into_iter().chain(names).chain(["WHAT"]).collect();
    title + &rows(&columns, all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn inspected(rest: Value) -> Value {
        let mut all = json!({"name": "web", "tier": "parked", "generation": 7});
        all.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
        all
    }

    #[test]
    fn files_are_aligned_and_bounds_are_said() {
        let file = |fd: i32, kind: &str, what: &str| {
            json!({"fd": fd, "kind": kind, "what": what, "peer": null, "access": "rw", "flags": ["nonblock", "cloexec"],
                   "offset": null, "deleted": fd == 10})
        };
        let view = inspected(json!({
            "processes": [{"pid": 2, "name": "web", "files": [file(3, "tcp", "0.0.0.0:80"), file(10, "file", "/tmp/x\ny")]}],
            "own": {"entries": [{"path": "/etc/x", "kind": "deleted", "bytes": 0}], "files": 9, "bytes": 2048, "deleted": 1,
                    "complete": true},
        }));
        let text = details(&Details::Files(serde_json::from_value(view).unwrap()));
        let expected = "web, parked, generation 7\n\nweb (pid 2)\n  \
            FD  KIND  ACCESS  OFFSET  FLAGS             WHAT\n  \
            3   tcp   rw      -       nonblock,cloexec  0.0.0.0:80\n  \
            10  file  rw      -       nonblock,cloexec  /tmp/x y (deleted)\n\n\
            own files: 9, 2.0K, 1 of them deletions\n  \
            KIND     SIZE  PATH\n  deleted  -     /etc/x\n  and 8 more\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn environments_are_one_line_each() {
        let process = |pid: u32, ended: bool| {
            json!({"pid": pid, "parent": 1, "name": "web", "ended": ended, "program": "/bin/web", "command": ["web", "-x"],
                   "directory": "/", "uid": 33, "gid": 34, "env": ["A=1", "B=\u{1b}[2J"]})
        };
        let view = inspected(json!({"processes": [process(2, false), process(3, true)]}));
        let text = details(&Details::Env(serde_json::from_value(view).unwrap()));
        let expected = "web, parked, generation 7\n\nweb (pid 2, parent 1)\n  program      /bin/web\n  \
            command      web -x\n  directory    /\n  user         33, group 34\n  environment  A=1\n               B= [2J\n\n\
            web (pid 3, parent 1)\n  has ended\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn sockets_say_what_is_not_known() {
        let view = inspected(json!({"sockets": [
            {"proto": "tcp", "state": "listen", "local": "0.0.0.0:80", "peer": null, "unread": 2, "unsent": null, "held": true,
             "open": [{"pid": 2, "name": "web", "fd": 3}, {"pid": 4, "name": "web", "fd": 3}]},
        ]}));
        let text = details(&Details::Sockets(serde_json::from_value(view).unwrap()));
        let expected = "web, parked, generation 7\n  \
            PROTO  STATE   UNREAD  UNSENT  HELD  LOCAL       PEER  OPEN IN\n  \
            tcp    listen  2       -       yes   0.0.0.0:80  -     web (pid 2, fd 3), web (pid 4, fd 3)\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn maps_show_the_columns_that_say_something() {
        let map = |start: &str, what: &str, snapshot: u64| {
            json!({"start": start, "end": "9000", "access": "rw-p", "what": what, "offset": 0, "bytes": 8192,
                   "memory_bytes": 0, "swapped_bytes": 0, "out_bytes": 0, "snapshot_bytes": snapshot, "store_bytes": 0,
                   "zero_bytes": 8192 - snapshot, "file_bytes": 0})
        };
        let maps = [map("7000", "[heap]", 4096), map("55000", "[stack]", 8192)];
        let view = inspected(json!({"processes": [{"pid": 2, "name": "web", "maps": maps}]}));
        let text = details(&Details::Maps(serde_json::from_value(view).unwrap()));
        let expected = "web, parked, generation 7\n\nweb (pid 2)\n  \
            RANGE       ACCESS  SIZE   SNAPSHOT  ZERO  WHAT\n  \
            7000-9000   rw-p    8.0K   4.0K      4.0K  [heap]\n  \
            55000-9000  rw-p    8.0K   8.0K      -     [stack]\n  \
            all                 16.0K  12.0K     4.0K\n";
        assert_eq!(text, expected);
    }
}
