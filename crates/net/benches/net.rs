//! What a proc's network costs: making a namespace, taking it from the pool, publishing ports,
//! removing all of it.
//!
//! Runs in a network namespace of its own, as root: `cargo bench -p kip-net`. Prints one JSON line
//! per step: microseconds, sorted raw samples included.

use kip_net::nat::{Forward, Network, Published};
use kip_net::{Instance, Nat, NetPool, Slot};
use kip_types::{Protocol, Realm};
use std::time::{Duration, Instant};

const SAMPLES: usize = 200;

fn report(step: &str, mut samples: Vec<u128>) {
    samples.sort_unstable();
    let at = |percent: usize| samples[(samples.len() * percent / 100).min(samples.len() - 1)];
    println!(r#"{{"step":"{step}","p50_us":{},"p99_us":{},"samples_us":{samples:?}}}"#, at(50), at(99));
}

fn timed<T>(samples: &mut Vec<u128>, what: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let value = what();
    samples.push(start.elapsed().as_micros());
    value
}

fn main() {
    let thread = std::thread::spawn(|| {
        kip_sys::netns::unshare_net().expect("root is needed");
        measure();
    });
    thread.join().expect("the benchmark runs through");
}

fn measure() {
    let dir = tempfile::tempdir().unwrap();
    let instance = Instance::new(14).unwrap();
    let pool = NetPool::new(instance).unwrap();
    let nat = Nat::open(instance, &dir.path().join("forwarding.json"), &[], &[]).unwrap();
    let slots: Vec<Slot> = Slot::all().take(2 * SAMPLES).collect();
    let (fresh, ahead) = slots.split_at(SAMPLES);
    let network = Network { realm: Realm::default(), name: "red".to_owned() };
    let (mut make, mut take, mut publish, mut unpublish) = (vec![], vec![], vec![], vec![]);

    let mut procs: Vec<_> = fresh.iter().map(|s| timed(&mut make, || pool.take(*s).unwrap())).collect();
    for slot in ahead {
        pool.prefill(&[*slot]);
        while pool.ready() == 0 {
            std::thread::sleep(Duration::from_micros(200));
        }
        procs.push(timed(&mut take, || pool.take(*slot).unwrap()));
    }
    for (n, slot) in slots.iter().enumerate() {
        let port = 10_000 + 2 * n as u16;
        let ports = [80, 443].map(|p| Forward {
            proto: Protocol::Tcp,
            host_port: Some(port + p / 443),
            host_addr: None,
            port: p,
        });
        timed(&mut publish, || {
            nat.publish(Published {
                slot: *slot,
                network: Some(network.clone()),
                ports: ports.to_vec(),
                egress: None,
                alone: false,
                held: false,
            })
            .unwrap()
        });
    }
    let mut all = vec![];
    let desired = [];
    for slot in fresh {
        timed(&mut unpublish, || nat.unpublish(&[*slot]).unwrap());
    }
    timed(&mut all, || nat.sync(&desired).unwrap());
    let mut release = vec![];
    timed(&mut release, || pool.release(&slots).unwrap());
    report("make a namespace (take of an unannounced slot)", make);
    report("take from the pool", take);
    report("publish two ports", publish);
    report("unpublish two ports", unpublish);
    report("put a whole rule set in force", all);
    report("release 400 namespaces at once", release);
}
