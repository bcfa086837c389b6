//! What a proc whose egress is limited may call, and that it is known what it was refused.

mod lab;

use kip_net::nat::{Allowed, Forward, Network, Published, RefusedCall};
use kip_net::{Nat, NetPool, Slot};
use kip_types::{Protocol, Realm};
use lab::*;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

/// Protocol, an address or the first and the last of some, ports.
fn allowed(proto: Option<Protocol>, addresses: &str, ports: Option<(u16, u16)>) -> Allowed {
    let (first, last) = addresses.split_once('-').unwrap_or((addresses, addresses));
    Allowed { addresses: (first.parse().unwrap(), last.parse().unwrap()), ports, proto }
}

fn of(network: Option<&str>, slot: Slot, host_port: Option<u16>, egress: Option<Vec<Allowed>>) -> Published {
    let network = network.map(|name| Network { realm: Realm::default(), name: name.to_owned() });
    let port = |proto| Forward { proto, host_port, host_addr: None, port: 80 };
    Published {
        slot,
        network,
        ports: [Protocol::Tcp, Protocol::Udp].map(port).to_vec(),
        egress,
        alone: false,
        held: false,
    }
}

fn refused(slot: Slot, to: &str, port: Option<(Protocol, u16)>) -> RefusedCall {
    RefusedCall { slot, to: to.parse().unwrap(), port }
}

fn reaches(to: &str) {
    for (how, answer) in [("tcp", tcp(to, LONG)), ("udp", udp(to, LONG))] {
        answer.unwrap_or_else(|e| panic!("{how} {to}: {e}"));
    }
}

fn is_refused(to: &str) {
    for (how, answer) in [("tcp", tcp(to, SHORT)), ("udp", udp(to, SHORT))] {
        assert!(answer.is_err(), "{how} {to} answered {answer:?}");
    }
}

// promise sandbox: a proc with limited egress begins no connection but to declared ports of its
//   network and to what its rules name, by TCP, UDP and ICMP, of both families; ports of its host
//   and its own published ones are no exception
// held by: this, `kip_net::nat::allowed::tests::each_packet_is_in_one_box_or_none`
#[test]
fn what_is_not_named_is_refused_and_known() {
    on_machine(|machine| {
        let i = instance(6);
        let pool = NetPool::new(i).unwrap();
        let nat = Nat::open(i, &machine.memory(), &[], &[]).unwrap();
        let red = proc_with_server(&pool, 1, "red");
        let mate = proc_with_server(&pool, 2, "mate");
        let other = proc_with_server(&pool, 3, "other");
        nat.publish(of(Some("net"), mate.slot, None, None)).unwrap();
        nat.publish(of(None, other.slot, Some(8003), None)).unwrap();
        serve(machine.outside.as_fd(), "outside", 80);
        serve(machine.outside.as_fd(), "outside", 81);
        serve(machine.outside.as_fd(), "names", 53);
        let (out4, out6) = (format!("{OUTSIDE4}:80"), format!("[{OUTSIDE6}]:80"));
        let mates = kip_net::Addresses::of(i, mate.slot);

        // Nothing.
        nat.publish(of(Some("net"), red.slot, Some(8001), Some(vec![]))).unwrap();
        let never = [
            out4.clone(),
            out6.clone(),
            format!("{OUTSIDE4}:53"),
            format!("{HOST4}:8003"),
            format!("[{HOST6}]:8003"),
            format!("{HOST4}:8001"),
            format!("{}:8003", i.gateway_v4()),
        ];
        within(red.fd.as_fd(), || {
            never.iter().for_each(|to| is_refused(to));
            reaches(&format!("{}:80", mates.v4));
            reaches(&format!("[{}]:80", mates.v6));
            for to in [OUTSIDE4, OUTSIDE6, &i.gateway_v4().to_string()] {
                assert!(!pings(to, SHORT), "{to}");
            }
        });
        let told = nat.take_refused().unwrap();
        let gateway = i.gateway_v4().to_string();
        for (to, port) in [
            (OUTSIDE4, 80),
            (OUTSIDE6, 80),
            (OUTSIDE4, 53),
            (HOST4, 8003),
            (HOST6, 8003),
            (HOST4, 8001),
            (gateway.as_str(), 8003),
        ] {
            for proto in [Protocol::Tcp, Protocol::Udp] {
                assert!(told.contains(&refused(red.slot, to, Some((proto, port)))), "{proto} {to} {port}: {told:?}");
            }
        }
        for to in [OUTSIDE4, OUTSIDE6, gateway.as_str()] {
            assert!(told.contains(&refused(red.slot, to, None)), "a ping of {to}: {told:?}");
        }
        assert!(told.iter().all(|refused| refused.slot == red.slot));
        assert_eq!(nat.take_refused().unwrap(), [], "it is told once");
        // It is reached as before, and so is the outside by the others.
        reaches("127.0.0.1:8001");
        within(other.fd.as_fd(), || reaches(&format!("{HOST4}:8001")));
        within(mate.fd.as_fd(), || {
            reaches(&out4);
            reaches(&out6);
        });

        // Some of it: rules that overlap, both families, one protocol.
        let some = vec![
            allowed(Some(Protocol::Tcp), "198.18.0.0-198.18.0.255", Some((80, 80))),
            allowed(None, OUTSIDE4, Some((79, 80))),
            allowed(Some(Protocol::Udp), OUTSIDE6, None),
            allowed(None, HOST4, Some((8003, 8003))),
        ];
        nat.allow(red.slot, some).unwrap();
        within(red.fd.as_fd(), || {
            reaches(&out4);
            reaches(&format!("{HOST4}:8003"));
            is_refused(&format!("{OUTSIDE4}:81"));
            is_refused(&format!("{HOST4}:8001"));
            assert!(udp(&out6, LONG).is_ok() && tcp(&out6, SHORT).is_err());
            assert!(!pings(OUTSIDE4, SHORT));
        });

        // All of one address, and again less; after a restart of the daemon the same.
        nat.allow(red.slot, vec![allowed(None, OUTSIDE4, None)]).unwrap();
        let now = || {
            within(red.fd.as_fd(), || {
                reaches(&out4);
                reaches(&format!("{OUTSIDE4}:81"));
                assert!(pings(OUTSIDE4, LONG) && !pings(OUTSIDE6, SHORT));
                is_refused(&out6);
            });
        };
        now();
        drop(nat);
        let wanted = [
            of(Some("net"), mate.slot, None, None),
            of(Some("net"), red.slot, Some(8001), Some(vec![allowed(None, OUTSIDE4, None)])),
        ];
        let nat = Nat::open(i, &machine.memory(), &[], &wanted).unwrap();
        now();
        // Another program removes all rules.
        run("nft", "flush ruleset");
        assert!(nat.mend().unwrap());
        now();
        run("nft", "flush ruleset");
        nat.allow(red.slot, vec![allowed(None, OUTSIDE6, None)]).unwrap();
        within(red.fd.as_fd(), || {
            reaches(&out6);
            is_refused(&out4);
        });
        // The slot's next proc may call all.
        nat.unpublish(&[red.slot]).unwrap();
        nat.publish(of(None, red.slot, Some(8001), None)).unwrap();
        nat.allow(red.slot, vec![]).unwrap();
        within(red.fd.as_fd(), || {
            reaches(&out4);
            reaches(&out6);
        });
        nat.remove_all().unwrap();
    });
}

/// It tries many addresses: all are refused, also those that there is no room to note.
#[test]
fn a_scan_is_refused_whatever_is_noted() {
    on_machine(|machine| {
        let i = instance(6);
        let pool = NetPool::new(i).unwrap();
        let nat = Nat::open(i, &machine.memory(), &[], &[]).unwrap();
        let red = proc_with_server(&pool, 1, "red");
        nat.publish(of(None, red.slot, None, Some(vec![]))).unwrap();
        serve(machine.outside.as_fd(), "outside", 80);
        within(red.fd.as_fd(), || {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            for port in 1..=6000u16 {
                // The refusal of an earlier one comes back here.
                let _ = socket.send_to(b"x", (OUTSIDE4, port));
            }
            is_refused(&format!("{OUTSIDE4}:80"));
        });
        let told = nat.take_refused().unwrap();
        assert!((4000..=4096).contains(&told.len()), "{}", told.len());
        let outside: IpAddr = OUTSIDE4.parse().unwrap();
        assert!(told.iter().all(|refused| refused.to == outside));
        within(red.fd.as_fd(), || is_refused(&format!("{OUTSIDE4}:80")));
        assert!(nat.take_refused().unwrap().contains(&refused(red.slot, OUTSIDE4, Some((Protocol::Tcp, 80)))));
        nat.remove_all().unwrap();
    });
}

/// Echo by a datagram socket, icmp(7), as a program without privileges does it.
fn pings(to: &str, patience: Duration) -> bool {
    use rustix::net::{AddressFamily, SocketType, ipproto, socket};
    let to: IpAddr = to.parse().unwrap();
    let (family, protocol, request) = match to {
        IpAddr::V4(_) => (AddressFamily::INET, ipproto::ICMP, 8),
        IpAddr::V6(_) => (AddressFamily::INET6, ipproto::ICMPV6, 128),
    };
    let fd = socket(family, SocketType::DGRAM, Some(protocol)).unwrap();
    let socket = UdpSocket::from(fd);
    socket.set_read_timeout(Some(patience)).unwrap();
    socket.send_to(&[request, 0, 0, 0, 0, 0, 0, 1], (to, 0)).is_ok() && socket.recv(&mut [0; 100]).is_ok()
}
