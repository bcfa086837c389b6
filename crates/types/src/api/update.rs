//! What of a proc can be changed while the proc exists, and the change itself. Owns which fields
//! these are; never says whether a value is possible.

use crate::life::Restart;
use crate::scale::Scaling;
use crate::spec::{Clock, Fallback, Hibernate, InnerPort, Lazy, Limits, PortSpec, Spec, Timing};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// `PATCH /v1/procs/NAME`: the spec's own fields, as far as they can be changed without a restart.
/// A field that is left out stays as it is; null gives one back its default.
#[derive(Debug, Clone, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct UpdateRequest {
    /// What it may use at most.
    pub limits: LimitsUpdate,
    /// When and how it sleeps.
    pub timing: TimingUpdate,
    /// Whether it is started again when its program ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart: Option<Restart>,
    /// What `kip stop` sends first, name or number; null is SIGTERM.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "given")]
    pub stop_signal: Option<Option<String>>,
    /// From that signal to SIGKILL, milliseconds; null is 10 s.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "given")]
    pub stop_grace_ms: Option<Option<u64>>,
    /// Ports that it has from now on, or has otherwise; others stay. Without a port of the host one
    /// is chosen.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub set_ports: Vec<PortSpec>,
    /// Ports that it has no more. Connections that are open stay.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub remove_ports: Vec<InnerPort>,
    /// How many procs serve behind its name; null is itself alone.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "given")]
    pub scale: Option<Option<Scaling>>,
    /// Labels by their keys; null removes one, and the others stay.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, Option<String>>,
}

/// Limits that hold at once for a proc that runs, and for a sleeper when it wakes.
#[derive(Debug, Clone, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LimitsUpdate {
    /// Memory in bytes; null is unlimited. Less than the proc uses, or used when it fell asleep, is
    /// refused.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "given")]
    pub memory_bytes: Option<Option<u64>>,
    /// CPUs, 1.0 is one core; null is unlimited.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "given")]
    pub cpus: Option<Option<f64>>,
    /// Processes and threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pids: Option<u32>,
}

/// When a proc goes to a lower tier, and how. For a sleeper, times count from when it fell asleep;
/// `tick_ms`, `clock`, `hibernate`, `prefetch` and `lazy` hold from its next sleep on.
#[derive(Debug, Clone, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TimingUpdate {
    /// Time without activity after which the proc is hibernated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_ms: Option<u64>,
    /// Time that the proc stays hibernated before it is parked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub park_after_ms: Option<u64>,
    /// Time that the proc stays parked before it is archived, if there is a store.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub archive_after_ms: Option<u64>,
    /// Timers shorter than this are no activity, and do not wake a parked proc.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tick_ms: Option<u64>,
    /// How CLOCK_MONOTONIC behaves while the proc is parked or archived.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clock: Option<Clock>,
    /// The proc never sleeps automatically.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub never: Option<bool>,
    /// The proc never sleeps automatically, but Kip reports when it would have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dry_run: Option<bool>,
    /// How the proc hibernates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hibernate: Option<Hibernate>,
    /// A wake installs the working set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefetch: Option<bool>,
    /// Whether a parked proc runs before all its memory is read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lazy: Option<Lazy>,
    /// Hibernation leaves clean pages of files in memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_files: Option<bool>,
    /// What follows if the snapshot is damaged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fallback: Option<Fallback>,
}

/// Tells a field that is null from one that is left out.
fn given<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Option<T>, D::Error> {
    T::deserialize(from).map(Some)
}

fn set<T: Clone>(field: &mut T, to: Option<&T>) {
    if let Some(to) = to {
        field.clone_from(to);
    }
}

impl LimitsUpdate {
    fn apply(&self, limits: &mut Limits) {
        set(&mut limits.memory_bytes, self.memory_bytes.as_ref());
        set(&mut limits.cpus, self.cpus.as_ref());
        set(&mut limits.pids, self.pids.as_ref());
    }
}

impl TimingUpdate {
    fn apply(&self, timing: &mut Timing) {
        set(&mut timing.idle_ms, self.idle_ms.as_ref());
        set(&mut timing.park_after_ms, self.park_after_ms.as_ref());
        set(&mut timing.archive_after_ms, self.archive_after_ms.as_ref());
        timing.archive_by_default &= self.archive_after_ms.is_none();
        set(&mut timing.tick_ms, self.tick_ms.as_ref());
        set(&mut timing.clock, self.clock.as_ref());
        set(&mut timing.never, self.never.as_ref());
        set(&mut timing.dry_run, self.dry_run.as_ref());
        set(&mut timing.hibernate, self.hibernate.as_ref());
        set(&mut timing.prefetch, self.prefetch.as_ref());
        set(&mut timing.lazy, self.lazy.as_ref());
        set(&mut timing.keep_files, self.keep_files.as_ref());
        set(&mut timing.fallback, self.fallback.as_ref());
    }
}

impl UpdateRequest {
    /// Changes the spec, and with it the request that it keeps: a file is compared with that, and
    /// an export is made of it.
    pub fn apply(&self, spec: &mut Spec) {
        self.change(spec);
        if let Some(asked) = &mut spec.asked {
            self.change(&mut asked.spec);
            asked.left_open.idle &= self.timing.idle_ms.is_none();
            asked.left_open.park_after &= self.timing.park_after_ms.is_none();
            asked.left_open.archive_after &= self.timing.archive_after_ms.is_none();
        }
    }

    fn change(&self, spec: &mut Spec) {
        self.limits.apply(&mut spec.limits);
        self.timing.apply(&mut spec.timing);
        set(&mut spec.restart, self.restart.as_ref());
        set(&mut spec.stop_signal, self.stop_signal.as_ref());
        set(&mut spec.stop_grace_ms, self.stop_grace_ms.as_ref());
        set(&mut spec.scale, self.scale.as_ref());
        spec.ports.retain(|port| !self.remove_ports.contains(&port.inner()));
        for port in &self.set_ports {
            match spec.ports.iter_mut().find(|other| other.inner() == port.inner()) {
                Some(other) => other.clone_from(port),
                None => spec.ports.push(port.clone()),
            }
        }
        for (key, value) in &self.labels {
            match value {
                Some(value) => drop(spec.labels.insert(key.clone(), value.clone())),
                None => drop(spec.labels.remove(key)),
            }
        }
    }
}

/// The fields in which two specs differ that an update can change, each as `limits.pids 5 -> 7`.
pub fn updated_fields(is: &Spec, becomes: &Spec) -> Vec<String> {
    let (is, becomes) = (changeable(is), changeable(becomes));
    let mut fields = Vec::new();
    for (key, before) in &is {
        let after = becomes.get(key).unwrap_or(&Value::Null);
        if before != after {
            fields.push(format!("{key} {before} -> {after}"));
        }
    }
    let new = becomes.iter().filter(|(key, _)| !is.contains_key(*key));
    fields.extend(new.map(|(key, after)| format!("{key} null -> {after}")));
    fields
}

fn changeable(spec: &Spec) -> BTreeMap<String, Value> {
    let mut all = BTreeMap::new();
    for (name, value) in [
        ("limits", json!(spec.limits)),
        ("timing", json!(spec.timing)),
        ("labels", json!(spec.labels)),
        ("ports", json!(spec.ports.iter().map(PortSpec::to_string).collect::<Vec<_>>().join(" "))),
        ("restart", json!(spec.restart)),
        ("stop_signal", json!(spec.stop_signal)),
        ("stop_grace_ms", json!(spec.stop_grace_ms)),
        ("scale", json!(spec.scale)),
    ] {
        match value {
            Value::Object(fields) => {
                all.extend(fields.into_iter().map(|(key, value)| (format!("{name}.{key}"), value)))
            }
            value => drop(all.insert(name.to_owned(), value)),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::request::RunRequest;

    fn spec() -> Spec {
        let json = r#"{"name":"a","command":["x"],"labels":{"one":"1","two":"2"},"limits":{"memory_bytes":5}}"#;
        let mut spec: Spec = serde_json::from_str(json).unwrap();
        let asked = RunRequest {
            spec: spec.clone(),
            wait_ready: false,
            secrets: BTreeMap::new(),
            left_open: crate::api::LeftOpen { idle: true, park_after: true, ..Default::default() },
            in_file: crate::api::InFile::default(),
        };
        spec.asked = Some(Box::new(asked));
        spec
    }

    #[test]
    fn what_is_left_out_stays_and_null_gives_the_default_back() {
        let (before, mut after) = (spec(), spec());
        let request: UpdateRequest = serde_json::from_str(
            r#"{"limits":{"memory_bytes":null,"pids":7},"timing":{"idle_ms":1},"labels":{"one":null,"three":"3"},"restart":"always"}"#,
        )
        .unwrap();
        request.apply(&mut after);
        assert_eq!((after.limits.memory_bytes, after.limits.pids, after.limits.cpus), (None, 7, None));
        assert_eq!((after.timing.idle_ms, after.timing.park_after_ms), (1, before.timing.park_after_ms));
        assert_eq!(after.labels.keys().collect::<Vec<_>>(), ["three", "two"]);
        let asked = after.asked.clone().unwrap();
        assert_eq!((asked.spec.limits.pids, asked.left_open.idle, asked.left_open.park_after), (7, false, true));
        assert_eq!(
            updated_fields(&before, &after),
            [
                "labels.one \"1\" -> null",
                "limits.memory_bytes 5 -> null",
                "limits.pids 4096 -> 7",
                "restart \"no\" -> \"always\"",
                "timing.idle_ms 10000 -> 1",
                "labels.three null -> \"3\"",
            ]
        );
        assert!(after.timing.archive_by_default);
        let again: UpdateRequest = serde_json::from_value(serde_json::to_value(&request).unwrap()).unwrap();
        assert_eq!(again, request, "null is written as null");
    }

    #[test]
    fn ports_are_set_and_removed_by_what_they_are_inside() {
        let (before, mut after) = (spec(), spec());
        let port = |text: &str| text.parse::<PortSpec>().unwrap();
        after.ports = vec![port("8080:80"), port("81"), port("53/udp")];
        let (set_ports, remove_ports) = (vec![port("8081:80"), port("82")], vec!["53/udp".parse().unwrap()]);
        UpdateRequest { set_ports, remove_ports, ..UpdateRequest::default() }.apply(&mut after);
        assert_eq!(after.ports, [port("8081:80"), port("81"), port("82")]);
        assert_eq!(after.asked.as_ref().unwrap().spec.ports, [port("8081:80"), port("82")]);
        assert_eq!(updated_fields(&before, &after), ["ports \"\" -> \"8081:80 81 82\""]);
        for bad in ["", "0", "a", "80/sctp", "8080:80", "70000"] {
            assert!(bad.parse::<InnerPort>().is_err(), "{bad}");
        }
        assert_eq!("80/tcp".parse(), "80".parse::<InnerPort>());
    }

    #[test]
    fn nothing_else_can_be_changed() {
        for other in
            [r#"{"image":"host"}"#, r#"{"limits":{"disk_bytes":1}}"#, r#"{"timing":{"archive_by_default":true}}"#]
        {
            assert!(serde_json::from_str::<UpdateRequest>(other).is_err(), "{other}");
        }
    }
}
