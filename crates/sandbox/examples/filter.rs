//! Prints the system call filter as it is kept for later: `cargo run -p kip-sandbox --example
//! filter > crates/sandbox/filters/N.bpf`, or with `light` after it that of light sandboxes, or
//! with `table` their calls as `docs/light.md` has them.

use kip_sandbox::seccomp::{code, light};
use kip_types::spec::FilterKind;
use std::io::Write as _;

fn main() -> std::io::Result<()> {
    let bytes = match std::env::args().nth(1).as_deref() {
        Some("light") => code(FilterKind::Light),
        Some("table") => light::table().into_bytes(),
        _ => code(FilterKind::Default),
    };
    std::io::stdout().write_all(&bytes)
}
