//! Kip's user and how much Kip may have: root, capabilities, open files, processes, memory, inotify
//! instances.

use crate::check::{DoctorCheck, is_root, read, read_number};
use kip_daemon::{BadMarks, MemoryMarks};
use kip_types::spec::show_bytes;
use rustix::process::{Resource, getrlimit};

/// Bits of CapEff (capabilities(7), linux/capability.h), with what lacks without them.
const NEEDED: [(u32, &str); 12] = [
    (0, "CHOWN"),
    (1, "DAC_OVERRIDE"),
    (3, "FOWNER"),
    (5, "KILL"),
    (6, "SETGID"),
    (7, "SETUID"),
    (12, "NET_ADMIN"),
    (18, "SYS_CHROOT"),
    (19, "SYS_PTRACE"),
    (21, "SYS_ADMIN"),
    (27, "MKNOD"),
    (40, "CHECKPOINT_RESTORE"),
];
const SYS_RESOURCE: u32 = 24;

pub(super) fn privileges() -> Vec<DoctorCheck> {
    let root = if is_root() {
        DoctorCheck::ok("root", "yes")
    } else {
        DoctorCheck::fail("root", "no", "`kip up` cannot make namespaces, mounts and rules", "sudo kip up")
    };
    let status = read("/proc/self/status").unwrap_or_default();
    vec![root, judge_capabilities(effective(&status).unwrap_or(0))]
}

pub(super) fn checks() -> Vec<DoctorCheck> {
    // A process that may raises it.
    let status = read("/proc/self/status").unwrap_or_default();
    let may = effective(&status).unwrap_or(0) & (1 << SYS_RESOURCE) != 0;
    let most = if may { read_number("/proc/sys/fs/nr_open") } else { None };
    let files = most.or(getrlimit(Resource::Nofile).maximum).unwrap_or(u64::MAX);
    let tasks =
        ["/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"].map(read_number).into_iter().flatten().min();
    vec![
        judge_files(files),
        judge_tasks(tasks.unwrap_or(u64::MAX)),
        judge_memory(MemoryMarks::new(None, None, None)),
        judge_inotify(read_number("/proc/sys/fs/inotify/max_user_instances")),
    ]
}

/// The bits of the line `CapEff:` of /proc/PID/status.
fn effective(status: &str) -> Option<u64> {
    let hex = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(hex.trim(), 16).ok()
}

fn judge_capabilities(bits: u64) -> DoctorCheck {
    const NAME: &str = "capabilities";
    let lacking: Vec<&str> = NEEDED.iter().filter(|(bit, _)| bits & (1 << bit) == 0).map(|(_, name)| *name).collect();
    if !lacking.is_empty() {
        let found = format!("without {}", lacking.join(", "));
        return DoctorCheck::fail(
            NAME,
            found,
            "procs cannot be made or parked",
            "run as root with these, outside a restricted container",
        );
    }
    if bits & (1 << SYS_RESOURCE) == 0 {
        let cost = "limits cannot be raised above the hard ones: the number of open files bounds the number of procs";
        return DoctorCheck::warn(
            NAME,
            "without SYS_RESOURCE",
            cost,
            "grant it, or raise the hard limits before starting kip",
        );
    }
    DoctorCheck::ok(NAME, "all that are needed")
}

/// A proc with two sockets costs six descriptors in the daemon and in the keeper, and eight in the
/// pager while it is hibernated.
fn judge_files(hard: u64) -> DoctorCheck {
    const NAME: &str = "open files";
    let procs = hard / 8;
    if procs >= 1000 {
        return DoctorCheck::ok(NAME, format!("{}, enough for about {} procs", shown(hard), shown(procs)));
    }
    let mend = "ulimit -Hn 65536 before `kip up`; under systemd LimitNOFILE=65536";
    DoctorCheck::warn(NAME, hard.to_string(), format!("at most about {procs} procs"), mend)
}

fn judge_tasks(most: u64) -> DoctorCheck {
    const NAME: &str = "processes";
    if most >= 16_384 {
        return DoctorCheck::ok(NAME, format!("{} on this machine", shown(most)));
    }
    let mend = "sysctl -w kernel.pid_max=4194304 kernel.threads-max=200000";
    DoctorCheck::warn(NAME, format!("{most} on this machine"), "few running procs with threads fit", mend)
}

/// What `kip up` holds procs to without --memory.
fn judge_memory(marks: Result<MemoryMarks, BadMarks>) -> DoctorCheck {
    const NAME: &str = "memory";
    match marks {
        Ok(marks) => {
            let [limit, high] = [marks.limit_bytes, marks.high_bytes()].map(show_bytes);
            DoctorCheck::ok(
                NAME,
                format!("{limit} for procs, idle ones are put to sleep above {high}; `kip up --memory` sets less"),
            )
        }
        Err(e) => DoctorCheck::fail(NAME, "unknown", e.to_string(), "mount /proc"),
    }
}

fn judge_inotify(instances: Option<u64>) -> DoctorCheck {
    const NAME: &str = "inotify";
    let mend = "sysctl -w fs.inotify.max_user_instances=512";
    match instances {
        Some(most) if most >= 128 => {
            DoctorCheck::ok(NAME, format!("{most} instances per user id; each proc has its own ids"))
        }
        Some(most) => DoctorCheck::warn(
            NAME,
            format!("{most} instances per user id"),
            "programs that watch many files fail to start",
            mend,
        ),
        None => DoctorCheck::warn(
            NAME,
            "the kernel has none",
            "programs that watch files fail to start",
            "a kernel with CONFIG_INOTIFY_USER",
        ),
    }
}

fn shown(number: u64) -> String {
    if number > 1 << 40 { "unlimited".to_owned() } else { number.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::CheckStatus;

    #[test]
    fn capabilities_are_read_and_judged() {
        let status = "Name:\tkip\nCapInh:\t0000000000000000\nCapEff:\t000001fffeffffff\n";
        let bits = effective(status).unwrap();
        assert_eq!(judge_capabilities(bits).found, "without SYS_RESOURCE");
        assert_eq!(judge_capabilities(u64::MAX).status, CheckStatus::Ok);
        let found = judge_capabilities(!(1 << 21)).found;
        assert_eq!(found, "without SYS_ADMIN");
        assert_eq!(judge_capabilities(0).status, CheckStatus::Fail);
        assert_eq!(effective("Name:\tkip\n"), None);
    }

    #[test]
    fn small_limits_warn() {
        assert_eq!(judge_files(20_000).found, "20000, enough for about 2500 procs");
        assert_eq!(judge_files(1024).cost.as_deref(), Some("at most about 128 procs"));
        assert_eq!(judge_files(u64::MAX).found, "unlimited, enough for about unlimited procs");
        assert_eq!(judge_tasks(4096).status, CheckStatus::Warn);
        assert_eq!(
            (judge_inotify(Some(128)).status, judge_inotify(Some(16)).status),
            (CheckStatus::Ok, CheckStatus::Warn)
        );
        assert_eq!(judge_inotify(None).status, CheckStatus::Warn);
        let marks = MemoryMarks::new(Some(100 << 20), None, None);
        assert!(judge_memory(marks).found.starts_with("100.0M for procs, idle ones are put to sleep above 90.0M"));
        assert_eq!(judge_memory(Err(BadMarks::Unknown)).status, CheckStatus::Fail);
    }
}
