//! Real servers for the examples, as plain processes.

use kip_pager::SpaceId;
use kip_pager::proc::Custodian;
use std::collections::HashMap;
use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A request whose answer ends with "hello".
pub const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n";

/// Stands for the keeper.
#[derive(Default)]
pub struct Holder(Mutex<HashMap<SpaceId, OwnedFd>>);

impl Custodian for Holder {
    fn hold(&self, spaces: &[(SpaceId, BorrowedFd<'_>)]) -> io::Result<()> {
        for (space, uffd) in spaces {
            self.0.lock().expect("held by no panic").insert(*space, uffd.try_clone_to_owned()?);
        }
        Ok(())
    }
    fn release(&self, space: SpaceId) {
        self.0.lock().expect("held by no panic").remove(&space);
    }
}

/// A server under test, and a client of it.
pub struct Program {
    pub name: &'static str,
    pub child: Child,
    port: u16,
    keep: Option<TcpStream>,
    keeps: bool,
}

impl Program {
    /// Starts it and waits until it listens.
    pub fn start(name: &'static str, port: u16, keeps: bool, command: &mut Command) -> Self {
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts");
        let until = Instant::now() + Duration::from_secs(10);
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < until, "{name} does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Self { name, child, port, keep: None, keeps }
    }

    /// How long the reply to a request takes.
    pub fn ask(&mut self, request: &[u8]) -> Duration {
        let began = Instant::now();
        let mut stream = match self.keep.take() {
            Some(stream) => stream,
            None => TcpStream::connect(("127.0.0.1", self.port)).expect("connects"),
        };
        stream.set_nodelay(true).expect("a socket");
        stream.write_all(request).expect("is written");
        let mut answer = [0u8; 65536];
        let mut got = stream.read(&mut answer).expect("an answer");
        while got > 0 && !complete(&answer[..got]) {
            match stream.read(&mut answer[got..]).expect("an answer") {
                0 => break,
                n => got += n,
            }
        }
        assert!(got > 0, "{} answers nothing", self.name);
        let took = began.elapsed();
        if self.keeps {
            self.keep = Some(stream);
        }
        took
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn complete(answer: &[u8]) -> bool {
    !answer.starts_with(b"HTTP") || String::from_utf8_lossy(answer).ends_with("hello\n")
}
