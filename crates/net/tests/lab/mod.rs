//! A machine for tests: a network namespace of its own that plays the host, with an uplink to
//! another that plays the outside. Whatever a test does wrong ends with its threads.
#![allow(dead_code)]

use kip_net::{Instance, NetNs, NetPool, Slot};
use kip_sys::netns;
use parking_lot::Mutex;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long a test waits for something that must happen.
pub const LONG: Duration = Duration::from_secs(5);
/// How long a test waits for something that must not happen.
pub const SHORT: Duration = Duration::from_millis(400);

/// Addresses of the host on its uplink, and of the outside.
pub const HOST4: &str = "198.18.0.1";
pub const HOST6: &str = "2001:db8::1";
pub const OUTSIDE4: &str = "198.18.0.2";
pub const OUTSIDE6: &str = "2001:db8::2";

pub fn instance(number: u8) -> Instance {
    Instance::new(number).unwrap()
}

pub fn slot(number: u16) -> Slot {
    Slot::new(number).unwrap()
}

/// The fake machine.
pub struct Machine {
    pub host: OwnedFd,
    pub outside: OwnedFd,
    pub dir: tempfile::TempDir,
}

impl Machine {
    pub fn memory(&self) -> std::path::PathBuf {
        self.dir.path().join("forwarding.json")
    }
}

/// One machine at a time: all of them share the kernel's queue for packets on their way
/// (netdev_max_backlog), so that one test's burst would drop another's packets.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs the test on a machine of its own. The test's thread is in the host's namespace.
pub fn on_machine(test: impl FnOnce(&Machine) + Send) {
    let _alone = ALONE.lock();
    std::thread::scope(|s| {
        let thread = s.spawn(|| {
            let outside = fresh_namespace();
            netns::unshare_net().expect("root is needed");
            let host = netns::current_net().unwrap();
            let dir = tempfile::tempdir().unwrap();
            let machine = Machine { host, outside, dir };
            let path = format!("/proc/{}/fd/{}", std::process::id(), machine.outside.as_raw_fd());
            ip("link set lo up");
            ip(&format!("link add up0 type veth peer name out0 netns {path}"));
            ip("link set up0 up");
            ip(&format!("addr add {HOST4}/24 dev up0"));
            ip(&format!("addr add {HOST6}/64 dev up0 nodad"));
            within(machine.outside.as_fd(), || {
                ip("link set lo up");
                ip("link set out0 up");
                ip(&format!("addr add {OUTSIDE4}/24 dev out0"));
                ip(&format!("addr add {OUTSIDE6}/64 dev out0 nodad"));
            });
            // The kernel says so up to a second after both ends are up, and tests compare it.
            let begun = Instant::now();
            while !ip("-o link show up0").contains("state UP") {
                assert!(begun.elapsed() < Duration::from_secs(20), "up0 has no carrier");
                std::thread::sleep(Duration::from_millis(5));
            }
            ip(&format!("route add default via {OUTSIDE4}"));
            ip(&format!("-6 route add default via {OUTSIDE6}"));
            test(&machine);
        });
        if let Err(panic) = thread.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

pub fn fresh_namespace() -> OwnedFd {
    std::thread::spawn(|| {
        netns::unshare_net().expect("root is needed");
        netns::current_net().unwrap()
    })
    .join()
    .unwrap()
}

/// Runs something inside a namespace.
pub fn within<T: Send>(ns: BorrowedFd<'_>, what: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|s| {
        let thread = s.spawn(|| {
            netns::enter_net(ns).unwrap();
            what()
        });
        match thread.join() {
            Ok(value) => value,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Runs a command and returns what it printed.
pub fn run(program: &str, arguments: &str) -> String {
    let output = Command::new(program).args(arguments.split_whitespace()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{program} {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    text
}

pub fn ip(arguments: &str) -> String {
    run("ip", arguments)
}

/// A server in a namespace that answers each line of a client with `NAME PEER`. It ends with the
/// process.
pub fn serve(ns: BorrowedFd<'_>, name: &'static str, port: u16) {
    let ns = ns.try_clone_to_owned().unwrap();
    let (ready, wait) = mpsc::channel();
    std::thread::spawn(move || {
        netns::enter_net(ns.as_fd()).unwrap();
        drop(ns);
        let tcp = TcpListener::bind(("::", port)).unwrap();
        let udp = UdpSocket::bind(("::", port)).unwrap();
        ready.send(()).unwrap();
        std::thread::spawn(move || {
            let mut buffer = [0; 100];
            while let Ok((_, peer)) = udp.recv_from(&mut buffer) {
                let _ = udp.send_to(format!("{name} {}", plain(peer.ip())).as_bytes(), peer);
            }
        });
        for stream in tcp.incoming() {
            let Ok(mut stream) = stream else { return };
            // A client that has reset its connection by now has no address.
            let Ok(peer) = stream.peer_addr().map(|peer| plain(peer.ip())) else { continue };
            let mut buffer = [0; 100];
            let _ = stream.read(&mut buffer);
            let _ = stream.write_all(format!("{name} {peer}").as_bytes());
        }
    });
    wait.recv_timeout(LONG).expect("the server starts");
}

fn plain(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V6(v6) => v6.to_ipv4_mapped().map_or(ip, IpAddr::V4),
        IpAddr::V4(_) => ip,
    }
}

/// Asks by TCP for the server's name.
pub fn tcp(to: &str, patience: Duration) -> io::Result<String> {
    let to: SocketAddr = to.parse().unwrap();
    let mut stream = TcpStream::connect_timeout(&to, patience)?;
    stream.set_read_timeout(Some(patience))?;
    stream.write_all(b"who\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// Asks by UDP for the server's name.
pub fn udp(to: &str, patience: Duration) -> io::Result<String> {
    let to: SocketAddr = to.parse().unwrap();
    let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(patience))?;
    socket.send(b"who\n")?;
    let mut buffer = [0; 100];
    let n = socket.recv(&mut buffer)?;
    Ok(String::from_utf8_lossy(&buffer[..n]).into_owned())
}

/// Waits for a condition.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !condition() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::yield_now();
    }
}

/// Takes a namespace with a server on port 80 (TCP and UDP).
pub fn proc_with_server(pool: &NetPool, number: u16, name: &'static str) -> NetNs {
    let ns = pool.take(slot(number)).unwrap();
    serve(ns.fd.as_fd(), name, 80);
    ns
}
