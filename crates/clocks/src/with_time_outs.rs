//! System calls that have a time-out, of x86-64.

/// Calls of x86-64 whose time-out is milliseconds in a register, and in which one; and calls that
/// point to a timespec, which is the program's memory and not looked at. The number is that of the
/// argument, from 0.
pub const IN_MS: [(u64, &str, usize); 3] = [(7, "poll", 2), (232, "epoll_wait", 3), (281, "epoll_pwait", 3)];
/// See [`IN_MS`].
pub const POINTED: [(u64, &str, usize); 8] = [
    (23, "select", 4),
    (35, "nanosleep", 0),
    (128, "rt_sigtimedwait", 2),
    (202, "futex", 3),
    (230, "clock_nanosleep", 2),
    (270, "pselect6", 4),
    (271, "ppoll", 2),
    (441, "epoll_pwait2", 3),
];

/// The name of a call with a time-out.
pub fn call_name(number: u64) -> Option<&'static str> {
    IN_MS.iter().chain(&POINTED).find(|(nr, ..)| *nr == number).map(|(_, name, _)| *name)
}
