//! Names of procs in DNS: a resolver at 127.0.0.11:53 inside each proc of a network, which
//! /etc/resolv.conf there names first.
//!
//! It answers for the names and aliases of the procs of that network, as they are at that moment,
//! and hands all other questions to the machine's own name servers, unchanged. Its sockets are made
//! in the proc's network namespace and held by the keeper, so that a question that comes while no
//! daemon runs is answered by the next. A proc with a port 53 of its own has none: the address is
//! the program's then. A question wakes no proc, and keeps none awake. Sources: RFC 1035, RFC 6891,
//! resolv.conf(5).

use super::{Host, Proc};
use crate::fd_store::key;
use hickory_proto::op::{Edns, Message, MessageType, OpCode, ResponseCode};
use hickory_proto::rr::{DNSClass, RData, Record, RecordType};
use kip_net::addr::Addresses;
use kip_sys::netns;
use parking_lot::Mutex;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener as StdListener, UdpSocket as StdUdp};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tokio::time::timeout;

/// Where programs find it: the address that Docker's has.
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 11);
const PORT: u16 = 53;
/// How long an answer is good for, seconds.
const TTL_S: u32 = 60;
/// A name server that does not answer for so long is left for the next one.
const ANSWERS_WITHIN: Duration = Duration::from_secs(3);
/// A connection on which nothing comes for so long is closed.
const TCP_IDLE: Duration = Duration::from_secs(10);
/// Questions that one proc may have on their way to the machine's name servers, and connections to
/// its resolver.
const AT_ONCE: usize = 64;
/// Questions and connections of one proc that are answered in a second; what comes faster waits,
/// and is dropped where too much waits. A program that floods its resolver would keep a core of the
/// machine busy.
const IN_A_SECOND: u32 = 1000;
/// So many may come at once.
const BURST: u32 = IN_A_SECOND / 5;
/// Largest message, bytes.
const LARGEST: usize = 65_535;
/// The largest answer by UDP that the resolver announces to the client, bytes: RFC 9715 has 1,232
/// for what passes every network.
const UDP_PAYLOAD: u16 = 1232;

/// The resolver of a proc; dropped, it ends.
#[derive(Debug, Default)]
pub struct Resolver(Mutex<Option<AbortHandle>>);

impl Resolver {
    /// Ends it. Its sockets live as long as they are held.
    pub fn end(&self) {
        if let Some(task) = self.0.lock().take() {
            task.abort();
        }
    }

    fn replace(&self, task: AbortHandle) {
        if let Some(before) = self.0.lock().replace(task) {
            before.abort();
        }
    }
}

impl Drop for Resolver {
    fn drop(&mut self) {
        self.end();
    }
}

/// Whether a proc has a resolver.
pub fn has_one(proc: &Proc) -> bool {
    proc.spec.network.is_some() && !proc.spec.ports.iter().any(|port| port.port == PORT)
}

/// Makes the resolver of a proc whose network namespace is new. What fails is logged: names are in
/// its /etc/hosts too.
pub fn make(proc: &Proc, namespace: BorrowedFd<'_>) {
    if !has_one(proc) {
        return;
    }
    let held = sockets(namespace).and_then(|(udp, tcp)| {
        let fds = vec![(key::DNS_UDP.to_owned(), udp), (key::DNS_TCP.to_owned(), tcp)];
        proc.fd_store.hold(fds).map_err(io::Error::other)
    });
    match held {
        Ok(()) => take_up(proc),
        Err(error) => tracing::warn!(proc = %proc.name, %error, "names are not in its DNS"),
    }
}

/// Answers by the sockets that are held, if there are any. Until all procs are known, questions
/// wait in them.
pub fn take_up(proc: &Proc) {
    if !proc.shared.knows_names.load(Ordering::SeqCst) {
        return;
    }
    let (Some(udp), Some(tcp)) = (proc.fd_store.get(key::DNS_UDP), proc.fd_store.get(key::DNS_TCP)) else { return };
    let (Some(network), Ok(runtime)) = (proc.spec.network.clone(), tokio::runtime::Handle::try_current()) else {
        return;
    };
    let names = Names { machine: Arc::clone(&proc.shared), network };
    let started = (|| {
        let _within = runtime.enter();
        let udp = UdpSocket::from_std(StdUdp::from(udp.try_clone()?))?;
        let tcp = TcpListener::from_std(StdListener::from(tcp.try_clone()?))?;
        io::Result::Ok(runtime.spawn(serve(Arc::new(names), Arc::new(udp), tcp)).abort_handle())
    })();
    match started {
        Ok(task) => proc.resolver.replace(task),
        Err(error) => tracing::warn!(proc = %proc.name, %error, "names are not in its DNS"),
    }
}

/// Its sockets, in that network namespace.
fn sockets(namespace: BorrowedFd<'_>) -> io::Result<(OwnedFd, OwnedFd)> {
    let make = || {
        netns::enter_net(namespace)?;
        let (udp, tcp) = (StdUdp::bind((ADDRESS, PORT))?, StdListener::bind((ADDRESS, PORT))?);
        udp.set_nonblocking(true)?;
        tcp.set_nonblocking(true)?;
        Ok((udp.into(), tcp.into()))
    };
    // A thread of its own, for it does not come back.
    std::thread::scope(|scope| scope.spawn(make).join().expect("making sockets does not panic"))
}

/// The procs of a network.
struct Names {
    machine: Arc<Host>,
    network: String,
}

impl Names {
    /// The addresses of the proc that has this name there, without regard to case.
    fn addresses(&self, name: &str) -> Option<(Ipv4Addr, Ipv6Addr)> {
        let name = name.trim_end_matches('.');
        let is_it = |proc: &Proc| {
            let mut names = std::iter::once(proc.name.as_str()).chain(proc.spec.aliases.iter().map(String::as_str));
            proc.spec.network.as_ref() == Some(&self.network) && names.any(|known| known.eq_ignore_ascii_case(name))
        };
        let slot = self.machine.live_procs().iter().find(|proc| is_it(proc))?.slot;
        let Addresses { v4, v6, .. } = Addresses::of(self.machine.instance, slot);
        Some((v4, v6))
    }
}

/// The answer to a question, if it is for a name that `addresses` knows; none if it is for others
/// to answer.
fn answer(question: &[u8], addresses: impl Fn(&str) -> Option<(Ipv4Addr, Ipv6Addr)>) -> Option<Vec<u8>> {
    let asked = Message::from_vec(question).ok()?;
    let [query] = asked.queries.as_slice() else { return None };
    if asked.metadata.op_code != OpCode::Query || !matches!(query.query_class, DNSClass::IN | DNSClass::ANY) {
        return None;
    }
    let (v4, v6) = addresses(&query.name.to_ascii())?;
    let mut message = Message::response(asked.metadata.id, OpCode::Query);
    message.metadata.authoritative = true;
    message.metadata.recursion_desired = asked.metadata.recursion_desired;
    message.metadata.recursion_available = true;
    message.add_query(query.clone());
    let wants = |kind| query.query_type == kind || query.query_type == RecordType::ANY;
    let all = [(RecordType::A, RData::A(v4.into())), (RecordType::AAAA, RData::AAAA(v6.into()))];
    for (_, data) in all.into_iter().filter(|(kind, _)| wants(*kind)) {
        message.add_answer(Record::from_rdata(query.name.clone(), TTL_S, data));
    }
    if asked.edns.is_some() {
        let mut edns = Edns::new();
        edns.set_max_payload(UDP_PAYLOAD);
        message.set_edns(edns);
    }
    message.to_vec().ok()
}

/// Whether the machine's name servers are asked: one question, and nothing that they might do or
/// tell for this machine alone.
fn is_for_others(question: &[u8]) -> bool {
    Message::from_vec(question).is_ok_and(|asked| {
        let kinds = [RecordType::AXFR, RecordType::IXFR];
        (asked.metadata.message_type, asked.metadata.op_code) == (MessageType::Query, OpCode::Query)
            && matches!(asked.queries.as_slice(), [query] if !kinds.contains(&query.query_type))
    })
}

/// Says no to a question; none if it is no message.
fn refusal(question: &[u8], code: ResponseCode) -> Option<Vec<u8>> {
    let asked = Message::from_vec(question).ok().filter(|asked| asked.metadata.message_type == MessageType::Query)?;
    let mut message = Message::error_msg(asked.metadata.id, asked.metadata.op_code, code);
    message.metadata.recursion_desired = asked.metadata.recursion_desired;
    message.add_queries(asked.queries);
    message.to_vec().ok()
}

/// The machine's name servers.
fn servers() -> Vec<SocketAddr> {
    let text = kip_sandbox::base::resolv_conf("/".as_ref()).and_then(|path| std::fs::read_to_string(path).ok());
    servers_in(&text.unwrap_or_default())
}

/// The name servers of a resolv.conf(5).
fn servers_in(text: &str) -> Vec<SocketAddr> {
    let address = |line: &str| line.trim().strip_prefix("nameserver")?.trim().parse::<IpAddr>().ok();
    // What listens on the machine's loopback is for the machine.
    let outside = |address: &IpAddr| !address.is_loopback() && !address.is_unspecified();
    text.lines().filter_map(address).filter(outside).map(|address| SocketAddr::new(address, PORT)).collect()
}

/// How fast a proc is answered, by UDP and all its connections together: [`IN_A_SECOND`].
#[derive(Debug, Clone)]
struct Pace(Arc<Mutex<Instant>>);

impl Pace {
    fn new(now: Instant) -> Pace {
        Pace(Arc::new(Mutex::new(now)))
    }

    /// Counts one at `now`; how long it has to wait for its turn.
    fn take(&self, now: Instant) -> Duration {
        let each = Duration::from_secs(1) / IN_A_SECOND;
        // When all that were counted have had their turn, had none come at once.
        let mut paid = self.0.lock();
        *paid = (*paid).max(now) + each;
        paid.saturating_duration_since(now).saturating_sub(each * BURST)
    }

    async fn turn(&self) {
        let wait = self.take(Instant::now());
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
    }
}

async fn serve(names: Arc<Names>, udp: Arc<UdpSocket>, tcp: TcpListener) {
    let (forwards, connections) = (Arc::new(Semaphore::new(AT_ONCE)), Arc::new(Semaphore::new(AT_ONCE)));
    let pace = Pace::new(Instant::now());
    let mut buffer = vec![0; LARGEST];
    loop {
        pace.turn().await;
        tokio::select! {
            came = udp.recv_from(&mut buffer) => match came {
                Ok((length, from)) => datagram(&names, &udp, &buffer[..length], from, &forwards).await,
                // An answer could not be delivered.
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            },
            came = tcp.accept() => match came {
                Ok((stream, _)) => {
                    // One too many is closed.
                    let Ok(permit) = Arc::clone(&connections).try_acquire_owned() else { continue };
                    let (names, pace) = (Arc::clone(&names), pace.clone());
                    tokio::spawn(async move {
                        let _ = connection(&names, stream, &pace).await;
                        drop(permit);
                    });
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            },
        }
    }
}

async fn datagram(names: &Names, udp: &Arc<UdpSocket>, question: &[u8], from: SocketAddr, forwards: &Arc<Semaphore>) {
    if let Some(bytes) = answer(question, |name| names.addresses(name)) {
        // A client that has gone does not want it any more.
        let _ = udp.send_to(&bytes, from).await;
        return;
    }
    if !is_for_others(question) {
        if let Some(bytes) = refusal(question, ResponseCode::Refused) {
            let _ = udp.send_to(&bytes, from).await;
        }
        return;
    }
    // One too many is dropped, and asked again by its client.
    let Ok(permit) = Arc::clone(forwards).try_acquire_owned() else { return };
    let (udp, question) = (Arc::clone(udp), question.to_vec());
    tokio::spawn(async move {
        if let Some(bytes) = by_udp(&question, &servers()).await.or_else(|| refusal(&question, ResponseCode::ServFail))
        {
            let _ = udp.send_to(&bytes, from).await;
        }
        drop(permit);
    });
}

/// The answer of the first of those servers that gives one.
async fn by_udp(question: &[u8], servers: &[SocketAddr]) -> Option<Vec<u8>> {
    for server in servers {
        let asked = async {
            let own: SocketAddr =
                if server.is_ipv4() { (Ipv4Addr::UNSPECIFIED, 0).into() } else { (Ipv6Addr::UNSPECIFIED, 0).into() };
            let socket = UdpSocket::bind(own).await?;
            socket.connect(server).await?;
            socket.send(question).await?;
            let mut buffer = vec![0; LARGEST];
            loop {
                let length = socket.recv(&mut buffer).await?;
                // By its number: an answer to something else is none.
                if buffer[..length].get(..2) == question.get(..2) {
                    buffer.truncate(length);
                    return io::Result::Ok(buffer);
                }
            }
        };
        if let Ok(Ok(bytes)) = timeout(ANSWERS_WITHIN, asked).await {
            return Some(bytes);
        }
    }
    None
}

/// Questions by TCP, each after its length.
async fn connection(names: &Names, mut stream: TcpStream, pace: &Pace) -> io::Result<()> {
    while let Ok(question) = timeout(TCP_IDLE, read(&mut stream)).await {
        let question = question?;
        pace.turn().await;
        let bytes = match answer(&question, |name| names.addresses(name)) {
            Some(bytes) => Some(bytes),
            None if !is_for_others(&question) => refusal(&question, ResponseCode::Refused),
            None => by_tcp(&question, &servers()).await.or_else(|| refusal(&question, ResponseCode::ServFail)),
        };
        match bytes {
            Some(bytes) => write(&mut stream, &bytes).await?,
            None => break,
        }
    }
    Ok(())
}

async fn by_tcp(question: &[u8], servers: &[SocketAddr]) -> Option<Vec<u8>> {
    for server in servers {
        let asked = async {
            let mut stream = TcpStream::connect(server).await?;
            write(&mut stream, question).await?;
            read(&mut stream).await
        };
        if let Ok(Ok(bytes)) = timeout(ANSWERS_WITHIN, asked).await {
            return Some(bytes);
        }
    }
    None
}

async fn read(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let length = stream.read_u16().await?;
    let mut bytes = vec![0; length.into()];
    stream.read_exact(&mut bytes).await?;
    Ok(bytes)
}

async fn write(stream: &mut TcpStream, message: &[u8]) -> io::Result<()> {
    let length = u16::try_from(message.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes(), message].concat()).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use hickory_proto::op::Query;
    use hickory_proto::rr::Name;

    #[test]
    fn a_flood_of_questions_is_answered_slowly() {
        let begun = Instant::now();
        let pace = Pace::new(begun);
        let at = |ms| begun + Duration::from_millis(ms);
        assert!((0..BURST).all(|_| pace.take(at(0)).is_zero()), "some may come at once");
        let waited: Vec<u128> = (0..3).map(|_| pace.take(at(0)).as_millis()).collect();
        assert_eq!(waited, [1, 2, 3]);
        assert!(pace.take(at(1000)).is_zero(), "after a while of quiet");
        assert!((0..5000).all(|n| pace.take(at(2000 + 2 * n)).is_zero()), "500 a second");
    }

    const V4: Ipv4Addr = Ipv4Addr::new(10, 213, 0, 7);
    const V6: Ipv6Addr = Ipv6Addr::new(0xfd6b, 0, 0, 0, 0, 0, 0, 7);

    fn question(name: &str, kind: RecordType, edns: bool) -> Vec<u8> {
        let mut message = Message::query();
        message.metadata.recursion_desired = true;
        message.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
        if edns {
            message.set_edns(Edns::new());
        }
        message.to_vec().unwrap()
    }

    fn known(name: &str) -> Option<(Ipv4Addr, Ipv6Addr)> {
        name.trim_end_matches('.').eq_ignore_ascii_case("store").then_some((V4, V6))
    }

    #[test]
    fn names_of_the_network_are_answered_and_no_others() {
        let of = |name, kind, edns| {
            answer(&question(name, kind, edns), known).map(|bytes| Message::from_vec(&bytes).unwrap())
        };
        let told = of("sToRe.", RecordType::A, true).unwrap();
        assert_eq!(told.answers.iter().map(|r| r.data.clone()).collect::<Vec<_>>(), [RData::A(V4.into())]);
        assert!(told.metadata.recursion_available && told.edns.is_some());
        assert_eq!(told.queries[0].name.to_ascii(), "sToRe.", "as it was asked");
        assert_eq!(of("store.", RecordType::ANY, false).unwrap().answers.len(), 2);
        let none = of("store.", RecordType::MX, false).unwrap();
        assert_eq!(
            (none.answers.len(), none.metadata.response_code),
            (0, ResponseCode::NoError),
            "it is there, without that"
        );
        assert_eq!(of("store.example.", RecordType::A, false), None);
        assert_eq!(answer(b"no message", known), None);
        assert_eq!(refusal(b"no message", ResponseCode::Refused), None);
        let failed = refusal(&question("a.", RecordType::A, false), ResponseCode::ServFail).unwrap();
        let failed = Message::from_vec(&failed).unwrap();
        assert_eq!((failed.metadata.response_code, failed.queries.len()), (ResponseCode::ServFail, 1));
    }

    #[test]
    fn only_single_questions_go_to_others() {
        assert!(is_for_others(&question("example.", RecordType::MX, true)));
        assert!(!is_for_others(&question("example.", RecordType::AXFR, false)) && !is_for_others(b"x"));
        let mut update = Message::new(7, MessageType::Query, OpCode::Update);
        update.add_query(Query::query(Name::from_ascii("example.").unwrap(), RecordType::SOA));
        assert!(!is_for_others(&update.to_vec().unwrap()));
        update.metadata.op_code = OpCode::Query;
        update.metadata.message_type = MessageType::Response;
        let answer = update.to_vec().unwrap();
        assert!(!is_for_others(&answer));
        assert_eq!(refusal(&answer, ResponseCode::Refused), None, "the resolver answers no answer");
    }

    #[tokio::test]
    async fn other_questions_go_to_the_next_server_that_answers() {
        let silent = StdUdp::bind("127.0.0.1:0").unwrap();
        let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let servers = [silent.local_addr().unwrap(), server.local_addr().unwrap()];
        let asked = question("example.", RecordType::A, false);
        let expected = asked.clone();
        let serves = tokio::spawn(async move {
            let mut buffer = [0; 512];
            let (length, from) = server.recv_from(&mut buffer).await.unwrap();
            assert_eq!(buffer[..length], expected, "unchanged");
            server.send_to(b"xx of another question", from).await.unwrap();
            server.send_to(&[&expected[..2], b" the answer"].concat(), from).await.unwrap();
        });
        let told = by_udp(&asked, &servers).await.unwrap();
        assert_eq!(told[2..], *b" the answer");
        serves.await.unwrap();
    }

    #[test]
    fn name_servers_are_read() {
        let text = "search a.example\nnameserver 192.0.2.1\n# nameserver 192.0.2.9\nnameserver 2001:db8::1\nnameserver fe80::1%eth0\n\
            nameserver 127.0.0.53\nnameserver ::1\nnameserver 0.0.0.0\n";
        assert_eq!(servers_in(text), ["192.0.2.1:53".parse().unwrap(), "[2001:db8::1]:53".parse().unwrap()]);
    }
}
