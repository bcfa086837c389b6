//! What procs with limited egress were refused: the kernel notes it in two sets, which are read and
//! emptied here. Sources: linux/netfilter/nf_tables.h, libnftnl.

use super::elements::{self, Set};
use super::nfnetlink::{Connection, Content, NLM_F_ACK, NLM_F_DUMP, attributes, find};
use crate::addr::{Addresses, Instance, Slot};
use kip_types::Protocol;
use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::ops::ControlFlow;

/// A call that a proc's egress rules do not name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RefusedCall {
    /// The proc that called.
    pub slot: Slot,
    /// The address that it called.
    pub to: IpAddr,
    /// Protocol and port; none for what has no ports, a ping for one.
    pub port: Option<(Protocol, u16)>,
}

/// Reads what is noted and forgets it there. What comes in between stays for the next time.
pub(super) fn take(connection: &mut Connection, table: &str, instance: Instance) -> io::Result<Vec<RefusedCall>> {
    let mut all = Vec::new();
    for set in [Set::Refused4, Set::Refused6] {
        // A list that was changed meanwhile may have a key twice.
        let keys: Vec<Vec<u8>> =
            list(connection, table, set)?.into_iter().collect::<BTreeSet<_>>().into_iter().collect();
        match elements::remove_keys(connection, table, set, &keys) {
            // One of them has gone by itself, and none of the others: they go one by one.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                for key in keys.chunks(1) {
                    match elements::remove_keys(connection, table, set, key) {
                        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                        _ => {}
                    }
                }
            }
            done => done?,
        }
        all.extend(keys.iter().filter_map(|key| RefusedCall::parse(key, instance)));
    }
    all.sort_unstable();
    all.dedup();
    Ok(all)
}

/// The keys of a set's elements.
fn list(connection: &mut Connection, table: &str, set: Set) -> io::Result<Vec<Vec<u8>>> {
    let mut request = Vec::new();
    let this = elements::append_list(connection, &mut request, table, set, NLM_F_DUMP | NLM_F_ACK);
    let mut found = Vec::new();
    connection.exchange(&request, this, |answer| match answer.content {
        Content::Done => ControlFlow::Break(Ok(())),
        Content::Outcome(outcome) => ControlFlow::Break(outcome),
        Content::Object(_, object) => {
            let elements = find(object, elements::SET_ELEM_LIST_ELEMENTS);
            for (_, element) in elements.into_iter().flat_map(attributes) {
                let key = find(element, elements::SET_ELEM_KEY).and_then(|key| find(key, elements::DATA_VALUE));
                found.extend(key.map(<[u8]>::to_vec));
            }
            ControlFlow::Continue(())
        }
    })??;
    Ok(found)
}

impl RefusedCall {
    /// Each part of a key fills whole registers of four bytes. None for what is of no proc.
    fn parse(key: &[u8], instance: Instance) -> Option<RefusedCall> {
        let (from, to, rest) = match key.len() {
            16 => {
                let at = |from: usize| key[from..from + 4].try_into().map(|bytes: [u8; 4]| IpAddr::from(bytes));
                (at(0).ok()?, at(4).ok()?, &key[8..])
            }
            40 => {
                let at = |from: usize| key[from..from + 16].try_into().map(|bytes: [u8; 16]| IpAddr::from(bytes));
                (at(0).ok()?, at(16).ok()?, &key[32..])
            }
            _ => return None,
        };
        let slot = Addresses::slot_of(instance, from)?;
        let number = u16::from_be_bytes([rest[4], rest[5]]);
        let port = match rest[0] {
            6 => Some((Protocol::Tcp, number)),
            17 => Some((Protocol::Udp, number)),
            _ => None,
        };
        Some(RefusedCall { slot, to, port })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read() {
        let instance = Instance::new(1).unwrap();
        let slot = Slot::new(5).unwrap();
        let own = Addresses::of(instance, slot);
        let key = [&own.v4.octets()[..], &[192, 0, 2, 7], &[6, 0, 0, 0], &[1, 187, 0, 0]].concat();
        let tcp = RefusedCall { slot, to: "192.0.2.7".parse().unwrap(), port: Some((Protocol::Tcp, 443)) };
        assert_eq!(RefusedCall::parse(&key, instance), Some(tcp));
        let other = [&own.v6.octets()[..], &[0; 15], &[1], &[58, 0, 0, 0], &[0, 128, 0, 0]].concat();
        assert_eq!(
            RefusedCall::parse(&other, instance),
            Some(RefusedCall { slot, to: "::1".parse().unwrap(), port: None })
        );
        assert_eq!(RefusedCall::parse(&key[..12], instance), None);
        assert_eq!(RefusedCall::parse(&key, Instance::new(2).unwrap()), None, "of another instance");
    }
}
