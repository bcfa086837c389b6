//! The `kip` program itself, against an API before a worker in memory: what it prints, on which
//! stream, and its exit codes.
#![forbid(unsafe_code)]

#[path = "../../api/tests/fake/mod.rs"]
mod fake;

use fake::{Served, serve, until};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::Ordering;
use tempfile::TempDir;

fn command(data: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kip"));
    command.arg("--data").arg(data).args(words).stdin(Stdio::null());
    command
}

/// Runs `kip` beside the API, which lives on this test's runtime.
async fn kip(data: &Path, words: &[&str]) -> Output {
    let mut command = command(data, words);
    tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Stdout of a command that does what it is told and is silent about it.
async fn said(data: &Path, words: &[&str]) -> String {
    let output = kip(data, words).await;
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()), "{words:?}");
    text(&output.stdout)
}

/// The one line of a command that fails.
async fn refused(data: &Path, words: &[&str]) -> String {
    let output = kip(data, words).await;
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(1), String::new()), "{words:?}");
    let line = text(&output.stderr);
    assert_eq!(line.lines().count(), 1, "{line}");
    line.strip_prefix("kip: ").unwrap_or_else(|| panic!("{line}")).trim_end().to_owned()
}

async fn start() -> (TempDir, Served) {
    let dir = tempfile::tempdir().unwrap();
    let served = serve(dir.path()).await;
    (dir, served)
}

fn json(text: &str) -> serde_json::Value {
    assert_eq!(text.lines().count(), 1, "{text}");
    serde_json::from_str(text).unwrap()
}

#[tokio::test]
async fn a_proc_through_its_life() {
    let (dir, _served) = start().await;
    let data = dir.path();
    let run = ["run", "--name", "web", "--port", "8080:80", "--", "lighttpd", "-D"];
    assert_eq!(said(data, &run).await, "web  tcp 80 -> 0.0.0.0:8080\n");
    assert_eq!(said(data, &["run", "--", "/bin/sh"]).await, "sh-1\n");
    let view = json(&said(data, &["--json", "run", "--idle", "3s", "--", "sh"]).await);
    assert_eq!(view["name"], "sh-2");
    assert_eq!(
        (&view["spec"]["timing"]["idle_ms"], &view["spec"]["timing"]["park_after_ms"]),
        (&3000.into(), &222.into())
    );

    let table = said(data, &["ps"]).await;
    assert!(
        table.starts_with("NAME  STATE    TIER  PORTS         MEMORY  IDLE  LAST-WAKE  AGE  EXIT  COMMAND\n"),
        "{table}"
    );
    assert!(
        table.contains("\nweb   running  hot   8080->80/tcp  3.0M    1.5s  -          -    -     lighttpd -D\n"),
        "{table}"
    );
    assert_eq!(json(&said(data, &["ps", "--json"]).await).as_array().unwrap().len(), 3);

    assert_eq!(
        said(data, &["sleep", "web", "--to", "parked"]).await,
        "web parked in 21.0ms, stood still 9.0ms, wrote 3.0M\n"
    );
    assert_eq!(said(data, &["sleep", "web"]).await, "web is parked\n");
    assert!(said(data, &["wake", "web"]).await.starts_with("web woke from parked in 7.5ms by kip wake\n  helper "));
    assert_eq!(json(&said(data, &["wake", "web", "--json"]).await)["already"], true);
    let inspected = json(&said(data, &["inspect", "web", "--json"]).await);
    assert_eq!(inspected["last_wake"]["steps"][1]["name"], "restore");
    assert_eq!(inspected["tier"], "hot");
    assert!(said(data, &["inspect", "web"]).await.contains("last wake"));
    for detail in ["--files", "--env", "--sockets", "--maps"] {
        let inside = json(&said(data, &["inspect", "web", detail, "--json"]).await);
        assert_eq!((&inside["name"], &inside["tier"]), (&"web".into(), &"hot".into()), "{detail}");
        assert!(said(data, &["inspect", "web", detail]).await.starts_with("web, hot, generation "), "{detail}");
    }
    assert!(said(data, &["why", "web"]).await.contains("descriptor 7 of pid 12 is an io_uring"));

    assert!(refused(data, &["rm", "web"]).await.contains("--force"));
    assert!(refused(data, &["start", "web"]).await.contains("is running"));
    assert_eq!(said(data, &["stop", "web"]).await, "web stopped (signal 15)\n");
    assert_eq!(said(data, &["start", "web"]).await, "web  tcp 80 -> 0.0.0.0:8080\n");
    assert_eq!(json(&said(data, &["rm", "--force", "web", "--json"]).await)["removed"], "web");
    assert_eq!(said(data, &["rm", "--force", "sh-1"]).await, "sh-1 removed\n");
}

#[tokio::test]
async fn failures_are_one_line_and_code_1() {
    let (dir, _served) = start().await;
    let data = dir.path();
    for command in ["inspect", "start", "stop", "rm", "sleep", "wake", "why", "logs"] {
        assert_eq!(refused(data, &[command, "nobody"]).await, "there is no proc nobody", "{command}");
        assert!(refused(data, &[command, "No/Body"]).await.starts_with("there is no proc \"No/Body\""), "{command}");
    }
    assert_eq!(refused(data, &["exec", "nobody", "--", "ls"]).await, "there is no proc nobody");
    said(data, &["run", "--name", "web", "--", "x"]).await;
    assert_eq!(refused(data, &["run", "--name", "web", "--", "x"]).await, "there is a proc web already");
    assert_eq!(refused(data, &["exec", "web", "--", "nonesuch"]).await, "nonesuch was not found in the proc");
    assert!(refused(data, &["run", "--mem", "5", "--", "x"]).await.contains("too small"));
}

#[tokio::test]
async fn without_a_daemon_every_command_says_how_to_start_one() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().to_str().unwrap();
    let expected = format!("no daemon answers at {data}/run/api.sock: start one with `kip --data {data} up`");
    for words in [&["ps"][..], &["down"], &["run", "--", "x"], &["exec", "web", "--", "x"], &["events", "-f"]] {
        assert_eq!(refused(dir.path(), words).await, expected, "{words:?}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "asking leaves nothing behind");
}

#[tokio::test]
async fn wrong_usage_is_code_2() {
    let dir = tempfile::tempdir().unwrap();
    for words in [&["run"][..], &["run", "--port", "0", "--", "x"], &["up", "--archive-after", "soon"], &["dance"], &[]]
    {
        let output = kip(dir.path(), words).await;
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{words:?}");
    }
}

#[tokio::test]
async fn a_second_daemon_is_refused_by_name() {
    let (dir, _served) = start().await;
    let line = refused(dir.path(), &["up"]).await;
    assert_eq!(line, format!("a daemon (pid {}) already runs on {}", std::process::id(), dir.path().display()));
}

#[tokio::test]
async fn logs_and_events_are_shown() {
    let (dir, served) = start().await;
    let data = dir.path();
    said(data, &["run", "--name", "web", "--", "x"]).await;
    assert_eq!(said(data, &["logs", "web"]).await.lines().count(), 1000);
    assert_eq!(said(data, &["logs", "web", "--tail", "2"]).await, "line 998\nline 999\n");
    let stamped = said(data, &["logs", "web", "--tail", "1", "--timestamps"]).await;
    assert_eq!(stamped, "1970-01-01T00:00:00.999Z line 999\n");
    let line = json(&said(data, &["logs", "web", "--tail", "1", "--json"]).await);
    assert_eq!((&line["text"], &line["stream"]), (&"line 999".into(), &"stdout".into()));
    said(data, &["logs", "web", "--since", "1m"]).await;
    assert!(served.fake.heard.lock().last().unwrap().contains("since_ms: Some(1"));
    let events = said(data, &["events"]).await;
    assert!(events.starts_with("2025-11-21T21:33:45.123Z  -                 ready      pid 7\n"), "{events}");
}

fn interrupt(child: &Child) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
}

#[tokio::test]
async fn following_ends_cleanly_on_ctrl_c() {
    let (dir, served) = start().await;
    said(dir.path(), &["run", "--name", "web", "--", "x"]).await;
    for words in [&["events", "-f"][..], &["logs", "web", "-f", "--tail", "2"]] {
        let mut command = command(dir.path(), words);
        let shown = tokio::task::spawn_blocking(move || {
            let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let shown: Vec<_> = lines.by_ref().take(3).map(Result::unwrap).collect();
            interrupt(&child);
            assert_eq!(lines.count(), 0);
            let output = child.wait_with_output().unwrap();
            assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()));
            shown
        });
        assert_eq!(shown.await.unwrap().len(), 3, "{words:?}");
        until("the feed is dropped", || served.fake.open.load(Ordering::SeqCst) == 0).await;
    }
}

/// Exit code and stderr of a command whose stdout is closed after `lines` lines.
async fn with_impatient_reader(data: &Path, words: &[&str], lines: usize) -> (Option<i32>, String) {
    let mut command = command(data, words);
    tokio::task::spawn_blocking(move || {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        for _ in 0..lines {
            stdout.read_line(&mut String::new()).unwrap();
        }
        drop(stdout);
        let output = child.wait_with_output().unwrap();
        (output.status.code(), text(&output.stderr))
    })
    .await
    .unwrap()
}

#[tokio::test]
async fn a_reader_that_leaves_is_no_failure() {
    let (dir, served) = start().await;
    said(dir.path(), &["run", "--name", "web", "--", "x"]).await;
    for words in [&["ps"][..], &["ps", "--json"], &["inspect", "web"], &["logs", "web"], &["events"]] {
        assert_eq!(with_impatient_reader(dir.path(), words, 0).await, (Some(0), String::new()), "{words:?}");
    }
    assert_eq!(with_impatient_reader(dir.path(), &["logs", "web"], 1).await, (Some(0), String::new()));
    assert_eq!(with_impatient_reader(dir.path(), &["exec", "web", "endless"], 0).await, (Some(141), String::new()));
    until("the endless program is ended", || served.fake.open.load(Ordering::SeqCst) == 0).await;
}

#[tokio::test]
async fn exec_carries_the_streams_and_the_code() {
    let (dir, _served) = start().await;
    said(dir.path(), &["run", "--name", "web", "--", "x"]).await;
    assert_eq!(kip(dir.path(), &["exec", "web", "--", "exit", "143"]).await.status.code(), Some(143));
    let output = kip(dir.path(), &["exec", "web", "--env", "A=1", "err"]).await;
    assert_eq!(
        (output.status.code(), text(&output.stdout), text(&output.stderr)),
        (Some(0), String::new(), "{\"A\": \"1\"}\n".into())
    );

    let mut command = command(dir.path(), &["exec", "-i", "web", "--", "cat"]);
    let sent: Vec<u8> = (0..5_000_000u32).map(|n| (n % 253) as u8).collect();
    let carried = tokio::task::spawn_blocking(move || {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (mut stdin, mut stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let copy = sent.clone();
        let writer = std::thread::spawn(move || stdin.write_all(&copy).unwrap());
        let mut received = Vec::new();
        stdout.read_to_end(&mut received).unwrap();
        writer.join().unwrap();
        child.wait().unwrap().success() && received == sent
    });
    assert!(carried.await.unwrap(), "all bytes came back in order");
}

#[tokio::test]
async fn exec_ends_although_its_stdin_stays_open() {
    let (dir, served) = start().await;
    said(dir.path(), &["run", "--name", "web", "--", "x"]).await;
    let mut quick = command(dir.path(), &["exec", "-i", "web", "--", "exit", "4"]);
    let code = tokio::task::spawn_blocking(move || {
        let mut child = quick.stdin(Stdio::piped()).spawn().unwrap();
        let stdin = child.stdin.take();
        let code = child.wait().unwrap().code();
        drop(stdin);
        code
    });
    assert_eq!(code.await.unwrap(), Some(4));

    let mut child = command(dir.path(), &["exec", "web", "--", "deaf"]).spawn().unwrap();
    until("exec is open", || served.fake.open.load(Ordering::SeqCst) == 1).await;
    child.kill().unwrap();
    child.wait().unwrap();
    until("a killed client's program is ended", || served.fake.open.load(Ordering::SeqCst) == 0).await;
}

#[tokio::test]
async fn a_lost_daemon_is_a_failure_of_what_was_asked() {
    let (dir, mut served) = start().await;
    said(dir.path(), &["run", "--name", "web", "--", "x"]).await;
    let child = command(dir.path(), &["exec", "web", "--", "deaf"]).stderr(Stdio::piped()).spawn().unwrap();
    until("exec is open", || served.fake.open.load(Ordering::SeqCst) == 1).await;
    served.stop();
    let output = tokio::task::spawn_blocking(move || child.wait_with_output().unwrap()).await.unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).starts_with("kip: the daemon ended"), "{}", text(&output.stderr));
}

#[tokio::test]
async fn snapshots_are_shown_and_damage_is_a_failure() {
    let (dir, served) = start().await;
    let data = dir.path();
    said(data, &["run", "--name", "web", "--", "x"]).await;
    let table = said(data, &["snapshot", "ls"]).await;
    assert!(table.contains("web   abababababab  1           current  archived, free to adopt"), "{table}");
    assert_eq!(json(&said(data, &["snapshot", "ls", "db", "--json"]).await), serde_json::json!([]));
    assert!(refused(data, &["snapshot", "ls", "Not_A_Name"]).await.contains("Not_A_Name"));
    assert!(refused(data, &["snapshot", "show", "web@x"]).await.contains("NAME@GENERATION"));
    assert_eq!(refused(data, &["snapshot", "show", "web"]).await, "there is no snapshot web");

    assert!(said(data, &["snapshot", "verify", "web"]).await.ends_with("all as sealed\n"));
    let output = kip(data, &["snapshot", "verify", "--all"]).await;
    let lines = text(&output.stdout);
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(1), String::new()));
    assert_eq!(lines.lines().next(), Some("realms/default/packs/00 (web@1): the object is cut short"));
    assert!(lines.ends_with("1 damaged\n"), "{lines}");
    let output = kip(data, &["snapshot", "verify", "web@1"]).await;
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("the store does not answer"));
    assert_eq!(kip(data, &["snapshot", "verify"]).await.status.code(), Some(2), "which?");

    assert!(said(data, &["snapshot", "export", "web", "/tmp/web.kip"]).await.starts_with("web@1 in /tmp/web.kip"));
    let told = said(data, &["snapshot", "import", "web.kip", "--name", "copy"]).await;
    assert!(told.starts_with("copy@1 is in the store, free to adopt"), "{told}");
    assert!(said(data, &["snapshot", "gc", "--grace", "7s"]).await.starts_with("deleted: 0 objects"));
    let heard = served.fake.heard.lock().clone();
    assert!(heard.contains(&"CollectRequest { dry_run: false, grace_ms: 7000 }".to_owned()), "{heard:?}");
    let import = heard.iter().find(|request| request.starts_with("ImportRequest")).unwrap();
    assert!(import.contains("/web.kip") && !import.contains("\"web.kip"), "its path is absolute: {import}");
}

// promise spawn: what `kip spawn`, `kip procs` and `kip evict` print, for a person and as JSON, and
//   exit with
// held by: this, `tests/test_spawn.py::test_ends`
#[tokio::test]
async fn procs_by_spawn() {
    let (dir, _served) = start().await;
    let data = dir.path();
    assert_eq!(said(data, &["spawn", "--class", "be", "--env", "A=b", "/bin/x", "--y"]).await, "job-2\n");
    assert_eq!(json(&said(data, &["--json", "spawn", "--queue", "x", "y"]).await)["command"][1], "y");
    assert_eq!(said(data, &["procs"]).await, "there are no procs by spawn\n");
    assert!(said(data, &["procs", "--all"]).await.lines().nth(1).unwrap().contains("exit code 3"));
    assert_eq!(json(&said(data, &["--json", "procs", "-a"]).await)[0]["end"]["why"], "exited");
    assert_eq!(said(data, &["evict", "job-2", "--reason", "r"]).await, "job-2 is to end\n");
    assert_eq!(said(data, &["evict", "job-1"]).await, "job-1 has ended: exit code 3\n");
    assert!(refused(data, &["evict", "job-9"]).await.contains("job-9"));
    assert_eq!(kip(data, &["spawn", "--detached", "x"]).await.status.code(), Some(2));
}

// promise tree: what `kip tree` prints, for a person and as JSON
#[tokio::test]
async fn a_tree() {
    let (dir, _served) = start().await;
    let data = dir.path();
    assert_eq!(said(data, &["tree", "ls"]).await, "");
    assert_eq!(said(data, &["tree", "put", "/a b", "/dev/null", "--lease", "1f"]).await, "/a b version 1\n");
    assert_eq!(said(data, &["tree", "mkdir", "-p", "/d/e"]).await, "/d/e version 3\n");
    assert_eq!(said(data, &["tree", "ls"]).await, "a b\nd/\n");
    let table = "SIZE  VERSION  LEASE  NAME\n0     1        1f     a b\n-     2        -      d/\n";
    assert_eq!(said(data, &["tree", "ls", "-l"]).await, table);
    assert_eq!(json(&said(data, &["--json", "tree", "ls", "/d"]).await)[0]["path"], "/d/e");
    let stat = "path     /a b\nkind     file\nsize     0\nversion  1\ncreated  1\nlease    1f\n";
    assert_eq!(said(data, &["tree", "stat", "/a b"]).await, stat);
    let cat = json(&said(data, &["--json", "tree", "cat", "/a b"]).await);
    assert_eq!(cat, serde_json::json!({ "path": "/a b", "version": 1, "text": "" }));
    let stale = "/a b has the version 1 by now, not 2";
    assert_eq!(refused(data, &["tree", "put", "/a b", "/dev/null", "--if-version", "2"]).await, stale);
    assert_eq!(refused(data, &["tree", "put", "/a b", "/dev/null", "--new"]).await, "/a b is there already");
    assert_eq!(said(data, &["tree", "mv", "/a b", "/c"]).await, "/c version 4\n");
    assert_eq!(said(data, &["tree", "rm", "/c"]).await, "/c removed\n");
    let watch = "     101  created  /d\n     109  written  /d\n     109  removed  /d\n";
    assert_eq!(said(data, &["tree", "watch", "/d"]).await, watch);
    let lines = said(data, &["--json", "tree", "watch", "/d", "--from", "7"]).await;
    assert_eq!(json(lines.lines().next().unwrap())["revision"], 8);
    let gone = kip(data, &["tree", "watch", "/gone"]).await;
    assert_eq!((gone.status.code(), text(&gone.stdout).lines().count()), (Some(1), 1));
    assert_eq!(text(&gone.stderr), "kip: changes are not kept any more\n");
    assert_eq!(said(data, &["tree", "lease", "grant", "10s"]).await, "1f\n");
    assert_eq!(said(data, &["tree", "lease", "keep", "1f"]).await, "lease 1f has 9.0s\n");
    assert_eq!(said(data, &["tree", "lease", "ls"]).await, "LEASE  TTL  LEFT\n1f     10s  9.0s\n");
    assert_eq!(said(data, &["tree", "lease", "revoke", "1f"]).await, "lease 1f revoked\n");
    assert_eq!(refused(data, &["tree", "lease", "keep", "2"]).await, "the lease 2 has run out");
}
