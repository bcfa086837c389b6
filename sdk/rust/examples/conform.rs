//! Carries out calls for the conformance tests of the SDKs: a line is a call and its arguments
//! in JSON, answered with its value or the number of its error.

use kip_sdk::{Client, Error, Fence, Lease, Node, Put, Spawn, SpawnEnd, Spawned, Watch};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::time::Duration;

/// What calls refer to.
#[derive(Default)]
struct Session {
    client: Client,
    watches: BTreeMap<String, Watch>,
}

fn text(value: &Value, name: &str) -> String {
    value[name].as_str().unwrap_or_default().to_owned()
}

fn fence(value: &Value) -> Option<Fence> {
    let fence = value.get("fence")?;
    Some(Fence { path: text(fence, "path"), epoch: fence["epoch"].as_u64().unwrap_or(0) })
}

fn node(node: &Node) -> Value {
    json!({"path": node.path, "directory": node.directory, "size": node.size, "version": node.version,
        "created": node.created, "lease": node.lease})
}

fn lease(lease: &Lease) -> Value {
    json!({"id": lease.id, "ttl_ms": lease.ttl_ms})
}

fn spawned(spawned: &Spawned) -> Value {
    json!({"name": spawned.name, "started": spawned.started, "evicted": spawned.evicted})
}

fn end(end: &SpawnEnd) -> Value {
    json!({"why": end.why, "exit_code": end.exit_code, "signal": end.signal, "status": end.status, "message": end.message})
}

fn call(session: &mut Session, asked: &Value) -> Result<Value, Error> {
    let (client, path) = (&session.client, text(asked, "path"));
    let version = asked["version"].as_u64();
    Ok(match asked["call"].as_str().unwrap_or_default() {
        "whoami" => {
            let identity = client.whoami()?;
            json!({"name": identity.name, "realm": identity.realm, "clone_count": identity.clone_count})
        }
        "stat" => node(&client.stat(&path)?),
        "ls" => client.ls(&path)?.iter().map(|one| one.path.clone()).collect(),
        "get" => json!(String::from_utf8_lossy(&client.get(&path)?)),
        "put" => {
            let contents = text(asked, "text").repeat(asked["times"].as_u64().unwrap_or(1) as usize);
            let new = asked["new"].as_bool().unwrap_or(false);
            let how = Put { new, version, lease: asked["lease"].as_u64(), fence: fence(asked) };
            node(&client.put(&path, contents.as_bytes(), &how)?)
        }
        "mkdir" => node(&client.mkdir(&path, fence(asked))?),
        "rm" => client.rm(&path, version, fence(asked)).map(|()| Value::Null)?,
        "mv" => {
            node(&client.mv(&path, &text(asked, "to"), asked["replace"].as_bool().unwrap_or(false), fence(asked))?)
        }
        "grant" => {
            let ttl = Duration::from_millis(asked["ttl_ms"].as_u64().unwrap_or(0));
            lease(&client.grant(ttl, asked["with_proc"].as_bool().unwrap_or(false))?)
        }
        "keep" => lease(&client.keep(asked["lease"].as_u64().unwrap_or(0))?),
        "revoke" => client.revoke(asked["lease"].as_u64().unwrap_or(0)).map(|()| Value::Null)?,
        "leases" => client.leases()?.iter().map(lease).collect(),
        "spawn" => {
            let words = asked["command"].as_array().into_iter().flatten();
            let command = words.map(|word| word.as_str().unwrap_or_default().to_owned()).collect();
            let says_started = asked["says_started"].as_bool().unwrap_or(false);
            json!(client.spawn(Spawn { command, says_started, ..Spawn::default() })?)
        }
        "wait_start" => spawned(&client.wait_start(&text(asked, "name"))?),
        "wait_exit" => end(&client.wait_exit(&text(asked, "name"))?),
        "started" => client.started().map(|()| Value::Null)?,
        "exited" => client.exited(1, "").map(|()| Value::Null)?,
        "evict" => spawned(&client.evict(&text(asked, "name"), &text(asked, "reason"), None)?),
        "wait_evict" => json!(client.wait_evict()?),
        "watch" => {
            let watch = client.watch(&path, asked["only"].as_bool().unwrap_or(false), asked["after"].as_u64())?;
            session.watches.insert(path, watch);
            Value::Null
        }
        "next" => {
            let watch = session.watches.get_mut(&path).expect("a watch of that path was begun");
            let changes = watch.next_changes()?;
            changes.changes.iter().map(|one| json!([one.kind, one.path])).collect()
        }
        other => panic!("there is no call {other}"),
    })
}

fn main() -> std::io::Result<()> {
    let port = std::env::args().nth(1).and_then(|port| port.parse().ok()).expect("a port");
    let listener = TcpListener::bind(("0.0.0.0", port))?;
    let mut session = Session::default();
    for stream in listener.incoming() {
        let mut stream = stream?;
        let reader = BufReader::new(stream.try_clone()?);
        for line in reader.lines() {
            let Ok(line) = line else { break };
            let asked: Value = serde_json::from_str(&line)?;
            let answer = match call(&mut session, &asked) {
                Ok(value) => json!({ "ok": value }),
                Err(error) => match error.code() {
                    Some(code) => json!({ "error": i32::from(code) }),
                    None => json!({ "trouble": format!("{error:?}") }),
                },
            };
            writeln!(stream, "{answer}")?;
        }
    }
    Ok(())
}
