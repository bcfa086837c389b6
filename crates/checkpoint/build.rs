//! Compiles the shim that is preloaded into CRIU helpers (shim/shim.c) to a shared object that the
//! crate embeds.
use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=shim/shim.c");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("shim.so");
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-s", "-o"])
        .arg(&out)
        .args(["shim/shim.c", "-ldl"])
        .status()
        .expect("a C compiler named cc is on PATH");
    assert!(status.success(), "cc could not compile shim/shim.c");
}
