//! What the keeper's calls cost: `cargo bench -p kip-keeper`. Prints microseconds, p50 and p99 of
//! each call's samples.

use kip_keeper::Keeper;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Instant;

const SAMPLES: usize = 2_000;

fn measure(what: &str, samples: usize, mut call: impl FnMut()) {
    let mut us: Vec<f64> = (0..samples)
        .map(|_| {
            let start = Instant::now();
            call();
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    us.sort_by(f64::total_cmp);
    println!("{what:32} p50 {:8.1} us  p99 {:8.1} us  ({samples} samples)", us[samples / 2], us[samples * 99 / 100]);
}

fn main() {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let binary = Path::new(env!("CARGO_BIN_EXE_kip-keeper"));
    let start = || Keeper::connect_or_spawn(binary, dir.path()).expect("the keeper starts");
    measure("start and quit", 50, || start().quit().expect("it quits"));
    let keeper = start();
    measure("connect to a running one", 500, || drop(start()));
    let null = File::open("/dev/null").expect("/dev/null can be opened");
    measure("ping", SAMPLES, || drop(keeper.ping().expect("it answers")));
    measure("put 1", SAMPLES, || keeper.put("bench/one", &[null.as_fd()]).expect("it holds"));
    measure("get 1", SAMPLES, || drop(keeper.get("bench/one").expect("it has it")));
    let twelve: Vec<String> = (0..12).map(|i| format!("bench/twelve/{i}")).collect();
    measure("put 12, drop 12", SAMPLES, || {
        keeper.put_many(twelve.iter().map(|n| (n, null.as_fd()))).expect("it holds");
        keeper.drop_prefix("bench/twelve/").expect("it drops");
    });
    let many: Vec<String> = (0..1000).map(|i| format!("bench/many/{i}")).collect();
    measure("put 1000", 50, || keeper.put_many(many.iter().map(|n| (n, null.as_fd()))).expect("it holds"));
    measure("get 1000", 50, || drop(keeper.get_prefix("bench/many/").expect("it has them")));
    keeper.quit().expect("it quits");
}
