//! Links `kip` for a fixed address.

fn main() {
    println!("cargo:rustc-link-arg-bin=kip=-no-pie");
    println!("cargo:rerun-if-changed=build.rs");
}
