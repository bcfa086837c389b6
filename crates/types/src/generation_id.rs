//! The file in which a program sees that it is a clone: what a virtual machine's generation id is
//! to a guest.

/// Below the root of each proc.
pub const PATH: &str = "run/kip/generation-id";

/// Bytes of what is drawn for each id.
pub const DRAWN: usize = 16;

/// The line of a proc that is no clone: a count in 16 hexadecimal digits, which is higher in what
/// is copied from it, a space, and 32 digits that no other has.
pub fn first(drawn: [u8; DRAWN]) -> String {
    line(1, drawn)
}

/// That of a clone of a proc with the line `source`, or of one that goes back to it; the same
/// length, so that a program that has mapped it finds it where it was. None for a line that is
/// none: what a program has put there is its own.
pub fn next(source: &str, drawn: [u8; DRAWN]) -> Option<String> {
    let (count, rest) = source.strip_suffix('\n')?.split_once(' ')?;
    let is_ours = is_hex(count, 16) && is_hex(rest, 32);
    is_ours.then(|| line(u64::from_str_radix(count, 16).unwrap_or(0).wrapping_add(1), drawn))
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn line(count: u64, drawn: [u8; DRAWN]) -> String {
    format!("{count:016x} {:032x}\n", u128::from_be_bytes(drawn))
}

/// Whether this is all of a machine-id(5).
pub fn is_machine_id(text: &str) -> bool {
    text.strip_suffix('\n').is_some_and(|id| is_hex(id, 32))
}

/// A line of /etc/machine-id, machine-id(5).
pub fn machine_id(drawn: [u8; DRAWN]) -> String {
    // Version and variant of a random UUID, as systemd-machine-id-setup(1) draws it.
    let bits = u128::from_be_bytes(drawn);
    let uuid = bits & !(0xf << 76) & !(0x3 << 62) | 0x4 << 76 | 0x2 << 62;
    format!("{uuid:032x}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_rises_and_the_rest_is_drawn() {
        let source = first([1; DRAWN]);
        assert_eq!(source, format!("0000000000000001 {}\n", "01".repeat(16)));
        let clone = next(&source, [2; DRAWN]).unwrap();
        assert_eq!(clone, format!("0000000000000002 {}\n", "02".repeat(16)));
        assert_eq!(next(&clone, [0; DRAWN]).map(|line| line.len()), Some(source.len()));
        let upper = source.replace("01", "0A");
        for other in ["", "x", "1 1\n", &source[1..], source.trim_end(), &upper, &format!("{source}\n")] {
            assert_eq!(next(other, [3; DRAWN]), None, "{other:?}");
        }
        let last = source.replace("0000000000000001", "ffffffffffffffff");
        assert!(next(&last, [3; DRAWN]).unwrap().starts_with("0000000000000000 "));
    }

    #[test]
    fn a_machine_id_is_a_random_uuid() {
        assert_eq!(machine_id([0xff; DRAWN]), "ffffffffffff4fffbfffffffffffffff\n");
        assert_eq!(machine_id([0; DRAWN]), "00000000000040008000000000000000\n");
        assert!(is_machine_id(&machine_id([7; DRAWN])));
        assert!(["", "\n", "uninitialized\n", &"a".repeat(32)].iter().all(|text| !is_machine_id(text)));
    }
}
