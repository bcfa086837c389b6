//! Calls about the name tree, as the service has them, and its answers as messages.

use crate::wire::{
    AnswerKind, FailureCode, MOST_LISTED, RuntimeFailure, WireChange, WireChangeKind, WireChanges, WireDone, WireFence,
    WireFile, WireLease, WireLeases, WireNode, WireNodes,
};
use crate::wire::{CallKind, PutCall};
use kip_service::TreeService;
use kip_types::api::tree::{
    MakeTreeDirectoryRequest, RemoveTreeNodeRequest, RenameTreeNodeRequest, TreeChanges, WriteTreeFileRequest,
};
use kip_types::api::{Code, Refusal};
use kip_types::name::Realm;
use kip_types::tree::{
    MOST_FILE_BYTES, NodeKind, NodeStat, TreeChangeKind, TreeFence, TreeLease, TreeLeaseId, TreePath,
};
use prost::Message as _;
use rustix::fs::FileType;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;

/// Most bytes of nodes in one answer to a listing.
const MOST_LISTED_BYTES: usize = 1 << 20;

/// What the client hears of a refusal.
pub(crate) fn failure(refusal: &Refusal) -> RuntimeFailure {
    let code = match refusal.code {
        Code::Invalid => FailureCode::Invalid,
        Code::Unknown => FailureCode::NotFound,
        Code::Taken => FailureCode::Exists,
        Code::State => FailureCode::Condition,
        Code::TooLarge => FailureCode::TooLarge,
        Code::Exhausted => FailureCode::Unavailable,
        Code::Unauthorized | Code::Forbidden | Code::NoRoute | Code::CannotSleep | Code::Failed => FailureCode::Failed,
    };
    RuntimeFailure::new(code, refusal.message.clone())
}

pub(crate) fn invalid(error: impl ToString) -> RuntimeFailure {
    RuntimeFailure::new(FailureCode::Invalid, error.to_string())
}

pub(crate) fn path_of(text: &str) -> Result<TreePath, RuntimeFailure> {
    text.parse().map_err(invalid)
}

fn fence_of(fence: Option<WireFence>) -> Result<Option<TreeFence>, RuntimeFailure> {
    fence.map(|fence| Ok(TreeFence { path: path_of(&fence.path)?, epoch: fence.epoch })).transpose()
}

pub(crate) fn node(stat: NodeStat) -> WireNode {
    WireNode {
        path: stat.path.into(),
        directory: stat.kind == NodeKind::Directory,
        size: stat.size_bytes,
        version: stat.version,
        created: stat.created,
        lease: stat.lease.map(|lease| lease.0),
    }
}

pub(crate) fn lease(lease: &TreeLease) -> WireLease {
    WireLease { id: lease.id.0, ttl_ms: lease.ttl_ms, left_ms: lease.left_ms }
}

pub(crate) fn changes(changes: TreeChanges) -> WireChanges {
    let one = |change: kip_types::tree::TreeChange| WireChange {
        kind: match change.kind {
            TreeChangeKind::Created => WireChangeKind::Created,
            TreeChangeKind::Written => WireChangeKind::Written,
            TreeChangeKind::Removed => WireChangeKind::Removed,
            TreeChangeKind::Moved => WireChangeKind::Moved,
        }
        .into(),
        path: change.path.into(),
        from: change.from.map(Into::into),
        node: change.node.map(node),
    };
    let all = changes.changes.into_iter().map(one).collect();
    WireChanges { revision: changes.revision, changes: all, ..WireChanges::default() }
}

/// Answers a call that is about the tree alone.
pub(crate) async fn ask(
    tree: &dyn TreeService,
    realm: &Realm,
    call: CallKind,
    descriptor: Option<OwnedFd>,
) -> Result<AnswerKind, RuntimeFailure> {
    let refused = |refusal: Refusal| failure(&refusal);
    let realm = realm.clone();
    match call {
        CallKind::Stat(call) => {
            let stat = tree.stat(realm, path_of(&call.path)?).await.map_err(refused)?;
            Ok(AnswerKind::Node(node(stat)))
        }
        CallKind::List(call) => {
            let nodes = tree.list(realm, path_of(&call.path)?).await.map_err(refused)?;
            Ok(AnswerKind::Nodes(page(nodes, &call.after)))
        }
        CallKind::Get(call) => {
            let file = tree.read(realm, path_of(&call.path)?).await.map_err(refused)?;
            Ok(AnswerKind::File(WireFile { node: Some(node(file.node)), contents: file.contents }))
        }
        CallKind::Put(call) => {
            let (request, contents) = written(call, descriptor).await?;
            Ok(AnswerKind::Node(node(tree.write(realm, request, contents).await.map_err(refused)?)))
        }
        CallKind::Mkdir(call) => {
            let request = MakeTreeDirectoryRequest { path: path_of(&call.path)?, fence: fence_of(call.fence)? };
            Ok(AnswerKind::Node(node(tree.make_directory(realm, request).await.map_err(refused)?)))
        }
        CallKind::Rm(call) => {
            let (path, version, fence) = (path_of(&call.path)?, call.version, fence_of(call.fence)?);
            tree.remove(realm, RemoveTreeNodeRequest { path, version, fence }).await.map_err(refused)?;
            Ok(AnswerKind::Done(WireDone {}))
        }
        CallKind::Mv(call) => {
            let (from, to, fence) = (path_of(&call.from)?, path_of(&call.to)?, fence_of(call.fence)?);
            let request = RenameTreeNodeRequest { from, to, replace: call.replace, fence };
            Ok(AnswerKind::Node(node(tree.rename(realm, request).await.map_err(refused)?)))
        }
        CallKind::Keep(call) => {
            let kept = tree.keep_lease(realm, TreeLeaseId(call.lease)).await.map_err(refused)?;
            Ok(AnswerKind::Lease(lease(&kept)))
        }
        CallKind::Leases(_) => {
            let all = tree.leases(realm).await.map_err(refused)?;
            Ok(AnswerKind::Leases(WireLeases { leases: all.iter().map(lease).collect() }))
        }
        CallKind::Hello(_)
        | CallKind::Whoami(_)
        | CallKind::Watch(_)
        | CallKind::Unwatch(_)
        | CallKind::Grant(_)
        | CallKind::Revoke(_)
        | CallKind::Spawn(_)
        | CallKind::Await(_)
        | CallKind::Started(_)
        | CallKind::Exited(_)
        | CallKind::Evict(_) => unreachable!("the connection answers these"),
    }
}

/// As many nodes as go into one answer, from that name on.
fn page(nodes: Vec<NodeStat>, after: &str) -> WireNodes {
    let is_later = |stat: &NodeStat| stat.path.split().is_some_and(|(_, name)| name > after);
    // A file is the only node of its own listing.
    let later = nodes.into_iter().filter(|stat| after.is_empty() || is_later(stat)).map(node);
    let (mut page, mut bytes) = (WireNodes::default(), 0);
    for node in later {
        bytes += node.encoded_len();
        if page.nodes.len() == MOST_LISTED || bytes > MOST_LISTED_BYTES {
            page.more = true;
            break;
        }
        page.nodes.push(node);
    }
    page
}

async fn written(
    call: PutCall,
    descriptor: Option<OwnedFd>,
) -> Result<(WriteTreeFileRequest, Vec<u8>), RuntimeFailure> {
    let (path, fence) = (path_of(&call.path)?, fence_of(call.fence)?);
    let contents = match (call.in_descriptor, descriptor) {
        (false, _) => call.contents,
        (true, None) => return Err(invalid("no descriptor came with the contents of the file")),
        (true, Some(file)) => {
            let read = tokio::task::spawn_blocking(move || read_file(file)).await.expect("reading does not panic");
            read.map_err(|error| invalid(format!("the descriptor of the file's contents: {error}")))?
        }
    };
    let lease = call.lease.map(TreeLeaseId);
    Ok((WriteTreeFileRequest { path, version: call.version, new: call.new, lease, fence }, contents))
}

/// What is in a file of the client's, from its beginning; one byte too many if it is too long.
fn read_file(file: OwnedFd) -> io::Result<Vec<u8>> {
    let file = File::from(file);
    // To read anything else may take as long as the client wants.
    if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != FileType::RegularFile {
        return Err(io::Error::other("it is no regular file"));
    }
    let (mut contents, mut chunk) = (Vec::new(), vec![0; 64 << 10]);
    while contents.len() <= MOST_FILE_BYTES {
        match file.read_at(&mut chunk, contents.len() as u64)? {
            0 => break,
            count => contents.extend_from_slice(&chunk[..count]),
        }
    }
    Ok(contents)
}
