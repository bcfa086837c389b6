//! A small client of rtnetlink(7): links, addresses and routes of the namespace it was opened in.
//!
//! Several requests travel in one system call and are carried out in order; the answer to each is
//! awaited. A request that the kernel refuses does not stop those after it.

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_route::link::{LinkAttribute, LinkMessage, State as OperState};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::Socket;
use netlink_sys::protocols::NETLINK_ROUTE;
use std::io;
use std::time::{Duration, Instant};

/// Requests in one system call: more answers than these may overflow the socket's buffer.
const MOST: usize = 64;

/// How long and how often to look whether a link has its carrier, which takes microseconds on a
/// machine with idle cores.
const CARRIER_PATIENCE: Duration = Duration::from_secs(5);
const CARRIER_PAUSE: Duration = Duration::from_micros(30);

/// What went wrong with a request to the kernel's network configuration.
#[derive(Debug, thiserror::Error)]
pub enum RtnlError {
    /// The socket itself failed.
    #[error("the rtnetlink socket cannot be opened or used")]
    Socket(#[source] io::Error),
    /// The kernel said no.
    #[error("rtnetlink: cannot {doing}")]
    Refused {
        /// What was asked.
        doing: String,
        /// Its answer.
        #[source]
        source: io::Error,
    },
    /// An answer that makes no sense.
    #[error("rtnetlink: answer cannot be read: {0}")]
    Malformed(String),
}

impl RtnlError {
    pub(crate) fn is_refused_with(&self, errno: rustix::io::Errno) -> bool {
        matches!(self, RtnlError::Refused { source, .. } if source.raw_os_error() == Some(errno.raw_os_error()))
    }
}

/// One thing to do. `doing` completes the sentence "cannot ...".
pub(crate) struct Request {
    pub doing: String,
    pub message: RouteNetlinkMessage,
    pub how: How,
    /// An answer that is as good as success: the thing is there already, or gone already.
    pub tolerate: Option<rustix::io::Errno>,
}

/// What to do when the thing exists.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    /// Make it; fail if it exists.
    Create,
    /// Make it or put it in the place of what is there.
    Replace,
    /// Change or delete what is there.
    Plain,
}

/// A link as listed.
pub(crate) struct Link {
    pub name: String,
    pub group: u32,
}

/// A connection to the kernel, in the namespace of the thread that opened it, for good.
pub(crate) struct Rtnl {
    socket: Socket,
    sequence: u32,
}

/// Returns whether links or routes have changed, of the namespace of the thread that opened it.
pub(crate) struct Changes(Socket);

impl Changes {
    pub fn open() -> io::Result<Changes> {
        // RTNLGRP_LINK, RTNLGRP_IPV4_ROUTE and RTNLGRP_IPV6_ROUTE of linux/rtnetlink.h.
        const GROUPS: [u32; 3] = [1, 7, 11];
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        GROUPS.into_iter().try_for_each(|group| socket.add_membership(group))?;
        socket.set_non_blocking(true)?;
        Ok(Changes(socket))
    }

    /// Whether there was any change since the last call.
    pub fn any(&mut self) -> bool {
        let mut any = false;
        let mut message = [0; 8];
        loop {
            match self.0.recv(&mut &mut message[..], 0) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return any,
                // With ENOBUFS there were more than the socket can hold.
                Ok(_) | Err(_) => any = true,
            }
        }
    }
}

impl Rtnl {
    pub fn open() -> Result<Rtnl, RtnlError> {
        let mut socket = Socket::new(NETLINK_ROUTE).map_err(RtnlError::Socket)?;
        socket.bind_auto().map_err(RtnlError::Socket)?;
        socket.set_cap_ack(true).map_err(RtnlError::Socket)?;
        socket.set_netlink_get_strict_chk(true).map_err(RtnlError::Socket)?;
        Ok(Rtnl { socket, sequence: 0 })
    }

    /// Sends requests together, waits for every answer, and returns the first refusal.
    pub fn batch(&mut self, requests: Vec<Request>) -> Result<(), RtnlError> {
        let mut outcome = Ok(());
        let mut rest = requests;
        while !rest.is_empty() {
            let later = rest.split_off(rest.len().min(MOST));
            let carried_out = self.exchange(rest)?;
            outcome = outcome.and(carried_out);
            rest = later;
        }
        outcome
    }

    fn exchange(&mut self, requests: Vec<Request>) -> Result<Result<(), RtnlError>, RtnlError> {
        let mut bytes = Vec::with_capacity(1024);
        let first = self.sequence.wrapping_add(1);
        let mut sent = Vec::with_capacity(requests.len());
        for request in requests {
            let flags = NLM_F_REQUEST
                | NLM_F_ACK
                | match request.how {
                    How::Create => NLM_F_CREATE | NLM_F_EXCL,
                    How::Replace => NLM_F_CREATE | NLM_F_REPLACE,
                    How::Plain => 0,
                };
            self.append(&mut bytes, request.message, flags);
            sent.push((request.doing, request.tolerate));
        }
        self.socket.send(&bytes, 0).map_err(RtnlError::Socket)?;
        let mut outcome = Ok(());
        let mut answered = 0;
        while answered < sent.len() {
            for message in self.receive()? {
                let NetlinkPayload::Error(error) = message.payload else { continue };
                let at = message.header.sequence_number.wrapping_sub(first) as usize;
                let Some((doing, tolerate)) = sent.get(at) else { continue };
                answered += 1;
                let tolerated = tolerate.is_some_and(|e| -e.raw_os_error() == error.raw_code());
                if error.code.is_some() && !tolerated && outcome.is_ok() {
                    outcome = Err(RtnlError::Refused { doing: doing.clone(), source: error.to_io() });
                }
            }
        }
        Ok(outcome)
    }

    /// The index of the link of that name, or None.
    pub fn index_of(&mut self, name: &str) -> Result<Option<u32>, RtnlError> {
        let mut link = link_at(0);
        link.attributes.push(LinkAttribute::IfName(name.to_owned()));
        Ok(self.link(link, name)?.map(|l| l.header.index))
    }

    /// Waits until a link carries packets. Setting it up only starts that: the kernel notices the
    /// carrier, lets go of the queue that drops everything and tells IPv6 in a work item of its own
    /// (net/core/link_watch.c).
    pub fn await_carrier(&mut self, index: u32) -> Result<(), RtnlError> {
        let doing = || format!("wait for the carrier of link {index}");
        let deadline = Instant::now() + CARRIER_PATIENCE;
        while Instant::now() < deadline {
            let link = self.link(link_at(index), "a link just made")?;
            let Some(link) = link else { break };
            if link.attributes.contains(&LinkAttribute::OperState(OperState::Up)) {
                return Ok(());
            }
            std::thread::sleep(CARRIER_PAUSE);
        }
        Err(RtnlError::Refused { doing: doing(), source: io::ErrorKind::TimedOut.into() })
    }

    fn link(&mut self, wanted: LinkMessage, name: &str) -> Result<Option<LinkMessage>, RtnlError> {
        let mut bytes = Vec::with_capacity(64);
        self.append(&mut bytes, RouteNetlinkMessage::GetLink(wanted), NLM_F_REQUEST);
        self.socket.send(&bytes, 0).map_err(RtnlError::Socket)?;
        loop {
            for message in self.receive()? {
                if message.header.sequence_number != self.sequence {
                    continue;
                }
                match message.payload {
                    NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewLink(link)) => return Ok(Some(link)),
                    NetlinkPayload::Error(e) if e.raw_code() == -rustix::io::Errno::NODEV.raw_os_error() => {
                        return Ok(None);
                    }
                    NetlinkPayload::Error(e) => {
                        return Err(RtnlError::Refused { doing: format!("find {name}"), source: e.to_io() });
                    }
                    _ => {}
                }
            }
        }
    }

    /// All links whose name starts so.
    pub fn links(&mut self, prefix: &str) -> Result<Vec<Link>, RtnlError> {
        let mut bytes = Vec::with_capacity(64);
        let request = RouteNetlinkMessage::GetLink(LinkMessage::default());
        self.append(&mut bytes, request, NLM_F_REQUEST | NLM_F_DUMP);
        self.socket.send(&bytes, 0).map_err(RtnlError::Socket)?;
        let mut found = Vec::new();
        loop {
            for message in self.receive()? {
                match message.payload {
                    NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewLink(link)) => found.extend(named(link)),
                    NetlinkPayload::Done(_) => {
                        found.retain(|l: &Link| l.name.starts_with(prefix));
                        return Ok(found);
                    }
                    NetlinkPayload::Error(e) => {
                        return Err(RtnlError::Refused { doing: "list links".to_owned(), source: e.to_io() });
                    }
                    _ => {}
                }
            }
        }
    }

    fn append(&mut self, bytes: &mut Vec<u8>, message: RouteNetlinkMessage, flags: u16) {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        header.sequence_number = self.sequence;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::from(message));
        message.finalize();
        let start = bytes.len().next_multiple_of(4);
        bytes.resize(start + message.buffer_len(), 0);
        message.serialize(&mut bytes[start..]);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }

    fn receive(&mut self) -> Result<Vec<NetlinkMessage<RouteNetlinkMessage>>, RtnlError> {
        let (bytes, _) = self.socket.recv_from_full().map_err(RtnlError::Socket)?;
        let mut messages = Vec::new();
        let mut rest = &bytes[..];
        while rest.len() >= 16 {
            let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest)
                .map_err(|e| RtnlError::Malformed(e.to_string()))?;
            let length = (message.header.length as usize).next_multiple_of(4).min(rest.len());
            messages.push(message);
            rest = &rest[length..];
        }
        Ok(messages)
    }
}

fn named(link: LinkMessage) -> Option<Link> {
    let mut found = Link { name: String::new(), group: 0 };
    for attribute in link.attributes {
        match attribute {
            LinkAttribute::IfName(name) => found.name = name,
            LinkAttribute::Group(group) => found.group = group,
            _ => {}
        }
    }
    (!found.name.is_empty()).then_some(found)
}

/// A link message for the link of that index.
pub(crate) fn link_at(index: u32) -> LinkMessage {
    let mut link = LinkMessage::default();
    link.header.interface_family = AddressFamily::Unspec;
    link.header.index = index;
    link
}
