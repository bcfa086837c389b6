//! Messages of the runtime socket: protocol buffers, as docs/runtime.md has them.
//!
//! Numbers of fields never change and are never given again. What a reader does not know it skips;
//! a call that the daemon does not know is answered with [`FailureCode::UnknownCall`].

use prost::{Enumeration, Message, Oneof};

// So that the SDK, which has this file by its path, finds it, too.
#[path = "wire/spawn.rs"]
mod spawn;

pub use spawn::{
    AwaitCall, EvictCall, ExitedCall, SpawnCall, StartedCall, WireEndKind, WireMoment, WireSpawnEnd, WireSpawned,
    WireVariable,
};

/// The version of the protocol.
pub const VERSION: u32 = 1;
/// Bytes before each message: its length, little-endian.
pub const HEAD: usize = 4;
/// Longest message of a client, bytes. A frame of a client waits whole in the socket until it is
/// answered; with the usual send buffer it fits.
pub const MOST_CALL_BYTES: usize = 64 << 10;
/// Longest message of the daemon, bytes.
pub const MOST_ANSWER_BYTES: usize = 2 << 20;
/// What an answer with changes has beside them at most, bytes: tags, lengths, numbers.
pub const BESIDE_CHANGES: usize = 64;
/// Most nodes in one answer to [`ListCall`].
pub const MOST_LISTED: usize = 1000;

/// What a client says.
#[derive(Clone, PartialEq, Message)]
pub struct RuntimeCall {
    /// The client's number of this call, which its answers carry; not 0.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// The call; none for one that this version does not know.
    #[prost(oneof = "CallKind", tags = "2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21")]
    pub kind: Option<CallKind>,
}

/// Which call.
#[derive(Clone, PartialEq, Oneof)]
#[allow(missing_docs, reason = "the message of each says it")]
pub enum CallKind {
    #[prost(message, tag = "2")]
    Hello(HelloCall),
    #[prost(message, tag = "3")]
    Whoami(WhoamiCall),
    #[prost(message, tag = "4")]
    Stat(StatCall),
    #[prost(message, tag = "5")]
    List(ListCall),
    #[prost(message, tag = "6")]
    Get(GetCall),
    #[prost(message, tag = "7")]
    Put(PutCall),
    #[prost(message, tag = "8")]
    Mkdir(MkdirCall),
    #[prost(message, tag = "9")]
    Rm(RmCall),
    #[prost(message, tag = "10")]
    Mv(MvCall),
    #[prost(message, tag = "11")]
    Watch(WatchCall),
    #[prost(message, tag = "12")]
    Unwatch(UnwatchCall),
    #[prost(message, tag = "13")]
    Grant(GrantCall),
    #[prost(message, tag = "14")]
    Keep(KeepCall),
    #[prost(message, tag = "15")]
    Revoke(RevokeCall),
    #[prost(message, tag = "16")]
    Leases(LeasesCall),
    #[prost(message, tag = "17")]
    Spawn(SpawnCall),
    #[prost(message, tag = "18")]
    Await(AwaitCall),
    #[prost(message, tag = "19")]
    Started(StartedCall),
    #[prost(message, tag = "20")]
    Exited(ExitedCall),
    #[prost(message, tag = "21")]
    Evict(EvictCall),
}

/// The first call of a connection. Answered with [`RuntimeWelcome`].
#[derive(Clone, PartialEq, Message)]
pub struct HelloCall {
    /// The version that the client speaks.
    #[prost(uint32, tag = "1")]
    pub version: u32,
}

/// Which proc the client is in. Answered with [`RuntimeIdentity`].
#[derive(Clone, PartialEq, Message)]
pub struct WhoamiCall {}

/// A node without its contents. Answered with [`WireNode`].
#[derive(Clone, PartialEq, Message)]
pub struct StatCall {
    /// Where it is.
    #[prost(string, tag = "1")]
    pub path: String,
}

/// The nodes of a directory, by their names. Answered with [`WireNodes`].
#[derive(Clone, PartialEq, Message)]
pub struct ListCall {
    /// The directory.
    #[prost(string, tag = "1")]
    pub path: String,
    /// Only nodes whose names come after this one; all of them where it is empty.
    #[prost(string, tag = "2")]
    pub after: String,
}

/// A file with its contents. Answered with [`WireFile`].
#[derive(Clone, PartialEq, Message)]
pub struct GetCall {
    /// Where it is.
    #[prost(string, tag = "1")]
    pub path: String,
}

/// A condition of a write: the node at the path has been there since that revision.
#[derive(Clone, PartialEq, Message)]
pub struct WireFence {
    /// The node.
    #[prost(string, tag = "1")]
    pub path: String,
    /// Its `created`.
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
}

/// Makes a file, or gives it other contents. Answered with [`WireNode`].
#[derive(Clone, PartialEq, Message)]
pub struct PutCall {
    /// Where it is.
    #[prost(string, tag = "1")]
    pub path: String,
    /// Its contents, unless they are in a descriptor.
    #[prost(bytes = "vec", tag = "2")]
    pub contents: Vec<u8>,
    /// The contents are those of a regular file whose descriptor comes with the first byte of the
    /// frame (SCM_RIGHTS), from its beginning.
    #[prost(bool, tag = "3")]
    pub in_descriptor: bool,
    /// The version that it must have.
    #[prost(uint64, optional, tag = "4")]
    pub version: Option<u64>,
    /// There must be nothing at the path.
    #[prost(bool, tag = "5")]
    pub new: bool,
    /// The lease with which it goes.
    #[prost(uint64, optional, tag = "6")]
    pub lease: Option<u64>,
    /// What else must be so.
    #[prost(message, optional, tag = "7")]
    pub fence: Option<WireFence>,
}

/// Makes a directory. Answered with [`WireNode`].
#[derive(Clone, PartialEq, Message)]
pub struct MkdirCall {
    /// Where.
    #[prost(string, tag = "1")]
    pub path: String,
    /// What must be so.
    #[prost(message, optional, tag = "2")]
    pub fence: Option<WireFence>,
}

/// Removes a file or an empty directory. Answered with [`WireDone`].
#[derive(Clone, PartialEq, Message)]
pub struct RmCall {
    /// Which.
    #[prost(string, tag = "1")]
    pub path: String,
    /// The version that it must have.
    #[prost(uint64, optional, tag = "2")]
    pub version: Option<u64>,
    /// What else must be so.
    #[prost(message, optional, tag = "3")]
    pub fence: Option<WireFence>,
}

/// Moves a file, or a directory with all that is in it. Answered with [`WireNode`].
#[derive(Clone, PartialEq, Message)]
pub struct MvCall {
    /// Where it is.
    #[prost(string, tag = "1")]
    pub from: String,
    /// Where it will be.
    #[prost(string, tag = "2")]
    pub to: String,
    /// A file may take the place of a file that has no lease.
    #[prost(bool, tag = "3")]
    pub replace: bool,
    /// What must be so.
    #[prost(message, optional, tag = "4")]
    pub fence: Option<WireFence>,
}

/// Changes as they come. Answered with [`WireChanges`] again and again, the first of which has no
/// changes; an answer that is a failure is the last.
#[derive(Clone, PartialEq, Message)]
pub struct WatchCall {
    /// The node, which need not be there.
    #[prost(string, tag = "1")]
    pub path: String,
    /// Nothing below it.
    #[prost(bool, tag = "2")]
    pub only: bool,
    /// Changes after this revision; without it those from now on.
    #[prost(uint64, optional, tag = "3")]
    pub from: Option<u64>,
}

/// Ends a watch of this connection, if it is there. Answered with [`WireDone`], after which nothing
/// of the watch comes.
#[derive(Clone, PartialEq, Message)]
pub struct UnwatchCall {
    /// The number of the call that began it.
    #[prost(uint64, tag = "1")]
    pub watch: u64,
}

/// Makes a lease, which ends with the proc at the latest. Answered with [`WireLease`].
#[derive(Clone, PartialEq, Message)]
pub struct GrantCall {
    /// The time that each keep-alive gives it, milliseconds.
    #[prost(uint64, tag = "1")]
    pub ttl_ms: u64,
    /// The daemon keeps it alive while the program runs, too.
    #[prost(bool, tag = "2")]
    pub with_proc: bool,
}

/// Gives a lease its whole time again. Answered with [`WireLease`].
#[derive(Clone, PartialEq, Message)]
pub struct KeepCall {
    /// Which.
    #[prost(uint64, tag = "1")]
    pub lease: u64,
}

/// Ends a lease, and its files with it. Answered with [`WireDone`].
#[derive(Clone, PartialEq, Message)]
pub struct RevokeCall {
    /// Which.
    #[prost(uint64, tag = "1")]
    pub lease: u64,
}

/// The realm's leases. Answered with [`WireLeases`].
#[derive(Clone, PartialEq, Message)]
pub struct LeasesCall {}

/// What the daemon says.
#[derive(Clone, PartialEq, Message)]
pub struct RuntimeAnswer {
    /// The number of the call; 0 for what is wrong with the connection itself.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// The answer.
    #[prost(oneof = "AnswerKind", tags = "2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12")]
    pub kind: Option<AnswerKind>,
}

/// Which answer.
#[derive(Clone, PartialEq, Oneof)]
#[allow(missing_docs, reason = "the message of each says it")]
pub enum AnswerKind {
    #[prost(message, tag = "2")]
    Failure(RuntimeFailure),
    #[prost(message, tag = "3")]
    Welcome(RuntimeWelcome),
    #[prost(message, tag = "4")]
    Identity(RuntimeIdentity),
    #[prost(message, tag = "5")]
    Node(WireNode),
    #[prost(message, tag = "6")]
    Nodes(WireNodes),
    #[prost(message, tag = "7")]
    File(WireFile),
    #[prost(message, tag = "8")]
    Done(WireDone),
    #[prost(message, tag = "9")]
    Changes(WireChanges),
    #[prost(message, tag = "10")]
    Lease(WireLease),
    #[prost(message, tag = "11")]
    Leases(WireLeases),
    #[prost(message, tag = "12")]
    Spawned(WireSpawned),
}

/// What is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum FailureCode {
    /// Something failed that should not have.
    Failed = 0,
    /// The bytes are no message; the connection ends.
    BadFrame = 1,
    /// A message, a file or an answer is too long.
    TooLarge = 2,
    /// The daemon does not speak this version; the connection ends.
    Version = 3,
    /// The daemon does not know the call.
    UnknownCall = 4,
    /// A path, a name or a number is not valid.
    Invalid = 5,
    /// There is no such node, lease or spawned proc.
    NotFound = 6,
    /// Something is at the path.
    Exists = 7,
    /// A condition does not hold, or the node is not of that kind; nothing was changed.
    Condition = 8,
    /// The machine lacks something, now.
    Unavailable = 9,
    /// The daemon was ended while it did what was asked: that may have happened, or not.
    OutcomeUnknown = 10,
    /// Too many connections of a proc, or watches of a connection.
    TooMany = 11,
    /// The owner of the proc has not given it that access.
    Denied = 12,
}

/// An answer that says what is wrong.
#[derive(Clone, PartialEq, Message)]
pub struct RuntimeFailure {
    /// Of which kind.
    #[prost(enumeration = "FailureCode", tag = "1")]
    pub code: i32,
    /// One line.
    #[prost(string, tag = "2")]
    pub message: String,
}

/// The daemon speaks the version.
#[derive(Clone, PartialEq, Message)]
pub struct RuntimeWelcome {
    /// The version that is spoken.
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// Longest message of a client, bytes.
    #[prost(uint32, tag = "2")]
    pub most_call_bytes: u32,
    /// Longest message of the daemon, bytes.
    #[prost(uint32, tag = "3")]
    pub most_answer_bytes: u32,
}

/// The identity of a proc, the answer to `whoami`.
#[derive(Clone, PartialEq, Message)]
pub struct RuntimeIdentity {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its realm.
    #[prost(string, tag = "2")]
    pub realm: String,
    /// The newest snapshot that it was woken from; 0 for none.
    #[prost(uint64, tag = "3")]
    pub generation: u64,
    /// The count in /run/kip/generation-id, which is higher in a clone; 0 where there is none.
    #[prost(uint64, tag = "4")]
    pub clone_count: u64,
}

/// A node of the name tree, without its contents.
#[derive(Clone, PartialEq, Message)]
pub struct WireNode {
    /// Where it is.
    #[prost(string, tag = "1")]
    pub path: String,
    /// A directory; else a file.
    #[prost(bool, tag = "2")]
    pub directory: bool,
    /// Bytes of its contents.
    #[prost(uint64, tag = "3")]
    pub size: u64,
    /// The revision at which it was changed last.
    #[prost(uint64, tag = "4")]
    pub version: u64,
    /// The revision at which its path came to be.
    #[prost(uint64, tag = "5")]
    pub created: u64,
    /// The lease with which it goes.
    #[prost(uint64, optional, tag = "6")]
    pub lease: Option<u64>,
}

/// Nodes of a directory.
#[derive(Clone, PartialEq, Message)]
pub struct WireNodes {
    /// In the order of their names.
    #[prost(message, repeated, tag = "1")]
    pub nodes: Vec<WireNode>,
    /// There are more, after the last of these.
    #[prost(bool, tag = "2")]
    pub more: bool,
}

/// A file.
#[derive(Clone, PartialEq, Message)]
pub struct WireFile {
    /// The node.
    #[prost(message, optional, tag = "1")]
    pub node: Option<WireNode>,
    /// Its contents.
    #[prost(bytes = "vec", tag = "2")]
    pub contents: Vec<u8>,
}

/// It is done.
#[derive(Clone, PartialEq, Message)]
pub struct WireDone {}

/// What happened to a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum WireChangeKind {
    /// It was made.
    Created = 0,
    /// It has other contents, or another lease.
    Written = 1,
    /// It is gone.
    Removed = 2,
    /// It is elsewhere.
    Moved = 3,
}

/// A change of a node.
#[derive(Clone, PartialEq, Message)]
pub struct WireChange {
    /// What happened.
    #[prost(enumeration = "WireChangeKind", tag = "1")]
    pub kind: i32,
    /// Where the node is; where it was, if it is gone.
    #[prost(string, tag = "2")]
    pub path: String,
    /// Where it was, if it was moved.
    #[prost(string, optional, tag = "3")]
    pub from: Option<String>,
    /// The node, unless it is gone.
    #[prost(message, optional, tag = "4")]
    pub node: Option<WireNode>,
}

/// All changes of one revision; in several parts where one answer is too short for them.
#[derive(Clone, PartialEq, Message)]
pub struct WireChanges {
    /// The revision of the tree.
    #[prost(uint64, tag = "1")]
    pub revision: u64,
    /// What happened, all at once.
    #[prost(message, repeated, tag = "2")]
    pub changes: Vec<WireChange>,
    /// Which part of the revision's changes these are, from 0: with 0 they begin, maybe anew.
    #[prost(uint32, tag = "3")]
    pub part: u32,
    /// Another part comes next.
    #[prost(bool, tag = "4")]
    pub more: bool,
}

impl WireChanges {
    /// The same as parts of which none is longer than `most` bytes, but for one change that is.
    pub fn parts(self, most: usize) -> Vec<WireChanges> {
        let (revision, mut parts, mut bytes) = (self.revision, vec![Vec::new()], 0);
        for change in self.changes {
            // As a field of a message: its tag and its length.
            let one = change.encoded_len() + 1 + 5;
            if bytes + one > most && bytes > 0 {
                parts.push(Vec::new());
                bytes = 0;
            }
            bytes += one;
            parts.last_mut().expect("it has one at least").push(change);
        }
        let last = parts.len() - 1;
        let part = |(at, changes)| WireChanges { revision, changes, part: at as u32, more: at < last };
        parts.into_iter().enumerate().map(part).collect()
    }

    /// Takes up the next part of changes that come in parts; gives all of them back when it was
    /// their last.
    pub fn joined(gathered: &mut Option<WireChanges>, next: WireChanges) -> Option<WireChanges> {
        let more = next.more;
        let mut all = match gathered.take().filter(|_| next.part > 0) {
            Some(mut all) => {
                all.changes.extend(next.changes);
                all
            }
            None => next,
        };
        all.more = more;
        if !more {
            return Some(all);
        }
        *gathered = Some(all);
        None
    }
}

/// A lease.
#[derive(Clone, PartialEq, Message)]
pub struct WireLease {
    /// Its number.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// The time that each keep-alive gives it, milliseconds.
    #[prost(uint64, tag = "2")]
    pub ttl_ms: u64,
    /// The time that is left, milliseconds.
    #[prost(uint64, tag = "3")]
    pub left_ms: u64,
}

/// Leases.
#[derive(Clone, PartialEq, Message)]
pub struct WireLeases {
    /// By their numbers.
    #[prost(message, repeated, tag = "1")]
    pub leases: Vec<WireLease>,
}

impl CallKind {
    /// Whether it changes something, so that it may not be done a second time unasked.
    pub fn changes(&self) -> bool {
        match self {
            CallKind::Put(_)
            | CallKind::Mkdir(_)
            | CallKind::Rm(_)
            | CallKind::Mv(_)
            | CallKind::Grant(_)
            | CallKind::Revoke(_)
            | CallKind::Spawn(_) => true,
            CallKind::Hello(_)
            | CallKind::Whoami(_)
            | CallKind::Stat(_)
            | CallKind::List(_)
            | CallKind::Get(_)
            | CallKind::Watch(_)
            | CallKind::Unwatch(_)
            | CallKind::Keep(_)
            | CallKind::Leases(_)
            | CallKind::Await(_)
            | CallKind::Started(_)
            | CallKind::Exited(_)
            | CallKind::Evict(_) => false,
        }
    }
}

/// A message as a frame.
pub fn framed(message: &impl Message) -> Vec<u8> {
    let length = message.encoded_len();
    let mut frame = Vec::with_capacity(HEAD + length);
    frame.extend((length as u32).to_le_bytes());
    message.encode(&mut frame).expect("a vector grows");
    frame
}

impl RuntimeFailure {
    /// Of that kind, in one line.
    pub fn new(code: FailureCode, message: impl Into<String>) -> RuntimeFailure {
        RuntimeFailure { code: code.into(), message: message.into() }
    }
}
