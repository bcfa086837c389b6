//! New flows to the ports of one proc go to several.

use super::elements::{Element, PARTS};
use super::{Forward, Nat, NatError, NatState, meets};
use crate::addr::{Addresses, Instance, Slot};
use std::net::IpAddr;

/// Several procs behind the ports of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Spread {
    ports: Vec<Forward>,
    /// Its own address leads there too, for procs of its network.
    is_in_network: bool,
    /// Each gets as many of the new flows as any other.
    pub(super) over: Vec<Slot>,
}

impl Nat {
    /// Has new flows to the ports of a proc go to any of these procs, itself among them or not,
    /// each as often as the others. Those that are open stay where they are. None, or the proc
    /// alone, is as if there had been no others. Costs about 1 ms.
    ///
    /// # Errors
    /// The kernel's; then some of the flows may go where they went.
    pub fn spread(&self, slot: Slot, over: &[Slot]) -> Result<(), NatError> {
        let mut state = self.state.lock();
        let spread = match state.published.get(&slot) {
            _ if over.is_empty() || *over == [slot] => None,
            Some(published) if !published.alone => Some(Spread {
                ports: published.ports.clone(),
                is_in_network: published.network.is_some(),
                over: over.to_vec(),
            }),
            _ => state.spread.get(&slot).map(|known| Spread { over: over.to_vec(), ..known.clone() }),
        };
        if state.spread.get(&slot) == spread.as_ref() {
            return Ok(());
        }
        let of = |spread: Option<&Spread>| spread.map_or_else(Vec::new, |it| elements(self.instance, slot, it));
        let (old, new) = (of(state.spread.get(&slot)), of(spread.as_ref()));
        self.replace(&mut state, old, new)?;
        match spread {
            Some(spread) => drop(state.spread.insert(slot, spread)),
            None => drop(state.spread.remove(&slot)),
        }
        Ok(())
    }

    /// Forgets a proc that is removed, for another may get its slot: its ports lead nowhere else,
    /// and no other's lead to it.
    pub fn forget(&self, slot: Slot) {
        let mut changed = vec![(slot, Vec::new())];
        for (of, spread) in self.state.lock().spread.iter().filter(|(_, spread)| spread.over.contains(&slot)) {
            changed.push((*of, spread.over.iter().copied().filter(|other| *other != slot).collect()));
        }
        for (of, over) in changed {
            if let Err(error) = self.spread(of, &over) {
                tracing::warn!(%slot, %error, "connections may still lead to a proc that is removed");
            }
        }
    }

    /// Ends what led elsewhere from the ports of the host that are another proc's now. Until then
    /// they lead where they led.
    pub(super) fn end_spreads_at(&self, state: &mut NatState, slot: Slot, ports: &[Forward]) -> Result<(), NatError> {
        let is_over = |(of, spread): &(&Slot, &Spread)| **of != slot && spread.ports.iter().any(|f| meets(f, ports));
        let over: Vec<Slot> = state.spread.iter().filter(is_over).map(|(of, _)| *of).collect();
        for of in over {
            let old = state.spread.get(&of).map_or_else(Vec::new, |spread| elements(self.instance, of, spread));
            self.replace(state, old, Vec::new())?;
            state.spread.remove(&of);
        }
        Ok(())
    }
}

/// Elements that lead new flows to the ports of a proc to one of several; `of` is that proc.
pub(super) fn elements(instance: Instance, of: Slot, spread: &Spread) -> Vec<Element> {
    let own = Addresses::of(instance, of);
    let mut all = Vec::new();
    let over = spread.over.iter().cycle().zip(0..PARTS);
    for (part, to) in over.map(|(slot, part)| (part, Addresses::of(instance, *slot))) {
        for forward in &spread.ports {
            for (to, own) in [(to.v4.into(), own.v4.into()), (to.v6.into(), own.v6.into())] {
                let to: IpAddr = to;
                if spread.is_in_network {
                    all.push(Element::spread(Some(own), to, *forward, forward.port, part));
                }
                let at = forward.host_addr;
                if let Some(outer) = forward.host_port.filter(|_| at.is_none_or(|at| at.is_ipv4() == to.is_ipv4())) {
                    all.push(Element::spread(at, to, *forward, outer, part));
                }
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nat::elements::Set;

    #[test]
    fn the_maps_have_as_many_parts_as_are_drawn() {
        for set in [Set::Spread4, Set::Spread6, Set::Spread4At, Set::Spread6At] {
            assert!(set.types().contains(&format!("numgen random mod {PARTS} ")), "{}", set.types());
        }
    }
}
