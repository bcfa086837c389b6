//! Sockets of a proc that is not there: custody and waking; and whether any peer talks to a running
//! proc.

mod lab;

use kip_net::activity::{TrafficCounters, activity_between};
use kip_net::custody::{self, HeldSocket, SavedOptions, SocketKind};
use kip_net::diag::Diag;
use kip_net::wake::{Trigger, WakePoll};
use kip_net::{NetNs, NetPool};
use kip_sys::sock;
use kip_types::WakeOn;
use lab::*;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with, sockopt};
use std::io::{Read, Write};
use std::net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// A listener with a small backlog, made inside the proc as its program would.
fn listener(ns: &NetNs, port: u16, backlog: i32) -> TcpListener {
    within(ns.fd.as_fd(), || {
        let fd = socket_with(AddressFamily::INET6, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        sockopt::set_socket_reuseaddr(&fd, true).unwrap();
        rustix::net::bind(&fd, &SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))).unwrap();
        rustix::net::listen(&fd, backlog).unwrap();
        TcpListener::from(fd)
    })
}

fn duplicate(socket: &impl AsFd) -> OwnedFd {
    socket.as_fd().try_clone_to_owned().unwrap()
}

fn freeze(socket: &impl AsFd) -> SavedOptions {
    custody::snapshot_options(socket.as_fd()).unwrap()
}

fn hold(socket: &impl AsFd, saved: &SavedOptions) -> HeldSocket {
    custody::hold(duplicate(socket), saved).unwrap()
}

/// A counter of TcpExt in the namespace of the calling thread.
fn counter(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/net/netstat").unwrap();
    let mut lines = text.lines().filter(|l| l.starts_with("TcpExt:"));
    let at = lines.next().unwrap().split_whitespace().position(|n| n == name).unwrap();
    lines.next().unwrap().split_whitespace().nth(at).unwrap().parse().unwrap()
}

/// What a program does first when it is back.
fn accept_all(server: &TcpListener) {
    server.set_nonblocking(true).unwrap();
    while server.accept().is_ok() {}
}

/// Everything but the queues.
fn options(mut saved: SavedOptions) -> SavedOptions {
    saved.seen = custody::Seen::default();
    saved
}

// promise parking: listening and established sockets live on with backlog and buffers raised
// held by: this, `crates/net/tests/sleep.rs::a_connection_is_held_through_a_dump`
#[test]
fn a_listener_takes_two_hundred_at_once() {
    on_machine(|_| {
        let pool = NetPool::new(instance(6)).unwrap();
        let ns = pool.take(slot(1)).unwrap();
        let server = listener(&ns, 80, 5);
        let saved = freeze(&server);
        assert!(matches!(saved.kind, SocketKind::Listener { backlog: 5, .. }), "{saved:?}");
        let text = serde_json::to_string(&saved).unwrap();
        assert_eq!(serde_json::from_str::<SavedOptions>(&text).unwrap(), saved);
        let held = hold(&server, &saved);

        let to = SocketAddr::from((ns.v4, 80));
        let start = Instant::now();
        let clients: Vec<_> = (0..200)
            .map(|_| {
                std::thread::spawn({
                    let host = kip_sys::netns::current_net().unwrap();
                    move || {
                        kip_sys::netns::enter_net(host.as_fd()).unwrap();
                        let mut stream = TcpStream::connect_timeout(&to, LONG).unwrap();
                        stream.write_all(b"hello").unwrap();
                        stream
                    }
                })
            })
            .collect();
        let clients: Vec<_> = clients.into_iter().map(|c| c.join().unwrap()).collect();
        let took = start.elapsed();
        let dropped = within(ns.fd.as_fd(), || counter("ListenOverflows") + counter("ListenDrops"));
        assert_eq!(dropped, 0, "no SYN is retransmitted for want of room");
        println!("200 connects in custody: {took:?}");

        let diag = Diag::open_in(ns.fd.as_fd()).unwrap();
        // A client is connected at the second of three packets.
        eventually("200 in the queue", || diag.listeners().unwrap()[0].receive_queue == 200);
        let listed = diag.listeners().unwrap();
        assert_eq!((listed.len(), listed[0].receive_queue, listed[0].send_queue), (1, 200, 4096));
        eventually("200 with bytes", || diag.unaccepted(listed[0].local).unwrap().with_bytes == 200);

        custody::release(held.fd.as_fd(), &saved).unwrap();
        drop(held);
        assert_eq!(options(freeze(&server)), options(saved));
        for _ in 0..200 {
            let (mut stream, _) = server.accept().unwrap();
            let mut hello = [0; 5];
            stream.read_exact(&mut hello).unwrap();
            assert_eq!(sock::get_int(stream.as_fd(), sock::IntOption::KeepAlive).unwrap(), 0, "nothing is inherited");
            assert_eq!(sock::get_int(stream.as_fd(), sock::IntOption::BufLock).unwrap(), 0, "nothing is inherited");
        }
        drop(clients);
    });
}

#[test]
fn a_connection_is_held_through_a_dump() {
    on_machine(|_| {
        let pool = NetPool::new(instance(7)).unwrap();
        let ns = pool.take(slot(1)).unwrap();
        let server = listener(&ns, 80, 5);
        let mut client = TcpStream::connect((ns.v4, 80)).unwrap();
        let (mut stream, _) = server.accept().unwrap();
        client.write_all(b"before ").unwrap();
        eventually("bytes arrive", || sock::unread_bytes(stream.as_fd()).unwrap() == 7);
        sockopt::set_socket_reuseaddr(&stream, true).unwrap();
        sockopt::set_tcp_keepcnt(&stream, 3).unwrap();

        let saved = freeze(&stream);
        sock::enter_tcp_repair(stream.as_fd()).unwrap();
        let held = hold(&stream, &saved);
        let in_custody = freeze(&stream);
        assert_ne!(options(in_custody), options(saved));
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        assert!(sockopt::socket_reuseaddr(&stream).unwrap(), "repair cleared it");
        // More than fits into the buffer the program had.
        let much = vec![b'x'; 300_000];
        client.set_write_timeout(Some(LONG)).unwrap();
        client.write_all(&much).unwrap();

        custody::release(held.fd.as_fd(), &saved).unwrap();
        drop(held);
        assert_eq!(options(freeze(&stream)), options(saved));
        let mut all = vec![0; 7 + much.len()];
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.read_exact(&mut all).unwrap();
        assert!(all.starts_with(b"before xx") && all.ends_with(b"x"));
        // Close is close again: the client sees the end.
        drop(stream);
        client.set_read_timeout(Some(LONG)).unwrap();
        assert_eq!(client.read(&mut [0; 10]).unwrap(), 0);
    });
}

// promise parking: bytes of a connection that is over are read after a sleep
#[test]
fn bytes_of_a_connection_that_is_over_are_read_after_a_dump() {
    on_machine(|_| {
        let pool = NetPool::new(instance(14)).unwrap();
        let ns = pool.take(slot(1)).unwrap();
        let server = listener(&ns, 80, 5);
        // Closed by the peer first, by us first, and reset: a descriptor that has no peer any more.
        for how in ["peer first", "own first", "reset"] {
            let mut client = TcpStream::connect((ns.v4, 80)).unwrap();
            let (mut stream, _) = server.accept().unwrap();
            client.write_all(b"unread").unwrap();
            eventually("bytes arrive", || sock::unread_bytes(stream.as_fd()).unwrap() == 6);
            match how {
                "peer first" => {
                    client.shutdown(std::net::Shutdown::Write).unwrap();
                    eventually("its end arrives", || sock::tcp_info(stream.as_fd()).unwrap().state == 8);
                    stream.shutdown(std::net::Shutdown::Write).unwrap();
                }
                "own first" => {
                    stream.shutdown(std::net::Shutdown::Write).unwrap();
                    eventually("our end arrives", || sock::tcp_info(client.as_fd()).unwrap().state == 8);
                    client.shutdown(std::net::Shutdown::Write).unwrap();
                }
                _ => {
                    sockopt::set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
                    drop(client);
                }
            }
            eventually("it is over", || sock::tcp_info(stream.as_fd()).unwrap().state == 7);
            let saved = freeze(&stream);
            assert_eq!(saved.kind, SocketKind::Other, "{how}");
            sock::enter_tcp_repair(stream.as_fd()).unwrap();
            assert_eq!(stream.read(&mut [0; 9]).unwrap_err().raw_os_error(), Some(1), "in repair");
            let held = hold(&stream, &saved);
            custody::release(held.fd.as_fd(), &saved).unwrap();
            drop(held);
            let mut all = [0; 9];
            assert_eq!(stream.read(&mut all).unwrap(), 6, "{how}");
            assert_eq!(&all[..6], b"unread");
        }
    });
}

// promise parking: a connection that is only being made wakes when it is there
#[test]
fn a_connection_that_is_being_made_wakes_when_it_is_there() {
    on_machine(|_| {
        let pool = NetPool::new(instance(15)).unwrap();
        let ns = pool.take(slot(1)).unwrap();
        // Its queue is full: the next one is not answered.
        let server = listener(&ns, 80, 0);
        let first = TcpStream::connect((ns.v4, 80)).unwrap();
        let made = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap();
        let begun = rustix::net::connect(&made, &SocketAddr::from((ns.v4, 80)));
        assert_eq!(begun, Err(rustix::io::Errno::INPROGRESS));
        let saved = freeze(&made);
        assert!(saved.seen.full && saved.kind == SocketKind::Other, "{saved:?}");
        sock::enter_tcp_repair(made.as_fd()).unwrap();
        let watch = WakePoll::new().unwrap();
        watch.add(3, hold(&made, &saved), WakeOn::Connect).unwrap();
        nothing(&watch, SHORT);
        let _accepted = server.accept().unwrap();
        assert_eq!(event(&watch).1, Trigger::Writable);
        watch.remove(&3);
        custody::release(made.as_fd(), &saved).unwrap();
        drop(first);
    });
}

// promise parking: UDP sockets the same
#[test]
fn datagrams_queue_in_custody() {
    on_machine(|_| {
        let pool = NetPool::new(instance(8)).unwrap();
        let ns = pool.take(slot(1)).unwrap();
        let server = within(ns.fd.as_fd(), || UdpSocket::bind("[::]:53").unwrap());
        let saved = freeze(&server);
        let held = hold(&server, &saved);
        let client = UdpSocket::bind("[::]:0").unwrap();
        let mut before = 0;
        for n in 0..2000u32 {
            client.send_to(&n.to_be_bytes(), (ns.v6, 53)).unwrap();
            // Not so fast that the machine's own queue in between (netdev_max_backlog) is what
            // drops them.
            eventually(&format!("arrival of datagram {n}, after {before} bytes,"), || {
                let now = sock::receive_memory(held.fd.as_fd()).unwrap();
                now > before && {
                    before = now;
                    true
                }
            });
        }
        custody::release(held.fd.as_fd(), &saved).unwrap();
        drop(held);
        assert_eq!(options(freeze(&server)), options(saved));
        server.set_read_timeout(Some(LONG)).unwrap();
        for n in 0..2000u32 {
            let mut buffer = [0; 4];
            server.recv(&mut buffer).unwrap();
            assert_eq!(u32::from_be_bytes(buffer), n);
        }
    });
}

/// The one event that must come.
fn event(watch: &WakePoll<u32>) -> (u32, Trigger, String) {
    let deadline = Instant::now() + LONG;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        assert!(!left.is_zero(), "no event came");
        if let [event] = watch.wait(Some(left)).unwrap()[..] {
            return (event.key, event.trigger, event.to_string());
        }
    }
}

fn nothing(watch: &WakePoll<u32>, patience: Duration) {
    let deadline = Instant::now() + patience;
    while let Some(left) = deadline.checked_duration_since(Instant::now()) {
        assert_eq!(watch.wait(Some(left)).unwrap(), [], "woken for nothing");
    }
}

// promise K2: wakes by TCP, UDP, timer, API
// held by: this, `tests/test_torture.py::test_datagram_wakes`,
//   `tests/test_timers.py::test_wakes_for_it`, `tests/test_torture.py::test_wake_by_exec`
#[test]
fn procs_wake_for_what_is_new() {
    on_machine(|_| {
        let pool = NetPool::new(instance(9)).unwrap();
        let ns = pool.take(slot(1)).unwrap();
        let server = listener(&ns, 80, 5);
        let udp = within(ns.fd.as_fd(), || UdpSocket::bind("[::]:53").unwrap());
        let mut client = TcpStream::connect((ns.v4, 80)).unwrap();
        let (stream, _) = server.accept().unwrap();
        let asker = UdpSocket::bind("[::]:0").unwrap();
        // The program slept with something unread, and with a connection it has not accepted.
        client.write_all(b"old").unwrap();
        asker.send_to(b"old", (ns.v6, 53)).unwrap();
        let _old = TcpStream::connect((ns.v4, 80)).unwrap();
        eventually("all has arrived", || {
            freeze(&stream).seen.queued == 3 && freeze(&udp).seen.queued > 0 && freeze(&server).seen.queued == 1
        });

        let watch = WakePoll::new().unwrap();
        let park = || {
            for fd in [duplicate(&server), duplicate(&udp), duplicate(&stream)] {
                let saved = freeze(&fd);
                watch.add(7, custody::hold(fd, &saved).unwrap(), WakeOn::Connect).unwrap();
            }
        };
        park();
        nothing(&watch, SHORT);

        let new = TcpStream::connect((ns.v4, 80)).unwrap();
        assert_eq!(event(&watch), (7, Trigger::Connection, "tcp [::]:80 (connection)".into()));
        client.write_all(b"new").unwrap();
        nothing(&watch, SHORT);
        watch.rearm(&7).unwrap();
        assert_eq!(event(&watch).0, 7);
        watch.remove(&7);
        assert!(watch.is_empty());

        park();
        asker.send_to(b"new", (ns.v6, 53)).unwrap();
        assert_eq!(event(&watch), (7, Trigger::Datagram, "udp [::]:53 (datagram)".into()));
        watch.remove(&7);
        park();
        client.write_all(b"new").unwrap();
        assert_eq!(event(&watch).1, Trigger::Data);
        watch.remove(&7);
        park();
        drop(client);
        assert_eq!(event(&watch).1, Trigger::Closed);
        watch.remove(&7);
        park();
        nothing(&watch, SHORT);
        drop(new);
    });
}

// promise waking: room to write
#[test]
fn a_full_connection_wakes_when_there_is_room() {
    on_machine(|_| {
        let pool = NetPool::new(instance(11)).unwrap();
        let ns = pool.take(slot(1)).unwrap();
        let server = listener(&ns, 80, 5);
        let mut client = TcpStream::connect((ns.v4, 80)).unwrap();
        let (mut stream, _) = server.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        let block = vec![0; 1 << 20];
        // The peer's buffer grows for a while.
        let mut full_since = Instant::now();
        eventually("the buffer is full", || {
            if stream.write(&block).is_ok() || !freeze(&stream).seen.full {
                full_since = Instant::now();
            }
            full_since.elapsed() > SHORT
        });
        let watch = WakePoll::new().unwrap();
        let saved = freeze(&stream);
        watch.add(1, hold(&stream, &saved), WakeOn::Connect).unwrap();
        nothing(&watch, SHORT);
        let drain = std::thread::spawn(move || {
            let mut buffer = vec![0; 1 << 20];
            while client.read(&mut buffer).is_ok_and(|n| n > 0) {}
        });
        assert_eq!(event(&watch).1, Trigger::Writable);
        watch.remove(&1);
        stream.shutdown(std::net::Shutdown::Both).unwrap();
        drain.join().unwrap();
    });
}

#[test]
fn wake_on_data_sleeps_through_probes() {
    on_machine(|_| {
        let pool = NetPool::new(instance(12)).unwrap();
        let ns = pool.take(slot(1)).unwrap();
        let server = listener(&ns, 80, 50);
        let watch = WakePoll::new().unwrap();
        let saved = freeze(&server);
        watch.add(1, hold(&server, &saved), WakeOn::Data).unwrap();
        // Probes: connect and close, connect and reset.
        for _ in 0..5 {
            drop(TcpStream::connect((ns.v4, 80)).unwrap());
            let reset = TcpStream::connect((ns.v6, 80)).unwrap();
            sockopt::set_socket_linger(&reset, Some(Duration::ZERO)).unwrap();
        }
        nothing(&watch, Duration::from_secs(1));
        // A silent client, then its first byte.
        let mut client = TcpStream::connect((ns.v4, 80)).unwrap();
        nothing(&watch, Duration::from_millis(100));
        let sent = Instant::now();
        client.write_all(b"x").unwrap();
        let (_, trigger, text) = event(&watch);
        assert_eq!((trigger, text.as_str()), (Trigger::Data, "tcp [::]:80 (data)"));
        println!("data of a connection 0.1 s old noticed after {:?}", sent.elapsed());
        watch.remove(&1);
        custody::release(server.as_fd(), &saved).unwrap();
        assert_eq!(options(freeze(&server)), options(saved));
        // One that sends at once.
        let saved = freeze(&server);
        watch.add(2, hold(&server, &saved), WakeOn::Data).unwrap();
        nothing(&watch, SHORT);
        let start = Instant::now();
        let mut client = TcpStream::connect((ns.v6, 80)).unwrap();
        client.write_all(b"x").unwrap();
        assert_eq!(event(&watch).0, 2);
        println!("connection with data noticed after {:?}", start.elapsed());
        watch.remove(&2);
        custody::release(server.as_fd(), &saved).unwrap();
        // One that came before the listener was told to defer: only looking again and again helps.
        accept_all(&server);
        let saved = freeze(&server);
        let mut early = TcpStream::connect((ns.v4, 80)).unwrap();
        watch.add(3, hold(&server, &saved), WakeOn::Data).unwrap();
        nothing(&watch, SHORT);
        early.write_all(b"x").unwrap();
        assert_eq!(event(&watch).1, Trigger::Data);
        watch.remove(&3);
        custody::release(server.as_fd(), &saved).unwrap();
        accept_all(&server);
        // One that stayed silent until the program was back is accepted when it speaks.
        let saved = freeze(&server);
        let held = hold(&server, &saved);
        watch.add(4, held, WakeOn::Data).unwrap();
        let mut late = TcpStream::connect((ns.v4, 80)).unwrap();
        nothing(&watch, SHORT);
        watch.remove(&4);
        custody::release(server.as_fd(), &saved).unwrap();
        late.write_all(b"late").unwrap();
        let from = late.local_addr().unwrap().port();
        eventually("it is accepted", || server.accept().is_ok_and(|(_, peer)| peer.port() == from));
    });
}

// promise K10: health probes do not keep a proc awake: connect and close, reset, closed port
#[test]
fn probes_are_no_activity_and_requests_are() {
    on_machine(|_| {
        let pool = NetPool::new(instance(13)).unwrap();
        let ns = pool.take(slot(1)).unwrap();
        let server = listener(&ns, 80, 50);
        // A program that accepts, reads to the end, and never answers.
        std::thread::spawn(move || {
            for stream in server.incoming() {
                let _ = stream.unwrap().read_to_end(&mut Vec::new());
            }
        });
        let udp = within(ns.fd.as_fd(), || UdpSocket::bind("[::]:53").unwrap());
        let read = || {
            within(ns.fd.as_fd(), || TrafficCounters::read(rustix::thread::gettid().as_raw_nonzero().get() as u32))
                .unwrap()
        };
        let wait_until_quiet = || {
            let mut last = read();
            eventually("quiet", || {
                std::thread::sleep(Duration::from_millis(60));
                std::mem::replace(&mut last, read()) == last
            });
            last
        };
        let active = |what: &dyn Fn()| {
            let before = wait_until_quiet();
            what();
            let after = wait_until_quiet();
            activity_between(&before, &after)
        };
        let to4 = SocketAddr::from((ns.v4, 80));
        let to6 = SocketAddr::from((ns.v6, 80));
        let closed = SocketAddr::from((ns.v4, 99));

        assert!(!active(&|| {}));
        assert!(
            !active(&|| for _ in 0..10 {
                drop(TcpStream::connect(to4).unwrap())
            }),
            "connect and close, IPv4"
        );
        assert!(
            !active(&|| for _ in 0..10 {
                drop(TcpStream::connect(to6).unwrap())
            }),
            "connect and close, IPv6"
        );
        assert!(
            !active(&|| for _ in 0..10 {
                assert!(TcpStream::connect(closed).is_err())
            }),
            "closed port"
        );
        assert!(
            !active(&|| {
                let reset = TcpStream::connect(to4).unwrap();
                sockopt::set_socket_linger(&reset, Some(Duration::ZERO)).unwrap();
            }),
            "connect and reset"
        );
        let send = |to: SocketAddr, text: &[u8]| TcpStream::connect(to).unwrap().write_all(text).unwrap();
        assert!(active(&|| send(to4, b"GET / HTTP/1.0\r\n\r\n")), "a request without an answer, IPv4");
        assert!(active(&|| send(to6, b"GET / HTTP/1.0\r\n\r\n")), "a request without an answer, IPv6");
        assert!(active(&|| send(to4, b"x")), "one byte");
        let stream = TcpStream::connect(to4).unwrap();
        assert!(active(&|| (&stream).write_all(b"more").unwrap()), "bytes on an old connection");
        let asker = UdpSocket::bind("0.0.0.0:0").unwrap();
        assert!(!active(&|| {}));
        let ask = || {
            asker.send_to(b"?", (ns.v4, 53)).unwrap();
            udp.recv(&mut [0; 10]).unwrap();
        };
        assert!(active(&ask), "a datagram");
    });
}
