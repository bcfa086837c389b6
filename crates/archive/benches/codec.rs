//! How small and how fast the memory of a real process gets: codecs, levels and chunk sizes, and
//! sealing and hashing beside them.
//!
//! `cargo bench -p kip-archive --bench codec -- PID..` reads the private writable memory of those
//! processes (16 MiB of each at most, zero pages left out) and prints one line per measurement: all
//! rounds interleaved, medians with the lowest and highest. It changes nothing and keeps nothing.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::time::Instant;

const PAGE: usize = 4096;
const MOST: usize = 16 << 20;
const ROUNDS: usize = 3;

/// The pages of a process that it alone can write, without those that are zeros.
fn memory_of(pid: u32) -> Vec<u8> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("a process, and the right to read it");
    let mem = File::open(format!("/proc/{pid}/mem")).expect("the right to read it");
    let mut bytes = Vec::new();
    for line in maps.lines() {
        let mut fields = line.split_whitespace();
        let (range, mode) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
        let Some((start, end)) = range.split_once('-').filter(|_| mode.starts_with("rw") && mode.ends_with('p')) else {
            continue;
        };
        let number = |text| u64::from_str_radix(text, 16).expect("an address");
        let mut page = [0; PAGE];
        for at in (number(start)..number(end)).step_by(PAGE) {
            let is_there = mem.read_exact_at(&mut page, at).is_ok() && page.iter().any(|byte| *byte != 0);
            if is_there && bytes.len() < MOST {
                bytes.extend_from_slice(&page);
            }
        }
    }
    bytes
}

/// What is measured: packs a chunk into the buffer; unpacks it again.
enum What {
    Zstd(i32),
    Lz4,
    Aes,
    Chacha,
    Blake3,
}

impl What {
    fn name(&self) -> String {
        match self {
            What::Zstd(level) => format!("zstd {level}"),
            What::Lz4 => "lz4".into(),
            What::Aes => "aes-256-gcm".into(),
            What::Chacha => "chacha20-poly1305".into(),
            What::Blake3 => "blake3 keyed, 4 KiB".into(),
        }
    }

    /// Bytes packed, seconds to pack, seconds to unpack.
    fn run(&self, bytes: &[u8], chunk: usize) -> (usize, f64, f64) {
        let chunks = || bytes.chunks(chunk);
        let since = Instant::now();
        match self {
            What::Zstd(level) => {
                let mut to = zstd::bulk::Compressor::new(*level).expect("a level");
                let packed: Vec<_> = chunks().map(|c| (to.compress(c).expect("memory"), c.len())).collect();
                let packing = since.elapsed().as_secs_f64();
                let mut from = zstd::bulk::Decompressor::new().expect("memory");
                let mut out = vec![0; chunk];
                let since = Instant::now();
                for (c, _) in &packed {
                    from.decompress_to_buffer(c, &mut out).expect("just packed");
                }
                // What gets no smaller by a sixteenth is kept as it is.
                let size =
                    |(c, length): &(Vec<u8>, usize)| if c.len() + length / 16 < *length { c.len() } else { *length };
                (packed.iter().map(size).sum(), packing, since.elapsed().as_secs_f64())
            }
            What::Lz4 => {
                let packed: Vec<_> =
                    chunks().map(|c| (lz4::block::compress(c, None, false).expect("it fits"), c.len())).collect();
                let packing = since.elapsed().as_secs_f64();
                let mut out = vec![0; chunk];
                let since = Instant::now();
                for (c, length) in &packed {
                    lz4::block::decompress_to_buffer(c, Some(*length as i32), &mut out).expect("just packed");
                }
                let size =
                    |(c, length): &(Vec<u8>, usize)| if c.len() + length / 16 < *length { c.len() } else { *length };
                (packed.iter().map(size).sum(), packing, since.elapsed().as_secs_f64())
            }
            What::Aes | What::Chacha => {
                use ring::aead::{AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
                let cipher = if matches!(self, What::Aes) { &AES_256_GCM } else { &CHACHA20_POLY1305 };
                let key = LessSafeKey::new(UnboundKey::new(cipher, &[7; 32]).expect("32 bytes"));
                let nonce = || Nonce::assume_unique_for_key([0; 12]);
                let mut buffer = vec![0; chunk];
                let since = Instant::now();
                for c in chunks() {
                    buffer[..c.len()].copy_from_slice(c);
                    let tag = key.seal_in_place_separate_tag(nonce(), Aad::empty(), &mut buffer[..c.len()]);
                    assert!(tag.is_ok(), "short");
                }
                (bytes.len(), since.elapsed().as_secs_f64(), f64::NAN)
            }
            What::Blake3 => {
                let mut sum = 0;
                for page in bytes.chunks(PAGE) {
                    sum ^= blake3::keyed_hash(&[7; 32], page).as_bytes()[0];
                }
                (
                    {
                        std::hint::black_box(sum);
                        bytes.len()
                    },
                    since.elapsed().as_secs_f64(),
                    f64::NAN,
                )
            }
        }
    }
}

fn spread(mut samples: Vec<f64>) -> String {
    samples.sort_by(f64::total_cmp);
    format!("{:7.0} ({:.0}..{:.0})", samples[samples.len() / 2], samples[0], samples[samples.len() - 1])
}

fn main() {
    let pids: Vec<u32> = std::env::args().filter_map(|argument| argument.parse().ok()).collect();
    if pids.is_empty() {
        println!("memory of processes is not measured: say of which, as numbers");
    }
    for pid in pids {
        let bytes = memory_of(pid);
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        println!("{}: {} pages that are not zeros, {ROUNDS} rounds", name.trim(), bytes.len() / PAGE);
        println!("what, chunk: share of the bytes; MB/s to pack and to unpack, median (lowest..highest)");
        let all = [
            What::Lz4,
            What::Zstd(-3),
            What::Zstd(1),
            What::Zstd(3),
            What::Zstd(6),
            What::Zstd(9),
            What::Aes,
            What::Chacha,
            What::Blake3,
        ];
        for chunk in [PAGE, 16 * PAGE, 32 * PAGE, 64 * PAGE] {
            let mut samples = vec![Vec::new(); all.len()];
            for _ in 0..ROUNDS {
                for (what, samples) in all.iter().zip(&mut samples) {
                    samples.push(what.run(&bytes, chunk));
                }
            }
            for (what, samples) in all.iter().zip(samples) {
                let speed = |pick: fn(&(usize, f64, f64)) -> f64| {
                    spread(samples.iter().map(|sample| bytes.len() as f64 / 1e6 / pick(sample)).collect())
                };
                let share = samples[0].0 as f64 / bytes.len().max(1) as f64;
                println!(
                    "{:20} {:4} KiB: {:5.3} {} {}",
                    what.name(),
                    chunk >> 10,
                    share,
                    speed(|s| s.1),
                    speed(|s| s.2)
                );
            }
        }
    }
}
