//! `deploy`: limits, restarts, copies. And the lists `ulimits` and `extra_hosts`.

use super::super::context::{Context, time};
use super::ComposeService;
use crate::place::{Weight, meant};
use crate::yaml::{Value, YamlNode};
use kip_types::life::Restart;
use kip_types::scale::{CloneMethod, MOST_REPLICAS};
use kip_types::spec::{Ulimit, parse_limit};
use kip_types::volume::ClonedVolumes;

/// Keys of `deploy`.
const DEPLOY: [&str; 9] = [
    "endpoint_mode",
    "labels",
    "mode",
    "placement",
    "replicas",
    "resources",
    "restart_policy",
    "rollback_config",
    "update_config",
];

impl ComposeService {
    /// A number for both values, or a map with `soft` and `hard`.
    pub(super) fn ulimits(&mut self, context: &mut Context<'_>, node: &YamlNode, path: &str) {
        for (name, place, value) in node.entries() {
            let path = format!("{path}.{name}");
            let (soft, hard) = match (value.get("soft"), value.get("hard")) {
                (None, None) => {
                    let both = context.parsed(value, &path, parse_limit);
                    (both, both)
                }
                (soft, hard) => {
                    let mut read = |of: Option<&YamlNode>| of.and_then(|of| context.parsed(of, &path, parse_limit));
                    let (soft, hard) = (read(soft), read(hard));
                    (soft.or(hard), hard.or(soft))
                }
            };
            let (Some(soft), Some(hard)) = (soft, hard) else { continue };
            match Ulimit::new(name, soft, hard) {
                Ok(limit) => self.table.ulimit.push(limit),
                Err(e) => context.fault(place, format!("{path}: {e}")),
            }
        }
    }

    /// `NAME:ADDRESS` or `NAME=ADDRESS` in a list, or a map of names to one address or several.
    pub(super) fn extra_hosts(&mut self, context: &mut Context<'_>, node: &YamlNode, path: &str) {
        let mut all = Vec::new();
        if let Value::Map(_) = &node.value {
            for (name, _, value) in node.entries() {
                let addrs = context.texts(value, path).into_iter();
                all.extend(addrs.map(|addr| (value.place.clone(), format!("{name}={addr}"))));
            }
        } else {
            for one in context.list(node, path) {
                all.extend(context.text(one, path).map(|text| (one.place.clone(), text)));
            }
        }
        for (place, text) in all {
            if text.ends_with("host-gateway") {
                let key = format!("{path}: host-gateway");
                context.lacks(&place, Weight::Changes, &key, "write an address of the machine");
                continue;
            }
            match text.parse() {
                // In two spellings, of two files perhaps.
                Ok(entry) if self.table.add_host.contains(&entry) => {}
                Ok(entry) => self.table.add_host.push(entry),
                Err(e) => context.fault(&place, format!("{path}: {e}")),
            }
        }
    }

    pub(super) fn deploy(&mut self, context: &mut Context<'_>, node: &YamlNode, path: &str) {
        for (key, place, value) in node.entries() {
            let path = format!("{path}.{key}");
            match key.as_str() {
                "resources" => {
                    for (key, place, limits) in value.entries() {
                        match key.as_str() {
                            "limits" => self.deploy_limits(context, limits, &format!("{path}.limits")),
                            "reservations" => reservations(context, limits, &format!("{path}.reservations")),
                            _ => {
                                context.fault(place, format!("{path} has no key {key}: known are limits, reservations"))
                            }
                        }
                    }
                }
                // After `x-kip`, see `read`.
                "replicas" => {}
                "mode" if context.text(value, &path).as_deref() == Some("replicated") => {}
                "mode" => context.lacks(place, Weight::Changes, &path, "there is one machine"),
                // After `restart`, see `read`.
                "restart_policy" => {}
                "labels" => context.lacks(place, Weight::Harmless, &path, "they are left out"),
                "endpoint_mode" | "placement" | "rollback_config" | "update_config" => {
                    context.lacks(place, Weight::Harmless, &path, "there is one proc, on one machine");
                }
                other if other.starts_with("x-") => {}
                other => {
                    let known = meant(other, DEPLOY.into_iter());
                    context.fault(place, format!("services.{}.deploy has no key {other}: {known}", self.name));
                }
            }
        }
    }

    fn deploy_limits(&mut self, context: &mut Context<'_>, node: &YamlNode, path: &str) {
        for (key, place, value) in node.entries() {
            let path = format!("{path}.{key}");
            match key.as_str() {
                "memory" => self.limits(context, "mem_limit", value, &path),
                "cpus" => self.limits(context, "cpus", value, &path),
                "pids" => self.limits(context, "pids_limit", value, &path),
                _ => {
                    context.fault(place, format!("there is no {path}: known are cpus, memory, pids"));
                    true
                }
            };
        }
    }

    /// It goes before `restart`, as with Compose.
    pub(super) fn restart_policy(&mut self, context: &mut Context<'_>, node: &YamlNode, path: &str) {
        let attempts = node.get("max_attempts").and_then(|most| context.parsed(most, path, str::parse::<u32>));
        let condition = node.get("condition").and_then(|condition| context.text(condition, path));
        let policy = match condition.as_deref() {
            Some("none") => Restart::No,
            Some("on-failure") => Restart::OnFailure(attempts.filter(|most| *most > 0)),
            None | Some("any") => Restart::Always,
            Some(other) => {
                let known = "write none, on-failure or any";
                return context.fault(&node.place, format!("{path}: there is no condition {other}: {known}"));
            }
        };
        if policy == Restart::Always && attempts.is_some() {
            context.lacks(&node.place, Weight::Harmless, path, "it is started again however often it ends");
        }
        for key in ["delay", "window"] {
            if let Some(value) = node.get(key).filter(|value| context.parsed(value, path, time).is_some()) {
                let why = "Kip waits longer each time that it ends soon";
                context.lacks(&value.place, Weight::Harmless, &format!("{path}.{key}"), why);
            }
        }
        self.table.restart = Some(policy).filter(|policy| !policy.is_no());
    }

    /// So many procs are there, as with Compose: each begins with a start, and shares the volumes.
    /// What `x-kip` says of them goes before.
    pub(super) fn copies(&mut self, context: &mut Context<'_>, node: &YamlNode, path: &str) {
        let Some(copies) = context.parsed(node, path, str::parse::<u32>) else { return };
        match copies {
            0 => context.lacks(&node.place, Weight::Changes, path, "there is one; leave the service out by a profile"),
            1 => {}
            2..=MOST_REPLICAS => {
                let most = *self.table.scale_max.get_or_insert(copies);
                self.table.scale_min.get_or_insert(copies.min(most));
                self.table.scale_method.get_or_insert(CloneMethod::Cold);
                if !self.table.volume.is_empty() {
                    self.table.scale_volumes.get_or_insert(ClonedVolumes::Share);
                }
            }
            _ => context.fault(&node.place, format!("{path}: at most {MOST_REPLICAS}")),
        }
    }
}

fn reservations(context: &mut Context<'_>, node: &YamlNode, path: &str) {
    for (key, place, _) in node.entries() {
        let (weight, why) = match key.as_str() {
            "devices" => (Weight::Changes, "a proc has no devices"),
            "cpus" | "memory" | "pids" => (Weight::Harmless, "nothing is kept for a proc"),
            "generic_resources" => (Weight::Changes, "a machine has no resources but CPU time, memory and disk"),
            other if other.starts_with("x-") => continue,
            other => {
                context.fault(place, format!("{path} has no key {other}: known are cpus, devices, memory"));
                continue;
            }
        };
        context.lacks(place, weight, &format!("{path}.{key}"), why);
    }
}
