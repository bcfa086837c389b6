//! The sandbox's pid 1 (`init/init.c`) as the rest of the system sees it: its bytes, its place and
//! its status records.

use crate::protocol::ProgramIds;
use kip_types::lifecycle::Exit;
use kip_types::spec::CapabilityBits;

/// The program, static and freestanding.
pub const BINARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kip-init"));

/// Where the skeleton has it, seen from inside.
pub const PATH: &str = "/.kip/init";

/// The name with which `kip-launch` starts it so that it runs the program.
pub(crate) const RUN: &str = "kip-init";
/// The same so that it only checks whether the program can be exec'd.
pub(crate) const EXEC_ONLY: &str = "kip-look";

/// The descriptor on which it writes records.
pub const STATUS_FD: i32 = 3;

/// Size of a record, bytes. One write each, so that a read of a multiple of this size never sees
/// part of one.
pub const RECORD_BYTES: usize = 8;

/// What could not be done at the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartStep {
    /// chdir(2) to the working directory.
    WorkDir,
    /// execve(2) of the program; ENOENT when it is nowhere in PATH.
    Exec,
    /// clone(2).
    Process,
    /// Taking the ids of the user it runs as.
    Ids,
}

/// The user that the program runs as, in the form that pid 1 reads: UID,GID[,GROUP]..; empty for
/// the sandbox's root. After a slash come the capabilities that the program can have, where pid 1
/// has more.
pub(crate) fn ids_word(ids: Option<&ProgramIds>, limited: Option<CapabilityBits>) -> String {
    let numbers = ids.iter().flat_map(|ids| [ids.uid, ids.gid].into_iter().chain(ids.groups.iter().copied()));
    let word = numbers.map(|n| n.to_string()).collect::<Vec<_>>().join(",");
    limited.map_or_else(|| word.clone(), |bits| format!("{word}/{bits}"))
}

/// Most supplementary groups that pid 1 takes.
pub const MOST_GROUPS: usize = 64;

/// A record of the status pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InitRecord {
    /// The program has been exec'd.
    Running {
        /// Its pid inside the sandbox.
        pid_inside: u32,
    },
    /// It could not be, and init ends.
    NotStarted {
        /// What failed.
        step: StartStep,
        /// Why, an errno.
        errno: i32,
    },
    /// The program has ended, and init with it.
    Ended(Exit),
}

impl InitRecord {
    /// Reads a record; none when it is not one of ours. (The program's owner may replace init
    /// inside the sandbox and write anything here.)
    pub fn parse(bytes: &[u8; RECORD_BYTES]) -> Option<InitRecord> {
        let value = i32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        match (bytes[0], bytes[1]) {
            (b'R', 0) => Some(InitRecord::Running { pid_inside: u32::try_from(value).ok()? }),
            (b'E', 1) => Some(InitRecord::NotStarted { step: StartStep::WorkDir, errno: value }),
            (b'E', 2) => Some(InitRecord::NotStarted { step: StartStep::Exec, errno: value }),
            (b'E', 3) => Some(InitRecord::NotStarted { step: StartStep::Process, errno: value }),
            (b'E', 4) => Some(InitRecord::NotStarted { step: StartStep::Ids, errno: value }),
            (b'X', 0) => Some(InitRecord::Ended(exit_of(value))),
            _ => None,
        }
    }
}

/// How a process ended, from the status word of wait4(2).
pub fn exit_of(status: i32) -> Exit {
    match status & 0x7f {
        0 => Exit::Code(status >> 8 & 0xff),
        signal => Exit::Signal(signal),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read() {
        assert_eq!(InitRecord::parse(b"R\0\0\0\x02\0\0\0"), Some(InitRecord::Running { pid_inside: 2 }));
        assert_eq!(
            InitRecord::parse(b"E\x02\0\0\x02\0\0\0"),
            Some(InitRecord::NotStarted { step: StartStep::Exec, errno: 2 })
        );
        assert_eq!(InitRecord::parse(b"X\0\0\0\0\x07\0\0"), Some(InitRecord::Ended(Exit::Code(7))));
        assert_eq!(InitRecord::parse(b"X\0\0\0\x89\0\0\0"), Some(InitRecord::Ended(Exit::Signal(9))));
        assert_eq!(InitRecord::parse(b"R\0\0\0\xff\xff\xff\xff"), None);
        assert_eq!(InitRecord::parse(&[0; 8]), None);
    }

    #[test]
    fn users_and_capabilities_are_one_word() {
        let ids = ProgramIds { uid: 33, gid: 34, groups: vec![7, 8] };
        assert_eq!(ids_word(Some(&ids), None), "33,34,7,8");
        assert_eq!(ids_word(Some(&ids), Some(1024)), "33,34,7,8/1024");
        assert_eq!((ids_word(None, None), ids_word(None, Some(0))), (String::new(), "/0".to_owned()));
    }

    #[test]
    fn the_program_is_small() {
        assert!(BINARY.len() < 4096 && BINARY.starts_with(b"\x7fELF"), "{} bytes", BINARY.len());
    }
}
