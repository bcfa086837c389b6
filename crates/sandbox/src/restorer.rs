//! The program that is pid 1 of a sandbox while that is restored (`restorer/restorer.c`): its bytes
//! and its place.
//!
//! Linked at an address where no program of a tenant's is, for it puts their memory back around
//! itself.

/// The program, static and freestanding.
pub const RESTORER: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kip-restore"));

/// Where it is linked.
pub const ADDRESS: u64 = 0x4a00_0000_0000;

/// The compiler's flags, blanks between them, e.g. for a restorer of a test's own.
pub const COMPILER_FLAGS: &str = env!("KIP_RESTORER_FLAGS");

/// The descriptor of the control socket.
pub const CONTROL_FD: i32 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    /// The lowest and the highest address of the segments that are loaded, from the program's
    /// header: elf(5).
    fn extent(elf: &[u8]) -> (u64, u64) {
        let word = |at: usize| u64::from_le_bytes(elf[at..at + 8].try_into().unwrap());
        let half = |at: usize| usize::from(u16::from_le_bytes(elf[at..at + 2].try_into().unwrap()));
        let headers = (0..half(56)).map(|n| word(32) as usize + n * half(54));
        let loaded = headers.filter(|at| elf[*at..*at + 4] == [1, 0, 0, 0]);
        loaded.fold((u64::MAX, 0), |(low, high), at| (low.min(word(at + 16)), high.max(word(at + 16) + word(at + 40))))
    }

    #[test]
    fn the_program_is_static_and_at_its_address() {
        assert!(RESTORER.starts_with(b"\x7fELF") && RESTORER[16] == 2, "an executable at a fixed address");
        let (low, high) = extent(RESTORER);
        assert_eq!(low, ADDRESS);
        assert!(high - low < 1 << 30, "{low:#x} to {high:#x}");
    }
}
