//! A few instructions in a process's vdso by which a thread that makes calls for a tracer finds
//! back by itself.
//!
//! A tracer that makes a thread call for it has replaced the thread's registers and blocked its
//! signals. If the tracer dies at that moment the kernel lets the thread run on. So the calls are
//! made by the `syscall` instruction at the start of these instructions, and what follows it puts
//! mask and registers back and jumps to where the thread was. A thread that the tracer has stopped
//! behind the call never runs that part: the tracer sets the registers itself.
//!
//! The instructions and the registers lie in the padding behind the vdso's image, which every
//! process has, may execute and needs for nothing. The kernel gives the process a copy of that page
//! when it is written to, as it does for a debugger's breakpoint. Nothing that the instructions use
//! changes the flags, and no stack is needed.

use crate::trace::GENERAL;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::OnceLock;

/// Places in a set of general registers, in the order of the processor's numbers: rax rcx rdx rbx
/// rsp rbp rsi rdi r8 to r15.
const BY_NUMBER: [usize; 16] = [10, 11, 12, 5, 19, 4, 13, 14, 9, 8, 7, 6, 3, 2, 1, 0];
const RIP: usize = 16;
/// Bytes of the instructions, padded, and of the whole: registers, where to go on, and the mask
/// come behind them.
const CODE: usize = 160;
const WHOLE: usize = CODE + (16 + 2) * 8;
/// Length of the `syscall` instruction.
const SYSCALL: u64 = 2;

/// Where the instructions lie in a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stub {
    /// The `syscall` instruction.
    pub(crate) call: u64,
}

/// Places in this kernel's vdso, in bytes from its start; the same for every 64-bit process.
struct Places {
    syscall: Option<u64>,
    room: Option<u64>,
}

fn places() -> &'static Places {
    static PLACES: OnceLock<Places> = OnceLock::new();
    PLACES.get_or_init(|| {
        let Ok(image) = image() else { return Places { syscall: None, room: None } };
        let syscall = image.windows(2).position(|pair| pair == [0x0f, 0x05]).map(|at| at as u64);
        let used = image.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1).next_multiple_of(64);
        let room = (used + WHOLE <= image.len()).then_some(used as u64);
        Places { syscall, room }
    })
}

/// Our own vdso, whole.
fn image() -> io::Result<Vec<u8>> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let (start, end) = range(&maps).ok_or(io::ErrorKind::Unsupported)?;
    let mut image = vec![0u8; (end - start) as usize];
    std::fs::File::open("/proc/self/mem")?.read_exact_at(&mut image, start)?;
    Ok(image)
}

fn range(maps: &str) -> Option<(u64, u64)> {
    let line = maps.lines().find(|line| line.ends_with("[vdso]"))?;
    let (start, end) = line.split(' ').next()?.split_once('-')?;
    Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
}

/// Where the vdso of a process begins: proc_pid_maps(5).
///
/// # Errors
/// `NotFound` when the process has ended, `Unsupported` when it has none.
pub fn vdso_of(pid: u32) -> io::Result<u64> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let none = || io::Error::new(io::ErrorKind::Unsupported, format!("process {pid} has no vdso"));
    range(&maps).map(|(start, _)| start).ok_or_else(none)
}

/// Offset in bytes of a `syscall` instruction in this kernel's vdso, found in our own; none if
/// there is none.
pub fn syscall_offset() -> Option<u64> {
    places().syscall
}

impl Stub {
    /// Writes it into the process of a thread that we trace, whose vdso begins at `vdso`: if
    /// nothing else happens the thread goes on with these registers and this mask. None: this
    /// kernel leaves no room or does not let us write there.
    pub(crate) fn write(tid: u32, vdso: u64, registers: &[u64; GENERAL], blocked: u64) -> Option<Stub> {
        let at = vdso + places().room?;
        let memory = std::fs::OpenOptions::new().write(true).open(format!("/proc/{tid}/mem")).ok()?;
        memory.write_all_at(&bytes(registers, blocked), at).ok()?;
        Some(Stub { call: at })
    }

    /// Behind the call: from here the thread goes back by itself.
    pub(crate) fn back(self) -> u64 {
        self.call + SYSCALL
    }
}

fn bytes(registers: &[u64; GENERAL], blocked: u64) -> Vec<u8> {
    let mut code: Vec<u8> = vec![0x0f, 0x05];
    // The distance of a place from the end of the instruction that ends with the four bytes which
    // tell it.
    let far = |code: &mut Vec<u8>, place: usize| {
        let distance = (place - (code.len() + 4)) as i32;
        code.extend(distance.to_le_bytes());
    };
    let (place_of_rip, place_of_mask) = (CODE + 16 * 8, CODE + 17 * 8);
    // mov eax, 14 (rt_sigprocmask); mov edi, 2 (SIG_SETMASK); lea rsi, [mask]
    code.extend([0xb8, 14, 0, 0, 0, 0xbf, 2, 0, 0, 0, 0x48, 0x8d, 0x35]);
    far(&mut code, place_of_mask);
    // mov edx, 0; mov r10d, 8; syscall
    code.extend([0xba, 0, 0, 0, 0, 0x41, 0xba, 8, 0, 0, 0, 0x0f, 0x05]);
    for number in 0..16u8 {
        // mov register, [its place]
        code.extend([0x48 | (number >> 3) << 2, 0x8b, (number & 7) << 3 | 5]);
        far(&mut code, CODE + usize::from(number) * 8);
    }
    // jmp [rip's place]
    code.extend([0xff, 0x25]);
    far(&mut code, place_of_rip);
    assert!(code.len() <= CODE, "the instructions are {} bytes", code.len());
    code.resize(CODE, 0xcc);
    let words = BY_NUMBER.map(|index| registers[index]).into_iter().chain([registers[RIP], blocked]);
    code.extend(words.flat_map(u64::to_le_bytes));
    code
}
