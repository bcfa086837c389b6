//! Prints the JSON Schema of `kip.toml`: `cargo run -p kip-describe --example schema >
//! docs/kip-toml.schema.json`.
#![forbid(unsafe_code)]

fn main() {
    println!("{:#}", kip_describe::schema());
}
