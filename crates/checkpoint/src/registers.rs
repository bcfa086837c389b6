//! A thread's registers and signal mask, from CRIU's image of it to what ptrace takes.
//!
//! Owns the translation only; [`crate::resume`] sets them. What cannot be carried over faithfully gives none, and the
//! caller leaves the process to CRIU. Sources: CRIU's images/core.proto and core-x86.proto; the XSAVE area, Intel SDM
//! volume 1, chapter 13.

use crate::wire::{Malformed, Message};
use kip_sys::trace::XsaveLayout;
use serde::{Deserialize, Serialize};

/// All of a thread that only a tracer can set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registers {
    /// The 27 general registers in the order of [`kip_sys::trace::GENERAL`]. orig_rax is -1: the images say already
    /// where an interrupted call begins again, so the kernel shall not.
    pub general: Vec<u64>,
    /// The XSAVE area in the standard format, as long as this machine's kernel wants it.
    #[serde(with = "sparse")]
    pub floating: Vec<u8>,
    /// Blocked signals, signal N as bit N - 1.
    pub blocked: u64,
}

/// `general[ORIG_RAX]` in the order of `struct user_regs_struct`.
const ORIG_RAX: usize = 15;

/// Where the XSAVE area's header begins and ends, in bytes.
const HEADER: std::ops::Range<usize> = 512..576;

/// Components of the area by their numbers: the two legacy ones and the one of protection keys.
const X87: usize = 0;
const SSE: usize = 1;
const PKRU: usize = 9;

/// A component in the area and in CRIU's message of it.
struct Component {
    number: usize,
    /// The field of `user_x86_xsave_entry`.
    field: u32,
    /// Bytes of one of its elements.
    element: usize,
}

const COMPONENTS: [Component; 7] = [
    Component { number: 2, field: 2, element: 4 },
    Component { number: 3, field: 3, element: 8 },
    Component { number: 4, field: 4, element: 8 },
    Component { number: 5, field: 5, element: 8 },
    Component { number: 6, field: 6, element: 8 },
    Component { number: 7, field: 7, element: 8 },
    Component { number: PKRU, field: 8, element: 4 },
];

/// The registers in a thread's `core_entry`.
///
/// None if we could not set them as they were: no x86_64 thread, one of 32 bits or with segments of its own, with a
/// shadow stack, or with registers that this processor lacks.
///
/// # Errors
/// [`Malformed`] when an inner message is not one.
pub fn read(core: &Message) -> Result<Option<Registers>, Malformed> {
    const X86_64: u64 = 1;
    let Some(layout) = kip_sys::trace::xsave_layout() else { return Ok(None) };
    let Some(info) = core.message(2)?.filter(|_| core.number(1) == X86_64) else { return Ok(None) };
    let Some(general) = info.message(2)?.as_ref().and_then(general) else { return Ok(None) };
    for segment in info.messages(4)? {
        // An empty slot of the thread's descriptor table says "not present".
        if segment.varint(9) == Some(0) {
            return Ok(None);
        }
    }
    let Some(state) = info.message(3)? else { return Ok(None) };
    let Some(floating) = floating(&state, &layout)? else { return Ok(None) };
    let of_thread = core.message(5)?.and_then(|thread| thread.varint(6));
    let of_process = core.message(3)?.and_then(|process| process.varint(5));
    let Some(blocked) = of_thread.or(of_process) else { return Ok(None) };
    Ok(Some(Registers { general, floating, blocked }))
}

/// From `user_x86_regs_entry`: CRIU's order, which has orig_rax and what follows where the kernel has them, too.
fn general(entry: &Message) -> Option<Vec<u64>> {
    const MODE: u32 = 28;
    const NATIVE: u64 = 1;
    if entry.varint(MODE).unwrap_or(NATIVE) != NATIVE {
        return None;
    }
    let mut registers = (1..=kip_sys::trace::GENERAL as u32).map(|n| entry.varint(n)).collect::<Option<Vec<u64>>>()?;
    registers[ORIG_RAX] = u64::MAX;
    Some(registers)
}

/// From `user_x86_fpregs_entry`. The bytes that the kernel's own software uses (464 to 511) stay zero: it looks at them
/// in signal frames only.
fn floating(state: &Message, layout: &XsaveLayout) -> Result<Option<Vec<u8>>, Malformed> {
    let Some(xsave) = state.message(13)? else { return Ok(None) };
    if let Some(shadow_stack) = xsave.message(9)?
        && (shadow_stack.number(1) != 0 || shadow_stack.number(2) != 0)
    {
        return Ok(None);
    }
    let (st, xmm) = (elements(state, 9, 4)?, elements(state, 10, 4)?);
    if st.len() != 128 || xmm.len() != 256 || layout.size < HEADER.end {
        return Ok(None);
    }
    let mut area = vec![0u8; layout.size];
    let mut put = |at: usize, bytes: &[u8]| area[at..at + bytes.len()].copy_from_slice(bytes);
    // cwd, swd, twd, fop; the last instruction's and operand's addresses; MXCSR and its mask.
    for (field, at) in [(1, 0), (2, 2), (3, 4), (4, 6)] {
        put(at, &(state.number(field) as u16).to_le_bytes());
    }
    for (field, at) in [(5, 8), (6, 16)] {
        put(at, &state.number(field).to_le_bytes());
    }
    for (field, at) in [(7, 24), (8, 28)] {
        put(at, &(state.number(field) as u32).to_le_bytes());
    }
    put(32, &st);
    put(160, &xmm);

    let mut held = 1u64 << X87 | 1 << SSE;
    for component in COMPONENTS {
        let bytes = elements(&xsave, component.field, component.element)?;
        if bytes.is_empty() {
            continue;
        }
        match layout.component(component.number) {
            Some((offset, size)) if size == bytes.len() && offset + size <= layout.size => put(offset, &bytes),
            _ => return Ok(None),
        }
        held |= 1 << component.number;
    }
    let used = xsave.number(1);
    if used & !held != 0 {
        // Something was in use that CRIU does not know, such as AMX tiles.
        return Ok(None);
    }
    // What is unused begins in its first state. Of these three the image has the values in any case, and for
    // protection keys the first state, all allowed, is not what the kernel gives to programs.
    let used = used | (1 << X87 | 1 << SSE | 1 << PKRU) & held;
    put(HEADER.start, &used.to_le_bytes());
    Ok(Some(area))
}

/// A repeated number's bytes in memory, `element` bytes each.
fn elements(message: &Message, field: u32, element: usize) -> Result<Vec<u8>, Malformed> {
    let numbers = message.varints(field)?;
    Ok(numbers.iter().flat_map(|n| n.to_le_bytes().into_iter().take(element)).collect())
}

/// The XSAVE area in a plan: its size and those of its words that are not 0, for nearly all of them are.
mod sparse {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    const WORD: usize = 8;

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        let word = |chunk: &[u8]| {
            let mut word = [0; WORD];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_le_bytes(word)
        };
        let words: Vec<(usize, u64)> =
            bytes.chunks(WORD).map(word).enumerate().filter(|(_, word)| *word != 0).collect();
        (bytes.len(), words).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
        let (size, words): (usize, Vec<(usize, u64)>) = Deserialize::deserialize(deserializer)?;
        let mut bytes = vec![0; size.next_multiple_of(WORD)];
        for (at, word) in words {
            let place = bytes.get_mut(at * WORD..(at + 1) * WORD);
            place.ok_or_else(|| serde::de::Error::custom("outside"))?.copy_from_slice(&word.to_le_bytes());
        }
        bytes.truncate(size);
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Value;
    use proptest::prelude::*;

    fn message(fields: impl IntoIterator<Item = (u32, Value)>) -> Value {
        Value::Bytes(Message(fields.into_iter().collect()).encode())
    }

    fn repeated(field: u32, bytes: &[u8], element: usize) -> Vec<(u32, Value)> {
        bytes
            .chunks(element)
            .map(|c| {
                let mut word = [0; 8];
                word[..c.len()].copy_from_slice(c);
                (field, Value::Varint(u64::from_le_bytes(word)))
            })
            .collect()
    }

    /// What CRIU would write of an area, as far as it knows its components.
    fn fpregs(area: &[u8], layout: &XsaveLayout) -> Vec<(u32, Value)> {
        let number = |at: usize, len: usize| {
            let mut word = [0; 8];
            word[..len].copy_from_slice(&area[at..at + len]);
            Value::Varint(u64::from_le_bytes(word))
        };
        let mut xsave = vec![(1, number(512, 8))];
        for c in COMPONENTS {
            if let Some((offset, size)) = layout.component(c.number) {
                xsave.extend(repeated(c.field, &area[offset..offset + size], c.element));
            }
        }
        xsave.push((9, message([(1, Value::Varint(0)), (2, Value::Varint(0))])));
        let mut all: Vec<(u32, Value)> =
            [(1, 0, 2), (2, 2, 2), (3, 4, 2), (4, 6, 2), (5, 8, 8), (6, 16, 8), (7, 24, 4), (8, 28, 4)]
                .map(|(field, at, len)| (field, number(at, len)))
                .into();
        all.extend(repeated(9, &area[32..160], 4));
        all.extend(repeated(10, &area[160..416], 4));
        all.push((13, message(xsave)));
        all
    }

    fn core(fpregs: Vec<(u32, Value)>) -> Message {
        let regs = (1..=27).map(|n| (n, Value::Varint(u64::from(n)))).chain([(28, Value::Varint(1))]);
        let info = vec![(2, message(regs)), (3, message(fpregs)), (4, message([(9, Value::Varint(1))]))];
        Message(vec![
            (1, Value::Varint(1)),
            (2, message(info)),
            (3, message([(5, Value::Varint(7))])),
            (5, message([(6, Value::Varint(u64::MAX))])),
        ])
    }

    /// Puts the area into a thread and takes it out again.
    fn through_a_thread(area: &[u8]) -> Vec<u8> {
        use kip_sys::trace;
        let mut child = std::process::Command::new("/bin/cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        trace::seize(child.id()).unwrap();
        trace::interrupt(child.id()).unwrap();
        trace::wait_stopped(child.id()).unwrap();
        trace::set_floating(child.id(), area).unwrap();
        let back = trace::get_floating(child.id()).unwrap();
        trace::detach(child.id()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        back
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn the_kernel_takes_what_is_read(noise in proptest::collection::vec(any::<u8>(), 16 * 1024)) {
            let layout = kip_sys::trace::xsave_layout().expect("a processor of this century");
            let mut area = vec![0u8; layout.size];
            let mut fill = |from: usize, len: usize| area[from..from + len].copy_from_slice(&noise[from..from + len]);
            fill(8, 16);
            for register in 0..8 {
                fill(32 + 16 * register, 10);
            }
            fill(160, 256);
            let mut used = 3u64;
            // Bounds and protection keys have bits that must not be set.
            for c in COMPONENTS.iter().filter(|c| ![3, 4, PKRU].contains(&c.number)) {
                if let Some((offset, size)) = layout.component(c.number) {
                    fill(offset, size);
                    used |= 1 << c.number;
                }
            }
            if let Some((offset, _)) = layout.component(PKRU) {
                area[offset..offset + 4].copy_from_slice(&0x5555_5550u32.to_le_bytes());
                used |= 1 << PKRU;
            }
            area[..2].copy_from_slice(&0x37fu16.to_le_bytes());
            area[24..28].copy_from_slice(&0x1f80u32.to_le_bytes());
            area[28..32].copy_from_slice(&0xffffu32.to_le_bytes());
            area[512..520].copy_from_slice(&used.to_le_bytes());

            let registers = read(&core(fpregs(&area, &layout))).unwrap().unwrap();
            prop_assert_eq!(&registers.floating, &area);
            prop_assert_eq!(registers.blocked, u64::MAX);
            prop_assert_eq!(registers.general[..15].to_vec(), (1..=15).collect::<Vec<u64>>());
            prop_assert_eq!(registers.general[ORIG_RAX], u64::MAX);
            prop_assert_eq!(registers.general[16..].to_vec(), (17..=27).collect::<Vec<u64>>());

            let mut back = through_a_thread(&registers.floating);
            // The kernel's own words, not the thread's.
            back[464..512].fill(0);
            prop_assert_eq!(back, area);
        }
    }

    #[test]
    fn an_unused_component_needs_no_bit() {
        let layout = kip_sys::trace::xsave_layout().unwrap();
        let mut area = vec![0u8; layout.size];
        area[24..28].copy_from_slice(&0x1f80u32.to_le_bytes());
        let read = read(&core(fpregs(&area, &layout))).unwrap().unwrap();
        let used = u64::from_le_bytes(read.floating[512..520].try_into().unwrap());
        assert_eq!(used & !(1 << PKRU), 3);
    }

    #[test]
    fn the_process_s_mask_is_the_thread_s_if_it_has_none() {
        let layout = kip_sys::trace::xsave_layout().unwrap();
        let mut core = core(fpregs(&vec![0u8; layout.size], &layout));
        core.remove(5);
        assert_eq!(read(&core).unwrap().unwrap().blocked, 7);
        core.remove(3);
        assert_eq!(read(&core).unwrap(), None);
    }

    #[test]
    fn what_cannot_be_set_is_none() {
        let layout = kip_sys::trace::xsave_layout().unwrap();
        let whole = core(fpregs(&vec![0u8; layout.size], &layout));
        assert!(read(&whole).unwrap().is_some());
        let edited = |edit: &dyn Fn(&mut Message)| {
            let mut core = whole.clone();
            core.edit_messages::<Malformed>(2, |info| {
                edit(info);
                Ok(())
            })
            .unwrap();
            read(&core).unwrap()
        };
        let inner = |info: &mut Message, path: &[u32], edit: &dyn Fn(&mut Message)| {
            fn go(message: &mut Message, path: &[u32], edit: &dyn Fn(&mut Message)) {
                match path {
                    [] => edit(message),
                    [first, rest @ ..] => message
                        .edit_messages::<Malformed>(*first, |m| {
                            go(m, rest, edit);
                            Ok(())
                        })
                        .unwrap(),
                }
            }
            go(info, path, edit);
        };
        assert!(edited(&|info| inner(info, &[2], &|m| m.set_varint(28, 2))).is_none(), "32 bits");
        assert!(edited(&|info| inner(info, &[2], &|m| m.remove(17))).is_none(), "no address");
        assert!(edited(&|info| inner(info, &[4], &|m| m.set_varint(9, 0))).is_none(), "a segment");
        assert!(edited(&|info| inner(info, &[3, 13, 9], &|m| m.set_varint(1, 1))).is_none(), "a shadow stack");
        assert!(edited(&|info| inner(info, &[3, 13], &|m| m.set_varint(1, 1 << 18))).is_none(), "a tile");
        assert!(edited(&|info| inner(info, &[3], &|m| m.remove(13))).is_none(), "no XSAVE");
        assert!(edited(&|info| inner(info, &[3], &|m| m.0.push((10, Value::Varint(0))))).is_none(), "65 words");
        let mut other = whole.clone();
        other.set_varint(1, 3);
        assert!(read(&other).unwrap().is_none(), "another architecture");
        let mut broken = whole.clone();
        broken.set_bytes(2, vec![0x12, 9]);
        assert!(read(&broken).is_err());
    }
}
