//! Compiles the shim that is preloaded into CRIU helpers (shim/) to a shared object that the
//! crate embeds.
use std::path::PathBuf;
use std::process::Command;

fn main() {
    for file in ["shim/shim.c", "shim/hold.c", "shim/hold.h"] {
        println!("cargo:rerun-if-changed={file}");
    }
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("shim.so");
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-s", "-o"])
        .arg(&out)
        .args(["shim/shim.c", "shim/hold.c", "-ldl"])
        .status()
        .expect("a C compiler named cc is on PATH");
    assert!(status.success(), "cc could not compile shim/*.c");
}
