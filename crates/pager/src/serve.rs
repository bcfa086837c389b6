//! The threads that serve faults: one for each processor, bound to it, each with an epoll set of
//! the userfaultfds that it serves.
//!
//! A fault is served about six times faster on the processor of the thread that waits for it than
//! across, so a space is moved to where its program last ran whenever the pager knows that
//! ([`Server::move_to`]). Owns no state that must survive: spaces are handed in and can be handed
//! to another server.

use crate::memory::{Memory, MemoryState, SpaceId};
use crate::spares::Spares;
use parking_lot::{Mutex, MutexGuard};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

const END: u64 = u64::MAX;
/// Between tries of a fault that could not be answered, nanoseconds.
const AGAIN_NS: i64 = 200_000;

/// Looks after what a fork brings into the world, before parent and child go on.
pub trait Nursery: Send + Sync {
    /// Takes the child in, while the parent's map is as it was at the fork. When it returns, the
    /// child's userfaultfd and slot map are where a later pager finds them.
    ///
    /// # Errors
    /// Whatever stood in the way: the child then waits at its first missing page, until a pager
    /// adopts it.
    fn born(&self, parent: SpaceId, state: &MemoryState, uffd: OwnedFd) -> io::Result<Arc<Memory>>;

    /// A page that is waited for cannot be trusted.
    fn damaged(&self, error: &io::Error);
}

struct Served {
    memory: Arc<Memory>,
    nursery: Arc<dyn Nursery>,
    thread: usize,
}

struct Shared {
    spaces: Mutex<HashMap<u64, Served>>,
    sets: Vec<OwnedFd>,
}

impl Shared {
    fn spaces(&self) -> MutexGuard<'_, HashMap<u64, Served>> {
        self.spaces.lock()
    }
}

/// Serves many address spaces.
pub struct Server {
    spares: Arc<Spares>,
    shared: Arc<Shared>,
    end: OwnedFd,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    /// Starts one thread for each processor.
    ///
    /// # Errors
    /// The kernel's.
    pub fn start() -> io::Result<Self> {
        Self::with_spares(Spares::default())
    }

    /// The same, with files for the slot maps of what is served.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn with_spares(spares: Spares) -> io::Result<Self> {
        let count = std::thread::available_parallelism()?.get();
        // Before any thread is bound to a processor.
        crate::crew::crew();
        let end = eventfd(0, EventfdFlags::CLOEXEC)?;
        let mut sets = Vec::new();
        for _ in 0..count {
            let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            epoll::add(&set, &end, EventData::new_u64(END), EventFlags::IN)?;
            sets.push(set);
        }
        let shared = Arc::new(Shared { spaces: Mutex::default(), sets });
        let mut threads = Vec::new();
        for number in 0..count {
            let shared = shared.clone();
            let name = format!("faults-{number}");
            threads.push(std::thread::Builder::new().name(name).spawn(move || run(&shared, number))?);
        }
        Ok(Self { spares: Arc::new(spares), shared, end, threads })
    }

    /// Files for slot maps.
    pub(crate) fn spares(&self) -> &Arc<Spares> {
        &self.spares
    }

    /// Serves a space from now on. Ids are to be unique among all procs served here.
    ///
    /// # Errors
    /// The kernel's.
    pub fn add(&self, memory: &Arc<Memory>, nursery: Arc<dyn Nursery>) -> io::Result<()> {
        add(&self.shared, memory, nursery, 0)
    }

    /// Serves a space by the thread of this processor.
    ///
    /// # Errors
    /// The kernel's.
    pub fn move_to(&self, id: SpaceId, processor: usize) -> io::Result<()> {
        let mut spaces = self.shared.spaces();
        let Some(served) = spaces.get_mut(&id) else { return Ok(()) };
        let thread = processor % self.shared.sets.len();
        if thread != served.thread {
            epoll::delete(&self.shared.sets[served.thread], &served.memory.uffd)?;
            let data = EventData::new_u64(id);
            epoll::add(&self.shared.sets[thread], &served.memory.uffd, data, EventFlags::IN)?;
            served.thread = thread;
        }
        Ok(())
    }

    /// Serves a space no more. Its threads wait at missing pages until it is served again.
    pub fn remove(&self, id: SpaceId) {
        if let Some(served) = self.shared.spaces().remove(&id) {
            // The epoll set would forget it at the last close, which is not ours alone.
            let _ = epoll::delete(&self.shared.sets[served.thread], &served.memory.uffd);
        }
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("threads", &self.threads.len()).finish_non_exhaustive()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.end, &1u64.to_ne_bytes());
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn add(shared: &Shared, memory: &Arc<Memory>, nursery: Arc<dyn Nursery>, thread: usize) -> io::Result<()> {
    let mut spaces = shared.spaces();
    spaces.insert(memory.id, Served { memory: memory.clone(), nursery, thread });
    let added = epoll::add(&shared.sets[thread], &memory.uffd, EventData::new_u64(memory.id), EventFlags::IN);
    if added.is_err() {
        spaces.remove(&memory.id);
    }
    Ok(added?)
}

fn run(shared: &Shared, number: usize) {
    let mut own = CpuSet::new();
    own.set(number);
    // On a machine where we may not use this processor any will do.
    let _ = sched_setaffinity(None, &own);
    let mut events = Vec::with_capacity(64);
    // Spaces with a fault that could not be answered yet; the others come first.
    let mut late: Vec<u64> = Vec::new();
    loop {
        events.clear();
        let patience = Timespec { tv_sec: 0, tv_nsec: AGAIN_NS };
        let patience = (!late.is_empty()).then_some(&patience);
        match epoll::wait(&shared.sets[number], rustix::buffer::spare_capacity(&mut events), patience) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                tracing::error!(%error, "cannot wait for faults");
                return;
            }
        }
        let again = std::mem::take(&mut late);
        for id in events.iter().map(|event| event.data.u64()).chain(again) {
            if id == END {
                return;
            }
            let found = shared.spaces().get(&id).map(|s| (s.memory.clone(), s.nursery.clone()));
            if let Some((memory, nursery)) = found
                && serve(shared, number, &memory, &nursery)
                && !late.contains(&id)
            {
                late.push(id);
            }
        }
    }
}

/// True if it is to be called again soon.
fn serve(shared: &Shared, number: usize, memory: &Arc<Memory>, nursery: &Arc<dyn Nursery>) -> bool {
    let served = memory.serve(&mut |state, uffd| {
        let child = nursery.born(memory.id, state, uffd)?;
        add(shared, &child, nursery.clone(), number)
    });
    served.unwrap_or_else(|error| {
        if error.kind() == io::ErrorKind::InvalidData {
            nursery.damaged(&error);
        }
        tracing::error!(space = memory.id, %error, "a fault is not served");
        // It is tried again: leave the others a chance.
        std::thread::sleep(std::time::Duration::from_millis(1));
        true
    })
}

/// The processor that a process last ran on: proc_pid_stat(5), field 39.
pub(crate) fn processor(pid: u32) -> usize {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let rest = stat.rsplit(')').next().unwrap_or_default();
    rest.split_ascii_whitespace().nth(39 - 3).and_then(|field| field.parse().ok()).unwrap_or(0)
}
