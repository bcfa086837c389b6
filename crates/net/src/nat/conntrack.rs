//! Forgetting flows that the kernel still leads the old way: ctnetlink, libnetfilter_conntrack(3).
//!
//! A translation is decided by a flow's first packet and kept until the flow has been silent for 30 seconds or more. A UDP
//! client that asks again and again from one port would therefore never reach a proc that was published meanwhile, and
//! would go on sending to the address of one that is gone, which may by then be somebody else's.
//!
//! The kernel filters what it lists, to spare us the flows of everybody else, but what is to be forgotten is decided
//! here: its comparison of IPv6 addresses is inverted (`ctnetlink_filter_match_tuple`, seen in 6.18), so it is not used, and
//! kernels before 5.8 do not filter at all.

use super::elements::{append, attribute, nested, u32_at};
use netlink_sys::Socket;
use netlink_sys::protocols::NETLINK_NETFILTER;
use std::io;
use std::net::IpAddr;

const NFNL_SUBSYS_CTNETLINK: u16 = 1;
const IPCTNL_MSG_CT_NEW: u16 = 0;
const IPCTNL_MSG_CT_GET: u16 = 1;
const IPCTNL_MSG_CT_DELETE: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP: u16 = 0x300;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
/// Kinds of attributes; the numbers are those of linux/netfilter/nfnetlink_conntrack.h.
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_FILTER: u16 = 25;
const CTA_FILTER_ORIG_FLAGS: u16 = 1;
const CTA_FILTER_REPLY_FLAGS: u16 = 2;
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_IP_V4_SRC: u16 = 1;
const CTA_IP_V6_SRC: u16 = 3;
const KIND_MASK: u16 = 0x3fff;
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_DST_PORT: u16 = 3;
/// Which parts of a tuple a filter compares (net/netfilter/nf_conntrack_netlink.c, kernel 5.8).
const FILTER_IP_SRC: u32 = 1 << 0;
const FILTER_PROTO_NUM: u32 = 1 << 3;
const FILTER_DST_PORT: u32 = 1 << 5;
const UDP: u8 = 17;

/// Which flows to forget.
#[derive(Debug, Clone, Copy)]
pub(super) enum Flows {
    /// Those that a proc's address answers, translated or not.
    To(IpAddr),
    /// UDP flows to a host port, wherever they lead.
    UdpPort(u16),
}

/// Forgets flows, in the namespace of the calling thread.
pub(super) fn forget(flows: Flows) -> io::Result<()> {
    let mut socket = Socket::new(NETLINK_NETFILTER)?;
    socket.bind_auto()?;
    let families = match flows {
        Flows::To(IpAddr::V4(_)) => &[AF_INET][..],
        Flows::To(IpAddr::V6(_)) => &[AF_INET6][..],
        Flows::UdpPort(_) => &[AF_INET, AF_INET6][..],
    };
    for &family in families {
        for tuple in list(&socket, family, flows)? {
            let mut request = Vec::with_capacity(128);
            let kind = NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_DELETE;
            append(&mut request, kind, NLM_F_REQUEST | NLM_F_ACK, 2, family, &tuple);
            socket.send(&request, 0)?;
            // One that has ended meanwhile is as good as forgotten.
            socket.recv_from_full()?;
        }
    }
    Ok(())
}

/// The flows' first tuples, as attributes.
fn list(socket: &Socket, family: u8, flows: Flows) -> io::Result<Vec<Vec<u8>>> {
    let mut request = Vec::with_capacity(128);
    let kind = NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_GET;
    append(&mut request, kind, NLM_F_REQUEST | NLM_F_DUMP, 1, family, &filter(flows));
    socket.send(&request, 0)?;
    let mut found = Vec::new();
    loop {
        let (bytes, _) = socket.recv_from_full()?;
        let mut rest = &bytes[..];
        while let (Some(length), Some(kind)) = (u32_at(rest, 0), u32_at(rest, 4)) {
            let length = (length as usize).clamp(16, rest.len().max(16));
            let message = &rest[..length.min(rest.len())];
            match kind as u16 {
                NLMSG_DONE => return Ok(found),
                NLMSG_ERROR => {
                    let code = u32_at(message, 16).unwrap_or(0) as i32;
                    return if code == 0 { Ok(found) } else { Err(io::Error::from_raw_os_error(-code)) };
                }
                kind if kind == NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_NEW => {
                    found.extend(message.get(20..).filter(|m| flows.include(m)).and_then(|m| find(m, CTA_TUPLE_ORIG)));
                }
                _ => {}
            }
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

impl Flows {
    /// Whether a flow, given by its attributes, is one of these.
    fn include(self, flow: &[u8]) -> bool {
        let value =
            |path: &[u16]| path.iter().try_fold(flow.to_vec(), |inside, kind| Some(find(&inside, *kind)?.split_off(4)));
        match self {
            Flows::To(IpAddr::V4(a)) => {
                value(&[CTA_TUPLE_REPLY, CTA_TUPLE_IP, CTA_IP_V4_SRC]).is_some_and(|ip| ip == a.octets())
            }
            Flows::To(IpAddr::V6(a)) => {
                value(&[CTA_TUPLE_REPLY, CTA_TUPLE_IP, CTA_IP_V6_SRC]).is_some_and(|ip| ip == a.octets())
            }
            Flows::UdpPort(port) => {
                let proto = |kind| value(&[CTA_TUPLE_ORIG, CTA_TUPLE_PROTO, kind]);
                proto(CTA_PROTO_NUM).is_some_and(|p| p == [UDP])
                    && proto(CTA_PROTO_DST_PORT).is_some_and(|p| p == port.to_be_bytes())
            }
        }
    }
}

/// The first attribute of a kind, header included.
fn find(mut attributes: &[u8], wanted: u16) -> Option<Vec<u8>> {
    while attributes.len() >= 4 {
        let length = (u16::from_ne_bytes([attributes[0], attributes[1]]) as usize).max(4);
        let kind = u16::from_ne_bytes([attributes[2], attributes[3]]) & KIND_MASK;
        if kind == wanted {
            return attributes.get(..length).map(<[u8]>::to_vec);
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
    None
}

fn filter(flows: Flows) -> Vec<u8> {
    let (tuple, original, reply) = match flows {
        Flows::To(IpAddr::V6(_)) => return Vec::new(),
        Flows::To(IpAddr::V4(address)) => {
            let ip = attribute(CTA_IP_V4_SRC, address.octets().to_vec());
            (nested(CTA_TUPLE_REPLY, nested(CTA_TUPLE_IP, ip)), 0, FILTER_IP_SRC)
        }
        Flows::UdpPort(port) => {
            let mut proto = attribute(CTA_PROTO_NUM, vec![UDP]);
            proto.extend(attribute(CTA_PROTO_DST_PORT, port.to_be_bytes().to_vec()));
            (nested(CTA_TUPLE_ORIG, nested(CTA_TUPLE_PROTO, proto)), FILTER_PROTO_NUM | FILTER_DST_PORT, 0)
        }
    };
    let mut flags = attribute(CTA_FILTER_ORIG_FLAGS, u32::to_ne_bytes(original).to_vec());
    flags.extend(attribute(CTA_FILTER_REPLY_FLAGS, u32::to_ne_bytes(reply).to_vec()));
    let mut body = tuple;
    body.extend(nested(CTA_FILTER, flags));
    body
}
