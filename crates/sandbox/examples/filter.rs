//! Prints the system call filter as it is kept for later: `cargo run -p kip-sandbox --example
//! filter > crates/sandbox/filters/N.bpf`.

use std::io::Write as _;

fn main() -> std::io::Result<()> {
    std::io::stdout().write_all(&kip_sandbox::seccomp::code())
}
