//! Critical sections of rseq(2) in stopped threads. A program that is interrupted in one must not
//! go on there but at the section's abort address; the kernel sees to that, unless a tracer has
//! moved the thread out of the section meanwhile: then the kernel takes the section for left, and
//! the thread that is put back would go on in it as if nothing had been.

use crate::process::read_memory;
use std::io;

/// PTRACE_GET_RSEQ_CONFIGURATION (linux/ptrace.h), Linux 5.13.
const CONFIGURATION: libc::c_uint = 0x420f;
/// `struct ptrace_rseq_configuration`: address, size and signature, flags and padding.
const WORDS: usize = 3;
/// Offset of the pointer to the section in `struct rseq`.
const SECTION: u64 = 8;

/// Where a stopped thread that stands at `ip` must go on if something moves it: the abort address
/// of its critical section. None: it is in none, or the kernel has no rseq.
///
/// # Errors
/// ESRCH when it is not stopped, has died, or is not ours; EFAULT when its section cannot be read.
pub fn abort_of(tid: u32, ip: u64) -> io::Result<Option<u64>> {
    let id = libc::pid_t::try_from(tid).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut configuration = [0u64; WORDS];
    let size = size_of_val(&configuration);
    // SAFETY: the third argument is the size of `configuration`, which lives through the call and
    // may hold any bytes.
    if unsafe { libc::ptrace(CONFIGURATION, id, size, configuration.as_mut_ptr()) } == -1 {
        return match io::Error::last_os_error() {
            e if matches!(e.raw_os_error(), Some(libc::EIO | libc::EINVAL)) => Ok(None),
            e => Err(e),
        };
    }
    let [registered, ..] = configuration;
    if registered == 0 {
        return Ok(None);
    }
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
    let mut pointer = [0u8; 8];
    read_memory(tid, registered + SECTION, &mut pointer)?;
    let pointer = word(&pointer);
    if pointer == 0 {
        return Ok(None);
    }
    // Version and flags, start, length up to the commit, abort.
    let mut section = [0u8; 32];
    read_memory(tid, pointer, &mut section)?;
    let (start, length, abort) = (word(&section[8..16]), word(&section[16..24]), word(&section[24..32]));
    Ok((ip.wrapping_sub(start) < length).then_some(abort))
}
