//! What daemon and `kip-launch` say to each other: one JSON message and its descriptors per
//! SEQPACKET packet.
//!
//! Requests are answered one by one in their order. Ended execs are told on a socket of their own,
//! handed over by the first request, so that a caller that waits for an answer has not to sort them
//! out.

use kip_types::spec::{CapabilityBits, FilterKind, RootKind};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A request. Its descriptors, in order, are listed with each.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// First of all: (events socket). Answered by [`Reply::Ready`].
    Events,
    /// (root, usr, user ns, net ns, uts ns, ipc ns, stdout, stderr, status, stdin if there is one,
    /// volumes.., cgroup task files..): [`Reply::Process`].
    Start {
        /// What to run.
        program: Program,
        /// Whether there is one; else it is the null device.
        #[serde(default)]
        has_stdin: bool,
        /// Where the volumes are attached.
        volumes: Vec<String>,
        /// What is to be a directory, whether a volume lies on it or not.
        directories: Vec<String>,
        /// The host name that the uts namespace gets.
        #[serde(default)]
        hostname: String,
        /// `/` and `/usr` cannot be written to.
        read_only: bool,
        /// What the sandbox has for a root.
        #[serde(default)]
        root: RootKind,
    },
    /// (pidfd of the sandbox's init, stdin, stdout, stderr, cgroup task files..):
    /// [`Reply::Process`].
    Exec {
        /// By which its end will be told.
        id: u64,
        /// What to run.
        program: Program,
        /// Whether init has a time namespace of its own.
        #[serde(default)]
        own_time: bool,
    },
    /// (pidfd of the sandbox's init, stdin, stdout, stderr, status, cgroup task files..):
    /// [`Reply::Session`]. The program is the child of a kip-init of its own, which is a child of
    /// the sandbox's init and tells of the program by the status pipe.
    Session {
        /// What to run.
        program: Program,
        /// Whether init has a time namespace of its own.
        own_time: bool,
    },
    /// (root, usr, user ns, net ns, uts ns, control socket, restorer, the ipc ns and the time ns if
    /// there are such, volumes.., cgroup task files..): [`Reply::Process`].
    Restore {
        /// There is no ipc namespace: a new one is to be made.
        #[serde(default)]
        new_ipc: bool,
        /// Whether there is a time namespace.
        #[serde(default)]
        own_time: bool,
        /// Where the volumes are attached.
        volumes: Vec<String>,
        /// What the sandbox has for a root.
        #[serde(default)]
        root: RootKind,
    },
    /// (): [`Reply::Ready`] with (user ns, uts ns, ipc ns).
    Namespaces {
        /// Host id of the sandbox's id 0.
        uid_base: u32,
        /// Of the uts namespace.
        hostname: String,
    },
    /// (a sandbox's init): [`Reply::Ready`] with other mounts of its (root, usr), of what is
    /// mounted at these places, and of its terminals if it has some.
    Copy {
        /// Where file systems in memory are mounted.
        points: Vec<String>,
    },
    /// (mount, file, end of a pipe, cgroup task files..): [`Reply::Ready`]. A process in the
    /// cgroups, which pay for the memory, makes what is in the file in the file system in memory.
    /// It writes why it could not to the pipe, which ends with it.
    Fill {
        /// Host id of the sandbox's id 0.
        first_id: u32,
    },
    /// (tree of the proc's directory, lower trees..), topmost layer first: [`Reply::Ready`] with
    /// (root, usr). A sealed root has, in the place of the proc's directory, one whose `root` and
    /// `usr` are its topmost layers.
    Mount {
        /// What they are mounted of.
        lower: Lower,
        /// What kind of root they become.
        #[serde(default)]
        root: RootKind,
    },
}

/// What the pipe of [`Request::Fill`] says if all of it was done.
pub(crate) const FILLED: &[u8] = b"+";

/// What the lower trees of a mount are.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Lower {
    /// First root's, then usr's.
    Host {
        /// How many are root's.
        root_layers: usize,
    },
    /// Root's; usr's are directories of that name in some of them.
    Image {
        /// Which, by their place.
        usr: Vec<usize>,
    },
}

/// A limit of getrlimit(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResourceLimit {
    /// The kernel's number of the resource.
    pub resource: u32,
    /// The largest number is none.
    pub soft: u64,
    /// Likewise.
    pub hard: u64,
}

/// The user and groups that a program runs as, inside.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramIds {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

/// What is common to the first program and to an exec.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Program {
    pub argv: Vec<String>,
    /// `NAME=VALUE` each.
    pub env: Vec<String>,
    /// None is `/`.
    pub workdir: Option<String>,
    /// No no_new_privs.
    pub allow_setuid: bool,
    /// Those of root.
    pub capabilities: CapabilityBits,
    /// The system calls that it may make.
    #[serde(default)]
    pub filter: FilterKind,
    /// None is the sandbox's root.
    pub ids: Option<ProgramIds>,
    /// Limits of resources beside those that the launcher has.
    #[serde(default)]
    pub limits: Vec<ResourceLimit>,
    /// It is exec'd, and killed before its first instruction. Not of an exec.
    #[serde(default, rename = "look")]
    pub exec_only: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// Done.
    Ready,
    /// Exec'd, with (pidfd).
    Process {
        /// Host pid.
        pid: u32,
    },
    /// A session's kip-init has been exec'd, with (pidfd).
    Session,
    /// Not done, and nothing is left of it.
    Failed(Failure),
}

/// The end of an exec, on the events socket.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Ended {
    pub id: u64,
    /// As wait4(2) has it.
    pub status: i32,
}

/// A step of the launcher that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Which.
    pub step: Step,
    /// Why, an errno.
    pub errno: i32,
    /// What the kernel said beyond the errno; may be empty.
    pub detail: String,
}

/// The launcher's steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Step {
    /// The request could not be understood.
    Request,
    /// The launcher's own mount namespace.
    Template,
    /// A new process.
    Clone,
    /// Entering the cgroups.
    Cgroup,
    /// setsid(2).
    Session,
    /// Entering the net, uts, ipc, pid or mount namespace.
    Namespaces,
    /// Attaching `/`.
    Root,
    /// Attaching `/usr`.
    Usr,
    /// Attaching a volume.
    Volume,
    /// Mounting `/proc`.
    Proc,
    /// Masking a path of `/proc`.
    Mask,
    /// pivot_root(2).
    Pivot,
    /// `/dev/null`, or the places of stdin, stdout, stderr and the status pipe.
    Stdio,
    /// Entering the user namespace.
    UserNamespace,
    /// Taking ids 0.
    Ids,
    /// setrlimit(2).
    Limits,
    /// Dropping capabilities.
    Capabilities,
    /// no_new_privs.
    NoNewPrivs,
    /// The system call filter.
    Seccomp,
    /// The working directory.
    WorkDir,
    /// execve(2).
    Exec,
    /// execveat(2) of the restorer.
    Restorer,
    /// Creating a user namespace and its mapping.
    NewUser,
    /// Creating uts and ipc namespaces.
    NewUtsIpc,
    /// Attaching the layers of an overlay.
    Layers,
    /// Mounting an overlay.
    Overlay,
    /// Making other mounts of a sandbox's filesystems.
    Copy,
    /// Filling a file system in memory.
    Fill,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Step::Request => "understand the request",
            Step::Template => "set up the launcher's mount namespace",
            Step::Clone => "make a process",
            Step::Cgroup => "enter the cgroups",
            Step::Session => "start a session",
            Step::Namespaces => "enter the namespaces",
            Step::Root => "attach the root filesystem",
            Step::Usr => "attach /usr (is it a directory in the sandbox?)",
            Step::Volume => "attach a volume",
            Step::Proc => "mount /proc (is it a directory in the sandbox?)",
            Step::Mask => "mask a path of /proc",
            Step::Pivot => "change to the root filesystem",
            Step::Stdio => "open stdin, stdout and stderr (is /dev/null still the null device?)",
            Step::UserNamespace => "enter the user namespace",
            Step::Ids => "take the ids of the sandbox's root",
            Step::Limits => "set the limits of its processes (a hard limit cannot be above the daemon's own)",
            Step::Capabilities => "drop capabilities",
            Step::NoNewPrivs => "set no_new_privs",
            Step::Seccomp => "install the system call filter",
            Step::WorkDir => "change to the working directory",
            Step::Exec => "execute the program",
            Step::Restorer => "execute the restorer",
            Step::NewUser => "make a user namespace",
            Step::NewUtsIpc => "make uts and ipc namespaces",
            Step::Layers => "attach the layers of the root filesystem",
            Step::Overlay => "mount the overlay",
            Step::Fill => "fill a file system in memory",
            Step::Copy => "make other mounts of a sandbox's filesystems",
        })
    }
}

impl Failure {
    pub(crate) fn new(step: Step, error: impl Into<std::io::Error>) -> Failure {
        let error = error.into();
        match error.raw_os_error() {
            Some(errno) => Failure { step, errno, detail: String::new() },
            None => Failure { step, errno: rustix::io::Errno::IO.raw_os_error(), detail: error.to_string() },
        }
    }

    /// For `map_err`.
    pub(crate) fn at<E: Into<std::io::Error>>(step: Step) -> impl FnOnce(E) -> Failure {
        move |e| Failure::new(step, e)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "could not {}: {}", self.step, std::io::Error::from_raw_os_error(self.errno))?;
        if !self.detail.is_empty() {
            write!(f, " ({})", self.detail)?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}
