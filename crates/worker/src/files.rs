//! Files of procs to and from archives: `kip cp`.
//!
//! No proc is woken for it. One that is awake stays so meanwhile. One that is asleep or stopped
//! waits with its wake or start only as long as its files are written, or are mounted for this
//! alone; an archive for it is therefore whole on the disk before it is unpacked. Files that a
//! parked program has open are not replaced: its wake would find others.

use crate::worker::Worker;
use async_trait::async_trait;
use kip_criu_images::Images;
use kip_criu_images::inspect::{self, FileKind, MappingKind, Process};
use kip_engine::files;
use kip_engine::host::Proc;
use kip_files::FilesError;
use kip_files::pack::Source;
use kip_files::tree::Tree;
use kip_files::unpack::{self, Limits, Name, Unpacked};
use kip_records::instance::IDS_PER_BLOCK;
use kip_service::{Feed, Files};
use kip_supervisor::task::{Command, FilesHeld, Handle, Still};
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
use tokio::sync::{mpsc, oneshot};
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
impl Files for Worker {
    async fn read_files(&self, name: ProcName, request: ReadFilesRequest) -> Result<Feed<Vec<u8>>, Refusal> {
        let mut handle = self.handle(&name)?;
        absolute(&name, &request.path)?;
        handle.wait_until_stable().await;
        let (sender, feed) = mpsc::channel(PIECES);
        let (begun, begins) = oneshot::channel();
        let runtime = Runtime::current();
        on_thread(&name, move || read(&handle, &request, begun, Pieces { runtime, sender }))?;
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
        let archive = Received { runtime, feed: archive, piece: io::Cursor::default() };
        on_thread(&name, move || drop(reply.send(write(&handle, &request, archive, &data))))?;
        let Unpacked { bytes, entries } = done.await.map_err(|_| died(&name))??;
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
    tree: Tree,
    how: FilesHeld,
    _still: Still,
}

impl Held {
    fn take(handle: &Handle, runtime: &Runtime, change: bool) -> Result<Held, Refusal> {
        let (still, over) = Still::new();
        let how = runtime.block_on(handle.ask(|reply| Command::HoldFiles { change, over, reply }))?;
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
fn read(handle: &Handle, request: &ReadFilesRequest, begun: oneshot::Sender<Result<(), Refusal>>, pieces: Pieces) {
    let (name, first) = (handle.proc.name.clone(), handle.proc.first_id());
    let path = Path::new(&request.path);
    let found = Held::take(handle, &pieces.runtime, false).and_then(|held| {
        let source = Source::find(&held.tree, path, request.follow).map_err(|e| refusal(&name, &e))?;
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
    let mut out = BufWriter::with_capacity(PIECE, pieces);
    let packed = source.pack(&held.tree, &inside, &mut out).map_err(|e| refusal(&name, &e));
    let whole = packed.and_then(|()| match held.is_whole(handle) {
        true => out.flush().map_err(|e| refusal(&name, &FilesError::Sent(e))),
        false => Err(Refusal::new(Code::State, format!("{name} ended or left while its files were read: try again"))),
    });
    // What is in the buffer must not look like the rest.
    drop(out.into_parts());
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
) -> Result<Unpacked, Refusal> {
    let name = &handle.proc.name;
    let sleeps = matches!(handle.status.borrow().record.state, State::Parked { .. } | State::Stopped { .. });
    let written = match if sleeps { None } else { Some(Held::take(handle, &archive.runtime, true)?) } {
        Some(held) if matches!(held.how, FilesHeld::Awake(_)) => put(&held, handle, request, &mut archive),
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

fn put(held: &Held, handle: &Handle, request: &WriteFilesRequest, archive: impl Read) -> Result<Unpacked, Refusal> {
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
    let request = unpack::Request { to, rename: request.rename, follow: true, busy: &busy, limits: Limits::default() };
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
fn busy(proc: &Proc, generation: Generation, tree: &Tree) -> Result<HashSet<Name>, String> {
    let directory = kip_snapshot::path_of(&proc.dir, generation);
    let processes = Images::read(&directory).and_then(|images| inspect::processes(&images)).map_err(|e| chain(&e))?;
    let paths: HashSet<&str> = processes.iter().flat_map(opens).filter(|path| path.starts_with('/')).collect();
    // What does not lead anywhere in the tree is not in it: files of /proc, of a deleted directory.
    let name = |path: &str| unpack::name_of(tree, Path::new(path)).ok().flatten();
    Ok(paths.into_iter().filter_map(name).collect())
}

fn opens(process: &Process) -> impl Iterator<Item = &str> {
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

/// An archive, whole, in a file without a name.
fn spool(archive: &mut Received, data: &Path) -> io::Result<BufReader<File>> {
    let file = rustix::fs::open(data, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::from(0o600))?;
    let mut file = File::from(file);
    let limits = Limits::default();
    let most = limits.bytes + limits.entries * AROUND_ENTRY;
    if io::copy(&mut archive.take(most), &mut file)? == most {
        return Err(io::Error::other(format!("it has {most} bytes or more")));
    }
    file.rewind()?;
    Ok(BufReader::with_capacity(PIECE, file))
}

/// An archive on its way to the client.
struct Pieces {
    runtime: Runtime,
    sender: mpsc::Sender<Result<Vec<u8>, Refusal>>,
}

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = self.runtime.block_on(async { timeout(STALLED, self.sender.send(Ok(bytes.to_owned()))).await });
        match sent {
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
}

impl Read for Received {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let n = self.piece.read(buffer)?;
            if n > 0 || buffer.is_empty() {
                return Ok(n);
            }
            match self.runtime.block_on(async { timeout(STALLED, self.feed.recv()).await }) {
                Ok(Some(Ok(piece))) => self.piece = io::Cursor::new(piece),
                Ok(Some(Err(refusal))) => return Err(io::Error::other(refusal.message)),
                Ok(None) => return Ok(0),
                Err(_) => return Err(io::Error::new(io::ErrorKind::TimedOut, "the client sends nothing")),
            }
        }
    }
}
