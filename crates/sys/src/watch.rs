//! Epoll sets and signalfds as a program had them.
//!
//! epoll(7) knows what is watched by its open file and by the number that the descriptor had when
//! it was added; a program changes and removes a watch by that number.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

fn check(rc: i32) -> io::Result<i32> {
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc) }
}

/// One file of an epoll set.
#[derive(Debug, Clone, Copy)]
pub struct WatchedFile<'a> {
    /// What is watched.
    pub fd: BorrowedFd<'a>,
    /// The number by which the program knows it.
    pub number: i32,
    /// EPOLL* of epoll_ctl(2).
    pub events: u32,
    /// What the program gets with an event.
    pub data: u64,
}

impl WatchedFile<'_> {
    /// It was for one event, which has come: EPOLLONESHOT and nothing to wait for.
    fn is_disarmed(&self) -> bool {
        let private = libc::EPOLLONESHOT | libc::EPOLLET | libc::EPOLLWAKEUP | libc::EPOLLEXCLUSIVE;
        self.events & libc::EPOLLONESHOT as u32 != 0 && self.events & !(private as u32) == 0
    }
}

/// Adds files to an epoll set, each under the number that its program knows it by.
///
/// # Errors
/// Those of close_range(2), dup2(2), fcntl(2) and epoll_ctl(2): a number above RLIMIT_NOFILE, a
/// file that cannot be watched.
pub fn watch(set: BorrowedFd<'_>, watches: &[WatchedFile<'_>]) -> io::Result<()> {
    let own = watches.iter().map(|watch| watch.fd.as_raw_fd()).chain([set.as_raw_fd()]).max().unwrap_or(0);
    let above = watches.iter().map(|watch| watch.number).max().unwrap_or(0).max(own) + 1;
    let add = || {
        // Here the numbers may be those of other files, so the thread, which ends below, has a
        // table of its own, of which nothing above what it uses is copied.
        //
        // SAFETY: plain numbers, and one live struct that is read during the call; with a table of
        // its own the thread closes no descriptor of others.
        unsafe {
            check(libc::close_range(own as u32 + 1, u32::MAX, libc::CLOSE_RANGE_UNSHARE as i32))?;
            let aside = |fd: i32| check(libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, above));
            let set = aside(set.as_raw_fd())?;
            let moved = watches.iter().map(|watch| aside(watch.fd.as_raw_fd())).collect::<io::Result<Vec<_>>>()?;
            let put = |disarmed: bool| -> io::Result<()> {
                for (watch, fd) in watches.iter().zip(&moved).filter(|(watch, _)| watch.is_disarmed() == disarmed) {
                    check(libc::dup2(*fd, watch.number))?;
                    let mut event = libc::epoll_event { events: watch.events, u64: watch.data };
                    check(libc::epoll_ctl(set, libc::EPOLL_CTL_ADD, watch.number, &raw mut event))?;
                }
                Ok(())
            };
            put(true)?;
            // The kernel arms what is added for ends and errors. Of those that have come already
            // this takes the events, and disarms them.
            let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
            while check(libc::epoll_wait(set, events.as_mut_ptr(), events.len() as i32, 0))? > 0 {}
            put(false)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| std::thread::Builder::new().spawn_scoped(scope, add)?.join().expect("it does not panic"))
}

/// A descriptor that reads those signals of its reader, as the kernel keeps them: signal N is bit
/// N - 1.
///
/// # Errors
/// Those of signalfd(2).
pub fn signalfd(signals: u64) -> io::Result<OwnedFd> {
    // SAFETY: the kernel reads the eight bytes of the live `signals`; the descriptor that it
    // returns is new and no other's.
    unsafe {
        let flags = libc::SFD_CLOEXEC;
        let fd = libc::syscall(libc::SYS_signalfd4, -1, &raw const signals, size_of::<u64>(), flags);
        Ok(OwnedFd::from_raw_fd(check(fd as i32)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::epoll;
    use std::os::fd::AsFd;

    #[test]
    fn what_was_for_one_event_that_has_come_stays_silent() {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let (reader, ended) = rustix::pipe::pipe().unwrap();
        drop(reader);
        let armed = rustix::event::eventfd(1, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let once = libc::EPOLLONESHOT as u32;
        let watches = [
            WatchedFile { fd: ended.as_fd(), number: 901, events: once, data: 1 },
            WatchedFile { fd: armed.as_fd(), number: 902, events: once | libc::EPOLLIN as u32, data: 2 },
        ];
        watch(set.as_fd(), &watches).unwrap();
        let mut events = Vec::with_capacity(4);
        let none = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        epoll::wait(&set, rustix::buffer::spare_capacity(&mut events), Some(&none)).unwrap();
        assert_eq!(events.iter().map(|event| event.data.u64()).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn what_is_watched_is_known_by_the_program_s_number() {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let (other, _kept) = rustix::pipe::pipe().unwrap();
        // The numbers are those of each other, and one that nothing has.
        let numbers = [other.as_raw_fd(), reader.as_raw_fd(), 900];
        let watches = [
            WatchedFile { fd: reader.as_fd(), number: numbers[0], events: libc::EPOLLIN as u32, data: 7 },
            WatchedFile { fd: other.as_fd(), number: numbers[1], events: libc::EPOLLIN as u32, data: 8 },
            WatchedFile { fd: writer.as_fd(), number: numbers[2], events: 0, data: u64::MAX },
        ];
        watch(set.as_fd(), &watches).unwrap();
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", set.as_raw_fd())).unwrap();
        let mut known: Vec<(i32, String)> = info
            .lines()
            .filter(|line| line.starts_with("tfd:"))
            .map(|line| {
                let words: Vec<&str> = line.split_whitespace().collect();
                (words[1].parse().unwrap(), words[5].to_owned())
            })
            .collect();
        known.sort();
        let mut wanted = vec![(numbers[0], "7".to_owned()), (numbers[1], "8".to_owned()), (900, "f".repeat(16))];
        wanted.sort();
        assert_eq!(known, wanted);
        rustix::io::write(&writer, b"x").unwrap();
        let mut events = Vec::with_capacity(4);
        let none = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        epoll::wait(&set, rustix::buffer::spare_capacity(&mut events), Some(&none)).unwrap();
        assert_eq!(events.iter().map(|event| event.data.u64()).collect::<Vec<_>>(), [7]);
        assert_eq!(
            std::fs::read_link(format!("/proc/self/fd/{}", other.as_raw_fd())).unwrap().to_str().unwrap().get(..5),
            Some("pipe:")
        );
    }
}
