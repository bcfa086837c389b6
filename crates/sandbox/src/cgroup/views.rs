//! What the programs of a group see of control groups.

use super::{Cgroup, CgroupMode, Cgroups};
use std::path::PathBuf;

/// A directory of a group as the programs in it are to see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupView {
    /// The controller, for a hierarchy of version 1.
    pub controller: Option<&'static str>,
    /// On the host.
    pub directory: PathBuf,
}

impl Cgroups {
    /// What the programs of a group are to see of control groups: its directories and, of
    /// `cpuset`, in which procs have no group of their own, the one that this process is in. A JVM
    /// looks for its limits only where it finds that too.
    pub fn views(&self, group: &Cgroup) -> Vec<GroupView> {
        if self.mode == CgroupMode::V2 {
            let directories = group.dirs.iter().map(|(directory, _)| directory.clone());
            return directories.map(|directory| GroupView { controller: None, directory }).collect();
        }
        let one = |(directory, controllers): &(PathBuf, Vec<&'static str>)| {
            let view =
                |controller: &&'static str| GroupView { controller: Some(controller), directory: directory.clone() };
            controllers.iter().map(view).collect::<Vec<_>>()
        };
        let mut views: Vec<_> = group.dirs.iter().flat_map(one).collect();
        let cpuset = self.cpuset.clone().filter(|directory| directory.is_dir());
        views.extend(cpuset.map(|directory| GroupView { controller: Some("cpuset"), directory }));
        views
    }
}

/// Where the process is in a hierarchy of version 1, by its /proc/PID/cgroup, cgroups(7): a path
/// below the hierarchy's mount.
pub(super) fn own_group<'a>(groups: &'a str, controller: &str) -> Option<&'a str> {
    let mut lines = groups.lines().map(|line| line.splitn(3, ':').skip(1));
    lines.find_map(|mut parts| {
        let is_it = parts.next()?.split(',').any(|one| one == controller);
        is_it.then(|| parts.next())?.map(|path| path.trim_start_matches('/'))
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::HYBRID;
    use super::*;
    use std::fs;

    // promise sandbox: programs see the groups that they are in, each controller by its name
    #[test]
    fn each_controller_is_seen_by_its_name() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("cpuset/box")).unwrap();
        let mounts = format!("{HYBRID}46 41 0:35 / {}/cpuset rw - cgroup cgroup rw,cpuset\n", root.path().display());
        let own = "4:memory:/other\n3:cpuset:/box\n0::/\n";
        let hybrid = Cgroups::from_mountinfo(own, &mounts, |_| String::new()).unwrap();
        let seen = |cgroups: &Cgroups| -> Vec<_> {
            let views = cgroups.views(&cgroups.open("kip-0/a")).into_iter();
            views.map(|view| (view.controller.unwrap_or(""), view.directory.display().to_string())).collect()
        };
        let all = seen(&hybrid);
        assert!(all.contains(&("memory", "/sys/fs/cgroup/memory/kip-0/a".to_owned())), "{all:?}");
        for controller in ["cpu", "cpuacct"] {
            assert!(all.contains(&(controller, "/sys/fs/cgroup/cpu,cpuacct/kip-0/a".to_owned())), "{all:?}");
        }
        assert_eq!(all.last(), Some(&("cpuset", root.path().join("cpuset/box").display().to_string())));
        let v2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
        let v2 = Cgroups::from_mountinfo("0::/box\n", v2, |_| "cpuset cpu io memory pids\n".into()).unwrap();
        assert_eq!(seen(&v2), [("", "/sys/fs/cgroup/kip-0/a".to_owned())]);
    }
}
