//! One service.

mod deploy;
pub(in crate::compose) mod own;

use super::context::{Context, size, time};
use super::lacking::{LACKING, lacking};
use super::{mounts, networks, ports};
use crate::place::{SourcePosition, Weight, meant};
use crate::table::{ProcTable, read_secrets};
use crate::values::{Pull, Signal, Size, Time, Value as Variable, Words, split};
use crate::yaml::{Value, YamlNode};
use crate::{Described, environ};
use kip_types::life::Restart;
use kip_types::name::ProcName;
use kip_types::spec::{Capability, Egress, LEAST_LOG_BYTES, LOG_BYTES, MOST_LOG_FILES, bad_hostname, parse_signal};
use std::cell::RefCell;

/// Keys that are read, or that ask for what is so anyway.
const READ: [&str; 43] = [
    "image",
    "build",
    "command",
    "entrypoint",
    "environment",
    "env_file",
    "ports",
    "expose",
    "volumes",
    "user",
    "working_dir",
    "mem_limit",
    "cpus",
    "pids_limit",
    "storage_opt",
    "ulimits",
    "read_only",
    "tmpfs",
    "shm_size",
    "cap_add",
    "cap_drop",
    "logging",
    "deploy",
    "stop_signal",
    "stop_grace_period",
    "restart",
    "depends_on",
    "hostname",
    "extra_hosts",
    "labels",
    "profiles",
    "pull_policy",
    "healthcheck",
    "secrets",
    "scale",
    "network_mode",
    "init",
    "stdin_open",
    "tty",
    "x-kip",
    "container_name",
    "links",
    "networks",
];

/// A service as far as it is understood by itself.
pub struct ComposeService {
    pub name: String,
    pub proc: ProcName,
    pub place: SourcePosition,
    /// Services that have to be ready, not only started, before it.
    pub awaits: Vec<String>,
    /// Further names for other services.
    pub names: Vec<String>,
    /// Services and the names by which it knows them.
    pub links: Vec<(String, String)>,
    table: ProcTable,
    /// What its environment files say.
    env: Vec<(String, String)>,
    /// Services, and whether there has to be such a one.
    depends_on: Vec<(String, bool)>,
}

impl ComposeService {
    /// Reads a service; `kips` is what the file says for all of them.
    pub fn read(
        context: &mut Context<'_>,
        name: &str,
        proc: ProcName,
        place: &SourcePosition,
        node: &YamlNode,
        kips: Option<&YamlNode>,
    ) -> ComposeService {
        let (table, env) = (ProcTable::default(), Vec::new());
        let mut service = ComposeService {
            name: name.to_owned(),
            proc,
            place: place.clone(),
            awaits: Vec::new(),
            names: Vec::new(),
            links: Vec::new(),
            table,
            env,
            depends_on: Vec::new(),
        };
        if !matches!(node.value, Value::Map(_)) {
            context.fault(&node.place, format!("services.{name}: this is {}: write its keys", node.kind()));
            return service;
        }
        // `build` means another thing where there is one, wherever that stands.
        if let Some(Value::Text { text, .. }) = node.get("image").map(|image| &image.value) {
            service.table.image = Some(text.clone());
        }
        if let Some(kips) = kips {
            service.kips_own(context, kips, "x-kip");
        }
        for (key, place, value) in node.entries() {
            let path = format!("services.{name}.{key}");
            let known = service.program(context, key, value, &path)
                || service.files_and_ports(context, key, value, &path)
                || service.limits(context, key, value, &path)
                || service.others(context, key, place, value, &path);
            if known {
                continue;
            }
            match lacking(key) {
                Some((weight, why)) if asks(value) => context.lacks(place, weight, &path, why),
                Some(_) => {}
                None if key.starts_with("x-") => {}
                None => {
                    let all = READ.into_iter().chain(LACKING.iter().map(|(key, ..)| *key));
                    let known = meant(key, all.clone());
                    let known =
                        if known.starts_with("did") { known } else { "Compose has none of that name".to_owned() };
                    context.fault(place, format!("services.{name} has no key {key}: {known}"));
                }
            }
        }
        if let Some(policy) = node.get("deploy").and_then(|deploy| deploy.get("restart_policy")) {
            service.restart_policy(context, policy, &format!("services.{name}.deploy.restart_policy"));
        }
        let deploy = node.get("deploy").and_then(|deploy| Some((deploy.get("replicas")?, "deploy.replicas")));
        if let Some((copies, key)) = node.get("scale").map(|scale| (scale, "scale")).or(deploy) {
            service.copies(context, copies, &format!("services.{name}.{key}"));
        }
        if let Some(expose) = node.get("expose") {
            ports::exposed(context, expose, &format!("services.{name}.expose"), &mut service.table.port);
        }
        if service.table.egress.is_empty() && networks::is_internal(context, node.get("networks")) {
            service.table.egress = vec![Egress::None];
        }
        if service.table.image.is_none() {
            context.fault(place, format!("services.{name} names no image: write image: NAME"));
        }
        service
    }

    /// What runs, and as which user.
    fn program(&mut self, context: &mut Context<'_>, key: &str, node: &YamlNode, path: &str) -> bool {
        match key {
            "image" => self.table.image = context.text(node, path),
            "command" => self.table.command = words(context, node, path).filter(|words| !words.0.is_empty()),
            "entrypoint" => self.table.entrypoint = words(context, node, path),
            "user" => self.table.user = context.text(node, path),
            "working_dir" => self.table.workdir = context.text(node, path).map(Into::into),
            "environment" => {
                for (name, value) in context.pairs(node, path) {
                    if let Some(value) = value.or_else(|| (context.lookup)(&name)) {
                        self.table.env.insert(name, Variable(value));
                    }
                }
            }
            "env_file" => self.env_files(context, node, path),
            "stop_signal" => {
                let read = |text: &str| parse_signal(text).map(|_| Signal(text.to_owned()));
                self.table.stop_signal = context.parsed(node, path, read);
            }
            "pull_policy" => {
                let read = |text: &str| match text {
                    "always" => Ok(Pull::Always),
                    "never" => Ok(Pull::Never),
                    "missing" | "if_not_present" => Ok(Pull::Missing),
                    _ => Err("write always, missing or never"),
                };
                self.table.pull = context.parsed(node, path, read);
            }
            _ => return false,
        }
        true
    }

    fn env_files(&mut self, context: &mut Context<'_>, node: &YamlNode, path: &str) {
        let single = [node];
        let list = if let Value::Map(_) = node.value { single.to_vec() } else { context.list(node, path) };
        for one in list {
            let (file, required, expand) = match &one.value {
                Value::Map(_) => {
                    let file = one.get("path").and_then(|file| context.text(file, path));
                    let read = |text: &str| if text == "raw" { Ok(false) } else { Err("known is raw") };
                    let expand =
                        one.get("format").and_then(|format| context.parsed(format, path, read)).unwrap_or(true);
                    (file, one.get("required").is_none_or(|required| context.flag(required, path)), expand)
                }
                _ => (context.text(one, path), true, true),
            };
            let Some(file) = file else {
                context.fault(&one.place, format!("{path}: write the path of a file"));
                continue;
            };
            let file = context.directory.join(file);
            if !required && !file.exists() {
                continue;
            }
            let unset = RefCell::new(Vec::new());
            let said = environ::read(&file, context.lookup, expand, &|name| unset.borrow_mut().push(name.to_owned()));
            unset.take().iter().for_each(|name| context.unset(&one.place, name));
            match said {
                Ok(said) => self.env.extend(said),
                Err(e) => context.fault(&one.place, format!("{path}: {e}")),
            }
        }
    }

    fn files_and_ports(&mut self, context: &mut Context<'_>, key: &str, node: &YamlNode, path: &str) -> bool {
        match key {
            "ports" => self.table.port = ports::ports(context, node, path),
            "volumes" => self.table.volume = mounts::volumes(context, node, path, &mut self.table.tmpfs),
            // After the ports, see `read`.
            "expose" | "profiles" => {}
            _ => return false,
        }
        true
    }

    fn limits(&mut self, context: &mut Context<'_>, key: &str, node: &YamlNode, path: &str) -> bool {
        match key {
            "mem_limit" => self.table.mem = context.parsed(node, path, size).map(Size),
            "cpus" => self.table.cpus = context.parsed(node, path, str::parse::<f64>).filter(|n| *n > 0.0),
            // -1 is how Compose says that there is none.
            "pids_limit" => {
                let limit = context.parsed(node, path, str::parse::<i64>);
                self.table.pids = limit.filter(|n| *n > 0).and_then(|n| u32::try_from(n).ok());
            }
            "storage_opt" => {
                for (key, place, value) in node.entries() {
                    match key.as_str() {
                        "size" => self.table.disk = context.parsed(value, &format!("{path}.size"), size).map(Size),
                        _ => context.fault(place, format!("there is no {path}.{key}: known is size")),
                    }
                }
            }
            "ulimits" => self.ulimits(context, node, path),
            "read_only" => self.table.read_only = context.flag(node, path),
            "tmpfs" => {
                let list = context.list(node, path);
                self.table.tmpfs.extend(list.into_iter().filter_map(|one| context.parsed(one, path, str::parse)));
            }
            "shm_size" => self.table.shm_size = context.parsed(node, path, size).map(Size),
            "cap_add" => self.table.cap_add = capabilities(context, node, path),
            "cap_drop" => self.table.cap_drop = capabilities(context, node, path),
            "logging" => self.logging(context, node, path),
            "deploy" => self.deploy(context, node, path),
            _ => return false,
        }
        true
    }

    /// How much of what it writes is kept, as the files of Docker's own drivers have it. Where else
    /// it may go Kip does not send it.
    fn logging(&mut self, context: &mut Context<'_>, node: &YamlNode, path: &str) {
        for (key, place, value) in node.entries() {
            let path = format!("{path}.{key}");
            if key == "driver" {
                let driver = context.text(value, &path);
                if !matches!(driver.as_deref(), None | Some("json-file" | "local")) {
                    context.lacks(place, Weight::Harmless, &path, "`kip logs` shows the output of each service");
                }
                continue;
            }
            for (key, place, value) in value.entries() {
                let path = format!("{path}.{key}");
                match key.as_str() {
                    "max-size" => self.table.log_size = log_size(context, place, value, &path).map(Size),
                    "max-file" => self.table.log_files = log_files(context, place, value, &path),
                    _ => context.lacks(place, Weight::Harmless, &path, "`kip logs` shows the output of each service"),
                }
            }
        }
    }

    fn others(
        &mut self,
        context: &mut Context<'_>,
        key: &str,
        place: &SourcePosition,
        node: &YamlNode,
        path: &str,
    ) -> bool {
        match key {
            "depends_on" => self.depends_on(context, node, path),
            "restart" => {
                // What was stopped by hand stays stopped with Kip in any case.
                let read = |text: &str| if text == "unless-stopped" { Ok(Restart::Always) } else { text.parse() };
                self.table.restart = context.parsed(node, path, read).filter(|policy| !policy.is_no());
            }
            "stop_grace_period" => self.table.stop_grace = context.parsed(node, path, time).map(Time),
            "healthcheck" => self.healthcheck(context, place, node, path),
            "secrets" => mounts::secrets(context, node, path, &mut self.table.secret),
            "stdin_open" => self.table.stdin_open = context.flag(node, path),
            "tty" => {
                self.table.terminal = context.flag(node, path);
                if self.table.terminal {
                    let what = "a proc with a terminal does not go to the store, and starts cold after a reboot";
                    context.remark(place, path, what);
                }
            }
            "container_name" => self.names.extend(context.text(node, path)),
            "links" => {
                for link in context.texts(node, path) {
                    // Without another name it is known by its own anyway.
                    if let Some((service, name)) = link.split_once(':') {
                        self.links.push((service.to_owned(), name.to_owned()));
                    }
                }
            }
            "networks" => self.names.extend(networks::names(context, node, path)),
            "hostname" => {
                let read = |text: &str| bad_hostname(text).map_or_else(|| Ok(text.to_owned()), Err);
                self.table.hostname = context.parsed(node, path, read);
                self.names.extend(self.table.hostname.clone());
            }
            "extra_hosts" => self.extra_hosts(context, node, path),
            "labels" => {
                let labels = context.pairs(node, path).into_iter();
                self.table.label.extend(labels.map(|(key, value)| (key, Variable(value.unwrap_or_default()))));
            }
            // After `x-kip`, see `read`.
            "scale" => {}
            "network_mode" => match context.text(node, path).as_deref() {
                None | Some("bridge" | "default") => {}
                Some(_) => context.lacks(place, Weight::Changes, path, "a proc has a network of its own"),
            },
            "build" if self.table.image.is_some() => {
                context.lacks(place, Weight::Harmless, path, "the image is used as it is here");
            }
            "build" => context.lacks(
                place,
                Weight::Changes,
                path,
                "Kip builds no images: build it, `docker save` it, `kip image load` it and write image: NAME",
            ),
            "x-kip" => self.kips_own(context, node, path),
            // There is always one, pid 1 of the sandbox.
            "init" => {}
            _ => return false,
        }
        true
    }

    /// A health check that has succeeded once shows that the service is ready; that is all that it
    /// is for here.
    fn healthcheck(&mut self, context: &mut Context<'_>, place: &SourcePosition, node: &YamlNode, path: &str) {
        // All of it first, so that no key counts as unread.
        let mut part = |key: &str| node.get(key).and_then(|value| context.parsed(value, path, time));
        // Compose's own numbers where the file has none.
        let each = part("interval").unwrap_or(30_000) + part("timeout").unwrap_or(30_000);
        let start = part("start_period").unwrap_or(0);
        let retries = node.get("retries").and_then(|value| context.parsed(value, path, str::parse::<u64>)).unwrap_or(3);
        let test = node.get("test");
        if node.get("disable").is_some_and(|disable| context.flag(disable, path)) {
            return;
        }
        let Some(test) = test else {
            context.lacks(place, Weight::Harmless, path, "the image's HEALTHCHECK is ignored; write `test` here");
            return;
        };
        let command = match &test.value {
            Value::List(_) => {
                let words = context.texts(test, path);
                match words.split_first() {
                    Some((first, _)) if first == "NONE" => return,
                    Some((first, rest)) if first == "CMD-SHELL" => rest.join(" "),
                    Some((first, rest)) if first == "CMD" => {
                        shlex::try_join(rest.iter().map(String::as_str)).unwrap_or_default()
                    }
                    _ => {
                        context.fault(&test.place, format!("{path}.test: a list begins with CMD, CMD-SHELL or NONE"));
                        return;
                    }
                }
            }
            _ => context.text(test, path).unwrap_or_default(),
        };
        self.table.ready =
            format!("exec:{command}").parse().map_err(|e| context.fault(&test.place, format!("{path}.test: {e}"))).ok();
        self.table.ready_timeout = Some(Time(start + each * retries.clamp(1, 100)));
        context.lacks(
            place,
            Weight::Harmless,
            path,
            "the check runs after each start until it succeeds, and not after that",
        );
    }

    fn depends_on(&mut self, context: &mut Context<'_>, node: &YamlNode, path: &str) {
        if !matches!(node.value, Value::Map(_)) {
            self.depends_on = context.texts(node, path).into_iter().map(|name| (name, true)).collect();
            return;
        }
        for (name, place, how) in node.entries() {
            let required = how.get("required").is_none_or(|required| context.flag(required, path));
            self.depends_on.push((name.clone(), required));
            let condition = how.get("condition").and_then(|node| context.text(node, path));
            match condition.as_deref() {
                None | Some("service_started") => {}
                Some("service_healthy") => self.awaits.push(name.clone()),
                Some("service_completed_successfully") => {
                    context.lacks(place, Weight::Changes, path, "Kip does not wait until a proc ends");
                }
                Some(other) => {
                    context.fault(place, format!("{path}: there is no condition {other}: write service_started"));
                }
            }
        }
    }

    /// The proc, with the names of the others. `awaited`: another service waits until it is ready;
    /// `links`: names that others give it.
    pub fn described(
        mut self,
        context: &mut Context<'_>,
        names: &[(String, ProcName)],
        awaited: bool,
        links: Vec<String>,
    ) -> Option<Described> {
        // A service that says what ready is, is waited for anyway; one without ports could not be
        // seen to be ready.
        self.table.wait_ready = awaited && self.table.ready.is_none() && !self.table.port.is_empty();
        let mut known: Vec<String> = [self.name.clone()].into_iter().chain(self.names).chain(links).collect();
        known.retain(|name| !name.is_empty() && name != self.proc.as_str());
        known.sort_unstable();
        known.dedup();
        (self.table.network, self.table.alias) = (Some(context.project.clone()), known);
        let secrets = match read_secrets(&self.table.secret, context.directory) {
            Ok(secrets) => secrets,
            Err((secret, e)) => {
                context.fault(&self.place, format!("services.{}.secrets: {secret}: {e}", self.name));
                return None;
            }
        };
        let mut depends_on = Vec::new();
        for (name, required) in &self.depends_on {
            match names.iter().find(|(known, _)| known == name) {
                Some((_, proc)) => depends_on.push(proc.clone()),
                None if !required => {}
                None => {
                    let message = format!("services.{}.depends_on: there is no service {name}", self.name);
                    context.fault(&self.place, message);
                }
            }
        }
        let pull = self.table.pull.unwrap_or_default();
        let sources = self.table.volume.iter().map(|volume| volume.source.clone());
        let external = sources.filter(|source| context.external.contains(source)).collect();
        match self.table.into_request(self.proc, context.directory, self.env, secrets) {
            Ok(request) => {
                let (place, called) = (self.place, self.name);
                Some(Described { place, called, request, pull, plain_http: false, external, depends_on })
            }
            Err(e) => {
                context.fault(&self.place, e.to_string());
                None
            }
        }
    }
}

/// Names of capabilities. Which ones a proc can have the daemon says.
fn capabilities(context: &mut Context<'_>, node: &YamlNode, path: &str) -> Vec<Capability> {
    let list = context.list(node, path);
    list.into_iter().filter_map(|one| context.parsed(one, path, str::parse)).collect()
}

/// The nearest that Kip has: what a log keeps is seldom what a service depends on.
fn log_size(context: &mut Context<'_>, place: &SourcePosition, node: &YamlNode, path: &str) -> Option<u64> {
    let text = context.text(node, path)?;
    if text == "-1" {
        let why = format!("a log is limited, to files of {} MiB if it does not say less or more", LOG_BYTES >> 20);
        context.lacks(place, Weight::Harmless, path, &why);
        return None;
    }
    let wanted = context.parsed(node, path, size)?;
    if wanted < LEAST_LOG_BYTES {
        let why = format!("files of a log have {} KiB at least, and so have these", LEAST_LOG_BYTES >> 10);
        context.lacks(place, Weight::Harmless, path, &why);
    }
    Some(wanted.max(LEAST_LOG_BYTES))
}

/// Likewise.
fn log_files(context: &mut Context<'_>, place: &SourcePosition, node: &YamlNode, path: &str) -> Option<u32> {
    let wanted = context.parsed(node, path, str::parse::<i64>)?;
    let has = wanted.clamp(1, i64::from(MOST_LOG_FILES));
    if has != wanted {
        let why = format!("a log has 1 to {MOST_LOG_FILES} files, this one {has}");
        context.lacks(place, Weight::Harmless, path, &why);
    }
    u32::try_from(has).ok()
}

/// A key that is there and asks for nothing.
fn asks(node: &YamlNode) -> bool {
    match &node.value {
        Value::Null => false,
        Value::Text { text, quoted } => *quoted || text != "false",
        Value::List(list) => !list.is_empty(),
        Value::Map(map) => !map.is_empty(),
    }
}

/// A command: a list, or a string that is split as a shell does. Nothing is no command.
fn words(context: &mut Context<'_>, node: &YamlNode, path: &str) -> Option<Words> {
    match &node.value {
        Value::Null => None,
        Value::Text { .. } => context.parsed(node, path, split).map(Words),
        _ => Some(Words(context.texts(node, path))),
    }
}
