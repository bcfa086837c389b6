//! The file in which a program sees that it is a clone: what a virtual machine's generation id is
//! to a guest.

/// Below the root of each proc.
pub const PATH: &str = "run/kip/generation-id";

/// Bytes of what is drawn for each id.
pub const DRAWN: usize = 16;

/// The line of a proc that is no clone: a count in 16 hexadecimal digits, which is higher in each
/// clone and after each rollback, a space, and 32 digits that no other has.
pub fn first(drawn: [u8; DRAWN]) -> String {
    line(1, drawn)
}

/// That of a clone of a proc with the line `source`, or of one that goes back to it; the same
/// length, so that a program that has mapped it finds it where it was.
pub fn next(source: &str, drawn: [u8; DRAWN]) -> String {
    let count = source.get(..16).and_then(|digits| u64::from_str_radix(digits, 16).ok()).unwrap_or(0);
    line(count.wrapping_add(1), drawn)
}

fn line(count: u64, drawn: [u8; DRAWN]) -> String {
    format!("{count:016x} {:032x}\n", u128::from_be_bytes(drawn))
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
        let clone = next(&source, [2; DRAWN]);
        assert_eq!(clone, format!("0000000000000002 {}\n", "02".repeat(16)));
        assert_eq!(next(&clone, [0; DRAWN]).len(), source.len());
        for damaged in ["", "x", "zzzzzzzzzzzzzzzz 1\n", "\u{e4}\u{e4}\u{e4}\u{e4}\u{e4}\u{e4}\u{e4}\u{e4}\u{e4}"] {
            assert!(next(damaged, [3; DRAWN]).starts_with("0000000000000001 "));
        }
        assert!(next("ffffffffffffffff ", [3; DRAWN]).starts_with("0000000000000000 "));
    }

    #[test]
    fn a_machine_id_is_a_random_uuid() {
        assert_eq!(machine_id([0xff; DRAWN]), "ffffffffffff4fffbfffffffffffffff\n");
        assert_eq!(machine_id([0; DRAWN]), "00000000000040008000000000000000\n");
    }
}
