//! The daemon itself, under the names that exporters use for their own process.

use std::fs;

/// Of the kernel's clock ticks as programs see them, in a second: USER_HZ, time(7).
const TICKS: f64 = 100.0;
/// Bytes of a page.
const PAGE: u64 = 4096;

/// Of this process, at the moment of a scrape.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Process {
    /// CPU time, seconds.
    pub(crate) cpu_seconds: f64,
    /// Resident memory, bytes.
    pub(crate) resident_bytes: u64,
    /// Address space, bytes.
    pub(crate) virtual_bytes: u64,
    /// Seconds since the epoch.
    pub(crate) started: f64,
    /// Open descriptors.
    pub(crate) open_fds: u64,
    /// Its limit of open descriptors.
    pub(crate) max_fds: u64,
    /// Threads.
    pub(crate) threads: u64,
}

impl Process {
    /// This one now; none if the kernel does not say.
    pub(crate) fn read() -> Option<Process> {
        let stat = fs::read_to_string("/proc/self/stat").ok()?;
        // What comes after its name, which may have anything in it: proc_pid_stat(5).
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        let booted = fs::read_to_string("/proc/stat").ok()?;
        let booted: u64 = booted.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
        let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        Some(Process {
            cpu_seconds: (field(14)? + field(15)?) as f64 / TICKS,
            resident_bytes: field(24)? * PAGE,
            virtual_bytes: field(23)?,
            started: booted as f64 + field(22)? as f64 / TICKS,
            // Less the one by which they are counted.
            open_fds: (fs::read_dir("/proc/self/fd").ok()?.count() as u64).saturating_sub(1),
            max_fds: most.unwrap_or(u64::MAX),
            threads: field(20)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_this_one() {
        let now = Process::read().unwrap();
        assert!(now.resident_bytes > 100 << 10 && now.virtual_bytes >= now.resident_bytes, "{now:?}");
        let age = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs_f64() - now.started;
        assert!((-2.0..600.0).contains(&age), "{age}");
        assert!(now.threads >= 1 && now.open_fds >= 3 && now.max_fds > now.open_fds, "{now:?}");
        let _one_more = fs::File::open("/dev/null").unwrap();
        assert!(Process::read().unwrap().cpu_seconds >= now.cpu_seconds);
    }
}
