//! Takes clients, each to a thread of its own, and refuses those that cannot be served.

use super::refused::{OrderError, line};
use super::{MAX_MESSAGE, STACK, Service, reply};
use kip_sys::fdpass;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Between two tries to refuse a client where not even one descriptor is free.
const NO_DESCRIPTOR_PAUSE: Duration = Duration::from_millis(10);

/// Answers the request of a client that cannot be served. It is taken first: a connection that is
/// closed while it has a request brings its client no answer.
fn refuse(socket: &OwnedFd, error: &OrderError) {
    const REQUEST_WITHIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    tracing::warn!(error = line(error), "a client is refused");
    if poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&REQUEST_WITHIN)).is_ok_and(|ready| ready > 0) {
        drop(fdpass::recv(socket.as_fd(), MAX_MESSAGE));
    }
    reply(socket, &error.answer());
}

impl Service {
    /// Serves connections until a client says quit.
    ///
    /// # Errors
    /// The listening socket's.
    pub fn run(self: &Arc<Service>, listener: &OwnedFd) -> io::Result<()> {
        let ended = Arc::new(AtomicBool::new(false));
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        // Given up for a moment to refuse a client where there is no other descriptor.
        let mut reserve = bell.try_clone().ok();
        loop {
            if reserve.is_none() {
                reserve = bell.try_clone().ok();
            }
            let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(&*bell, PollFlags::IN)];
            rustix::io::retry_on_intr(|| poll(&mut fds, None))?;
            if ended.load(Ordering::SeqCst) {
                return Ok(());
            }
            let accept = || accept_with(listener, SocketFlags::CLOEXEC);
            let socket = match accept() {
                Ok(socket) => socket,
                Err(error @ (Errno::MFILE | Errno::NFILE)) => {
                    drop(reserve.take());
                    match accept() {
                        Ok(socket) => refuse(&socket, &OrderError::Accept(error.into())),
                        // Other threads have taken it.
                        Err(_) => std::thread::sleep(NO_DESCRIPTOR_PAUSE),
                    }
                    continue;
                }
                // The client is gone.
                Err(_) => continue,
            };
            let client = socket.try_clone();
            let (service, ended, bell) = (Arc::clone(self), Arc::clone(&ended), Arc::clone(&bell));
            let serve = move || {
                if service.connection(socket) {
                    ended.store(true, Ordering::SeqCst);
                    let _ = rustix::io::write(&*bell, &1u64.to_ne_bytes());
                }
            };
            let spawned = std::thread::Builder::new().name("connection".into()).stack_size(STACK).spawn(serve);
            if let (Err(error), Ok(client)) = (spawned, client) {
                refuse(&client, &OrderError::Thread(error));
            }
        }
    }
}
