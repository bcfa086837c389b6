//! Control groups: which hierarchy is mounted, and which controllers a proc's limits can use.

use crate::check::{DoctorCheck, read};

const NEEDED: [&str; 3] = ["memory", "cpu", "pids"];

pub(super) fn checks() -> Vec<DoctorCheck> {
    let found =
        hierarchies(&read("/proc/mounts").unwrap_or_default(), |mount| read(&format!("{mount}/cgroup.controllers")));
    vec![judge_mode(&found), judge_controllers(&found)]
}

/// The mounted hierarchies with their controllers.
#[derive(Debug, Default, PartialEq, Eq)]
struct Hierarchies {
    /// Controllers of each v1 mount.
    v1: Vec<String>,
    /// Controllers of the v2 hierarchy, if it is mounted.
    v2: Option<Vec<String>>,
}

impl Hierarchies {
    fn has(&self, controller: &str) -> bool {
        let in_v2 = self.v2.as_ref().is_some_and(|all| all.iter().any(|c| c == controller));
        in_v2 || self.v1.iter().any(|c| c == controller)
    }
}

/// Reads /proc/mounts (fields: source, target, type, options); `controllers` answers for a v2
/// mount.
fn hierarchies(mounts: &str, controllers: impl Fn(&str) -> Option<String>) -> Hierarchies {
    let mut found = Hierarchies::default();
    for line in mounts.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        match fields.as_slice() {
            [_, target, "cgroup2", ..] => {
                let listed = controllers(target).unwrap_or_default();
                found.v2 = Some(listed.split_whitespace().map(str::to_owned).collect());
            }
            [_, _, "cgroup", options, ..] => {
                let known = ["memory", "cpu", "pids", "cpuacct", "cpuset", "blkio", "freezer", "devices"];
                found.v1.extend(options.split(',').filter(|o| known.contains(o)).map(str::to_owned));
            }
            _ => {}
        }
    }
    found
}

fn judge_mode(found: &Hierarchies) -> DoctorCheck {
    const NAME: &str = "cgroups";
    match (&found.v2, found.v1.is_empty()) {
        (Some(_), true) => DoctorCheck::ok(NAME, "v2"),
        (Some(_), false) => DoctorCheck::ok(NAME, "hybrid: v1 controllers beside v2"),
        (None, false) => DoctorCheck::ok(NAME, "v1"),
        (None, true) => {
            let mend = "mount -t cgroup2 cgroup2 /sys/fs/cgroup";
            DoctorCheck::fail(
                NAME,
                "no hierarchy is mounted",
                "procs cannot be limited, counted or ended for certain",
                mend,
            )
        }
    }
}

fn judge_controllers(found: &Hierarchies) -> DoctorCheck {
    const NAME: &str = "controllers";
    let lacking: Vec<&str> = NEEDED.into_iter().filter(|controller| !found.has(controller)).collect();
    if lacking.is_empty() {
        return DoctorCheck::ok(NAME, NEEDED.join(" "));
    }
    let cost = format!("limits of {} are refused", lacking.join(", "));
    let mend = "boot without cgroup_disable=; for memory on some machines with cgroup_enable=memory";
    DoctorCheck::warn(NAME, format!("no {}", lacking.join(", ")), cost, mend)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::CheckStatus;

    const HYBRID: &str = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n\
        cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0\n\
        cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n\
        cgroup /sys/fs/cgroup/systemd cgroup rw,name=systemd 0 0\n\
        cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";

    #[test]
    fn hybrid_is_told_from_v1_and_v2() {
        let hybrid = hierarchies(HYBRID, |_| Some("hugetlb".into()));
        assert_eq!(judge_mode(&hybrid).found, "hybrid: v1 controllers beside v2");
        assert_eq!(judge_controllers(&hybrid).found, "no pids");
        let v2 = hierarchies("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n", |mount| {
            assert_eq!(mount, "/sys/fs/cgroup");
            Some("cpuset cpu io memory pids".into())
        });
        assert_eq!((judge_mode(&v2).found.as_str(), judge_controllers(&v2).status), ("v2", CheckStatus::Ok));
        let v1 = hierarchies(HYBRID.rsplit_once("cgroup2 /").unwrap().0, |_| None);
        assert_eq!(judge_mode(&v1).found, "v1");
        assert_eq!(judge_mode(&hierarchies("", |_| None)).status, CheckStatus::Fail);
    }

    #[test]
    fn a_path_with_a_controllers_name_is_no_controller() {
        let found = hierarchies("cgroup /sys/fs/cgroup/memory cgroup rw,name=systemd 0 0\n", |_| None);
        assert!(!found.has("memory"));
    }
}
