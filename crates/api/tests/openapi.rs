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

/// All schemas within a value, with where each is.
fn schemas<'a>(at: String, value: &'a Value, seen: &mut dyn FnMut(&str, &'a serde_json::Map<String, Value>)) {
    match value {
        Value::Object(fields) => {
            seen(&at, fields);
            fields.iter().for_each(|(key, value)| schemas(format!("{at}.{key}"), value, seen));
        }
        Value::Array(values) => values.iter().for_each(|value| schemas(at.clone(), value, seen)),
        _ => {}
    }
}

// promise api: what generators of clients do not know is not in the document: sets of words are an
//   `enum`, integers have limits and a format of OpenAPI, references stand alone, names have a
//   pattern
#[test]
fn generators_know_all_that_is_in_the_document() {
    let document = kip_api::openapi();
    let mut strange = Vec::new();
    schemas(String::new(), &document, &mut |at, schema| {
        let is = |key: &str| schema.get(key).filter(|value| value.is_string() || value.is_array());
        let kinds = is("type").map(Value::to_string).unwrap_or_default();
        let format = is("format").and_then(Value::as_str);
        let known = match format {
            Some("int32" | "int64") => schema.contains_key("minimum") && schema.contains_key("maximum"),
            Some("double") => kinds.contains("number"),
            // Archives: generators make a file of it.
            Some("binary") => kinds.contains("string"),
            Some(_) => false,
            None => !kinds.contains("integer"),
        };
        let constants = |all: &Vec<Value>| all.iter().all(|one| one["const"].is_string());
        let words = ["oneOf", "anyOf"].iter().any(|key| is(key).and_then(Value::as_array).is_some_and(constants));
        if !known || words || (schema.contains_key("$ref") && schema.contains_key("properties")) {
            strange.push(at.to_owned());
        }
    });
    assert_eq!(strange, Vec::<String>::new());
    let schema = |name: &str| &document["components"]["schemas"][name];
    assert_eq!(schema("Tier")["enum"], serde_json::json!(["hot", "hibernated", "parked", "archived"]));
    for name in ["ProcName", "Realm", "VolumeName", "SnapshotName"] {
        assert!(schema(name)["pattern"].is_string(), "{name}");
    }
}
