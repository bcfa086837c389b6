//! Kernel settings under /proc/sys/net, always those of the calling thread's network namespace
//! (sysctl(8)).

use std::fs;
use std::io;
use std::path::PathBuf;

/// A setting could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing} {path}", path = path.display())]
pub struct SysctlError {
    doing: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

impl SysctlError {
    /// Whether this kernel has no such setting.
    pub(crate) fn is_absent(&self) -> bool {
        self.source.kind() == io::ErrorKind::NotFound
    }
}

fn path_of(key: &str) -> PathBuf {
    PathBuf::from("/proc/sys/net").join(key)
}

/// Reads a setting, for example `ipv4/conf/eth0/forwarding`.
pub(crate) fn read(key: &str) -> Result<String, SysctlError> {
    let path = path_of(key);
    match fs::read_to_string(&path) {
        Ok(text) => Ok(text.trim().to_owned()),
        Err(source) => Err(SysctlError { doing: "read", path, source }),
    }
}

/// Writes a setting.
pub(crate) fn write(key: &str, value: &str) -> Result<(), SysctlError> {
    let path = path_of(key);
    fs::write(&path, value).map_err(|source| SysctlError { doing: "write", path, source })
}

/// Writes a setting if this kernel has it; tells whether it has.
pub(crate) fn write_if_present(key: &str, value: &str) -> Result<bool, SysctlError> {
    match write(key, value) {
        Ok(()) => Ok(true),
        Err(e) if e.is_absent() => Ok(false),
        Err(e) => Err(e),
    }
}

/// Whether IPv6 is there and not switched off for new interfaces.
pub(crate) fn has_ipv6() -> bool {
    ["ipv6/conf/all/disable_ipv6", "ipv6/conf/default/disable_ipv6"].iter().all(|key| read(key).is_ok_and(|v| v == "0"))
}
