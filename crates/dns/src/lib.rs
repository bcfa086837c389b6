//! Answers the DNS questions of one proc: for the names that [`Names`] knows by itself, for others
//! by other name servers, where the proc may ask them, as slowly as it has to for a program that
//! floods it. Sources: RFC 1035, RFC 6891, resolv.conf(5).

#![forbid(unsafe_code)]

use hickory_proto::op::{Edns, Message, MessageType, OpCode, ResponseCode};
use hickory_proto::rr::{DNSClass, RData, Record, RecordType};
use parking_lot::Mutex;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Where name servers listen.
pub const PORT: u16 = 53;
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

/// What a proc may know names of.
pub trait Names: Send + Sync + 'static {
    /// The addresses that stand for a name here, without regard to case; none: it is for others.
    fn addresses(&self, name: &str) -> Option<(Ipv4Addr, Ipv6Addr)>;
    /// Whether other name servers may be asked for a name. For one of which they may not there is
    /// no such name.
    fn may_ask(&self, name: &str) -> bool;
    /// The other name servers, in the order in which they are asked.
    fn servers(&self) -> Vec<SocketAddr>;
    /// Other name servers have these addresses for a name. The proc has the answer when this is
    /// done.
    fn found(&self, name: &str, addresses: Vec<IpAddr>) -> impl Future<Output = ()> + Send;
}

/// Says no to a question that is for no other name server; none if it is for them. Empty where
/// there is nothing to say.
fn refused(names: &impl Names, question: &[u8]) -> Option<Vec<u8>> {
    if !is_for_others(question) {
        return Some(refusal(question, ResponseCode::Refused).unwrap_or_default());
    }
    asked_name(question).filter(|name| !names.may_ask(name))?;
    // Programs go on at once by this answer, and to the next of their search domains.
    Some(refusal(question, ResponseCode::NXDomain).unwrap_or_default())
}

/// Says which addresses an answer has.
async fn tell_found(names: &impl Names, question: &[u8], answer: &[u8]) {
    if let (Some(name), addresses @ [_, ..]) = (asked_name(question), &addresses_in(question, answer)[..]) {
        names.found(&name, addresses.to_vec()).await;
    }
}

/// The name that a question is for.
fn asked_name(question: &[u8]) -> Option<String> {
    Message::from_vec(question).ok()?.queries.first().map(|query| query.name.to_ascii())
}

/// The addresses that an answer has for a question's name, by way of aliases too; those of other
/// names in it are not.
fn addresses_in(question: &[u8], answer: &[u8]) -> Vec<IpAddr> {
    let (Some(name), Ok(message)) = (asked_name(question), Message::from_vec(answer)) else { return Vec::new() };
    if message.queries.is_empty() {
        return Vec::new();
    }
    let mut names = vec![name.to_ascii_lowercase()];
    // An alias stands before what it leads to or after that.
    for _ in 0..message.answers.len() {
        for record in &message.answers {
            if let RData::CNAME(alias) = &record.data
                && names.contains(&record.name.to_ascii().to_ascii_lowercase())
            {
                let leads_to = alias.0.to_ascii().to_ascii_lowercase();
                if !names.contains(&leads_to) {
                    names.push(leads_to);
                }
            }
        }
    }
    let address = |record: &Record| match &record.data {
        _ if !names.contains(&record.name.to_ascii().to_ascii_lowercase()) => None,
        RData::A(address) => Some(IpAddr::V4(address.0)),
        RData::AAAA(address) => Some(IpAddr::V6(address.0)),
        _ => None,
    };
    message.answers.iter().filter_map(address).collect()
}

/// Whether an answer is to this question: its number and what it repeats of the question, in any
/// case of letters. One that repeats nothing, as that of a server which refuses it, goes by its
/// number: it opens no address.
fn is_answer_to(question: &[u8], answer: &[u8]) -> bool {
    let asked = |bytes: &[u8]| {
        let message = Message::from_vec(bytes).ok()?;
        let query = message.queries.first()?;
        Some((query.name.to_ascii().to_ascii_lowercase(), query.query_type, query.query_class))
    };
    answer.get(..2) == question.get(..2) && asked(answer).is_none_or(|answered| asked(question) == Some(answered))
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

/// The name servers of a resolv.conf(5), without those on the machine's loopback.
pub fn servers_in(text: &str) -> Vec<SocketAddr> {
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

/// Answers what comes by these sockets, for as long as this is polled.
pub async fn serve<N: Names>(names: Arc<N>, udp: UdpSocket, tcp: TcpListener) {
    let udp = Arc::new(udp);
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
                        let _ = connection(&*names, stream, &pace).await;
                        drop(permit);
                    });
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            },
        }
    }
}

async fn datagram<N: Names>(
    names: &Arc<N>,
    udp: &Arc<UdpSocket>,
    question: &[u8],
    from: SocketAddr,
    forwards: &Arc<Semaphore>,
) {
    if let Some(bytes) = answer(question, |name| names.addresses(name)) {
        // A client that has gone does not want it any more.
        let _ = udp.send_to(&bytes, from).await;
        return;
    }
    if let Some(bytes) = refused(&**names, question) {
        if !bytes.is_empty() {
            let _ = udp.send_to(&bytes, from).await;
        }
        return;
    }
    // One too many is dropped, and asked again by its client.
    let Ok(permit) = Arc::clone(forwards).try_acquire_owned() else { return };
    let (names, udp, question) = (Arc::clone(names), Arc::clone(udp), question.to_vec());
    tokio::spawn(async move {
        if let Some(bytes) =
            by_udp(&question, &names.servers()).await.or_else(|| refusal(&question, ResponseCode::ServFail))
        {
            tell_found(&*names, &question, &bytes).await;
            let _ = udp.send_to(&bytes, from).await;
        }
        drop(permit);
    });
}

/// The answer of the first of those servers that gives one. The question goes under a number that
/// the program does not choose: by one that it chooses an accomplice outside could forge the
/// answer.
async fn by_udp(question: &[u8], servers: &[SocketAddr]) -> Option<Vec<u8>> {
    let (number, question) = (question.get(..2)?, renumbered(question, &random_number()));
    for server in servers {
        let asked = async {
            let own: SocketAddr =
                if server.is_ipv4() { (Ipv4Addr::UNSPECIFIED, 0).into() } else { (Ipv6Addr::UNSPECIFIED, 0).into() };
            let socket = UdpSocket::bind(own).await?;
            socket.connect(server).await?;
            socket.send(&question).await?;
            let mut buffer = vec![0; LARGEST];
            loop {
                let length = socket.recv(&mut buffer).await?;
                // An answer to something else is none.
                if is_answer_to(&question, &buffer[..length]) {
                    return io::Result::Ok(renumbered(&buffer[..length], number));
                }
            }
        };
        if let Ok(Ok(bytes)) = timeout(ANSWERS_WITHIN, asked).await {
            return Some(bytes);
        }
    }
    None
}

/// The same message under another number.
fn renumbered(message: &[u8], number: &[u8]) -> Vec<u8> {
    [number, message.get(2..).unwrap_or_default()].concat()
}

/// Two bytes that no other program can foretell.
fn random_number() -> [u8; 2] {
    use std::hash::{BuildHasher as _, RandomState};
    // By keys that no other process knows, from the operating system's random bytes (SipHash).
    let hash = RandomState::new().hash_one(Instant::now()).to_ne_bytes();
    [hash[0], hash[1]]
}

/// Questions by TCP, each after its length.
async fn connection(names: &impl Names, mut stream: TcpStream, pace: &Pace) -> io::Result<()> {
    while let Ok(question) = timeout(TCP_IDLE, read(&mut stream)).await {
        let question = question?;
        pace.turn().await;
        let own = answer(&question, |name| names.addresses(name)).or_else(|| refused(names, &question));
        let bytes = match own {
            Some(bytes) => Some(bytes),
            None => {
                let found = by_tcp(&question, &names.servers()).await;
                tell_found(names, &question, found.as_deref().unwrap_or_default()).await;
                found.or_else(|| refusal(&question, ResponseCode::ServFail))
            }
        };
        match bytes.filter(|bytes| !bytes.is_empty()) {
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
        let silent = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let servers = [silent.local_addr().unwrap(), server.local_addr().unwrap()];
        let asked = question("example.", RecordType::A, false);
        let expected = asked.clone();
        let serves = tokio::spawn(async move {
            let mut buffer = [0; 512];
            let (length, from) = server.recv_from(&mut buffer).await.unwrap();
            assert_eq!(buffer[2..length], expected[2..], "unchanged but for its number");
            let number = buffer[..2].to_vec();
            server.send_to(&renumbered(&expected, b"xx"), from).await.unwrap();
            let other = question("other.", RecordType::A, false);
            server.send_to(&renumbered(&other, &number), from).await.unwrap();
            server.send_to(&renumbered(&question("EXAMPLE.", RecordType::A, true), &number), from).await.unwrap();
        });
        let told = by_udp(&asked, &servers).await.unwrap();
        assert_eq!(
            told,
            renumbered(&question("EXAMPLE.", RecordType::A, true), &asked[..2]),
            "under the program's own"
        );
        serves.await.unwrap();
    }

    #[test]
    fn name_servers_are_read() {
        let text = "search a.example\nnameserver 192.0.2.1\n# nameserver 192.0.2.9\nnameserver 2001:db8::1\nnameserver fe80::1%eth0\n\
            nameserver 127.0.0.53\nnameserver ::1\nnameserver 0.0.0.0\n";
        assert_eq!(servers_in(text), ["192.0.2.1:53".parse().unwrap(), "[2001:db8::1]:53".parse().unwrap()]);
    }

    /// Knows `store`, lets only `shop.example` be asked for.
    struct Limited(SocketAddr, Mutex<Vec<(String, Vec<IpAddr>)>>);

    impl Names for Limited {
        fn addresses(&self, name: &str) -> Option<(Ipv4Addr, Ipv6Addr)> {
            known(name)
        }
        fn may_ask(&self, name: &str) -> bool {
            name == "shop.example."
        }
        fn servers(&self) -> Vec<SocketAddr> {
            vec![self.0]
        }
        async fn found(&self, name: &str, addresses: Vec<IpAddr>) {
            self.1.lock().push((name.to_owned(), addresses));
        }
    }

    #[tokio::test]
    async fn addresses_are_told_before_the_answer_and_other_names_are_not_asked_for() {
        let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let names = Arc::new(Limited(server.local_addr().unwrap(), Mutex::default()));
        let own = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = own.local_addr().unwrap();
        let serves = tokio::spawn(serve(Arc::clone(&names), own, tcp));
        let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let ask = async |name: &str| {
            client.send_to(&question(name, RecordType::A, false), at).await.unwrap();
            let mut buffer = [0; 512];
            let length = timeout(Duration::from_secs(5), client.recv(&mut buffer)).await.unwrap().unwrap();
            Message::from_vec(&buffer[..length]).unwrap()
        };
        assert_eq!(ask("evil.example.").await.metadata.response_code, ResponseCode::NXDomain);
        assert_eq!(ask("store.").await.answers.len(), 1);
        let answers = async {
            let mut buffer = [0; 512];
            let (length, from) = server.recv_from(&mut buffer).await.unwrap();
            let asked = Message::from_vec(&buffer[..length]).unwrap();
            assert_eq!(asked.queries[0].name.to_ascii(), "shop.example.", "the only one that comes here");
            let mut message = Message::response(asked.metadata.id, OpCode::Query);
            message.add_query(asked.queries[0].clone());
            let edge = Name::from_ascii("edge.example.").unwrap();
            let alias = RData::CNAME(hickory_proto::rr::rdata::CNAME(edge.clone()));
            message.add_answer(Record::from_rdata(asked.queries[0].name.clone(), 1, alias));
            message.add_answer(Record::from_rdata(edge, 1, RData::A(V4.into())));
            let other = Name::from_ascii("other.example.").unwrap();
            message.add_answer(Record::from_rdata(other, 1, RData::A(Ipv4Addr::new(192, 0, 2, 9).into())));
            server.send_to(&message.to_vec().unwrap(), from).await.unwrap();
        };
        let (told, ()) = tokio::join!(ask("shop.example."), answers);
        assert_eq!(told.answers.len(), 3);
        assert_eq!(*names.1.lock(), [("shop.example.".to_owned(), vec![IpAddr::V4(V4)])]);
        serves.abort();
    }
}
