//! What an update makes of a proc that differs from its description. Owns which differences these
//! are; asks no daemon.

use crate::difference::differences;
use kip_types::api::{LimitsUpdate, RunRequest, TimingUpdate, UpdateRequest};
use kip_types::spec::{Image, PortSpec, Spec};
use std::collections::BTreeMap;

/// The update after which a proc that was made by `is` is as `wanted`; none if something differs
/// that is fixed when a proc is made.
pub fn update_between(is: &RunRequest, wanted: &RunRequest) -> Option<UpdateRequest> {
    if is.spec.has_dns_port() != wanted.spec.has_dns_port() {
        return None;
    }
    let request = between(is, wanted);
    // A port that its image exposes stays, and only the daemon knows which these are.
    if !request.remove_ports.is_empty() && matches!(wanted.spec.image, Image::Oci(_)) {
        return None;
    }
    let mut spec = Spec { asked: Some(Box::new(is.clone())), ..is.spec.clone() };
    request.apply(&mut spec);
    let after = spec.asked.expect("it was put there");
    differences(&after, wanted).is_empty().then_some(request)
}

fn between(is: &RunRequest, wanted: &RunRequest) -> UpdateRequest {
    let (a, b) = (&is.spec, &wanted.spec);
    let (was, timing) = (&a.timing, &b.timing);
    // Of a time that the file leaves open only the daemon knows the default.
    let time = |was: u64, to: u64, was_open: bool, is_open: bool| (!is_open && (was_open || was != to)).then_some(to);
    let (was_open, is_open) = (&is.left_open, &wanted.left_open);
    let removed = a.labels.keys().filter(|key| !b.labels.contains_key(*key)).map(|key| (key.clone(), None));
    let set = b.labels.iter().filter(|(key, value)| a.labels.get(*key) != Some(value));
    let labels: BTreeMap<_, _> = removed.chain(set.map(|(key, value)| (key.clone(), Some(value.clone())))).collect();
    let gone = a.ports.iter().map(PortSpec::inner).filter(|port| !b.ports.iter().any(|other| other.inner() == *port));
    UpdateRequest {
        limits: LimitsUpdate {
            memory_bytes: to(&a.limits.memory_bytes, &b.limits.memory_bytes),
            cpus: to(&a.limits.cpus, &b.limits.cpus),
            pids: to(&a.limits.pids, &b.limits.pids),
        },
        timing: TimingUpdate {
            idle_ms: time(was.idle_ms, timing.idle_ms, was_open.idle, is_open.idle),
            park_after_ms: time(was.park_after_ms, timing.park_after_ms, was_open.park_after, is_open.park_after),
            archive_after_ms: time(
                was.archive_after_ms,
                timing.archive_after_ms,
                was_open.archive_after,
                is_open.archive_after,
            ),
            tick_ms: to(&was.tick_ms, &timing.tick_ms),
            clock: to(&was.clock, &timing.clock),
            never: to(&was.never, &timing.never),
            dry_run: to(&was.dry_run, &timing.dry_run),
            hibernate: to(&was.hibernate, &timing.hibernate),
            prefetch: to(&was.prefetch, &timing.prefetch),
            lazy: to(&was.lazy, &timing.lazy),
            keep_files: to(&was.keep_files, &timing.keep_files),
            fallback: to(&was.fallback, &timing.fallback),
        },
        restart: to(&a.restart, &b.restart),
        stop_signal: to(&a.stop_signal, &b.stop_signal),
        stop_grace_ms: to(&a.stop_grace_ms, &b.stop_grace_ms),
        set_ports: b.ports.iter().filter(|port| !a.ports.contains(port)).cloned().collect(),
        remove_ports: gone.collect(),
        scale: to(&a.scale, &b.scale),
        labels,
    }
}

fn to<T: Clone + PartialEq>(is: &T, wanted: &T) -> Option<T> {
    (is != wanted).then(|| wanted.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(spec: &str, left_open: &str) -> RunRequest {
        let json = format!(r#"{{"spec":{{"name":"a","command":["x"],{spec}}},"left_open":{left_open}}}"#);
        serde_json::from_str(&json).unwrap()
    }

    #[test]
    fn only_what_can_change_is_updated() {
        let is = request(r#""limits":{"memory_bytes":5,"pids":9},"labels":{"a":"b"}"#, r#"{"idle":true}"#);
        let wanted = request(r#""limits":{"pids":9},"labels":{"c":"d"},"timing":{"idle_ms":7}"#, "{}");
        let update = serde_json::to_value(super::update_between(&is, &wanted).unwrap()).unwrap();
        let asked = serde_json::json!({
            "limits": { "memory_bytes": null },
            "timing": { "idle_ms": 7 },
            "labels": { "a": null, "c": "d" },
        });
        assert_eq!(update, asked);
        let ports = |ports: &str| request(&format!(r#""ports":[{ports}]"#), "{}");
        let port = |port: u16| format!(r#"{{"proto":"tcp","port":{port},"host_port":null}}"#);
        let (two, other_two) = (ports(&(port(1) + "," + &port(2))), ports(&(port(3) + "," + &port(1))));
        let update = super::update_between(&two, &other_two).unwrap();
        assert_eq!((update.set_ports.len(), update.remove_ports.len()), (1, 1), "their order means nothing");
        let other = RunRequest { spec: Spec { user: Some("www".to_owned()), ..wanted.spec.clone() }, ..wanted.clone() };
        assert_eq!(super::update_between(&is, &other), None, "the user is fixed");
        assert_eq!(super::update_between(&wanted, &is), None, "only the daemon knows its defaults");
    }
}
