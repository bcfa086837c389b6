//! On the machine's real network: in, and out again without a trace.

mod lab;

use kip_net::nat::{Forward, Published};
use kip_net::reserve::{At, reserve};
use kip_net::{Nat, NetPool};
use kip_types::Protocol;
use lab::*;
use std::fs;
use std::os::fd::AsFd;

/// The file that `kip` uses as well, so that the settings of a daemon that runs here are respected.
const MEMORY: &str = "/run/kip/forwarding";

/// What is ours.
fn traces() -> Vec<String> {
    let gateways = [instance(15).gateway_v4().to_string(), instance(15).gateway_v6().to_string()];
    let ours = |l: &&str| gateways.iter().any(|g| l.contains(g));
    let mut found: Vec<_> = ip("-o addr show lo").lines().filter(ours).map(str::to_owned).collect();
    found.extend(ip("-o link").lines().filter(|l| l.contains("kp15-")).map(str::to_owned));
    found.extend(ip("-6 route show table local").lines().filter(|l| l.contains("kp15-")).map(str::to_owned));
    found.extend(run("nft", "list tables").lines().filter(|l| l.contains("kip_15")).map(str::to_owned));
    found
}

fn forwarding() -> Vec<String> {
    let shared = |l: &&str| l.contains("forwarding") && !l.contains(".kp");
    run("sysctl", "-a").lines().filter(shared).map(str::to_owned).collect()
}

fn alone() -> bool {
    !run("nft", "list tables").contains("kip_")
}

#[test]
fn nothing_stays_on_the_real_host() {
    fs::create_dir_all("/run/kip").unwrap();
    let lock = fs::File::create("/run/kip/instance-15").unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).expect("instance 15 is free");
    let (traces_before, forwarding_before, alone_before) = (traces(), forwarding(), alone());

    let outcome = std::panic::catch_unwind(in_and_out);
    let i = instance(15);
    Nat::remove(i, MEMORY.as_ref()).unwrap();
    NetPool::new(i).unwrap().remove_all().unwrap();
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
    assert_eq!(traces_before, traces());
    // Another instance has forwarding as it wants it;
    // tests/reach.rs::the_last_instance_puts_forwarding_back has a machine of its own.
    if alone_before && alone() {
        assert_eq!(forwarding_before, forwarding());
        fs::remove_file("/run/kip/forwarding.lock").unwrap();
    }
    fs::remove_file("/run/kip/instance-15").unwrap();
    // Gone unless another program's files are in it.
    let _ = fs::remove_dir("/run/kip");
}

fn in_and_out() {
    let i = instance(15);
    let pool = NetPool::new(i).unwrap();
    let nat = Nat::open(i, MEMORY.as_ref(), &[], &[]).unwrap();
    pool.prefill(&[slot(1), slot(2)]);
    let ns = proc_with_server(&pool, 1, "a");
    let tcp_port = reserve(Protocol::Tcp, At::All, None).unwrap();
    let udp_port = reserve(Protocol::Udp, At::All, None).unwrap();
    let ports =
        [&tcp_port, &udp_port].map(|r| Forward { proto: r.proto, host_port: Some(r.port), host_addr: None, port: 80 });
    nat.publish(Published {
        slot: ns.slot,
        network: None,
        ports: ports.to_vec(),
        egress: None,
        alone: false,
        held: false,
    })
    .unwrap();
    for host in ["127.0.0.1", "[::1]"] {
        assert!(tcp(&format!("{host}:{}", tcp_port.port), LONG).unwrap().starts_with("a "), "{host}");
        assert!(udp(&format!("{host}:{}", udp_port.port), LONG).unwrap().starts_with("a "), "{host}");
    }
    assert!(traces().len() >= 6, "what is looked for is there");
    let listening = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listening.local_addr().unwrap().port();
    within(ns.fd.as_fd(), || assert!(tcp(&format!("127.0.0.1:{port}"), SHORT).is_err()));
    nat.remove_all().unwrap();
    drop(ns);
    pool.remove_all().unwrap();
    assert!(traces().is_empty());
}
