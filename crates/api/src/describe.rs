//! Routes with their description: what the router has is what the OpenAPI document says, because
//! both come from one call.
//!
//! Schemas are those of the types that travel ([`schemars`]); their fields' comments, which name
//! the units, are the descriptions. Nothing here looks at a request.

mod plain;

use crate::state::Api;
use axum::Router;
use axum::handler::Handler;
use axum::routing::{MethodRouter, delete, get, patch, post, put};
use kip_types::api::{Code, Refusal, SnapshotName};
use kip_types::tree::TreeLeaseId;
use kip_types::{CheckpointTag, ProcName, VolumeName};
use plain::Plain;
use schemars::generate::{SchemaGenerator, SchemaSettings};
use schemars::transform::Transform;
use schemars::{JsonSchema, Schema};
use serde_json::{Map, Value, json};

/// The content type of tar archives.
pub const ARCHIVE: &str = "application/x-tar";
/// The content type of bytes that the API knows nothing of.
pub const BYTES: &str = "application/octet-stream";

type Shape = fn(&mut SchemaGenerator) -> Schema;
/// A reference to the schema of a body, and the schema.
type Body = fn(&mut SchemaGenerator) -> (Schema, Schema);

fn referred<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<T>()
}

fn inline<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = T::json_schema(generator);
    Plain.transform(&mut schema);
    schema
}

/// What a route is for, takes and answers.
pub struct Doc {
    id: &'static str,
    summary: &'static str,
    query: Option<Shape>,
    body: Option<Body>,
    /// Content type of a body that is no JSON.
    takes: Option<&'static str>,
    answer: Value,
    shape: Option<(&'static str, Shape)>,
    status: u16,
}

/// A route that answers 204, until more is said. `id` is its name in generated clients.
pub fn doc(id: &'static str, summary: &'static str) -> Doc {
    let answer = json!({ "description": "Done." });
    Doc { id, summary, query: None, body: None, takes: None, answer, shape: None, status: 204 }
}

impl Doc {
    /// Takes the fields of `T` as its query.
    pub fn query<T: JsonSchema>(self) -> Doc {
        Doc { query: Some(inline::<T>), ..self }
    }

    /// Takes a JSON body.
    pub fn body<T: JsonSchema>(self) -> Doc {
        Doc { body: Some(|generator| (referred::<T>(generator), inline::<T>(generator))), ..self }
    }

    /// Answers 200 and JSON.
    pub fn json<T: JsonSchema>(self) -> Doc {
        self.json_with::<T>(200)
    }

    /// Answers `status` and JSON.
    pub fn json_with<T: JsonSchema>(self, status: u16) -> Doc {
        Doc { shape: Some(("application/json", referred::<T>)), status, ..self }
    }

    /// Answers 200 and one JSON value on each line, as they come.
    pub fn lines<T: JsonSchema>(self) -> Doc {
        let answer = json!({
            "description": "One of these on each line, as they come. A last line `{\"refusal\": ..}` says why it broke off.",
        });
        Doc { shape: Some(("application/x-ndjson", referred::<T>)), status: 200, answer, ..self }
    }

    /// Answers 200 and plain text of this content type.
    pub fn text(self, content: &'static str) -> Doc {
        Doc { shape: Some((content, inline::<String>)), status: 200, ..self }
    }

    /// Answers 200 and a tar archive.
    pub fn archive(self) -> Doc {
        let answer = json!({
            "description": "A tar archive. One that breaks off is not complete: the daemon's log says why.",
            "content": { ARCHIVE: { "schema": { "type": "string", "format": "binary" } } },
        });
        Doc { status: 200, answer, ..self }
    }

    /// Takes a tar archive as its body, of any length.
    pub fn takes_archive(self) -> Doc {
        Doc { takes: Some(ARCHIVE), ..self }
    }

    /// Answers 200 and bytes.
    pub fn bytes(self) -> Doc {
        let answer = json!({
            "description": "The contents.",
            "content": { BYTES: { "schema": { "type": "string", "format": "binary" } } },
        });
        Doc { status: 200, answer, ..self }
    }

    /// Takes bytes as its body.
    pub fn takes_bytes(self) -> Doc {
        Doc { takes: Some(BYTES), ..self }
    }

    /// Answers 101 and frames both ways.
    pub fn upgrade(self) -> Doc {
        let answer = json!({
            "description": "The connection carries frames: 1 byte channel (0 stdin, 1 stdout, 2 stderr, 3 end), 4 bytes length \
                (big endian), then at most 1 MiB. An empty frame of channel 0 is end of file; that of channel 3 is JSON, ExecEnd.",
        });
        Doc { status: 101, answer, ..self }
    }
}

/// Routes and what is said of them.
pub struct Routes {
    router: Router<Api>,
    paths: Map<String, Value>,
    schemas: SchemaGenerator,
}

impl Routes {
    pub fn new() -> Routes {
        let settings = SchemaSettings::draft2020_12().with(|s| s.definitions_path = "/components/schemas".into());
        let schemas = settings.with_transform(Plain).into_generator();
        Routes { router: Router::new(), paths: Map::new(), schemas }
    }

    pub fn get<T: 'static>(self, path: &'static str, handler: impl Handler<T, Api>, doc: Doc) -> Self {
        self.at(path, "get", get(handler), doc)
    }

    pub fn post<T: 'static>(self, path: &'static str, handler: impl Handler<T, Api>, doc: Doc) -> Self {
        self.at(path, "post", post(handler), doc)
    }

    pub fn put<T: 'static>(self, path: &'static str, handler: impl Handler<T, Api>, doc: Doc) -> Self {
        self.at(path, "put", put(handler), doc)
    }

    pub fn patch<T: 'static>(self, path: &'static str, handler: impl Handler<T, Api>, doc: Doc) -> Self {
        self.at(path, "patch", patch(handler), doc)
    }

    pub fn delete<T: 'static>(self, path: &'static str, handler: impl Handler<T, Api>, doc: Doc) -> Self {
        self.at(path, "delete", delete(handler), doc)
    }

    fn at(mut self, path: &'static str, method: &str, to: MethodRouter<Api>, doc: Doc) -> Self {
        let operation = self.operation(path, doc);
        let at_path = self.paths.entry(path).or_insert_with(|| json!({}));
        at_path[method] = operation;
        self.router = self.router.route(path, to);
        self
    }

    fn operation(&mut self, path: &str, doc: Doc) -> Value {
        let tag = path.trim_start_matches("/v1").split('/').nth(1).unwrap_or_default().trim_end_matches(".json");
        let generator = &mut self.schemas;
        let mut parameters: Vec<Value> =
            path.split('/').filter_map(|segment| in_path(path, segment, generator)).collect();
        if let Some(query) = doc.query {
            parameters.extend(in_query(&query(&mut self.schemas)));
        }
        let mut answer = doc.answer;
        if let Some((content, shape)) = doc.shape {
            let shape = shape(&mut self.schemas);
            answer["content"] = json!({ content: { "schema": shape } });
        }
        let mut operation = json!({
            "operationId": doc.id,
            "summary": doc.summary,
            "tags": [tag],
            "responses": {
                (doc.status.to_string()): answer,
                "default": { "$ref": "#/components/responses/Refused" },
            },
        });
        if !parameters.is_empty() {
            operation["parameters"] = parameters.into();
        }
        if let Some(body) = doc.body {
            let (referred, schema) = body(&mut self.schemas);
            // An empty body is `{}`, which does where every field may be left out.
            let required = schema.get("required").is_some();
            operation["requestBody"] =
                json!({ "required": required, "content": { "application/json": { "schema": referred } } });
        }
        if let Some(content) = doc.takes {
            let schema = json!({ "type": "string", "format": "binary" });
            operation["requestBody"] = json!({ "required": true, "content": { content: { "schema": schema } } });
        }
        operation
    }

    /// The routes alone.
    pub fn router(self) -> Router<Api> {
        self.router
    }

    /// The OpenAPI document of all routes.
    pub fn document(mut self) -> Value {
        let refusal = self.schemas.subschema_for::<Refusal>();
        self.schemas.subschema_for::<Code>();
        let schemas = self.schemas.take_definitions(true);
        json!({
            "openapi": "3.1.0",
            "info": {
                "title": "Kip",
                "version": "1",
                "description": "What `kip` does, all of it. On the data directory's unix socket (DIR/run/api.sock), where every client that may \
                    connect may do everything, and, with `kip up --listen`, by TCP with TLS and a bearer token. Names of fields end with \
                    their unit: _ms, _us, _bytes. Every refusal has one shape and a code of a closed list.",
                "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
            },
            "servers": [{ "url": "/" }],
            "security": [{ "token": [] }, {}],
            "paths": self.paths,
            "components": {
                "schemas": schemas,
                "responses": {
                    "Refused": {
                        "description": "Not done. The code decides the status, see Code.",
                        "headers": { "x-request-id": { "description": "The request's own, or one made for it.", "schema": { "type": "string" } } },
                        "content": { "application/json": { "schema": refusal } },
                    },
                },
                "securitySchemes": {
                    "token": { "type": "http", "scheme": "bearer", "description": "From `kip token create`. By TCP only; the socket asks for none." },
                },
            },
        })
    }
}

/// A parameter of the path, if `segment` is one.
fn in_path(path: &str, segment: &str, generator: &mut SchemaGenerator) -> Option<Value> {
    let name = segment.strip_prefix('{')?.strip_suffix('}')?;
    let (description, schema) = match name {
        "snapshot" => (
            "NAME for the newest of that proc, or NAME@GENERATION.",
            generator.subschema_for::<SnapshotName>().to_value(),
        ),
        "id" => {
            let schema = json!({ "type": "string", "pattern": "^[0-9a-f]{6,32}$" });
            ("Its id, or the beginning of it, 6 digits at least.", schema)
        }
        "lease" => ("Its number.", generator.subschema_for::<TreeLeaseId>().to_value()),
        "tag" => ("Its tag.", generator.subschema_for::<CheckpointTag>().to_value()),
        _ if path.starts_with("/v1/volumes/") => ("Its name.", generator.subschema_for::<VolumeName>().to_value()),
        _ => ("Its name.", generator.subschema_for::<ProcName>().to_value()),
    };
    Some(json!({ "name": name, "in": "path", "required": true, "description": description, "schema": schema }))
}

/// The fields of a query, which are flat.
fn in_query(schema: &Schema) -> Vec<Value> {
    let required: Vec<&str> =
        schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
    let fields = schema.get("properties").and_then(Value::as_object).into_iter().flatten();
    let parameter = |(name, field): (&String, &Value)| {
        let mut schema = field.clone();
        let description = schema.as_object_mut().and_then(|field| field.remove("description"));
        json!({
            "name": name, "in": "query", "required": required.contains(&name.as_str()),
            "description": description.unwrap_or_default(), "schema": schema,
        })
    };
    fields.map(parameter).collect()
}
