//! Keys of services that Kip lacks, each with what happens instead.

use super::context::Context;
use crate::place::Weight::{self, Changes, Harmless};
use crate::place::meant;
use crate::yaml::YamlNode;

/// A key, how much it matters that Kip lacks it, and what happens instead.
pub const LACKING: [(&str, Weight, &str); 48] = [
    ("annotations", Harmless, "annotations are left out"),
    ("attach", Harmless, "`kip logs` shows the output of each service"),
    ("blkio_config", Harmless, "reading and writing is not limited"),
    ("cgroup", Changes, "a proc has its own cgroup namespace"),
    ("cgroup_parent", Harmless, "Kip keeps the cgroups of all procs in one place"),
    ("configs", Changes, "these files would not be there: give them as volumes, ./FILE:/PLACE:ro"),
    ("cpu_count", Harmless, "CPU time is not limited by this key: write cpus"),
    ("cpu_percent", Harmless, "CPU time is not limited by this key: write cpus"),
    ("cpu_period", Harmless, "CPU time is not limited by this key: write cpus"),
    ("cpu_quota", Harmless, "CPU time is not limited by this key: write cpus"),
    ("cpu_rt_period", Changes, "procs have no real-time scheduling"),
    ("cpu_rt_runtime", Changes, "procs have no real-time scheduling"),
    ("cpu_shares", Harmless, "all procs have the same share of the CPU"),
    ("cpuset", Harmless, "a proc may run on every CPU"),
    ("credential_spec", Changes, "credential specs exist on Windows only"),
    ("develop", Harmless, "files are not watched"),
    ("device_cgroup_rules", Changes, "a proc has no devices but null, zero, full, random, urandom and tty"),
    ("devices", Changes, "a proc has no devices but null, zero, full, random, urandom and tty"),
    ("dns", Changes, "a proc has the name servers of the machine"),
    ("dns_opt", Changes, "a proc has the resolver options of the machine"),
    ("dns_search", Changes, "a proc has the search domains of the machine"),
    ("domainname", Harmless, "a proc has no domain name"),
    ("extends", Changes, "write that service's keys here, or use anchors"),
    ("external_links", Changes, "only services of this file find each other by name"),
    ("gpus", Changes, "a proc has no devices"),
    ("group_add", Changes, "a proc has the groups of its user"),
    ("ipc", Changes, "a proc has its own IPC namespace"),
    ("isolation", Harmless, "Kip isolates by namespaces only"),
    ("label_file", Harmless, "labels are left out"),
    ("mac_address", Changes, "Kip assigns MAC addresses itself"),
    ("mem_reservation", Harmless, "Kip reserves no memory for a proc"),
    ("mem_swappiness", Harmless, "Kip decides what leaves memory"),
    ("memswap_limit", Harmless, "Kip limits memory, not the sum of memory and swap"),
    ("oom_kill_disable", Harmless, "the kernel kills a proc that exceeds its memory limit"),
    ("oom_score_adj", Harmless, "the out-of-memory killer treats all procs alike"),
    ("pid", Changes, "a proc has its own pid namespace"),
    ("platform", Harmless, "procs run on the platform of this machine"),
    ("post_start", Changes, "Kip does not run this hook"),
    ("pre_stop", Changes, "Kip does not run this hook"),
    ("privileged", Changes, "a proc is never privileged"),
    ("provider", Changes, "Kip asks no other program to provide services"),
    ("runtime", Harmless, "Kip runs one kind of sandbox"),
    ("security_opt", Harmless, "a proc has Kip's own seccomp filter, and no new privileges"),
    ("sysctls", Changes, "a proc has the kernel's default settings"),
    ("userns_mode", Changes, "a proc has its own user namespace"),
    ("uts", Changes, "a proc has its own UTS namespace"),
    ("volumes_from", Changes, "write the volumes here"),
    ("models", Changes, "Kip runs no models"),
];

/// The same for keys within those of a service that are read; `*` is any name.
const WITHIN: [(&str, Weight, &str); 14] = [
    ("depends_on.*.restart", Harmless, "a service runs on when the one it depends on is started again"),
    ("healthcheck.start_interval", Harmless, "Kip decides how often the check runs until it succeeds"),
    ("networks.*.driver_opts", Changes, "Kip makes the network link itself"),
    ("networks.*.gw_priority", Harmless, "a proc has one network"),
    ("networks.*.interface_name", Changes, "Kip names interfaces itself"),
    ("networks.*.ipv4_address", Changes, "Kip assigns addresses itself"),
    ("networks.*.ipv6_address", Changes, "Kip assigns addresses itself"),
    ("networks.*.link_local_ips", Changes, "Kip assigns addresses itself"),
    ("networks.*.mac_address", Changes, "Kip assigns MAC addresses itself"),
    ("networks.*.priority", Harmless, "a proc has one network"),
    ("secrets.gid", Harmless, SECRET),
    ("secrets.mode", Harmless, SECRET),
    ("secrets.uid", Harmless, SECRET),
    ("volumes.volume.labels", Harmless, "labels of volumes are left out"),
];
const SECRET: &str = "only the file's user may read it";

/// Tells which keys of a service were not read: as lacking, or as mistakes.
pub fn unread(context: &mut Context<'_>, service: &str, node: &YamlNode) {
    for unread in node.unread() {
        let path = unread.path.join(".");
        let is = |pattern: &str| {
            let mut parts = pattern.split('.');
            let same = |key: &String| parts.next().is_some_and(|part| part == "*" || part == key);
            pattern.split('.').count() == unread.path.len() && unread.path.iter().all(same)
        };
        match WITHIN.iter().find(|(pattern, ..)| is(pattern)) {
            Some((_, weight, why)) => context.lacks(&unread.place, *weight, &format!("{service}.{path}"), why),
            None => {
                let (key, above) = unread.path.split_last().expect("the way to a key has one at least");
                let above = above.join(".");
                let known = meant(key, unread.asked.iter().map(String::as_str));
                context.fault(&unread.place, format!("{service}.{above} has no key {key}: {known}"));
            }
        }
    }
}

/// What is said of a key that Kip lacks.
pub fn lacking(key: &str) -> Option<(Weight, &'static str)> {
    LACKING.iter().find(|(known, ..)| *known == key).map(|(_, weight, why)| (*weight, *why))
}
