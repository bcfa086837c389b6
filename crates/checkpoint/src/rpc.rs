//! CRIU's RPC, as far as Kip speaks it: messages on a SEQPACKET socket to a `criu swrk` helper.
//!
//! Field numbers are those of CRIU's RPC interface (criu.org/RPC, version 4.2).

use prost::Message;

/// Kinds of requests and answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum CriuCall {
    /// None.
    Empty = 0,
    /// Take a snapshot.
    Dump = 1,
    /// Bring a snapshot back.
    Restore = 2,
    /// A stage was reached; the helper waits for the answer.
    Notify = 6,
    /// Ask for the version.
    Version = 10,
}

/// A descriptor of the helper's that restored processes take over.
#[derive(Clone, PartialEq, Message)]
pub struct InheritFd {
    /// What it stands for, for example `socket:[123]`.
    #[prost(string, required, tag = "1")]
    pub key: String,
    /// Its number in the helper.
    #[prost(int32, required, tag = "2")]
    pub fd: i32,
}

/// Options of a dump or restore.
#[derive(Clone, PartialEq, Message)]
pub struct Opts {
    /// Unused, -1.
    #[prost(int32, required, tag = "1")]
    pub images_dir_fd: i32,
    /// Where the images are.
    #[prost(string, optional, tag = "68")]
    pub images_dir: Option<String>,
    /// The tree's root to dump.
    #[prost(int32, optional, tag = "2")]
    pub pid: Option<i32>,
    /// Accept established TCP connections.
    #[prost(bool, optional, tag = "5")]
    pub tcp_established: Option<bool>,
    /// Accept file locks.
    #[prost(bool, optional, tag = "8")]
    pub file_locks: Option<bool>,
    /// 0 to 4.
    #[prost(int32, optional, tag = "9")]
    pub log_level: Option<i32>,
    /// Name of the log in the images' directory.
    #[prost(string, optional, tag = "10")]
    pub log_file: Option<String>,
    /// Ask us at every stage.
    #[prost(bool, optional, tag = "12")]
    pub notify_scripts: Option<bool>,
    /// The restored tree's root directory, a mount point.
    #[prost(string, optional, tag = "13")]
    pub root: Option<String>,
    /// Make names for deleted files that are hard-linked elsewhere.
    #[prost(bool, optional, tag = "18")]
    pub link_remap: Option<bool>,
    /// Descriptors to inherit.
    #[prost(message, repeated, tag = "27")]
    pub inherit_fd: Vec<InheritFd>,
    /// 0: leave cgroups alone.
    #[prost(int32, optional, tag = "34")]
    pub manage_cgroups_mode: Option<i32>,
    /// Largest deleted file that is put into the images, bytes.
    #[prost(uint32, optional, tag = "35")]
    pub ghost_limit: Option<u32>,
    /// Mounts that come from outside.
    #[prost(string, repeated, tag = "37")]
    pub external: Vec<String>,
    /// Seconds after which a freeze is given up.
    #[prost(uint32, optional, tag = "45")]
    pub timeout: Option<u32>,
    /// Connections still in handshake are left to the kernel.
    #[prost(bool, optional, tag = "46")]
    pub tcp_skip_in_flight: Option<bool>,
    /// 3: the network is not locked.
    #[prost(int32, optional, tag = "64")]
    pub network_lock: Option<i32>,
    /// Do not compare modes of files with those at dump.
    #[prost(bool, optional, tag = "66")]
    pub skip_file_rwx_check: Option<bool>,
}

/// A request.
#[derive(Clone, PartialEq, Message)]
pub struct CriuRequest {
    /// What is asked.
    #[prost(enumeration = "CriuCall", required, tag = "1")]
    pub kind: i32,
    /// With which options.
    #[prost(message, optional, tag = "2")]
    pub opts: Option<Opts>,
    /// Answer to a notification.
    #[prost(bool, optional, tag = "3")]
    pub notify_success: Option<bool>,
}

/// The restored tree.
#[derive(Clone, PartialEq, Message)]
pub struct Restored {
    /// Host pid of its root.
    #[prost(int32, required, tag = "1")]
    pub pid: i32,
}

/// A stage.
#[derive(Clone, PartialEq, Message)]
pub struct Notify {
    /// Its name, for example `post-dump`.
    #[prost(string, optional, tag = "1")]
    pub script: Option<String>,
    /// Host pid of the tree's root, at some stages.
    #[prost(int32, optional, tag = "2")]
    pub pid: Option<i32>,
}

/// Version of CRIU.
#[derive(Clone, PartialEq, Message)]
pub struct RpcVersion {
    /// Major.
    #[prost(int32, required, tag = "1")]
    pub major: i32,
    /// Minor.
    #[prost(int32, required, tag = "2")]
    pub minor: i32,
}

/// An answer.
#[derive(Clone, PartialEq, Message)]
pub struct Response {
    /// To what.
    #[prost(enumeration = "CriuCall", required, tag = "1")]
    pub kind: i32,
    /// Done or not.
    #[prost(bool, required, tag = "2")]
    pub success: bool,
    /// Of a restore.
    #[prost(message, optional, tag = "4")]
    pub restore: Option<Restored>,
    /// Of a stage.
    #[prost(message, optional, tag = "5")]
    pub notify: Option<Notify>,
    /// An errno.
    #[prost(int32, optional, tag = "7")]
    pub cr_errno: Option<i32>,
    /// First error message of the log.
    #[prost(string, optional, tag = "9")]
    pub cr_errmsg: Option<String>,
    /// Of a version request.
    #[prost(message, optional, tag = "10")]
    pub version: Option<RpcVersion>,
}
