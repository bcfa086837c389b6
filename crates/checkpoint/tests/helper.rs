//! The shim in a helper: what it is handed lies under the numbers that were ordered, whatever the
//! count. Needs root.
//!
//! A program that reads from its standard input by recv(2) stands for CRIU: the shim takes its
//! orders before that.

use kip_checkpoint::helper::{Helper, HelperConfig, HelperError, HelperOrder, SHIM, Template};
use kip_checkpoint::locate::{CriuCommand, OLDEST, Origin};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// As CRIU with the argument `swrk 0`.
const STAND_IN: &str = "import socket; socket.socket(fileno=0).recv(65536)";
/// Writes to number 512 how many bytes are queued in the connections 513 and 514, by each of three
/// requests of tcp(7).
const MEASURES: &str = "
import fcntl, os, socket, struct
criu = socket.socket(fileno=0)
try:
    criu.recv(1, socket.MSG_DONTWAIT)
except BlockingIOError:
    pass
queued = lambda fd, request: struct.unpack('i', fcntl.ioctl(fd, request, bytes(4)))[0]
os.write(512, repr([queued(fd, request) for fd in (513, 514) for request in (0x541B, 0x5411, 0x894B)]).encode())
";
/// As restore.rs has it.
const FIRST: i32 = 512;

fn helper(scratch: &Path) -> Helper {
    helper_with(scratch, STAND_IN)
}

fn helper_with(scratch: &Path, program: &str) -> Helper {
    let (shim, stage) = (scratch.join("shim.so"), scratch.join("stage"));
    std::fs::write(&shim, SHIM).unwrap();
    std::fs::create_dir_all(&stage).unwrap();
    let criu = CriuCommand {
        program: "/usr/bin/python3".into(),
        args: vec!["-c".into(), program.into()],
        env: Vec::new(),
        version: OLDEST,
        origin: Origin::Explicit,
        path: "/usr/bin/python3".into(),
    };
    // It outlives its template.
    Template::start(&HelperConfig { criu, shim, stage }).unwrap().fork().unwrap()
}

/// So many descriptors that differ.
fn sockets(count: usize) -> Vec<OwnedFd> {
    kip_sys::process::raise_nofile().unwrap();
    (0..count).map(|_| kip_sys::fdpass::seqpacket_pair().unwrap().0).collect()
}

fn orders(fds: &[OwnedFd], first: i32) -> Vec<(HelperOrder, std::os::fd::BorrowedFd<'_>)> {
    (first..).zip(fds).map(|(number, fd)| (HelperOrder::Dup(number), fd.as_fd())).collect()
}

#[test]
fn each_descriptor_lies_under_its_number_whatever_the_count() {
    for count in [1, 47, 48, 63, 64, 186, 187, 249, 250, 251, 253, 254, 500, 501, 1000, 5000] {
        let scratch = tempfile::tempdir().unwrap();
        let (helper, fds) = (helper(scratch.path()), sockets(count));
        helper.prepare(&orders(&fds, FIRST)).unwrap();
        let place = |number: i32| std::fs::metadata(format!("/proc/{}/fd/{number}", helper.pid())).unwrap().ino();
        for (number, fd) in (FIRST..).zip(&fds) {
            assert_eq!(place(number), rustix::fs::fstat(fd).unwrap().st_ino, "number {number} of {count}");
        }
        let open = std::fs::read_dir(format!("/proc/{}/fd", helper.pid())).unwrap();
        let kept = open.filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().parse::<i32>().unwrap() >= FIRST);
        assert_eq!(kept.count(), count, "nothing else is left open");
    }
}

#[test]
fn a_number_that_is_taken_is_refused_and_not_replaced() {
    let scratch = tempfile::tempdir().unwrap();
    let (helper, fds) = (helper(scratch.path()), sockets(60));
    // At 40 lies one that has arrived with these and is not kept yet.
    let error = helper.prepare(&orders(&fds, 40)).unwrap_err();
    let HelperError::Order { order: HelperOrder::Dup(40), source } = error else { panic!("{error:?}") };
    assert_eq!(source.raw_os_error(), Some(rustix::io::Errno::BUSY.raw_os_error()));
}

#[test]
fn a_descriptor_for_which_there_is_no_room_is_named() {
    let scratch = tempfile::tempdir().unwrap();
    let (helper, fds) = (helper(scratch.path()), sockets(300));
    let pid = rustix::process::Pid::from_raw(helper.pid() as i32);
    // Once it has set its own.
    while std::fs::read_to_string(format!("/proc/{}/comm", helper.pid())).unwrap().trim_end() != "criu-helper" {
        assert!(helper.is_waiting());
        std::thread::yield_now();
    }
    let limit = rustix::process::Rlimit { current: Some(100), maximum: Some(100) };
    rustix::process::prlimit(pid, rustix::process::Resource::Nofile, limit).unwrap();
    let error = helper.prepare(&orders(&fds, FIRST)).unwrap_err();
    let HelperError::Order { source, .. } = &error else { panic!("{error:?}") };
    let errno = io::Error::raw_os_error(source);
    let wanted = [rustix::io::Errno::MFILE, rustix::io::Errno::BADF].map(rustix::io::Errno::raw_os_error);
    assert!(errno.is_some_and(|errno| wanted.contains(&errno)), "{source}");
}

/// Packets come and go while CRIU looks; it fails if a queue is not as long as it was.
#[test]
fn criu_finds_no_bytes_in_the_queues_of_connections() {
    let scratch = tempfile::tempdir().unwrap();
    let helper = helper_with(scratch.path(), MEASURES);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (receiver, _) = listener.accept().unwrap();
    sender.set_nonblocking(true).unwrap();
    while sender.write(&[0; 1 << 16]).is_ok() {}
    assert!(kip_sys::sock::unread_bytes(receiver.as_fd()).unwrap() > 0);
    let (mut measured, into) = io::pipe().unwrap();
    helper.prepare(&orders(&[into.into(), sender.into(), receiver.into()], FIRST)).unwrap();
    let mut said = vec![0; 100];
    let count = measured.read(&mut said).unwrap();
    assert_eq!(String::from_utf8_lossy(&said[..count]), "[0, 0, 0, 0, 0, 0]");
}
