//! Keys of services that Kip lacks, each with what happens instead.

use super::context::Context;
use crate::place::Weight::{self, Changes, Harmless};
use crate::place::meant;
use crate::yaml::Node;

/// A key, how much it matters that Kip lacks it, and what happens instead.
pub const LACKING: [(&str, Weight, &str); 53] = [
    ("annotations", Harmless, "they are left out"),
    ("attach", Harmless, "`kip logs` has what it writes"),
    ("blkio_config", Harmless, "reading and writing is not limited"),
    ("cap_add", Changes, "a proc has twelve capabilities within its own user namespace, and gets no others"),
    ("cap_drop", Harmless, "it keeps the capabilities of a proc, which are within its own user namespace"),
    ("cgroup", Changes, "a proc has its own"),
    ("cgroup_parent", Harmless, "its cgroup is where Kip has all"),
    ("configs", Changes, "these files would not be there: give them as volumes, ./FILE:/PLACE:ro"),
    ("cpu_count", Harmless, "its CPU time is not limited: write cpus"),
    ("cpu_percent", Harmless, "its CPU time is not limited: write cpus"),
    ("cpu_period", Harmless, "its CPU time is not limited: write cpus"),
    ("cpu_quota", Harmless, "its CPU time is not limited: write cpus"),
    ("cpu_rt_period", Changes, "procs have no real time"),
    ("cpu_rt_runtime", Changes, "procs have no real time"),
    ("cpu_shares", Harmless, "all procs count the same"),
    ("cpuset", Harmless, "it may run on every CPU"),
    ("credential_spec", Changes, "there is nothing of the kind on Linux"),
    ("develop", Harmless, "files are not watched"),
    ("device_cgroup_rules", Changes, "a proc has no devices but null, zero, full, random, urandom and tty"),
    ("devices", Changes, "a proc has no devices but null, zero, full, random, urandom and tty"),
    ("dns", Changes, "it has the name servers of the machine"),
    ("dns_opt", Changes, "it has the resolver of the machine"),
    ("dns_search", Changes, "it has the search domains of the machine"),
    ("domainname", Harmless, "it has no domain name"),
    ("extends", Changes, "write that service's keys here, or use anchors"),
    ("external_links", Changes, "only services of this file find each other by name"),
    ("gpus", Changes, "a proc has no devices"),
    ("group_add", Changes, "it has the groups of its user"),
    ("ipc", Changes, "a proc has its own"),
    ("isolation", Harmless, "there is one way, namespaces"),
    ("label_file", Harmless, "labels are left out"),
    ("mac_address", Changes, "Kip chooses it"),
    ("mem_reservation", Harmless, "memory is not kept for it"),
    ("mem_swappiness", Harmless, "Kip decides what leaves memory"),
    ("memswap_limit", Harmless, "only memory is limited"),
    ("oom_kill_disable", Harmless, "above its limit it is killed"),
    ("oom_score_adj", Harmless, "it counts as any proc"),
    ("pid", Changes, "a proc has its own"),
    ("platform", Harmless, "it runs on this machine's"),
    ("post_start", Changes, "Kip would not run it"),
    ("pre_stop", Changes, "Kip would not run it"),
    ("privileged", Changes, "a proc is never privileged"),
    ("provider", Changes, "Kip asks no other program to provide services"),
    ("read_only", Harmless, "it may write to its own files, which no other proc sees"),
    ("runtime", Harmless, "there is one, Kip's"),
    ("security_opt", Harmless, "a proc has Kip's own filter, and no new privileges"),
    ("shm_size", Harmless, "/dev/shm is a directory of its own files, without a limit"),
    ("sysctls", Changes, "it has the kernel's usual settings"),
    ("tmpfs", Harmless, "this is a directory of its own files, on the disk"),
    ("userns_mode", Changes, "a proc has its own"),
    ("uts", Changes, "a proc has its own"),
    ("volumes_from", Changes, "write the volumes here"),
    ("models", Changes, "Kip runs no models"),
];

/// The same for keys within those of a service that are read; `*` is any name.
const WITHIN: [(&str, Weight, &str); 14] = [
    ("depends_on.*.restart", Harmless, "it goes on when that one is started again"),
    ("healthcheck.start_interval", Harmless, "Kip decides how often it is tried until it succeeds"),
    ("networks.*.driver_opts", Changes, "Kip makes the link"),
    ("networks.*.gw_priority", Harmless, "a proc has one network"),
    ("networks.*.interface_name", Changes, "Kip chooses it"),
    ("networks.*.ipv4_address", Changes, "Kip chooses it"),
    ("networks.*.ipv6_address", Changes, "Kip chooses it"),
    ("networks.*.link_local_ips", Changes, "Kip chooses its addresses"),
    ("networks.*.mac_address", Changes, "Kip chooses it"),
    ("networks.*.priority", Harmless, "a proc has one network"),
    ("secrets.gid", Harmless, SECRET),
    ("secrets.mode", Harmless, SECRET),
    ("secrets.uid", Harmless, SECRET),
    ("volumes.volume.labels", Harmless, "they are left out"),
];
const SECRET: &str = "only the file's user may read it";

/// Tells which keys of a service were not read: as lacking, or as mistakes.
pub fn unread(context: &mut Context<'_>, service: &str, node: &Node) {
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
