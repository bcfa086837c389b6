//! A port passes from one proc to another while clients ask, and clients of a proc that is held
//! wait.

mod lab;

use kip_net::nat::{Forward, Published};
use kip_net::{Nat, NetPool, Slot};
use kip_types::Protocol;
use lab::*;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

fn of(slot: Slot, host_port: Option<u16>, held: bool) -> Published {
    let port = |proto| Forward { proto, host_port, host_addr: None, port: 80 };
    let ports = [Protocol::Tcp, Protocol::Udp].map(port).to_vec();
    Published { slot, network: None, ports, egress: None, alone: false, held }
}

/// From outside and from the machine itself.
const WAYS: [&str; 3] = [HOST4, HOST6, "127.0.0.1"];

fn ask(machine: &Machine, way: &str) -> std::io::Result<String> {
    let to = if way.contains(':') { format!("[{way}]:8001") } else { format!("{way}:8001") };
    match way == "127.0.0.1" {
        true => tcp(&to, LONG),
        false => within(machine.outside.as_fd(), || tcp(&to, LONG)),
    }
}

// promise waking: a published port passes from one proc to another in one step: no connection is
//   refused by it
#[test]
fn a_port_passes_without_a_refusal() {
    on_machine(|machine| {
        let pool = NetPool::new(instance(6)).unwrap();
        let nat = Nat::open(instance(6), &machine.memory(), &[], &[]).unwrap();
        let procs = [proc_with_server(&pool, 1, "a"), proc_with_server(&pool, 2, "b")];
        nat.publish_all(vec![of(procs[0].slot, Some(8001), false), of(procs[1].slot, None, false)]).unwrap();
        let (over, answers) = (AtomicBool::new(false), AtomicUsize::new(0));
        within_this(|ours| {
            std::thread::scope(|scope| {
                let client = scope.spawn(|| {
                    kip_sys::netns::enter_net(ours).unwrap();
                    while !over.load(Ordering::SeqCst) {
                        tcp("127.0.0.1:8001", LONG).expect("a server is there at every moment");
                        answers.fetch_add(1, Ordering::SeqCst);
                    }
                });
                for turn in 1..=20 {
                    let seen = answers.load(Ordering::SeqCst);
                    let (gives, gets) = (&procs[(turn + 1) % 2], &procs[turn % 2]);
                    nat.publish_all(vec![of(gives.slot, None, false), of(gets.slot, Some(8001), false)]).unwrap();
                    for way in WAYS {
                        assert_eq!(ask(machine, way).unwrap()[..1], *["a", "b"][turn % 2], "{way}");
                    }
                    eventually("a client asks", || answers.load(Ordering::SeqCst) > seen + 2);
                }
                over.store(true, Ordering::SeqCst);
                client.join().unwrap();
            });
        });
        let twice = vec![of(procs[0].slot, Some(8001), false), of(procs[1].slot, Some(8001), false)];
        nat.publish_all(twice).expect_err("one port leads to one proc");
        assert!(ask(machine, HOST4).is_ok());
    });
}

// promise install: no connection is refused while another daemon puts its rules in place of the
//   last one's
#[test]
fn rules_are_replaced_under_clients() {
    on_machine(|machine| {
        let pool = NetPool::new(instance(6)).unwrap();
        let nat = Nat::open(instance(6), &machine.memory(), &[], &[]).unwrap();
        let proc = proc_with_server(&pool, 1, "a");
        let published = [of(proc.slot, Some(8001), false)];
        nat.publish_all(published.to_vec()).unwrap();
        let (over, connected) = (AtomicBool::new(false), AtomicUsize::new(0));
        within_this(|ours| {
            std::thread::scope(|scope| {
                let ask = || {
                    kip_sys::netns::enter_net(ours).unwrap();
                    while !over.load(Ordering::SeqCst) {
                        let client = TcpStream::connect("127.0.0.1:8001").expect("the port leads to the proc always");
                        // Ports of clients do not run out.
                        rustix::net::sockopt::set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
                        connected.fetch_add(1, Ordering::SeqCst);
                    }
                };
                let clients = [scope.spawn(ask), scope.spawn(ask)];
                let end = SetAtEnd(&over);
                // Enough clients meet a replacement, however slow the machine is.
                let mut rounds = 0;
                while rounds < 80 || connected.load(Ordering::SeqCst) <= 1000 {
                    rounds += 1;
                    nat.sync(&published).unwrap();
                    assert!(clients.iter().all(|client| !client.is_finished()), "a client was refused");
                }
                drop(end);
            });
        });
        assert!(!run("nft", "list tables").contains("standby"));
    });
}

// A daemon that was killed while it replaced the rules leaves the second table.
#[test]
fn a_standby_table_that_was_left_goes() {
    on_machine(|machine| {
        let left = || run("nft", "list tables").contains("kip_6_standby");
        let leave = || {
            run("nft", "add table inet kip_6_standby");
            assert!(left());
        };
        leave();
        let nat = Nat::open(instance(6), &machine.memory(), &[], &[]).unwrap();
        assert!(!left());
        leave();
        nat.remove_all().unwrap();
        assert!(!left());
    });
}

#[test]
fn who_asks_a_held_proc_waits() {
    on_machine(|machine| {
        let pool = NetPool::new(instance(6)).unwrap();
        let nat = Nat::open(instance(6), &machine.memory(), &[], &[]).unwrap();
        let a = proc_with_server(&pool, 1, "a");
        // The program of this one has ended: its kernel refuses.
        let ended = pool.take(slot(2)).unwrap();
        nat.publish(of(ended.slot, Some(8001), false)).unwrap();
        for way in WAYS {
            ask(machine, way).expect_err("it is refused");
        }
        for way in WAYS {
            nat.publish(of(ended.slot, Some(8001), false)).unwrap();
            nat.hold(ended.slot, true).unwrap();
            within_this(|ours| {
                std::thread::scope(|scope| {
                    let client = scope.spawn(move || {
                        kip_sys::netns::enter_net(ours).unwrap();
                        ask(machine, way)
                    });
                    std::thread::sleep(SHORT);
                    assert!(!client.is_finished(), "{way}");
                    let all = vec![of(ended.slot, None, true), of(a.slot, Some(8001), false)];
                    nat.publish_all(all).unwrap();
                    assert_eq!(client.join().unwrap().unwrap()[..1], *"a", "{way}");
                });
            });
            nat.unpublish(&[a.slot]).unwrap();
        }
        nat.publish(of(a.slot, Some(8001), false)).unwrap();
        nat.hold(a.slot, true).unwrap();
        nat.hold(a.slot, false).unwrap();
        assert!(ask(machine, HOST4).is_ok());
    });
}

#[test]
fn a_change_beside_a_hold_is_not_lost() {
    on_machine(|machine| {
        let pool = NetPool::new(instance(6)).unwrap();
        let nat = Nat::open(instance(6), &machine.memory(), &[], &[]).unwrap();
        let (one, other) = (pool.take(slot(1)).unwrap(), pool.take(slot(2)).unwrap());
        let over = AtomicBool::new(false);
        // A change of UDP ports looks at all flows, which takes much longer.
        let tcp = |slot, host_port| {
            let all = of(slot, host_port, false);
            Published { ports: all.ports[..1].to_vec(), ..all }
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while !over.load(Ordering::SeqCst) {
                        nat.hold(one.slot, true).unwrap();
                        nat.hold(one.slot, false).unwrap();
                    }
                });
            }
            // The others end with this, however it ends.
            let _over = SetAtEnd(&over);
            for turn in 0..1000 {
                nat.publish(tcp(one.slot, Some(8001))).unwrap();
                nat.publish(tcp(one.slot, None)).unwrap();
                let free = nat.publish(tcp(other.slot, Some(8001))).and_then(|()| nat.unpublish(&[other.slot]));
                free.unwrap_or_else(|e| {
                    panic!("turn {turn}: the port that was let go leads to the held proc again: {e}")
                });
            }
        });
    });
}

struct SetAtEnd<'a>(&'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// With this thread's network namespace, for other threads to enter.
fn within_this<T>(what: impl FnOnce(std::os::fd::BorrowedFd<'_>) -> T) -> T {
    let ours = kip_sys::netns::current_net().unwrap();
    what(ours.as_fd())
}
