//! `kip backup`: all that a data directory keeps, into one closed file;
//! [`kip_offload::restore`] makes a data directory of it.
//!
//! The file is a stream of `kip_archive::backup`; in clear it is tar archives one behind the other,
//! as GNU tar makes them with `--listed-incremental` and takes them apart with
//! `--ignore-zeros --listed-incremental=/dev/null`:
//!
//! 1. what procs share: images, keys, tokens, skeletons, templates, volumes that no proc has; and
//!    their checkpoints;
//! 2. for each proc, or all that share a named volume: its directory and volumes while it goes on;
//!    then, while it stands still ([`Still`]: parked, if it can sleep), what has changed since;
//!    then its generation, which does not change any more, by links in `run/backup`, while it may
//!    wake again;
//! 3. the file that another part of the daemon writes ([`OwnFile`](crate::OwnFile)), copied by its
//!    owner; the data directory's own store, if that is where it archives;
//! 4. `backup.json`, the [`BackupNote`]: without it a backup is not whole.
//!
//! What is derived or lives only as long as a process is left out. A crash leaves
//! `.NAME.kip-backup` beside the file, which the next backup to that name writes anew, and
//! `run/backup`, which the next one or the next daemon removes; the proc that stood still sleeps,
//! and wakes for the next client.

use crate::worker::Worker;
use kip_archive::backup::{BackupWriter, Content};
use kip_copy::tarred::{self, TarError};
use kip_engine::host::Host;
use kip_offload::find::absolute;
use kip_offload::place::OWN;
use kip_offload::restore::{BackupNote, FORMAT, NOTE, NotedProc, kept_in};
use kip_offload::{KeyLength, with_wrap};
use kip_sandbox::quota::QuotaError;
use kip_supervisor::task::{Handle, Still, StillFor, Stilled, TaskCommand};
use kip_sys::clock::now_ms;
use kip_sys::publish::publish;
use kip_types::api::{Code, EventKind, Refusal};
use kip_types::backup::{BackedUpAs, BackedUpProc, BackupProgress, BackupRequest};
use kip_types::chain;
use kip_types::{Generation, ProcName, State, VolumeName, VolumeSource};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// What is derived, or of one process's life.
const LEFT_OUT: [&str; 10] = [
    "work",
    "pager",
    "wake",
    "files.new",
    // What is in that file goes in, as files.
    "disk.img",
    "disk.new",
    "disk.filled",
    "disk/work",
    "disk/lost+found",
    "disk/files.new",
];
/// Bytes that are taken from tar at once.
const PIECE: usize = 256 << 10;
/// Between two words about how far it is.
const REPORT_EVERY: Duration = Duration::from_millis(200);

/// There is no backup.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BackupFailure {
    #[error("no client waits for it any more")]
    Unwanted,
    #[error("cannot read or write {path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Tar(#[from] TarError),
    #[error(transparent)]
    KeyLength(#[from] KeyLength),
    #[error(transparent)]
    Begin(#[from] kip_archive::backup::BackupError),
    #[error("the limited disk of a proc cannot be read")]
    Place(#[source] QuotaError),
    #[error("a note cannot be written")]
    Note(#[from] serde_json::Error),
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> BackupFailure {
    let path = path.to_owned();
    move |source| BackupFailure::Io { path, source }
}

type Out = mpsc::Sender<Result<BackupProgress, Refusal>>;

/// Procs of which none can be copied without the others, and the volumes that they have.
#[derive(Debug, Default)]
struct Group {
    procs: Vec<Handle>,
    volumes: BTreeSet<VolumeName>,
}

/// The procs in groups: those that share a volume are in one.
fn groups(procs: Vec<Handle>) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for handle in procs {
        let spec = handle.proc.spec();
        let named = spec.volumes.iter().filter_map(|v| match &v.source {
            VolumeSource::Named(name) => Some(name.clone()),
            _ => None,
        });
        let mut joined = Group { procs: vec![handle.clone()], volumes: named.collect() };
        groups.retain_mut(|group| {
            let apart = group.volumes.is_disjoint(&joined.volumes);
            if !apart {
                joined.volumes.append(&mut group.volumes);
                joined.procs.splice(0..0, group.procs.drain(..));
            }
            apart
        });
        groups.push(joined);
    }
    groups
}

struct Backup {
    machine: Arc<Host>,
    runtime: tokio::runtime::Handle,
    out: Out,
    sink: BackupWriter<BufWriter<File>>,
    scratch: PathBuf,
    bytes: u64,
    told: Instant,
    kept: Vec<PathBuf>,
    noted: Vec<NotedProc>,
}

/// Begins to write a backup; how far it is goes to `out`, [`BackupProgress::End`] or an error at
/// last. A caller that stops receiving ends the backup.
pub(crate) fn begin(worker: Worker, request: BackupRequest, out: Out) {
    let runtime = tokio::runtime::Handle::current();
    tokio::task::spawn_blocking(move || {
        // Told once another may begin. The backup is there even if the client has gone.
        let done = worker.back_up(&request, runtime.clone(), &out);
        let _ = runtime.block_on(out.send(done));
    });
}

impl Worker {
    /// Returns the last word of it.
    fn back_up(
        &self,
        request: &BackupRequest,
        runtime: tokio::runtime::Handle,
        out: &Out,
    ) -> Result<BackupProgress, Refusal> {
        let Some(_only) = self.backing_up.try_lock() else {
            return Err(Refusal::new(Code::State, "a backup is under way: wait for its end"));
        };
        let invalid = |why: String| Err(Refusal::new(Code::Invalid, format!("there is no backup: {why}")));
        let file = absolute(&request.file)?;
        let data = fs::canonicalize(&self.machine.data).unwrap_or_else(|_| self.machine.data.clone());
        let parent = file.parent().unwrap_or(Path::new("/"));
        match fs::canonicalize(parent) {
            Err(e) => return invalid(format!("{}: {e}", parent.display())),
            Ok(parent) if parent.starts_with(&data) => {
                return invalid(format!("{} is in the data directory, which it is a copy of", file.display()));
            }
            Ok(_) if fs::symlink_metadata(file).is_ok() => {
                return invalid(format!("{} is there already: choose another name, or delete it", file.display()));
            }
            Ok(_) => {}
        }
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let growing = file.with_file_name(format!(".{name}.kip-backup"));
        let scratch = scratch(&self.machine.data);
        let done = self.write_backup(request, &growing, file, &scratch, runtime, out);
        let _ = fs::remove_dir_all(&scratch);
        done.map_err(|e| {
            // What it was made for has failed.
            let _ = fs::remove_file(&growing);
            let is_asked = matches!(e, BackupFailure::Begin(_) | BackupFailure::KeyLength(_));
            let code = if is_asked { Code::Invalid } else { Code::Failed };
            Refusal::new(code, format!("{} was not written: {}", file.display(), chain(&e)))
        })
    }

    fn write_backup(
        &self,
        request: &BackupRequest,
        growing: &Path,
        file: &Path,
        scratch: &Path,
        runtime: tokio::runtime::Handle,
        out: &Out,
    ) -> Result<BackupProgress, BackupFailure> {
        let opened = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(growing);
        let sink = BufWriter::with_capacity(1 << 20, opened.map_err(at(growing))?);
        let sink = with_wrap(&request.wrap, |wrap| BackupWriter::begin(sink, Content::Backup, wrap, now_ms()))??;
        let _ = fs::remove_dir_all(scratch);
        fs::create_dir_all(scratch).map_err(at(scratch))?;
        let machine = Arc::clone(&self.machine);
        let (out, scratch) = (out.clone(), scratch.to_owned());
        let (bytes, told, kept, noted) = (0, Instant::now(), Vec::new(), Vec::new());
        let mut backup = Backup { machine, runtime, out, sink, scratch, bytes, told, kept, noted };
        let groups = groups(self.handles());
        let owned: BTreeSet<VolumeName> = groups.iter().flat_map(|group| group.volumes.clone()).collect();
        let machine = Arc::clone(&self.machine);
        // What is in the store is to be what the records say.
        let archive = machine.archive.as_ref().filter(|_| backup.has_own_store());
        let _nobody_stores = archive.map(|archive| backup.runtime.block_on(archive.nobody_stores()));
        let own = self.own_file.as_ref();
        let volumes = backup.shared(&owned, own.map_or(OWN, |own| own.name))?;
        for (number, group) in groups.iter().enumerate() {
            backup.group(number, group)?;
        }
        // Not older than what any proc has seen of it.
        if let Some(own) = own {
            let copy = backup.scratch.join(own.name);
            (own.copy)(&copy).map_err(at(&copy))?;
            let scratch = backup.scratch.clone();
            backup.tar(own.name, &scratch, &[], &[PathBuf::from(own.name)])?;
            fs::remove_file(&copy).map_err(at(&copy))?;
        }
        // After all procs that are archived there by now; what the store has of them does not go
        // for a day.
        if backup.machine.data.join(OWN).is_dir() {
            let data = backup.machine.data.clone();
            backup.tar("store", &data, &[], &[PathBuf::from(OWN)])?;
        }
        let left_out = left_out(&groups);
        backup.finish(growing, file, volumes + owned.len() as u64, left_out)
    }
}

/// Where a backup puts what it needs while it is made.
pub(crate) fn scratch(data: &Path) -> PathBuf {
    data.join("run/backup")
}

/// Volumes that are the host's own files.
fn left_out(groups: &[Group]) -> BTreeSet<String> {
    let procs = groups.iter().flat_map(|group| &group.procs);
    let volumes = procs.flat_map(|handle| handle.proc.spec().volumes.clone());
    let paths = volumes.filter_map(|volume| match volume.source {
        VolumeSource::Host(path) => Some(path.display().to_string()),
        _ => None,
    });
    paths.collect()
}

impl Backup {
    /// Writes what procs have in common but for one file, and volumes that no proc has. Returns how
    /// many volumes these are.
    fn shared(&mut self, owned: &BTreeSet<VolumeName>, but: &str) -> Result<u64, BackupFailure> {
        let data = self.machine.data.clone();
        let names = |dir: &Path| -> Result<BTreeSet<OsString>, BackupFailure> {
            let entries = match fs::read_dir(dir) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
                entries => entries.map_err(at(dir))?,
            };
            let names = entries.map(|entry| entry.map(|e| e.file_name())).collect::<io::Result<BTreeSet<_>>>();
            let mut names = names.map_err(at(dir))?;
            names.retain(|name| !name.as_encoded_bytes().starts_with(b"."));
            Ok(names)
        };
        // Owners and modes of what has parts below.
        let mut roots = names(&data)?;
        roots.retain(|name| name == "procs" || name == "volumes");
        let roots: Vec<PathBuf> = roots.iter().map(PathBuf::from).collect();
        self.tar("directories", &data, &["--no-recursion".into()], &roots)?;
        // One of them may be made or removed while it is read.
        let before = kept(&data)?;
        for name in names(&data)? {
            if !["run", "cache", "procs", "volumes", OWN, but].iter().any(|other| name == *other) {
                let part = name.to_string_lossy().into_owned();
                self.tar(&part, &data, &[], &[PathBuf::from(name)])?;
            }
        }
        let after = kept(&data)?;
        self.kept =
            before.into_iter().filter(|(path, inode)| after.get(path) == Some(inode)).map(|(path, _)| path).collect();
        let mut others = names(&data.join("volumes"))?;
        others.retain(|name| !owned.iter().any(|volume| name == volume.as_str()));
        for name in &others {
            self.tar(&format!("volume {}", name.display()), &data, &[], &[Path::new("volumes").join(name)])?;
        }
        Ok(others.len() as u64)
    }

    /// Procs that belong together.
    fn group(&mut self, number: usize, group: &Group) -> Result<(), BackupFailure> {
        let data = self.machine.data.clone();
        let places = group.procs.iter().map(|handle| handle.proc.files.place()).collect::<Result<Vec<_>, _>>();
        let _places = places.map_err(BackupFailure::Place)?;
        let what = names_of(group.procs.iter().map(|handle| &*handle.proc.name));
        let state = self.scratch.join(format!("{number}.snar"));
        let arguments = |procs: &[Handle]| -> Vec<OsString> {
            let mut arguments = vec![OsString::from("--listed-incremental"), state.clone().into()];
            // Names and nothing else: a pattern would meet files of the procs' own.
            arguments.extend(["--anchored", "--no-wildcards"].map(OsString::from));
            for handle in procs {
                let inside = Path::new("procs").join(handle.proc.key.as_str());
                for name in without(&handle.proc.dir) {
                    let mut argument = OsString::from("--exclude=");
                    argument.push(inside.join(name));
                    arguments.push(argument);
                }
            }
            arguments
        };
        let paths = |procs: &[Handle]| -> Vec<PathBuf> {
            let procs = procs.iter().map(|handle| Path::new("procs").join(handle.proc.key.as_str()));
            procs.chain(group.volumes.iter().map(|v| Path::new("volumes").join(v.as_str()))).collect()
        };
        self.tar(&format!("proc {what}"), &data, &arguments(&group.procs), &paths(&group.procs))?;

        let begin = Instant::now();
        let mut standing: Vec<(Handle, Stilled, Still)> = Vec::new();
        let what_for = StillFor { purpose: "backup", stays: false, fetches: false };
        let asked: Vec<_> = group
            .procs
            .iter()
            .map(|handle| {
                let ((still, over), handle) = (Still::new(), handle.clone());
                let asked = self.runtime.spawn({
                    let handle = handle.clone();
                    async move { handle.ask(|reply| TaskCommand::StandStill { what_for, over, reply }).await }
                });
                (handle, asked, still)
            })
            .collect();
        for (handle, asked, still) in asked {
            // A proc that was removed meanwhile is not in the backup.
            if let Ok(Ok(stilled)) = self.runtime.block_on(asked) {
                standing.push((handle, stilled, still));
            }
        }
        let there: Vec<Handle> = standing.iter().map(|(handle, ..)| handle.clone()).collect();
        self.tar(&format!("proc {what}, still"), &data, &arguments(&there), &paths(&there))?;
        let (mut procs, mut linked) = (Vec::new(), Vec::new());
        for (handle, stilled, still) in standing {
            let name = handle.proc.name.clone();
            let (how, generation) = self.generation(&handle, &stilled, &mut linked)?;
            drop(still);
            procs.push(BackedUpProc { name: name.clone(), how, cause: stilled.runs, still_us: 0 });
            let stored = generation.is_none() && how == BackedUpAs::Asleep;
            let key = Some(handle.proc.key.clone()).filter(|key| *key != name);
            self.noted.push(NotedProc { name, key, generation, stored });
        }
        let still_us = begin.elapsed().as_micros() as u64;
        let links = self.scratch.join("links");
        if !linked.is_empty() {
            self.tar(&format!("memory of {what}"), &links, &[], &linked)?;
            fs::remove_dir_all(&links).map_err(at(&links))?;
        }
        for proc in procs {
            let stood = !matches!(proc.how, BackedUpAs::Stopped | BackedUpAs::FilesOnly);
            let proc = BackedUpProc { still_us: if stood { still_us } else { 0 }, ..proc };
            self.report(BackupProgress::Proc(proc))?;
        }
        Ok(())
    }

    /// A proc's generation: by links to be copied later, at once if its files still change.
    fn generation(
        &mut self,
        handle: &Handle,
        stilled: &Stilled,
        linked: &mut Vec<PathBuf>,
    ) -> Result<(BackedUpAs, Option<Generation>), BackupFailure> {
        if stilled.runs.is_some() {
            return Ok((BackedUpAs::FilesOnly, None));
        }
        match stilled.record.state {
            State::Parked { .. } => {}
            State::Archived { .. } if self.has_own_store() => return Ok((BackedUpAs::Asleep, None)),
            State::Archived { .. } | State::Elsewhere { .. } => return Ok((BackedUpAs::InTheStore, None)),
            _ => return Ok((BackedUpAs::Stopped, None)),
        }
        let generation = stilled.record.generation();
        let local = kip_snapshot::path_of(&handle.proc.dir, generation);
        let inside = local.strip_prefix(&self.machine.data).expect("a proc's directory is in the data directory");
        // Of one that came from the store pages may still come.
        let files = fs::read_dir(&local).map_err(at(&local))?.flatten();
        if files.map(|file| file.file_name()).any(|name| name.to_string_lossy().ends_with("-remote.table")) {
            let data = self.machine.data.clone();
            self.tar(&format!("memory of {}", handle.proc.name), &data, &[], &[inside.to_owned()])?;
            let how = if self.has_own_store() { BackedUpAs::Asleep } else { BackedUpAs::InTheStore };
            return Ok((how, Some(generation)));
        }
        let link = self.scratch.join("links").join(inside);
        link_all(&local, &link).map_err(at(&local))?;
        linked.push(inside.to_owned());
        Ok((BackedUpAs::Asleep, Some(generation)))
    }

    /// The store that procs are archived in goes into the backup.
    fn has_own_store(&self) -> bool {
        self.machine.archive.as_ref().is_some_and(|archive| archive.is_at(&self.machine.data.join(OWN)))
    }

    fn report(&mut self, progress: BackupProgress) -> Result<(), BackupFailure> {
        self.runtime.block_on(self.out.send(Ok(progress))).map_err(|_| BackupFailure::Unwanted)
    }

    /// Runs tar and takes what it writes.
    fn tar(
        &mut self,
        part: &str,
        directory: &Path,
        arguments: &[OsString],
        paths: &[PathBuf],
    ) -> Result<(), BackupFailure> {
        if paths.is_empty() {
            return Ok(());
        }
        tarred::pack(part, directory, arguments, paths, |from| self.copy(part, from))
    }

    fn copy(&mut self, part: &str, from: &mut impl Read) -> Result<(), BackupFailure> {
        let mut piece = vec![0; PIECE];
        loop {
            let count = match from.read(&mut piece) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                count => count.map_err(at(Path::new("tar's output")))?,
            };
            if count == 0 {
                return Ok(());
            }
            self.sink.write_all(&piece[..count]).map_err(at(Path::new("the backup")))?;
            self.bytes += count as u64;
            if self.out.is_closed() {
                return Err(BackupFailure::Unwanted);
            }
            if self.told.elapsed() > REPORT_EVERY {
                self.told = Instant::now();
                let _ = self.out.try_send(Ok(BackupProgress::At { part: part.to_owned(), bytes: self.bytes }));
            }
        }
    }

    fn finish(
        mut self,
        growing: &Path,
        file: &Path,
        volumes: u64,
        left_out: BTreeSet<String>,
    ) -> Result<BackupProgress, BackupFailure> {
        let note = BackupNote {
            format: FORMAT,
            kip: env!("CARGO_PKG_VERSION").to_owned(),
            made_at_ms: now_ms(),
            data: self.machine.data.clone(),
            instance: self.machine.instance.number(),
            kept: Some(std::mem::take(&mut self.kept)),
            procs: std::mem::take(&mut self.noted),
        };
        let path = self.scratch.join(NOTE);
        fs::write(&path, serde_json::to_vec_pretty(&note)?).map_err(at(&path))?;
        let scratch = self.scratch.clone();
        self.tar("its note", &scratch, &[], &[PathBuf::from(NOTE)])?;
        let whole = self.sink.finish().and_then(|sink| sink.into_inner().map_err(|e| e.into_error()));
        let whole = whole.map_err(at(growing))?;
        let file_bytes = whole.metadata().map_err(at(growing))?.len();
        publish(&whole, growing, file).map_err(at(file))?;
        let procs = note.procs.len() as u64;
        self.machine.events.emit(
            None,
            EventKind::Backup,
            format!("{}: {procs} procs, {file_bytes} bytes", file.display()),
        );
        let (file, left_out) = (file.display().to_string(), left_out.into_iter().collect());
        Ok(BackupProgress::End { file, procs, volumes, left_out, bytes: self.bytes, file_bytes })
    }
}

/// Templates and checkpoints, by paths below the data directory, and the inodes of their
/// directories.
fn kept(data: &Path) -> Result<BTreeMap<PathBuf, u64>, BackupFailure> {
    let mut kept = BTreeMap::new();
    for path in kept_in(data).map_err(at(data))? {
        // One that has just gone is not in it.
        if let Ok(found) = fs::metadata(data.join(&path)) {
            kept.insert(path, found.ino());
        }
    }
    Ok(kept)
}

/// What of a proc's directory does not go in with the rest.
fn without(directory: &Path) -> Vec<OsString> {
    let there = fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let is_generation = |name: &OsString| {
        let name = name.to_string_lossy();
        name.starts_with("gen-") || name.starts_with("failed-gen-")
    };
    LEFT_OUT.iter().map(OsString::from).chain(there.filter(is_generation)).collect()
}

fn names_of<'a>(procs: impl Iterator<Item = &'a ProcName>) -> String {
    procs.map(ProcName::as_str).collect::<Vec<_>>().join(", ")
}

/// A directory's files under other names.
fn link_all(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let link = to.join(entry.file_name());
        if entry.file_type()?.is_dir() { link_all(&entry.path(), &link)? } else { fs::hard_link(entry.path(), link)? }
    }
    Ok(())
}
