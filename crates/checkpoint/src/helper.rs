//! CRIU, loaded and waiting: a `criu swrk` that forks helpers, each good for one request.
//!
//! A [`Template`] is CRIU as it is before its first request; it forks helpers, so that CRIU is
//! loaded and linked once. A helper runs in a mount namespace of its own (the shim sees to that)
//! and gets, at the moment of use, descriptors to keep, namespaces to stand in, a cgroup to join
//! and mounts to attach: see shim/shim.c. Never decides anything. Crash: a dead helper is a closed
//! socket and an error; whatever it was restoring dies with an error too or is killed by CRIU, and
//! what it was dumping runs on. Helpers outlive their template.

use crate::locate::CriuCommand;
use crate::rpc::{CriuCall, CriuRequest, Response};
use kip_sys::process::{Signal, pidfd_send_signal, wait_for_end};
use prost::Message as _;
use rustix::net::sockopt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Largest answer of CRIU's, bytes.
const MAX_ANSWER: usize = 64 * 1024;
/// Orders in one message: one descriptor each.
pub(crate) const ORDERS_PER_MESSAGE: usize = 250;

/// Processes in one [`Helper::hold`]: as MOST_HELD in shim/hold.h.
const MOST_HELD: usize = 4096;

/// The shared object that is preloaded into helpers.
pub const SHIM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/shim.so"));

/// What a helper does with a descriptor before it reads the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HelperOrder {
    /// Keep it under this number, which must be free when the order comes and above all at which it
    /// can arrive.
    Dup(i32),
    /// Enter this namespace, setns(2); the argument is its CLONE_NEW* type.
    SetNs(i32),
    /// Join the cgroup whose `tasks` or `cgroup.procs` file it is.
    Cgroup,
    /// Attach this detached mount as the root to restore onto.
    MountRoot,
    /// Attach this detached mount as the tree's /usr.
    MountUsr,
    /// Attach this detached mount, of a file or directory, at [`volume_place`] of this number.
    MountVolume(u32),
    /// Leave the memory of processes out of a dump: copies hold it ([`Helper::hold`]). The
    /// descriptor is of no matter.
    LeaveMemory,
}

impl HelperOrder {
    fn encode(self) -> [u32; 2] {
        match self {
            HelperOrder::Dup(n) => [0, n as u32],
            HelperOrder::SetNs(kind) => [1, kind as u32],
            HelperOrder::Cgroup => [2, 0],
            HelperOrder::MountRoot => [3, 0],
            HelperOrder::MountUsr => [3, 1],
            HelperOrder::MountVolume(n) => [4, n],
            HelperOrder::LeaveMemory => [5, 0],
        }
    }
}

/// A helper could not be started or did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum HelperError {
    /// exec failed.
    #[error("cannot start {program}")]
    Spawn {
        /// CRIU's program.
        program: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is gone.
    #[error("the CRIU helper died")]
    Died(#[source] io::Error),
    /// There is a template, and the kernel makes no process of it.
    #[error("no CRIU helper can be forked")]
    Fork(#[source] io::Error),
    /// It hangs.
    #[error("CRIU has said nothing for {patience_s} s")]
    Silent {
        /// That was waited for, seconds.
        patience_s: u64,
    },
    /// An order could not be carried out.
    #[error("the CRIU helper could not carry out {order:?}")]
    Order {
        /// Which.
        order: HelperOrder,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// No copies of the processes can be made.
    #[error("the memory of its processes cannot be held")]
    Hold(#[source] io::Error),
    /// Its answer is not one.
    #[error("the CRIU helper's answer cannot be read")]
    Answer(#[source] prost::DecodeError),
}

/// How helpers are started.
#[derive(Debug, Clone)]
pub struct HelperConfig {
    /// CRIU.
    pub criu: CriuCommand,
    /// The shim on disk.
    pub shim: PathBuf,
    /// The tmpfs that helpers see as /run ([`mount_stage`]).
    pub stage: PathBuf,
}

/// Where a helper attaches the tree's root, in its own mount namespace.
pub const ROOT: &str = "/run/kip/root";
/// Where it attaches the tree's /usr.
pub const USR: &str = "/run/kip/usr";

/// Where it attaches one of the tree's volumes. The shim makes what is not there.
pub fn volume_place(number: u32, is_dir: bool) -> String {
    format!("/run/kip/{}{number}", if is_dir { "dir" } else { "file" })
}

/// CRIU, loaded, linked and about to read its first request: helpers are forked from it.
#[derive(Debug)]
pub struct Template {
    socket: OwnedFd,
    child: Child,
}

/// A waiting helper.
#[derive(Debug)]
pub struct Helper {
    socket: OwnedFd,
    pid: u32,
    pidfd: OwnedFd,
}

/// A template answers within this, also where the machine is busy.
const FORKS_WITHIN: Duration = Duration::from_secs(10);
/// A helper that is killed has ended after this.
const ENDS_WITHIN: Duration = Duration::from_secs(5);

impl Template {
    /// Starts it; it is ready some ten milliseconds later, and what it is asked before simply
    /// waits.
    ///
    /// # Errors
    /// CRIU cannot be started.
    pub fn start(config: &HelperConfig) -> Result<Template, HelperError> {
        let failed = |source| HelperError::Spawn { program: config.criu.program.clone(), source };
        let (ours, theirs) = kip_sys::fdpass::seqpacket_pair().map_err(failed)?;
        let mut command = Command::new(&config.criu.program);
        command.args(&config.criu.args).args(["swrk", "0"]);
        command.env_clear().envs(config.criu.env.iter().map(|(k, v)| (k, v)));
        command
            .env("LD_PRELOAD", &config.shim)
            .env("KIP_RUN", &config.stage)
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        // Its symbols are bound now, and not one by one in each helper.
        command.env("LD_BIND_NOW", "1");
        command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
        command.current_dir("/");
        let child = command.spawn().map_err(failed)?;
        sockopt::set_socket_timeout(&ours, sockopt::Timeout::Recv, Some(FORKS_WITHIN)).map_err(|e| failed(e.into()))?;
        Ok(Template { socket: ours, child })
    }

    /// A helper.
    ///
    /// # Errors
    /// The template is gone, or the kernel makes no process.
    pub fn fork(&self) -> Result<Helper, HelperError> {
        let (ours, theirs) = kip_sys::fdpass::seqpacket_pair().map_err(HelperError::Fork)?;
        kip_sys::fdpass::send(self.socket.as_fd(), b"KIPFORK1", &[theirs.as_fd()]).map_err(HelperError::Died)?;
        let (answer, mut fds) = kip_sys::fdpass::recv(self.socket.as_fd(), 8).map_err(HelperError::Died)?;
        let word = |at: usize| answer.get(at..at + 4).map(|b| u32::from_le_bytes(b.try_into().expect("4 bytes")));
        match (word(0), word(4), fds.pop()) {
            (Some(pid), _, Some(pidfd)) => Ok(Helper { socket: ours, pid, pidfd }),
            (_, Some(errno), None) => Err(HelperError::Fork(io::Error::from_raw_os_error(errno as i32))),
            _ => Err(HelperError::Died(io::ErrorKind::UnexpectedEof.into())),
        }
    }
}

impl Drop for Template {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Helper {
    /// Whether it still waits for its request.
    pub fn is_waiting(&self) -> bool {
        matches!(wait_for_end(self.pidfd.as_fd(), Some(Duration::ZERO)), Ok(false))
    }

    /// Host pid of the helper.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Gives it descriptors and what to do with each, in order.
    pub fn prepare(&self, orders: &[(HelperOrder, BorrowedFd<'_>)]) -> Result<(), HelperError> {
        let mut chunks = orders.chunks(ORDERS_PER_MESSAGE).peekable();
        if chunks.peek().is_none() {
            self.send_orders(&[], false)?;
        }
        while let Some(chunk) = chunks.next() {
            self.send_orders(chunk, chunks.peek().is_some())?;
        }
        let (answer, _) = kip_sys::fdpass::recv(self.socket.as_fd(), 64).map_err(|e| self.silence(e))?;
        let word = |at: usize| answer.get(at..at + 4).map(|b| u32::from_le_bytes(b.try_into().expect("4 bytes")));
        match (word(0), word(4)) {
            (Some(0), _) => Ok(()),
            (Some(n), Some(errno)) => Err(HelperError::Order {
                order: orders[(n as usize - 1).min(orders.len() - 1)].0,
                source: io::Error::from_raw_os_error(errno as i32),
            }),
            _ => Err(HelperError::Died(io::ErrorKind::UnexpectedEof.into())),
        }
    }

    fn send_orders(&self, chunk: &[(HelperOrder, BorrowedFd<'_>)], more: bool) -> Result<(), HelperError> {
        let mut bytes = b"KIPSHIM1".to_vec();
        bytes.extend_from_slice(&(chunk.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&u32::from(more).to_le_bytes());
        for (order, _) in chunk {
            for word in order.encode() {
                bytes.extend_from_slice(&word.to_le_bytes());
            }
        }
        let fds: Vec<BorrowedFd<'_>> = chunk.iter().map(|(_, fd)| *fd).collect();
        kip_sys::fdpass::send(self.socket.as_fd(), &bytes, &fds).map_err(HelperError::Died)
    }

    /// From here on it is taken for dead when it says nothing for so long.
    ///
    /// # Errors
    /// The kernel's, setsockopt(2).
    pub fn be_patient(&self, patience: Duration) -> Result<(), HelperError> {
        let set = sockopt::set_socket_timeout(&self.socket, sockopt::Timeout::Recv, Some(patience));
        set.map_err(|e| HelperError::Died(e.into()))
    }

    fn silence(&self, e: io::Error) -> HelperError {
        let patience = sockopt::socket_timeout(&self.socket, sockopt::Timeout::Recv).ok().flatten();
        match (e.kind(), patience) {
            (io::ErrorKind::WouldBlock, Some(patience)) => HelperError::Silent { patience_s: patience.as_secs() },
            _ => HelperError::Died(e),
        }
    }

    /// Sends the request and answers each stage that CRIU reports with what `stage` says, until the
    /// final answer.
    pub fn call(
        &self,
        request: &CriuRequest,
        stage: &mut dyn FnMut(&str, Option<i32>) -> bool,
    ) -> Result<Response, HelperError> {
        self.send(request)?;
        loop {
            let (bytes, _) = kip_sys::fdpass::recv(self.socket.as_fd(), MAX_ANSWER).map_err(|e| self.silence(e))?;
            let response = Response::decode(bytes.as_slice()).map_err(HelperError::Answer)?;
            if response.kind != CriuCall::Notify as i32 {
                return Ok(response);
            }
            let notify = response.notify.unwrap_or_default();
            let success = stage(notify.script.as_deref().unwrap_or(""), notify.pid);
            self.send(&CriuRequest { kind: CriuCall::Notify as i32, opts: None, notify_success: Some(success) })?;
        }
    }

    /// Makes a copy of each of these processes (host pids), all of which CRIU has stopped, and
    /// gives their host pids. A copy has the memory that its process has at this moment, and stays
    /// until this helper is dropped. To be called in a stage of a dump
    /// ([`HelperOrder::LeaveMemory`]).
    ///
    /// # Errors
    /// The helper's; [`HelperError::Hold`], with no copy left and the processes as they were.
    pub fn hold(&self, pids: &[u32]) -> Result<Vec<u32>, HelperError> {
        if pids.len() > MOST_HELD {
            return Err(HelperError::Hold(io::Error::from_raw_os_error(rustix::io::Errno::TOOBIG.raw_os_error())));
        }
        let mut bytes = b"KIPHOLD1".to_vec();
        for word in [pids.len() as u32].iter().chain(pids) {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        kip_sys::fdpass::send(self.socket.as_fd(), &bytes, &[]).map_err(HelperError::Died)?;
        let most = 4 + 4 * pids.len();
        let (answer, _) = kip_sys::fdpass::recv(self.socket.as_fd(), most).map_err(|e| self.silence(e))?;
        let mut words = answer.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().expect("4 bytes")));
        match words.next() {
            Some(0) if answer.len() == most => Ok(words.collect()),
            Some(errno @ 1..) => Err(HelperError::Hold(io::Error::from_raw_os_error(errno as i32))),
            _ => Err(HelperError::Died(io::ErrorKind::UnexpectedEof.into())),
        }
    }

    fn send(&self, request: &CriuRequest) -> Result<(), HelperError> {
        kip_sys::fdpass::send(self.socket.as_fd(), &request.encode_to_vec(), &[]).map_err(HelperError::Died)
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // One that has done its work is about to end by itself, and there is nothing that it would
        // still do.
        let _ = pidfd_send_signal(self.pidfd.as_fd(), Signal::KILL);
        if !matches!(wait_for_end(self.pidfd.as_fd(), Some(ENDS_WITHIN)), Ok(true)) {
            tracing::warn!(pid = self.pid, "a CRIU helper that was killed has not ended");
        }
    }
}

/// The name that the shim gives a helper: proc_pid_comm(5).
const COMM: &str = "criu-helper";

/// Host pids of helpers, and of what they have forked, that an earlier daemon of the same stage
/// left at work.
///
/// A helper whose daemon died ends its dump or restore on its own: until then its processes are not
/// to be touched.
pub fn strays(stage: &Path) -> Vec<u32> {
    let stage = stage.to_string_lossy();
    let is_stray = |pid: &u32| {
        let read = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
        // Every mount namespace of ours shows where the stage is mounted.
        read("comm").trim_end() == COMM && read("mountinfo").contains(&format!(" {stage} "))
    };
    let pids = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    pids.filter_map(|e| e.file_name().to_str()?.parse().ok()).filter(is_stray).collect()
}

/// Mounts a tmpfs at `stage` and makes there what helpers want of a /run: the mount points [`ROOT`]
/// and [`USR`].
///
/// To be called in a mount namespace of the caller's own: the mount goes with it.
pub fn mount_stage(stage: &Path) -> io::Result<()> {
    use rustix::mount::{MountFlags, mount};
    mount("kip-stage", stage, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, c"mode=0755,size=16m")?;
    for path in [ROOT, USR] {
        std::fs::create_dir_all(stage.join(path.trim_start_matches("/run/")))?;
    }
    Ok(())
}
