//! Prints the OpenAPI document: `cargo run -p kip-API --example openapi > docs/api/openapi.json`.
#![forbid(unsafe_code)]

fn main() {
    println!("{:#}", kip_api::openapi());
}
