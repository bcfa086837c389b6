//! Prints the OpenAPI document: `cargo run -p kip-API --example openapi > docs/api/openapi.json`.
#![forbid(unsafe_code)]

#[path = "../tests/fake/mod.rs"]
mod fake;

fn main() {
    println!("{:#}", kip_api::openapi::<fake::Fake>());
}
