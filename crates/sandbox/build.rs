//! Compiles `init/init.c` and `restorer/restorer.c` into the static programs that the crate
//! includes. Needs a C compiler, `cc` or `$CC`.

use std::path::PathBuf;
use std::process::Command;

const FLAGS: &[&str] = &[
    "-std=gnu11",
    "-Os",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-ffreestanding",
    "-fno-stack-protector",
    "-fcf-protection=none",
    "-fno-asynchronous-unwind-tables",
    "-fomit-frame-pointer",
    "-mgeneral-regs-only",
    "-nostdlib",
    "-static",
    "-no-pie",
    "-s",
    "-Wl,-z,noseparate-code,-z,noexecstack,-z,norelro,--gc-sections",
];

const INIT_FLAGS: &[&str] = &["-fno-pie"];

/// Code that finds everything relative to itself, for absolute addresses of 32 bits do not reach
/// where it is linked.
const RESTORER_FLAGS: &[&str] = &["-fpie", "-fvisibility=hidden", "-Wl,--build-id=none,-Ttext-segment=0x4a0000000000"];

fn main() {
    println!("cargo::rerun-if-env-changed=CC");
    compile("init/init.c", INIT_FLAGS, "kip-init");
    for part in [
        "children.h",
        "kernel.h",
        "memory.h",
        "plan.h",
        "rings.h",
        "settings.h",
        "shared_memory.h",
        "system_v.h",
        "terminals.h",
    ] {
        println!("cargo::rerun-if-changed=restorer/{part}");
    }
    compile("restorer/restorer.c", RESTORER_FLAGS, "kip-restore");
    println!("cargo::rustc-env=KIP_RESTORER_FLAGS={}", [FLAGS, RESTORER_FLAGS].concat().join(" "));
}

fn compile(source: &str, flags: &[&str], program: &str) {
    println!("cargo::rerun-if-changed={source}");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join(program);
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let status = Command::new(&compiler).args(FLAGS).args(flags).arg("-o").arg(&out).arg(source).status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{} could not compile {source}: {status}", compiler.display()),
        Err(e) => panic!("{} is needed to compile {source}: {e}", compiler.display()),
    }
}
