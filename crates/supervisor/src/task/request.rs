//! Requests of Kip's own to a proc, for checks and hooks.

use kip_engine::host::Proc;
use kip_net::addr::Addresses;
use kip_net::nat::OWN_MARK;
use kip_sys::sock::{IntOption, set_int};
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd as _;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

/// The first line of an answer, bytes.
const STATUS_LINE: usize = 12;
/// The end of a connection is waited for no longer than this: a program does not have to take
/// notice of it.
const CLOSED_WITHIN: Duration = Duration::from_millis(200);
/// Nor is more of an answer read, bytes.
const LONGEST_ANSWER: u64 = 1 << 20;

/// By the proc's own link and no other way: when that is gone, its address is another host's,
/// somewhere.
async fn connect(proc: &Proc, port: u16) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    // Also while its clients wait.
    set_int(socket.as_fd(), IntOption::Mark, OWN_MARK as i32)?;
    socket.bind_device(Some(proc.shared.instance.interface(proc.slot).as_bytes()))?;
    let address = Addresses::of(proc.shared.instance, proc.slot).v4;
    let own = proc.meter.own_connection();
    let stream = socket.connect(SocketAddr::new(IpAddr::V4(address), port)).await?;
    own.made();
    Ok(stream)
}

/// Until the program has closed the connection, too. One that falls asleep before would wake for
/// its end.
async fn until_closed(stream: TcpStream) {
    let (mut rest, mut nowhere) = (stream.take(LONGEST_ANSWER), tokio::io::sink());
    let _ = tokio::time::timeout(CLOSED_WITHIN, tokio::io::copy(&mut rest, &mut nowhere)).await;
}

/// Whether it takes a connection at a port.
pub(super) async fn connects(proc: &Proc, port: u16) -> Result<(), String> {
    let mut stream = connect(proc, port).await.map_err(|e| e.to_string())?;
    if stream.shutdown().await.is_ok() {
        until_closed(stream).await;
    }
    Ok(())
}

/// Whether a GET is answered with a status from 200 to 399. `headers` are in addition.
pub(super) async fn get(proc: &Proc, port: u16, path: &str, headers: &[(String, String)]) -> Result<(), String> {
    let address = Addresses::of(proc.shared.instance, proc.slot).v4;
    let mut stream = connect(proc, port).await.map_err(|e| e.to_string())?;
    let mut request =
        format!("GET {path} HTTP/1.1\r\nHost: {address}:{port}\r\nUser-Agent: kip\r\nConnection: close\r\n");
    for (name, value) in headers {
        let _ = write!(request, "{name}: {value}\r\n");
    }
    request.push_str("\r\n");
    stream.write_all(request.as_bytes()).await.map_err(|e| e.to_string())?;
    let mut line = [0; STATUS_LINE];
    stream.read_exact(&mut line).await.map_err(|e| e.to_string())?;
    let status = std::str::from_utf8(&line).ok().filter(|line| line.starts_with("HTTP/1."));
    let status: u16 = status.and_then(|line| line[9..].parse().ok()).ok_or("the answer is not HTTP")?;
    until_closed(stream).await;
    if (200..400).contains(&status) { Ok(()) } else { Err(format!("status {status}")) }
}
