//! Programs Kip starts: CRIU, nft, mkfs.ext4; and ip, for people.

use crate::check::{DoctorCheck, is_root};
use kip_checkpoint::locate::{CriuCommand, LocateError, OLDEST, locate};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// What brings CRIU: installed beside this program, or in the tree that it was built in.
fn set_up() -> String {
    let beside = std::env::current_exe().ok().and_then(|own| Some(own.parent()?.parent()?.join("lib/kip/setup-criu")));
    match beside.filter(|script| script.is_file()) {
        Some(script) => format!("run {}, or give --criu PATH", script.display()),
        None => "run scripts/setup in Kip's source tree, or give --criu PATH".to_owned(),
    }
}

pub(super) fn checks(explicit: Option<&Path>) -> Vec<DoctorCheck> {
    let located = locate(explicit);
    let mut checks = vec![judge_criu(&located)];
    if let Ok(criu) = &located {
        checks.push(criu_features(criu));
        checks.push(criu_cache());
    }
    checks.push(tool("nft", |name| {
        DoctorCheck::fail(name, "not found", "no port of a proc can be reached", "apt-get install nftables")
    }));
    checks.push(tool("mkfs.ext4", |name| {
        DoctorCheck::warn(
            name,
            "not found",
            "no proc can be limited in disk space (--disk)",
            "apt-get install e2fsprogs",
        )
    }));
    checks.push(tool("ip", |name| {
        DoctorCheck::warn(
            name,
            "not found",
            "nothing at run time; looking at a proc's network is harder",
            "apt-get install iproute2",
        )
    }));
    checks
}

fn judge_criu(located: &Result<CriuCommand, LocateError>) -> DoctorCheck {
    const COST: &str = "nothing can be parked";
    match located {
        Ok(criu) => DoctorCheck::ok("criu", format!("{} in {}", criu.version, criu.path.display())),
        Err(LocateError::TooOld { path, found }) => {
            DoctorCheck::fail("criu", format!("{found} in {}; {OLDEST} is needed", path.display()), COST, set_up())
        }
        Err(error) => {
            let reason = std::error::Error::source(error).map(|source| format!(": {source}")).unwrap_or_default();
            DoctorCheck::fail("criu", format!("{error}{reason}"), COST, set_up())
        }
    }
}

/// `criu check` tries the kernel features that CRIU itself needs, about 80 ms.
fn criu_features(criu: &CriuCommand) -> DoctorCheck {
    const NAME: &str = "criu check";
    if !is_root() {
        return DoctorCheck::warn(
            NAME,
            "not tried: needs root",
            "not known whether this kernel can be checkpointed",
            "run this as root",
        );
    }
    match criu.command().arg("check").output() {
        Ok(output) if output.status.success() => DoctorCheck::ok(NAME, "looks good"),
        Ok(output) => {
            let text =
                format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            DoctorCheck::fail(NAME, first_error(&text), "nothing can be parked", "a kernel with what CRIU names")
        }
        Err(error) => DoctorCheck::fail(NAME, format!("cannot be started: {error}"), "nothing can be parked", set_up()),
    }
}

/// CRIU's first line that says error, else its first line.
fn first_error(text: &str) -> String {
    let lines = || text.lines().filter(|line| !line.trim().is_empty());
    lines().find(|line| line.contains("Error")).or(lines().next()).unwrap_or("failed without a word").trim().to_owned()
}

/// CRIU keeps what it found out about the kernel in /run, but only if that is a tmpfs.
fn criu_cache() -> DoctorCheck {
    const NAME: &str = "criu cache";
    const TMPFS: rustix::fs::FsWord = 0x0102_1994;
    match rustix::fs::statfs("/run") {
        Ok(fs) if fs.f_type == TMPFS => DoctorCheck::ok(NAME, "/run is a tmpfs"),
        Ok(_) => {
            let cost = "a CRIU started with the machine's /run probes the kernel again each time, some milliseconds";
            DoctorCheck::warn(NAME, "/run is no tmpfs", cost, "mount a tmpfs on /run at boot")
        }
        Err(error) => {
            DoctorCheck::warn(NAME, format!("/run: {error}"), "the daemon has no place for its locks", "mkdir /run")
        }
    }
}

fn tool(name: &'static str, absent: impl FnOnce(&'static str) -> DoctorCheck) -> DoctorCheck {
    match find(name, std::env::var_os("PATH").as_deref()) {
        Some(path) => DoctorCheck::ok(name, path.display().to_string()),
        None => absent(name),
    }
}

/// An executable on PATH or in the directories of system programs, which PATH often lacks.
fn find(name: &str, path: Option<&std::ffi::OsStr>) -> Option<PathBuf> {
    let system = ["/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from);
    let on_path: Vec<PathBuf> = path.map(|p| std::env::split_paths(p).collect()).unwrap_or_default();
    on_path
        .into_iter()
        .chain(system)
        .map(|dir| dir.join(name))
        .find(|file| std::fs::metadata(file).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::CheckStatus;

    #[test]
    fn a_missing_or_old_criu_says_what_to_do() {
        let missing = locate(Some(Path::new("/nonexistent/criu")));
        let check = judge_criu(&missing);
        assert_eq!((check.status, check.mend), (CheckStatus::Fail, Some(set_up())));
        assert!(check.found.contains("No such file"), "{}", check.found);
        let found = kip_checkpoint::locate::CriuVersion { major: 3, minor: 17, patch: 1 };
        let old = judge_criu(&Err(LocateError::TooOld { path: "/usr/sbin/criu".into(), found }));
        assert_eq!(old.found, "3.17.1 in /usr/sbin/criu; 4.2 is needed");
    }

    #[test]
    fn the_first_error_is_shown() {
        assert_eq!(first_error("Warn x\n(0.1) Error (a.c:1): no tun\nError two\n"), "(0.1) Error (a.c:1): no tun");
        assert_eq!(first_error("\nsomething\n"), "something");
        assert_eq!(first_error(""), "failed without a word");
    }

    #[test]
    fn programs_are_found_beyond_path() {
        assert!(find("sh", None).is_some_and(|path| path.ends_with("sh")));
        assert_eq!(
            find("passwd", Some("/etc".as_ref())).filter(|path| path.starts_with("/etc")),
            None,
            "not executable"
        );
        assert_eq!(find("kip-no-such-program", Some("/usr/bin".as_ref())), None);
    }
}
