//! Control groups of procs on v1, hybrid and v2 machines.
//!
//! Owns the directories `kip-I/NAME` in every hierarchy it uses. Never mounts a hierarchy and never
//! touches a group it did not make, except that on v2 it enables the memory, cpu and pids
//! controllers in `cgroup.subtree_control` of the root and of `kip-I`. A group is nothing but its
//! name: after a crash [`Cgroups::open`] gives the same handle again.
//!
//! Processes enter by writing `0` into [`Cgroup::task_files`] themselves: moving another process
//! costs 6 ms on an idle machine, moving oneself 10 microseconds per hierarchy.

mod class;
mod views;

use kip_sys::kernel_file;
use kip_types::Limits;
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::collections::BTreeSet;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
pub use views::GroupView;

/// Where the machine has its controllers. On a hybrid machine they are where v1 has them and an
/// empty v2 hierarchy lies beside them, which is of no use to us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupMode {
    /// One hierarchy per controller, cgroups(7) version 1.
    V1,
    /// As V1, with a v2 hierarchy that has none of our controllers.
    Hybrid,
    /// One hierarchy for all controllers.
    V2,
}

/// The v1 controllers in use. Those after the third are used when the machine has them.
const V1_CONTROLLERS: [&str; 5] = ["memory", "cpu", "pids", "cpuacct", "freezer"];
const V1_NEEDED: usize = 3;
const V2_CONTROLLERS: [&str; 3] = ["memory", "cpu", "pids"];

/// The least memory with which a small static program starts, bytes.
pub const LEAST_MEMORY_BYTES: u64 = 1 << 20;
/// The least share of a CPU: the kernel's smallest quota is 1 ms in a period of 100 ms.
pub const LEAST_CPUS: f64 = 0.01;
/// The least number of processes: the sandbox's init and the program.
pub const LEAST_PIDS: u32 = 2;
const CPU_PERIOD_US: u64 = 100_000;

/// Something about a control group failed.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// The machine lacks a controller.
    #[error(
        "the cgroup controller {0} is not available: mount cgroup v2, or the v1 hierarchy of {0}, under /sys/fs/cgroup"
    )]
    Missing(&'static str),
    /// A limit with which nothing could start.
    #[error("the limit of {asked} {what} is too small to start anything: ask for at least {least}")]
    TooSmall {
        /// What is limited.
        what: &'static str,
        /// What was asked for.
        asked: String,
        /// What would do.
        least: String,
    },
    /// A file or directory of a group.
    #[error("could not {action} {}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// Processes that do not die.
    #[error("the processes {pids:?} of cgroup {name} are still there {waited_ms} ms after SIGKILL")]
    Undead {
        /// The group.
        name: String,
        /// Host pids.
        pids: Vec<u32>,
        /// How long was waited, milliseconds.
        waited_ms: u64,
    },
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CgroupError {
    let path = path.to_owned();
    move |source| CgroupError::Io { action, path, source }
}

/// A hierarchy in use: where it is mounted and which of our controllers it has.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Hierarchy {
    mount: PathBuf,
    controllers: Vec<&'static str>,
}

/// The machine's hierarchies.
#[derive(Debug, Clone)]
pub struct Cgroups {
    mode: CgroupMode,
    hierarchies: Vec<Hierarchy>,
    /// This process's group of `cpuset`, where v1 has that.
    cpuset: Option<PathBuf>,
}

/// What a group has used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// CPU time, nanoseconds.
    pub cpu_ns: u64,
    /// Memory charged, kernel memory and page cache included, bytes.
    pub memory_bytes: u64,
    /// Kernel memory in it, bytes.
    pub kernel_bytes: u64,
}

impl Cgroups {
    /// Finds the hierarchies in /proc/self/mountinfo.
    ///
    /// # Errors
    /// [`CgroupError::Missing`] when one of memory, cpu and pids is nowhere.
    pub fn detect() -> Result<Cgroups, CgroupError> {
        let file = Path::new("/proc/self/mountinfo");
        let mounts = fs::read_to_string(file).map_err(failed("read", file))?;
        let file = Path::new("/proc/self/cgroup");
        let own = fs::read_to_string(file).map_err(failed("read", file))?;
        Self::from_mountinfo(&own, &mounts, |root| {
            fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default()
        })
    }

    fn from_mountinfo(
        own: &str,
        mounts: &str,
        v2_controllers: impl Fn(&Path) -> String,
    ) -> Result<Cgroups, CgroupError> {
        let mut v1: Vec<Hierarchy> = Vec::new();
        let (mut v2, mut cpuset) = (None, None);
        for line in mounts.lines() {
            // proc_pid_mountinfo(5): 36 35 98:0 /root /mount options [optional]... - type source
            // superoptions
            let Some((front, back)) = line.split_once(" - ") else { continue };
            let mut back = back.split(' ');
            let (kind, options) = (back.next().unwrap_or(""), back.nth(1).unwrap_or(""));
            let Some(mount) = front.split(' ').nth(4).map(PathBuf::from) else { continue };
            if kind == "cgroup2" && v2.is_none() {
                v2 = Some(mount);
            } else if kind == "cgroup" {
                if options.split(',').any(|option| option == "cpuset") {
                    cpuset = views::own_group(own, "cpuset").map(|path| mount.join(path));
                }
                let known =
                    |c: &&&str| options.split(',').any(|o| o == **c) && !v1.iter().any(|h| h.controllers.contains(*c));
                let controllers: Vec<_> = V1_CONTROLLERS.iter().filter(known).copied().collect();
                if !controllers.is_empty() {
                    v1.push(Hierarchy { mount, controllers });
                }
            }
        }
        if let Some(mount) = &v2 {
            let there = v2_controllers(mount);
            if V2_CONTROLLERS.iter().all(|c| there.split_whitespace().any(|w| w == *c)) {
                let hierarchies = vec![Hierarchy { mount: mount.clone(), controllers: V2_CONTROLLERS.to_vec() }];
                return Ok(Cgroups { mode: CgroupMode::V2, hierarchies, cpuset: None });
            }
        }
        for needed in &V1_CONTROLLERS[..V1_NEEDED] {
            if !v1.iter().any(|h| h.controllers.contains(needed)) {
                return Err(CgroupError::Missing(needed));
            }
        }
        let mode = if v2.is_some() { CgroupMode::Hybrid } else { CgroupMode::V1 };
        Ok(Cgroups { mode, hierarchies: v1, cpuset })
    }

    /// Where the controllers are.
    pub fn mode(&self) -> CgroupMode {
        self.mode
    }

    /// The group of that name, for example `kip-3/web`, whether it exists or not.
    pub fn open(&self, name: &str) -> Cgroup {
        let dirs = self.hierarchies.iter().map(|h| (h.mount.join(name), h.controllers.clone())).collect();
        Cgroup { name: name.to_owned(), v2: self.mode == CgroupMode::V2, dirs }
    }

    /// Makes the group, or takes it over if it exists, and sets its limits. Parent directories are
    /// made on the way.
    ///
    /// # Errors
    /// [`CgroupError::TooSmall`], or what the kernel refuses. Nothing is left behind then that was
    /// not there before.
    pub fn create(&self, name: &str, limits: &Limits) -> Result<Cgroup, CgroupError> {
        check(limits)?;
        let group = self.open(name);
        let made = (|| {
            for hierarchy in &self.hierarchies {
                self.make_dirs(hierarchy, name)?;
            }
            group.set_limits(limits)
        })();
        match made {
            Ok(()) => Ok(group),
            Err(e) => {
                for (dir, _) in &group.dirs {
                    let _ = fs::remove_dir(dir);
                }
                Err(e)
            }
        }
    }

    /// On v2 a group has a controller only when all its ancestors hand it down, and none of them
    /// but the root may have processes of its own.
    fn make_dirs(&self, hierarchy: &Hierarchy, name: &str) -> Result<(), CgroupError> {
        let full = hierarchy.mount.join(name);
        // The usual case first: the parent is there.
        match fs::create_dir(&full) {
            Ok(()) if self.mode != CgroupMode::V2 => return Ok(()),
            Err(e) if e.kind() == ErrorKind::AlreadyExists && self.mode != CgroupMode::V2 => return Ok(()),
            _ => {}
        }
        let mut dir = hierarchy.mount.clone();
        for part in Path::new(name) {
            if self.mode == CgroupMode::V2 {
                enable_controllers(&dir)?;
            }
            dir.push(part);
            match fs::create_dir(&dir) {
                Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(failed("create", &dir)(e)),
                _ => {}
            }
        }
        Ok(())
    }

    /// Removes every group below `name` and `name` itself, for example `kip-3`, killing what is in
    /// them.
    ///
    /// # Errors
    /// As [`Cgroup::kill`] and [`Cgroup::remove`].
    pub fn remove_all(&self, name: &str) -> Result<(), CgroupError> {
        let mut below = BTreeSet::new();
        for hierarchy in &self.hierarchies {
            let Ok(entries) = fs::read_dir(hierarchy.mount.join(name)) else { continue };
            below.extend(entries.flatten().filter(|e| e.path().is_dir()).map(|e| e.file_name()));
        }
        for child in below {
            self.remove_all(&format!("{name}/{}", child.to_string_lossy()))?;
        }
        let group = self.open(name);
        group.kill(Duration::from_secs(5))?;
        group.remove()
    }
}

fn check(limits: &Limits) -> Result<(), CgroupError> {
    let small = |what, asked: String, least: String| Err(CgroupError::TooSmall { what, asked, least });
    match limits.memory_bytes {
        Some(m) if m < LEAST_MEMORY_BYTES => {
            return small("bytes of memory", m.to_string(), LEAST_MEMORY_BYTES.to_string());
        }
        _ => {}
    }
    match limits.cpus {
        Some(c) if c.is_nan() || c < LEAST_CPUS => return small("CPUs", c.to_string(), LEAST_CPUS.to_string()),
        _ => {}
    }
    if limits.pids < LEAST_PIDS {
        return small("processes", limits.pids.to_string(), LEAST_PIDS.to_string());
    }
    Ok(())
}

fn enable_controllers(dir: &Path) -> Result<(), CgroupError> {
    let file = dir.join("cgroup.subtree_control");
    let enabled = fs::read_to_string(&file).map_err(failed("read", &file))?;
    for controller in V2_CONTROLLERS {
        if !enabled.split_whitespace().any(|w| w == controller) {
            fs::write(&file, format!("+{controller}")).map_err(failed("enable a controller in", &file))?;
        }
    }
    Ok(())
}

/// A group: one directory in each hierarchy in use.
#[derive(Debug, Clone)]
pub struct Cgroup {
    name: String,
    v2: bool,
    dirs: Vec<(PathBuf, Vec<&'static str>)>,
}

impl Cgroup {
    /// Its name, as given to [`Cgroups::create`].
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it is there, in every hierarchy.
    pub fn exists(&self) -> bool {
        self.dirs.iter().all(|(dir, _)| dir.is_dir())
    }

    fn dir(&self, controller: &str) -> Option<&Path> {
        self.dirs.iter().find(|(_, c)| c.contains(&controller)).map(|(d, _)| d.as_path())
    }

    /// A file of a controller in use.
    fn file(&self, controller: &str, name: &str) -> PathBuf {
        self.dir(controller).expect("detect made sure of the controllers").join(name)
    }

    fn write(&self, controller: &str, name: &str, value: impl ToString) -> Result<(), CgroupError> {
        let path = self.file(controller, name);
        fs::write(&path, value.to_string()).map_err(failed("set", &path))
    }

    /// As `write`, for files that some kernels do not have.
    fn write_if_there(&self, controller: &str, name: &str, value: impl ToString) -> Result<(), CgroupError> {
        match self.write(controller, name, value) {
            Err(CgroupError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// Sets every limit. Memory is limited together with swap, so that a limit is a limit.
    ///
    /// # Errors
    /// [`CgroupError::TooSmall`], or what the kernel refuses, for instance EBUSY for less memory
    /// than is in use.
    pub fn set_limits(&self, limits: &Limits) -> Result<(), CgroupError> {
        check(limits)?;
        let quota_us = limits.cpus.map(|c| ((c * CPU_PERIOD_US as f64) as u64).max(1000));
        // The others are set whatever becomes of it.
        let memory =
            if self.v2 { self.set_v2_memory(limits.memory_bytes) } else { self.set_v1_memory(limits.memory_bytes) };
        if self.v2 {
            let quota = quota_us.map_or("max".into(), |q| q.to_string());
            self.write("cpu", "cpu.max", format!("{quota} {CPU_PERIOD_US}"))?;
        } else {
            self.write_if_there("cpu", "cpu.cfs_period_us", CPU_PERIOD_US)?;
            let quota = quota_us.map_or(-1, |q| q as i64);
            self.write_if_there("cpu", "cpu.cfs_quota_us", quota)?;
        }
        self.set_class(limits.class)?;
        self.write("pids", "pids.max", limits.pids).and(memory)
    }

    fn set_v2_memory(&self, bytes: Option<u64>) -> Result<(), CgroupError> {
        self.write("memory", "memory.max", bytes.map_or("max".into(), |m| m.to_string()))?;
        self.write_if_there("memory", "memory.swap.max", if bytes.is_some() { "0" } else { "max" })
    }

    /// The limit with swap may never be below the one without, so which goes first depends on the
    /// direction.
    fn set_v1_memory(&self, bytes: Option<u64>) -> Result<(), CgroupError> {
        const PLAIN: &str = "memory.limit_in_bytes";
        const WITH_SWAP: &str = "memory.memsw.limit_in_bytes";
        let value = bytes.map_or(-1, |m| m as i64);
        if self.write("memory", PLAIN, value).is_ok() {
            return self.write_if_there("memory", WITH_SWAP, value);
        }
        self.write_if_there("memory", WITH_SWAP, value)?;
        self.write("memory", PLAIN, value)
    }

    /// One descriptor per hierarchy into which a process writes `0` to enter. On v1 that moves the
    /// writing thread only, so a process writes before it has a second one.
    ///
    /// # Errors
    /// The group does not exist.
    pub fn task_files(&self) -> Result<Vec<OwnedFd>, CgroupError> {
        let name = if self.v2 { "cgroup.procs" } else { "tasks" };
        let open = |(dir, _): &(PathBuf, _)| {
            let path = dir.join(name);
            rustix::fs::openat(CWD, &path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
                .map_err(|e| failed("open", &path)(e.into()))
        };
        self.dirs.iter().map(open).collect()
    }

    /// The file that lists its processes, a pid on each line: cgroups(7).
    pub fn processes_file(&self) -> PathBuf {
        self.file("pids", "cgroup.procs")
    }

    /// Host pids of its processes, in no order. Empty for a group that does not exist.
    ///
    /// # Errors
    /// A file could not be read.
    pub fn pids(&self) -> Result<Vec<u32>, CgroupError> {
        let path = self.processes_file();
        match kernel_file::read_to_string(&path) {
            Ok(text) => Ok(text.lines().filter_map(|l| l.parse().ok()).filter(|p| *p != 0).collect()),
            Err(e) if e.kind() == ErrorKind::NotFound || e.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => {
                Ok(vec![])
            }
            Err(e) => Err(failed("read", &path)(e)),
        }
    }

    /// What it has used. A figure that this kernel does not give is 0.
    ///
    /// # Errors
    /// The group does not exist.
    pub fn usage(&self) -> Result<Usage, CgroupError> {
        let (memory, kernel) = match self.v2 {
            true => ("memory.current", field(&self.memory_stat(), "kernel")),
            false => ("memory.usage_in_bytes", self.number("memory", "memory.kmem.usage_in_bytes").unwrap_or(0)),
        };
        Ok(Usage { cpu_ns: self.cpu_ns()?, memory_bytes: self.number("memory", memory)?, kernel_bytes: kernel })
    }

    /// Processor time that it has used, nanoseconds; 0 if this kernel does not tell.
    ///
    /// # Errors
    /// The group does not exist.
    pub fn cpu_ns(&self) -> Result<u64, CgroupError> {
        if self.v2 {
            return Ok(field(&self.read("cpu", "cpu.stat")?, "usage_usec") * 1000);
        }
        if self.dir("cpuacct").is_some() { self.number("cpuacct", "cpuacct.usage") } else { Ok(0) }
    }

    fn read(&self, controller: &str, name: &str) -> Result<String, CgroupError> {
        let path = self.file(controller, name);
        kernel_file::read_to_string(&path).map_err(failed("read", &path))
    }

    fn number(&self, controller: &str, name: &str) -> Result<u64, CgroupError> {
        Ok(self.read(controller, name)?.trim().parse().unwrap_or(0))
    }

    /// Memory that it and the groups below it hold, bytes: anonymous memory, shared memory and
    /// mapped files. Page cache that no process maps does not count, for the kernel takes it back
    /// by itself; neither do kernel memory that it can take back and, on v1, which does not tell
    /// them apart, any kernel memory. 0 for a group that does not exist.
    pub fn held_bytes(&self) -> u64 {
        held(&self.memory_stat(), self.v2)
    }

    /// As [`Cgroup::held_bytes`], behind by no more than `lag` bytes. The kernel's statistics of a
    /// group may lag behind those of the groups below it, by two seconds at most, if one was read
    /// while the other changed. Where more than `lag` was charged to the group and is not in its
    /// statistics, those of the groups right below it are summed instead, which is as much work as
    /// there are groups.
    pub fn held_within(&self, lag: u64) -> u64 {
        let number = |name| self.number("memory", name).unwrap_or(0);
        let stat = self.memory_stat();
        let charged = match self.v2 {
            true => number("memory.current"),
            false => number("memory.usage_in_bytes").saturating_sub(number("memory.kmem.usage_in_bytes")),
        };
        let held = held(&stat, self.v2);
        match charged.saturating_sub(accounted(&stat, self.v2)) <= lag {
            true => held,
            false => held.max(self.held_below_bytes()),
        }
    }

    fn held_below_bytes(&self) -> u64 {
        let below = fs::read_dir(self.file("memory", "")).into_iter().flatten().flatten().filter(|e| e.path().is_dir());
        let stat =
            |entry: fs::DirEntry| kernel_file::read_to_string(entry.path().join("memory.stat")).unwrap_or_default();
        below.map(|entry| held(&stat(entry), self.v2)).sum()
    }

    fn memory_stat(&self) -> String {
        self.read("memory", "memory.stat").unwrap_or_default()
    }

    /// Pages that were read again after they had been pushed out of memory, since the group was
    /// made: workingset_refault of memory.stat.
    pub fn refaults(&self) -> u64 {
        let stat = self.memory_stat();
        // Of v1 those of the groups below it are counted apart.
        let total = if self.v2 { "" } else { "total_" };
        let of = |kind: &str| field(&stat, &format!("{total}workingset_refault_{kind}"));
        of("anon") + of("file")
    }

    /// How many processes the kernel has killed because its memory was at the limit.
    pub fn oom_kills(&self) -> u64 {
        let file = if self.v2 { "memory.events" } else { "memory.oom_control" };
        let text = kernel_file::read_to_string(self.file("memory", file)).unwrap_or_default();
        text.lines().find_map(|l| l.strip_prefix("oom_kill ")?.parse().ok()).unwrap_or(0)
    }

    /// Kills everything in it and waits until it is empty (zombies do not count), at most
    /// `patience`. No new process can be started in it afterwards until limits are set again.
    ///
    /// # Errors
    /// [`CgroupError::Undead`].
    pub fn kill(&self, patience: Duration) -> Result<(), CgroupError> {
        let began = Instant::now();
        // Nothing new, however fast it forks, and nothing frozen, for on v1 the frozen do not die.
        let _ = self.write("pids", "pids.max", 0);
        let mut pause = Duration::from_micros(200);
        loop {
            let pids = self.pids()?;
            if pids.is_empty() {
                return Ok(());
            }
            if began.elapsed() > patience {
                let waited_ms = began.elapsed().as_millis() as u64;
                return Err(CgroupError::Undead { name: self.name.clone(), pids, waited_ms });
            }
            if !self.v2 || self.write("pids", "cgroup.kill", 1).is_err() {
                self.kill_each(&pids)?;
            }
            if !self.v2 && self.dir("freezer").is_some() {
                let _ = self.write("freezer", "freezer.state", "THAWED");
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }

    /// A pid that is still in the group after its pidfd was opened is the one that was meant.
    fn kill_each(&self, pids: &[u32]) -> Result<(), CgroupError> {
        let open = |pid: &u32| {
            let fd = pidfd_open(Pid::from_raw(*pid as i32)?, PidfdFlags::empty()).ok()?;
            Some((*pid, fd))
        };
        let opened: Vec<_> = pids.iter().filter_map(open).collect();
        let still = self.pids()?;
        for (pid, fd) in opened {
            if still.contains(&pid) {
                let _ = pidfd_send_signal(&fd, Signal::KILL);
            }
        }
        Ok(())
    }

    /// Removes it. A group that is not there is removed.
    ///
    /// # Errors
    /// EBUSY when there are processes or groups in it even after a second: a dying process leaves
    /// shortly after it can no longer be seen.
    pub fn remove(&self) -> Result<(), CgroupError> {
        let began = Instant::now();
        for (dir, _) in &self.dirs {
            loop {
                match fs::remove_dir(dir) {
                    Ok(()) => break,
                    Err(e) if e.kind() == ErrorKind::NotFound => break,
                    Err(e) if e.kind() == ErrorKind::ResourceBusy && began.elapsed() < Duration::from_secs(1) => {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    Err(e) => return Err(failed("remove", dir)(e)),
                }
            }
        }
        Ok(())
    }
}

/// A figure of memory.stat; 0 if it is not there.
fn field(stat: &str, key: &str) -> u64 {
    let value = stat.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok());
    value.unwrap_or(0)
}

/// What of the counter of charges memory.stat accounts for; of v1 without kernel memory.
fn accounted(stat: &str, v2: bool) -> u64 {
    let keys: &[&str] = if v2 { &["anon", "file", "kernel", "sock"] } else { &["total_rss", "total_cache"] };
    keys.iter().map(|key| field(stat, key)).sum()
}

/// From memory.stat; of v1 the sums over a group and those below it.
fn held(stat: &str, v2: bool) -> u64 {
    let field = |key: &str| field(stat, key);
    let (anonymous, shared, mapped) = match v2 {
        true => (field("anon"), field("shmem"), field("file_mapped")),
        false => (field("total_rss"), field("total_shmem"), field("total_mapped_file")),
    };
    let kernel = if v2 { field("kernel").saturating_sub(field("slab_reclaimable")) } else { 0 };
    // Mapped files include the shared memory that is mapped, mostly all of it.
    anonymous + shared.max(mapped) + kernel
}

#[cfg(test)]
mod tests {
    use super::*;

    // promise pressure: page cache that can be taken back is not use
    #[test]
    fn what_can_be_taken_back_is_not_held() {
        let v1 = "cache 900\nrss 10\ntotal_cache 9000\ntotal_rss 100\ntotal_rss_huge 50\ntotal_shmem 20\n\
                  total_mapped_file 30\ntotal_inactive_file 5000\ntotal_active_file 3000\n";
        assert_eq!(held(v1, false), 130);
        let v2 = "anon 100\nfile 9000\nkernel 70\nkernel_stack 16\nshmem 20\nfile_mapped 10\nslab_reclaimable 30\n";
        assert_eq!(held(v2, true), 160);
        assert_eq!(held("", true), 0);
        assert_eq!((accounted(v1, false), accounted(v2, true)), (9100, 9170));
    }

    pub(super) const HYBRID: &str = "\
41 27 0:30 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
42 41 0:31 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
43 41 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
44 41 0:33 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
45 41 0:34 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

    // promise sandbox: v1, hybrid and v2 are told apart
    #[test]
    fn modes_are_told_apart() {
        let hybrid = Cgroups::from_mountinfo("", HYBRID, |_| String::new()).unwrap();
        assert_eq!(hybrid.mode(), CgroupMode::Hybrid);
        assert_eq!(hybrid.hierarchies.len(), 3);
        assert_eq!(hybrid.open("kip-0/a").dir("cpuacct"), Some(Path::new("/sys/fs/cgroup/cpu,cpuacct/kip-0/a")));
        let v1 = Cgroups::from_mountinfo("", &HYBRID.replace("cgroup2", "tmpfs"), |_| String::new()).unwrap();
        assert_eq!(v1.mode(), CgroupMode::V1);
        let v2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
        let v2 = Cgroups::from_mountinfo("", v2, |_| "cpuset cpu io memory hugetlb pids\n".into()).unwrap();
        assert_eq!((v2.mode(), v2.hierarchies.len()), (CgroupMode::V2, 1));
    }

    #[test]
    fn a_missing_controller_is_named() {
        let without = HYBRID.lines().filter(|l| !l.contains("pids")).collect::<Vec<_>>().join("\n");
        let error = Cgroups::from_mountinfo("", &without, |_| String::new()).unwrap_err();
        assert!(error.to_string().contains("pids"), "{error}");
    }

    #[test]
    fn limits_too_small_to_start_are_refused() {
        let small = [
            Limits { memory_bytes: Some(4096), ..Limits::default() },
            Limits { cpus: Some(0.001), ..Limits::default() },
            Limits { cpus: Some(f64::NAN), ..Limits::default() },
            Limits { pids: 1, ..Limits::default() },
        ];
        for limits in small {
            assert!(matches!(check(&limits), Err(CgroupError::TooSmall { .. })), "{limits:?}");
        }
        check(&Limits { memory_bytes: Some(1 << 20), cpus: Some(0.01), pids: 2, ..Limits::default() }).unwrap();
    }
}
