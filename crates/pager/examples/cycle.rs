//! Real servers through cycles of sleep and wake, with a table: memory hot and hibernated, how long
//! the way down takes, and how long the first reply does with the set in memory, in the page cache,
//! on disk, and by faults only. Run as root.

mod programs;

use kip_pager::Predictor;
use kip_pager::Server;
use kip_pager::proc::{PagedProc, Sets, Way};
use kip_stop::stop;
use programs::{GET, Holder, Program};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn field(pid: u32, file: &str, name: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("0");
    line.split_ascii_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0)
}

fn memory(pid: u32) -> (u64, u64) {
    (field(pid, "smaps_rollup", "Rss:"), field(pid, "smaps_rollup", "Pss:"))
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn cycle(number: u32, mut program: Program, request: &[u8], server: &Arc<Server>) {
    let pid = program.child.id();
    let dir = tempfile::tempdir_in(std::env::args_os().nth(2).map_or_else(std::env::temp_dir, Into::into))
        .expect("a directory");
    let holder = Arc::new(Holder::default());
    let predictor = Predictor::LastUse;
    let mut proc = PagedProc::create(number, dir.path(), server.clone(), holder, predictor).expect("a proc");
    for _ in 0..50 {
        program.ask(request);
    }
    let hot = median((0..50).map(|_| program.ask(request).as_secs_f64() * 1e6).collect());
    let hot_memory = memory(pid);
    let mut downs = Vec::new();
    let mut down = |proc: &mut PagedProc, sets| {
        let began = Instant::now();
        let stopped = stop(|| Ok(vec![pid]), Instant::now() + Duration::from_secs(5)).expect("stops");
        let report =
            proc.deflate(&stopped, Way { drop_files: true, ticks: false, sets, timers: false }).expect("goes down");
        proc.arm(&[pid], None, None);
        stopped.go();
        let took = began.elapsed().as_secs_f64() * 1e3;
        proc.wait_until_quiescent(&[pid], Duration::from_millis(100));
        downs.push(took);
        report[&pid].clone()
    };
    let first = down(&mut proc, Sets::Memory);
    let mut asleep = memory(pid);
    program.ask(request);
    let mut replies = Vec::new();
    let mut awake = (0, 0);
    let mut set = (0, 0);
    let mut installs = Vec::new();
    for sets in [Sets::Memory, Sets::Cached(usize::MAX), Sets::Disk, Sets::None] {
        let mut times = Vec::new();
        for _ in 0..12 {
            let report = down(&mut proc, sets);
            asleep = asleep.min(memory(pid));
            std::thread::sleep(Duration::from_millis(15));
            times.push(program.ask(request).as_secs_f64() * 1e6);
            if sets == Sets::Memory {
                let space = proc.memory(pid).expect("is served");
                installs.extend(space.state().since.woke.map(|(_, us)| us as f64));
                awake = memory(pid);
            }
            if sets == Sets::Cached(usize::MAX) {
                set = (report.set_pages, report.set_bytes);
            }
        }
        replies.push(median(times[2..].to_vec()));
    }
    let later = median(downs[2..14].to_vec());
    println!(
        "| {} | {}/{} | {}/{} | {} | {:.1} | {:.1} | {:.0} | {:.0} | {:.0} | {:.0} | {:.0} | {} pages, {} KB kept, {:.0} us | {} ranges |",
        program.name,
        hot_memory.0,
        hot_memory.1,
        asleep.0,
        asleep.1,
        awake.0,
        downs[0],
        later,
        hot,
        replies[0],
        replies[1],
        replies[2],
        replies[3],
        set.0,
        set.1 / 1024,
        median(installs),
        first.converted,
    );
}

fn main() {
    let server = Arc::new(Server::start().expect("a server"));
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name);
    let write = |name: &str, text: &str| std::fs::write(at(name), text).expect("is written");
    write("index.html", "hello\n");
    write(
        "lighttpd.conf",
        &format!(
            "server.document-root = \"{0}\"\nserver.port = 18081\nserver.bind = \"127.0.0.1\"\nindex-file.names = (\"index.html\")\n\
             server.max-keep-alive-requests = 100000\nserver.max-keep-alive-idle = 600\n",
            dir.path().display()
        ),
    );
    write(
        "n.js",
        "require('http').createServer((q,r)=>r.end('hello\\n')).listen(18084,'127.0.0.1').keepAliveTimeout=600000",
    );
    println!(
        "| program | hot RSS/PSS KB | hibernated | awake RSS | first deflate ms | later | hot us | set in RAM | cached | on disk | faults | set | converted |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    let only = std::env::args().nth(1).unwrap_or_default();
    let wanted = |name: &str| only.is_empty() || only == name;
    if wanted("lighttpd") {
        let mut command = Command::new("/usr/sbin/lighttpd");
        cycle(
            1,
            Program::start("lighttpd", 18081, true, command.arg("-D").arg("-f").arg(at("lighttpd.conf"))),
            GET,
            &server,
        );
    }
    if wanted("redis") {
        let mut command = Command::new("/usr/bin/redis-server");
        command
            .args(["--enable-debug-command", "yes", "--port", "18082", "--save", "", "--bind", "127.0.0.1", "--dir"])
            .arg(dir.path());
        let mut redis = Program::start("redis 100 MB", 18082, true, &mut command);
        redis.ask(b"DEBUG POPULATE 100000 key 1000\r\n");
        redis.ask(b"DEBUG POPULATE 1 set 1\r\n");
        cycle(2, redis, b"GET key:4242\r\n", &server);
    }
    if wanted("python") {
        let python = Path::new("/usr/bin/python3");
        let mut command = Command::new(if python.exists() { python } else { Path::new("python3") });
        command.args(["-m", "http.server", "18083", "--bind", "127.0.0.1", "-d"]).arg(dir.path());
        cycle(3, Program::start("python http.server", 18083, false, &mut command), b"GET / HTTP/1.0\r\n\r\n", &server);
    }
    if wanted("node") {
        cycle(4, Program::start("node", 18084, true, Command::new("/usr/bin/node").arg(at("n.js"))), GET, &server);
    }
}
