//! CPUs and memory that are reserved. A promise among spawned procs: what others take is not seen
//! here, but when memory is short a start waits for it in any case.

use crate::entry::Reserved;
use crate::host::MachineRoom;
use parking_lot::Mutex;

/// What all that have begun have reserved.
#[derive(Debug, Default)]
pub(crate) struct RoomBooks(Mutex<Reserved>);

impl RoomBooks {
    /// What is in the way of ever having that; none if nothing is.
    pub(crate) fn never(room: MachineRoom, wanted: Reserved) -> Option<String> {
        if wanted.cpus > room.cpus {
            return Some(format!("{} CPUs cannot be reserved: this machine has {}", wanted.cpus, room.cpus));
        }
        (wanted.memory_bytes > room.memory_bytes).then(|| {
            let (wanted, all) = (wanted.memory_bytes >> 20, room.memory_bytes >> 20);
            format!("{wanted} MiB of memory cannot be reserved: procs of this machine may use {all} MiB")
        })
    }

    /// Reserves that, or says what it waits for.
    pub(crate) fn take(&self, room: MachineRoom, wanted: Reserved) -> Result<(), String> {
        let mut taken = self.0.lock();
        // Sums of decimal fractions are not exact.
        if wanted.cpus > 0.0 && taken.cpus + wanted.cpus > room.cpus + 1e-6 {
            let (wanted, taken, all) = (wanted.cpus, taken.cpus, room.cpus);
            return Err(format!("{wanted} CPUs: {taken:.2} of {all} are reserved"));
        }
        if wanted.memory_bytes > 0 && taken.memory_bytes + wanted.memory_bytes > room.memory_bytes {
            let (wanted, taken, all) = (wanted.memory_bytes >> 20, taken.memory_bytes >> 20, room.memory_bytes >> 20);
            return Err(format!("{wanted} MiB of memory: {taken} of {all} MiB are reserved"));
        }
        taken.cpus += wanted.cpus;
        taken.memory_bytes += wanted.memory_bytes;
        Ok(())
    }

    /// Reserves that in any case: it was reserved before this daemon.
    pub(crate) fn take_again(&self, had: Reserved) {
        let mut taken = self.0.lock();
        taken.cpus += had.cpus;
        taken.memory_bytes += had.memory_bytes;
    }

    /// Gives it back.
    pub(crate) fn give_back(&self, had: Reserved) {
        let mut taken = self.0.lock();
        taken.cpus = (taken.cpus - had.cpus).max(0.0);
        taken.memory_bytes = taken.memory_bytes.saturating_sub(had.memory_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // promise spawn: latency-critical procs together reserve no more CPUs and memory than there
    //   are; one for which there are too few waits in the queue
    // held by: this, `tests/test_spawn.py::test_classes`
    #[test]
    fn no_more_than_there_is() {
        let room = MachineRoom { cpus: 2.0, memory_bytes: 100 << 20 };
        let wants = |cpus, mib: u64| Reserved { cpus, memory_bytes: mib << 20 };
        let books = RoomBooks::default();
        assert!(RoomBooks::never(room, wants(2.5, 0)).unwrap().contains("this machine has 2"));
        assert!(RoomBooks::never(room, wants(0.0, 101)).is_some() && RoomBooks::never(room, wants(2.0, 100)).is_none());
        (0..20).for_each(|_| books.take(room, wants(0.1, 5)).unwrap());
        assert!(books.take(room, wants(0.1, 0)).unwrap_err().contains("2.00 of 2"));
        assert!(books.take(room, wants(0.0, 1)).unwrap_err().contains("100 of 100 MiB"));
        books.take(room, wants(0.0, 0)).unwrap();
        books.give_back(wants(0.1, 5));
        books.take(room, wants(0.1, 5)).unwrap();
        books.take_again(wants(1.0, 0));
        assert!(books.take(room, wants(0.1, 0)).is_err());
    }
}
