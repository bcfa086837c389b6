//! Api and client over a real unix socket: every route, what is refused and how, and both ends of
//! an API's life.
#![forbid(unsafe_code)]

mod fake;

use fake::{Served, request, serve, until, with_port};
use kip_api::Ending;
use kip_client::{CallError, Client};
use kip_types::api::*;
use kip_types::keys::{Hidden, KeysWrap};
use kip_types::name::ProcName;
use kip_types::{StateName, Tier};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::Ordering;
use tempfile::TempDir;

async fn start() -> (TempDir, Served, Client) {
    let dir = tempfile::tempdir().unwrap();
    let served = serve(dir.path()).await;
    let client = Client::new(dir.path());
    (dir, served, client)
}

fn name(s: &str) -> ProcName {
    s.parse().unwrap()
}

fn parked() -> SleepRequest {
    SleepRequest { to: Tier::Parked, clock: None }
}

fn refusal<T: std::fmt::Debug>(result: Result<T, CallError>) -> Refusal {
    match result.unwrap_err() {
        CallError::Refused(refusal) => refusal,
        other => panic!("{other:?}"),
    }
}

/// Status and body of a request written by hand.
fn by_hand(data: &Path, head: &str, body: &str) -> (u16, String) {
    let mut stream = UnixStream::connect(data.join(kip_api::SOCKET)).unwrap();
    write!(stream, "{head} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len())
        .unwrap();
    // A body that is too long is refused before it is read whole.
    let _ = stream.write_all(body.as_bytes());
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head[9..12].parse().unwrap(), body.to_owned())
}

#[tokio::test]
async fn a_proc_through_its_life() {
    let (_dir, served, client) = start().await;
    let web = name("web");
    let view = client.run(&with_port(request("web", &["lighttpd", "-D"]), 80, Some(8080))).await.unwrap();
    assert_eq!((view.name.as_str(), view.ports[0].host_port), ("web", Some(8080)));
    assert_eq!(client.list().await.unwrap().len(), 1);
    assert_eq!(client.inspect(&web).await.unwrap().state, StateName::Running);

    let slept = client.sleep(&web, parked()).await.unwrap();
    assert_eq!((slept.proc.tier, slept.already), (Some(Tier::Parked), false));
    assert!(client.sleep(&web, parked()).await.unwrap().already);
    let woken = client.wake(&web, Some("00ff")).await.unwrap();
    assert_eq!(woken.proc.last_wake.unwrap().steps[1].us, 6100);
    assert_eq!(client.why(&web).await.unwrap().awake_because.len(), 1);

    assert_eq!(refusal(client.remove(&web, false).await).code, Code::State);
    assert_eq!(refusal(client.start(&web, &StartRequest::default()).await).code, Code::State);
    let stopped = client.stop(&web, Some(1234)).await.unwrap();
    assert_eq!((stopped.exit.as_deref(), stopped.exit_code), (Some("signal 15"), Some(143)));
    let heard = served.fake.heard.lock().clone();
    assert!(heard.contains(&"StopRequest { grace_ms: Some(1234) }".to_owned()));
    assert!(heard.contains(&"WakeRequest { id: Some(\"00ff\") }".to_owned()), "{heard:?}");
    assert_eq!(client.start(&web, &StartRequest::default()).await.unwrap().state, StateName::Running);
    client.remove(&web, true).await.unwrap();
    assert_eq!(refusal(client.inspect(&web).await).code, Code::Unknown);
    assert_eq!(client.info().await.unwrap().pid, std::process::id());
}

#[tokio::test]
async fn volumes_are_asked_for() {
    let (dir, served, client) = start().await;
    assert_eq!(client.volumes().await.unwrap()[0].bytes, 4096);
    let refused = refusal(client.remove_volume(&"db".parse().unwrap()).await);
    assert_eq!((refused.code, refused.message.as_str()), (Code::State, "volume db is in use"));
    assert_eq!(served.fake.heard.lock()[..], ["VolumeName(\"db\")"]);
    let path = dir.path().to_owned();
    let asked = move || by_hand(&path, "DELETE /v1/volumes/.trash-db", "");
    assert_eq!(tokio::task::spawn_blocking(asked).await.unwrap().0, 400);
}

#[tokio::test]
async fn snapshots_are_asked_for() {
    let (dir, served, client) = start().await;
    client.run(&request("web", &["x"])).await.unwrap();
    client.run(&request("db", &["x"])).await.unwrap();
    assert_eq!(client.snapshots(None).await.unwrap().len(), 2);
    assert_eq!(client.snapshots(Some(name("db"))).await.unwrap()[0].name, Some(name("db")));
    let which: SnapshotName = "web@7".parse().unwrap();
    let refused = refusal(client.snapshot(&which).await);
    assert_eq!((refused.code, refused.message.ends_with("web@7")), (Code::Unknown, true));
    let exported = client.export(&which, "/tmp/web.kip".into()).await.unwrap();
    assert_eq!((exported.name, exported.file.as_str()), (name("web"), "/tmp/web.kip"));
    let import = ImportRequest { file: "/tmp/web.kip".into(), name: Some(name("copy")) };
    assert_eq!(client.import(&import).await.unwrap().name, name("copy"));
    assert!(client.collect(&CollectRequest { dry_run: true, grace_ms: 5 }).await.unwrap().dry_run);
    let heard = served.fake.heard.lock().clone();
    assert!(heard.contains(&"CollectRequest { dry_run: true, grace_ms: 5 }".to_owned()), "{heard:?}");
    let mut feed = client.verify(&VerifyRequest { which: None, all: true }).await.unwrap();
    let mut last = None;
    while let Some(item) = feed.next().await.unwrap() {
        last = Some(item);
    }
    assert!(matches!(last, Some(Verified::End { damaged: 1, .. })));
    for (head, body) in [
        ("GET /v1/snapshots/web@x", ""),
        ("GET /v1/snapshots?name=Web", ""),
        ("POST /v1/snapshots/@/export", r#"{"file":"/x"}"#),
        ("POST /v1/snapshots/collect", r#"{"grace":3}"#),
        ("POST /v1/snapshots/import", "{}"),
    ] {
        let path = dir.path().to_owned();
        let (status, text) = tokio::task::spawn_blocking(move || by_hand(&path, head, body)).await.unwrap();
        assert_eq!(status, 400, "{head}: {text}");
    }
}

#[tokio::test]
async fn keys_by_their_routes() {
    let (dir, served, client) = start().await;
    let keys = client.keys().await.unwrap();
    assert_eq!(keys[0].procs, [name("web")]);
    assert_eq!(client.rotate_keys().await.unwrap(), keys[0]);
    assert_eq!(refusal(client.destroy_key("abab", false).await).code, Code::State);
    assert_eq!(client.destroy_key("abab", true).await.unwrap().id, "abab");
    let wrap = || KeysWrap::Passphrase(Hidden("very secret".into()));
    assert_eq!(client.export_keys(wrap()).await.unwrap().bytes.0, b"closed");
    assert_eq!(client.import_keys(wrap(), b"opened".to_vec()).await.unwrap().added, ["opened"]);
    let heard = served.fake.heard.lock().join(" ");
    assert!(heard.contains("6 bytes") && !heard.contains("very secret"), "{heard}");
    let path = dir.path().to_owned();
    let asked = move || by_hand(&path, "POST /v1/keys/import", r#"{"wrap":{"key":"0g"},"bytes":""}"#);
    let (status, body) = tokio::task::spawn_blocking(asked).await.unwrap();
    assert!(status == 400 && body.contains("hexadecimal"), "{status} {body}");
}

#[tokio::test]
async fn refusals_carry_code_line_and_status() {
    let (dir, _served, client) = start().await;
    for (code, status) in [
        ("invalid", 400),
        ("unknown", 404),
        ("taken", 409),
        ("state", 409),
        ("cannot-sleep", 422),
        ("exhausted", 503),
        ("failed", 500),
    ] {
        let refused = refusal(client.inspect(&name(&format!("code-{code}"))).await);
        assert_eq!(serde_json::to_value(refused.code).unwrap(), code);
        let path = dir.path().to_owned();
        let head = format!("GET /v1/procs/code-{code}");
        let (got, body) = tokio::task::spawn_blocking(move || by_hand(&path, &head, "")).await.unwrap();
        assert_eq!(got, status, "{code}");
        assert_eq!(serde_json::from_str::<Refusal>(&body).unwrap(), refused);
    }
    let died = refusal(client.start(&name("panic"), &StartRequest::default()).await);
    assert_eq!(died.code, Code::Failed);
    client.info().await.expect("the API lives on");
}

#[tokio::test]
async fn what_is_not_a_request_is_refused_in_json() {
    let (dir, _served, _client) = start().await;
    let huge = format!("{{\"spec\":\"{}\"}}", "x".repeat(9 << 20));
    for (head, body, status, says) in [
        ("GET /v1/nothing", "", 404, "/v1/nothing"),
        ("PUT /v1/procs", "", 405, "PUT"),
        ("POST /v1/procs", "not json", 400, "expected"),
        ("POST /v1/procs", "", 400, "missing field `spec`"),
        ("POST /v1/procs", r#"{"spec":{"name":"../x","command":["x"]}}"#, 400, "not valid"),
        ("POST /v1/procs", r#"{"spec":{"name":"x","command":[]}}"#, 400, "no command"),
        ("POST /v1/procs", &huge, 413, "body"),
        ("POST /v1/procs/web/sleep", r#"{"to":"frozen"}"#, 400, "frozen"),
        ("POST /v1/procs/web/stop", r#"{"grace":3}"#, 400, "grace"),
        ("PATCH /v1/procs/web", r#"{"image":"host"}"#, 400, "image"),
        ("PATCH /v1/procs/web", r#"{"timing":{"idle":3}}"#, 400, "idle"),
        ("GET /v1/procs/..%2f..%2fetc", "", 400, "not valid"),
        ("GET /v1/procs/%ff", "", 400, "path"),
        ("GET /v1/procs/web/logs?tail=many", "", 400, "query"),
        ("DELETE /v1/procs/web?forse=true", "", 400, "forse"),
        ("POST /v1/procs/web/exec", r#"{"command":["x"]}"#, 426, "upgrade"),
    ] {
        let (path, head, body) = (dir.path().to_owned(), head.to_owned(), body.to_owned());
        let asked = head.clone();
        let (got, answer) = tokio::task::spawn_blocking(move || by_hand(&path, &head, &body)).await.unwrap();
        assert_eq!(got, status, "{asked}: {answer}");
        let refused: Refusal = serde_json::from_str(&answer).unwrap_or_else(|_| panic!("{asked}: {answer}"));
        assert!(refused.message.contains(says), "{asked}: {}", refused.message);
        assert!(!refused.message.contains('\n'), "{asked}: {}", refused.message);
    }
}

#[tokio::test]
async fn a_proc_is_updated() {
    let (_dir, served, client) = start().await;
    let web = name("web");
    client.run(&request("web", &["lighttpd", "-D"])).await.unwrap();
    let change = |json: &str| serde_json::from_str::<UpdateRequest>(json).unwrap();
    let some = change(r#"{"limits":{"memory_bytes":9000000},"timing":{"idle_ms":5},"labels":{"team":"shop"}}"#);
    let view = client.update(&web, &some).await.unwrap();
    assert_eq!((view.spec.limits.memory_bytes, view.spec.timing.idle_ms), (Some(9_000_000), 5));
    assert_eq!(view.spec.labels["team"], "shop");
    let none = change(r#"{"limits":{"memory_bytes":null},"labels":{"team":null}}"#);
    let view = client.update(&web, &none).await.unwrap();
    assert_eq!((view.spec.limits.memory_bytes, view.spec.labels.len()), (None, 0));

    let heard = served.fake.heard.lock().len();
    for (bad, says) in [
        (r#"{"limits":{"memory_bytes":5}}"#, "too small"),
        (r#"{"limits":{"pids":0}}"#, "processes"),
        (r#"{"labels":{"a b":"c"}}"#, "label"),
        (r#"{"stop_signal":"NOTHING"}"#, "signal"),
        (r#"{"timing":{"never":true,"dry_run":true}}"#, "never-sleep"),
    ] {
        let refused = refusal(client.update(&web, &change(bad)).await);
        assert_eq!(refused.code, Code::Invalid, "{bad}");
        assert!(refused.message.contains(says), "{bad}: {}", refused.message);
    }
    assert_eq!(served.fake.heard.lock().len(), heard, "no worker sees what is refused at the edge");
    assert_eq!(refusal(client.update(&name("nobody"), &some).await).code, Code::Unknown);
}

#[tokio::test]
async fn what_is_left_open_is_filled_in() {
    let (_dir, served, client) = start().await;
    let mut open = request("web", &["x"]);
    open.left_open = LeftOpen { name: true, idle: true, park_after: true, archive_after: true };
    let first = client.run(&open).await.unwrap();
    assert_eq!((first.name.as_str(), first.spec.timing.idle_ms), ("web-1", 111));
    assert_eq!(first.spec.timing.park_after_ms, 222);
    assert_eq!(client.run(&open).await.unwrap().name.as_str(), "web-2");
    client.remove(&name("web-1"), true).await.unwrap();
    assert_eq!(client.run(&open).await.unwrap().name.as_str(), "web-1");

    let many: Vec<_> = (0..20)
        .map(|_| {
            tokio::spawn({
                let (c, o) = (client.clone(), open.clone());
                async move { c.run(&o).await }
            })
        })
        .collect();
    for one in many {
        one.await.unwrap().unwrap();
    }
    assert_eq!(served.fake.procs.lock().len(), 22);

    // A taken port is no reason to try other names.
    client.run(&with_port(request("a", &["x"]), 80, Some(8080))).await.unwrap();
    let refused = refusal(client.run(&with_port(open, 80, Some(8080))).await);
    assert_eq!((refused.code, refused.message.as_str()), (Code::Taken, "tcp port 8080 is taken"));
}

// promise command-line: an operation goes on when its client leaves
#[tokio::test]
async fn a_client_that_leaves_in_the_middle_leaves_nothing_half_done() {
    let (_dir, served, client) = start().await;
    let fake = served.fake.clone();
    let run = tokio::spawn({
        let client = client.clone();
        async move { client.run(&request("slow", &["x"])).await }
    });
    until("run begun", || fake.begun.load(Ordering::SeqCst) == 1).await;
    run.abort();
    assert!(run.await.unwrap_err().is_cancelled());
    fake.gate.add_permits(1);
    until("run done", || fake.procs.lock().contains_key(&name("slow"))).await;

    let sleep = tokio::spawn({
        let client = client.clone();
        async move { client.sleep(&name("slow"), parked()).await }
    });
    until("sleep begun", || fake.begun.load(Ordering::SeqCst) == 2).await;
    sleep.abort();
    assert!(sleep.await.unwrap_err().is_cancelled());
    fake.gate.add_permits(1);
    until("asleep", || fake.procs.lock()[&name("slow")].state == StateName::Parked).await;
}

#[tokio::test]
async fn an_ending_daemon_finishes_what_was_begun() {
    let (dir, mut served, client) = start().await;
    let run = tokio::spawn({
        let client = client.clone();
        async move { client.run(&request("slow", &["x"])).await }
    });
    until("run begun", || served.fake.begun.load(Ordering::SeqCst) == 1).await;
    let mut events = client.events(&EventsRequest { follow: true, since: None }).await.unwrap();
    for _ in 0..3 {
        events.next().await.unwrap().unwrap();
    }
    served.stop();
    assert!(events.next().await.unwrap().is_none(), "a feed ends with the api");
    until("the api takes nobody new", || UnixStream::connect(dir.path().join(kip_api::SOCKET)).is_err()).await;
    assert!(!served.ended.is_finished(), "it waits for the run");
    served.fake.gate.add_permits(1);
    assert_eq!(run.await.unwrap().unwrap().name.as_str(), "slow");
    assert_eq!(served.ended.await.unwrap(), Ending::Asked);
    assert!(!dir.path().join(kip_api::SOCKET).exists());
}

#[tokio::test]
async fn down_answers_and_then_ends_the_daemon() {
    let (dir, served, client) = start().await;
    client.run(&request("web", &["x"])).await.unwrap();
    let mut logs =
        client.logs(&name("web"), &LogsRequest { follow: true, tail: Some(0), ..Default::default() }).await.unwrap();
    assert_eq!(logs.next().await.unwrap().unwrap().text, "line 9");
    assert_eq!(client.down(&DownRequest::default()).await.unwrap().ended, [name("web")]);
    assert_eq!(served.ended.await.unwrap(), Ending::Down);
    assert!(logs.next().await.unwrap().is_none());
    let line = client.info().await.unwrap_err().to_string();
    let data = dir.path().display();
    assert_eq!(line, format!("no daemon answers at {data}/run/api.sock: start one with `kip --data {data} up`"));
}

#[tokio::test]
async fn a_new_daemon_replaces_the_socket_of_a_killed_one() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("run")).unwrap();
    drop(std::os::unix::net::UnixListener::bind(dir.path().join(kip_api::SOCKET)).unwrap());
    let client = Client::new(dir.path());
    assert!(matches!(client.info().await, Err(CallError::NoDaemon { .. })));
    let _served = serve(dir.path()).await;
    client.info().await.unwrap();
}
