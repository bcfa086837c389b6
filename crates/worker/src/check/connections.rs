//! The connections of a trial: many to each TCP port, silent, open over a sleep, and what has
//! become of them.
//!
//! A server that closes silent connections does so awake as well; what it does is learned first, so
//! that a sleep is not blamed for it. Many are opened because a wake with many sockets takes other
//! ways than one with a few.

use kip_types::api::{PortView, ProcView};
use kip_types::spec::Protocol;
use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// So many connections are opened to each port, if the server takes them: more than the 48 that fit
/// below the first descriptor that CRIU inherits.
const MANY: usize = 64;
/// All ports together.
const MOST: usize = 512;
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// A server that takes no more lets further clients wait; these are not waited for.
const ANOTHER_WITHIN: Duration = Duration::from_millis(500);
/// What a server says, or that it closes, it does within this time: about as long as a sleep and a
/// wake take.
const LEARN_WITHIN: Duration = Duration::from_secs(2);
/// Lost connections that are named.
const NAMED: usize = 3;

/// How a server treats a connection on which its client says nothing, by port.
#[derive(Debug, Default)]
pub(super) struct Known(BTreeMap<u16, Manner>);

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Manner {
    /// It speaks first.
    greets: bool,
    /// It closes it.
    closes: bool,
}

impl Known {
    /// Opens a connection to each port and looks what comes of it.
    pub(super) async fn learn(view: &ProcView) -> Known {
        let mut learning = JoinSet::new();
        for port in tcp_ports(view) {
            learning.spawn(async move { (port.port, manner_of(&port, LEARN_WITHIN).await.unwrap_or_default()) });
        }
        Known(learning.join_all().await.into_iter().collect())
    }

    /// What cannot be tried because of it.
    pub(super) fn untried(&self) -> Vec<String> {
        let closing = self.0.iter().filter(|(_, manner)| manner.closes);
        closing
            .map(|(port, _)| {
                format!("whether a connection to tcp port {port} survives a sleep: awake, too, the program closes silent ones")
            })
            .collect()
    }

    fn of(&self, port: u16) -> Manner {
        self.0.get(&port).copied().unwrap_or_default()
    }
}

/// The first declared TCP port to which no client can connect yet.
pub(super) async fn silent_port(view: &ProcView) -> Option<u16> {
    for port in tcp_ports(view) {
        if connect(&port, CONNECT_WITHIN).await.is_err() {
            return Some(port.port);
        }
    }
    None
}

/// Open connections.
pub(super) struct Held(Vec<(PortView, Vec<TcpStream>)>);

impl Held {
    /// As many as each server takes.
    pub(super) async fn open(known: &Known, view: &ProcView) -> Held {
        let mut held = Vec::new();
        let mut left = MOST;
        for port in tcp_ports(view) {
            let wanted = if known.of(port.port).closes { 0 } else { MANY.min(left) };
            let mut streams = Vec::new();
            while streams.len() < wanted {
                let within = if streams.is_empty() { CONNECT_WITHIN } else { ANOTHER_WITHIN };
                let Ok(stream) = connect(&port, within).await else { break };
                streams.push(stream);
            }
            left -= streams.len();
            held.push((port, streams));
        }
        Held(held)
    }

    /// Without those that the server has closed already: it does not want so many.
    pub(super) fn without_closed(mut self) -> Held {
        self.0.iter_mut().for_each(|(_, streams)| streams.retain(|stream| ended(stream).is_none()));
        self
    }

    /// What is not as it was. Each server is asked once more after these connections have been
    /// closed: one that serves one after the other takes no other before.
    pub(super) async fn losses(self, known: &Known) -> Vec<String> {
        let mut lost = Vec::new();
        let mut ports = Vec::new();
        for (port, streams) in self.0 {
            let ends: Vec<String> = streams.iter().filter_map(ended).collect();
            let named = ends.iter().take(NAMED);
            lost.extend(named.map(|how| format!("a connection to tcp port {}, which was open, {how}", port.port)));
            if ends.len() > NAMED {
                lost.push(format!("of {} connections to tcp port {} {} ended", streams.len(), port.port, ends.len()));
            }
            ports.push(port);
        }
        for port in ports {
            let greets = known.of(port.port).greets;
            match manner_of(&port, if greets { CONNECT_WITHIN } else { Duration::ZERO }).await {
                Err(e) => lost.push(format!("tcp port {} takes no connection any more: {e}", port.port)),
                Ok(manner) if greets && !manner.greets => {
                    lost.push(format!(
                        "tcp port {} takes connections, but its program says nothing any more",
                        port.port
                    ));
                }
                Ok(_) => {}
            }
        }
        lost
    }
}

fn tcp_ports(view: &ProcView) -> impl Iterator<Item = PortView> + '_ {
    view.ports.iter().filter(|port| port.proto == Protocol::Tcp).cloned()
}

async fn connect(port: &PortView, within: Duration) -> io::Result<TcpStream> {
    let connecting = TcpStream::connect(SocketAddr::new(port.addr, port.port));
    tokio::time::timeout(within, connecting).await.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()))
}

/// Opens a connection and says nothing, at most that long; less if the server speaks and closes
/// sooner.
async fn manner_of(port: &PortView, within: Duration) -> io::Result<Manner> {
    let stream = connect(port, CONNECT_WITHIN).await?;
    let mut manner = Manner::default();
    let until = Instant::now() + within;
    while !manner.closes {
        let left = until.saturating_duration_since(Instant::now());
        let Ok(ready) = tokio::time::timeout(left, stream.readable()).await else { break };
        ready?;
        match stream.try_read(&mut [0; 4096]) {
            Ok(0) => manner.closes = true,
            Ok(_) => manner.greets = true,
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Err(_) => manner.closes = true,
        }
    }
    Ok(manner)
}

/// How a connection on which its client said nothing has ended, if it has. A server may have said
/// something.
fn ended(stream: &TcpStream) -> Option<String> {
    let mut bytes = [0; 4096];
    loop {
        match stream.try_read(&mut bytes) {
            Ok(0) => return Some("was closed".to_owned()),
            Ok(_) => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => return None,
            Err(e) => return Some(format!("was lost: {e}")),
        }
    }
}
