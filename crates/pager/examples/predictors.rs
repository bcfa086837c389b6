//! Which predictor of working sets is best. First on paper: the exact pages that real servers touch
//! at each of many wakes, from demand faults alone, and what every predictor would have installed
//! of them, missed, and installed for nothing, with the time of a wake estimated (a page that is
//! missed waits for the disk, one that is installed is copied). Then for real: the first replies
//! with each predictor at work, where the pager does not know which of the installed pages were of
//! use, and holds pages back to find out. Run as root.
//!
//! Requests are a seeded mixture, a few common ones and rare ones.

mod programs;

use kip_pager::Server;
use kip_pager::proc::{PagedProc, Sets, Way};
use kip_pager::{History, Predictor, SetRecord};
use kip_stop::stop;
use programs::{GET, Holder, Program};
use std::collections::HashSet;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Wakes of each server.
const WAKES: usize = 60;
/// Those before are for learning.
const FIRST: usize = 10;
/// Microseconds of a page that comes by a fault from disk (MECHANISMS: 55), and of one that is
/// installed.
const MISSED_US: f64 = 55.0;
const INSTALLED_US: f64 = 1.7;

const PREDICTORS: [(&str, Predictor); 7] = [
    ("last use", Predictor::LastUse),
    ("1 of 2 (union)", Predictor::Union { n: 2 }),
    ("1 of 4 (union)", Predictor::Union { n: 4 }),
    ("1 of 8 (union)", Predictor::Union { n: 8 }),
    ("2 of 3", Predictor::KOfN { k: 2, n: 3 }),
    ("2 of 4", Predictor::KOfN { k: 2, n: 4 }),
    ("2 of 8", Predictor::KOfN { k: 2, n: 8 }),
];

/// One wake: how long the reply took, the pages of the set, and the pages whose faults were served,
/// in order.
struct Wake {
    reply_us: f64,
    set: u64,
    faults: Vec<u64>,
    probed: usize,
}

/// Wakes a program again and again.
fn wakes(
    number: u32,
    program: &mut Program,
    server: &Arc<Server>,
    requests: &[&[u8]],
    sets: Sets,
    predictor: Predictor,
) -> Vec<Wake> {
    let dir = tempfile::tempdir().expect("a directory");
    let pid = program.child.id();
    let holder = Arc::new(Holder::default());
    let mut proc = PagedProc::create(number, dir.path(), server.clone(), holder, predictor).expect("a proc");
    for n in 0..30 {
        program.ask(requests[n % requests.len()]);
    }
    let mut seed = 7u64;
    let mut all = Vec::new();
    for _ in 0..WAKES {
        let stopped = stop(|| Ok(vec![pid]), Instant::now() + Duration::from_secs(5)).expect("stops");
        let report =
            proc.deflate(&stopped, Way { drop_files: true, ticks: false, sets, timers: false }).expect("goes down");
        proc.arm(&[pid], None, None);
        stopped.go();
        proc.wait_until_quiescent(&[pid], Duration::from_millis(100));
        std::thread::sleep(Duration::from_millis(5));
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Half of all the first one, a quarter the second, and so on.
        let which = ((seed >> 33) as u32).trailing_ones() as usize;
        let reply = program.ask(requests[which.min(requests.len() - 1)]);
        let memory = proc.memory(pid).expect("is served");
        let state = memory.state();
        let (faults, probed) = (state.since.faults.clone(), state.since.probed);
        all.push(Wake { reply_us: reply.as_secs_f64() * 1e6, set: report[&pid].set_pages as u64, faults, probed });
    }
    proc.restore_all().expect("comes back");
    all
}

/// Both tables of one program.
fn compare(name: &str, first: u32, mut program: Program, server: &Arc<Server>, requests: &[&[u8]]) {
    let exact = wakes(first, &mut program, server, requests, Sets::None, Predictor::LastUse);
    let unique = |wake: Wake| {
        let mut seen = HashSet::new();
        wake.faults.into_iter().filter(|page| seen.insert(*page)).collect()
    };
    judge(name, &exact.into_iter().map(unique).collect::<Vec<_>>());
    println!("\n{name}, for real, sets in memory\n");
    println!("| predictor | set, pages | missed | held back and needed | first reply, us, p50 | mean |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for (number, (word, predictor)) in (first + 1..).zip(PREDICTORS) {
        let all = wakes(number, &mut program, server, requests, Sets::Cached(usize::MAX), predictor);
        let all = &all[FIRST..];
        let mean = |of: &dyn Fn(&Wake) -> f64| all.iter().map(of).sum::<f64>() / all.len() as f64;
        let mut replies: Vec<f64> = all.iter().map(|wake| wake.reply_us).collect();
        replies.sort_by(f64::total_cmp);
        println!(
            "| {word} | {:.0} | {:.1} | {:.1} | {:.0} | {:.0} |",
            mean(&|wake| wake.set as f64),
            mean(&|wake| wake.faults.len() as f64 - wake.probed as f64),
            mean(&|wake| wake.probed as f64),
            replies[replies.len() / 2],
            mean(&|wake| wake.reply_us),
        );
    }
}

fn judge(name: &str, touched: &[Vec<u64>]) {
    let needed: usize = touched[FIRST..].iter().map(Vec::len).sum();
    let wakes = (touched.len() - FIRST) as f64;
    println!("\n{name}: {:.0} pages needed at a wake\n", needed as f64 / wakes);
    println!("| predictor | set, pages | hits | missed | for nothing | estimated ms |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for (word, predictor) in PREDICTORS {
        let mut history = History::new(predictor);
        let (mut set, mut missed, mut useless) = (0, 0, 0);
        for (wake, pages) in touched.iter().enumerate() {
            let predicted: HashSet<u64> = history.predict().pages.into_iter().collect();
            if wake >= FIRST {
                let hits = pages.iter().filter(|page| predicted.contains(page)).count();
                set += predicted.len();
                missed += pages.len() - hits;
                useless += predicted.len() - hits;
            }
            history.push(SetRecord { touched: pages.clone(), ..SetRecord::default() });
        }
        let per = |count: usize| count as f64 / wakes;
        println!(
            "| {word} | {:.0} | {:.1}% | {:.1} | {:.0} | {:.2} |",
            per(set),
            100.0 * (needed - missed) as f64 / needed as f64,
            per(missed),
            per(useless),
            (per(missed) * MISSED_US + per(set) * INSTALLED_US) / 1000.0,
        );
    }
}

fn main() {
    let server = Arc::new(Server::start().expect("a server"));
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name);
    let write = |name: &str, text: &str| std::fs::write(at(name), text).expect("is written");
    write("index.html", "hello\n");
    write("other.html", &("some words of text\n".repeat(3000) + "hello\n"));
    write(
        "n.js",
        "const h=require('crypto');require('http').createServer((q,r)=>{let s='';\n\
         if(q.url=='/json')s=JSON.stringify(Array.from({length:800},(_,i)=>({i,t:'x'+i})));\n\
         if(q.url=='/hash')for(let i=0;i<200;i++)s=h.createHash('sha256').update(s+i).digest('hex');\n\
         if(q.url=='/sort')s=Array.from({length:20000},(_,i)=>(i*7919)%20011).sort((a,b)=>a-b).length+'';\n\
         r.end(s+'hello\\n')}).listen(18084,'127.0.0.1').keepAliveTimeout=600000",
    );
    let get =
        |path: &'static str| -> &'static [u8] { format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n").into_bytes().leak() };
    let mut command = Command::new("/usr/bin/node");
    let node = Program::start("node", 18084, true, command.arg(at("n.js")));
    let requests = [GET, get("/json"), get("/hash"), get("/sort")];
    compare("node, four routes", 100, node, &server, &requests);
    let mut command = Command::new("python3");
    command.args(["-m", "http.server", "18083", "--bind", "127.0.0.1", "-d"]).arg(dir.path());
    let python = Program::start("python", 18083, false, &mut command);
    let requests: [&[u8]; 3] =
        [b"GET / HTTP/1.0\r\n\r\n", b"GET /other.html HTTP/1.0\r\n\r\n", b"GET /index.html HTTP/1.0\r\n\r\n"];
    compare("python http.server, three files", 200, python, &server, &requests);
    let mut command = Command::new("/usr/bin/redis-server");
    command.args(["--enable-debug-command", "yes", "--port", "18082", "--save", "", "--bind", "127.0.0.1", "--dir"]);
    let mut redis = Program::start("redis", 18082, true, command.arg(dir.path()));
    redis.ask(b"DEBUG POPULATE 30000 key 1000\r\n");
    let requests: [&[u8]; 5] = [
        b"GET key:4242\r\n",
        b"SET key:4242 hello\r\n",
        b"GET key:17\r\n",
        b"MGET key:100 key:2000 key:3000 key:4000 key:5000 key:6000\r\n",
        b"INFO\r\n",
    ];
    compare("redis of 30 MB, five commands", 300, redis, &server, &requests);
}
