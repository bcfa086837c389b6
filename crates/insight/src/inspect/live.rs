//! Processes that are there: running or hibernated.
//!
//! Of /proc only what does not touch the program's memory: not cmdline, environ or mem, for a
//! process that reads a page there that is out wakes the proc. Such pages the pager reads
//! ([`kip_pager::client::Pager::peek`]), for procs that run as well, which may fall asleep
//! meanwhile.

use super::asleep::STILL_COPIED;
use super::maps::{PageLocation, PageLocations};
use super::{Page, Pages};
use kip_clocks::tree::{self, Tree};
use kip_criu_images::inspect::{FileKind, ImageProcess, MappedRange, MappingKind, OpenFile, StringRanges};
use kip_engine::host::Proc;
use kip_engine::host::proc::PAGER_DIRECTORY;
use kip_pager::client::PeekedPage;
use kip_pager::proc::PARKED;
use kip_records::instance::IDS_PER_BLOCK;
use kip_snapshot::pages::{PAGE, PageMap, Run, UNSYNCED};
use kip_snapshot::remote::RemoteFile;
use kip_sys::pagemap::{self, Filter, States};
use kip_types::api::Detail;
use kip_types::chain;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

/// O_LARGEFILE, which is no wish of the program's.
const LARGE_FILE: u64 = 0o100_000;

/// The processes of a proc.
pub(super) struct Live {
    /// By number inside.
    pub(super) processes: Vec<ImageProcess>,
    /// Host ids by number inside.
    hosts: BTreeMap<u32, u32>,
}

impl Live {
    /// Reads of each process what is asked for. One that ends meanwhile is left out.
    pub(super) fn read(proc: &Proc, of: Detail) -> Result<Live, String> {
        let tree = Tree::read(&proc.cgroup.pids().map_err(|e| chain(&e))?);
        let mut found = Vec::new();
        for host in tree.pids {
            let Ok(mut process) = Status::read(host, proc.first_id()) else { continue };
            let read = if process.view.ended { Ok(()) } else { fill(host, &mut process.view, of) };
            match read {
                Err(e) if has_ended(&e) => continue,
                other => other.map_err(|e| format!("process {}: {e}", process.view.pid))?,
            }
            found.push((host, process));
        }
        let inside: HashMap<u32, u32> = found.iter().map(|(host, process)| (*host, process.view.pid)).collect();
        let mut live = Live { processes: Vec::new(), hosts: BTreeMap::new() };
        for (host, mut process) in found {
            process.view.parent = inside.get(&process.parent).copied().unwrap_or(0);
            live.hosts.insert(process.view.pid, host);
            live.processes.push(process.view);
        }
        live.processes.sort_by_key(|process| process.pid);
        Ok(live)
    }

    /// The network namespace of its pid 1.
    pub(super) fn netns(&self) -> Option<OwnedFd> {
        let host = self.hosts.values().next()?;
        File::open(format!("/proc/{host}/ns/net")).ok().map(OwnedFd::from)
    }

    /// Protocols of its netlink sockets by inode: /proc/PID/net/netlink.
    pub(super) fn netlink(&self) -> HashMap<u64, u64> {
        let Some(host) = self.hosts.values().next() else { return HashMap::new() };
        let text = fs::read_to_string(format!("/proc/{host}/net/netlink")).unwrap_or_default();
        let line = |line: &str| {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            Some((fields.last()?.parse().ok()?, fields.get(1)?.parse().ok()?))
        };
        text.lines().skip(1).filter_map(line).collect()
    }

    pub(super) fn pages(&self, proc: &Proc, wanted: &BTreeSet<Page>) -> Result<Pages, String> {
        let host = |(pid, address): &Page| Some((*self.hosts.get(pid)?, *address));
        let asked: Vec<(u32, u64)> = wanted.iter().filter_map(host).collect();
        let pager = &proc.shared.pager;
        let mut found = pager
            .peek(proc.key.as_str(), &proc.cgroup.processes_file(), &asked)
            .map_err(|e| format!("its memory cannot be read: {}", chain(&e)))?;
        let mut pages = Pages::new();
        for page in wanted {
            let read = match host(page).and_then(|asked| found.remove(&asked)) {
                Some(PeekedPage::Here(bytes)) => Ok(bytes),
                Some(PeekedPage::Away(file, number)) => away(proc, &file, number),
                Some(PeekedPage::Unread(why)) => Err(why),
                None => continue,
            };
            pages.insert(*page, read);
        }
        Ok(pages)
    }

    /// Where pages lie, by process.
    pub(super) fn places(&self, proc: &Proc) -> Result<BTreeMap<u32, PageLocations>, String> {
        let chart = proc.shared.pager.chart(proc.key.as_str());
        let chart = chart.map_err(|e| format!("what it has out is not told: {}", chain(&e)))?.unwrap_or_default();
        let directory = proc.dir.join(PAGER_DIRECTORY);
        let mut all = BTreeMap::new();
        for (inside, host) in &self.hosts {
            let mut places = PageLocations { ranges: present(*host).unwrap_or_default(), is_stored: false };
            let runs = chart.processes.get(host).map(|process| process.runs.as_slice()).unwrap_or_default();
            places.add_below(lying(&directory, &chart, runs).map_err(|e| chain(&e))?);
            all.insert(*inside, places);
        }
        Ok(all)
    }
}

/// A page that a store has.
fn away(proc: &Proc, file: &str, page: u32) -> Result<Vec<u8>, String> {
    if file.ends_with(UNSYNCED) {
        return Err(STILL_COPIED.to_owned());
    }
    let archive = proc.shared.archive.as_ref().ok_or("it is in a store: `kip up --store URL`")?;
    let directory = proc.dir.join(PAGER_DIRECTORY).join(PARKED);
    let map = PageMap::load(&directory).map_err(|e| chain(&e))?;
    let file = map.files.iter().find(|known| known.name == file).ok_or("its page map has no such file")?;
    archive.remote_page(&directory, file, page).map_err(|e| chain(&e))
}

/// Where runs of a page map lie, whose files are named from `directory` on.
pub(super) fn lying(
    directory: &Path,
    map: &PageMap,
    runs: &[Run],
) -> Result<Vec<(Range<u64>, PageLocation)>, kip_snapshot::SnapshotError> {
    let mut found = Vec::new();
    let mut open: BTreeMap<u32, RemoteFile> = BTreeMap::new();
    for run in runs {
        let file = &map.files[run.file as usize];
        if file.remote.is_none() {
            let place = if file.name == "swap" { PageLocation::Out } else { PageLocation::Snapshot };
            found.push((run.start..run.end(), place));
            continue;
        }
        if let std::collections::btree_map::Entry::Vacant(place) = open.entry(run.file) {
            place.insert(RemoteFile::open(directory, file)?);
        }
        let here = open[&run.file].here(run.first, run.pages);
        let path = directory.join(&file.name);
        let here = here.map_err(|source| kip_snapshot::SnapshotError::Io { path, source })?;
        for (start, here) in (run.start..run.end()).step_by(PAGE).zip(here) {
            let place = if here { PageLocation::Snapshot } else { PageLocation::Store };
            match found.last_mut() {
                Some((range, last)) if range.end == start && *last == place => range.end += PAGE as u64,
                _ => found.push((start..start + PAGE as u64, place)),
            }
        }
    }
    Ok(found)
}

/// Pages that are there, but for those of zeros.
fn present(host: u32) -> io::Result<Vec<(Range<u64>, PageLocation)>> {
    let any = States::PRESENT | States::SWAPPED;
    let filter = Filter { any, report: any | States::ZERO, ..Filter::default() };
    let pages = pagemap::of(host, pagemap::WHOLE, filter)?;
    let place = |states: States| if states.has(States::SWAPPED) { PageLocation::Swapped } else { PageLocation::Memory };
    let pages = pages.into_iter().filter(|region| !region.states.has(States::ZERO));
    Ok(pages.map(|region| (region.range, place(region.states))).collect())
}

fn has_ended(e: &io::Error) -> bool {
    e.kind() == io::ErrorKind::NotFound || rustix::io::Errno::from_io_error(e) == Some(rustix::io::Errno::SRCH)
}

/// What /proc/PID/status and stat say.
struct Status {
    view: ImageProcess,
    /// Host id of its parent.
    parent: u32,
}

impl Status {
    fn read(host: u32, first_id: u32) -> io::Result<Status> {
        let status = fs::read_to_string(format!("/proc/{host}/status"))?;
        let stat = fs::read_to_string(format!("/proc/{host}/stat"))?;
        let words = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap_or_default().split_ascii_whitespace().filter_map(|n| n.parse().ok()).collect::<Vec<u32>>()
        };
        // Ids outside of the proc's block belong to no user inside.
        let inside = |id: u32| id.checked_sub(first_id).filter(|id| *id < IDS_PER_BLOCK).unwrap_or(65534);
        let id = |name| inside(words(name).get(1).copied().unwrap_or(0));
        let name = fs::read_to_string(format!("/proc/{host}/comm"))?;
        // Behind the name, which may hold anything: fields from the third on.
        let fields: Vec<&str> =
            stat.rsplit_once(')').map(|(_, rest)| rest.split_ascii_whitespace().collect()).unwrap_or_default();
        let field = |number: usize| fields.get(number - 3).and_then(|text| text.parse().ok()).unwrap_or(0);
        let view = ImageProcess {
            pid: words("NSpid:").last().copied().unwrap_or(0),
            name: name.trim_end_matches('\n').to_owned(),
            ended: matches!(fields.first(), Some(&("Z" | "X"))),
            user: (id("Uid:"), id("Gid:")),
            strings: StringRanges { arguments: field(48)..field(49), environment: field(50)..field(51) },
            ..ImageProcess::default()
        };
        Ok(Status { view, parent: words("PPid:").first().copied().unwrap_or(0) })
    }
}

fn fill(host: u32, process: &mut ImageProcess, of: Detail) -> io::Result<()> {
    match of {
        Detail::Env => {
            process.program = link(host, "exe")?;
            process.directory = link(host, "cwd")?;
        }
        Detail::Files | Detail::Sockets => {
            for (fd, target) in tree::descriptors(host)? {
                process.files.extend(open_file(host, fd, &target));
            }
            process.files.sort_by_key(|file| file.fd);
        }
        Detail::Maps => {
            let maps = fs::read_to_string(format!("/proc/{host}/maps"))?;
            process.mappings = maps.lines().filter_map(mapping).collect();
        }
    }
    Ok(())
}

fn link(host: u32, name: &str) -> io::Result<String> {
    Ok(fs::read_link(format!("/proc/{host}/{name}"))?.to_string_lossy().into_owned())
}

/// None if it was closed meanwhile.
fn open_file(host: u32, fd: i32, target: &str) -> Option<OpenFile> {
    let inode = |prefix: &str| target.strip_prefix(prefix)?.strip_suffix(']')?.parse().ok();
    if target == "anon_inode:[eventpoll]" {
        return Some(OpenFile::epoll(fd));
    }
    let (mut deleted, mut has_offset) = (false, false);
    let kind = if let Some(inode) = inode("pipe:[") {
        FileKind::Pipe { inode }
    } else if let Some(inode) = inode("socket:[") {
        FileKind::Socket { inode }
    } else if let Some(kind) = target.strip_prefix("anon_inode:") {
        FileKind::Anonymous { kind: kind.trim_matches(['[', ']']).to_owned() }
    } else if let Some(name) = target.strip_prefix("/memfd:") {
        has_offset = true;
        FileKind::Memory { name: without_end(name).0.to_owned() }
    } else {
        let found = fs::metadata(format!("/proc/{host}/fd/{fd}")).ok()?;
        deleted = found.nlink() == 0;
        let path = if deleted { without_end(target).0 } else { target };
        let kind = kind_of(&found);
        has_offset = kind == "file";
        FileKind::Path { kind, path: path.to_owned() }
    };
    let info = fs::read_to_string(format!("/proc/{host}/fdinfo/{fd}")).ok()?;
    let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let flags = field("flags:").and_then(|text| u64::from_str_radix(text, 8).ok()).unwrap_or(0) & !LARGE_FILE;
    let offset = field("pos:").and_then(|text| text.parse().ok()).filter(|_| has_offset);
    Some(OpenFile { fd, kind, flags, offset, deleted })
}

fn kind_of(found: &fs::Metadata) -> &'static str {
    let kind = found.file_type();
    match () {
        () if kind.is_dir() => "directory",
        () if kind.is_char_device() || kind.is_block_device() => "device",
        () if kind.is_fifo() => "fifo",
        () => "file",
    }
}

/// A path without the kernel's mark of what has no name any more.
fn without_end(path: &str) -> (&str, bool) {
    path.strip_suffix(" (deleted)").map_or((path, false), |path| (path, true))
}

/// A line of proc_pid_maps(5): `start-end rwxp offset dev inode path`.
fn mapping(line: &str) -> Option<MappedRange> {
    let mut rest = line;
    let mut field = || {
        let (word, after) = rest.split_once(' ').unwrap_or((rest, ""));
        rest = after.trim_start();
        word
    };
    let (start, end) = field().split_once('-')?;
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let access = field().as_bytes();
    let offset = hex(field())?;
    let _device = field();
    let _inode = field();
    let bit = |at: usize, value: u64| if access.get(at)? == &b'-' { Some(0) } else { Some(value) };
    let path = rest.replace("\\012", "\n");
    let shared = access.get(3) == Some(&b's');
    let private = |name: &str| MappingKind::Private { name: name.to_owned() };
    let kind = match path.as_str() {
        "" => private("[anonymous]"),
        "[vdso]" | "[vvar]" | "[vvar_vclock]" | "[vsyscall]" => MappingKind::Kernel { name: path.clone() },
        // [heap], [stack], and what programs call their own: [anon:NAME].
        name if name.starts_with('[') => private(name),
        name if shared && (name.starts_with("/dev/zero") || name.starts_with("/SYSV")) => {
            MappingKind::Shared { name: "[shared]".to_owned(), stored: None }
        }
        name if name.starts_with("/memfd:") => {
            MappingKind::Shared { name: without_end(name).0.to_owned(), stored: None }
        }
        name => MappingKind::File { path: name.to_owned() },
    };
    let offset = if matches!(kind, MappingKind::Private { .. } | MappingKind::Kernel { .. }) { 0 } else { offset };
    Some(MappedRange {
        range: hex(start)?..hex(end)?,
        protection: bit(0, 1)? | bit(1, 2)? | bit(2, 4)?,
        shared,
        offset,
        kind,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_maps_are_understood() {
        let of = |line: &str| mapping(line).unwrap();
        let file = of("55d0-66d0 r-xp 00001000 fe:00 1234   /usr/bin/a file (deleted)");
        assert_eq!((file.range, file.protection, file.shared, file.offset), (0x55d0..0x66d0, 5, false, 0x1000));
        assert_eq!(file.kind, MappingKind::File { path: "/usr/bin/a file (deleted)".into() });
        assert_eq!(of("1000-2000 rw-p 00000000 00:00 0   [heap]").kind, MappingKind::Private { name: "[heap]".into() });
        assert_eq!(of("1000-2000 rw-p 00000000 00:00 0 ").kind, MappingKind::Private { name: "[anonymous]".into() });
        let shared = MappingKind::Shared { name: "[shared]".into(), stored: None };
        assert_eq!(of("1000-2000 rw-s 00000000 00:01 9   /dev/zero (deleted)").kind, shared);
        let memory = MappingKind::Shared { name: "/memfd:jit".into(), stored: None };
        assert_eq!(of("1000-2000 rw-s 00000000 00:01 9   /memfd:jit (deleted)").kind, memory);
        assert_eq!(of("1000-2000 r-xp 00000000 00:00 0   [vdso]").kind, MappingKind::Kernel { name: "[vdso]".into() });
        assert_eq!(mapping("VmFlags: rd"), None);
    }

    #[test]
    fn our_own_descriptors_are_understood() {
        let pid = std::process::id();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let mut file = fs::OpenOptions::new().append(true).create(true).open(&path).unwrap();
        io::Write::write_all(&mut file, b"12345").unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&file);
        let target = || fs::read_link(format!("/proc/self/fd/{number}")).unwrap().to_string_lossy().into_owned();
        let found = open_file(pid, number, &target()).unwrap();
        let kind = FileKind::Path { kind: "file", path: path.to_string_lossy().into_owned() };
        assert_eq!((found.kind, found.offset, found.deleted), (kind.clone(), Some(5), false));
        assert_eq!(found.flags, 0o2_002_001, "for writing, to its end, closed at exec");
        fs::remove_file(&path).unwrap();
        let found = open_file(pid, number, &target()).unwrap();
        assert_eq!((found.kind, found.deleted), (kind, true));
        let me = Status::read(pid, 0).unwrap();
        assert!(!me.view.ended && me.view.strings.arguments.start < me.view.strings.arguments.end);
        assert!(!present(pid).unwrap().is_empty());
    }
}
