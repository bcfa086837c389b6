//! Compression of blocks and chunks, and which is used for what. What does not get smaller is
//! stored as it is.
//!
//! Owns the choice of codecs and levels; the figures behind it are in
//! docs/design/2026-11-22-archive.md, made by `benches/codec.rs`. Only what was authenticated is
//! ever unpacked.

use zstd::bulk::{Compressor, Decompressor};

/// The level of zstd for everything that is uploaded.
pub const LEVEL: i32 = 3;

/// How bytes are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    /// As they are.
    Plain = 0,
    /// Zstandard.
    Zstd = 1,
}

/// Packs, keeping what that needs.
pub(crate) struct Packer {
    zstd: Compressor<'static>,
    out: Vec<u8>,
}

impl std::fmt::Debug for Packer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Packer")
    }
}

impl Packer {
    pub(crate) fn new() -> Packer {
        Packer { zstd: Compressor::new(LEVEL).expect("the level is one of zstd's"), out: Vec::new() }
    }

    /// Packs; what would not become smaller by a sixteenth is left as it is.
    pub(crate) fn pack<'a>(&'a mut self, codec: Codec, bytes: &'a [u8]) -> (Codec, &'a [u8]) {
        let length = match codec {
            Codec::Plain => None,
            Codec::Zstd => {
                self.out.resize(zstd::zstd_safe::compress_bound(bytes.len()), 0);
                self.zstd.compress_to_buffer(bytes, &mut self.out[..]).ok()
            }
        };
        match length {
            Some(length) if length + bytes.len() / 16 < bytes.len() => (codec, &self.out[..length]),
            _ => (Codec::Plain, bytes),
        }
    }
}

/// Unpacks, keeping what that needs.
pub(crate) struct Unpacker(Decompressor<'static>);

impl std::fmt::Debug for Unpacker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Unpacker")
    }
}

impl Unpacker {
    pub(crate) fn new() -> Unpacker {
        Unpacker(Decompressor::new().expect("zstd needs memory only"))
    }

    /// Unpacks to exactly `length` bytes, or not at all.
    pub(crate) fn unpack(&mut self, codec: u8, bytes: &[u8], length: usize) -> Option<Vec<u8>> {
        let mut out = vec![0; length];
        let found = match codec {
            c if c == Codec::Plain as u8 => return (bytes.len() == length).then(|| bytes.to_vec()),
            c if c == Codec::Zstd as u8 => self.0.decompress_to_buffer(bytes, &mut out[..]).ok()?,
            _ => return None,
        };
        (found == length).then_some(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bytes_come_back(seed: Vec<u8>, times in 1usize..40, codec in 0u8..2) {
            let bytes = seed.repeat(times);
            let wanted = [Codec::Plain, Codec::Zstd][usize::from(codec)];
            let mut packer = Packer::new();
            let (used, packed) = packer.pack(wanted, &bytes);
            prop_assert!(packed.len() <= bytes.len());
            prop_assert_eq!(Unpacker::new().unpack(used as u8, packed, bytes.len()), Some(bytes.clone()));
            if !bytes.is_empty() {
                prop_assert_eq!(Unpacker::new().unpack(used as u8, packed, bytes.len() - 1), None);
            }
        }
    }

    #[test]
    fn what_does_not_get_smaller_stays() {
        let noise: [u8; 4096] = crate::ids::random();
        assert_eq!(Packer::new().pack(Codec::Zstd, &noise).0, Codec::Plain);
        assert_eq!(Packer::new().pack(Codec::Zstd, &[7; 4096]).0, Codec::Zstd);
        assert_eq!(Unpacker::new().unpack(9, b"x", 1), None);
    }
}
