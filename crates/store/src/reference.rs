//! How references look in a store: small values that are changed by compare-and-swap.
//!
//! A value lies behind one line that names the write it came from, a random number. So no two
//! writes are ever equal: a version cannot come back (S3's ETag is a hash of the content), and
//! after a lost answer the writer recognises its own value. Nothing here does I/O.

use bytes::{Bytes, BytesMut};
use std::fmt;

const MAGIC: &[u8] = b"kip reference 1 ";
/// Hex digits of a number.
const DIGITS: usize = 32;
const HEADER: usize = MAGIC.len() + DIGITS + 1;

/// The number of one write.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Nonce(u128);

impl Nonce {
    pub(crate) fn random() -> Nonce {
        Nonce(random(16).iter().fold(0, |number, byte| number << 8 | u128::from(*byte)))
    }
}

impl fmt::Debug for Nonce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Random bytes, 16 at most, from the kernel.
pub(crate) fn random(count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    let got = rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty());
    assert_eq!(got, Ok(count), "getrandom(2) gives up to 256 bytes at once");
    bytes
}

/// Which value of a reference was read or written. Only good for the next swap of the same
/// reference.
#[derive(Clone, PartialEq, Eq)]
pub struct Version {
    pub(crate) nonce: Nonce,
    /// What a bucket compares. None of a directory.
    pub(crate) e_tag: Option<String>,
    /// What Google's compares.
    pub(crate) number: Option<String>,
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Version({:?})", self.nonce)
    }
}

/// What is written for a value.
pub(crate) fn seal(nonce: Nonce, value: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(HEADER + value.len());
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(format!("{nonce:?}\n").as_bytes());
    bytes.extend_from_slice(value);
    bytes.freeze()
}

/// The value of what was read, and the write it came from; none if it is no reference.
pub(crate) fn unseal(bytes: &Bytes) -> Option<(Nonce, Bytes)> {
    let digits = bytes.strip_prefix(MAGIC)?.get(..DIGITS)?;
    let plain = digits.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    let number = u128::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok().filter(|_| plain)?;
    (bytes.get(HEADER - 1) == Some(&b'\n')).then(|| (Nonce(number), bytes.slice(HEADER..)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_comes_back_with_its_number() {
        for value in [&b""[..], b"x", b"kip reference 1 \n\0"] {
            let nonce = Nonce::random();
            assert_eq!(unseal(&seal(nonce, value)), Some((nonce, Bytes::copy_from_slice(value))));
        }
        assert_ne!(seal(Nonce::random(), b"x"), seal(Nonce::random(), b"x"));
    }

    #[test]
    fn anything_else_is_no_reference() {
        let good = seal(Nonce(0xabc), b"");
        for cut in 0..good.len() {
            assert_eq!(unseal(&good.slice(..cut)), None, "{cut}");
        }
        let with = |from: &str, to: &str| Bytes::from(String::from_utf8_lossy(&good).replace(from, to));
        for bad in [with("abc", "ABC"), with("reference 1", "reference 2"), with("\n", " "), with("000abc", "00+abc")] {
            assert_eq!(unseal(&bad), None, "{bad:?}");
        }
    }
}
