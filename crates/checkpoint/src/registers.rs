//! A thread's registers and signal mask, from CRIU's image of it to what ptrace takes.
//!
//! Owns the translation only; [`crate::resume`] sets them. What cannot be carried over faithfully
//! gives none, and the caller leaves the process to CRIU. Sources: CRIU's images/core.proto and
//! core-x86.proto; the XSAVE area, Intel SDM volume 1, chapter 13.

use kip_criu_images::fields::{
    core_entry, task_core_entry, thread_core_entry, thread_info_x86, user_desc_t, user_x86_cet_entry,
    user_x86_fpregs_entry, user_x86_regs_entry, user_x86_xsave_entry,
};
use kip_criu_images::{Malformed, Message};
use kip_sys::trace::XsaveLayout;
use serde::{Deserialize, Serialize};

/// All of a thread that only a tracer can set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registers {
    /// The 27 general registers in the order of [`kip_sys::trace::GENERAL`]. orig_rax is -1: the
    /// images say already where an interrupted call begins again, so the kernel shall not.
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
    Component { number: 2, field: user_x86_xsave_entry::YMMH_SPACE, element: 4 },
    Component { number: 3, field: user_x86_xsave_entry::BNDREG_STATE, element: 8 },
    Component { number: 4, field: user_x86_xsave_entry::BNDCSR_STATE, element: 8 },
    Component { number: 5, field: user_x86_xsave_entry::OPMASK_REG, element: 8 },
    Component { number: 6, field: user_x86_xsave_entry::ZMM_UPPER, element: 8 },
    Component { number: 7, field: user_x86_xsave_entry::HI16_ZMM, element: 8 },
    Component { number: PKRU, field: user_x86_xsave_entry::PKRU, element: 4 },
];

/// The numbers at the beginning of the area: field of `user_x86_fpregs_entry`, offset, bytes.
const LEGACY: [(u32, usize, usize); 8] = [
    (user_x86_fpregs_entry::CWD, 0, 2),
    (user_x86_fpregs_entry::SWD, 2, 2),
    (user_x86_fpregs_entry::TWD, 4, 2),
    (user_x86_fpregs_entry::FOP, 6, 2),
    (user_x86_fpregs_entry::RIP, 8, 8),
    (user_x86_fpregs_entry::RDP, 16, 8),
    (user_x86_fpregs_entry::MXCSR, 24, 4),
    (user_x86_fpregs_entry::MXCSR_MASK, 28, 4),
];

/// The registers in a thread's `core_entry`.
///
/// None if we could not set them as they were: no x86_64 thread, one of 32 bits or with segments of
/// its own, with a shadow stack, or with registers that this processor lacks.
///
/// # Errors
/// [`Malformed`] when an inner message is not one.
pub fn read(core: &Message) -> Result<Option<Registers>, Malformed> {
    const X86_64: u64 = 1;
    let Some(layout) = kip_sys::trace::xsave_layout() else { return Ok(None) };
    let is_ours = core.number(core_entry::MTYPE) == X86_64;
    let Some(info) = core.message(core_entry::THREAD_INFO)?.filter(|_| is_ours) else { return Ok(None) };
    let general = info.message(thread_info_x86::GPREGS)?.as_ref().and_then(general);
    let Some(general) = general else { return Ok(None) };
    for segment in info.messages(thread_info_x86::TLS)? {
        // An empty slot of the thread's descriptor table says "not present".
        if segment.varint(user_desc_t::SEG_NOT_PRESENT) == Some(0) {
            return Ok(None);
        }
    }
    let Some(state) = info.message(thread_info_x86::FPREGS)? else { return Ok(None) };
    let Some(floating) = floating(&state, &layout)? else { return Ok(None) };
    let thread = core.message(core_entry::THREAD_CORE)?;
    let of_thread = thread.and_then(|thread| thread.varint(thread_core_entry::BLK_SIGSET));
    let process = core.message(core_entry::TC)?;
    let of_process = process.and_then(|process| process.varint(task_core_entry::BLK_SIGSET));
    let Some(blocked) = of_thread.or(of_process) else { return Ok(None) };
    Ok(Some(Registers { general, floating, blocked }))
}

/// From `user_x86_regs_entry`: CRIU's order, which has orig_rax and what follows where the kernel
/// has them, too.
fn general(entry: &Message) -> Option<Vec<u64>> {
    const NATIVE: u64 = 1;
    if entry.varint(user_x86_regs_entry::MODE).unwrap_or(NATIVE) != NATIVE {
        return None;
    }
    let all = (user_x86_regs_entry::R15..).take(kip_sys::trace::GENERAL);
    let mut registers = all.map(|field| entry.varint(field)).collect::<Option<Vec<u64>>>()?;
    registers[ORIG_RAX] = u64::MAX;
    Some(registers)
}

/// From `user_x86_fpregs_entry`. The bytes that the kernel's own software uses (464 to 511) stay
/// zero: it reads them in signal frames only.
fn floating(state: &Message, layout: &XsaveLayout) -> Result<Option<Vec<u8>>, Malformed> {
    let Some(xsave) = state.message(user_x86_fpregs_entry::XSAVE)? else { return Ok(None) };
    if let Some(shadow_stack) = xsave.message(user_x86_xsave_entry::CET)?
        && (shadow_stack.number(user_x86_cet_entry::CET) != 0 || shadow_stack.number(user_x86_cet_entry::SSP) != 0)
    {
        return Ok(None);
    }
    let st = elements(state, user_x86_fpregs_entry::ST_SPACE, 4)?;
    let xmm = elements(state, user_x86_fpregs_entry::XMM_SPACE, 4)?;
    if st.len() != 128 || xmm.len() != 256 || layout.size < HEADER.end {
        return Ok(None);
    }
    let mut area = vec![0u8; layout.size];
    let mut put = |at: usize, bytes: &[u8]| area[at..at + bytes.len()].copy_from_slice(bytes);
    for (field, at, len) in LEGACY {
        put(at, &state.number(field).to_le_bytes()[..len]);
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
    let used = xsave.number(user_x86_xsave_entry::XSTATE_BV);
    if used & !held != 0 {
        // Something was in use that CRIU does not know, such as AMX tiles.
        return Ok(None);
    }
    // What is unused begins in its first state. Of these three the image has the values in any
    // case, and for protection keys the first state, all allowed, is not what the kernel gives to
    // programs.
    let used = used | (1 << X87 | 1 << SSE | 1 << PKRU) & held;
    put(HEADER.start, &used.to_le_bytes());
    Ok(Some(area))
}

/// A repeated number's bytes in memory, `element` bytes each.
fn elements(message: &Message, field: u32, element: usize) -> Result<Vec<u8>, Malformed> {
    let numbers = message.varints(field)?;
    Ok(numbers.iter().flat_map(|n| n.to_le_bytes().into_iter().take(element)).collect())
}

/// The XSAVE area in a plan: its size and those of its words that are not 0, for nearly all of them
/// are.
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
    use kip_criu_images::FieldValue;
    use proptest::prelude::*;

    fn message(fields: impl IntoIterator<Item = (u32, FieldValue)>) -> FieldValue {
        FieldValue::Bytes(Message(fields.into_iter().collect()).encode())
    }

    fn repeated(field: u32, bytes: &[u8], element: usize) -> Vec<(u32, FieldValue)> {
        bytes
            .chunks(element)
            .map(|c| {
                let mut word = [0; 8];
                word[..c.len()].copy_from_slice(c);
                (field, FieldValue::Varint(u64::from_le_bytes(word)))
            })
            .collect()
    }

    /// What CRIU would write of an area, as far as it knows its components.
    fn fpregs(area: &[u8], layout: &XsaveLayout) -> Vec<(u32, FieldValue)> {
        let number = |at: usize, len: usize| {
            let mut word = [0; 8];
            word[..len].copy_from_slice(&area[at..at + len]);
            FieldValue::Varint(u64::from_le_bytes(word))
        };
        let mut xsave = vec![(user_x86_xsave_entry::XSTATE_BV, number(512, 8))];
        for c in COMPONENTS {
            if let Some((offset, size)) = layout.component(c.number) {
                xsave.extend(repeated(c.field, &area[offset..offset + size], c.element));
            }
        }
        let cet = [user_x86_cet_entry::CET, user_x86_cet_entry::SSP].map(|field| (field, FieldValue::Varint(0)));
        xsave.push((user_x86_xsave_entry::CET, message(cet)));
        let mut all: Vec<(u32, FieldValue)> =
            [(1, 0, 2), (2, 2, 2), (3, 4, 2), (4, 6, 2), (5, 8, 8), (6, 16, 8), (7, 24, 4), (8, 28, 4)]
                .map(|(field, at, len)| (field, number(at, len)))
                .into();
        all.extend(repeated(user_x86_fpregs_entry::ST_SPACE, &area[32..160], 4));
        all.extend(repeated(user_x86_fpregs_entry::XMM_SPACE, &area[160..416], 4));
        all.push((user_x86_fpregs_entry::XSAVE, message(xsave)));
        all
    }

    fn core(fpregs: Vec<(u32, FieldValue)>) -> Message {
        let regs = (1..=27)
            .map(|n| (n, FieldValue::Varint(u64::from(n))))
            .chain([(user_x86_regs_entry::MODE, FieldValue::Varint(1))]);
        let info = vec![
            (thread_info_x86::GPREGS, message(regs)),
            (thread_info_x86::FPREGS, message(fpregs)),
            (thread_info_x86::TLS, message([(user_desc_t::SEG_NOT_PRESENT, FieldValue::Varint(1))])),
        ];
        Message(vec![
            (core_entry::MTYPE, FieldValue::Varint(1)),
            (core_entry::THREAD_INFO, message(info)),
            (core_entry::TC, message([(task_core_entry::BLK_SIGSET, FieldValue::Varint(7))])),
            (core_entry::THREAD_CORE, message([(thread_core_entry::BLK_SIGSET, FieldValue::Varint(u64::MAX))])),
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
        core.remove(core_entry::THREAD_CORE);
        assert_eq!(read(&core).unwrap().unwrap().blocked, 7);
        core.remove(core_entry::TC);
        assert_eq!(read(&core).unwrap(), None);
    }

    #[test]
    fn what_cannot_be_set_is_none() {
        let layout = kip_sys::trace::xsave_layout().unwrap();
        let whole = core(fpregs(&vec![0u8; layout.size], &layout));
        assert!(read(&whole).unwrap().is_some());
        let edited = |edit: &dyn Fn(&mut Message)| {
            let mut core = whole.clone();
            core.edit_messages::<Malformed>(core_entry::THREAD_INFO, |info| {
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
        let none = |path: &[u32], edit: &dyn Fn(&mut Message), what: &str| {
            assert!(edited(&|info| inner(info, path, edit)).is_none(), "{what}");
        };
        let general = [thread_info_x86::GPREGS];
        none(&general, &|m| m.set_varint(user_x86_regs_entry::MODE, 2), "32 bits");
        none(&general, &|m| m.remove(user_x86_regs_entry::IP), "no address");
        none(&[thread_info_x86::TLS], &|m| m.set_varint(user_desc_t::SEG_NOT_PRESENT, 0), "a segment");
        let xsave = [thread_info_x86::FPREGS, user_x86_fpregs_entry::XSAVE];
        let shadow_stack = [xsave[0], xsave[1], user_x86_xsave_entry::CET];
        none(&shadow_stack, &|m| m.set_varint(user_x86_cet_entry::CET, 1), "a shadow stack");
        none(&xsave, &|m| m.set_varint(user_x86_xsave_entry::XSTATE_BV, 1 << 18), "a tile");
        let floating = [thread_info_x86::FPREGS];
        none(&floating, &|m| m.remove(user_x86_fpregs_entry::XSAVE), "no XSAVE");
        none(&floating, &|m| m.0.push((user_x86_fpregs_entry::XMM_SPACE, FieldValue::Varint(0))), "65 words");
        let mut other = whole.clone();
        other.set_varint(core_entry::MTYPE, 3);
        assert!(read(&other).unwrap().is_none(), "another architecture");
        let mut broken = whole.clone();
        broken.set_bytes(core_entry::THREAD_INFO, vec![0x12, 9]);
        assert!(read(&broken).is_err());
    }
}
