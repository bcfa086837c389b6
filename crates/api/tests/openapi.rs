//! `docs/api/openapi.json` is what the code says.
#![forbid(unsafe_code)]

mod fake;

use serde_json::Value;

// promise api: `docs/api/openapi.json` is what the code says, and every field and parameter is
//   described
// held by: this, `crates/api/tests/openapi.rs::every_field_and_every_parameter_is_described`
#[test]
fn the_document_that_is_checked_in_is_that_of_the_code() {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/api/openapi.json")).unwrap();
    let checked_in: Value = serde_json::from_str(&text).unwrap();
    let fresh = kip_api::openapi();
    assert!(
        checked_in == fresh,
        "docs/api/openapi.json is stale: cargo run -p kip-api --example openapi > docs/api/openapi.json"
    );
}

#[test]
fn every_field_and_every_parameter_is_described() {
    let document = kip_api::openapi();
    let mut silent = Vec::new();
    for (name, schema) in document["components"]["schemas"].as_object().unwrap() {
        for (field, of) in schema["properties"].as_object().into_iter().flatten() {
            if of["description"].as_str().is_none_or(str::is_empty) {
                silent.push(format!("{name}.{field}"));
            }
        }
    }
    for (path, operations) in document["paths"].as_object().unwrap() {
        for (method, operation) in operations.as_object().unwrap() {
            for parameter in operation["parameters"].as_array().into_iter().flatten() {
                if parameter["description"].as_str().is_none_or(str::is_empty) {
                    silent.push(format!("{method} {path}: {}", parameter["name"]));
                }
            }
        }
    }
    assert_eq!(silent, Vec::<String>::new());
}
