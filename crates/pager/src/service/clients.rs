//! Takes clients, each to a thread of its own, and refuses those that cannot be served.

use super::refused::{OrderError, line};
use super::{MAX_MESSAGE, STACK, Service, reply};
use crate::protocol::PagerRequest;
use kip_sys::fdpass;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Between two tries to take a client where that failed.
const PAUSE: Duration = Duration::from_millis(10);

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
                        Ok(socket) => self.refuse(&socket, &OrderError::Accept(error.into())),
                        // Other threads have taken it.
                        Err(_) => std::thread::sleep(PAUSE),
                    }
                    continue;
                }
                // The client is gone.
                Err(Errno::CONNABORTED | Errno::INTR | Errno::AGAIN) => continue,
                Err(error) => {
                    tracing::warn!(%error, "a client waits to be served");
                    std::thread::sleep(PAUSE);
                    continue;
                }
            };
            let client = Arc::new(Mutex::new(Some(socket)));
            let (service, ended, bell) = (Arc::clone(self), Arc::clone(&ended), Arc::clone(&bell));
            let theirs = Arc::clone(&client);
            let serve = move || {
                let socket = theirs.lock().take().expect("a thread that runs is not refused");
                if service.connection(socket) {
                    ended.store(true, Ordering::SeqCst);
                    let _ = rustix::io::write(&*bell, &1u64.to_ne_bytes());
                }
            };
            let spawned = std::thread::Builder::new().name("connection".into()).stack_size(STACK).spawn(serve);
            if let Err(error) = spawned
                && let Some(socket) = client.lock().take()
            {
                self.refuse(&socket, &OrderError::Thread(error));
            }
        }
    }

    /// Answers the request of a client that cannot be served now. The request is received first: a
    /// connection that is closed while it has one brings its client no answer. That a held proc is
    /// to wake has no answer, and is done.
    fn refuse(&self, socket: &OwnedFd, error: &OrderError) {
        const REQUEST_WITHIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        tracing::warn!(error = line(error), "a client is refused");
        if poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&REQUEST_WITHIN)).is_ok_and(|ready| ready > 0)
            && let Ok((bytes, _)) = fdpass::recv(socket.as_fd(), MAX_MESSAGE)
            && let Ok(PagerRequest::Rouse { name, purpose }) = serde_json::from_slice(&bytes)
        {
            self.rouse(&name, purpose);
        }
        reply(socket, &error.answer());
    }
}
