//! Files of procs to and from archives: `kip cp`.
//!
//! No proc is woken for it. One that is awake stays so meanwhile. One that is asleep or stopped
//! waits with its wake or start only as long as its files are written, or are mounted for this
//! alone; an archive for it is therefore whole on the disk before it is unpacked. Files that a
//! parked program has open are not replaced: its wake would find others.

use crate::worker::Worker;
use async_trait::async_trait;
use kip_criu_images::Images;
use kip_criu_images::inspect::{self, FileKind, ImageProcess, MappingKind};
use kip_engine::files;
use kip_engine::host::Proc;
use kip_files::FilesError;
use kip_files::pack::PackSource;
use kip_files::tree::{EntryName, RootTree};
use kip_files::unpack::{self, UnpackLimits, UnpackedEntries};
use kip_records::instance::IDS_PER_BLOCK;
use kip_service::{Feed, FileService};
use kip_supervisor::task::{FilesHeld, Handle, ProcStatus, Still, TaskCommand};
use kip_types::api::{Code, FilesWritten, ReadFilesRequest, Refusal, WriteFilesRequest};
use kip_types::chain;
use kip_types::{Generation, ProcName, State};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::path::Path;
use std::time::Duration;
use tokio::runtime::Handle as Runtime;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

/// A client that sends or takes nothing for so long is gone.
const STALLED: Duration = Duration::from_secs(60);
/// Bytes of a piece, and pieces that wait for the client.
const PIECE: usize = 256 << 10;
const PIECES: usize = 4;
/// What of an archive that is refused is still taken, so that the client reads why.
const DRAINED: u64 = 64 << 20;
/// Headers and padding that come with each entry, bytes.
const AROUND_ENTRY: u64 = 2048;

#[async_trait]
impl FileService for Worker {
    async fn read_files(&self, name: ProcName, request: ReadFilesRequest) -> Result<Feed<Vec<u8>>, Refusal> {
        let mut handle = self.handle(&name)?;
        absolute(&name, &request.path)?;
        handle.wait_until_stable().await;
        let (sender, feed) = mpsc::channel(PIECES);
        let (begun, begins) = oneshot::channel();
        let runtime = Runtime::current();
        let data = self.machine.data.clone();
        on_thread(&name, move || read(&handle, &request, begun, Pieces { runtime, sender, awake: None }, &data))?;
        begins.await.map_err(|_| died(&name))??;
        Ok(feed)
    }

    async fn write_files(
        &self,
        name: ProcName,
        request: WriteFilesRequest,
        archive: Feed<Vec<u8>>,
    ) -> Result<FilesWritten, Refusal> {
        let mut handle = self.handle(&name)?;
        absolute(&name, &request.path)?;
        handle.wait_until_stable().await;
        let (reply, done) = oneshot::channel();
        let (runtime, data) = (Runtime::current(), self.machine.data.clone());
        let archive = Received { runtime, feed: archive, piece: io::Cursor::default(), awake: None };
        on_thread(&name, move || drop(reply.send(write(&handle, &request, archive, &data))))?;
        let UnpackedEntries { bytes, entries } = done.await.map_err(|_| died(&name))??;
        Ok(FilesWritten { bytes, entries })
    }
}

fn died(name: &ProcName) -> Refusal {
    Refusal::new(Code::Failed, format!("the files of {name} were not copied; the daemon's log says why"))
}

/// Copying has threads of its own: it takes as long as the client does.
fn on_thread(name: &ProcName, work: impl FnOnce() + Send + 'static) -> Result<(), Refusal> {
    let spawned = std::thread::Builder::new().name("kip-files".to_owned()).spawn(work);
    spawned.map(drop).map_err(|e| Refusal::new(Code::Exhausted, format!("the files of {name} cannot be copied: {e}")))
}

fn absolute(name: &ProcName, path: &str) -> Result<(), Refusal> {
    match path {
        "" => Err(Refusal::new(Code::Invalid, format!("no path in {name} was given"))),
        path if path.contains('\0') => Err(Refusal::new(Code::Invalid, "a path has no NUL in it")),
        _ => Ok(()),
    }
}

/// The files of a proc, and what keeps them as they are.
struct Held {
    tree: RootTree,
    how: FilesHeld,
    _still: Still,
}

impl Held {
    fn take(handle: &Handle, runtime: &Runtime, change: bool) -> Result<Held, Refusal> {
        let (still, over) = Still::new();
        let how = runtime.block_on(handle.ask(|reply| TaskCommand::HoldFiles { change, over, reply }))?;
        let proc = &handle.proc;
        let tree = match &how {
            FilesHeld::Awake(_) => files::awake(proc),
            FilesHeld::Asleep(State::Parked { .. }) => files::parked(proc),
            FilesHeld::Asleep(_) => files::stopped(proc),
        };
        let tree = tree.map_err(|e| {
            Refusal::new(Code::Failed, format!("the files of {} cannot be copied: {}", proc.name, chain(&e)))
        })?;
        Ok(Held { tree, how, _still: still })
    }

    /// Whether what was read since was there all the time.
    fn is_whole(&self, handle: &Handle) -> bool {
        let state = handle.status.borrow().record.state.clone();
        let runs = matches!(state, State::Hot { .. } | State::Hibernated { .. });
        match &self.how {
            FilesHeld::Awake(_) => runs,
            FilesHeld::Asleep(before) => state == *before || runs || matches!(state, State::Waking { .. }),
        }
    }
}

/// Sends what is at a path.
fn read(
    handle: &Handle,
    request: &ReadFilesRequest,
    begun: oneshot::Sender<Result<(), Refusal>>,
    mut pieces: Pieces,
    data: &Path,
) {
    let (name, first) = (handle.proc.name.clone(), handle.proc.first_id());
    let path = Path::new(&request.path);
    let found = Held::take(handle, &pieces.runtime, false).and_then(|held| {
        let source = PackSource::find(&held.tree, path, request.follow).map_err(|e| refusal(&name, &e))?;
        Ok((held, source))
    });
    let (held, source) = match found {
        Ok(found) => found,
        Err(refusal) => return drop(begun.send(Err(refusal))),
    };
    if begun.send(Ok(())).is_err() {
        return;
    }
    let inside = |id: u32| id.checked_sub(first).filter(|id| *id < IDS_PER_BLOCK).unwrap_or(0);
    let (runtime, sender) = (pieces.runtime.clone(), pieces.sender.clone());
    let changed = || Refusal::new(Code::State, format!("{name} ended or left while its files were read: try again"));
    let whole = if matches!(held.how, FilesHeld::Awake(_)) {
        pieces.awake = Some(handle.status.clone());
        let mut out = BufWriter::with_capacity(PIECE, pieces);
        let packed = source.pack(&held.tree, &inside, &mut out).map_err(|e| refusal(&name, &e));
        let whole = packed.and_then(|()| match held.is_whole(handle) {
            true => out.flush().map_err(|e| refusal(&name, &FilesError::Sent(e))),
            false => Err(changed()),
        });
        // What is in the buffer must not look like the rest.
        drop(out.into_parts());
        drop((source, held));
        whole
    } else {
        // A wake or a start, which needs the mounts, does not wait for the client.
        let no_room = |e: io::Error| Refusal::new(Code::Exhausted, format!("{name}: the archive cannot be kept: {e}"));
        let kept = Kept::new(data).map_err(no_room).and_then(|kept| {
            let mut out = BufWriter::with_capacity(PIECE, kept);
            source.pack(&held.tree, &inside, &mut out).map_err(|e| refusal(&name, &e))?;
            let kept = out.into_inner().map_err(|e| no_room(e.into_error()))?;
            if held.is_whole(handle) { kept.begin().map_err(no_room) } else { Err(changed()) }
        });
        drop((source, held));
        kept.and_then(|mut kept| {
            let mut out = BufWriter::with_capacity(PIECE, pieces);
            let sent = io::copy(&mut kept, &mut out).and_then(|_| out.flush());
            sent.map_err(|e| refusal(&name, &FilesError::Sent(e)))
        })
    };
    if let Err(refusal) = whole {
        tracing::info!(proc = %name, path = request.path, error = refusal.message, "an archive of files breaks off");
        let _ = runtime.block_on(async { timeout(STALLED, sender.send(Err(refusal))).await });
    }
}

/// Unpacks what comes.
fn write(
    handle: &Handle,
    request: &WriteFilesRequest,
    mut archive: Received,
    data: &Path,
) -> Result<UnpackedEntries, Refusal> {
    let name = &handle.proc.name;
    let sleeps = matches!(handle.status.borrow().record.state, State::Parked { .. } | State::Stopped { .. });
    let written = match if sleeps { None } else { Some(Held::take(handle, &archive.runtime, true)?) } {
        Some(held) if matches!(held.how, FilesHeld::Awake(_)) => {
            archive.awake = Some(handle.status.clone());
            put(&held, handle, request, &mut archive)
        }
        // Its wake does not wait for the client.
        other => {
            drop(other);
            spool(&mut archive, data)
                .map_err(|e| Refusal::new(Code::Exhausted, format!("{name}: the archive cannot be kept: {e}")))
                .and_then(|spooled| put(&Held::take(handle, &archive.runtime, true)?, handle, request, spooled))
        }
    };
    if written.is_err() {
        let _ = io::copy(&mut archive.take(DRAINED), &mut io::sink());
    }
    written
}

fn put(
    held: &Held,
    handle: &Handle,
    request: &WriteFilesRequest,
    archive: impl Read,
) -> Result<UnpackedEntries, Refusal> {
    let proc = &handle.proc;
    let failed = |what: String| Refusal::new(Code::Failed, format!("{}: {what}", proc.name));
    let busy = match &held.how {
        FilesHeld::Asleep(State::Parked { generation }) => {
            busy(proc, *generation, &held.tree).map_err(|e| failed(format!("what it has open cannot be read: {e}")))?
        }
        FilesHeld::Asleep(_) | FilesHeld::Awake(_) => HashSet::new(),
    };
    // What is made belongs to its root.
    kip_sys::fsid::become_maker(proc.first_id()).map_err(|e| failed(format!("its root's ids cannot be taken: {e}")))?;
    let to = Path::new(&request.path);
    let request = unpack::UnpackRequest {
        to,
        rename: request.rename,
        follow: true,
        busy: &busy,
        limits: UnpackLimits::default(),
    };
    let done = unpack::unpack(&held.tree, &request, archive).map_err(|e| refusal(&proc.name, &e))?;
    match held.is_whole(handle) {
        true => Ok(done),
        false => {
            let message = format!("{} ended while its files were written: some may not be there", proc.name);
            Err(Refusal::new(Code::State, message))
        }
    }
}

/// The names of what a parked program will open again when it wakes.
fn busy(proc: &Proc, generation: Generation, tree: &RootTree) -> Result<HashSet<EntryName>, String> {
    let directory = kip_snapshot::path_of(&proc.dir, generation);
    let processes = Images::read(&directory).and_then(|images| inspect::processes(&images)).map_err(|e| chain(&e))?;
    let paths: HashSet<&str> = processes.iter().flat_map(opens).filter(|path| path.starts_with('/')).collect();
    // What does not lead anywhere in the tree is not in it: files of /proc, of a deleted directory.
    let name = |path: &str| unpack::name_of(tree, Path::new(path)).ok().flatten();
    Ok(paths.into_iter().filter_map(name).collect())
}

fn opens(process: &ImageProcess) -> impl Iterator<Item = &str> {
    let files = process.files.iter().filter_map(|file| match &file.kind {
        FileKind::Path { path, .. } => Some(path.trim_end_matches(" (deleted)")),
        FileKind::Unix { state: Some(state), .. } => Some(state.name.as_str()),
        _ => None,
    });
    let maps = process.mappings.iter().filter_map(|mapping| match &mapping.kind {
        MappingKind::File { path } => Some(path.trim_end_matches(" (deleted)")),
        _ => None,
    });
    files.chain(maps).chain([process.program.as_str(), process.directory.as_str()])
}

fn refusal(name: &ProcName, error: &FilesError) -> Refusal {
    let code = match error {
        FilesError::Missing { .. } => Code::Unknown,
        FilesError::NotDirectory { .. }
        | FilesError::Special { .. }
        | FilesError::OntoFile { .. }
        | FilesError::Entry { .. }
        | FilesError::Archive(_) => Code::Invalid,
        FilesError::TooMuch(_) => Code::TooLarge,
        FilesError::Io { source, .. } => match Errno::from_io_error(source) {
            Some(Errno::NOSPC | Errno::DQUOT) => Code::Exhausted,
            Some(Errno::ROFS | Errno::LOOP | Errno::NAMETOOLONG) => Code::Invalid,
            _ => Code::Failed,
        },
        FilesError::Sent(_) => Code::Failed,
    };
    Refusal::new(code, format!("{name}: {}", chain(error)))
}

/// An archive, whole.
fn spool(archive: &mut Received, data: &Path) -> io::Result<BufReader<File>> {
    let mut kept = Kept::new(data)?;
    io::copy(archive, &mut kept)?;
    kept.begin()
}

/// An archive in a file without a name, which leaves room for others on the disk.
struct Kept {
    file: File,
    /// Bytes that it may still take.
    left: u64,
}

impl Kept {
    fn new(data: &Path) -> io::Result<Kept> {
        let file = rustix::fs::open(data, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::from(0o600))?;
        let room = rustix::fs::fstatvfs(&file)?;
        let limits = UnpackLimits::default();
        let most = limits.bytes + limits.entries * AROUND_ENTRY;
        Ok(Kept { file: File::from(file), left: most.min(room.f_bavail.saturating_mul(room.f_frsize) / 2) })
    }

    /// Read from its beginning.
    fn begin(mut self) -> io::Result<BufReader<File>> {
        self.file.rewind()?;
        Ok(BufReader::with_capacity(PIECE, self.file))
    }
}

impl Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(left) = self.left.checked_sub(bytes.len() as u64) else {
            let message = "it takes more than half of the room that is left on the disk of the data directory";
            return Err(io::Error::new(io::ErrorKind::StorageFull, message));
        };
        self.left = left;
        self.file.write_all(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The state of a proc whose files are copied while it is awake.
type Awake = Option<watch::Receiver<ProcStatus>>;

/// Returns when such a proc is awake no more: its next start needs the mounts.
async fn ended(awake: &mut Awake) {
    let Some(status) = awake else { return std::future::pending().await };
    let runs = |status: &ProcStatus| matches!(status.record.state, State::Hot { .. } | State::Hibernated { .. });
    let _ = status.wait_for(|status| !runs(status)).await;
}

fn has_ended() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "the proc has ended meanwhile")
}

/// An archive on its way to the client.
struct Pieces {
    runtime: Runtime,
    sender: mpsc::Sender<Result<Vec<u8>, Refusal>>,
    awake: Awake,
}

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Pieces { runtime, sender, awake } = self;
        let sent = runtime.block_on(async {
            tokio::select! {
                sent = timeout(STALLED, sender.send(Ok(bytes.to_owned()))) => Some(sent),
                () = ended(awake) => None,
            }
        });
        match sent.ok_or_else(has_ended)? {
            Ok(Ok(())) => Ok(bytes.len()),
            Ok(Err(_)) => Err(io::Error::new(io::ErrorKind::BrokenPipe, "the client has gone")),
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "the client takes nothing")),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An archive on its way from the client.
struct Received {
    runtime: Runtime,
    feed: Feed<Vec<u8>>,
    piece: io::Cursor<Vec<u8>>,
    awake: Awake,
}

impl Read for Received {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let n = self.piece.read(buffer)?;
            if n > 0 || buffer.is_empty() {
                return Ok(n);
            }
            let Received { runtime, feed, awake, .. } = self;
            let got = runtime.block_on(async {
                tokio::select! {
                    got = timeout(STALLED, feed.recv()) => Some(got),
                    () = ended(awake) => None,
                }
            });
            match got.ok_or_else(has_ended)? {
                Ok(Some(Ok(piece))) => self.piece = io::Cursor::new(piece),
                Ok(Some(Err(refusal))) => return Err(io::Error::other(refusal.message)),
                Ok(None) => return Ok(0),
                Err(_) => return Err(io::Error::new(io::ErrorKind::TimedOut, "the client sends nothing")),
            }
        }
    }
}
