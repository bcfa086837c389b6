//! Kernel version and features: namespaces, overlayfs, pidfd_getfd, userfaultfd, sock_diag,
//! TCP_REPAIR, seccomp.

use crate::check::{DoctorCheck, is_root, read, read_number};
use rustix::net::{AddressFamily, SocketFlags, SocketType, netlink, socket_with};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use std::os::fd::{AsFd, AsRawFd};

/// Idmapped layers under overlayfs, with which a proc sees the host's /usr in its own block of ids:
/// Linux 5.19.
const OLDEST: (u64, u64) = (5, 19);
const NEWER_KERNEL: &str = "boot a newer kernel";

pub(super) fn checks() -> Vec<DoctorCheck> {
    vec![version(), namespaces(), overlay(), pidfd(), userfaultfd(), sock_diag(), tcp_repair(), seccomp(), ptrace()]
}

fn version() -> DoctorCheck {
    let release = read("/proc/sys/kernel/osrelease").unwrap_or_default();
    judge_version(&release)
}

fn judge_version(release: &str) -> DoctorCheck {
    let cost =
        format!("procs cannot run: {}.{} is the oldest with idmapped layers under overlayfs", OLDEST.0, OLDEST.1);
    match parse_release(release) {
        Some(version) if version >= OLDEST => DoctorCheck::ok("kernel", release),
        Some(_) => DoctorCheck::fail("kernel", release, cost, NEWER_KERNEL),
        None => DoctorCheck::fail("kernel", format!("a release that cannot be read: {release:?}"), cost, NEWER_KERNEL),
    }
}

/// 6.1 of `6.1.0-31-amd64`.
fn parse_release(release: &str) -> Option<(u64, u64)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn namespaces() -> DoctorCheck {
    let kinds = ["user", "pid", "mnt", "net", "uts", "ipc", "time"];
    let state: Vec<(&str, Option<u64>)> = kinds
        .iter()
        .map(|kind| {
            let there = std::path::Path::new(&format!("/proc/self/ns/{kind}")).exists();
            (*kind, there.then(|| read_number(&format!("/proc/sys/user/max_{kind}_namespaces")).unwrap_or(u64::MAX)))
        })
        .collect();
    judge_namespaces(&state)
}

/// `None`: the kernel has no such namespaces; else how many there may be.
fn judge_namespaces(state: &[(&str, Option<u64>)]) -> DoctorCheck {
    const NAME: &str = "namespaces";
    let named = |wanted: fn(&Option<u64>) -> bool| -> Vec<&str> {
        state.iter().filter(|(_, max)| wanted(max)).map(|(kind, _)| *kind).collect()
    };
    let (absent, forbidden) = (named(|max| max.is_none()), named(|max| *max == Some(0)));
    if !absent.is_empty() {
        let found = format!("the kernel has no {} namespaces", absent.join(", "));
        return DoctorCheck::fail(NAME, found, "procs cannot be isolated or restored", NEWER_KERNEL);
    }
    if !forbidden.is_empty() {
        let mend =
            forbidden.iter().map(|kind| format!("sysctl -w user.max_{kind}_namespaces=10000")).collect::<Vec<_>>();
        let found = format!("{} namespaces are switched off", forbidden.join(", "));
        return DoctorCheck::fail(NAME, found, "procs cannot be isolated or restored", mend.join("; "));
    }
    let (kind, least) =
        state.iter().map(|(kind, max)| (*kind, max.unwrap_or(0))).min_by_key(|(_, max)| *max).unwrap_or(("", 0));
    if least < 256 {
        let mend = format!("sysctl -w user.max_{kind}_namespaces=10000");
        return DoctorCheck::warn(
            NAME,
            format!("at most {least} {kind} namespaces"),
            format!("at most about {least} procs"),
            mend,
        );
    }
    DoctorCheck::ok(
        NAME,
        format!("{} (at most {least} each)", state.iter().map(|(kind, _)| *kind).collect::<Vec<_>>().join(" ")),
    )
}

fn overlay() -> DoctorCheck {
    let known = read("/proc/filesystems").is_some_and(|text| lists_filesystem(&text, "overlay"));
    if known {
        DoctorCheck::ok("overlayfs", "known to the kernel")
    } else {
        let mend = "modprobe overlay; to keep it: echo overlay > /etc/modules-load.d/overlay.conf";
        DoctorCheck::fail("overlayfs", "not known to the kernel", "no proc can have a root filesystem", mend)
    }
}

/// Whether /proc/filesystems lists a filesystem: `nodev<TAB>overlay` or `<TAB>ext4`.
fn lists_filesystem(text: &str, name: &str) -> bool {
    text.lines().any(|line| line.split_whitespace().last() == Some(name))
}

fn pidfd() -> DoctorCheck {
    const NAME: &str = "pidfd_getfd";
    let tried = pidfd_open(getpid(), PidfdFlags::empty())
        .and_then(|own| pidfd_getfd(&own, own.as_fd().as_raw_fd(), PidfdGetfdFlags::empty()).map(drop));
    match tried {
        Ok(()) => DoctorCheck::ok(NAME, "works"),
        Err(error) => {
            let mend = "kernel 5.6 or newer; in a container, allow pidfd_getfd in its seccomp profile";
            DoctorCheck::fail(
                NAME,
                format!("refused: {error}"),
                "sockets cannot be kept, so nothing can be parked",
                mend,
            )
        }
    }
}

fn userfaultfd() -> DoctorCheck {
    const NAME: &str = "userfaultfd";
    if std::path::Path::new("/dev/userfaultfd").exists() {
        return DoctorCheck::ok(NAME, "/dev/userfaultfd");
    }
    let mend = "kernel 6.1 or newer with CONFIG_USERFAULTFD";
    DoctorCheck::warn(
        NAME,
        "no /dev/userfaultfd",
        "nothing yet: memory will be restored whole, never page by page",
        mend,
    )
}

fn sock_diag() -> DoctorCheck {
    const NAME: &str = "sock_diag";
    match socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, Some(netlink::SOCK_DIAG)) {
        Ok(_) => DoctorCheck::ok(NAME, "works"),
        Err(error) => {
            let cost = "idleness and unaccepted connections cannot be seen, so nothing can be parked";
            DoctorCheck::fail(NAME, format!("refused: {error}"), cost, "modprobe inet_diag tcp_diag udp_diag")
        }
    }
}

fn tcp_repair() -> DoctorCheck {
    const NAME: &str = "TCP_REPAIR";
    if !is_root() {
        return DoctorCheck::warn(
            NAME,
            "not tried: needs root",
            "not known whether connections survive sleep",
            "run this as root",
        );
    }
    let tried = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .map_err(std::io::Error::from)
        .and_then(|socket| kip_sys::sock::enter_tcp_repair(socket.as_fd()));
    match tried {
        Ok(()) => DoctorCheck::ok(NAME, "works"),
        Err(error) => {
            let cost = "procs with open TCP connections cannot be parked";
            DoctorCheck::fail(
                NAME,
                format!("refused: {error}"),
                cost,
                "CAP_NET_ADMIN, and a kernel with CONFIG_CHECKPOINT_RESTORE",
            )
        }
    }
}

fn seccomp() -> DoctorCheck {
    const NAME: &str = "seccomp";
    let actions = read("/proc/sys/kernel/seccomp/actions_avail").unwrap_or_default();
    if actions.split_whitespace().any(|action| action == "errno") {
        return DoctorCheck::ok(NAME, "filters with errno");
    }
    let mend = "a kernel with CONFIG_SECCOMP_FILTER";
    DoctorCheck::fail(
        NAME,
        "no filters",
        "programs use system calls that CRIU cannot save (io_uring), and are less isolated",
        mend,
    )
}

fn ptrace() -> DoctorCheck {
    const NAME: &str = "ptrace";
    // Yama may forbid attaching even to root (3); without Yama there is no such file.
    if read_number("/proc/sys/kernel/yama/ptrace_scope") == Some(3) {
        let mend = "boot with kernel.yama.ptrace_scope=2 or less: 3 cannot be taken back";
        return DoctorCheck::fail(NAME, "switched off by Yama", "nothing can be parked", mend);
    }
    DoctorCheck::ok(NAME, "allowed")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::CheckStatus;

    #[test]
    fn releases_are_read_and_judged() {
        assert_eq!(parse_release("6.1.0-31-amd64"), Some((6, 1)));
        assert_eq!(parse_release("6.18.44"), Some((6, 18)));
        assert_eq!(parse_release("linux"), None);
        assert_eq!(judge_version("6.18.44").status, CheckStatus::Ok);
        assert_eq!(judge_version("5.19.0").status, CheckStatus::Ok);
        assert_eq!(judge_version("5.10.0-9-amd64").status, CheckStatus::Fail);
        assert_eq!(judge_version("").status, CheckStatus::Fail);
    }

    #[test]
    fn filesystems_are_found_by_whole_name() {
        let text = "nodev\tsysfs\nnodev\toverlay\n\text4\n";
        assert!(lists_filesystem(text, "overlay") && lists_filesystem(text, "ext4"));
        assert!(!lists_filesystem(text, "ext"));
    }

    #[test]
    fn namespaces_are_judged_by_the_scarcest() {
        let good = [("user", Some(10_000)), ("net", Some(5000))];
        assert_eq!(judge_namespaces(&good).status, CheckStatus::Ok);
        let few = judge_namespaces(&[("user", Some(10_000)), ("net", Some(100))]);
        assert_eq!((few.status, few.found.as_str()), (CheckStatus::Warn, "at most 100 net namespaces"));
        let off = judge_namespaces(&[("user", Some(0)), ("net", Some(100))]);
        assert_eq!(off.status, CheckStatus::Fail);
        assert_eq!(off.mend.as_deref(), Some("sysctl -w user.max_user_namespaces=10000"));
        assert_eq!(judge_namespaces(&[("time", None)]).status, CheckStatus::Fail);
    }
}
