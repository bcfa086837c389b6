//! File systems in memory that a proc has at places of its own: `PATH[:OPTION,..]`, as Docker has
//! them.

use super::units::parse_size;
use crate::volume::VolumeSpec;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Where every proc has one.
pub const SHM: &str = "/dev/shm";
/// Its size, bytes, unless the owner says otherwise.
pub const SHM_BYTES: u64 = 64 << 20;
/// Permissions of their roots, unless the owner says otherwise.
const USUAL_MODE: u32 = 0o1777;
/// Most of a proc, that at [`SHM`] not counted.
pub const MOST_TMPFS: usize = 16;
/// Users and groups inside.
const IDS: u32 = 65_536;

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String", extend("pattern" = "^/[^:]+(:[a-z0-9A-Z=,.]+)?$"))]
pub struct Tmpfs {
    /// Where the proc has it: absolute, without `.`, `..` and doubled slashes.
    pub target: String,
    /// Most that its files take, bytes; none is half of the machine's memory, tmpfs(5).
    pub size_bytes: Option<u64>,
    /// Permissions of its root, inode(7).
    pub mode: u32,
    /// The user inside that its root belongs to.
    pub uid: u32,
    /// The group, likewise.
    pub gid: u32,
    /// Programs in it can be executed.
    pub exec: bool,
}

/// A [`Tmpfs`] could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadTmpfs {
    /// The option.
    #[error(
        "{option:?} of the tmpfs {text:?} is not valid: known are size=SIZE, mode=OCTAL, uid=N, gid=N, exec, noexec, and rw, nosuid and nodev, which it has anyway"
    )]
    Option {
        /// Which.
        option: String,
        /// All of it.
        text: String,
    },
    /// The place.
    #[error("a tmpfs cannot be at {place:?}: {why}")]
    Place {
        /// Which.
        place: String,
        /// Why not.
        why: String,
    },
}

impl Tmpfs {
    /// The one that every proc has, of that size.
    pub fn shm(bytes: Option<u64>) -> Tmpfs {
        Tmpfs { size_bytes: Some(bytes.unwrap_or(SHM_BYTES)), ..Tmpfs::at(SHM.to_owned()) }
    }

    fn at(target: String) -> Tmpfs {
        Tmpfs { target, size_bytes: None, mode: USUAL_MODE, uid: 0, gid: 0, exec: false }
    }

    fn option(&mut self, option: &str) -> Option<()> {
        match option.split_once('=').unwrap_or((option, "")) {
            ("size", size) => self.size_bytes = Some(parse_size(&size.to_ascii_uppercase()).ok().filter(|n| *n > 0)?),
            ("mode", mode) => self.mode = u32::from_str_radix(mode, 8).ok().filter(|mode| *mode <= 0o7777)?,
            ("uid", id) => self.uid = id.parse().ok().filter(|id| *id < IDS)?,
            ("gid", id) => self.gid = id.parse().ok().filter(|id| *id < IDS)?,
            ("exec", "") => self.exec = true,
            ("noexec", "") => self.exec = false,
            ("rw" | "nosuid" | "nodev", "") => {}
            _ => return None,
        }
        Some(())
    }
}

impl FromStr for Tmpfs {
    type Err = BadTmpfs;
    fn from_str(s: &str) -> Result<Self, BadTmpfs> {
        let (place, options) = s.split_once(':').unwrap_or((s, ""));
        let bad = |why: String| BadTmpfs::Place { place: place.to_owned(), why };
        // The places are those where a volume can be.
        let volume = format!("x:{place}").parse::<VolumeSpec>().map_err(|_| {
            bad("write an absolute path without '..', ':', '[', ']', backslashes and white space".to_owned())
        })?;
        if volume.target == SHM {
            return Err(bad("every proc has one there, and --shm-size says how large".to_owned()));
        }
        if volume.is_closed() {
            return Err(bad("that is the sandbox's own".to_owned()));
        }
        let mut found = Tmpfs::at(volume.target);
        for option in options.split(',').filter(|option| !option.is_empty()) {
            let unknown = || BadTmpfs::Option { option: option.to_owned(), text: s.to_owned() };
            found.option(option).ok_or_else(unknown)?;
        }
        Ok(found)
    }
}

impl TryFrom<String> for Tmpfs {
    type Error = BadTmpfs;
    fn try_from(text: String) -> Result<Self, BadTmpfs> {
        text.parse()
    }
}

impl From<Tmpfs> for String {
    fn from(one: Tmpfs) -> String {
        one.to_string()
    }
}

impl fmt::Display for Tmpfs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut options = Vec::new();
        options.extend(self.size_bytes.map(|bytes| format!("size={bytes}")));
        options.extend((self.mode != USUAL_MODE).then(|| format!("mode={:o}", self.mode)));
        options.extend((self.uid != 0).then(|| format!("uid={}", self.uid)));
        options.extend((self.gid != 0).then(|| format!("gid={}", self.gid)));
        options.extend(self.exec.then(|| "exec".to_owned()));
        let colon = if options.is_empty() { "" } else { ":" };
        write!(f, "{}{colon}{}", self.target, options.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_written_as_they_are_read() {
        for (text, same) in [
            ("/run", "/run"),
            ("/run/:rw,noexec,nosuid,nodev,size=65536k", "/run:size=67108864"),
            ("/tmp:size=64m,mode=0700,uid=33,gid=34,exec", "/tmp:size=67108864,mode=700,uid=33,gid=34,exec"),
            ("/var//cache:mode=1777", "/var/cache"),
        ] {
            assert_eq!(text.parse::<Tmpfs>().unwrap().to_string(), same, "{text}");
            assert_eq!(same.parse::<Tmpfs>().unwrap().to_string(), same);
        }
        for bad in ["", "run", "/", "/usr", "/proc/x", "/dev/shm", "/dev", "/a/../b"] {
            assert!(matches!(bad.parse::<Tmpfs>(), Err(BadTmpfs::Place { .. })), "{bad}");
        }
        for bad in ["/a:size=0", "/a:size=x", "/a:mode=9", "/a:uid=65536", "/a:ro", "/a:exec=1", "/a:nr_inodes=7"] {
            assert!(matches!(bad.parse::<Tmpfs>(), Err(BadTmpfs::Option { .. })), "{bad}");
        }
        assert_eq!(Tmpfs::shm(None).to_string(), "/dev/shm:size=67108864");
    }
}
