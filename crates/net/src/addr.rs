//! Which addresses and interface names belong to which proc. Pure.
//!
//! An instance owns 10.213.(8·I).0/21 and fd6b:6970:0:I::/64; a slot owns one address of each. The
//! address ending in .255 of the instance's first /24, and ::ffff, are the host's own side (the
//! gateway). Slots whose low byte is 0 or 255 do not exist, so no slot ever has an address that old
//! software takes for a network or a broadcast.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Instances on one machine.
pub const INSTANCES: u8 = 16;
/// Slot numbers of an instance are below this.
pub const SLOTS: u16 = 2048;
/// Those of them that a proc can have: a low byte of 0 or 255 is no host's address.
pub const USABLE_SLOTS: u16 = SLOTS - SLOTS / 256 * 2;

/// Number of a data directory's daemon on this machine, below [`INSTANCES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct Instance(u8);

/// Number of a proc within an instance, reused only after the proc's removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u16", into = "u16")]
pub struct Slot(u16);

/// A number that is no instance or slot.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadNumber {
    /// Too large.
    #[error("instance {0} does not exist: numbers are below {INSTANCES}")]
    Instance(u8),
    /// Too large, or with a low byte of 0 or 255.
    #[error("slot {0} does not exist: slots are below {SLOTS} and their low byte is neither 0 nor 255")]
    Slot(u16),
}

impl Instance {
    /// The instance of that number.
    pub fn new(number: u8) -> Result<Instance, BadNumber> {
        if number < INSTANCES { Ok(Instance(number)) } else { Err(BadNumber::Instance(number)) }
    }

    /// Its number.
    pub fn number(self) -> u8 {
        self.0
    }

    /// What every interface of this instance starts with, `kp3-`.
    pub fn interface_prefix(self) -> String {
        format!("kp{}-", self.0)
    }

    /// The host's end of a slot's link; at most 9 bytes (IFNAMSIZ allows 15).
    pub fn interface(self, slot: Slot) -> String {
        format!("kp{}-{}", self.0, slot.0)
    }

    /// The slot whose link has this name, if it is one of this instance.
    pub fn slot_of(self, interface: &str) -> Option<Slot> {
        let digits = interface.strip_prefix(&self.interface_prefix())?;
        let slot = Slot::new(digits.parse().ok()?).ok()?;
        (self.interface(slot) == interface).then_some(slot)
    }

    /// The nftables table of family `inet`.
    pub fn table(self) -> String {
        format!("kip_{}", self.0)
    }

    /// The host's own address towards its procs.
    pub fn gateway_v4(self) -> Ipv4Addr {
        Ipv4Addr::new(10, 213, 8 * self.0, 255)
    }

    /// The host's own address towards its procs.
    pub fn gateway_v6(self) -> Ipv6Addr {
        Ipv6Addr::new(0xfd6b, 0x6970, 0, u16::from(self.0), 0, 0, 0, 0xffff)
    }
}

impl Slot {
    /// The slot of that number.
    pub fn new(number: u16) -> Result<Slot, BadNumber> {
        let low = number & 0xff;
        if number < SLOTS && low != 0 && low != 0xff { Ok(Slot(number)) } else { Err(BadNumber::Slot(number)) }
    }

    /// Its number.
    pub fn number(self) -> u16 {
        self.0
    }

    /// Every slot, ascending.
    pub fn all() -> impl Iterator<Item = Slot> {
        (0..SLOTS).filter_map(|n| Slot::new(n).ok())
    }
}

/// What a proc is reached by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Addresses {
    /// IPv4, a /32.
    pub v4: Ipv4Addr,
    /// IPv6, a /128.
    pub v6: Ipv6Addr,
    /// Of both ends of the link: each end sends to "itself", so no ARP or neighbour discovery is
    /// needed.
    pub mac: [u8; 6],
}

impl Addresses {
    /// The addresses of a slot.
    pub fn of(instance: Instance, slot: Slot) -> Addresses {
        let [high, low] = slot.0.to_be_bytes();
        Addresses {
            v4: Ipv4Addr::new(10, 213, 8 * instance.0 + high, low),
            v6: Ipv6Addr::new(0xfd6b, 0x6970, 0, u16::from(instance.0), 0, 0, 0, slot.0),
            mac: [0x02, 0x6b, 0x70, instance.0, high, low],
        }
    }

    /// The slot of that instance that has this address; none if it is no slot's.
    pub fn slot_of(instance: Instance, address: IpAddr) -> Option<Slot> {
        let number = match address {
            IpAddr::V4(v4) => u16::from_be_bytes([v4.octets()[2].checked_sub(8 * instance.0)?, v4.octets()[3]]),
            IpAddr::V6(v6) => v6.segments()[7],
        };
        let slot = Slot::new(number).ok()?;
        let own = Addresses::of(instance, slot);
        (address == own.v4 || address == own.v6).then_some(slot)
    }
}

impl TryFrom<u8> for Instance {
    type Error = BadNumber;
    fn try_from(number: u8) -> Result<Self, BadNumber> {
        Instance::new(number)
    }
}

impl From<Instance> for u8 {
    fn from(i: Instance) -> u8 {
        i.0
    }
}

impl TryFrom<u16> for Slot {
    type Error = BadNumber;
    fn try_from(number: u16) -> Result<Self, BadNumber> {
        Slot::new(number)
    }
}

impl From<Slot> for u16 {
    fn from(s: Slot) -> u16 {
        s.0
    }
}

impl fmt::Display for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn no_two_slots_share_anything() {
        let (mut v4, mut v6) = (HashSet::new(), HashSet::new());
        let (mut names, mut macs) = (HashSet::new(), HashSet::new());
        fn fresh<T: std::hash::Hash + Eq>(set: &mut HashSet<T>, value: T) {
            assert!(set.insert(value));
        }
        for i in (0..INSTANCES).map(|i| Instance::new(i).unwrap()) {
            fresh(&mut v4, i.gateway_v4());
            fresh(&mut v6, i.gateway_v6());
            for s in Slot::all() {
                let a = Addresses::of(i, s);
                fresh(&mut v4, a.v4);
                fresh(&mut v6, a.v6);
                fresh(&mut macs, a.mac);
                fresh(&mut names, i.interface(s));
                assert!(i.interface(s).len() <= 15);
                assert!(![0, 255].contains(&a.v4.octets()[3]));
                let [_, _, c, _] = a.v4.octets();
                assert_eq!(c / 8, i.number(), "inside the instance's /21");
            }
        }
    }

    #[test]
    fn names_lead_back_to_slots() {
        let one = Instance::new(1).unwrap();
        let slot = Slot::new(300).unwrap();
        assert_eq!(one.slot_of("kp1-300"), Some(slot));
        for other in ["kp10-300", "kp1-", "kp1-0300", "kp1-256", "kp1-2049", "eth0", "kp1-+3"] {
            assert_eq!(one.slot_of(other), None, "{other}");
        }
    }

    #[test]
    fn knows_its_limits() {
        assert!(Instance::new(16).is_err());
        for bad in [0, 255, 256, 511, 2047, 2048] {
            assert!(Slot::new(bad).is_err(), "{bad}");
        }
        assert_eq!(Slot::all().count(), 8 * 254);
        let a = Addresses::of(Instance::new(1).unwrap(), Slot::new(5).unwrap());
        assert_eq!((a.v4.to_string(), a.v6.to_string()), ("10.213.8.5".into(), "fd6b:6970:0:1::5".into()));
    }
}
