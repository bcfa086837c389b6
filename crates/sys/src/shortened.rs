//! Sockets whose own time-out is, for one call, what is left of it: SO_RCVTIMEO and SO_SNDTIMEO of
//! socket(7).
//!
//! A thread that was broken off in such a call begins it anew, and the kernel reads the option when
//! the call begins. So the option is what is left until the thread is in its call, and then again
//! what the program has set. A crash in between leaves the socket with the short one.

use crate::process::{pidfd_getfd, pidfd_open};
use crate::status::Status;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_timeout};
use std::fs;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The least that a socket's time-out is set to: 0 would be for ever.
const LEAST: Duration = Duration::from_millis(1);
/// A socket gets its own time-out back when its thread is in the call again. From then on also if
/// the thread is elsewhere.
const BACK_WITHIN: Duration = Duration::from_secs(1);
/// And from then on wherever it is: a program that computes all the time may have left the call
/// without being seen.
const BACK_AT_LAST: Duration = Duration::from_secs(60);
/// Between looks at the thread.
const POLL_EVERY: Duration = Duration::from_millis(2);

/// Where in the kernel a thread waits that is seen in a call and has not entered it:
/// proc_pid_wchan(5). For a page, as a tracer or a signal has stopped it, in a frozen cgroup.
const ON_THE_WAY: [&str; 4] = ["handle_userfault", "ptrace_stop", "do_signal_stop", "do_freezer_trap"];

/// The call that a thread begins anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    /// Host thread id.
    pub tid: u32,
    /// Number of the call.
    pub call: u64,
    /// The socket's descriptor in its process.
    pub fd: i32,
    /// SO_SNDTIMEO, otherwise SO_RCVTIMEO.
    pub sending: bool,
}

impl Wait {
    fn option(&self) -> Timeout {
        if self.sending { Timeout::Send } else { Timeout::Recv }
    }

    fn socket(&self) -> io::Result<(OwnedFd, OwnedFd)> {
        let process = pidfd_open(process_of(self.tid)?)?;
        let socket = pidfd_getfd(process.as_fd(), self.fd)?;
        Ok((process, socket))
    }

    /// The whole time-out that the socket has now; none if it has none.
    ///
    /// # Errors
    /// ENOTSOCK, EBADF; the thread has ended.
    pub fn whole(&self) -> io::Result<Option<Duration>> {
        Ok(socket_timeout(self.socket()?.1, self.option())?)
    }
}

/// A socket with the time-out of one call.
#[derive(Debug)]
pub struct Shortened {
    process: OwnedFd,
    wait: Wait,
    inode: u64,
    whole: Duration,
    /// What the option was set to, as the kernel rounds it.
    set_to: Option<Duration>,
    /// How often the thread had left a processor by then.
    switches: u64,
}

/// A thread that is about to enter its call, or has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// It has not run since, runs, or waits for a page: the kernel touches the area of rseq(2)
    /// before the thread enters the call, and a call may read memory before it looks at the socket;
    /// the thread is seen in the call meanwhile.
    Before,
    /// It waits in the call.
    Inside,
    /// It has run and waits in no such call: it has left it, or a handler of a signal came first.
    Elsewhere,
}

impl Shortened {
    /// Sets what is left; `whole` is what the program had set.
    ///
    /// # Errors
    /// ENOTSOCK, EBADF; the thread has ended.
    pub fn shorten(wait: Wait, whole: Duration, left: Duration) -> io::Result<Shortened> {
        let (process, socket) = wait.socket()?;
        set_socket_timeout(&socket, wait.option(), Some(left.max(LEAST)))?;
        let inode = rustix::fs::fstat(&socket)?.st_ino;
        let switches = switches(wait.tid)?.count;
        Ok(Shortened { process, wait, inode, whole, set_to: socket_timeout(&socket, wait.option())?, switches })
    }

    /// Threads that wait on one socket, in one direction, share its option.
    pub fn shares(&self) -> (u64, bool) {
        (self.inode, self.wait.sending)
    }

    /// Where the thread is.
    fn way(&self) -> Way {
        let read = |name: &str| fs::read_to_string(format!("/proc/{}/{name}", self.wait.tid));
        let Ok(before) = switches(self.wait.tid) else { return Way::Elsewhere };
        let (call, at) = (read("syscall").unwrap_or_default(), read("wchan").unwrap_or_default());
        // One that sleeps after as many switches has slept between the two looks, and what was read
        // there belongs together.
        let slept = before.asleep && switches(self.wait.tid).is_ok_and(|after| after == before);
        if !slept || before.count == self.switches || ON_THE_WAY.contains(&at.as_str()) {
            return Way::Before;
        }
        let call = call.split_whitespace().next().and_then(|number| number.parse::<u64>().ok());
        if call == Some(self.wait.call) { Way::Inside } else { Way::Elsewhere }
    }

    /// Unless the program has set it itself, or has another file there by now.
    fn give_back(&self) -> io::Result<()> {
        let Ok(socket) = pidfd_getfd(self.process.as_fd(), self.wait.fd) else { return Ok(()) };
        let option = self.wait.option();
        let same = rustix::fs::fstat(&socket).is_ok_and(|s| s.st_ino == self.inode)
            && socket_timeout(&socket, option).is_ok_and(|t| t == self.set_to);
        if same { Ok(set_socket_timeout(&socket, option, Some(self.whole))?) } else { Ok(()) }
    }
}

/// Gives sockets their own time-outs back, on a thread of its own; `complain` hears of those that
/// keep what was meant for one call. Returns that thread, if it takes one.
pub fn give_back(
    shortened: Vec<Shortened>,
    complain: impl Fn(&io::Error) + Send + Clone + 'static,
) -> Option<JoinHandle<()>> {
    if shortened.is_empty() {
        return None;
    }
    let begin = Instant::now();
    let complain_here = complain.clone();
    let spawned = std::thread::Builder::new().name("kip-timeouts".to_owned()).spawn(move || {
        let mut left = shortened;
        while !left.is_empty() {
            let late = begin.elapsed() > BACK_WITHIN;
            left.retain(|s| {
                let over = match s.way() {
                    Way::Inside => true,
                    Way::Before => begin.elapsed() > BACK_AT_LAST,
                    Way::Elsewhere => late,
                };
                if over && let Err(e) = s.give_back() {
                    complain_here(&e);
                }
                !over
            });
            std::thread::sleep(POLL_EVERY);
        }
    });
    spawned.inspect_err(complain).ok()
}

/// How a thread is scheduled: proc_pid_status(5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Switches {
    /// How often it has left a processor.
    count: u64,
    /// It waits for something.
    asleep: bool,
}

fn switches(tid: u32) -> io::Result<Switches> {
    let status = Status::read(tid)?;
    let asleep = !status.is_runnable();
    status.switches().map(|count| Switches { count, asleep }).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn process_of(tid: u32) -> io::Result<u32> {
    Status::read(tid)?.process().ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    // promise waking: a time-out that is a socket's option is short for one call only
    // held by: this, `tests/test_timers.py::test_wakes_for_it`
    #[test]
    fn a_socket_s_time_out_is_short_for_one_call() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let whole = Duration::from_secs(20);
        socket.set_read_timeout(Some(whole)).unwrap();
        let (tid_sender, tid_receiver) = std::sync::mpsc::channel();
        let (go, begin) = std::sync::mpsc::channel::<()>();
        let receiver = socket.try_clone().unwrap();
        let thread = std::thread::spawn(move || {
            tid_sender.send(rustix::thread::gettid().as_raw_nonzero().get() as u32).unwrap();
            begin.recv().unwrap();
            let begin = Instant::now();
            assert_eq!(receiver.recv(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
            begin.elapsed()
        });
        let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
        let wait = Wait { tid: tid_receiver.recv().unwrap(), call: 45, fd, sending: false };
        assert_eq!(wait.whole().unwrap(), Some(whole));
        let done = Shortened::shorten(wait, whole, Duration::from_millis(400)).unwrap();
        assert!(socket.read_timeout().unwrap().unwrap() < Duration::from_millis(450));
        assert_ne!(done.way(), Way::Inside);
        go.send(()).unwrap();
        let giving = give_back(vec![done], |e| panic!("{e}"));
        let waited = thread.join().unwrap();
        giving.unwrap().join().unwrap();
        assert!((Duration::from_millis(400)..Duration::from_secs(2)).contains(&waited), "{waited:?}");
        assert_eq!(socket.read_timeout().unwrap(), Some(whole));
    }
}
