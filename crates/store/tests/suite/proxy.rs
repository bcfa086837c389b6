//! A network that fails on demand: between the store and its server, request by request.

use parking_lot::Mutex;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{self, AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// What happens to a request.
#[derive(Debug, Clone)]
pub enum Fault {
    /// It is answered without asking the server: status, S3's code.
    Answer(u16, &'static str),
    /// It is answered with bytes that are no HTTP of an object store.
    Nonsense,
    /// The connection is closed before the server hears of it.
    LoseRequest,
    /// The server acts on it, and the connection is closed instead of an answer.
    LoseAnswer,
    /// The server acts on it, and nothing more is heard.
    HoldAnswer,
    /// Nothing more is heard, and the server never hears of it.
    Hold,
    /// The server acts on it, and a proxy between answers something else.
    Instead(u16, &'static str),
    /// Its body is taken in pieces of this many bytes, with a pause after each.
    Trickle(usize, Duration),
    /// So many bytes of its body are taken, and no more.
    Choke(usize),
    /// The answer comes this much later.
    Delay(Duration),
    /// The answer comes once the test says so.
    Gate(Arc<Notify>),
    /// The body ends after so many bytes, and so does the connection.
    Cut(usize),
    /// The body stops after so many bytes, and the connection does not end.
    Stall(usize),
    /// The body comes in pieces of this many bytes, with a pause after each.
    Drip(usize, Duration),
    /// The first bit of this byte of the body turns.
    Flip(usize),
}

/// A request that came by.
#[derive(Debug, Clone)]
pub struct Seen {
    /// Method and target.
    pub line: String,
    head: String,
}

impl Seen {
    pub fn is(&self, method: &str) -> bool {
        self.line.starts_with(method)
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (found, value) = line.split_once(':')?;
            found.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }
}

type Concerns = Box<dyn Fn(&Seen) -> bool + Send>;

struct Rule {
    concerns: Concerns,
    fault: Fault,
    times: usize,
}

#[derive(Default)]
struct Inside {
    rules: Vec<Rule>,
    seen: Vec<Seen>,
    /// Connections that the client closed while it was owed an answer.
    abandoned: usize,
}

pub struct Proxy {
    pub address: SocketAddr,
    inside: Arc<Mutex<Inside>>,
    task: JoinHandle<()>,
}

impl Proxy {
    pub async fn before(server: SocketAddr) -> Proxy {
        Proxy::listening(TcpListener::bind("127.0.0.1:0").await.expect("a free port"), server)
    }

    /// One whose side of a connection holds next to nothing, so that the sender sees how slowly
    /// bytes are taken.
    pub async fn narrow(server: SocketAddr) -> Proxy {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.set_recv_buffer_size(16 << 10).expect("a small one");
        socket.bind("127.0.0.1:0".parse().expect("an address")).expect("a free port");
        Proxy::listening(socket.listen(64).expect("bound"), server)
    }

    fn listening(listener: TcpListener, server: SocketAddr) -> Proxy {
        let address = listener.local_addr().expect("bound");
        let inside = Arc::<Mutex<Inside>>::default();
        let shared = inside.clone();
        let task = tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.expect("accept(2) on loopback");
                let inside = shared.clone();
                tokio::spawn(async move {
                    // A connection may end in any way; what the store makes of it is what is
                    // tested.
                    let _ = serve(client, server, &inside).await;
                });
            }
        });
        Proxy { address, inside, task }
    }

    /// The next so many requests that are concerned meet this fault.
    pub fn fail(&self, times: usize, fault: Fault, concerns: impl Fn(&Seen) -> bool + Send + 'static) {
        self.inside.lock().rules.push(Rule { concerns: Box::new(concerns), fault, times });
    }

    pub fn heal(&self) {
        self.inside.lock().rules.clear();
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.inside.lock().seen.clone()
    }

    pub fn count(&self, method: &str) -> usize {
        self.inside.lock().seen.iter().filter(|seen| seen.is(method)).count()
    }

    pub fn abandoned(&self) -> usize {
        self.inside.lock().abandoned
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Inside {
    fn meet(&mut self, seen: &Seen) -> Option<Fault> {
        self.seen.push(seen.clone());
        let rule = self.rules.iter_mut().find(|rule| rule.times > 0 && (rule.concerns)(seen))?;
        rule.times -= 1;
        Some(rule.fault.clone())
    }
}

struct Message {
    head: String,
    body: Vec<u8>,
}

async fn serve(mut client: TcpStream, server: SocketAddr, inside: &Mutex<Inside>) -> io::Result<()> {
    client.set_nodelay(true)?;
    loop {
        let head = head(&mut client).await?;
        let line = head.lines().next().unwrap_or_default().to_owned();
        let seen = Seen { line, head: head.clone() };
        let length = seen.header("content-length").and_then(|value| value.parse().ok()).unwrap_or(0);
        let mut body = vec![0; length];
        let fault = inside.lock().meet(&seen);
        match fault {
            Some(Fault::Trickle(piece, pause)) => {
                for piece in body.chunks_mut(piece) {
                    client.read_exact(piece).await?;
                    tokio::time::sleep(pause).await;
                }
            }
            Some(Fault::Choke(bytes)) => {
                client.read_exact(&mut body[..bytes]).await?;
                // Whether the client has gone cannot be seen without reading on.
                std::future::pending::<()>().await;
            }
            _ => drop(client.read_exact(&mut body).await?),
        }
        let request = Message { head, body };
        let has_body = !seen.is("HEAD");
        match fault {
            None | Some(Fault::Trickle(..) | Fault::Choke(_)) => {
                send(&mut client, &ask(server, &request, has_body).await?).await?;
            }
            Some(Fault::Instead(status, code)) => {
                ask(server, &request, has_body).await?;
                send(&mut client, &made_up(status, code, has_body)).await?;
            }
            Some(Fault::Answer(status, code)) => send(&mut client, &made_up(status, code, has_body)).await?,
            Some(Fault::Nonsense) => {
                let body = b"<html>Welcome!</html>".to_vec();
                let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
                send(&mut client, &Message { head, body }).await?;
            }
            Some(Fault::LoseRequest) => return Ok(()),
            Some(Fault::LoseAnswer) => return ask(server, &request, has_body).await.map(drop),
            Some(Fault::HoldAnswer) => {
                ask(server, &request, has_body).await?;
                return hold(&mut client, inside).await;
            }
            Some(Fault::Hold) => return hold(&mut client, inside).await,
            Some(Fault::Delay(time)) => {
                tokio::time::sleep(time).await;
                send(&mut client, &ask(server, &request, has_body).await?).await?;
            }
            Some(Fault::Gate(gate)) => {
                gate.notified().await;
                send(&mut client, &ask(server, &request, has_body).await?).await?;
            }
            Some(Fault::Cut(bytes)) => {
                let mut answer = ask(server, &request, has_body).await?;
                let whole = answer.body.len() <= bytes;
                answer.body.truncate(bytes);
                send(&mut client, &answer).await?;
                if !whole {
                    return Ok(());
                }
            }
            Some(Fault::Stall(bytes)) => {
                let mut answer = ask(server, &request, has_body).await?;
                answer.body.truncate(bytes);
                send(&mut client, &answer).await?;
                return hold(&mut client, inside).await;
            }
            Some(Fault::Drip(piece, pause)) => {
                let mut answer = ask(server, &request, has_body).await?;
                let body = std::mem::take(&mut answer.body);
                send(&mut client, &answer).await?;
                for piece in body.chunks(piece) {
                    client.write_all(piece).await?;
                    tokio::time::sleep(pause).await;
                }
            }
            Some(Fault::Flip(at)) => {
                let mut answer = ask(server, &request, has_body).await?;
                answer.body[at] ^= 1;
                send(&mut client, &answer).await?;
            }
        }
    }
}

/// Until the client has enough of it.
async fn hold(client: &mut TcpStream, inside: &Mutex<Inside>) -> io::Result<()> {
    let mut nothing = [0];
    let ended = client.read(&mut nothing).await;
    inside.lock().abandoned += 1;
    ended.map(drop)
}

async fn send(client: &mut TcpStream, answer: &Message) -> io::Result<()> {
    client.write_all(answer.head.as_bytes()).await?;
    client.write_all(&answer.body).await?;
    client.flush().await
}

/// Without a code it is no object store that answers.
fn made_up(status: u16, code: &str, has_body: bool) -> Message {
    let has_body = has_body && !code.is_empty();
    let body = format!("<Error><Code>{code}</Code><Message>as the test wants it</Message></Error>").into_bytes();
    let length = if code.is_empty() { 0 } else { body.len() };
    let head = format!("HTTP/1.1 {status} Made Up\r\nContent-Length: {length}\r\n\r\n");
    Message { head, body: if has_body { body } else { Vec::new() } }
}

/// Asks the server on a connection of its own.
async fn ask(server: SocketAddr, request: &Message, has_body: bool) -> io::Result<Message> {
    let mut stream = TcpStream::connect(server).await?;
    stream.set_nodelay(true)?;
    stream.write_all(request.head.as_bytes()).await?;
    stream.write_all(&request.body).await?;
    let head = head(&mut stream).await?;
    let of_answer = Seen { line: String::new(), head: head.clone() };
    let length: Option<usize> = of_answer.header("content-length").and_then(|value| value.parse().ok());
    let bodiless = !has_body || head.contains(" 204 ") || head.contains(" 304 ");
    let mut body = Vec::new();
    if !bodiless {
        body.resize(length.expect("versitygw gives every body a length"), 0);
        stream.read_exact(&mut body).await?;
    }
    Ok(Message { head, body })
}

/// Up to and with the empty line.
async fn head(stream: &mut TcpStream) -> io::Result<String> {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\r\n\r\n") {
        bytes.push(stream.read_u8().await?);
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
