//! Limits of a process that it has used up, lifted for a moment while it stands still, so that
//! calls can be made in it: these need two descriptors, and some memory of their own.
//!
//! Only what is nearly used up is lifted, each limit as far as the kernel allows: a hard limit can
//! be raised with CAP_SYS_RESOURCE of the machine only, and without it the soft limit is raised to
//! the hard one. Whether that is enough shows when the calls are made; [`used_up`] names the limit
//! if it was not. What a limit was stands in a file meanwhile, if there is to be one, from which
//! [`put_back_left`] takes it should the pager die in between.

use kip_sys::status::Status;
use rustix::io::Errno;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use std::io;
use std::path::{Path, PathBuf};

/// A limit that calls made in a process can meet.
struct Scarce {
    resource: Resource,
    /// As in setrlimit(2).
    name: &'static str,
    /// As in /proc/PID/limits.
    row: &'static str,
    /// It is lifted when no more than this is left.
    margin: u64,
    /// And by this much.
    more: u64,
    /// Calls need this much.
    least: u64,
}

const MIB: u64 = 1 << 20;
const MEMORY: Scarce =
    Scarce { resource: Resource::As, name: "", row: "", margin: 16 * MIB, more: 64 * MIB, least: MIB };
const LIMITS: [Scarce; 4] = [
    Scarce { resource: Resource::Nofile, name: "RLIMIT_NOFILE", row: "Max open files", margin: 16, more: 16, least: 4 },
    Scarce { resource: Resource::As, name: "RLIMIT_AS", row: "Max address space", ..MEMORY },
    Scarce { resource: Resource::Data, name: "RLIMIT_DATA", row: "Max data size", ..MEMORY },
    Scarce { resource: Resource::Memlock, name: "RLIMIT_MEMLOCK", row: "Max locked memory", ..MEMORY },
];

/// Limits that are lifted; dropped, they are put back.
#[derive(Debug)]
pub struct Lifted {
    pid: u32,
    before: Vec<(usize, Rlimit)>,
    file: Option<PathBuf>,
}

/// How much of each of [`LIMITS`] a process uses, and the limit.
fn uses(pid: u32) -> io::Result<Vec<(u64, Rlimit)>> {
    let (status, limits) = (Status::read(pid)?, std::fs::read_to_string(format!("/proc/{pid}/limits"))?);
    // Linux 6.2 tells how many there are as the size.
    let descriptors = std::fs::metadata(format!("/proc/{pid}/fd"))?.len();
    let bytes = |name: &str| status.number(name).unwrap_or(0) << 10;
    let used = [descriptors, bytes("VmSize:"), bytes("VmData:"), bytes("VmLck:")];
    let limit = |row: &str| {
        let line = limits.lines().find_map(|line| line.strip_prefix(row)).unwrap_or_default();
        let mut numbers = line.split_ascii_whitespace().map(|word| word.parse::<u64>().ok());
        Rlimit { current: numbers.next().flatten(), maximum: numbers.next().flatten() }
    };
    Ok(used.into_iter().zip(&LIMITS).map(|(used, scarce)| (used, limit(scarce.row))).collect())
}

/// Whether less than `spare` is left of a limit. New memory is locked only in a process that locks
/// memory.
fn is_short(index: usize, used: u64, limit: Rlimit, spare: u64) -> bool {
    let counts = LIMITS[index].resource != Resource::Memlock || used > 0;
    counts && limit.current.is_some_and(|most| used.saturating_add(spare) > most)
}

fn set(pid: u32, index: usize, limit: Rlimit) -> Result<(), Errno> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Errno::INVAL)?;
    prlimit(Some(pid), LIMITS[index].resource, limit).map(drop)
}

/// Lifts one limit as far as it goes.
fn lift(pid: u32, index: usize, Rlimit { current, maximum }: Rlimit) -> Result<(), Errno> {
    let wanted = current.map(|current| current.saturating_add(LIMITS[index].more));
    let raised = maximum.map(|maximum| maximum.max(wanted.unwrap_or(0)));
    match set(pid, index, Rlimit { current: wanted, maximum: raised }) {
        Err(Errno::PERM) if raised != maximum => set(pid, index, Rlimit { current: maximum, maximum }),
        done => done,
    }
}

impl Lifted {
    /// Lifts what a process has nearly used up; none if that is nothing. A limit that cannot be
    /// lifted stays as it is. `file` is for the next pager.
    ///
    /// # Errors
    /// Those of reading /proc and of writing the file; all is as it was.
    pub fn of(pid: u32, file: Option<&Path>) -> io::Result<Option<Lifted>> {
        let short =
            |(index, (used, limit))| is_short(index, used, limit, LIMITS[index].margin).then_some((index, limit));
        let before: Vec<(usize, Rlimit)> = uses(pid)?.into_iter().enumerate().filter_map(short).collect();
        if before.is_empty() {
            return Ok(None);
        }
        if let Some(file) = file {
            let number = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), |limit| limit.to_string());
            let line = |(index, Rlimit { current, maximum }): &(usize, Rlimit)| {
                format!("{pid} {index} {} {}\n", number(*current), number(*maximum))
            };
            std::fs::write(file, before.iter().map(line).collect::<String>())?;
        }
        let lifted = Lifted { pid, before, file: file.map(Path::to_path_buf) };
        for (index, limit) in &lifted.before {
            if let Err(error) = lift(pid, *index, *limit) {
                tracing::debug!(pid, limit = LIMITS[*index].name, %error, "it stays as it is");
            }
        }
        Ok(Some(lifted))
    }

    /// Each as it was: soft and hard, by the number of getrlimit(2).
    pub fn before(&self) -> impl Iterator<Item = (u32, Rlimit)> + '_ {
        self.before.iter().map(|(index, limit)| (LIMITS[*index].resource as u32, *limit))
    }
}

impl Drop for Lifted {
    fn drop(&mut self) {
        for (index, limit) in std::mem::take(&mut self.before) {
            match set(self.pid, index, limit) {
                Ok(()) | Err(Errno::SRCH) => {}
                Err(error) => tracing::warn!(pid = self.pid, limit = LIMITS[index].name, %error, "it stays lifted"),
            }
        }
        if let Some(file) = &self.file {
            let _ = std::fs::remove_file(file);
        }
    }
}

/// Puts back what a dead pager had lifted, in its file.
pub fn put_back_left(file: &Path) {
    let Ok(text) = std::fs::read_to_string(file) else { return };
    for line in text.lines() {
        let mut words = line.split(' ');
        let mut next = || words.next();
        let (Some(pid), Some(index)) = (next().and_then(|w| w.parse().ok()), next().and_then(|w| w.parse().ok()))
        else {
            continue;
        };
        let mut most = || next().and_then(|word| word.parse().ok());
        let limit = Rlimit { current: most(), maximum: most() };
        if index < LIMITS.len() {
            drop(Lifted { pid, before: vec![(index, limit)], file: None });
        }
    }
    let _ = std::fs::remove_file(file);
}

/// What a process has used up and keeps calls from being made in it, for people; none if there is
/// nothing. To be asked after such calls have failed, while what can be lifted is lifted.
pub fn used_up(pid: u32) -> Option<String> {
    let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    let process = format!("the process {pid} ({})", comm.trim_end());
    for (index, (used, limit)) in uses(pid).ok()?.into_iter().enumerate() {
        let Scarce { name, least, .. } = LIMITS[index];
        if is_short(index, used, limit, least) {
            let most = limit.current.unwrap_or(u64::MAX);
            return Some(format!("{process} has used up {name} ({used} of {most}); a sleep needs {least} more of it"));
        }
    }
    let most: usize = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok()?.trim().parse().ok()?;
    let mappings = std::fs::read_to_string(format!("/proc/{pid}/maps")).ok()?.lines().count();
    let full = mappings + 4 > most;
    full.then(|| {
        format!("{process} has used up vm.max_map_count ({mappings} of {most} mappings); a sleep needs 4 more")
    })
}

/// An error of calls that were made in a process, with what it has used up if it is of that kind.
pub fn name(pid: u32, error: io::Error) -> io::Error {
    let scarce = [Errno::MFILE, Errno::NOMEM, Errno::AGAIN];
    let is_one = error.raw_os_error().is_some_and(|raw| scarce.iter().any(|errno| errno.raw_os_error() == raw));
    match is_one.then(|| used_up(pid)).flatten() {
        Some(cause) => io::Error::new(error.kind(), cause),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    /// One that waits in its nanosleep: before that, its loader opens and closes files.
    fn sleeper(limits: &str) -> Child {
        let child = Command::new("sh").args(["-c", &format!("{limits}; exec sleep 100")]).spawn().unwrap();
        let call = || std::fs::read_to_string(format!("/proc/{}/syscall", child.id())).unwrap();
        // clock_nanosleep
        while !call().starts_with("230 ") {
            std::thread::yield_now();
        }
        child
    }

    fn end(mut child: Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    fn limits(pid: u32) -> String {
        std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap()
    }

    fn files(pid: u32) -> (Option<u64>, Option<u64>) {
        let limit = uses(pid).unwrap()[0].1;
        (limit.current, limit.maximum)
    }

    /// Whether hard limits can be raised here: CAP_SYS_RESOURCE.
    fn is_privileged() -> bool {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
        u64::from_str_radix(line.trim(), 16).unwrap() >> 24 & 1 == 1
    }

    #[test]
    fn what_is_used_up_is_lifted_for_a_moment() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("lifted");
        let free = sleeper(":");
        assert!(Lifted::of(free.id(), Some(&file)).unwrap().is_none() && !file.exists());
        end(free);
        let scarce = sleeper("ulimit -Sn 4; ulimit -Sv 12000");
        let before = limits(scarce.id());
        let hard = files(scarce.id()).1;
        let lifted = Lifted::of(scarce.id(), Some(&file)).unwrap().unwrap();
        assert_eq!(
            lifted.before().map(|(number, limit)| (number, limit.current)).collect::<Vec<_>>(),
            [(7, Some(4)), (9, Some(12000 << 10))]
        );
        assert_eq!(files(scarce.id()), (Some(20), hard), "the hard one is enough");
        // The pager dies, and the next one finds the file.
        std::mem::forget(lifted);
        assert_ne!(limits(scarce.id()), before);
        put_back_left(&file);
        assert_eq!(limits(scarce.id()), before);
        assert!(!file.exists());
        drop(Lifted::of(scarce.id(), None).unwrap());
        assert_eq!(limits(scarce.id()), before);
        end(scarce);
    }

    #[test]
    fn a_hard_limit_is_lifted_where_the_kernel_allows_it() {
        let scarce = sleeper("ulimit -Sn 4; ulimit -Hn 9");
        let before = limits(scarce.id());
        let lifted = Lifted::of(scarce.id(), None).unwrap().unwrap();
        let expected = if is_privileged() { (Some(20), Some(20)) } else { (Some(9), Some(9)) };
        assert_eq!(files(scarce.id()), expected);
        drop(lifted);
        assert_eq!(limits(scarce.id()), before);
        end(scarce);
    }

    #[test]
    fn the_limit_that_is_used_up_is_named() {
        let scarce = sleeper("ulimit -n 4");
        let pid = scarce.id();
        let used = std::fs::metadata(format!("/proc/{pid}/fd")).unwrap().len();
        let cause =
            format!("the process {pid} (sleep) has used up RLIMIT_NOFILE ({used} of 4); a sleep needs 4 more of it");
        assert_eq!(used_up(pid), Some(cause.clone()));
        assert_eq!(name(pid, Errno::MFILE.into()).to_string(), cause);
        let other = name(pid, Errno::PERM.into());
        assert_eq!(other.raw_os_error(), Some(Errno::PERM.raw_os_error()), "not by what is used up");
        end(scarce);
        let free = sleeper(":");
        assert_eq!(used_up(free.id()), None);
        end(free);
    }
}
