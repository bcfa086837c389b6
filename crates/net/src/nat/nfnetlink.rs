//! Messages of nfnetlink(7), which nftables and connection tracking share.

use netlink_packet_core::{DefaultNla, Emitable};
use netlink_sys::Socket;
use netlink_sys::protocols::NETLINK_NETFILTER;
use std::io;
use std::ops::ControlFlow;

pub(super) const NFPROTO_UNSPEC: u8 = 0;
pub(super) const NLM_F_REQUEST: u16 = 1;
pub(super) const NLM_F_ACK: u16 = 4;
pub(super) const NLM_F_DUMP: u16 = 0x300;
pub(super) const NLM_F_CREATE: u16 = 0x400;
pub(super) const NFNL_SUBSYS_NFTABLES: u16 = 10;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLA_F_NESTED: u16 = 1 << 15;
/// The kind of an attribute without its flags.
const KIND_MASK: u16 = 0x3fff;
/// Sizes of struct nlmsghdr and struct nfgenmsg.
const HEADER: usize = 16;
const GENERAL: usize = 4;

/// A connection to one namespace. It is kept open because closing one waits for the kernel to have
/// freed what was removed from nftables (`nft_rcv_nl_event`), 16 ms.
pub(super) struct Connection {
    socket: Socket,
    sequence: u32,
}

/// A message from the kernel.
pub(super) struct Answer<'a> {
    pub sequence: u32,
    pub content: Content<'a>,
}

/// What it says.
pub(super) enum Content<'a> {
    /// A request was carried out or refused.
    Outcome(io::Result<()>),
    /// A list is complete.
    Done,
    /// An object: its kind and its attributes.
    Object(u16, &'a [u8]),
}

impl Connection {
    /// To the namespace of the calling thread.
    pub fn open() -> io::Result<Connection> {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        socket.bind_auto()?;
        Ok(Connection { socket, sequence: 0 })
    }

    /// Appends a message and returns its sequence number.
    pub fn append(&mut self, bytes: &mut Vec<u8>, kind: u16, flags: u16, family: u8, body: &[u8]) -> u32 {
        self.sequence = self.sequence.wrapping_add(1);
        let length = HEADER + GENERAL + body.len();
        bytes.extend((length as u32).to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend((flags | NLM_F_REQUEST).to_ne_bytes());
        bytes.extend(self.sequence.to_ne_bytes());
        bytes.extend(0u32.to_ne_bytes());
        // The marks of a batch name the subsystem that it is for.
        let resource = if family == NFPROTO_UNSPEC { NFNL_SUBSYS_NFTABLES } else { 0 };
        bytes.extend([family, 0]);
        bytes.extend(resource.to_be_bytes());
        bytes.extend(body);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        self.sequence
    }

    /// Sends messages and reads answers to them until `each` has what it wants. Answers to earlier
    /// ones, which are there after a failure, are passed over.
    pub fn exchange<T>(
        &mut self,
        bytes: &[u8],
        first: u32,
        mut each: impl FnMut(Answer<'_>) -> ControlFlow<T>,
    ) -> io::Result<T> {
        self.socket.send(bytes, 0)?;
        let count = self.sequence.wrapping_sub(first);
        loop {
            let (bytes, _) = self.socket.recv_from_full()?;
            let mut rest = &bytes[..];
            while rest.len() >= HEADER {
                let length = (u32_at(rest, 0) as usize).clamp(HEADER, rest.len());
                let (message, sequence) = (&rest[..length], u32_at(rest, 8));
                rest = &rest[length.next_multiple_of(4).min(rest.len())..];
                if sequence.wrapping_sub(first) <= count
                    && let ControlFlow::Break(value) = each(Answer { sequence, content: content(message) })
                {
                    return Ok(value);
                }
            }
        }
    }
}

fn content(message: &[u8]) -> Content<'_> {
    match u32_at(message, 4) as u16 {
        NLMSG_ERROR if message.len() >= HEADER + 4 => match u32_at(message, HEADER) as i32 {
            0 => Content::Outcome(Ok(())),
            code => Content::Outcome(Err(io::Error::from_raw_os_error(-code))),
        },
        NLMSG_DONE => Content::Done,
        kind => Content::Object(kind, message.get(HEADER + GENERAL..).unwrap_or_default()),
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Kind and content of each attribute.
pub(super) fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    whole(bytes).map(|(kind, attribute)| (kind, &attribute[4..]))
}

/// Content of the first attribute of a kind.
pub(super) fn find(bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    attributes(bytes).find_map(|(kind, content)| (kind == wanted).then_some(content))
}

/// The first attribute of a kind, header included.
pub(super) fn find_whole(bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    whole(bytes).find_map(|(kind, attribute)| (kind == wanted).then_some(attribute))
}

fn whole(mut rest: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = (u16::from_ne_bytes([*rest.first()?, *rest.get(1)?]) as usize).max(4);
        let kind = u16::from_ne_bytes([*rest.get(2)?, *rest.get(3)?]) & KIND_MASK;
        let attribute = rest.get(..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, attribute))
    })
}

/// An attribute that holds others.
pub(super) fn nested(kind: u16, value: Vec<u8>) -> Vec<u8> {
    attribute(kind | NLA_F_NESTED, value)
}

/// An attribute, padded.
pub(super) fn attribute(kind: u16, value: Vec<u8>) -> Vec<u8> {
    let attribute = DefaultNla::new(kind, value);
    let mut bytes = vec![0; attribute.buffer_len()];
    attribute.emit(&mut bytes);
    bytes
}
