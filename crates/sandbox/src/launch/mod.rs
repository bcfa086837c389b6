//! The resident process `kip-launch`: builds sandboxes and runs programs in them, one request at a
//! time.
//!
//! Single-threaded, without capabilities of its own invention: it acts only on descriptors and
//! numbers that come with a request, in a mount namespace that holds nothing of the host
//! ([`template`]). It is the parent of every init and exec it starts and reaps them all; when its
//! socket closes it ends, and what it started goes on. Its children share its memory until they
//! exec (see `kip_sys::ns::clone_child`), so it is not dumpable: no process in a sandbox that a
//! child has joined can trace it.

mod confine;
mod exec;
mod prepare;
mod restore;
mod start;
mod template;
mod volumes;

pub use confine::INIT_CAPABILITY_BITS;
pub use start::MASKED;

use crate::protocol::{Ended, Failure, Reply, Request, Step};
use kip_sys::caps::Instruction;
use kip_sys::fdpass;
use kip_sys::ns::{Child, Clone, clone_child};
use kip_types::spec::FilterKind;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{DumpableBehavior, WaitOptions, set_dumpable_behavior, wait};
use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use template::Template;

/// What is made once.
#[derive(Debug)]
struct Prepared {
    template: Template,
    /// By [`FilterKind`].
    filters: [Vec<Instruction>; 2],
}

impl Prepared {
    fn filter(&self, kind: FilterKind) -> &[Instruction] {
        let [usual, light] = &self.filters;
        match kind {
            FilterKind::Default => usual,
            FilterKind::Light => light,
        }
    }
}

/// A process that has exec'd.
type Spawned = Child;

/// Runs `steps` in a new process that must not come back from them but by a failure, which is then
/// ours.
fn spawn(how: Clone, steps: impl Fn() -> Result<Infallible, Failure>) -> Result<Spawned, Failure> {
    let mut failure = None;
    let child = clone_child(how, &mut || {
        let Err(f) = catch_unwind(AssertUnwindSafe(&steps)).unwrap_or_else(|_| Err(panicked()));
        failure = Some(f);
        127
    })
    .map_err(Failure::at(Step::Clone))?;
    match failure {
        // The main loop reaps it.
        Some(failure) => Err(failure),
        None => Ok(child),
    }
}

/// Runs something in a child that shares memory and descriptors, but not namespaces, and returns
/// what it made.
fn in_child<T>(step: Step, mut make: impl FnMut() -> Result<T, Failure>) -> Result<T, Failure> {
    let mut made = None;
    let how = Clone { shared: true, files: true, ..Clone::default() };
    // The main loop reaps it.
    clone_child(how, &mut || {
        made = Some(catch_unwind(AssertUnwindSafe(&mut make)).unwrap_or_else(|_| Err(panicked())));
        0
    })
    .map_err(Failure::at(Step::Clone))?;
    made.unwrap_or_else(|| Err(Failure::new(step, Errno::CHILD)))
}

/// A panic in a child is ours to tell, where panics unwind at all.
fn panicked() -> Failure {
    Failure { step: Step::Clone, errno: Errno::NOTRECOVERABLE.raw_os_error(), detail: "a bug: it panicked".into() }
}

/// Serves requests on `socket` until its other end is closed.
///
/// # Errors
/// The process is not what it has to be (root, one thread), or the socket broke.
pub fn serve(socket: OwnedFd) -> io::Result<()> {
    if kip_sys::ns::own_threads()? != 1 {
        return Err(io::Error::other("the launcher must have one thread"));
    }
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    kip_sys::ns::default_signals();
    let signals = kip_sys::ns::child_signal_fd()?;
    let mut server = Server { socket, signals, events: None, execs: HashMap::new(), unsent: Vec::new() };
    let prepared = match Template::enter() {
        Ok(template) => {
            Prepared { template, filters: [FilterKind::Default, FilterKind::Light].map(crate::seccomp::filter) }
        }
        Err(failure) => {
            // The process that started us waits for the answer to its first request.
            let _ = server.receive(&mut [0; 4096]);
            return server.answer(Reply::Failed(failure), &[]);
        }
    };
    server.run(&prepared)
}

struct Server {
    socket: OwnedFd,
    signals: OwnedFd,
    events: Option<OwnedFd>,
    /// Execs that run, by pid.
    execs: HashMap<u32, u64>,
    /// Ends that the events socket had no room for.
    unsent: Vec<Ended>,
}

impl Server {
    fn run(&mut self, prepared: &Prepared) -> io::Result<()> {
        let mut buffer = vec![0; fdpass::MAX_BYTES];
        loop {
            let (readable, signalled) = self.wait()?;
            if signalled {
                self.reap()?;
            }
            self.send_ends();
            if readable {
                match self.receive(&mut buffer) {
                    Ok((length, fds)) => self.handle(prepared, &buffer[..length], fds)?,
                    Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                    Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                        self.answer(Reply::Failed(Failure::new(Step::Request, e)), &[])?;
                    }
                    Err(e) => return Err(e),
                }
            }
        }
    }

    /// Waits for a request or a child's end.
    fn wait(&self) -> io::Result<(bool, bool)> {
        let mut fds = vec![PollFd::new(&self.socket, PollFlags::IN), PollFd::new(&self.signals, PollFlags::IN)];
        if let Some(events) = self.events.as_ref().filter(|_| !self.unsent.is_empty()) {
            fds.push(PollFd::new(events, PollFlags::OUT));
        }
        rustix::io::retry_on_intr(|| poll(&mut fds, None))?;
        Ok((!fds[0].revents().is_empty(), !fds[1].revents().is_empty()))
    }

    fn receive(&self, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        fdpass::recv_into(self.socket.as_fd(), buffer)
    }

    fn answer(&self, reply: Reply, fds: &[OwnedFd]) -> io::Result<()> {
        let bytes = serde_json::to_vec(&reply).expect("a reply has only strings and numbers");
        let fds: Vec<_> = fds.iter().map(|f| f.as_fd()).collect();
        fdpass::send(self.socket.as_fd(), &bytes, &fds)
    }

    fn handle(&mut self, prepared: &Prepared, bytes: &[u8], fds: Vec<OwnedFd>) -> io::Result<()> {
        let done = match serde_json::from_slice(bytes) {
            Ok(request) => self.perform(prepared, request, fds),
            Err(e) => Err(Failure::new(Step::Request, io::Error::from(e))),
        };
        match done {
            Ok((reply, fds)) => self.answer(reply, &fds),
            Err(failure) => self.answer(Reply::Failed(failure), &[]),
        }
    }

    fn perform(
        &mut self,
        prepared: &Prepared,
        request: Request,
        fds: Vec<OwnedFd>,
    ) -> Result<(Reply, Vec<OwnedFd>), Failure> {
        match request {
            Request::Events => {
                let [events] = exactly(fds)?;
                self.events = Some(events);
                Ok((Reply::Ready, vec![]))
            }
            Request::Start { program, has_stdin, volumes, directories, hostname, read_only, root: kind } => {
                let ([root, usr, user, net, uts, ipc, stdout, stderr, status], mut rest) = first(fds)?;
                if has_stdin && rest.is_empty() {
                    return Err(wrong_number());
                }
                let stdin = has_stdin.then(|| rest.remove(0));
                let (volumes, cgroups) = volumes::split(volumes, rest)?;
                let mounts = start::Files { kind, root, usr, volumes, directories, may_make: true, read_only };
                let parts =
                    start::Parts { mounts, hostname, user, net, uts, ipc, stdin, stdout, stderr, status, cgroups };
                let child = start::start(prepared, &parts, &program)?;
                Ok((Reply::Process { pid: child.pid }, vec![child.pidfd]))
            }
            Request::Exec { id, program, own_time } => {
                let ([init, stdin, stdout, stderr], cgroups) = first(fds)?;
                let parts = exec::Parts { init, own_time, stdin, stdout, stderr, cgroups };
                let child = exec::exec(prepared, &parts, &program)?;
                self.execs.insert(child.pid, id);
                Ok((Reply::Process { pid: child.pid }, vec![child.pidfd]))
            }
            Request::Session { program, own_time } => {
                let ([init, stdin, stdout, stderr, status], cgroups) = first(fds)?;
                let parts = exec::Parts { init, own_time, stdin, stdout, stderr, cgroups };
                Ok((Reply::Session, vec![exec::session(prepared, &parts, &status, &program)?]))
            }
            Request::Restore { new_ipc, own_time, volumes, root: kind } => {
                let ([root, usr, user, net, uts, control, program], mut rest) = first(fds)?;
                if rest.len() < usize::from(!new_ipc) + usize::from(own_time) {
                    return Err(wrong_number());
                }
                let ipc = (!new_ipc).then(|| rest.remove(0));
                let time = own_time.then(|| rest.remove(0));
                let (volumes, cgroups) = volumes::split(volumes, rest)?;
                let (directories, may_make, read_only) = (Vec::new(), false, false);
                let mounts = start::Files { kind, root, usr, volumes, directories, may_make, read_only };
                let parts = restore::Parts { mounts, user, net, uts, ipc, time, control, program, cgroups };
                let child = restore::restore(prepared, &parts)?;
                Ok((Reply::Process { pid: child.pid }, vec![child.pidfd]))
            }
            Request::Namespaces { uid_base, hostname } => {
                Ok((Reply::Ready, prepare::namespaces(prepared, uid_base, &hostname)?.into()))
            }
            Request::Copy { points } => {
                let [init] = exactly(fds)?;
                Ok((Reply::Ready, prepare::copy(&init, &points)?))
            }
            Request::Fill { first_id } => {
                let ([mount, contents, said], cgroups) = first(fds)?;
                prepare::fill(&mount, contents, said, &cgroups, first_id)?;
                Ok((Reply::Ready, vec![]))
            }
            Request::Mount { lower, root } => {
                let ([state], trees) = first(fds)?;
                Ok((Reply::Ready, prepare::mount(&state, &trees, &lower, root)?.into()))
            }
        }
    }

    /// Collects every child that has ended.
    fn reap(&mut self) -> io::Result<()> {
        let mut buffer = [0; 128 * 8];
        while rustix::io::read(&self.signals, &mut buffer).is_ok() {}
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => {
                    if let Some(id) = self.execs.remove(&(pid.as_raw_nonzero().get() as u32)) {
                        self.unsent.push(Ended { id, status: status.as_raw() });
                    }
                }
                Ok(None) | Err(Errno::CHILD) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// As many as there is room for. A daemon that has gone is noticed at the other socket.
    fn send_ends(&mut self) {
        let Some(events) = &self.events else { return };
        let send = |ended: &Ended| {
            let bytes = serde_json::to_vec(ended).expect("two numbers");
            fdpass::send(events.as_fd(), &bytes, &[]).is_ok()
        };
        let sent = self.unsent.iter().take_while(|e| send(e)).count();
        self.unsent.drain(..sent);
    }
}

fn wrong_number() -> Failure {
    Failure { step: Step::Request, errno: Errno::INVAL.raw_os_error(), detail: "a wrong number of descriptors".into() }
}

fn exactly<const N: usize>(fds: Vec<OwnedFd>) -> Result<[OwnedFd; N], Failure> {
    fds.try_into().map_err(|_| wrong_number())
}

fn first<const N: usize>(mut fds: Vec<OwnedFd>) -> Result<([OwnedFd; N], Vec<OwnedFd>), Failure> {
    if fds.len() < N {
        return Err(wrong_number());
    }
    let rest = fds.split_off(N);
    Ok((exactly(fds)?, rest))
}
