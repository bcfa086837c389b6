//! `GET /v1/procs/NAME/details`: a proc from within, whether it runs or sleeps.

use crate::lifecycle::{Generation, Tier};
use crate::name::ProcName;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A view of a proc from within.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Detail {
    /// Open files, and its own files that differ from its base.
    Files,
    /// Command lines and environments: not for a token that allows to look only.
    Env,
    /// Sockets.
    Sockets,
    /// Maps of memory.
    Maps,
}

/// The query of `GET /v1/procs/NAME/details`; answered with the view that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DetailsRequest {
    /// Which view: files, env, sockets or maps.
    pub of: Detail,
}

/// Answer of `GET /v1/procs/NAME/details`: the view that was asked for.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
#[serde(untagged)]
pub enum Details {
    /// For `of=files`.
    Files(FilesView),
    /// For `of=env`.
    Env(EnvView),
    /// For `of=sockets`.
    Sockets(SocketsView),
    /// For `of=maps`.
    Maps(MapsView),
}

/// The proc that was inspected, as it was then.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Inspected {
    /// Its name.
    pub name: ProcName,
    /// The tier that it was and is in.
    pub tier: Tier,
    /// Its newest generation. For a parked or archived proc, the generation the data was read from.
    pub generation: Generation,
}

/// `kip inspect --files`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct FilesView {
    /// The proc that was inspected.
    #[serde(flatten)]
    pub inspected: Inspected,
    /// By number inside.
    pub processes: Vec<ProcessFiles>,
    /// Its own files.
    pub own: OwnFilesView,
}

/// What a process has open.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ProcessFiles {
    /// Its process id inside.
    pub pid: u32,
    /// Its name, at most 15 bytes.
    pub name: String,
    /// By descriptor.
    pub files: Vec<OpenFileView>,
}

/// A descriptor.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct OpenFileView {
    /// Its number.
    pub fd: i32,
    /// `file`, `directory`, `device`, `fifo`, `memory`, `pipe`, `tcp`, `udp`, `unix`, `netlink`,
    /// `socket`, `epoll`, `eventfd`, `timerfd`, `signalfd`, `inotify`, or the kernel's own word.
    pub kind: String,
    /// The path as the program sees it; of a socket its address; else what names it.
    pub what: String,
    /// Of a socket that is connected: the other side's address.
    pub peer: Option<String>,
    /// `r`, `w`, `rw`, or `-` for one that is neither read nor written.
    #[schemars(extend("enum" = ["r", "w", "rw", "-"]))]
    pub access: String,
    /// Other flags of open(2), lower case without `O_`; none are told of epoll sets.
    pub flags: Vec<String>,
    /// Of files: where the next read or write begins.
    pub offset: Option<u64>,
    /// It has no name any more.
    pub deleted: bool,
}

/// Files of a proc that are not those of its base.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct OwnFilesView {
    /// The first files by path, at most 200.
    pub entries: Vec<OwnFileView>,
    /// How many there are in all, deletions included and directories not.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// How many of them are deletions.
    pub deleted: u64,
    /// False: the walk ended at 100,000 files, and the numbers cover only those.
    pub complete: bool,
}

impl OwnFilesView {
    /// Entries in one answer.
    pub const MOST_LISTED: usize = 200;
    /// Entries that are looked at, directories included.
    pub const MOST_WALKED: usize = 100_000;
}

/// What a file is that is not that of the base.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize, strum::Display, strum::IntoStaticStr,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum OwnFileKind {
    /// A regular file.
    File,
    /// A symbolic link.
    Link,
    /// A device.
    Device,
    /// A FIFO.
    Fifo,
    /// A socket.
    Socket,
    /// The base has the file, the proc does not.
    Deleted,
    /// A directory of which nothing of the base is seen.
    Replaced,
    /// A word of a newer Kip.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// A file of a proc that is not that of its base.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct OwnFileView {
    /// The path as the program sees it.
    pub path: String,
    /// What the file is.
    pub kind: OwnFileKind,
    /// Length of a file.
    pub bytes: u64,
}

/// `kip inspect --env`. May hold secrets.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct EnvView {
    /// The proc that was inspected.
    #[serde(flatten)]
    pub inspected: Inspected,
    /// By number inside.
    pub processes: Vec<ProcessEnv>,
}

/// What a process was started as.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ProcessEnv {
    /// Its process id inside.
    pub pid: u32,
    /// Its parent's, 0 for none inside.
    pub parent: u32,
    /// Its name, at most 15 bytes.
    pub name: String,
    /// It has ended, and its parent has not asked yet: the rest is empty.
    pub ended: bool,
    /// Path of its program as it sees it.
    pub program: String,
    /// Its arguments, or the one line that it shows instead of them. What is not UTF-8 is replaced,
    /// here and below.
    pub command: Vec<String>,
    /// Its working directory as it sees it.
    pub directory: String,
    /// Its effective user, as numbered inside.
    pub uid: u32,
    /// Its effective group.
    pub gid: u32,
    /// `NAME=VALUE` as it was given them, in order; a program may have written other text there.
    pub env: Vec<String>,
}

/// `kip inspect --sockets`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct SocketsView {
    /// The proc that was inspected.
    #[serde(flatten)]
    pub inspected: Inspected,
    /// Those that some process has open: TCP, UDP, unix, others.
    pub sockets: Vec<OpenSocketView>,
}

/// The protocol of an open socket, or its family.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize, strum::Display, strum::IntoStaticStr,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum SocketFamily {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// unix(7).
    Unix,
    /// netlink(7).
    Netlink,
    /// Any other family.
    Socket,
    /// A word of a newer Kip.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// A socket.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct OpenSocketView {
    /// Protocol of the socket, or its family.
    pub proto: SocketFamily,
    /// `listen`, `established`, .., as in `kip why`; of unix sockets `stream`, `datagram` or
    /// `packet` before it.
    pub state: String,
    /// Its own address; of unix sockets the path, `@NAME` or nothing.
    pub local: String,
    /// The other side's.
    pub peer: Option<String>,
    /// Bytes to be read; of a listener, connections to be accepted.
    pub unread: Option<u64>,
    /// Bytes not yet sent or acknowledged.
    pub unsent: Option<u64>,
    /// Of a parked or archived proc: Kip holds it, so that it goes on to exist.
    pub held: Option<bool>,
    /// Where it is open.
    pub open: Vec<OpenAt>,
}

/// A place where something is open.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, JsonSchema, Serialize, Deserialize)]
pub struct OpenAt {
    /// Process id inside.
    pub pid: u32,
    /// The process's name.
    pub name: String,
    /// Descriptor.
    pub fd: i32,
}

/// `kip inspect --maps`.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct MapsView {
    /// The proc that was inspected.
    #[serde(flatten)]
    pub inspected: Inspected,
    /// By number inside.
    pub processes: Vec<ProcessMaps>,
}

/// The memory of a process.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ProcessMaps {
    /// Its process id inside.
    pub pid: u32,
    /// Its name, at most 15 bytes.
    pub name: String,
    /// By address.
    pub maps: Vec<MapView>,
}

/// A mapping. What its pages are adds up to its length.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct MapView {
    /// First address, hexadecimal.
    pub start: String,
    /// Behind the last one.
    pub end: String,
    /// `rwxp` as in proc_pid_maps(5), `s` for shared.
    #[schemars(extend("pattern" = "^[r-][w-][x-][ps]$"))]
    pub access: String,
    /// A path as the program sees it, `[heap]`, `[stack]`, `[vdso]` and the like, `[anonymous]`,
    /// `[shared]`.
    pub what: String,
    /// Where in the file it begins.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
    /// Where its pages are.
    #[serde(flatten)]
    pub pages: WhereView,
}

/// Where pages are, bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct WhereView {
    /// In memory.
    pub memory_bytes: u64,
    /// In the machine's swap.
    pub swapped_bytes: u64,
    /// In the proc's private swap file: taken out at hibernation.
    pub out_bytes: u64,
    /// In a generation on the local disk.
    pub snapshot_bytes: u64,
    /// In the object store only.
    pub store_bytes: u64,
    /// Nowhere: they are zeros.
    pub zero_bytes: u64,
    /// As the mapped file has them, or what is behind shared memory while a process has that open,
    /// or as the kernel names it.
    pub file_bytes: u64,
}
