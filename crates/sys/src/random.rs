//! Random bytes of the kernel.

use rustix::rand::{GetRandomFlags, getrandom};

/// Bytes that no other draw gives: getrandom(2), Linux 3.17.
///
/// # Panics
/// For more than 256 bytes, which are not drawn at once.
pub fn drawn<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let count = getrandom(&mut bytes, GetRandomFlags::empty());
    assert_eq!(count, Ok(N), "getrandom(2) gives up to 256 bytes at once");
    bytes
}

#[cfg(test)]
mod tests {
    #[test]
    fn draws_differ() {
        assert_ne!(super::drawn::<16>(), super::drawn::<16>());
    }
}
