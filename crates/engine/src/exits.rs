//! What pid 1 of a sandbox says of the program's beginning and end.

use crate::fd_store::key;
use crate::host::Proc;
use kip_sandbox::init;
use kip_types::lifecycle::Exit;
use std::fs;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// The next record of pid 1's, or none when it has not come within the time.
pub fn read_record(status: &OwnedFd, within: Duration) -> io::Result<Option<init::InitRecord>> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let until = Instant::now() + within;
    loop {
        let mut bytes = [0u8; init::RECORD_BYTES];
        let mut file = fs::File::from(status.try_clone()?);
        match file.read(&mut bytes) {
            Ok(n) if n == bytes.len() => return Ok(init::InitRecord::parse(&bytes)),
            Ok(_) => return Ok(None),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e),
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(&mut [PollFd::new(status, PollFlags::IN)], Some(&left)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// How the program ended, if pid 1 has said so.
pub fn reported_exit(proc: &Proc) -> Option<Exit> {
    let status = proc.fd_store.get(key::STATUS)?;
    while let Ok(Some(record)) = read_record(&status, Duration::ZERO) {
        if let init::InitRecord::Ended(exit) = record {
            return Some(exit);
        }
    }
    None
}
