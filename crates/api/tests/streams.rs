//! Feeds and execs over a real unix socket, and what becomes of them when either end goes away.
#![forbid(unsafe_code)]

mod fake;

use fake::{Served, request, serve, until};
use kip_client::{CallError, Client, Exec, ExecReceived, ExecReceiver};
use kip_types::api::*;
use kip_types::name::ProcName;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use tempfile::TempDir;

async fn start() -> (TempDir, Served, Client) {
    let dir = tempfile::tempdir().unwrap();
    let served = serve(dir.path()).await;
    let client = Client::new(dir.path());
    client.run(&request("web", &["x"])).await.unwrap();
    (dir, served, client)
}

fn name(s: &str) -> ProcName {
    s.parse().unwrap()
}

async fn exec(client: &Client, command: &[&str]) -> Exec {
    let command = command.iter().map(|s| (*s).to_owned()).collect();
    let env = BTreeMap::from([("K".to_owned(), "V".to_owned())]);
    client.exec(&name("web"), &ExecRequest { command, env, ..ExecRequest::default() }).await.unwrap()
}

/// Everything up to the end: stdout, stderr and the end.
async fn finish(mut output: ExecReceiver) -> (Vec<u8>, Vec<u8>, ExecEnd) {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    loop {
        match output.next().await.unwrap() {
            ExecReceived::Stdout(bytes) => out.extend(bytes),
            ExecReceived::Stderr(bytes) => err.extend(bytes),
            ExecReceived::End(end) => return (out, err, end),
        }
    }
}

#[tokio::test]
async fn logs_come_whole_and_in_order_and_end() {
    let (_dir, served, client) = start().await;
    let mut logs = client.logs(&name("web"), &LogsRequest::default()).await.unwrap();
    for n in 0..1000 {
        assert_eq!(logs.next().await.unwrap().unwrap().text, format!("line {n}"));
    }
    assert!(logs.next().await.unwrap().is_none());
    let which = LogsRequest { follow: false, tail: Some(3), since_ms: Some(7) };
    let mut tail = client.logs(&name("web"), &which).await.unwrap();
    assert_eq!(tail.next().await.unwrap().unwrap().at_ms, 997);
    assert!(served.fake.heard.lock().contains(&format!("{which:?}")), "the query arrives as it was asked");
}

#[tokio::test]
async fn a_feed_that_breaks_off_says_why() {
    let (_dir, _served, client) = start().await;
    client.run(&request("unreadable", &["x"])).await.unwrap();
    let which = LogsRequest { tail: Some(2), ..Default::default() };
    let mut logs = client.logs(&name("unreadable"), &which).await.unwrap();
    assert!(logs.next().await.unwrap().is_some());
    assert_eq!(logs.next().await.unwrap_err().to_string(), "the log's disk is gone");
    let unknown = client.logs(&name("nobody"), &which).await.unwrap_err();
    assert!(matches!(unknown, CallError::Refused(Refusal { code: Code::Unknown, .. })), "{unknown:?}");
}

#[tokio::test]
async fn a_silent_feed_ends_when_its_client_goes() {
    let (_dir, served, client) = start().await;
    let open = served.fake.open.clone();
    let mut events = client.events(&EventsRequest { follow: true, since: None }).await.unwrap();
    assert_eq!(events.next().await.unwrap().unwrap().kind, EventKind::Ready);
    assert_eq!(events.next().await.unwrap().unwrap().kind, EventKind::Parked);
    events.next().await.unwrap().unwrap();
    assert_eq!(open.load(Ordering::SeqCst), 1);
    drop(events);
    until("the feed is dropped", || open.load(Ordering::SeqCst) == 0).await;
}

#[tokio::test]
async fn exec_carries_large_input_both_ways_and_the_code() {
    let (_dir, served, client) = start().await;
    let Exec { mut input, output } = exec(&client, &["cat"]).await;
    let sent: Vec<u8> = (0..20_000_000u32).map(|n| (n % 251) as u8).collect();
    let received = tokio::spawn(finish(output));
    input.write(&sent).await.unwrap();
    input.end().await.unwrap();
    let (out, err, end) = received.await.unwrap();
    assert!(out == sent, "all bytes came back in order");
    assert!(err.is_empty() && end.code == 0 && end.refusal.is_none());

    let (_, _, end) = finish(exec(&client, &["exit", "137"]).await.output).await;
    assert_eq!(end.code, 137);
    let (out, err, _) = finish(exec(&client, &["err"]).await.output).await;
    assert_eq!((out.len(), err.as_slice()), (0, &b"{\"K\": \"V\"}\n"[..]));
    let (out, ..) = finish(exec(&client, &["zeros"]).await.output).await;
    assert_eq!(out.len(), FRAME_MAX * 2 + 7, "what is larger than a frame is cut");
    let (.., end) = finish(exec(&client, &["nonesuch"]).await.output).await;
    assert_eq!(end.refusal.unwrap().message, "nonesuch was not found in the proc");
    until("all sessions are over", || served.fake.open.load(Ordering::SeqCst) == 0).await;
}

#[tokio::test]
async fn exec_output_may_come_before_any_input_and_after_its_end() {
    let (_dir, _served, client) = start().await;
    let Exec { mut input, output } = exec(&client, &["count"]).await;
    input.write(b"12345").await.unwrap();
    input.end().await.unwrap();
    assert_eq!(finish(output).await.0, b"5\n");
    // A program that ended does not hinder a client that still sends.
    let Exec { mut input, output } = exec(&client, &["exit", "3"]).await;
    let sending = tokio::spawn(async move { while input.write(&[7; 65536]).await.is_ok() {} });
    assert_eq!(finish(output).await.2.code, 3);
    sending.await.unwrap();
}

#[tokio::test]
async fn a_new_size_of_the_terminal_comes_between_the_bytes() {
    let (_dir, _served, client) = start().await;
    let Exec { mut input, output } = exec(&client, &["cat"]).await;
    input.write(b"before ").await.unwrap();
    input.resize(TerminalSize { rows: 300, columns: 2 }).await.unwrap();
    input.write(b" after").await.unwrap();
    input.end().await.unwrap();
    assert_eq!(finish(output).await.0, b"before 300x2 after");
}

#[tokio::test]
async fn exec_is_refused_before_any_frame() {
    let (_dir, _served, client) = start().await;
    let request = |command: &[&str]| ExecRequest {
        command: command.iter().map(|s| (*s).to_owned()).collect(),
        ..ExecRequest::default()
    };
    let refused = client.exec(&name("nobody"), &request(&["x"])).await.unwrap_err();
    assert!(matches!(refused, CallError::Refused(Refusal { code: Code::Unknown, .. })), "{refused:?}");
    let refused = client.exec(&name("web"), &request(&[])).await.unwrap_err();
    assert!(matches!(refused, CallError::Refused(Refusal { code: Code::Invalid, .. })), "{refused:?}");
}

#[tokio::test]
async fn a_client_that_goes_ends_its_exec() {
    let (_dir, served, client) = start().await;
    let open = served.fake.open.clone();
    drop(exec(&client, &["cat"]).await);
    until("a waiting program is ended", || open.load(Ordering::SeqCst) == 0).await;

    let Exec { input, mut output } = exec(&client, &["endless"]).await;
    assert!(matches!(output.next().await.unwrap(), ExecReceived::Stdout(_)));
    drop((input, output));
    until("a writing program is ended", || open.load(Ordering::SeqCst) == 0).await;

    // The API cannot read from this client, because the program does not take what came before.
    let Exec { mut input, output } = exec(&client, &["deaf"]).await;
    let stuck = tokio::time::timeout(std::time::Duration::from_millis(300), input.write(&[7; 8 << 20])).await;
    assert!(stuck.is_err(), "the client is held back");
    assert_eq!(open.load(Ordering::SeqCst), 1);
    drop((input, output));
    until("a deaf program is ended", || open.load(Ordering::SeqCst) == 0).await;
}

#[tokio::test]
async fn an_ending_daemon_ends_its_execs() {
    let (_dir, mut served, client) = start().await;
    let Exec { input: _input, mut output } = exec(&client, &["deaf"]).await;
    served.stop();
    let lost = output.next().await.unwrap_err();
    assert!(matches!(lost, CallError::Lost(_)), "{lost:?}");
    until("ended", || served.fake.open.load(Ordering::SeqCst) == 0).await;
    served.ended.await.unwrap();
}
