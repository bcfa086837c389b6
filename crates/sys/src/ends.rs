//! Waits that say themselves when they end: the record that lies beside a time-out of ours in a
//! thread's stack.
//!
//! A call with a relative time-out that is broken off and made anew would wait its whole time
//! again. So the call is made anew with a time-out of ours, which is what is left, and which lies
//! below the red zone of the thread's stack. Beside it lies when the wait ends and how long the
//! program wanted to wait, because the next stop of the thread has to know both. A thread that
//! waits in a call whose time-out is at that place has not left the call since: a program's own
//! time-out is never below its own stack. So the record needs no table and no process that
//! remembers it, and it lies in the images of a parked proc as well.
//!
//! The calls that obey a socket's own time-out have no argument to point to the record. There the
//! upper half of the descriptor's register, which the kernel ignores, is a mark that a program's
//! own call does not have.

/// Distance of the record below the stack pointer, bytes: past the 128 bytes of the red zone
/// (x86-64 psABI 3.2.2).
const BELOW: u64 = 512;
/// Bytes of a record. The first 16 are the struct timespec that the call takes.
pub const LENGTH: usize = 48;
/// Begins the part that is not a time-out.
const MAGIC: u64 = 0x646e_652d_7369_7068;
/// Upper half of the register of a marked descriptor.
const MARK: u64 = 0x6b69_7074;
const SECOND: i64 = 1_000_000_000;

/// When a wait ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct End {
    /// When, nanoseconds of CLOCK_MONOTONIC.
    pub at_ns: i64,
    /// How long the program wanted to wait, nanoseconds.
    pub whole_ns: i64,
}

/// Number, six arguments and stack pointer of the call that a thread waits in, as in
/// proc_pid_syscall(5).
pub type Call = [u64; 8];

/// Where the record of a thread with that stack pointer lies.
pub fn place(sp: u64) -> u64 {
    (sp.wrapping_sub(BELOW)) & !15
}

/// Which argument of a call, counted from 0, is the address of a relative struct timespec; none if
/// it has none.
pub fn relative_timespec(call: u64, arguments: &[u64; 6]) -> Option<usize> {
    match call {
        35 => Some(0),
        128 | 271 => Some(2),
        // CLOCK_PROCESS_CPUTIME_ID, CLOCK_THREAD_CPUTIME_ID and dynamic clocks do not go on while a
        // thread waits for us.
        230 if arguments[1] & 1 == 0 && matches!(arguments[0] as i32, 0 | 1 | 7..=9 | 11) => Some(2),
        202 if arguments[1] & 0x7f == 0 => Some(3),
        220 | 441 => Some(3),
        208 | 270 | 333 => Some(4),
        _ => None,
    }
}

/// Whether a call obeys the time-out of the socket in its first argument: true for SO_SNDTIMEO,
/// false for SO_RCVTIMEO. Connecting is left out: a connect that goes on is another call than one
/// that begins.
pub fn socket_call(call: u64) -> Option<bool> {
    match call {
        0 | 19 | 43 | 45 | 47 | 288 | 299 => Some(false),
        1 | 20 | 44 | 46 | 307 => Some(true),
        _ => None,
    }
}

/// The word of a lock with priority inheritance that a call waits for: the kernel changes it in a
/// way that fails with EFAULT rather than wait for a page from a userfaultfd.
pub fn lock_word(call: u64, arguments: &[u64; 6]) -> Option<u64> {
    match (call, arguments[1] & 0x7f) {
        (202, 6 | 13) => Some(arguments[0]),
        (202, 11) => Some(arguments[4]),
        _ => None,
    }
}

/// A descriptor's register with our mark.
pub fn marked(register: u64) -> u64 {
    register & 0xffff_ffff | MARK << 32
}

/// Where a relative sleep has the kernel write what is left of it when it is broken off.
pub fn remainder(call: u64, arguments: &[u64; 6]) -> Option<u64> {
    let at = match call {
        35 => arguments[1],
        230 if arguments[1] & 1 == 0 => arguments[3],
        _ => 0,
    };
    (at != 0).then_some(at)
}

/// Whether a call that obeys the time-out of its socket has our mark.
pub fn is_marked(call: u64, arguments: &[u64; 6]) -> bool {
    socket_call(call).is_some() && arguments[0] >> 32 == MARK
}

/// The record that belongs to the call that a thread waits in; none if the call is the program's
/// own. `read` reads the thread's memory, and is not called for the latter.
pub fn of(call: &Call, read: &dyn Fn(u64, &mut [u8]) -> bool) -> Option<End> {
    let [number, arguments @ .., sp] = call;
    let ours = match relative_timespec(*number, arguments) {
        Some(index) => arguments[index] == place(*sp),
        None => is_marked(*number, arguments),
    };
    let mut bytes = [0; LENGTH];
    let at = place(*sp);
    (ours && read(at, &mut bytes)).then(|| decode(&bytes, at)).flatten()
}

/// The record, at a [`place`], of a wait of which `left_ns` are left, at least a nanosecond: 0
/// would be not to wait.
pub fn encode(left_ns: i64, end: End, place: u64) -> [u8; LENGTH] {
    let left = left_ns.max(1);
    let words = [(left / SECOND) as u64, (left % SECOND) as u64, MAGIC, end.at_ns as u64, end.whole_ns as u64];
    let mut bytes = [0; LENGTH];
    for (half, word) in bytes.chunks_exact_mut(8).zip(words.into_iter().chain([check(end, place)])) {
        half.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// None for anything else than [`encode`] has made for that place; what the kernel has left of the
/// time-out may differ.
fn decode(bytes: &[u8; LENGTH], place: u64) -> Option<End> {
    let word = |index: usize| u64::from_le_bytes(bytes[index * 8..][..8].try_into().expect("8 bytes"));
    let end = End { at_ns: word(3) as i64, whole_ns: word(4) as i64 };
    (word(2) == MAGIC && word(5) == check(end, place)).then_some(end)
}

/// A handler of a signal may have overwritten a part of the record.
fn check(end: End, place: u64) -> u64 {
    let mix = |sum: u64, word: u64| (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    [place, end.at_ns as u64, end.whole_ns as u64].into_iter().fold(MAGIC, mix)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SP: u64 = 0x7ffe_1238;

    #[test]
    fn a_record_belongs_to_the_call_that_points_to_it() {
        let end = End { at_ns: 7 * SECOND, whole_ns: 5 * SECOND };
        let bytes = encode(2 * SECOND + 3, end, place(SP));
        let read = |at: u64, buffer: &mut [u8]| {
            buffer.copy_from_slice(&bytes);
            at == place(SP)
        };
        let call = |number, timeout| [number, 1, 2, 3, timeout, 5, 6, SP];
        assert_eq!(of(&call(441, place(SP)), &read), Some(end));
        assert_eq!(of(&call(441, place(SP) + 16), &read), None, "the program's own");
        assert_eq!(of(&[0, marked(5), 2, 3, 4, 5, 6, SP], &read), Some(end));
        assert_eq!(of(&[0, 5, 2, 3, 4, 5, 6, SP], &read), None, "a read of its own");
        assert_eq!(marked(5) & 0xffff_ffff, 5);
        let words = [6, 13, 11, 9].map(|op| lock_word(202, &[1, op | 128, 3, 4, 5, 6]));
        assert_eq!(words, [Some(1), Some(1), Some(5), None]);
        assert_eq!(of(&[202, 1, 128, 3, place(SP), 5, 6, SP], &read), Some(end), "FUTEX_WAIT, private");
        assert_eq!(of(&[202, 1, 9, 3, place(SP), 5, 6, SP], &read), None, "FUTEX_WAIT_BITSET has an absolute end");
        assert_eq!(bytes[..16], [2i64.to_le_bytes(), 3i64.to_le_bytes()].concat());
    }

    #[test]
    fn what_a_handler_has_written_over_is_no_record() {
        let end = End { at_ns: 7 * SECOND, whole_ns: 5 * SECOND };
        let at = place(SP);
        let whole = encode(0, end, at);
        assert_eq!(decode(&whole, at), Some(end));
        assert_eq!(decode(&whole, at + 64), None, "of another frame");
        for byte in 16..LENGTH {
            let mut bytes = whole;
            bytes[byte] ^= 0x40;
            assert_eq!(decode(&bytes, at), None, "byte {byte}");
        }
        let mut bytes = whole;
        bytes[..16].fill(9);
        assert_eq!(decode(&bytes, at), Some(end), "the kernel has written what is left");
    }
}
