//! Which procs and machines reach which: every way in, and the ways that must not be.

mod lab;

use kip_net::nat::{Forward, Network, Published};
use kip_net::{Addresses, Nat, NetNs, NetPool, Slot};
use kip_types::{Protocol, Realm};
use lab::*;
use std::net::{IpAddr, TcpListener, UdpSocket};
use std::os::fd::AsFd;

fn both(host_port: u16) -> Vec<Forward> {
    [Protocol::Tcp, Protocol::Udp]
        .map(|proto| Forward { proto, host_port: Some(host_port), host_addr: None, port: 80 })
        .to_vec()
}

/// A proc of that network.
fn of(network: &str, slot: Slot, ports: Vec<Forward>) -> Published {
    let network = Network { realm: Realm::default(), name: network.to_owned() };
    Published { slot, network: Some(network), ports, egress: None, alone: false, held: false }
}

/// By both protocols the server `name` answers, and sees the caller as `seen` if that is given.
#[track_caller]
fn reaches(to: &str, name: &str, seen: Option<&str>) {
    for (how, answer) in [("tcp", tcp(to, LONG)), ("udp", udp(to, LONG))] {
        let answer = answer.unwrap_or_else(|e| panic!("{how} {to}: {e}"));
        let (who, peer) = answer.split_once(' ').unwrap();
        assert_eq!(who, name, "{how} {to}");
        if let Some(seen) = seen {
            assert_eq!(peer, seen, "{how} {to}");
        }
    }
}

#[track_caller]
fn does_not_reach(to: &str) {
    for (how, answer) in [("tcp", tcp(to, SHORT)), ("udp", udp(to, SHORT))] {
        assert!(answer.is_err(), "{how} {to} answered {answer:?}");
    }
}

#[test]
fn published_ports_are_reached_from_everywhere() {
    on_machine(|machine| {
        let i = instance(1);
        let pool = NetPool::new(i).unwrap();
        let nat = Nat::open(i, &machine.memory(), &[], &[]).unwrap();
        let a = proc_with_server(&pool, 1, "a");
        let b = proc_with_server(&pool, 2, "b");
        nat.publish(of("red", a.slot, both(8001))).unwrap();
        nat.publish(of("red", b.slot, both(8002))).unwrap();
        assert_eq!(run("sysctl", "-n net.ipv4.ip_forward").trim(), "0", "the global switch stays off");

        let gateway4 = i.gateway_v4().to_string();
        let gateway6 = i.gateway_v6().to_string();
        // From the host.
        reaches("127.0.0.1:8001", "a", Some(&gateway4));
        reaches("127.0.0.1:8002", "b", Some(&gateway4));
        reaches("127.9.9.9:8001", "a", Some(&gateway4));
        reaches("[::1]:8001", "a", Some(&gateway6));
        reaches("[::1]:8002", "b", Some(&gateway6));
        reaches(&format!("{HOST4}:8001"), "a", Some(HOST4));
        reaches(&format!("[{HOST6}]:8001"), "a", Some(HOST6));
        reaches(&format!("{}:80", a.v4), "a", Some(&gateway4));
        reaches(&format!("[{}]:80", a.v6), "a", Some(&gateway6));
        // From outside.
        within(machine.outside.as_fd(), || {
            reaches(&format!("{HOST4}:8001"), "a", Some(OUTSIDE4));
            reaches(&format!("{HOST4}:8002"), "b", Some(OUTSIDE4));
            reaches(&format!("[{HOST6}]:8001"), "a", Some(OUTSIDE6));
        });
        // From another proc of the network, and from itself.
        within(b.fd.as_fd(), || {
            reaches(&format!("{HOST4}:8001"), "a", Some(&b.v4.to_string()));
            reaches(&format!("[{HOST6}]:8001"), "a", Some(&b.v6.to_string()));
            reaches(&format!("{}:80", a.v4), "a", Some(&b.v4.to_string()));
            reaches(&format!("[{}]:80", a.v6), "a", Some(&b.v6.to_string()));
            reaches(&format!("{gateway4}:8001"), "a", Some(&b.v4.to_string()));
            reaches(&format!("{HOST4}:8002"), "b", Some(&gateway4));
            reaches(&format!("[{HOST6}]:8002"), "b", Some(&gateway6));
        });
        // Out.
        serve(machine.outside.as_fd(), "outside", 80);
        within(a.fd.as_fd(), || {
            reaches(&format!("{OUTSIDE4}:80"), "outside", Some(HOST4));
            reaches(&format!("[{OUTSIDE6}]:80"), "outside", Some(HOST6));
        });

        nat.unpublish(&[a.slot]).unwrap();
        does_not_reach("127.0.0.1:8001");
        does_not_reach("[::1]:8001");
        reaches("127.0.0.1:8002", "b", None);
        within(machine.outside.as_fd(), || does_not_reach(&format!("{HOST4}:8001")));
    });
}

// promise P14: private addresses behind NAT
// held by: this, `tests/test_ports.py::test_program_reaches_the_outside`
#[test]
fn procs_reach_nothing_else_of_the_host_or_of_other_networks() {
    on_machine(|machine| {
        let i = instance(2);
        let pool = NetPool::new(i).unwrap();
        let nat = Nat::open(i, &machine.memory(), &[], &[]).unwrap();
        let red = proc_with_server(&pool, 1, "red");
        let blue = proc_with_server(&pool, 2, "blue");
        let mate = pool.take(slot(3)).unwrap();
        let nobody = pool.take(slot(4)).unwrap();
        nat.publish(of("red", red.slot, both(8001))).unwrap();
        nat.publish(of("blue", blue.slot, both(8002))).unwrap();
        nat.publish(of("red", mate.slot, vec![])).unwrap();
        serve(red.fd.as_fd(), "undeclared", 81);

        // Services of the host: on loopback, and on all addresses.
        serve_on("127.0.0.1:7001");
        serve_on("[::1]:7001");
        serve_on("0.0.0.0:7002");
        serve_on("[::]:7003");
        serve_on("[::]:53");
        assert!(tcp("127.0.0.1:7001", LONG).is_ok() && tcp("[::1]:7001", LONG).is_ok());
        let (gateway4, gateway6) = (i.gateway_v4(), i.gateway_v6());
        within(red.fd.as_fd(), || {
            for port in [7001, 7002, 7003] {
                for host in ["127.0.0.1", "[::1]", HOST4, &format!("[{HOST6}]")] {
                    does_not_reach(&format!("{host}:{port}"));
                }
                does_not_reach(&format!("{gateway4}:{port}"));
                does_not_reach(&format!("[{gateway6}]:{port}"));
            }
            bound_to_eth0_does_not_reach("127.0.0.1:7001");
            bound_to_eth0_does_not_reach("[::1]:7001");
            assert!(tcp(&format!("{HOST4}:53"), LONG).is_ok(), "DNS of the host is open");
            assert!(tcp(&format!("[{gateway6}]:53"), LONG).is_ok(), "DNS of the host is open");
            assert!(pings(gateway4), "the host answers pings");
        });
        // Other networks: only by what is published.
        within(blue.fd.as_fd(), || {
            assert!(tcp(&format!("{HOST4}:8001"), LONG).is_ok());
            does_not_reach(&format!("{}:80", red.v4));
            does_not_reach(&format!("[{}]:80", red.v6));
        });
        within(nobody.fd.as_fd(), || does_not_reach(&format!("{}:80", red.v4)));
        // The same network: only declared ports.
        within(mate.fd.as_fd(), || {
            reaches(&format!("{}:80", red.v4), "red", None);
            does_not_reach(&format!("{}:81", red.v4));
            does_not_reach(&format!("[{}]:81", red.v6));
        });
        // The outside knows the way but may not walk it.
        let net = format!("10.213.{}.0/21", 8 * i.number());
        within(machine.outside.as_fd(), || {
            ip(&format!("route add {net} via {HOST4}"));
            does_not_reach(&format!("{}:80", red.v4));
        });
        // A source address that is not one's own.
        within(red.fd.as_fd(), || {
            ip(&format!("addr add {}/32 dev eth0", nobody.v4));
            let socket = UdpSocket::bind((nobody.v4, 0)).unwrap();
            socket.send_to(b"x", (gateway4, 53)).unwrap();
        });
        let dropped = || run("nft", "list chain inet kip_2 guard");
        eventually("it is counted", || dropped().contains("oif missing counter packets 1 "));
    });
}

/// A proc of the matrix: its network, and where its port 80 is published.
struct One {
    number: u16,
    network: Option<&'static str>,
    at: Option<Option<IpAddr>>,
    ns: NetNs,
}

// promise sandbox: procs reach each other over a network that both name and by published ports
//   only: every pair by every way, declared, undeclared, published everywhere, at the loopback, not
//   at all
#[test]
fn every_pair_of_procs() {
    on_machine(|machine| {
        let i = instance(4);
        let pool = NetPool::new(i).unwrap();
        let nat = Nat::open(i, &machine.memory(), &[], &[]).unwrap();
        let loopback: IpAddr = "127.0.0.1".parse().unwrap();
        let networks = [None, Some("red"), Some("red"), Some("blue")];
        let ways = [None, Some(None), Some(Some(loopback))];
        let kinds = networks.into_iter().flat_map(|network| ways.map(|at| (network, at)));
        let make = |(number, (network, at)): (u16, (Option<&'static str>, Option<Option<IpAddr>>))| {
            let ns = proc_with_server(&pool, number, Box::leak(format!("p{number}").into_boxed_str()));
            serve(ns.fd.as_fd(), "undeclared", 81);
            let host_port = at.map(|_| 8000 + number);
            let forward = |proto| Forward { proto, host_port, host_addr: at.flatten(), port: 80 };
            let ports = [Protocol::Tcp, Protocol::Udp].map(forward).to_vec();
            let realm = Realm::default();
            let of = network.map(|name| Network { realm, name: name.to_owned() });
            nat.publish(Published { slot: ns.slot, network: of, ports, egress: None, alone: false, held: false })
                .unwrap();
            One { number, network, at, ns }
        };
        let all: Vec<One> = (1..).zip(kinds).map(make).collect();
        let from = |from: &One| {
            within(from.ns.fd.as_fd(), || {
                for to in all.iter().filter(|to| to.number != from.number) {
                    let expect = |reached: bool, address: String| match reached {
                        true => reaches(&address, &format!("p{}", to.number), None),
                        false => does_not_reach(&address),
                    };
                    let (mates, host_port) = (from.network.is_some() && from.network == to.network, 8000 + to.number);
                    expect(mates, format!("{}:80", to.ns.v4));
                    expect(mates, format!("[{}]:80", to.ns.v6));
                    expect(false, format!("{}:81", to.ns.v4));
                    expect(to.at == Some(None), format!("{HOST4}:{host_port}"));
                    expect(false, format!("127.0.0.1:{host_port}"));
                }
            });
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = all.iter().map(|one| scope.spawn(|| from(one))).collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        // The host reaches all that is published, and each by its own address.
        for to in &all {
            reaches(&format!("{}:80", to.ns.v4), &format!("p{}", to.number), None);
            if to.at.is_some() {
                reaches(&format!("127.0.0.1:{}", 8000 + to.number), &format!("p{}", to.number), None);
            }
        }
    });
}

// promise sandbox: a proc reaches no link-local address and none where clouds tell machines their
//   secrets, but for name servers there
#[test]
fn machines_secrets_are_out_of_reach() {
    on_machine(|machine| {
        let i = instance(4);
        let pool = NetPool::new(i).unwrap();
        let nat = Nat::open(i, &machine.memory(), &[], &[]).unwrap();
        let red = proc_with_server(&pool, 1, "red");
        nat.publish(of("red", red.slot, vec![])).unwrap();
        let addresses = [
            "169.254.169.254",
            "169.254.170.2",
            "100.100.100.200",
            "168.63.129.16",
            "fd00:ec2::254",
            "fd20:ce::254",
            "fd00:c1::a9fe:a9fe",
            "fd00:a9fe:a9fe::1",
            "fd00:42::42",
        ];
        within(machine.outside.as_fd(), || {
            for address in addresses {
                let length = if address.contains(':') { 128 } else { 32 };
                ip(&format!("addr add {address}/{length} dev lo"));
            }
        });
        serve(machine.outside.as_fd(), "secrets", 80);
        serve(machine.outside.as_fd(), "names", 53);
        for address in addresses {
            let (via, length) = if address.contains(':') { (OUTSIDE6, 128) } else { (OUTSIDE4, 32) };
            ip(&format!("route add {address}/{length} via {via}"));
        }
        for address in addresses.map(|a| if a.contains(':') { format!("[{a}]") } else { a.to_owned() }) {
            let secrets = |patience| tcp(&format!("{address}:80"), patience);
            assert!(secrets(LONG).is_ok(), "{address} is there");
            within(red.fd.as_fd(), || {
                assert!(secrets(SHORT).is_err(), "{address}");
                assert!(tcp(&format!("{address}:53"), LONG).is_ok(), "{address}: name servers");
            });
        }
        within(red.fd.as_fd(), || reaches(&format!("{OUTSIDE4}:80"), "secrets", None));
        // Another program of the machine leads the address elsewhere.
        run("nft", "add table ip other");
        run("nft", "add chain ip other to { type nat hook prerouting priority dstnat - 1; }");
        run("nft", &format!("add rule ip other to ip daddr 169.254.169.254 tcp dport 80 dnat to {OUTSIDE4}:80"));
        within(red.fd.as_fd(), || assert!(tcp("169.254.169.254:80", SHORT).is_err(), "led elsewhere"));
        run("nft", "delete table ip other");
    });
}

#[test]
fn who_is_alone_reaches_nobody_and_is_reached_by_the_host_only() {
    on_machine(|machine| {
        let i = instance(2);
        let pool = NetPool::new(i).unwrap();
        let nat = Nat::open(i, &machine.memory(), &[], &[]).unwrap();
        let alone = proc_with_server(&pool, 1, "alone");
        let other = proc_with_server(&pool, 2, "other");
        let published = Published { alone: true, ..of("red", alone.slot, both(8001)) };
        nat.publish(published.clone()).unwrap();
        nat.publish(of("red", other.slot, both(8002))).unwrap();
        serve_on("[::]:53");
        serve(machine.outside.as_fd(), "outside", 80);
        let check = || {
            within(alone.fd.as_fd(), || {
                reaches(&format!("{}:80", alone.v4), "alone", None);
                for to in [&format!("{}:80", other.v4), &format!("[{}]:80", other.v6), &format!("{HOST4}:8002")] {
                    does_not_reach(to);
                }
                does_not_reach(&format!("{HOST4}:53"));
                does_not_reach(&format!("[{}]:53", i.gateway_v6()));
                does_not_reach(&format!("{OUTSIDE4}:80"));
                assert!(!pings(i.gateway_v4()), "not even a ping");
            });
            within(other.fd.as_fd(), || {
                does_not_reach(&format!("{}:80", alone.v4));
                does_not_reach(&format!("{HOST4}:8001"));
                reaches(&format!("{OUTSIDE4}:80"), "outside", None);
            });
            within(machine.outside.as_fd(), || does_not_reach(&format!("{HOST4}:8001")));
            reaches(&format!("{}:80", alone.v4), "alone", None);
            reaches(&format!("[{}]:80", alone.v6), "alone", None);
        };
        check();
        nat.sync(&[published, of("red", other.slot, both(8002))]).unwrap();
        check();
    });
}

/// ICMP echo by a datagram socket, icmp(7), as a program without privileges does it.
fn pings(to: std::net::Ipv4Addr) -> bool {
    use rustix::net::{AddressFamily, SocketType, ipproto, socket};
    let fd = socket(AddressFamily::INET, SocketType::DGRAM, Some(ipproto::ICMP)).unwrap();
    let socket = UdpSocket::from(fd);
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket.send_to(&[8, 0, 0, 0, 0, 0, 0, 1], (to, 0)).unwrap();
    socket.recv(&mut [0; 100]).is_ok()
}

fn serve_on(address: &'static str) {
    let tcp = TcpListener::bind(address).unwrap();
    let udp = UdpSocket::bind(address).unwrap();
    std::thread::spawn(move || {
        let mut buffer = [0; 100];
        while let Ok((_, peer)) = udp.recv_from(&mut buffer) {
            let _ = udp.send_to(b"host", peer);
        }
    });
    std::thread::spawn(move || {
        for stream in tcp.incoming() {
            use std::io::{Read, Write};
            let Ok(mut stream) = stream else { return };
            let _ = stream.read(&mut [0; 10]);
            let _ = stream.write_all(b"host");
        }
    });
}

/// SO_BINDTODEVICE needs no privilege and makes loopback addresses leave by a real interface.
#[track_caller]
fn bound_to_eth0_does_not_reach(to: &str) {
    let to: std::net::SocketAddr = to.parse().unwrap();
    let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).unwrap();
    kip_sys::sock::bind_to_device(socket.as_fd(), "eth0").unwrap();
    socket.set_read_timeout(Some(SHORT)).unwrap();
    if socket.send_to(b"x", to).is_ok() {
        assert!(socket.recv(&mut [0; 10]).is_err(), "{to} answered");
    }
    // Even without the route inside that forbids it, the host drops it.
    if to.is_ipv4() {
        ip("route del blackhole 127.0.0.0/8");
        socket.send_to(b"x", to).unwrap();
        assert!(socket.recv(&mut [0; 10]).is_err(), "{to} answered");
        ip("route add blackhole 127.0.0.0/8");
    }
}

// promise recovery: rules of dead procs go, those of live ones never do
#[test]
fn rules_are_recovered_and_leave_nothing_behind() {
    on_machine(|machine| {
        let i = instance(3);
        let state = || (ip("-o link"), ip("addr show lo"), run("nft", "list ruleset"), forwarding_settings());
        let before = state();
        let pool = NetPool::new(i).unwrap();
        let published = |n: u16, name: &str| of(name, slot(n), both(8000 + n));
        let nat = Nat::open(i, &machine.memory(), &[], &[]).unwrap();
        let procs = [(1, "a"), (2, "b"), (3, "c")].map(|(n, name)| proc_with_server(&pool, n, name));
        for (n, name) in [(1, "one"), (2, "two"), (3, "two")] {
            let p = published(n, name);
            nat.publish(p).unwrap();
        }
        assert!(nat.publish(of("one", slot(1), both(8003))).is_err(), "a port leads to one proc");
        let groups = || ip("-o link show type veth");
        let groups_before = groups();

        // The daemon dies; the next one finds the third proc gone and the others as they were.
        std::mem::forget(nat);
        let nat = Nat::open(i, &machine.memory(), &[], &[published(1, "one"), published(2, "two")]).unwrap();
        reaches("127.0.0.1:8001", "a", None);
        reaches("[::1]:8002", "b", None);
        does_not_reach("127.0.0.1:8003");
        let same = |text: &str| text.lines().filter(|l| l.contains("kp3-1") || l.contains("kp3-2")).count();
        assert_eq!(same(&groups_before), same(&groups()));

        // Another program flushes the machine's rules; the next change puts all of them back.
        run("nft", "flush ruleset");
        does_not_reach("127.0.0.1:8001");
        nat.publish(of("two", slot(3), both(8003))).unwrap();
        reaches("127.0.0.1:8001", "a", None);
        reaches("127.0.0.1:8003", "c", None);
        within(procs[2].fd.as_fd(), || reaches(&format!("{}:80", procs[1].v4), "b", None));
        // Or `mend`, when it looks.
        assert!(!nat.mend().unwrap(), "they are there");
        run("nft", "flush ruleset");
        assert!(nat.mend().unwrap() && !nat.mend().unwrap());
        reaches("127.0.0.1:8001", "a", None);
        reaches("127.0.0.1:8003", "c", None);

        // A crash of every process but the one that holds the namespaces.
        std::mem::forget(pool);
        let pool = NetPool::new(i).unwrap();
        assert_eq!(pool.sweep(&[slot(1)]).unwrap(), 2);
        assert!(!ip("-o link").contains("kp3-2"));
        reaches("127.0.0.1:8001", "a", None);
        pool.release(&[slot(1), slot(7)]).unwrap();
        drop(procs);
        pool.remove_all().unwrap();
        nat.remove_all().unwrap();
        Nat::remove(i, &machine.memory()).unwrap();
        assert_eq!(before, state());
        assert!(!machine.memory().exists());
    });
}

#[test]
fn a_client_that_never_stops_asking_finds_the_newest_proc() {
    on_machine(|machine| {
        let i = instance(6);
        let pool = NetPool::new(i).unwrap();
        let nat = Nat::open(i, &machine.memory(), &[], &[]).unwrap();
        let a = proc_with_server(&pool, 1, "a");
        let b = proc_with_server(&pool, 2, "b");
        for (to, bind) in [(HOST4, "0.0.0.0:5000"), (HOST6, "[::]:5000")] {
            within(machine.outside.as_fd(), || {
                let client = UdpSocket::bind(bind).unwrap();
                client.connect((to, 8001)).unwrap();
                client.set_read_timeout(Some(LONG)).unwrap();
                let ask = || {
                    client.send(b"who")?;
                    let mut buffer = [0; 100];
                    let n = client.recv(&mut buffer)?;
                    Ok::<_, std::io::Error>(String::from_utf8_lossy(&buffer[..n])[..1].to_owned())
                };
                ask().expect_err("nobody is there yet");
                on_host(machine, || nat.publish(of("red", a.slot, both(8001))).unwrap());
                assert_eq!(ask().unwrap(), "a");
                on_host(machine, || {
                    nat.unpublish(&[a.slot]).unwrap();
                    nat.publish(of("red", b.slot, both(8001))).unwrap();
                });
                assert_eq!(ask().unwrap(), "b");
                on_host(machine, || nat.unpublish(&[b.slot]).unwrap());
                ask().expect_err("nobody is there any more");
            });
        }
        // Only what led to the proc is forgotten.
        nat.publish(of("red", a.slot, both(8001))).unwrap();
        nat.publish(of("red", b.slot, both(8002))).unwrap();
        within(machine.outside.as_fd(), || {
            for host in [HOST4.to_owned(), format!("[{HOST6}]")] {
                reaches(&format!("{host}:8001"), "a", None);
                reaches(&format!("{host}:8002"), "b", None);
            }
        });
        nat.unpublish(&[a.slot]).unwrap();
        let flows = std::fs::read_to_string("/proc/thread-self/net/nf_conntrack").unwrap();
        let to = |port| flows.lines().filter(|l| l.contains("udp") && l.contains(port)).count();
        assert_eq!((to("dport=8001"), to("dport=8002")), (0, 2), "{flows}");
    });
}

fn on_host<T: Send>(machine: &Machine, what: impl FnOnce() -> T + Send) -> T {
    within(machine.host.as_fd(), what)
}

fn forwarding_settings() -> String {
    let all = run("sysctl", "-a");
    all.lines().filter(|l| l.contains("forwarding") || l.contains("localnet")).collect::<Vec<_>>().join("\n")
}

// promise sandbox: forwarding settings of the machine are put back
#[test]
fn the_last_instance_puts_forwarding_back() {
    on_machine(|machine| {
        let before = forwarding_settings();
        let first = Nat::open(instance(4), &machine.memory(), &[], &[]).unwrap();
        let during = forwarding_settings();
        assert_ne!(before, during);
        let second = Nat::open(instance(5), &machine.memory(), &[], &[]).unwrap();
        first.remove_all().unwrap();
        assert_eq!(during, forwarding_settings());
        second.remove_all().unwrap();
        assert_eq!(before, forwarding_settings());
    });
}

// promise sandbox: an interface that comes after the start is forwarded from once a default route
//   leads there, within 5 s
#[test]
fn an_interface_that_comes_later_is_forwarded_from() {
    on_machine(|machine| {
        let before = forwarding_settings();
        let nat = Nat::open(instance(4), &machine.memory(), &[], &[]).unwrap();
        assert!(!nat.follow_uplinks().unwrap(), "nothing has come");
        ip("link add later type veth peer name later-peer");
        ip("addr add 192.0.2.77/24 dev later");
        ip("link set later-peer up");
        ip("link set later up");
        assert!(!nat.follow_uplinks().unwrap(), "the outside does not come by it");
        ip("route add default via 192.0.2.1 dev later metric 50");
        let read = || std::fs::read_to_string("/proc/sys/net/ipv4/conf/later/forwarding").unwrap();
        assert_eq!(read(), "0\n");
        assert!(nat.follow_uplinks().unwrap());
        assert_eq!(read(), "1\n");
        assert!(!nat.follow_uplinks().unwrap(), "once");
        nat.close();
        nat.remove_all().unwrap();
        assert_eq!(read(), "0\n");
        ip("link del later");
        assert_eq!(before, forwarding_settings());
    });
}

// promise sandbox: several data directories side by side
// held by: this (rules only)
#[test]
fn two_instances_stand_side_by_side() {
    on_machine(|machine| {
        let make = |n| {
            let pool = NetPool::new(instance(n)).unwrap();
            let nat = Nat::open(instance(n), &machine.memory(), &[], &[]).unwrap();
            (pool, nat)
        };
        let (pool1, nat1) = make(1);
        let (pool10, nat10) = make(10);
        let a = proc_with_server(&pool1, 1, "a");
        let b = proc_with_server(&pool10, 1, "b");
        nat1.publish(of("red", a.slot, both(8001))).unwrap();
        nat10.publish(of("red", b.slot, both(8002))).unwrap();
        reaches("127.0.0.1:8001", "a", None);
        reaches("[::1]:8002", "b", None);
        within(a.fd.as_fd(), || {
            assert!(tcp(&format!("{HOST4}:8002"), LONG).is_ok(), "what is published is for all");
            does_not_reach(&format!("{}:80", b.v4));
        });
        pool1.sweep(&[]).unwrap();
        reaches("127.0.0.1:8002", "b", None);
        assert_ne!(Addresses::of(instance(1), a.slot), Addresses::of(instance(10), b.slot));
    });
}

#[test]
fn a_namespace_carries_packets_as_soon_as_it_is_taken() {
    on_machine(|_| {
        let pool = NetPool::new(instance(7)).unwrap();
        for number in 1..60 {
            let ns = pool.take(slot(number)).unwrap();
            let inside = within(ns.fd.as_fd(), || UdpSocket::bind("[::]:9").unwrap());
            inside.set_read_timeout(Some(LONG)).unwrap();
            for bind in ["[::]:0", "0.0.0.0:0"] {
                let outside = UdpSocket::bind(bind).unwrap();
                outside.set_read_timeout(Some(LONG)).unwrap();
                let to = if bind.starts_with('[') { ns.v6.into() } else { std::net::IpAddr::V4(ns.v4) };
                outside.send_to(b"there", (to, 9)).unwrap();
                let (_, peer) = inside.recv_from(&mut [0; 10]).unwrap_or_else(|e| panic!("to {to}: {e}"));
                inside.send_to(b"back", peer).unwrap();
                outside.recv(&mut [0; 10]).unwrap_or_else(|e| panic!("from {to}: {e}"));
            }
        }
    });
}

// promise sandbox: network namespaces come from a pool
#[test]
fn a_pool_makes_what_is_announced() {
    on_machine(|_| {
        let pool = NetPool::new(instance(8)).unwrap();
        pool.prefill(&[slot(1), slot(2), slot(1)]);
        eventually("two are ready", || pool.ready() == 2);
        let one = pool.take(slot(1)).unwrap();
        assert_eq!(one.ifname, "kp8-1");
        assert!(ip("-o link").contains("kp8-2"));
        // Settings inside, and which users may bind which ports.
        within(one.fd.as_fd(), || {
            assert_eq!(run("sysctl", "-n net.ipv4.ip_unprivileged_port_start").trim(), "0");
            assert_eq!(run("sysctl", "-n net.mptcp.enabled").trim(), "0");
            assert_eq!(run("sysctl", "-n net.core.somaxconn").trim(), "4096");
        });
        // It has a small table of TCP connections, and what the kernel derives from its size is as
        // outside.
        let derived = || run("sysctl", "-n net.ipv4.tcp_max_tw_buckets net.ipv4.tcp_max_syn_backlog");
        let outside = derived();
        within(one.fd.as_fd(), || {
            assert_eq!(run("sysctl", "-n net.ipv4.tcp_ehash_entries").trim(), "2048");
            assert_eq!(derived(), outside);
        });
        assert_eq!(run("sysctl", "-n net.ipv4.tcp_child_ehash_entries").trim(), "0", "the machine's is as it was");
        // A link of that name is in the way, as after a crash: it goes.
        pool.release(&[slot(2)]).unwrap();
        ip("link add kp8-2 type veth peer name other");
        assert_eq!(pool.take(slot(2)).unwrap().v4, Addresses::of(instance(8), slot(2)).v4);
        // What was announced and never taken goes with the pool.
        pool.prefill(&[slot(3)]);
        eventually("one is ready", || pool.ready() == 1);
        drop(pool);
        assert!(!ip("-o link").contains("kp8-3"));
    });
}
