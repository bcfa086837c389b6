//! What a process gives up for good: system call filters. (Capabilities and no_new_privs are in
//! rustix.)

use std::io;

/// One instruction of a filter, as in linux/filter.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Instruction {
    /// Operation.
    pub code: u16,
    /// Jump if true, in instructions.
    pub jt: u8,
    /// Jump if false, in instructions.
    pub jf: u8,
    /// Operand.
    pub k: u32,
}

/// Adds a filter to the calling thread, for ever and for its children: seccomp(2),
/// SECCOMP_SET_MODE_FILTER, Linux 3.17.
///
/// # Errors
/// EACCES without no_new_privs and without CAP_SYS_ADMIN in the user namespace, EINVAL for a
/// program the kernel does not accept, ENOMEM when all filters together are too long.
pub fn add_seccomp_filter(program: &[Instruction]) -> io::Result<()> {
    let Ok(len) = u16::try_from(program.len()) else {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    };
    let header = libc::sock_fprog { len, filter: program.as_ptr().cast_mut().cast() };
    // SAFETY: `Instruction` has sock_filter's layout (repr(C), the same four fields); `header` and
    // `program` live through the call and the kernel only reads them.
    let done = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &header) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_hold_and_nonsense_is_refused() {
        // In a thread of its own, for a filter never goes away.
        std::thread::spawn(|| {
            rustix::thread::set_no_new_privs(true).unwrap();
            assert_eq!(add_seccomp_filter(&[]).unwrap_err().raw_os_error(), Some(libc::EINVAL));
            // nr == getppid ? errno 77 : allow
            let program = [
                Instruction { code: 0x20, jt: 0, jf: 0, k: 0 },
                Instruction { code: 0x15, jt: 0, jf: 1, k: libc::SYS_getppid as u32 },
                Instruction { code: 0x06, jt: 0, jf: 0, k: libc::SECCOMP_RET_ERRNO | 77 },
                Instruction { code: 0x06, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW },
            ];
            add_seccomp_filter(&program).unwrap();
            // SAFETY: getppid takes no arguments.
            assert_eq!(unsafe { libc::syscall(libc::SYS_getppid) }, -1);
            assert_eq!(io::Error::last_os_error().raw_os_error(), Some(77));
        })
        .join()
        .unwrap();
    }
}
