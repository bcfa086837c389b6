//! `kip ps`: which procs there are, as a table, as names, or in the form that a template says.

use crate::filter::{self, KeyFilter};
use crate::output::{print, print_json};
use crate::view::{self, dash, host_side, or_dash};
use clap::Args;
use kip_client::Client;
use kip_text::format::{self, Format, TemplatePart};
use kip_text::{ago, bytes, micros, millis, now_ms, one_line, short, table, utc};
use kip_types::api::ProcView;
use kip_types::spec::{Image, Spec};

/// Longest command in a table, characters.
const COMMAND_MAX: usize = 60;
/// Keys of `--filter`.
const KEYS: [&str; 7] = ["name", "state", "status", "tier", "label", "network", "image"];
/// Fields of `--format`. What docker calls otherwise has docker's word, too.
const FIELDS: [&str; 20] = [
    "Name",
    "Names",
    "ID",
    "State",
    "Status",
    "Tier",
    "Ports",
    "Memory",
    "Idle",
    "LastWake",
    "Wakes",
    "Age",
    "RunningFor",
    "CreatedAt",
    "Exit",
    "Image",
    "Command",
    "Labels",
    "Network",
    "Networks",
];

#[derive(Debug, Args)]
pub struct PsArgs {
    /// No effect: `kip ps` lists stopped procs anyway. For users of Docker
    #[arg(short, long)]
    pub all: bool,
    /// Only names, one a line
    #[arg(short, long)]
    pub quiet: bool,
    /// Only procs that match: name (a part of it), state, tier, label=K or label=K=V, network,
    /// image; may be repeated
    #[arg(short, long = "filter", value_name = "KEY=VALUE", value_parser = |text: &str| filter::parse(text, &KEYS))]
    pub filters: Vec<KeyFilter>,
    /// Output format: json, or fields as '{{.Name}} {{.State}}', after `table ` as a table;
    /// `kip ps --format x` names the fields
    #[arg(long, value_name = "FORMAT", conflicts_with = "quiet", value_parser = |text: &str| format::parse(text, &FIELDS))]
    pub format: Option<Format>,
}

/// Asks and shows.
pub async fn ps(client: &Client, args: &PsArgs, json: bool) -> anyhow::Result<()> {
    let mut views = client.list().await?;
    views.retain(|view| filter::passes(&args.filters, |key, value| agrees(view, key, value)));
    if args.quiet {
        let names: Vec<_> = views.iter().map(|view| &view.name).collect();
        return match json {
            true => print_json(&names),
            false => print(&names.iter().map(|name| format!("{name}\n")).collect::<String>()),
        };
    }
    match &args.format {
        Some(Format::Json) => views.iter().try_for_each(print_json),
        Some(Format::Lines { parts, is_table }) => print(&format::lines(parts, *is_table, &views, field)),
        None if json => print_json(&views),
        None => print(&lines(&views)),
    }
}

fn agrees(view: &ProcView, key: &str, value: &str) -> bool {
    match key {
        "name" => view.name.as_str().contains(value),
        // Docker's words for what Kip calls otherwise.
        "state" | "status" => match value {
            "exited" => <&str>::from(view.state) == "stopped",
            value => <&str>::from(view.state) == value,
        },
        "tier" => view.tier.map_or("none".to_owned(), |tier| tier.to_string()) == value,
        "label" => match value.split_once('=') {
            Some((key, value)) => view.spec.labels.get(key).is_some_and(|is| is == value),
            None => view.spec.labels.contains_key(value),
        },
        "network" => view.spec.network.as_deref() == Some(value),
        _ => is_image(&view.spec, value),
    }
}

/// `nginx` is every tag of it, and docker.io's words before it may be left out.
fn is_image(spec: &Spec, wanted: &str) -> bool {
    let Image::Oci(oci) = &spec.image else { return image(spec) == wanted };
    let is = oci.reference.as_str();
    let untagged = is.rsplit_once(':').filter(|(_, tag)| !tag.contains('/')).map_or(is, |(name, _)| name);
    let ends = |name: &str| name == wanted || name.strip_suffix(wanted).is_some_and(|before| before.ends_with('/'));
    ends(is) || ends(untagged)
}

/// The image by its name, the path of a tarball, or `host`.
fn image(spec: &Spec) -> String {
    match &spec.image {
        Image::Host => "host".to_owned(),
        Image::Tar(path) => path.display().to_string(),
        Image::Oci(image) => image.reference.clone(),
    }
}

/// The time since its program was last started, if it is known.
fn age(view: &ProcView) -> String {
    view.started_at_ms.map_or_else(dash, |at_ms| millis(now_ms().saturating_sub(at_ms)))
}

/// The exit code of its program as shells tell it; its words where there is no code.
fn exit(view: &ProcView) -> String {
    match view.exit_code {
        Some(code) if view.out_of_memory => format!("{code} (memory)"),
        Some(code) => code.to_string(),
        None => view.exit.clone().unwrap_or_else(dash),
    }
}

fn memory(view: &ProcView) -> String {
    if view.pids.is_empty() { dash() } else { bytes(view.memory.pss_bytes) }
}

fn ports(view: &ProcView) -> String {
    let each = view.ports.iter().map(|p| match p.host_port {
        Some(_) if p.only_at().is_some() => format!("{}->{}/{}", host_side(p), p.port, p.proto),
        Some(host_port) => format!("{host_port}->{}/{}", p.port, p.proto),
        None => format!("{}/{}", p.port, p.proto),
    });
    each.collect::<Vec<_>>().join(",")
}

fn last_wake(view: &ProcView) -> String {
    view.last_wake.as_ref().map_or_else(dash, |wake| format!("{}, {}", micros(wake.total_us), ago(wake.at_ms)))
}

/// `kip ps` without a format.
fn lines(views: &[ProcView]) -> String {
    let head = ["NAME", "STATE", "TIER", "PORTS", "MEMORY", "IDLE", "LAST-WAKE", "AGE", "EXIT", "COMMAND"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(views.iter().map(|view| {
        vec![
            view.name.to_string(),
            view::state(view),
            view.tier.map_or_else(dash, |tier| tier.to_string()),
            or_dash(ports(view)),
            memory(view),
            view.idle_ms.map_or_else(dash, millis),
            last_wake(view),
            age(view),
            exit(view),
            short(&view::command(&view.spec), COMMAND_MAX),
        ]
    }));
    table(&rows)
}

/// What a part of a template stands for.
fn field(view: &ProcView, part: &TemplatePart) -> String {
    let spec = &view.spec;
    let name = match part {
        TemplatePart::Text(text) => return text.clone(),
        TemplatePart::Label(key) => return spec.labels.get(key).map(|value| one_line(value)).unwrap_or_default(),
        TemplatePart::Field(name) => name.as_str(),
    };
    match name {
        "Name" | "Names" | "ID" => view.name.to_string(),
        "State" => view.state.to_string(),
        "Status" => match &view.exit {
            Some(exit) => format!("{} ({exit})", view::state(view)),
            None => view::state(view),
        },
        "Tier" => view.tier.map_or_else(dash, |tier| tier.to_string()),
        "Ports" => ports(view),
        "Memory" => memory(view),
        "Idle" => view.idle_ms.map_or_else(dash, millis),
        "LastWake" => last_wake(view),
        "Wakes" => view.wakes.to_string(),
        "Age" => age(view),
        "RunningFor" => view.started_at_ms.map_or_else(dash, ago),
        "CreatedAt" => view.started_at_ms.map_or_else(dash, utc),
        "Exit" => exit(view),
        "Image" => image(spec),
        "Command" => view::command(spec),
        "Labels" => {
            let each = spec.labels.iter().map(|(key, value)| one_line(&format!("{key}={value}")));
            each.collect::<Vec<_>>().join(",")
        }
        _ => spec.network.clone().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::{a_proc, a_wake};

    #[test]
    fn ps_is_an_aligned_table() {
        let views = [
            a_proc(serde_json::json!({"last_wake": a_wake(), "started_at_ms": now_ms() - 180_500})),
            a_proc(
                serde_json::json!({"name": "a-parked-one", "state": "parked", "tier": "parked", "pids": [], "idle_ms": null, "ports": []}),
            ),
            a_proc(
                serde_json::json!({"name": "b", "state": "stopped", "tier": null, "pids": [], "idle_ms": null, "exit": "signal 9", "exit_code": 137}),
            ),
        ];
        let text = lines(&views);
        let expected = "\
NAME          STATE    TIER    PORTS         MEMORY  IDLE  LAST-WAKE      AGE  EXIT  COMMAND
web           running  hot     8080->80/tcp  3.0M    1.5s  7.5ms, 3m ago  3m   -     sh -c 'echo '\\''a b'\\''; '
a-parked-one  parked   parked  -             -       -     -              -    -     sh -c 'echo '\\''a b'\\''; '
b             stopped  -       8080->80/tcp  -       -     -              -    137   sh -c 'echo '\\''a b'\\''; '
";
        assert_eq!(text, expected.replace("; '", ";  '"), "{text}");
        assert_eq!(lines(&[]).lines().count(), 1);
    }

    #[test]
    fn filters_look_at_the_spec() {
        let image = serde_json::json!({"oci": {"reference": "docker.io/library/nginx:1.27"}});
        let spec = serde_json::json!({
            "name": "web", "command": ["x"], "labels": {"team": "shop", "empty": ""}, "network": "shop", "image": image,
        });
        let view = a_proc(serde_json::json!({"spec": spec}));
        for (key, value) in [
            ("name", "we"),
            ("state", "running"),
            ("status", "running"),
            ("tier", "hot"),
            ("label", "team"),
            ("label", "team=shop"),
            ("label", "empty="),
            ("network", "shop"),
            ("image", "nginx"),
            ("image", "nginx:1.27"),
            ("image", "library/nginx"),
            ("image", "docker.io/library/nginx:1.27"),
        ] {
            assert!(agrees(&view, key, value), "{key}={value}");
        }
        for (key, value) in [
            ("name", "web-1"),
            ("state", "exited"),
            ("tier", "parked"),
            ("label", "team=other"),
            ("label", "shop"),
            ("network", "x"),
            ("image", "ginx"),
            ("image", "nginx:1"),
            ("image", "host"),
        ] {
            assert!(!agrees(&view, key, value), "{key}={value}");
        }
        assert!(agrees(&a_proc(serde_json::json!({})), "image", "host"));
    }

    #[test]
    fn every_field_has_a_value() {
        let view = a_proc(serde_json::json!({
            "state": "stopped", "tier": null, "exit": "exit code 3", "exit_code": 3, "last_wake": a_wake(), "started_at_ms": 1,
            "spec": {"name": "web", "command": ["x"], "labels": {"a": "1"}, "network": "n"},
        }));
        for name in FIELDS {
            assert_ne!(field(&view, &TemplatePart::Field(name.to_owned())), "", "{name}");
        }
        let of = |name: &str| field(&view, &TemplatePart::Field(name.to_owned()));
        assert_eq!(
            (of("Status"), of("Exit"), of("Labels")),
            ("stopped (exit code 3)".into(), "3".into(), "a=1".into())
        );
        assert_eq!(field(&view, &TemplatePart::Label("a".to_owned())), "1");
    }
}
