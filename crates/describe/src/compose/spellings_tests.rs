//! Override files: each spelling of a key laid over each other one.

use super::*;
use std::fs;

/// What the files of one service `web`, and services beside it, come to; or the faults.
fn laid(directory: &Path, key: &str, values: &[&str]) -> Result<String, String> {
    let text = |value: &&str| format!("services:\n  web:\n    {key}: {value}\n");
    let first = format!(
        "{}    {}image: i\n  a: {{image: i, ports: ['1:1']}}\n  b: {{image: i, ports: ['2:2']}}\n  c: {{image: i}}\n\
         networks: {{default: , back: }}\nsecrets: {{s: {{file: s}}, t: {{file: t}}}}\n",
        text(&values[0]),
        if key == "image" { "user: " } else { "" }
    );
    let overrides: Vec<(PathBuf, String)> =
        values[1..].iter().map(|value| (directory.join("over.yaml"), text(value))).collect();
    let path = directory.join("compose.yaml");
    let reading = Reading {
        path: &path,
        text: &first,
        overrides: &overrides,
        lookup: &|_| None,
        project: Some("p"),
        profiles: &["*".to_owned()],
    };
    let document = read(&reading).map_err(|faults| faults.0.iter().map(Fault::to_string).collect::<String>())?;
    let procs = document.procs.iter().map(|proc| format!("{:?} {:?}\n", proc.depends_on, proc.request));
    let mut notes: Vec<String> =
        document.notes.iter().map(|note| format!("{:?} {}\n", note.weight, note.message)).collect();
    notes.dedup();
    Ok(procs.chain(notes).collect())
}

/// A key, its spellings in the first file and in the one laid over it, and both in one.
type Row = (&'static str, &'static [&'static str], &'static [&'static str], &'static str);

const ROWS: &[Row] = &[
    (
        "environment",
        &["[A=1, B=2]", "{A: 1, B: 2}", "{A: '1', B: \"2\"}"],
        &["[B=3, C=4]", "{B: 3, C: 4}"],
        "[A=1, B=3, C=4]",
    ),
    ("environment", &["[A=1, B=2]", "{A: 1, B: 2}"], &["[A]", "{A: }"], "[B=2]"),
    ("labels", &["[A=1, b.c=2]", "{A: 1, b.c: 2}"], &["[b.c=d=e, C]", "{b.c: d=e, C: ''}"], "{A: 1, b.c: d=e, C: ''}"),
    ("annotations", &["[A=1]", "{A: 1}"], &["[A=2]", "{A: 2}"], "[A=2]"),
    ("sysctls", &["[a.b=1]", "{a.b: 1}"], &["[a.b=2]", "{a.b: 2}"], "[a.b=2]"),
    (
        "deploy",
        &["{labels: [A=1]}", "{labels: {A: 1}}"],
        &["{labels: [B=2]}", "{labels: {B: 2}}"],
        "{labels: [A=1, B=2]}",
    ),
    (
        "depends_on",
        &["[a]", "{a: {condition: service_started}}"],
        &["[a, b]", "{b: {condition: service_started}}"],
        "[a, b]",
    ),
    // A list asks for a start only, also where the first file asks for more.
    ("depends_on", &["{a: {condition: service_healthy}}"], &["[a]", "{a: {condition: service_started}}"], "[a]"),
    (
        "depends_on",
        &["[a]", "{a: {condition: service_started}}"],
        &["{a: {condition: service_healthy}}"],
        "{a: {condition: service_healthy}}",
    ),
    (
        "depends_on",
        &["{z: {required: false, condition: service_started}}"],
        &["[b]", "{b: {condition: service_started}}"],
        "{b: {condition: service_started}}",
    ),
    (
        "depends_on",
        &["{a: {condition: service_healthy}, b: {condition: service_started}}"],
        &["[b, c]", "{b: {required: true}, c: {condition: service_started}}"],
        "{a: {condition: service_healthy}, b: {condition: service_started}, c: {condition: service_started}}",
    ),
    (
        "extra_hosts",
        &["['a:1.1.1.1', b=2.2.2.2]", "{a: 1.1.1.1, b: 2.2.2.2}", "{a: [1.1.1.1], b: 2.2.2.2}"],
        &["['b:3.3.3.3', a=1.1.1.1]", "{b: 3.3.3.3, a: [1.1.1.1]}"],
        "['a:1.1.1.1', 'b:2.2.2.2', 'b:3.3.3.3']",
    ),
    ("extra_hosts", &["['a:::1']", "{a: '::1'}", "{a: '[::1]'}"], &["[a=::1]", "{a: ['::1']}"], "['a:::1']"),
    ("build", &["./d", "{context: ./d}"], &["./e", "{context: ./e}"], "./e"),
    (
        "build",
        &["./d", "{context: ./d, args: [A=1]}"],
        &["{dockerfile: F, args: {B: 2}}"],
        "{context: ./d, dockerfile: F}",
    ),
    ("networks", &["[default, back]", "{default: , back: }"], &["[back]", "{back: }", "{back: {}}"], "[default, back]"),
    ("networks", &["[default]", "{default: }"], &["{default: {aliases: [n]}}"], "{default: {aliases: [n]}}"),
    ("networks", &["{default: {aliases: [n]}}"], &["[default]", "{default: }"], "{default: {aliases: [n]}}"),
    (
        "volumes",
        &["['./a:/x']", "['./a:/x/:rw']", "[{type: bind, source: ./a, target: /x}]"],
        &[
            "['./b:/x:ro']",
            "['./b:/x/:ro']",
            "[{type: bind, source: ./b, target: /x, read_only: true}]",
            "[{type: bind, source: ./b, target: //x/./, read_only: true}]",
        ],
        "['./b:/x:ro']",
    ),
    (
        "volumes",
        &["['./a:/x']", "[{type: bind, source: ./a, target: /x}]"],
        &["['./a:/y']", "[{type: bind, source: ./a, target: /y}]"],
        "['./a:/x', './a:/y']",
    ),
    (
        "secrets",
        &["[s]", "[{source: s}]", "[{source: s, target: s}]", "[{source: s, target: /run/secrets/s}]"],
        &["[s]", "[{source: s, target: s}]", "[{source: s, target: /run/secrets/s}]"],
        "[s]",
    ),
    (
        "secrets",
        &["[s]", "[{source: s}]"],
        &["[{source: t, target: s}]", "[{source: t, target: /run/secrets/s}]"],
        "[{source: t, target: s}]",
    ),
    ("configs", &["[c]", "[{source: c}]"], &["[c]", "[{source: c, target: /c}]"], "[c]"),
    ("ports", HTTP, HTTP, "['8080:80']"),
    ("ports", HTTP, &["['8081:81']", "[{target: 81, published: '8081'}]"], "['8080:80', '8081:81']"),
    ("ports", LOCAL, LOCAL, "['127.0.0.1:8080:80']"),
    (
        "ports",
        &["['[::1]:8080:80']", "[{target: 80, published: 8080, host_ip: '::1'}]"],
        &["['[::1]:8080:80']", "[{target: 80, published: '8080', host_ip: '[::1]'}]"],
        "['[::1]:8080:80']",
    ),
    (
        "ports",
        &["['53:53/udp']", "[{target: 53, published: 53, protocol: udp}]"],
        &["['53:53']", "['53:53/tcp']", "[{target: 53, published: 53}]"],
        "['53:53/udp', '53:53']",
    ),
    (
        "ports",
        &["['3000-3001:3000-3001']"],
        &["['3001:3001']", "[{target: 3001, published: '3001'}]"],
        "['3000:3000', '3001:3001']",
    ),
    // Kip publishes a port inside once: at the port of the host that a file names.
    ("ports", &["['80']", "[80]", "[{target: 80}]", "['127.0.0.1::80']"], HTTP, "['80', '8080:80']"),
    ("ports", HTTP, &["['80']", "[80]", "[{target: 80}]"], "['8080:80', '80']"),
    ("expose", &["[80]", "['80']", "['80/tcp']"], &["[80]", "['80']", "['80/tcp']", "[80-80]"], "[80]"),
    (
        "env_file",
        &["a.env", "[a.env]", "[{path: a.env}]", "{path: a.env}"],
        &["b.env", "[b.env]", "[{path: b.env}]", "{path: b.env}"],
        "[a.env, b.env]",
    ),
    (
        "env_file",
        &["[b.env, a.env]", "[{path: b.env}, a.env]"],
        &["b.env", "[b.env]", "{path: b.env}"],
        "[b.env, a.env]",
    ),
    ("env_file", &["none.env", "[none.env]"], &["[{path: none.env, required: false}]"], "[]"),
    ("label_file", &["a", "[a]"], &["b", "[b]"], "[a, b]"),
    ("tmpfs", &["/t", "[/t]", "['/t/:size=1m']"], &["/t:size=2m", "['/t:size=2m']"], "['/t:size=2m']"),
    ("dns", &["1.1.1.1", "[1.1.1.1]"], &["8.8.8.8", "[8.8.8.8]"], "[1.1.1.1, 8.8.8.8]"),
    ("dns_search", &["a", "[a]"], &["b", "[b]"], "[a, b]"),
    ("dns_opt", &["[a]"], &["[b]"], "[a, b]"),
    (
        "devices",
        &["['/dev/a:/dev/b']", "[{source: /dev/a, target: /dev/b}]"],
        &["['/dev/c:/dev/b']", "[{source: /dev/c, target: /dev/b}]"],
        "['/dev/c:/dev/b']",
    ),
    (
        "ulimits",
        &["{nofile: 10}", "{nofile: {soft: 10, hard: 11}}"],
        &["{nofile: 20}", "{nofile: {soft: 20, hard: 20}}"],
        "{nofile: 20}",
    ),
    ("command", &["a b", "[a, b]"], &["c 'd e'", "[c, d e]"], "[c, d e]"),
    ("entrypoint", &["a b", "[a, b]"], &["c 'd e'", "[c, d e]"], "[c, d e]"),
    (
        "healthcheck",
        &["{test: a, retries: 2}", "{test: [CMD-SHELL, a], retries: 2}"],
        &["{test: b c}", "{test: [CMD-SHELL, b c]}", "{test: [CMD, b, c]}"],
        "{test: b c, retries: 2}",
    ),
    ("extends", &["a", "{service: a}"], &["b", "{service: b}"], "b"),
    ("models", &["[m]", "{m: }"], &["[n]", "{n: {endpoint_var: E}}"], "[m, n]"),
    (
        "x-kip",
        &["{probe: 9000=tcp:80}", "{probe: ['9000=tcp:80']}"],
        &["{probe: 9001=tcp:80}", "{probe: ['9001=tcp:80']}"],
        "{probe: ['9000=tcp:80', '9001=tcp:80']}",
    ),
];
const HTTP: &[&str] = &[
    "['8080:80']",
    "['8080:80/tcp']",
    "['0.0.0.0:8080:80']",
    "[{target: 80, published: '8080'}]",
    "[{target: 80, published: 8080, protocol: tcp, host_ip: 0.0.0.0, mode: host}]",
];
const LOCAL: &[&str] =
    &["['127.0.0.1:8080:80']", "['127.0.0.1:8080:80/TCP']", "[{target: 80, published: '8080', host_ip: 127.0.0.1}]"];

// promise files: each spelling of a key of a Compose file (list or map, text or list, short or
//   long) merges with each other one as Compose merges them: one port, volume or secret in two
//   spellings is there once, `extra_hosts` are joined, a list of `depends_on` asks for a start
#[test]
fn each_spelling_is_laid_over_each_other() {
    let directory = tempfile::tempdir().unwrap();
    for (name, text) in [("a.env", "A=1\nX=a\n"), ("b.env", "B=1\nX=b\n"), ("s", "s"), ("t", "t")] {
        fs::write(directory.path().join(name), text).unwrap();
    }
    let mut wrong = Vec::new();
    for (key, bases, overs, whole) in ROWS {
        let whole = laid(directory.path(), key, &[whole]).unwrap_or_else(|e| panic!("{key}: {whole}: {e}"));
        for (base, over) in bases.iter().flat_map(|base| overs.iter().map(move |over| (base, over))) {
            match laid(directory.path(), key, &[base, over]) {
                Ok(laid) if laid == whole => {}
                laid => {
                    let laid = laid.unwrap_or_else(|e| e);
                    let differ = |line: &&str| !whole.lines().any(|known| known == *line);
                    let lines: Vec<&str> = laid.lines().filter(differ).collect();
                    wrong.push(format!("{key}: {base} and {over}: {}", lines.join("\n")));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

// promise files: a port inside that two files publish at two ports of the host is refused, with
//   both places
#[test]
fn a_port_is_published_once() {
    let directory = tempfile::tempdir().unwrap();
    for over in ["['9090:80']", "['127.0.0.1:8080:80']", "[{target: 80, published: 9090}]"] {
        let refused = laid(directory.path(), "ports", &["['8080:80']", over]).unwrap_err();
        let at = directory.path().join("compose.yaml");
        let at = format!("services.web.ports: tcp port 80 is published twice, here and at {}:3:13", at.display());
        assert!(refused.contains("over.yaml:3:13: ") && refused.contains(&at), "{refused}");
        assert!(refused.ends_with("write `ports: !override` in the later file, or leave one out"), "{refused}");
    }
    let refused = laid(directory.path(), "ports", &["['8080:80', '9090:80']"]).unwrap_err();
    assert!(refused.ends_with(": Kip publishes it once, leave one out"), "{refused}");
}
