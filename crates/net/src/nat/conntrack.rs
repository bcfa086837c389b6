//! Forgetting flows that the kernel still leads the old way: ctnetlink, libnetfilter_conntrack(3).
//!
//! A translation is decided by a flow's first packet and kept until the flow has been silent for 30
//! seconds or more. A UDP client that asks again and again from one port would therefore never
//! reach a proc that was published meanwhile, and would go on sending to the address of a proc that
//! is gone, which may by then be another proc's.
//!
//! Only UDP: a stray TCP segment is answered by a reset. The kernel lists a machine's UDP flows,
//! which costs it a walk over the whole table (14 ms for both families here, whatever is in it),
//! and what is to be forgotten is decided on this side: its own comparison of IPv6 addresses is
//! inverted (`ctnetlink_filter_match_tuple`, seen in 6.18), and kernels before 5.8 compare nothing.

use super::nfnetlink::{Connection, Content, NLM_F_ACK, NLM_F_DUMP, attribute, find, find_whole, nested};
use std::io;
use std::net::IpAddr;
use std::ops::ControlFlow;

const NFNL_SUBSYS_CTNETLINK: u16 = 1;
const IPCTNL_MSG_CT_NEW: u16 = 0;
const IPCTNL_MSG_CT_GET: u16 = 1;
const IPCTNL_MSG_CT_DELETE: u16 = 2;
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
const CTA_IP_V4_DST: u16 = 2;
const CTA_IP_V6_SRC: u16 = 3;
const CTA_IP_V6_DST: u16 = 4;
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_DST_PORT: u16 = 3;
/// Which parts of a tuple a filter compares (net/netfilter/nf_conntrack_netlink.c, kernel 5.8).
const FILTER_PROTO_NUM: u32 = 1 << 3;
const UDP: u8 = 17;

/// A UDP flow.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Flow {
    /// The port its packets are sent to.
    pub port: u16,
    /// And the address, before it is translated.
    pub sent_to: IpAddr,
    /// The address that answers: where it is led.
    pub leads_to: IpAddr,
}

/// Forgets UDP flows.
pub(super) fn forget(connection: &mut Connection, unwanted: impl Fn(&Flow) -> bool) -> io::Result<()> {
    for family in [AF_INET, AF_INET6] {
        for tuple in list(connection, family, &unwanted)? {
            let mut request = Vec::with_capacity(128);
            let kind = NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_DELETE;
            let this = connection.append(&mut request, kind, NLM_F_ACK, family, &tuple);
            // One that has ended meanwhile is as good as forgotten.
            connection.exchange(&request, this, |_| ControlFlow::Break(()))?;
        }
    }
    Ok(())
}

/// The flows' first tuples, as attributes.
fn list(connection: &mut Connection, family: u8, unwanted: &impl Fn(&Flow) -> bool) -> io::Result<Vec<Vec<u8>>> {
    let mut request = Vec::with_capacity(128);
    let kind = NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_GET;
    let this = connection.append(&mut request, kind, NLM_F_DUMP, family, &only_udp());
    let mut found = Vec::new();
    connection.exchange(&request, this, |answer| match answer.content {
        Content::Done => ControlFlow::Break(Ok(())),
        Content::Outcome(outcome) => ControlFlow::Break(outcome),
        Content::Object(kind, flow) => {
            let is_flow = kind == NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_NEW;
            if is_flow && Flow::parse(flow).is_some_and(|f| unwanted(&f)) {
                found.extend(find_whole(flow, CTA_TUPLE_ORIG).map(<[u8]>::to_vec));
            }
            ControlFlow::Continue(())
        }
    })??;
    Ok(found)
}

impl Flow {
    /// None for what is not UDP.
    fn parse(attributes: &[u8]) -> Option<Flow> {
        let value = |path: &[u16]| path.iter().try_fold(attributes, |inside, kind| find(inside, *kind));
        if value(&[CTA_TUPLE_ORIG, CTA_TUPLE_PROTO, CTA_PROTO_NUM])? != [UDP] {
            return None;
        }
        let port = value(&[CTA_TUPLE_ORIG, CTA_TUPLE_PROTO, CTA_PROTO_DST_PORT])?;
        let address = |tuple: u16, v4: u16, v6: u16| match value(&[tuple, CTA_TUPLE_IP, v4]) {
            Some(v4) => Some(IpAddr::from(<[u8; 4]>::try_from(v4).ok()?)),
            None => Some(IpAddr::from(<[u8; 16]>::try_from(value(&[tuple, CTA_TUPLE_IP, v6])?).ok()?)),
        };
        let sent_to = address(CTA_TUPLE_ORIG, CTA_IP_V4_DST, CTA_IP_V6_DST)?;
        let leads_to = address(CTA_TUPLE_REPLY, CTA_IP_V4_SRC, CTA_IP_V6_SRC)?;
        Some(Flow { port: u16::from_be_bytes(port.try_into().ok()?), sent_to, leads_to })
    }
}

fn only_udp() -> Vec<u8> {
    let proto = attribute(CTA_PROTO_NUM, vec![UDP]);
    let flags = attribute(CTA_FILTER_ORIG_FLAGS, FILTER_PROTO_NUM.to_ne_bytes().to_vec());
    let mut body = nested(CTA_TUPLE_ORIG, nested(CTA_TUPLE_PROTO, proto));
    body.extend(nested(CTA_FILTER, [flags, attribute(CTA_FILTER_REPLY_FLAGS, vec![0; 4])].concat()));
    body
}
