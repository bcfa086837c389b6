//! `kip.toml`: every key, the way back, mistakes and their places, the schema.

use super::*;
use crate::difference::differences;
use crate::render;
use kip_types::spec::{Clock, Fallback, Image, Lazy, Protocol, TreeAccess, WakeOn};

fn parse(text: &str) -> Result<Document, Faults> {
    let lookup = |_: &str| None;
    crate::read(&Reading {
        path: Path::new("/srv/kip.toml"),
        text,
        overrides: &[],
        lookup: &lookup,
        project: None,
        profiles: &[],
    })
}

fn faults(text: &str) -> Vec<String> {
    parse(text).unwrap_err().0.iter().map(Fault::to_string).collect()
}

const FULL: &str = r#"
project = "shop"

[proc.web]
command = "nginx -g 'daemon off;'"
tar = "files.tar"
network = "shop"
alias = ["www", "front.internal"]
hostname = "front"
terminal = true
stdin-open = true
ulimit = ["nofile=1024:4096", "core=0"]
read-only = true
tmpfs = ["/run:size=1M"]
shm-size = "8M"
cap-add = ["SYS_PTRACE"]
cap-drop = ["ALL"]
add-host = ["db:192.0.2.7", "six:[2001:db8::7]"]
egress = ["pypi.org:443", "192.0.2.0/24"]
port = ["8080:80", 443, { port = 53, proto = "udp", host-port = 5353, wake = "data" }]
volume = ["./html:/srv/html:ro", { source = "cache", target = "/var/cache" }]
mem = "64M"
cpus = 0.5
pids = 100
disk = "2G"
log-size = "1M"
log-files = 5
workdir = "/srv"
user = "www-data"
stop-signal = "SIGQUIT"
stop-grace = "3s"
restart = "on-failure:3"
ready = "http:80/health"
ready-timeout = "5s"
before-sleep = "touch /asleep"
after-wake = "rm /asleep"
hook-timeout = "3s"
probe = ["9000=http:80/healthz"]
idle = "5s"
park-after = 30
archive-after = "1d"
tick = "1s"
clock = "suspend"
hibernate = "held"
prefetch = "off"
lazy = "on"
file-pages = "keep"
fallback = "previous"
never-sleep = true
allow-setuid = true
tree = "write"
spawn = 8
wait-ready = true
depends-on = ["db"]
env = { A = "a", N = 5, B = true }
label = { team = "shop", tier = 2 }

[proc.db]
image = "oci:images/redis"
entrypoint = ["redis-server"]
publish-all = true
pull = "never"
"#;

// promise files: every flag of `kip run` is a key; the schema is generated, and the example of the
//   documents runs
// held by: this, `kip_describe::file::tests::the_schema_is_the_one_that_is_checked_in`,
//   `tests/test_apply.py::test_the_example_of_the_documents`
#[test]
fn every_key_is_read() {
    let document = parse(FULL).unwrap();
    assert_eq!(document.project.as_deref(), Some("shop"));
    let names: Vec<_> = document.procs.iter().map(|p| p.request.spec.name.as_str()).collect();
    assert_eq!(names, ["db", "web"], "in the order of their dependencies");
    let web = &document.procs[1].request;
    let spec = &web.spec;
    assert_eq!(spec.command, ["nginx", "-g", "daemon off;"]);
    assert_eq!(spec.image, Image::Tar("/srv/files.tar".into()));
    assert_eq!((spec.ports[0].host_port, spec.ports[1].port), (Some(8080), 443));
    let dns = &spec.ports[2];
    assert_eq!((dns.proto, dns.host_port, dns.wake_on), (Protocol::Udp, Some(5353), WakeOn::Data));
    let hooks = (spec.hooks.before_sleep.as_deref(), spec.hooks.after_wake.as_deref(), spec.hooks.within_ms);
    assert_eq!(hooks, (Some("touch /asleep"), Some("rm /asleep"), 3000));
    assert_eq!(spec.probes[0].to_string(), "9000=http:80/healthz");
    assert_eq!((spec.network.as_deref(), spec.aliases.join(" ").as_str()), (Some("shop"), "www front.internal"));
    assert_eq!(spec.volumes[0].to_string(), "/srv/html:/srv/html:ro");
    assert_eq!(spec.volumes[1].to_string(), "cache:/var/cache");
    assert_eq!(spec.limits.memory_bytes, Some(64 << 20));
    assert_eq!((spec.limits.log_bytes, spec.limits.log_files), (1 << 20, 5));
    assert_eq!((spec.timing.idle_ms, spec.timing.park_after_ms), (5000, 30_000));
    assert_eq!((spec.timing.prefetch, spec.timing.lazy, spec.timing.never), (false, Lazy::On, true));
    assert_eq!((spec.timing.fallback, spec.timing.clock), (Fallback::Previous, Clock::Suspend));
    assert_eq!((spec.env["N"].as_str(), spec.env["B"].as_str()), ("5", "true"));
    assert_eq!((spec.tree, spec.spawn), (TreeAccess::Write, 8));
    assert!(web.wait_ready && !web.left_open.idle);
    let Image::Oci(image) = &document.procs[0].request.spec.image else { panic!("an image") };
    assert_eq!(image.reference, "oci:/srv/images/redis");
    assert_eq!(image.entrypoint, Some(vec!["redis-server".to_owned()]));
    assert!(document.procs[0].request.left_open.idle);
}

#[test]
fn what_is_rendered_is_read_as_the_same() {
    let document = parse(FULL).unwrap();
    let requests = document.procs.iter().map(|p| (p.request.spec.name.clone(), p.request.clone()));
    let again = parse(&render(requests).unwrap()).unwrap();
    for one in &document.procs {
        let same = again.procs.iter().find(|p| p.request.spec.name == one.request.spec.name).unwrap();
        assert_eq!(same.request, one.request);
    }
}

#[test]
fn differences_are_by_key_and_keep_values_of_variables_to_themselves() {
    let of = |text: &str| parse(text).unwrap().procs.remove(0).request;
    let one = of("[proc.a]\ncommand = [\"x\"]\nenv = { A = \"secret\", B = \"b\" }\nport = [\"80\"]\n");
    let other =
        of("[proc.a]\ncommand = [\"y\"]\nenv = { A = \"other\", B = \"b\" }\nidle = \"5s\"\nwait-ready = true\n");
    assert_eq!(differences(&one, &one), []);
    let found = differences(&one, &other);
    let fields: Vec<_> = found.iter().map(|d| d.field.as_str()).collect();
    assert_eq!(fields, ["command", "env.A", "idle", "port"]);
    assert!(!format!("{found:?}").contains("secret"));
    assert_eq!((found[2].is.clone(), found[2].wanted.as_deref()), (None, Some("5s")));
}

#[test]
fn mistakes_are_told_with_their_place() {
    let web = |line: &str| format!("[proc.web]\ncommand = [\"x\"]\n{line}\n");
    for (text, told) in [
        (web("ports = [\"80\"]"), "/srv/kip.toml:3:1: proc.web has no key ports: did you mean port?"),
        (web("port = [\"80\", \"x\"]"), "/srv/kip.toml:3:15: proc.web.port: port \"x\" is not valid: write"),
        (web("idle = \"soon\""), "/srv/kip.toml:3:8: proc.web.idle: duration \"soon\" is not valid: write"),
        (web("mem = [1]"), "/srv/kip.toml:3:7: proc.web.mem: invalid type: sequence, expected a size"),
        (
            web("hibernate = \"deep\""),
            "/srv/kip.toml:3:13: proc.web.hibernate: unknown variant `deep`, expected one of",
        ),
        (web("env = { A = [] }"), "/srv/kip.toml:3:13: proc.web.env: invalid type"),
        (
            web("never-sleep = true\nidle-dry-run = true"),
            "/srv/kip.toml:4:16: proc.web.idle-dry-run: it cannot be used with never-sleep",
        ),
        (web("pull = \"never\""), "/srv/kip.toml:3:8: proc.web.pull: only an image is pulled"),
        (web("volume = [\"data\"]"), "/srv/kip.toml:3:11: proc.web.volume: volume"),
        (
            web("env-file = \"none.env\""),
            "/srv/kip.toml:3:12: proc.web.env-file: the environment file /srv/none.env cannot",
        ),
        (
            web("port = [{ port = 80, hots = 1 }]"),
            "/srv/kip.toml:3:22: proc.web.port: unknown field `hots`, expected one of",
        ),
        (web("depends-on = [\"db\"]"), "/srv/kip.toml:1:7: web depends on db, which is not in this file"),
        (
            web("restart = \"often\""),
            "/srv/kip.toml:3:11: proc.web.restart: restart policy \"often\" is not valid: write no",
        ),
        (web("secret = { key = \"none\" }"), "/srv/kip.toml:3:10: proc.web.secret.key: /srv/none cannot be read"),
        (web("idle = "), "/srv/kip.toml:3:8: "),
        ("[proc.Web]\ncommand = [\"x\"]\n".to_owned(), "/srv/kip.toml:1:7: proc name \"Web\" is not valid"),
        ("[proc.web]\n".to_owned(), "/srv/kip.toml:1:7: proc.web says no program: write command ="),
        ("[procs.web]\n".to_owned(), "/srv/kip.toml:1:2: there is no key procs: did you mean proc?"),
        ("proc = 3\n".to_owned(), "/srv/kip.toml:1:8: proc: write a table"),
    ] {
        let all = faults(&text);
        assert!(all[0].starts_with(told), "{text}: {all:?}");
    }
}

#[test]
fn mistakes_of_all_procs_are_told_at_once() {
    let text = "[proc.a]\ncommand = [\"x\"]\nidel = 1\nmen = 2\n[proc.b]\ncommand = [\"x\"]\npids = -1\n";
    let all = faults(text);
    assert_eq!(all.len(), 3, "{all:?}");
    assert!(all[0].contains(":3:1:") && all[1].contains(":4:1:") && all[2].contains(":7:8: proc.b.pids"), "{all:?}");
}

#[test]
fn circles_are_named() {
    let text = "[proc.a]\ncommand='x'\ndepends-on=['b']\n[proc.b]\ncommand='x'\ndepends-on=['c']\n[proc.c]\ncommand='x'\ndepends-on=['b']\n";
    assert_eq!(faults(text), ["/srv/kip.toml:4:7: these depend on each other in a circle: b -> c -> b"]);
}

#[test]
fn the_schema_is_the_one_that_is_checked_in() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/kip-toml.schema.json");
    let text = std::fs::read_to_string(file).unwrap_or_default();
    assert!(
        serde_json::from_str::<serde_json::Value>(&text).unwrap_or_default() == schema(),
        "docs/kip-toml.schema.json is stale: cargo run -p kip-describe --example schema > docs/kip-toml.schema.json"
    );
}
