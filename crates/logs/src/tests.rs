//! Tests of the log pump on real pipes. A killed daemon is a child process; a full disk is a real
//! one, in a mount namespace of a child process.

use super::*;
use std::io::Write;
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

const SOON: Duration = Duration::from_secs(20);

/// A log directory of this test's own that goes with it.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Scratch {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("kip-logs-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Scratch(path)
    }

    fn logs(&self) -> PathBuf {
        self.0.join("logs")
    }

    fn reader(&self, from: From) -> LogReader {
        LogReader::open(&self.logs(), from).unwrap()
    }

    fn all(&self) -> Vec<LogRecord> {
        rest(&mut self.reader(From::Start))
    }

    fn files(&self) -> Vec<String> {
        let mut names: Vec<String> =
            std::fs::read_dir(self.logs()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The program's ends of a proc's pipes, and the daemon's.
struct Pipes {
    stdout: std::fs::File,
    stderr: std::fs::File,
    ends: (OwnedFd, OwnedFd),
}

impl Pipes {
    fn new() -> Pipes {
        let (out_read, out_write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let (err_read, err_write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        Pipes { stdout: out_write.into(), stderr: err_write.into(), ends: (out_read, err_read) }
    }

    fn give(&self, pump: &LogPump, directory: &Path, rotation: Rotation) {
        let (out, err) = (self.ends.0.try_clone().unwrap(), self.ends.1.try_clone().unwrap());
        pump.add("web", out, err, directory, rotation).unwrap();
    }
}

fn rest(reader: &mut LogReader) -> Vec<LogRecord> {
    let mut all = Vec::new();
    loop {
        match reader.next_lines().unwrap() {
            lines if lines.is_empty() => return all,
            lines => all.extend(lines),
        }
    }
}

/// The bytes a program wrote to one stream.
fn joined(lines: &[LogRecord], stream: Stream) -> Vec<u8> {
    let mut bytes = Vec::new();
    for line in lines.iter().filter(|l| l.stream == stream) {
        bytes.extend_from_slice(&line.text);
        bytes.extend_from_slice(if line.complete { b"\n" } else { b"" });
    }
    bytes
}

fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Runs the named test again in a process of its own, by way of a shell.
fn again(test: &str, program: &str, arguments: &[&str]) -> Command {
    let module = module_path!().split_once("::").unwrap().1;
    let mut command = Command::new(program);
    command.args(arguments).arg(std::env::current_exe().unwrap()).args([
        &format!("{module}::{test}"),
        "--exact",
        "--include-ignored",
        "--nocapture",
    ]);
    command
}

fn is_again() -> bool {
    std::env::args().any(|a| a == "--include-ignored")
}

#[test]
fn lines_of_both_streams_are_written_at_once() {
    let (scratch, mut pipes) = (Scratch::new(), Pipes::new());
    let pump = LogPump::start().unwrap();
    pipes.give(&pump, &scratch.logs(), Rotation::default());
    let before = now_ms();
    pipes.stdout.write_all(b"first\n\nthird\xff\n").unwrap();
    until("the first lines", || scratch.all().len() == 3);
    pipes.stderr.write_all(b"bad\n").unwrap();
    until("the line on stderr", || scratch.all().len() == 4);
    let lines = scratch.all();
    let texts: Vec<_> = lines.iter().map(|l| (l.stream, l.complete, l.text.as_slice())).collect();
    let out = Stream::Stdout;
    assert_eq!(
        texts,
        [(out, true, &b"first"[..]), (out, true, b""), (out, true, b"third\xff"), (Stream::Stderr, true, b"bad")]
    );
    assert!(lines.iter().all(|l| l.at_ms >= before && l.at_ms <= now_ms()));
    let raw = std::fs::read(scratch.logs().join("current")).unwrap();
    assert_eq!(raw.split(|b| *b == b'\n').next().unwrap(), format!("{} o first", lines[0].at_ms).as_bytes());
}

#[test]
fn an_unfinished_line_is_written_after_a_moment() {
    let (scratch, mut pipes) = (Scratch::new(), Pipes::new());
    let pump = LogPump::start().unwrap();
    pipes.give(&pump, &scratch.logs(), Rotation::default());
    // One that is finished within the moment stays whole.
    pipes.stdout.write_all(b"one ").unwrap();
    pipes.stdout.write_all(b"line\nname? ").unwrap();
    let asked = Instant::now();
    until("the prompt", || scratch.all().len() == 2);
    let waited = asked.elapsed();
    assert!(waited >= HOLD_BACK / 2 && waited < HOLD_BACK * 10, "{waited:?}");
    pipes.stdout.write_all(b"kip\n").unwrap();
    until("the rest", || scratch.all().len() == 3);
    let lines = scratch.all();
    assert_eq!(lines[0].text, b"one line");
    assert_eq!((lines[1].complete, lines[1].text.as_slice()), (false, &b"name? "[..]));
    assert_eq!(joined(&lines, Stream::Stdout), b"one line\nname? kip\n");
    // The end of the program is the end of the line.
    pipes.stderr.write_all(b"panic").unwrap();
    pump.flush("web").unwrap();
    assert_eq!(joined(&scratch.all(), Stream::Stderr), b"panic");
}

#[test]
fn any_bytes_survive() {
    let (scratch, mut pipes) = (Scratch::new(), Pipes::new());
    let pump = LogPump::start().unwrap();
    pipes.give(&pump, &scratch.logs(), Rotation { max_bytes: 64 << 20, files: 2 });
    // Pseudo-random bytes with newlines from very near to 300 KB apart.
    let mut seed = 1_u64;
    let mut next = || {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) as usize
    };
    let mut bytes = Vec::new();
    for round in 0..200 {
        let length = next() % [3, 200, 9_000, 300_000][round % 4];
        bytes.extend((0..length).map(|_| next() as u8).filter(|b| *b != b'\n'));
        bytes.push(b'\n');
    }
    bytes.extend_from_slice(b"no end");
    let sent = bytes.clone();
    let writer = std::thread::spawn(move || {
        let mut rest = sent.as_slice();
        let mut size = 1;
        while !rest.is_empty() {
            size = (size * 7 + 3) % 70_001 + 1;
            let (now, later) = rest.split_at(size.min(rest.len()));
            pipes.stdout.write_all(now).unwrap();
            rest = later;
        }
        pipes
    });
    let _pipes = writer.join().unwrap();
    pump.remove("web").unwrap();
    let lines = scratch.all();
    assert!(lines.iter().all(|l| l.text.len() <= MAX_TEXT));
    assert_eq!(joined(&lines, Stream::Stdout).len(), bytes.len());
    assert!(joined(&lines, Stream::Stdout) == bytes, "same length, other bytes");
}

#[test]
fn short_lines_are_not_split_by_block_buffering() {
    let (scratch, mut pipes) = (Scratch::new(), Pipes::new());
    let pump = LogPump::start().unwrap();
    pipes.give(&pump, &scratch.logs(), Rotation::default());
    let text: Vec<u8> = (0..20_000).flat_map(|i| format!("line number {i}\n").into_bytes()).collect();
    for block in text.chunks(4096) {
        pipes.stdout.write_all(block).unwrap();
    }
    pump.flush("web").unwrap();
    let lines = scratch.all();
    assert_eq!(lines.len(), 20_000);
    assert!(lines.iter().enumerate().all(|(i, l)| l.text == format!("line number {i}").as_bytes()));
}

#[test]
fn files_rotate_and_a_follower_sees_every_line() {
    let (scratch, mut pipes) = (Scratch::new(), Pipes::new());
    let pump = LogPump::start().unwrap();
    let rotation = Rotation { max_bytes: 100_000, files: 3 };
    pipes.give(&pump, &scratch.logs(), rotation);
    let mut follower = scratch.reader(From::Start);
    let mut followed = Vec::new();
    for round in 0..100 {
        let text: Vec<u8> = (0..500).flat_map(|i| format!("{:06}\n", round * 500 + i).into_bytes()).collect();
        pipes.stdout.write_all(&text).unwrap();
        pump.flush("web").unwrap();
        // Slower than the log by up to two files.
        if round % 7 == 0 {
            followed.extend(rest(&mut follower));
        }
    }
    followed.extend(rest(&mut follower));
    let numbers: Vec<usize> = followed.iter().map(|l| String::from_utf8_lossy(&l.text).parse().unwrap()).collect();
    assert_eq!(numbers, (0..50_000).collect::<Vec<_>>());
    assert_eq!(scratch.files(), ["current", "current.1", "current.2"]);
    for file in scratch.files() {
        assert!(std::fs::metadata(scratch.logs().join(file)).unwrap().len() <= rotation.max_bytes);
    }
    // What is left is the newest, without a gap.
    let left = scratch.all();
    assert!(left.len() > 8_000 && left.len() < 15_000, "{}", left.len());
    assert_eq!(left, followed[50_000 - left.len()..]);
    assert_eq!(rest(&mut scratch.reader(From::Last(7_000))), followed[43_000..]);
    assert_eq!(rest(&mut scratch.reader(From::Last(usize::MAX))), left);
    assert_eq!(rest(&mut scratch.reader(From::Last(0))), []);
    let at = left[left.len() / 2].at_ms;
    assert!(rest(&mut scratch.reader(From::Since(at))).iter().all(|l| l.at_ms >= at));
    assert_eq!(rest(&mut scratch.reader(From::Since(now_ms() + 10_000))), []);
    // A smaller setting after a restart removes what is too many.
    drop(pump);
    let pump = LogPump::start().unwrap();
    pipes.give(&pump, &scratch.logs(), Rotation { max_bytes: 100, files: 1 });
    pipes.stdout.write_all(b"alone\n").unwrap();
    pump.flush("web").unwrap();
    assert_eq!(scratch.files(), ["current"]);
    assert_eq!(scratch.all()[0].text, b"alone");
    let lines = rest(&mut follower);
    assert_eq!((lines[0].stream, lines[1].text.as_slice()), (Stream::Kip, &b"alone"[..]), "the gap is told");
}

#[test]
fn a_follower_at_full_speed_misses_nothing() {
    let (scratch, mut pipes) = (Scratch::new(), Pipes::new());
    let pump = LogPump::start().unwrap();
    // Rotates constantly, but by 15 files of 400 KB: the reader is never that far behind.
    pipes.give(&pump, &scratch.logs(), Rotation { max_bytes: 400_000, files: 16 });
    let mut follower = scratch.reader(From::Start);
    let writer = std::thread::spawn(move || {
        for block in 0..400 {
            let text: Vec<u8> = (0..500).flat_map(|i| format!("{:06}\n", block * 500 + i).into_bytes()).collect();
            pipes.stdout.write_all(&text).unwrap();
        }
        pipes
    });
    let mut next = 0;
    let deadline = Instant::now() + SOON;
    while next < 200_000 {
        assert!(Instant::now() < deadline, "got {next} lines");
        for line in follower.next_lines().unwrap() {
            assert_eq!(String::from_utf8_lossy(&line.text), format!("{next:06}"));
            next += 1;
        }
    }
    drop(writer.join().unwrap());
}

#[test]
fn a_follower_waits_for_what_comes_and_for_the_end() {
    let (scratch, mut pipes) = (Scratch::new(), Pipes::new());
    let mut early = scratch.reader(From::Start);
    assert!(early.gone() && early.next_lines().unwrap().is_empty());
    let pump = LogPump::start().unwrap();
    pipes.give(&pump, &scratch.logs(), Rotation::default());
    assert!(early.next_lines().unwrap().is_empty() && !early.has_grown());
    for line in ["here", "and there"] {
        writeln!(pipes.stdout, "{line}").unwrap();
        let until = Instant::now() + SOON;
        while !early.has_grown() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(early.next_lines().unwrap()[0].text, line.as_bytes());
        assert!(!early.has_grown());
    }
    std::fs::remove_dir_all(scratch.logs()).unwrap();
    assert!(early.gone());
}

#[test]
fn a_follower_goes_on_with_the_next_file() {
    let scratch = Scratch::new();
    let file = |name: &str| scratch.logs().join(name);
    std::fs::create_dir_all(scratch.logs()).unwrap();
    std::fs::write(file("current"), "5 o a\n").unwrap();
    let mut reader = scratch.reader(From::Last(0));
    assert!(!reader.has_grown());
    std::fs::rename(file("current"), file("current.1")).unwrap();
    assert!(!reader.has_grown());
    std::fs::write(file("current"), "6 o b\n").unwrap();
    assert!(reader.has_grown());
    assert_eq!(rest(&mut reader)[0].text, b"b");
    assert!(!reader.has_grown());
}

#[test]
fn a_removed_proc_is_let_go() {
    let (scratch, mut pipes) = (Scratch::new(), Pipes::new());
    let pump = LogPump::start().unwrap();
    pipes.give(&pump, &scratch.logs(), Rotation::default());
    pipes.stdout.write_all(b"last words").unwrap();
    pump.remove("web").unwrap();
    assert_eq!(joined(&scratch.all(), Stream::Stdout), b"last words");
    assert!(matches!(pump.remove("web"), Err(LogError::Unknown { .. })));
    assert!(matches!(pump.flush("web"), Err(LogError::Unknown { .. })));
    // Another holder of the pipe (the keeper) does not keep it watched.
    pipes.stdout.write_all(b"unheard\n").unwrap();
    pipes.give(&pump, &scratch.logs(), Rotation::default());
    until("it is heard again", || scratch.all().len() == 2);
    // A second add of the name replaces the first, and its pipe is closed then.
    let other = Pipes::new();
    other.give(&pump, &scratch.logs(), Rotation::default());
    drop(pipes.ends);
    let error = pipes.stdout.write_all(b"x").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    let file = std::fs::File::open("/dev/null").unwrap();
    let (out, err) = (OwnedFd::from(file.try_clone().unwrap()), OwnedFd::from(file));
    assert!(matches!(pump.add("x", out, err, &scratch.logs(), Rotation::default()), Err(LogError::Watch { .. })));
}

#[test]
fn the_end_of_a_pipe_ends_nothing_else() {
    let (scratch, pipes) = (Scratch::new(), Pipes::new());
    let pump = LogPump::start().unwrap();
    let Pipes { mut stdout, mut stderr, ends } = pipes;
    pump.add("web", ends.0, ends.1, &scratch.logs(), Rotation::default()).unwrap();
    stdout.write_all(b"cut").unwrap();
    drop(stdout);
    until("the unfinished line", || joined(&scratch.all(), Stream::Stdout) == b"cut");
    stderr.write_all(b"still here\n").unwrap();
    until("the other stream", || joined(&scratch.all(), Stream::Stderr) == b"still here\n");
    pump.remove("web").unwrap();
}

/// In the child: pumps until it is killed.
fn pump_until_killed() -> ! {
    let directory = PathBuf::from(std::env::var_os("KIP_TEST_LOGS").unwrap());
    let pump = LogPump::start().unwrap();
    let out = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let (err, _keep) = rustix::pipe::pipe().unwrap();
    pump.add("web", out, err, &directory, Rotation { max_bytes: 1 << 30, files: 2 }).unwrap();
    loop {
        std::thread::park();
    }
}

#[test]
fn a_killed_daemon_loses_nothing() {
    const NAME: &str = "a_killed_daemon_loses_nothing";
    if is_again() {
        pump_until_killed();
    }
    let (scratch, pipes) = (Scratch::new(), Pipes::new());
    let daemon = || -> Child {
        again(NAME, "env", &[])
            .env("KIP_TEST_LOGS", scratch.logs())
            .stdin(Stdio::from(pipes.ends.0.try_clone().unwrap()))
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    };
    let mut stdout = pipes.stdout.try_clone().unwrap();
    let written = std::sync::Arc::new(AtomicU64::new(0));
    let progress = written.clone();
    let writer = std::thread::spawn(move || {
        for number in 0..400_000_u64 {
            writeln!(stdout, "{number:08}").unwrap();
            progress.store(number, Ordering::Relaxed);
        }
        stdout.write_all(b"half a li").unwrap();
    });
    for kill in 1..=6 {
        let mut child = daemon();
        until("progress", || written.load(Ordering::Relaxed) > kill * 50_000);
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let pump = LogPump::start().unwrap();
    pipes.give(&pump, &scratch.logs(), Rotation { max_bytes: 1 << 30, files: 2 });
    writer.join().unwrap();
    pump.flush("web").unwrap();
    let lines = scratch.all();
    let mut expected = 0_u64;
    let mut repeated = 0_u64;
    // A write that SIGKILL cuts off ends anywhere; what there is of its last record is ended when
    // it is mended, and all of it comes again.
    let (whole, torn): (Vec<_>, Vec<_>) = lines.iter().filter(|l| l.complete).partition(|l| l.text.len() == 8);
    assert!(torn.len() <= 6 && torn.iter().all(|l| l.text.len() < 8), "{torn:?}");
    for line in whole {
        let number: u64 = std::str::from_utf8(&line.text).unwrap().parse().unwrap();
        assert!(number <= expected, "lines {expected} to {number} are missing");
        repeated += expected - number;
        expected = number + 1;
    }
    assert_eq!(expected, 400_000);
    assert_eq!(lines.last().unwrap().text, b"half a li");
    // At most one batch for each kill.
    assert!(repeated <= 6 * (BATCH_BYTES as u64 / 9), "{repeated} lines were written twice");
    println!("{repeated} of 400000 lines were written twice in 6 kills");
}

#[test]
fn a_torn_record_is_mended() {
    let (scratch, mut pipes) = (Scratch::new(), Pipes::new());
    std::fs::create_dir(scratch.logs()).unwrap();
    let current = scratch.logs().join("current");
    for (torn, mended) in [
        (&b"1 o whole\n2 o to"[..], &b"1 o whole\n2 o to\n"[..]),
        (b"1 o whole\n2", b"1 o whole\n"),
        (b"1 o whole\n\0\0\0", b"1 o whole\n"),
        (b"17", b""),
        (b"", b""),
        (b"1 o whole\n", b"1 o whole\n"),
    ] {
        std::fs::write(&current, torn).unwrap();
        let pump = LogPump::start().unwrap();
        pipes.give(&pump, &scratch.logs(), Rotation::default());
        assert_eq!(std::fs::read(&current).unwrap(), mended);
        pipes.stdout.write_all(b"next\n").unwrap();
        pump.flush("web").unwrap();
        let lines = scratch.all();
        assert_eq!(lines.last().unwrap().text, b"next");
        assert!(lines.iter().all(|l| l.stream == Stream::Stdout));
    }
}

#[test]
fn a_damaged_log_is_read_as_far_as_possible() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.logs()).unwrap();
    std::fs::write(scratch.logs().join("current"), b"1 o a\ngarbage\n2 x y\n3 e b\n4 o unfinished").unwrap();
    let lines = scratch.all();
    let streams: Vec<_> = lines.iter().map(|l| l.stream).collect();
    assert_eq!(streams, [Stream::Stdout, Stream::Kip, Stream::Kip, Stream::Stderr]);
    std::fs::write(scratch.logs().join("current"), [&vec![0; 300_000][..], b"\n5 o c\n"].concat()).unwrap();
    let lines = scratch.all();
    assert_eq!(lines.last().unwrap().text, b"c");
    assert!(lines[..lines.len() - 1].iter().all(|l| l.stream == Stream::Kip));
}

#[test]
fn a_full_disk_blocks_nobody_and_is_told() {
    const NAME: &str = "a_full_disk_blocks_nobody_and_is_told";
    if !is_again() {
        let script = "mount -t tmpfs -o size=200k none /mnt\nexec \"$0\" \"$@\"";
        let arguments = ["--mount", "--propagation", "private", "sh", "-ec", script];
        assert!(again(NAME, "unshare", &arguments).status().unwrap().success());
        return;
    }
    let mut pipes = Pipes::new();
    let logs = Path::new("/mnt/logs");
    let pump = LogPump::start().unwrap();
    pipes.give(&pump, logs, Rotation::default());
    // Far more than pipe and disk have room for; each line is told apart by its number.
    for number in 0..50_000 {
        writeln!(pipes.stdout, "{number:08}").unwrap();
    }
    pump.flush("web").unwrap();
    let kept = rest(&mut LogReader::open(logs, From::Start).unwrap());
    assert!(kept.len() > 1_000 && kept.len() < 50_000, "{}", kept.len());
    let full = std::fs::read(logs.join("current")).unwrap();
    assert_eq!(full.last(), Some(&b'\n'), "cut back to a whole record");
    // Room again: whatever the writer does first, the remark comes first.
    std::fs::rename(logs.join("current"), logs.join("current.1")).unwrap();
    std::fs::OpenOptions::new().write(true).open(logs.join("current.1")).unwrap().set_len(1_000 * 24).unwrap();
    writeln!(pipes.stderr, "after").unwrap();
    pump.flush("web").unwrap();
    let text = String::from_utf8(std::fs::read(logs.join("current")).unwrap()).unwrap();
    let mut lines = text.lines().map(parse_line);
    let (stream, remark) = lines.next().unwrap();
    assert_eq!(stream, Stream::Kip);
    let lost: usize = remark.split(' ').next().unwrap().parse().unwrap();
    assert_eq!(lost + kept.len(), 50_000, "every line is kept or counted: {remark}");
    assert_eq!(lines.next(), Some((Stream::Stderr, "after".to_owned())));
    // And the directory itself gone.
    std::fs::remove_dir_all(logs).unwrap();
    writeln!(pipes.stderr, "nowhere").unwrap();
    pump.flush("web").unwrap();
    assert!(!logs.exists());
}

fn parse_line(line: &str) -> (Stream, String) {
    let line = record::parse(line.as_bytes()).unwrap();
    (line.stream, String::from_utf8(line.text).unwrap())
}
