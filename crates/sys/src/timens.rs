//! Time namespaces, in which CLOCK_MONOTONIC is the machine's plus an offset: time_namespaces(7),
//! Linux 5.6.
//!
//! CLOCK_BOOTTIME has an offset of 0 in all that are made here. The offsets of a namespace cannot
//! be changed any more once a process is in it.

use parking_lot::Mutex;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::linux::fs::MetadataExt;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

/// CLONE_NEWTIME, as setns(2) takes it.
pub const NEWTIME: i32 = libc::CLONE_NEWTIME;
const SECOND: i64 = 1_000_000_000;

/// A new time namespace, owned by the caller's user namespace, in which CLOCK_MONOTONIC is that
/// much ahead of the machine's, nanoseconds. Needs `CAP_SYS_ADMIN` and `CAP_SYS_TIME`. The first
/// call starts a thread that lives as long as the process.
///
/// # Errors
/// EINVAL where the kernel has none; ERANGE if the clock would be negative.
pub fn new_time(monotonic_ahead_ns: i64) -> io::Result<OwnedFd> {
    static MADE: Mutex<Option<Receiver<io::Result<Unset>>>> = Mutex::new(None);
    let mut made = MADE.lock();
    let comes = match made.take() {
        Some(comes) => comes,
        None => {
            // Without room: one is made ahead, and the next when that is taken.
            let (give, comes) = sync_channel(0);
            std::thread::Builder::new().name("kip-timens".to_owned()).spawn(move || make(&give))?;
            comes
        }
    };
    // The second: what failed some time ago may succeed now.
    let next = comes.recv().and_then(|next| if next.is_ok() { Ok(next) } else { comes.recv() });
    // A thread that has ended is not asked again: the next call starts another.
    let Unset { namespace, offsets, own_ns, _taken } =
        next.map_err(|_| io::Error::other("the thread that makes time namespaces has ended"))??;
    *made = Some(comes);
    drop(made);
    // What is written is the offset from the machine's own clock, in whatever namespace the caller
    // is.
    let offset = own_ns.checked_add(monotonic_ahead_ns).ok_or(rustix::io::Errno::RANGE)?;
    let (seconds, rest) = (offset.div_euclid(SECOND), offset.rem_euclid(SECOND));
    (&offsets).write_all(format!("monotonic {seconds} {rest}\n").as_bytes())?;
    Ok(namespace)
}

/// A namespace whose clock is not set yet.
struct Unset {
    namespace: OwnedFd,
    /// Sets the clock of the namespace that children of the maker would be born in: this one, until
    /// `_taken` is dropped.
    offsets: File,
    /// The offset of the caller's own clock.
    own_ns: i64,
    _taken: Sender<()>,
}

/// Makes namespaces, one ahead each time, for a proc that wakes waits for its own. On a thread of
/// its own: unshare(2) lets the children of the calling thread be born in the new one, and this
/// thread has none.
fn make(give: &SyncSender<io::Result<Unset>>) {
    // /proc/thread-self has no timens_offsets; /proc has every thread under its own number.
    let own = format!("/proc/{}", rustix::thread::gettid().as_raw_nonzero());
    loop {
        let (_taken, is_taken) = channel();
        let unset = || -> io::Result<Unset> {
            // SAFETY: unshare takes flags only; CLONE_NEWTIME affects no memory, file table or
            // other thread.
            if unsafe { libc::unshare(libc::CLONE_NEWTIME) } != 0 {
                return Err(io::Error::last_os_error());
            }
            let namespace = File::open(format!("{own}/ns/time_for_children"))?.into();
            let offsets = OpenOptions::new().write(true).open(format!("{own}/timens_offsets"))?;
            Ok(Unset { namespace, offsets, own_ns: offset_of("self")?, _taken })
        };
        if give.send(unset()).is_err() {
            return;
        }
        // Ends when the other side is dropped.
        let _ = is_taken.recv();
    }
}

/// The time namespace of a process, if it is another than the caller's.
///
/// # Errors
/// Those of /proc/PID; none where the kernel has no time namespaces.
pub fn other_time_of(pid: u32) -> io::Result<Option<OwnedFd>> {
    let Ok(own) = fs::metadata("/proc/thread-self/ns/time") else { return Ok(None) };
    let theirs = File::open(format!("/proc/{pid}/ns/time"))?;
    let same = theirs.metadata()?.st_ino() == own.st_ino();
    Ok((!same).then(|| theirs.into()))
}

/// How far the CLOCK_MONOTONIC of a process is ahead of the caller's, nanoseconds; 0 where the
/// kernel has no time namespaces.
///
/// # Errors
/// Those of /proc/PID, and `InvalidData` if the file cannot be understood.
pub fn monotonic_ahead_of(pid: u32) -> io::Result<i64> {
    if other_time_of(pid)?.is_none() {
        return Ok(0);
    }
    Ok(offset_of(&pid.to_string())? - offset_of("self")?)
}

/// The offset that the children of a process have, nanoseconds.
fn offset_of(process: &str) -> io::Result<i64> {
    let text = fs::read_to_string(format!("/proc/{process}/timens_offsets"))?;
    parse(&text).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// The line of CLOCK_MONOTONIC.
fn parse(text: &str) -> Option<i64> {
    let line = text.lines().find_map(|line| line.strip_prefix("monotonic"))?;
    let mut words = line.split_ascii_whitespace().map(str::parse::<i64>);
    let (seconds, rest) = (words.next()?.ok()?, words.next()?.ok()?);
    seconds.checked_mul(SECOND)?.checked_add(rest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::process::{Command, Stdio};

    #[test]
    fn offsets_are_read() {
        assert_eq!(parse("monotonic          -2 750000000\nboottime            0         0\n"), Some(-1_250_000_000));
        assert_eq!(parse("boottime 0 0\n"), None);
    }

    /// nsenter(1) makes the call as a program of one thread; its child reads the clock.
    #[test]
    fn a_clock_stands_behind_in_a_new_namespace_and_only_there() {
        let now = || rustix::time::clock_gettime(rustix::time::ClockId::Monotonic).tv_sec;
        let behind = -(now() / 2) * SECOND - 1;
        let namespace = new_time(behind).unwrap();
        let path = format!("/proc/{}/fd/{}", std::process::id(), namespace.as_raw_fd());
        let mut child = Command::new("nsenter")
            .args([&format!("--time={path}"), "sh", "-c", "echo; exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = [0; 1];
        io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut line).unwrap();
        assert_eq!(monotonic_ahead_of(child.id()).unwrap(), behind);
        assert!(other_time_of(child.id()).unwrap().is_some());
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(monotonic_ahead_of(std::process::id()).unwrap(), 0);
        assert!(other_time_of(std::process::id()).unwrap().is_none());
        assert_eq!(new_time(i64::MIN).unwrap_err().raw_os_error(), Some(libc::ERANGE), "no clock is negative");
    }
}
