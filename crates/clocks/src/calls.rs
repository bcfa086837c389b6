//! Blocking calls: put back where CRIU interrupted them, and their time-outs made to go on.
//!
//! A time-out given to the call itself is pointed at one of ours in the thread's stack, with a
//! record of when the wait ends ([`kip_sys::ends`]); one that the kernel updates for its program
//! (select, pselect6, ppoll) stays where it is and is set to what is left. One that is an option of
//! a socket (SO_RCVTIMEO, SO_SNDTIMEO) is noted, and the call marked; the wake sets what is left of
//! it for as long as the thread enters its call. Sources: signal(7), the x86-64 system call
//! convention and table, socket(7), futex(2).

use crate::due::{Due, Left, Source, push_due};
use crate::frozen::Frozen;
use crate::noted::{AbsoluteWaits, Clocks, Form, Patch, SocketPatch};
use crate::now::{Now, SECOND};
use kip_criu_images::fields::user_x86_regs_entry::{AX, DI, DX, IP, ORIG_AX, R8, R9, R10, R15, SI, SP};
use kip_criu_images::fields::{core_entry, thread_info_x86};
use kip_criu_images::{CheckpointImageError, Images, Malformed, Message};
use kip_sys::ends::{self, End};
use kip_sys::process::write_memory;
use kip_sys::trace;
use rustix::net::sockopt::{Timeout as Which, socket_timeout};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;

/// How a system call takes its time-out.
enum Timeout {
    /// Milliseconds in a register; the call is exchanged for one that takes a timespec.
    Millis { value: u64, exchange: Exchange },
    /// Address of a relative timespec which the kernel leaves alone.
    Constant { address: u64, pointer: u32 },
    /// As Constant, of a sleep that has the kernel write what is left elsewhere when it is
    /// interrupted, or to the same place.
    Slept { address: u64, pointer: u32, remainder: u64 },
    /// Address of a relative timespec which the kernel has updated to what is left when it was
    /// interrupted.
    Updated { address: u64 },
    /// As Updated, a struct timeval of select(2).
    UpdatedTimeval { address: u64 },
    /// An absolute time that needs no change.
    Absolute { address: u64, clock: u64 },
}

/// Which call takes the place of one with milliseconds.
enum Exchange {
    /// epoll_wait(2) by epoll_pwait2.
    EpollWait,
    /// epoll_pwait(2) by epoll_pwait2, signal mask kept.
    EpollPwait,
    /// poll(2) by ppoll.
    Poll,
}

const EINTR: u64 = (-4i64) as u64;
const RESTART_SYSCALL: u64 = 219;
const CLOCK_NANOSLEEP: u64 = 230;

fn timeout_of(nr: u64, regs: &Message) -> Option<Timeout> {
    let r = |f| regs.number(f);
    let constant = |pointer: u32| (r(pointer) != 0).then(|| Timeout::Constant { address: r(pointer), pointer });
    let slept = |pointer: u32, remainder: u32| match r(remainder) {
        0 => constant(pointer),
        remainder => (r(pointer) != 0).then(|| Timeout::Slept { address: r(pointer), pointer, remainder }),
    };
    let updated = |pointer: u32| (r(pointer) != 0).then(|| Timeout::Updated { address: r(pointer) });
    let absolute = |pointer: u32, clock| (r(pointer) != 0).then(|| Timeout::Absolute { address: r(pointer), clock });
    let millis = |field: u32, exchange| {
        (r(field) as i32 >= 0).then(|| Timeout::Millis { value: r(field) as i32 as u64, exchange })
    };
    let realtime_if = |set: bool| u64::from(!set);
    match nr {
        7 => millis(DX, Exchange::Poll),
        23 => (r(R8) != 0).then(|| Timeout::UpdatedTimeval { address: r(R8) }),
        35 => slept(DI, SI),
        128 => constant(DX),
        202 => match r(SI) & 0x7f {
            0 => constant(R10),
            // FUTEX_LOCK_PI goes by CLOCK_REALTIME only.
            6 => absolute(R10, 0),
            9 | 11 | 13 => absolute(R10, realtime_if(r(SI) & 256 != 0)),
            _ => None,
        },
        208 | 333 => constant(R8),
        220 => constant(R10),
        230 if r(SI) & 1 != 0 => absolute(DX, r(DI)),
        230 => slept(DX, R10),
        232 => millis(R10, Exchange::EpollWait),
        242 | 243 => absolute(R8, 0),
        270 => updated(R8),
        271 => updated(DX),
        281 => millis(R10, Exchange::EpollPwait),
        441 => constant(R10),
        449 => absolute(R10, r(R8)),
        455 => absolute(R8, r(R9)),
        _ => None,
    }
}

/// What is longer is no tick by default, `kip run --tick`: a client may wait for what follows it.
const LONGEST_TICK_NS: i64 = 60 * SECOND;

/// Whether a call with a time-out that ended with `ax` ended by it: as each says in its manual
/// page.
fn ended_by_time_out(nr: u64, ax: u64) -> bool {
    const EAGAIN: i64 = -11;
    const ETIMEDOUT: i64 = -110;
    let expected = match nr {
        128 | 220 => EAGAIN,
        202 | 242 | 243 | 449 | 455 => ETIMEDOUT,
        _ => 0,
    };
    ax as i64 == expected
}

/// A thread that waits in a system call, as it was seen just before the freeze.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting {
    /// Since when it has been off the CPU, nanoseconds of CLOCK_MONOTONIC.
    pub since_ns: i64,
    /// Number, six arguments and stack pointer of the call: proc_pid_syscall(5).
    pub call: [u64; 8],
}

/// What a thread was doing when it was frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FinalizedThread {
    /// Its registers were changed.
    pub(crate) changed: bool,
    /// It waited in a call. Otherwise it ran, or had just got what it had waited for.
    pub(crate) waits: bool,
    /// It does not wait, for its time-out passed in the freeze, and it has not gone on since: what
    /// comes is its tick.
    pub(crate) ticks: bool,
}

/// Waiting threads, numbered inside.
pub type WaitingThreads = BTreeMap<u32, Waiting>;

impl Waiting {
    fn registers(&self) -> Message {
        let mut regs = Message::default();
        for (field, value) in [DI, SI, DX, R10, R8, R9, SP].into_iter().zip(&self.call[1..8]) {
            regs.set_varint(field, *value);
        }
        regs
    }

    /// The same since `before` a stop of ours, if the call ends at an absolute time and so was made
    /// anew as it is: a stop makes a wait look as if it had just begun.
    pub fn dated(self, before: Option<&Waiting>) -> Waiting {
        let is_absolute = || matches!(timeout_of(self.call[0], &self.registers()), Some(Timeout::Absolute { .. }));
        let earlier = before.filter(|before| before.call == self.call && is_absolute());
        Waiting { since_ns: earlier.map_or(self.since_ns, |before| before.since_ns.min(self.since_ns)), ..self }
    }

    /// Whether the thread was found frozen in the same call.
    fn in_same(&self, nr: u64, regs: &Message) -> bool {
        let r = |f| regs.number(f);
        self.call == [nr, r(DI), r(SI), r(DX), r(R10), r(R8), r(R9), r(SP)]
    }
}

/// The record of when the wait ends that a thread stands in, if we began its call anew. `read`
/// reads the thread's memory.
fn record(nr: u64, regs: &Message, read: &dyn Fn(u64, &mut [u8]) -> bool) -> Option<End> {
    let r = |f| regs.number(f);
    ends::of(&[nr, r(DI), r(SI), r(DX), r(R10), r(R8), r(R9), r(SP)], read)
}

/// When the call of a thread that runs ends by its own time-out; none if it has none. `read` reads
/// the thread's memory, whose CLOCK_MONOTONIC is `ahead_ns` ahead of the machine's.
pub fn live_due(
    thread: u32,
    waiting: &Waiting,
    now: Now,
    ahead_ns: i64,
    absolute: &mut AbsoluteWaits,
    read: &dyn Fn(u64, &mut [u8]) -> bool,
) -> Option<Due> {
    let regs = waiting.registers();
    if let Some(end) = record(waiting.call[0], &regs, read) {
        let at_ns = end.at_ns.max(now.monotonic_ns.saturating_add(1));
        let timeout = timeout_of(waiting.call[0], &regs);
        let monotonic = timeout.is_none_or(|timeout| is_monotonic(waiting.call[0], &regs, &timeout));
        return Some(Due { source: Source::Call, at_ns, every_ns: Some(end.whole_ns), monotonic });
    }
    let time = |address: u64, unit: i64| {
        let mut bytes = [0u8; 16];
        let half = |bytes: &[u8; 16], at: usize| i64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        read(address, &mut bytes)
            .then(|| half(&bytes, 0).saturating_mul(SECOND).saturating_add(half(&bytes, 8).saturating_mul(unit)))
    };
    let waited = (now.monotonic_ns - waiting.since_ns).max(0);
    let timeout = timeout_of(waiting.call[0], &regs)?;
    let monotonic = is_monotonic(waiting.call[0], &regs, &timeout);
    let (left, whole) = match timeout {
        Timeout::Absolute { address, clock } => {
            let until_ns = time(address, 1)?;
            let left = now.inside(ahead_ns).left(clock, until_ns)?;
            (left, absolute.whole(thread, until_ns, left.saturating_add(waited)))
        }
        Timeout::Millis { value, .. } => (value as i64 * 1_000_000 - waited, value as i64 * 1_000_000),
        Timeout::Constant { address, .. } | Timeout::Slept { address, .. } | Timeout::Updated { address } => {
            let whole = time(address, 1)?;
            (whole - waited, whole)
        }
        Timeout::UpdatedTimeval { address } => {
            let whole = time(address, 1000)?;
            (whole - waited, whole)
        }
    };
    let at_ns = now.monotonic_ns.saturating_add(left.max(1));
    (whole > 0).then_some(Due { source: Source::Call, at_ns, every_ns: Some(whole), monotonic })
}

/// Mends one thread's registers and notes its time-out.
pub(crate) fn finalize_thread(
    thread: u32,
    regs: &mut Message,
    now: Now,
    since: Option<Waiting>,
    frozen: &Frozen<'_>,
    clocks: &mut Clocks,
) -> FinalizedThread {
    let orig = regs.number(ORIG_AX);
    if orig as i64 >= 0 && regs.number(AX) == EINTR {
        // CRIU left the thread behind its call with EINTR: put it back onto the call.
        let mut nr = orig;
        if nr == RESTART_SYSCALL {
            nr = number_before(thread, regs.number(IP), frozen).unwrap_or(nr);
        }
        regs.set_varint(AX, nr);
        regs.set_varint(IP, regs.number(IP) - 2);
        finalize_call(thread, nr, regs, now, since, frozen, clocks);
        return FinalizedThread { changed: true, waits: true, ticks: false };
    }
    if let Some(waited) = since.filter(|w| w.in_same(orig, regs))
        && timeout_of(orig, regs).is_some()
        && ended_by_time_out(orig, regs.number(AX))
        && let Some(due) = live_due(thread, &waited, now, clocks.ahead_ns, &mut clocks.absolute, &|address, bytes| {
            (frozen.read)(thread, address, bytes)
        })
        && due.every_ns.is_some_and(|every_ns| every_ns < LONGEST_TICK_NS)
    {
        clocks.dues.push(Due { at_ns: now.monotonic_ns, ..due });
        return FinalizedThread { changed: false, waits: false, ticks: true };
    }
    let mut code = [0u8; 2];
    let ip = regs.number(IP);
    let on_call =
        orig as i64 >= 0 && regs.number(AX) == orig && (frozen.read)(thread, ip, &mut code) && code == [0x0f, 0x05];
    let changed = on_call && finalize_call(thread, orig, regs, now, since, frozen, clocks);
    FinalizedThread { changed, waits: on_call, ticks: false }
}

/// A thread that the kernel itself had restarted shows `restart_syscall`; the number is in the
/// `mov eax, imm32` that precedes the `syscall` instruction in every libc.
fn number_before(thread: u32, ip: u64, frozen: &Frozen<'_>) -> Option<u64> {
    let mut code = [0u8; 7];
    let readable = (frozen.read)(thread, ip.checked_sub(7)?, &mut code);
    (readable && code[0] == 0xb8 && code[5..] == [0x0f, 0x05])
        .then(|| u64::from(u32::from_le_bytes(code[1..5].try_into().expect("4 bytes"))))
}

/// Gives a call with a relative time-out one of ours; true if registers changed.
fn finalize_call(
    thread: u32,
    nr: u64,
    regs: &mut Message,
    now: Now,
    since: Option<Waiting>,
    frozen: &Frozen<'_>,
    clocks: &mut Clocks,
) -> bool {
    let end = record(nr, regs, &|address, bytes| (frozen.read)(thread, address, bytes));
    if let Some(word) = ends::lock_word(nr, &[DI, SI, DX, R10, R8, R9].map(|field| regs.number(field))) {
        clocks.words.push((thread, word));
    }
    let since = since.filter(|w| w.in_same(nr, regs));
    let waited = since.map_or(0, |w| (now.monotonic_ns - w.since_ns).max(0));
    if let Some(sending) = ends::socket_call(nr) {
        return finalize_socket(thread, sending, regs, now, Waited { ns: waited, end }, frozen, clocks);
    }
    let Some(timeout) = timeout_of(nr, regs) else { return false };
    let monotonic = is_monotonic(nr, regs, &timeout);
    let seconds_and = |address: u64, unit: i64| -> Option<i64> {
        let mut bytes = [0u8; 16];
        (frozen.read)(thread, address, &mut bytes).then(|| {
            let half = |at: usize| i64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
            half(0).saturating_mul(SECOND).saturating_add(half(8).saturating_mul(unit))
        })
    };
    // What the kernel has left in the program's memory was left when the thread was interrupted.
    let ago = (now.monotonic_ns - (frozen.still_ns)(thread).unwrap_or(frozen.interrupted_ns)).max(0);
    let from_now = |left: i64| (left - ago, left.saturating_add(waited));
    let found = match timeout {
        Timeout::Absolute { address, clock } => {
            let until = seconds_and(address, 1);
            let left = |until_ns| Some((until_ns, now.inside(clocks.ahead_ns).left(clock, until_ns)?));
            if let Some((until_ns, left)) = until.and_then(left) {
                let whole_ns = clocks.absolute.whole(thread, until_ns, left.saturating_add(waited));
                let left = Left { ns: left.max(1), every_ns: whole_ns.max(1) };
                push_due(&mut clocks.dues, Source::Call, now, left, monotonic);
            }
            return false;
        }
        Timeout::Millis { value, .. } => Some((value as i64 * 1_000_000 - waited, value as i64 * 1_000_000)),
        Timeout::Constant { address, .. } => seconds_and(address, 1).map(|whole| (whole - waited, whole)),
        Timeout::Slept { remainder, .. } => seconds_and(remainder, 1).map(from_now),
        Timeout::Updated { address } => seconds_and(address, 1).map(from_now),
        Timeout::UpdatedTimeval { address } => seconds_and(address, 1000).map(from_now),
    };
    let found = end.map(|end| (end.at_ns - now.monotonic_ns, end.whole_ns)).or(found);
    let Some((left, whole)) = found.filter(|(_, whole)| *whole > 0) else { return false };
    let left = left.clamp(0, whole);
    let (form, address) = match timeout {
        Timeout::Millis { exchange: Exchange::Poll, .. } if frozen.own_filters => (Form::Millis, u64::from(DX)),
        Timeout::Millis { .. } if frozen.own_filters => (Form::Millis, u64::from(R10)),
        Timeout::Updated { address } if end.is_none() => (Form::Timespec, address),
        Timeout::UpdatedTimeval { address } => (Form::Timeval, address),
        _ => (Form::Record, ends::place(regs.number(SP))),
    };
    if form == Form::Record {
        point(regs, &timeout, address);
    }
    clocks.patches.push(Patch { thread, address, left_ns: left, whole_ns: whole, form, goes_on: !monotonic });
    push_due(&mut clocks.dues, Source::Call, now, Left { ns: left.max(1), every_ns: whole }, monotonic);
    form == Form::Record
}

/// Whether the kernel counts a call's time-out on CLOCK_MONOTONIC: all but absolute ones of another
/// clock, and relative ones of clock_nanosleep(2) on a clock other than CLOCK_REALTIME, which only
/// says how an absolute one is to be understood.
fn is_monotonic(nr: u64, regs: &Message, timeout: &Timeout) -> bool {
    match timeout {
        Timeout::Absolute { clock, .. } => clocks_on_monotonic(*clock),
        _ if nr == CLOCK_NANOSLEEP => regs.number(DI) == 0 || clocks_on_monotonic(regs.number(DI)),
        _ => true,
    }
}

/// CLOCK_MONOTONIC, _RAW and _COARSE.
fn clocks_on_monotonic(clock: u64) -> bool {
    matches!(clock, 1 | 4 | 6)
}

/// Lets a call take its time-out from a struct timespec at `address`.
fn point(regs: &mut Message, timeout: &Timeout, address: u64) {
    match timeout {
        Timeout::Constant { pointer, .. } | Timeout::Slept { pointer, .. } => regs.set_varint(*pointer, address),
        Timeout::Millis { exchange: Exchange::Poll, .. } => {
            regs.set_varint(AX, 271);
            regs.set_varint(DX, address);
            regs.set_varint(R10, 0);
            regs.set_varint(R8, 0);
        }
        Timeout::Millis { exchange, .. } => {
            regs.set_varint(AX, 441);
            regs.set_varint(R10, address);
            if matches!(exchange, Exchange::EpollWait) {
                regs.set_varint(R8, 0);
                regs.set_varint(R9, 0);
            }
        }
        // An updated one with a record is at its place already.
        Timeout::Absolute { .. } | Timeout::Updated { .. } | Timeout::UpdatedTimeval { .. } => {}
    }
}

/// How long a call has waited, nanoseconds, and its end if an earlier sleep has noted one.
#[derive(Clone, Copy)]
struct Waited {
    ns: i64,
    end: Option<End>,
}

/// Notes what is left of a socket's own time-out, if the descriptor is a socket and has one, and
/// marks the call; true if it did.
fn finalize_socket(
    thread: u32,
    sending: bool,
    regs: &mut Message,
    now: Now,
    waited: Waited,
    frozen: &Frozen<'_>,
    clocks: &mut Clocks,
) -> bool {
    let descriptor = regs.number(DI);
    let Ok(socket) = (frozen.take)(thread, descriptor as i32) else { return false };
    let option = if sending { Which::Send } else { Which::Recv };
    let Ok(Some(whole)) = socket_timeout(socket.as_fd(), option) else { return false };
    let whole_ns = i64::try_from(whole.as_nanos()).unwrap_or(i64::MAX);
    let left_ns = waited.end.map_or(whole_ns - waited.ns, |end| end.at_ns - now.monotonic_ns).clamp(1, whole_ns);
    let (call, fd) = (regs.number(ORIG_AX), descriptor as i32);
    // A filter of the program's own may check a descriptor, and our mark with it.
    let record = (!frozen.own_filters).then(|| ends::place(regs.number(SP)));
    clocks.sockets.push(SocketPatch { thread, call, fd, sending, whole_ns, left_ns, record });
    push_due(&mut clocks.dues, Source::Call, now, Left { ns: left_ns, every_ns: whole_ns }, true);
    if record.is_some() {
        regs.set_varint(DI, ends::marked(descriptor));
    }
    record.is_some()
}

/// Whether a time-out has passed at `now`, and before the packet came for which the program is
/// woken: it is given a packet that came in time, however long the wake took.
pub fn is_over(patch: &Patch, clocks: &Clocks, now: Now) -> bool {
    patch.left_ns <= clocks.packet_ns.unwrap_or(i64::MAX).min(now.monotonic_ns) - clocks.frozen_ns
}

/// When the wait of a patch ends.
pub fn end_of(patch: &Patch, clocks: &Clocks) -> End {
    let whole_ns = if patch.whole_ns > 0 { patch.whole_ns } else { patch.left_ns.max(1) };
    End { at_ns: clocks.frozen_ns + patch.left_ns, whole_ns }
}

/// What the wake writes for a patch at `now`: what is left, never less than the least that is not
/// "do not wait".
fn patch_bytes(patch: &Patch, clocks: &Clocks, now: Now) -> Vec<u8> {
    let left = patch.left_ns - (now.monotonic_ns - clocks.frozen_ns);
    let unit = match patch.form {
        Form::Record => return ends::encode(left, end_of(patch, clocks), patch.address).to_vec(),
        Form::Timespec => 1,
        Form::Timeval => 1000,
        Form::Millis => return Vec::new(),
    };
    let left = left.max(unit);
    // Rounded up: early is never allowed.
    let left = left.saturating_add(unit - 1) / unit * unit;
    [left / SECOND, left % SECOND / unit].iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// What is left of a time-out in milliseconds at `now`, rounded up: early is never allowed.
fn millis_left(patch: &Patch, clocks: &Clocks, now: Now) -> u64 {
    let left = (patch.left_ns - (now.monotonic_ns - clocks.frozen_ns)).max(0) as u64;
    left.div_ceil(1_000_000)
}

/// Fills in what is left of a time-out at `now`, or that nothing is once its wait has `ended`, for
/// a thread that stands still; one whose time-out is in a register must be traced by the caller.
///
/// # Errors
/// ESRCH when the thread has died or is not ours; EFAULT for memory that is not there any more.
pub fn fill(tid: u32, patch: &Patch, clocks: &Clocks, now: Now, ended: bool) -> io::Result<()> {
    match patch.form {
        Form::Record | Form::Millis if ended => Ok(()),
        Form::Millis => {
            let mut registers = trace::get_general(tid)?;
            // The fields of the images are in the kernel's order.
            registers[(patch.address as u32 - R15) as usize] = millis_left(patch, clocks, now);
            trace::set_general(tid, &registers)
        }
        // What the kernel tells the program is left.
        Form::Timespec | Form::Timeval if ended => write_memory(tid, patch.address, &[0; 16]),
        _ => write_memory(tid, patch.address, &patch_bytes(patch, clocks, now)),
    }
}

/// Sets the registers with time-outs in milliseconds in the images to what is left at `now`.
///
/// # Errors
/// An image is missing or damaged.
pub fn advance_millis(images: &mut Images, clocks: &Clocks, now: Now) -> Result<(), CheckpointImageError> {
    for patch in clocks.patches.iter().filter(|patch| patch.form == Form::Millis) {
        let mut image = images.image(&format!("core-{}.img", patch.thread))?;
        let damaged = image.damaged();
        for core in &mut image.entries {
            core.edit_messages::<Malformed>(core_entry::THREAD_INFO, |info| {
                info.edit_messages::<Malformed>(thread_info_x86::GPREGS, |regs| {
                    regs.set_varint(patch.address as u32, millis_left(patch, clocks, now));
                    Ok(())
                })
            })
            .map_err(&damaged)?;
        }
        images.put(&image);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: Frozen<'_> = Frozen {
        read: &|_, _, _| false,
        take: &|_, _| Err(io::ErrorKind::NotFound.into()),
        arrived: 0,
        waiting: &|_| crate::frozen::Pending { own: 0, shared: 0 },
        timers_read_ns: &|_| None,
        interrupted_ns: i64::MAX,
        still_ns: &|_| None,
        ahead_ns: 0,
        absolute: &AbsoluteWaits(BTreeMap::new()),
        stands: false,
        own_filters: false,
        quiescent: true,
    };

    fn live(waiting: &Waiting, now: Now, ahead_ns: i64, read: &dyn Fn(u64, &mut [u8]) -> bool) -> Option<Due> {
        live_due(1, waiting, now, ahead_ns, &mut AbsoluteWaits::default(), read)
    }

    fn waiting(nr: u64, fd: u64) -> Message {
        let mut regs = Message::default();
        for (field, value) in [(AX, EINTR), (ORIG_AX, nr), (IP, 0x1002), (SP, 0x7000), (DI, fd)] {
            regs.set_varint(field, value);
        }
        regs
    }

    #[test]
    fn a_socket_s_own_time_out_is_noted() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_read_timeout(Some(std::time::Duration::from_millis(1500))).unwrap();
        let take = |_, fd| match fd {
            5 => Ok(socket.try_clone()?.into()),
            _ => Err(io::ErrorKind::NotFound.into()),
        };
        let frozen = Frozen { take: &take, ..NOTHING };
        let now = Now { monotonic_ns: 10 * SECOND, realtime_ns: 0, boottime_ns: 0 };
        let since = Waiting { since_ns: 9 * SECOND, call: [45, 5, 0, 0, 0, 0, 0, 0x7000] };
        let mut clocks = Clocks::default();
        // One that has a time-out, one whose descriptor is gone, one that sends.
        for regs in [&mut waiting(45, 5), &mut waiting(45, 6), &mut waiting(44, 5)] {
            assert!(finalize_thread(3, regs, now, Some(since), &frozen, &mut clocks).waits);
            assert_eq!(regs.number(IP), 0x1000);
        }
        let (whole_ns, left_ns, record) = (1_500_000_000, 500_000_000, Some(ends::place(0x7000)));
        let patch = SocketPatch { thread: 3, call: 45, fd: 5, sending: false, whole_ns, left_ns, record };
        assert_eq!(clocks.sockets, [patch]);
        assert_eq!(clocks.dues[0].at_ns, now.monotonic_ns + left_ns);
        assert!(clocks.patches.is_empty());
        // Begun anew a moment ago, and waiting since long before that.
        let end = End { at_ns: 10 * SECOND + 200_000_000, whole_ns };
        let bytes = ends::encode(1, end, ends::place(0x7000));
        let read = |_, address, buffer: &mut [u8]| {
            buffer.copy_from_slice(&bytes[..buffer.len()]);
            address == ends::place(0x7000)
        };
        let frozen = Frozen { take: &take, read: &read, ..NOTHING };
        let mut again = waiting(45, ends::marked(5));
        let mut clocks = Clocks::default();
        finalize_thread(3, &mut again, now, None, &frozen, &mut clocks);
        assert_eq!((clocks.sockets[0].fd, clocks.sockets[0].left_ns), (5, 200_000_000));
    }

    /// The kernel has written what is left over the whole time of a sleep(3), and has put it beside
    /// that of a nanosleep(2).
    #[test]
    fn what_the_kernel_says_is_left_of_a_sleep_is_left() {
        let now = Now { monotonic_ns: 10 * SECOND, realtime_ns: 0, boottime_ns: 0 };
        let read = |_, address: u64, buffer: &mut [u8]| {
            buffer.fill(0);
            buffer[0] = if address == 0x8000 { 2 } else { 30 };
            true
        };
        let frozen = Frozen { read: &read, interrupted_ns: 9 * SECOND, ..NOTHING };
        for (remainder, left) in [(0x8000, SECOND), (0x9000, 29 * SECOND), (0, 25 * SECOND)] {
            let mut regs = waiting(35, 0x9000);
            regs.set_varint(SI, remainder);
            let call = [35, 0x9000, remainder, 0, 0, 0, 0, 0x7000];
            let since = Waiting { since_ns: 5 * SECOND, call };
            let mut clocks = Clocks { frozen_ns: now.monotonic_ns, ..Clocks::default() };
            finalize_thread(3, &mut regs, now, Some(since), &frozen, &mut clocks);
            assert_eq!(clocks.patches[0].left_ns, left, "{remainder:#x}");
            assert_eq!((regs.number(DI), regs.number(SI)), (ends::place(0x7000), remainder));
        }
    }

    // promise waking: a thread whose time-out passes while the proc is frozen has a tick, and is
    //   not at work
    #[test]
    fn a_time_out_that_passes_in_the_freeze_is_a_tick() {
        let now = Now { monotonic_ns: 10 * SECOND, realtime_ns: 0, boottime_ns: 0 };
        // poll(2) of 50 ms, which has just ended by that, by an event, and as before but by a
        // thread that has gone on since.
        for (returned, sp, ticks) in [(0, 0x7000, true), (1, 0x7000, false), (0, 0x6000, false)] {
            let mut regs = waiting(7, 4);
            for (field, value) in [(AX, returned), (IP, 0x1002), (DX, 50), (SP, sp)] {
                regs.set_varint(field, value);
            }
            let since = Waiting { since_ns: now.monotonic_ns - 50_000_000, call: [7, 4, 0, 50, 0, 0, 0, 0x7000] };
            let mut clocks = Clocks::default();
            let found = finalize_thread(3, &mut regs, now, Some(since), &NOTHING, &mut clocks);
            assert_eq!(found, FinalizedThread { changed: false, waits: false, ticks }, "{returned} {sp:#x}");
            assert_eq!((regs.number(AX), regs.number(IP)), (returned, 0x1002), "its call is over");
            let due = ticks.then_some((now.monotonic_ns, Some(50_000_000)));
            assert_eq!(clocks.dues.first().map(|due| (due.at_ns, due.every_ns)), due);
        }
        for (call, ax, ended) in
            [(202, -110i64, true), (202, 0, false), (455, -110, true), (128, -11, true), (35, 0, true), (232, 3, false)]
        {
            assert_eq!(ended_by_time_out(call, ax as u64), ended, "{call} {ax}");
        }
    }

    // promise waking: a select(2) that goes on tells the program what is left
    /// What the program goes by after a select is what the kernel has written to the program's own
    /// time-out.
    #[test]
    fn a_select_keeps_its_own_time_out() {
        let now = Now { monotonic_ns: 10 * SECOND, realtime_ns: 0, boottime_ns: 0 };
        let read = |_, _, buffer: &mut [u8]| {
            buffer.fill(0);
            buffer[0] = 2;
            true
        };
        let frozen = Frozen { read: &read, interrupted_ns: 10 * SECOND - 1, ..NOTHING };
        for (call, form, fraction) in [(23, Form::Timeval, 999_999i64), (270, Form::Timespec, 999_999_998)] {
            let mut regs = waiting(call, 4);
            regs.set_varint(AX, call);
            regs.set_varint(R8, 0x8000);
            let mut clocks = Clocks { frozen_ns: now.monotonic_ns, ..Clocks::default() };
            finalize_call(3, call, &mut regs, now, None, &frozen, &mut clocks);
            let patch = clocks.patches[0];
            assert_eq!((patch.address, patch.left_ns, patch.form), (0x8000, 2 * SECOND - 1, form));
            assert_eq!((regs.number(R8), regs.number(AX)), (0x8000, call));
            let later = Now { monotonic_ns: 10 * SECOND + 1_001, ..now };
            let bytes = patch_bytes(&patch, &clocks, later);
            assert_eq!(bytes[..8], 1i64.to_le_bytes());
            // Microseconds are rounded up.
            let expected = if form == Form::Timeval { fraction } else { fraction - 1_000 };
            assert_eq!(bytes[8..], expected.to_le_bytes());
        }
    }

    #[test]
    fn a_stop_does_not_shorten_an_absolute_wait() {
        let wait = |since_ns, second| Waiting { since_ns, call: [202, 1, second, 3, 0x8000, 5, 6, 0x9000] };
        let (absolute, relative) = (9, 0);
        assert_eq!(wait(99, absolute).dated(Some(&wait(40, absolute))).since_ns, 40);
        assert_eq!(wait(99, absolute).dated(None).since_ns, 99);
        assert_eq!(wait(99, absolute).dated(Some(&wait(40, 11))).since_ns, 99, "another call");
        assert_eq!(wait(99, relative).dated(Some(&wait(40, relative))).since_ns, 99, "it has a record of its end");
        // A wait of 70 s until second 110 that is looked at three times, each time as if it had
        // just begun: in a running program, then in two that are frozen.
        let read = |_, _, buffer: &mut [u8]| {
            buffer.fill(0);
            buffer[0] = 110;
            true
        };
        let now = |second: i64| Now { monotonic_ns: second * SECOND, realtime_ns: 0, boottime_ns: 0 };
        let mut waits = AbsoluteWaits::default();
        let seen = wait(40 * SECOND, 9);
        let due = live_due(3, &seen, now(50), 0, &mut waits, &|at, bytes| read(3, at, bytes)).unwrap();
        assert_eq!((due.at_ns, due.every_ns), (110 * SECOND, Some(70 * SECOND)));
        for second in [80, 109] {
            let frozen = Frozen { read: &read, absolute: &waits, ..NOTHING };
            let mut clocks = Clocks { absolute: waits.clone(), ..Clocks::default() };
            let mut regs = waiting(202, 1);
            for (field, value) in [(SI, 9), (R10, 0x8000)] {
                regs.set_varint(field, value);
            }
            finalize_call(3, 202, &mut regs, now(second), None, &frozen, &mut clocks);
            assert_eq!(clocks.dues[0].every_ns, Some(70 * SECOND), "{second}");
            let mut other = Clocks { absolute: clocks.absolute.clone(), ..Clocks::default() };
            finalize_call(4, 202, &mut regs, now(second), None, &frozen, &mut other);
            assert_eq!(other.dues[0].every_ns, Some((110 - second) * SECOND), "another thread");
        }
    }

    #[test]
    fn absolute_time_outs_are_due_on_their_clocks() {
        let now = Now { monotonic_ns: 100 * SECOND, realtime_ns: 50 * SECOND, boottime_ns: 200 * SECOND };
        let read = |_, _, buffer: &mut [u8]| {
            buffer.fill(0);
            buffer[0] = 110;
            true
        };
        let frozen = Frozen { read: &read, ..NOTHING };
        let due = |nr: u64, si: u64, r8: u64| {
            let mut regs = waiting(nr, 4);
            for (field, value) in [(SI, si), (R10, 0x8000), (R8, r8)] {
                regs.set_varint(field, value);
            }
            let mut clocks = Clocks::default();
            assert!(!finalize_call(3, nr, &mut regs, now, None, &frozen, &mut clocks), "it stays as it is");
            clocks.dues.first().map(|due| due.at_ns / SECOND)
        };
        assert_eq!((due(202, 9, 0), due(202, 9 | 256, 0)), (Some(110), Some(160)), "FUTEX_WAIT_BITSET");
        assert_eq!((due(202, 6, 0), due(202, 13, 0)), (Some(160), Some(110)), "FUTEX_LOCK_PI, FUTEX_LOCK_PI2");
        assert_eq!((due(202, 11, 0), due(202, 1, 0)), (Some(110), None), "FUTEX_WAIT_REQUEUE_PI, FUTEX_WAKE");
        assert_eq!((due(449, 0, 1), due(449, 0, 0)), (Some(110), Some(160)), "futex_waitv");
        let mut regs = waiting(455, 4);
        for (field, value) in [(R8, 0x8000), (R9, 1)] {
            regs.set_varint(field, value);
        }
        let mut clocks = Clocks::default();
        finalize_call(3, 455, &mut regs, now, None, &frozen, &mut clocks);
        assert_eq!(clocks.dues[0].at_ns, 110 * SECOND, "futex_wait");
        assert_eq!((due(242, 0, 0x8000), due(243, 0, 0)), (Some(160), None), "mq_timedsend, mq_receive");
    }

    #[test]
    fn a_live_call_s_end_is_known() {
        let now = Now { monotonic_ns: 10 * SECOND, realtime_ns: 0, boottime_ns: 0 };
        let nothing = |_: u64, _: &mut [u8]| false;
        let wait = |call: [u64; 8]| Waiting { since_ns: 9 * SECOND, call };
        let due = live(&wait([232, 5, 0x7000, 64, 3000, 0, 0, 0x7000]), now, 0, &nothing).unwrap();
        assert_eq!((due.at_ns, due.every_ns), (12 * SECOND, Some(3 * SECOND)));
        assert_eq!(live(&wait([232, 5, 0x7000, 64, u64::MAX, 0, 0, 0x7000]), now, 0, &nothing), None);
        assert_eq!(live(&wait([0, 5, 0, 0, 0, 0, 0, 0x7000]), now, 0, &nothing), None, "a read has none");
        let two_seconds = |address: u64, bytes: &mut [u8]| {
            bytes.fill(0);
            bytes[0] = 2;
            address == 0x8000
        };
        let due = live(&wait([271, 0, 0, 0x8000, 0, 0, 8, 0x7000]), now, 0, &two_seconds).unwrap();
        assert_eq!(due.at_ns, 11 * SECOND, "what the kernel has not written back yet is the whole");
        // clock_nanosleep(2) until second 2 of a clock that stood for 9 s.
        let until = |clock: u64| live(&wait([230, clock, 1, 0x8000, 0, 0, 0, 0x7000]), now, -9 * SECOND, &two_seconds);
        let due = until(1).unwrap();
        assert_eq!((due.at_ns, due.monotonic), (11 * SECOND, true));
        assert_eq!(
            until(0).map(|due| (due.at_ns, due.monotonic)),
            Some((12 * SECOND, false)),
            "the other clock is at 0"
        );
        let relative = |clock: u64| live(&wait([230, clock, 0, 0x8000, 0, 0, 0, 0x7000]), now, 0, &two_seconds);
        let on_monotonic = [0, 1, 7].map(|clock| relative(clock).unwrap().monotonic);
        assert_eq!(on_monotonic, [true, true, false], "relative, CLOCK_REALTIME is counted on CLOCK_MONOTONIC");
        assert_eq!(live(&wait([271, 0, 0, 0x9000, 0, 0, 8, 0x7000]), now, 0, &two_seconds), None, "unreadable");
    }

    #[test]
    fn one_that_runs_does_not_wait() {
        let now = Now { monotonic_ns: SECOND, realtime_ns: 0, boottime_ns: 0 };
        let found = |regs: &mut Message, code: [u8; 2]| {
            let read = |_, _, buffer: &mut [u8]| {
                buffer.copy_from_slice(&code[..buffer.len()]);
                true
            };
            let frozen = Frozen { read: &read, ..NOTHING };
            finalize_thread(1, regs, now, None, &frozen, &mut Clocks::default()).waits
        };
        let syscall = [0x0f, 0x05];
        assert!(found(&mut waiting(45, 5), syscall), "interrupted");
        let with = |ax: u64, orig: u64| {
            let mut regs = waiting(45, 5);
            regs.set_varint(AX, ax);
            regs.set_varint(ORIG_AX, orig);
            regs
        };
        assert!(found(&mut with(45, 45), syscall), "to be made again");
        assert!(!found(&mut with(45, 45), [0x90, 0x90]), "45 bytes were received");
        assert!(!found(&mut with(7, 45), syscall), "7 bytes were received");
        assert!(!found(&mut with(EINTR, u64::MAX), syscall), "in no call");
    }

    #[test]
    fn an_interrupted_epoll_wait_goes_back_onto_its_call() {
        let mut regs = Message::default();
        for (field, value) in [(AX, EINTR), (ORIG_AX, 232), (IP, 0x1002), (SP, 0x7000), (R10, 1500), (DI, 5)] {
            regs.set_varint(field, value);
        }
        let now = Now { monotonic_ns: 10 * SECOND, realtime_ns: 0, boottime_ns: 0 };
        let mut clocks = Clocks { frozen_ns: now.monotonic_ns, ..Clocks::default() };
        let mut call = [0; 8];
        (call[0], call[1], call[4], call[7]) = (232, 5, 1500, 0x7000);
        let waiting = Waiting { since_ns: 9 * SECOND, call };
        let mut other = regs.clone();
        assert!(finalize_thread(3, &mut regs, now, Some(waiting), &NOTHING, &mut clocks).changed);
        assert_eq!((regs.number(AX), regs.number(IP), regs.number(DI)), (441, 0x1000, 5));
        let address = regs.number(R10);
        let (left_ns, whole_ns, form) = (500_000_000, 1_500_000_000, Form::Record);
        assert_eq!(clocks.patches, [Patch { thread: 3, address, left_ns, whole_ns, form, goes_on: false }]);
        assert_eq!(clocks.dues[0].at_ns, now.monotonic_ns + 500_000_000);
        assert_eq!(clocks.dues[0].every_ns, Some(1_500_000_000));
        // Seen in another call just before: it has only begun to wait.
        let earlier = Waiting { call: [202, 0, 0, 0, 0, 0, 0, 0x7000], ..waiting };
        let mut anew = Clocks::default();
        assert!(finalize_thread(3, &mut other, now, Some(earlier), &NOTHING, &mut anew).changed);
        assert_eq!(anew.patches[0].left_ns, 1_500_000_000);
        let later = Now { monotonic_ns: 10 * SECOND + 200_000_000, ..now };
        assert_eq!(patch_bytes(&clocks.patches[0], &clocks, later)[8..16], 300_000_000i64.to_le_bytes());
        // Due in the past: fires at once, never "do not wait", never for ever.
        let late = Now { monotonic_ns: 60 * SECOND, ..now };
        assert_eq!(patch_bytes(&clocks.patches[0], &clocks, late)[8..16], 1i64.to_le_bytes());
    }

    #[test]
    fn an_endless_wait_is_only_mended() {
        let mut regs = Message::default();
        for (field, value) in [(AX, EINTR), (ORIG_AX, 232), (IP, 0x1002), (SP, 0x7000), (R10, u64::from(u32::MAX))] {
            regs.set_varint(field, value);
        }
        let now = Now { monotonic_ns: SECOND, realtime_ns: 0, boottime_ns: 0 };
        let mut clocks = Clocks::default();
        assert!(finalize_thread(1, &mut regs, now, None, &NOTHING, &mut clocks).changed);
        assert_eq!((regs.number(AX), regs.number(IP)), (232, 0x1000));
        assert!(clocks.patches.is_empty() && clocks.dues.is_empty());
    }
}
