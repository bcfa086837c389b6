//! Compiles `init/init.c` into the static program that the crate includes. Needs a C compiler, `cc` or `$CC`.

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
    "-fno-pie",
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

fn main() {
    println!("cargo::rerun-if-changed=init/init.c");
    println!("cargo::rerun-if-env-changed=CC");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("kip-init");
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let status = Command::new(&compiler).args(FLAGS).arg("-o").arg(&out).arg("init/init.c").status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{} could not compile init/init.c: {status}", compiler.display()),
        Err(e) => panic!("{} is needed to compile init/init.c: {e}", compiler.display()),
    }
}
