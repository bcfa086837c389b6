//! Schemas as generators of clients and other tools understand them: closed sets of words are an
//! `enum`, integers have formats that OpenAPI knows, and both limits. Owns no names and no types.

use schemars::Schema;
use schemars::transform::{Transform, transform_subschemas};
use serde_json::{Map, Value, json};

/// Makes a schema and all within it plain.
#[derive(Debug, Clone)]
pub struct Plain;

impl Transform for Plain {
    fn transform(&mut self, schema: &mut Schema) {
        transform_subschemas(self, schema);
        if let Some(schema) = schema.as_object_mut() {
            words(schema);
            integer(schema);
        }
    }
}

/// `oneOf` or `anyOf` constants, each with its description, becomes an `enum` with all descriptions
/// in its own.
fn words(schema: &mut Map<String, Value>) {
    let choices = ["oneOf", "anyOf"].map(|key| (key, schema.get(key).and_then(Value::as_array)));
    let Some((key, choices)) = choices.into_iter().find_map(|(key, choices)| Some((key, choices?))) else { return };
    let word = |choice: &Value| Some((choice.get("const")?.as_str()?.to_owned(), choice.get("description").cloned()));
    let Some(words) = choices.iter().map(word).collect::<Option<Vec<_>>>() else { return };
    let mut description = schema.get("description").and_then(Value::as_str).unwrap_or_default().to_owned();
    for (at, (word, meaning)) in words.iter().enumerate() {
        let meaning = meaning.as_ref().and_then(Value::as_str).unwrap_or_default();
        description += if at == 0 { "\n\n" } else { "\n" };
        description += &format!("* `{word}`: {meaning}");
    }
    schema.remove(key);
    schema.insert("type".to_owned(), json!("string"));
    schema.insert("enum".to_owned(), words.into_iter().map(|(word, _)| word).collect());
    schema.insert("description".to_owned(), description.into());
}

/// The formats of Rust's types become the two that OpenAPI has for integers, and their limits are
/// told.
fn integer(schema: &mut Map<String, Value>) {
    let (format, least, most) = match schema.get("format").and_then(Value::as_str) {
        Some("uint8") => ("int32", 0, i64::from(u8::MAX)),
        Some("uint16") => ("int32", 0, i64::from(u16::MAX)),
        Some("uint32") => ("int64", 0, i64::from(u32::MAX)),
        // Beyond that is no time, size or number that anything here has.
        Some("uint64" | "uint") => ("int64", 0, i64::MAX),
        Some("int32") => ("int32", i64::from(i32::MIN), i64::from(i32::MAX)),
        Some("int64") => ("int64", i64::MIN, i64::MAX),
        // An IPv4 or an IPv6 address: no format that is known is either.
        Some("ip") => {
            schema.remove("format");
            return;
        }
        _ => return,
    };
    schema.insert("format".to_owned(), json!(format));
    schema.entry("minimum").or_insert_with(|| json!(least));
    schema.entry("maximum").or_insert_with(|| json!(most));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(schema: Value) -> Value {
        let mut schema = Schema::try_from(schema).unwrap();
        Plain.transform(&mut schema);
        schema.to_value()
    }

    #[test]
    fn words_become_an_enum_that_says_what_each_means() {
        let words = json!({ "description": "Colour.", "oneOf": [
            { "type": "string", "const": "red", "description": "Warm." },
            { "type": "string", "const": "blue", "description": "Cold." },
        ] });
        let description = "Colour.\n\n* `red`: Warm.\n* `blue`: Cold.";
        let expected = json!({ "type": "string", "enum": ["red", "blue"], "description": description });
        let mut loose = words.clone();
        loose["anyOf"] = loose.as_object_mut().unwrap().remove("oneOf").unwrap();
        assert_eq!((plain(words), plain(loose)), (expected.clone(), expected));
        let mixed = json!({ "oneOf": [{ "type": "string", "const": "none" }, { "type": "object" }] });
        assert_eq!(plain(mixed.clone()), mixed);
    }

    #[test]
    fn integers_have_formats_that_are_known_and_limits() {
        let nested =
            json!({ "properties": { "a": { "type": ["integer", "null"], "format": "uint64", "minimum": 1 } } });
        let number = &plain(nested)["properties"]["a"];
        assert_eq!((&number["format"], &number["minimum"]), (&json!("int64"), &json!(1)));
        assert_eq!(number["maximum"], json!(i64::MAX));
        assert_eq!(plain(json!({ "type": "string", "format": "ip" })), json!({ "type": "string" }));
    }
}
