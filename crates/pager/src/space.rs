//! What of a process's address space can be taken out, and what not and why.
//!
//! Reads /proc/PID/maps and status, and the costly smaps only where locked, pinned or huge pages
//! say that it matters. Decides by the kind of a mapping only; which of its pages are there is
//! another question.

use kip_sys::status::Status;
use std::io;
use std::ops::Range;

/// Why a mapping is left as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// Shared with others, or a file's.
    Shared,
    /// Locked by mlock(2).
    Locked,
    /// A device's memory or registered for direct access.
    Pinned,
    /// Huge pages of hugetlbfs.
    Huge,
    /// Not readable, not even for us.
    Unreadable,
    /// Watched by a userfaultfd of the program's own.
    Watched,
}

impl Reason {
    /// For people.
    pub fn word(self) -> &'static str {
        match self {
            Reason::Shared => "shared memory",
            Reason::Locked => "locked memory",
            Reason::Pinned => "memory pinned for a device",
            Reason::Huge => "huge pages",
            Reason::Unreadable => "memory that cannot be read",
            Reason::Watched => "memory that the program itself watches with a userfaultfd",
        }
    }
}

/// What can be done with a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpaceKind {
    /// Private memory: taken out.
    Anonymous,
    /// A private mapping of a file: written pages are turned into private memory, others are the
    /// page cache's.
    File,
    /// The kernel's own (vdso and its data).
    Kernel,
    /// Left.
    Left(Reason),
}

/// A mapping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// Addresses.
    pub range: Range<u64>,
    /// PROT_READ, PROT_WRITE and PROT_EXEC as in mmap(2).
    pub protection: u64,
    /// What can be done with it.
    pub kind: SpaceKind,
}

/// The mappings of a process, by address.
///
/// # Errors
/// `NotFound` or ESRCH when it has ended.
pub fn mappings(pid: u32) -> io::Result<Vec<Mapping>> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let mut mappings: Vec<Mapping> = maps.lines().filter_map(mapping).collect();
    let status = Status::read(pid)?;
    if maps.lines().any(is_of_device)
        || ["VmLck:", "VmPin:", "HugetlbPages:"].iter().any(|name| status.number(name).is_some_and(|kib| kib > 0))
    {
        let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps"))?;
        let flagged = flagged(&smaps);
        for mapping in &mut mappings {
            let flags = flagged.iter().find(|(range, _)| range.start == mapping.range.start).map(|(_, flags)| flags);
            let reason = flags.and_then(|flags| forbidden(flags));
            if let (Some(reason), SpaceKind::Anonymous | SpaceKind::File) = (reason, mapping.kind) {
                mapping.kind = SpaceKind::Left(reason);
            }
        }
    }
    Ok(mappings)
}

/// Whether a line of maps is of a device and would be taken out; shared memory is `/dev/zero`, too,
/// or lies in `/dev/shm`.
fn is_of_device(line: &str) -> bool {
    line.contains(" /dev/") && mapping(line).is_some_and(|mapping| mapping.kind == SpaceKind::File)
}

/// Each mapping in smaps, with its flags.
fn flagged(smaps: &str) -> Vec<(Range<u64>, Vec<&str>)> {
    let (mut found, mut range) = (Vec::new(), 0..0);
    for line in smaps.lines() {
        if let Some(mapping) = mapping(line) {
            range = mapping.range;
        } else if let Some(flags) = line.strip_prefix("VmFlags:") {
            found.push((range.clone(), flags.split_ascii_whitespace().collect()));
        }
    }
    found
}

/// What the flags of a mapping forbid.
fn forbidden(flags: &[&str]) -> Option<Reason> {
    match () {
        () if flags.contains(&"lo") => Some(Reason::Locked),
        () if ["io", "pf", "mm"].iter().any(|flag| flags.contains(flag)) => Some(Reason::Pinned),
        () if flags.contains(&"ht") => Some(Reason::Huge),
        () => None,
    }
}

/// Ranges that a child does not inherit as they are (MADV_WIPEONFORK, MADV_DONTFORK).
///
/// # Errors
/// As [`mappings`].
pub fn not_inherited(pid: u32) -> io::Result<Vec<Range<u64>>> {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    let apart = |flags: &[&str]| flags.contains(&"wf") || flags.contains(&"dc");
    Ok(flagged(&smaps).into_iter().filter(|(_, flags)| apart(flags)).map(|(range, _)| range).collect())
}

/// A line of maps: `start-end rwxp offset dev inode path`.
fn mapping(line: &str) -> Option<Mapping> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let range = u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?;
    let permissions = fields.next()?.as_bytes();
    let bit = |index: usize, value: u64| if permissions.get(index)? != &b'-' { Some(value) } else { Some(0) };
    let protection = bit(0, 1)? | bit(1, 2)? | bit(2, 4)?;
    let inode: u64 = fields.nth(2)?.parse().ok()?;
    let path = fields.next().unwrap_or("");
    let kind = match path {
        "[vdso]" | "[vvar]" | "[vvar_vclock]" | "[vsyscall]" => SpaceKind::Kernel,
        _ if permissions.get(3) == Some(&b's') => SpaceKind::Left(Reason::Shared),
        _ if path.starts_with("/anon_hugepage") => SpaceKind::Left(Reason::Huge),
        // Writable without readable is as good as readable to the processor, not to us.
        _ if inode == 0 && protection & 1 == 0 => SpaceKind::Left(Reason::Unreadable),
        _ if inode == 0 => SpaceKind::Anonymous,
        _ => SpaceKind::File,
    };
    Some(Mapping { range, protection, kind })
}

/// Whether so little of a process is its own that taking it out costs more than it gives: the
/// sandbox's pid 1.
pub(crate) fn is_small(pid: u32) -> bool {
    const SMALL_KB: u64 = 64;
    let status = Status::read(pid).unwrap_or_default();
    ["RssAnon:", "VmSwap:"].iter().filter_map(|name| status.number(name)).sum::<u64>() < SMALL_KB
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_maps_are_understood() {
        let kind = |line: &str| mapping(line).unwrap().kind;
        let heap = "5555-5556 rw-p 00000000 00:00 0                          [heap]";
        assert_eq!(
            mapping(&heap.replace("5555-5556", "55550000-55560000")),
            Some(Mapping { range: 0x5555_0000..0x5556_0000, protection: 3, kind: SpaceKind::Anonymous })
        );
        assert_eq!(kind("1000-2000 r-xp 00001000 fe:00 123 /usr/bin/a file"), SpaceKind::File);
        assert_eq!(kind("1000-2000 rw-s 00001000 00:01 9 /memfd:x (deleted)"), SpaceKind::Left(Reason::Shared));
        assert_eq!(kind("1000-2000 rw-p 00000000 00:10 9 /anon_hugepage (deleted)"), SpaceKind::Left(Reason::Huge));
        assert_eq!(kind("1000-2000 ---p 00000000 00:00 0"), SpaceKind::Left(Reason::Unreadable));
        assert_eq!(kind("1000-2000 r-xp 00000000 00:00 0 [vdso]"), SpaceKind::Kernel);
        assert_eq!(mapping("VmFlags: rd wr mr mw me ac sd"), None);
    }

    #[test]
    fn only_private_mappings_of_devices_are_looked_at_closely() {
        assert!(is_of_device("1000-2000 rw-p 00000000 00:06 9 /dev/dri/card0"));
        assert!(!is_of_device("1000-2000 rw-s 00000000 00:06 9 /dev/dri/card0"));
        assert!(!is_of_device("1000-2000 rw-s 00000000 00:01 174623 /dev/zero (deleted)"));
        assert!(!is_of_device("1000-2000 rw-p 00000000 fe:00 123 /srv/dev/file"));
    }

    #[test]
    fn our_own_are_all_there() {
        let mappings = mappings(std::process::id()).unwrap();
        let local = 1u8;
        let at = &raw const local as u64;
        let ours = mappings.iter().find(|m| m.range.contains(&at)).unwrap();
        assert_eq!((ours.kind, ours.protection), (SpaceKind::Anonymous, 3));
        assert!(
            mappings.iter().any(|m| m.kind == SpaceKind::File) && mappings.iter().any(|m| m.kind == SpaceKind::Kernel)
        );
    }
}
