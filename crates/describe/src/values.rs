//! Values of a `kip.toml`: read from the forms that people write, by the parsers of the command
//! line, and written in one of them.

use kip_types::spec::{PortSpec, Protocol, WakeOn, parse_duration_ms, parse_host_addr, parse_signal, parse_size};
use kip_types::volume::{BadVolume, VolumeSpec};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use std::borrow::Cow;
use std::fmt;
use std::path::Path;

pub use kip_types::image::Pull;

/// Bytes: `"64M"`, or a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u64);

/// Milliseconds: `"10s"`, or a number of seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Time(pub u64);

/// Words of a command: a list, or one string that is split as a shell does.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Words(pub Vec<String>);

/// One string, or a list of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Texts(pub Vec<String>);

/// `"on"` or `"off"`, or a boolean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Switch(pub bool);

/// A signal by name or number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signal(pub String);

/// The value of an environment variable: a string, number or boolean.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value(pub String);

/// A published port: the string of `--port`, a number, or a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port(pub PortSpec);

/// A volume: the string of `--volume`, or a table. A path that begins with a dot counts from the
/// file's directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeText {
    /// A path of the host or a name.
    pub source: String,
    /// Path inside the proc.
    pub target: String,
    /// The proc cannot change it.
    pub read_only: bool,
}

/// What hibernation does with unchanged pages of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum FilePages {
    /// They go.
    Drop,
    /// They stay in memory, where other procs may share them.
    Keep,
}

impl VolumeText {
    /// Reads `SRC:DST[:ro]`.
    pub fn parse(text: &str) -> Result<VolumeText, BadVolume> {
        let mut parts = text.split(':');
        let (Some(source), Some(target)) = (parts.next(), parts.next()) else {
            return Err(BadVolume::Form(text.to_owned()));
        };
        let rest: Vec<&str> = parts.collect();
        let read_only = match rest[..] {
            [] | ["rw"] => false,
            ["ro"] => true,
            _ => return Err(BadVolume::Form(text.to_owned())),
        };
        let volume = VolumeText { source: source.to_owned(), target: target.to_owned(), read_only };
        volume.resolve(Path::new("/")).map(|_| volume)
    }

    /// The volume with an absolute path, or a name.
    pub fn resolve(&self, directory: &Path) -> Result<VolumeSpec, BadVolume> {
        let source = match self.source.starts_with('.') {
            true => normal(&directory.join(&self.source)),
            false => self.source.clone(),
        };
        let mode = if self.read_only { "ro" } else { "rw" };
        format!("{source}:{}:{mode}", self.target).parse()
    }
}

/// A path without `.` and `..`, which need not be there.
pub fn normal(path: &Path) -> String {
    let mut parts: Vec<String> = Vec::new();
    for part in path.components() {
        match part {
            std::path::Component::ParentDir => drop(parts.pop()),
            std::path::Component::Normal(name) => parts.push(name.to_string_lossy().into_owned()),
            _ => {}
        }
    }
    format!("/{}", parts.join("/"))
}

/// The shortest of the forms that [`parse_size`] reads.
pub fn size_text(bytes: u64) -> String {
    match bytes {
        b if b > 0 && b % (1 << 30) == 0 => format!("{}G", b >> 30),
        b if b > 0 && b % (1 << 20) == 0 => format!("{}M", b >> 20),
        b if b > 0 && b % (1 << 10) == 0 => format!("{}K", b >> 10),
        b => b.to_string(),
    }
}

/// One of the forms that [`parse_duration_ms`] reads.
pub fn time_text(ms: u64) -> String {
    match ms {
        0 => "0s".to_owned(),
        ms if ms % 86_400_000 == 0 => format!("{}d", ms / 86_400_000),
        ms if ms % 3_600_000 == 0 => format!("{}h", ms / 3_600_000),
        ms if ms % 60_000 == 0 => format!("{}m", ms / 60_000),
        ms if ms % 1000 == 0 => format!("{}s", ms / 1000),
        ms => format!("{ms}ms"),
    }
}

/// A value that is one of TOML's simple ones, as text; the second says that it was no string.
struct Simple(&'static str);

impl<'de> Visitor<'de> for Simple {
    type Value = (String, bool);
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok((text.to_owned(), false))
    }
    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Self::Value, E> {
        Ok((value.to_string(), true))
    }
    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Self::Value, E> {
        Ok((number.to_string(), true))
    }
    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Self::Value, E> {
        Ok((number.to_string(), true))
    }
    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Self::Value, E> {
        Ok((number.to_string(), true))
    }
}

/// Reads a simple value with a parser of the command line, writes its text, and describes it as
/// what may be written.
macro_rules! simple {
    ($type:ident, $expected:literal, $schema:tt, $read:expr, $write:expr) => {
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                let (text, _) = from.deserialize_any(Simple($expected))?;
                let read: fn(&str) -> Result<$type, String> = $read;
                read(&text).map_err(de::Error::custom)
            }
        }
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                let write: fn(&$type) -> String = $write;
                to.serialize_str(&write(self))
            }
        }
        impl JsonSchema for $type {
            fn inline_schema() -> bool {
                true
            }
            fn schema_name() -> Cow<'static, str> {
                stringify!($type).into()
            }
            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!($schema)
            }
        }
    };
}

simple!(
    Size,
    "a size, for example \"64M\"",
    { "type": ["string", "integer"], "pattern": "^[0-9.]+([KkMmGg](iB|B)?)?$", "minimum": 0 },
    |text| parse_size(text).map(Size).map_err(|e| e.to_string()),
    |size| size_text(size.0)
);
simple!(
    Time,
    "a duration, for example \"10s\"",
    { "type": ["string", "number"], "pattern": "^[0-9.]+(ms|s|m|h|d)?$", "minimum": 0 },
    |text| parse_duration_ms(text).map(Time).map_err(|e| e.to_string()),
    |time| time_text(time.0)
);
simple!(
    Switch,
    "\"on\" or \"off\"",
    { "enum": ["on", "off", true, false] },
    |text| match text {
        "on" | "true" => Ok(Switch(true)),
        "off" | "false" => Ok(Switch(false)),
        _ => Err("write on or off".to_owned()),
    },
    |switch| if switch.0 { "on".to_owned() } else { "off".to_owned() }
);
simple!(
    Signal,
    "a signal, for example \"SIGQUIT\"",
    { "type": ["string", "integer"] },
    |text| parse_signal(text).map(|_| Signal(text.to_owned())).map_err(|e| e.to_string()),
    |signal| signal.0.clone()
);
simple!(
    Value,
    "a string, a number or a boolean",
    { "type": ["string", "number", "boolean"] },
    |text| Ok(Value(text.to_owned())),
    |value| value.0.clone()
);

/// A string or a list of strings; the caller says what a string is.
struct OneOrMany(&'static str, fn(&str) -> Result<Vec<String>, String>);

impl<'de> Visitor<'de> for OneOrMany {
    type Value = Vec<String>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<Vec<String>, E> {
        (self.1)(text).map_err(E::custom)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<String>, A::Error> {
        let mut all = Vec::new();
        while let Some(text) = list.next_element()? {
            all.push(text);
        }
        Ok(all)
    }
}

/// Splits a line as a shell does.
pub fn split(text: &str) -> Result<Vec<String>, String> {
    shlex::split(text).ok_or_else(|| format!("a quote in {text:?} is not closed"))
}

macro_rules! one_or_many {
    ($type:ident, $expected:literal, $split:expr) => {
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                from.deserialize_any(OneOrMany($expected, $split)).map($type)
            }
        }
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                self.0.serialize(to)
            }
        }
        impl JsonSchema for $type {
            fn inline_schema() -> bool {
                true
            }
            fn schema_name() -> Cow<'static, str> {
                stringify!($type).into()
            }
            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({ "type": ["string", "array"], "items": { "type": "string" } })
            }
        }
    };
}

one_or_many!(Words, "a list of strings, or one that is split as a shell does", split);
one_or_many!(Texts, "a string or a list of strings", |text| Ok(vec![text.to_owned()]));

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct PortTable {
    /// Port inside the proc.
    port: u16,
    /// Port on the host; without it Kip chooses one.
    host_port: Option<u16>,
    /// The one address of the host at which it is published; without it, all.
    host_addr: Option<String>,
    /// Transport protocol.
    #[serde(default = "tcp")]
    proto: Protocol,
    /// What wakes a sleeper.
    #[serde(default)]
    wake: WakeOn,
    /// Only other procs reach it.
    #[serde(default)]
    private: bool,
}

fn tcp() -> Protocol {
    Protocol::Tcp
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct VolumeTable {
    /// Absolute path of the host, one that begins with a dot and counts from the file's directory,
    /// or the name of a volume that Kip keeps.
    source: String,
    /// Absolute path inside.
    target: String,
    /// The proc cannot change it.
    #[serde(default)]
    read_only: bool,
}

struct PortForm;

impl<'de> Visitor<'de> for PortForm {
    type Value = Port;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a port as \"8080:80\", or a table with the key port")
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<Port, E> {
        text.parse().map(Port).map_err(E::custom)
    }
    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Port, E> {
        self.visit_str(&number.to_string())
    }
    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Port, A::Error> {
        let table = PortTable::deserialize(de::value::MapAccessDeserializer::new(map))?;
        let PortTable { port, host_port, host_addr, proto, wake, private } = table;
        if private && (host_port.is_some() || host_addr.is_some()) {
            return Err(de::Error::custom("a private port has no port on the host: leave out host-port and host-addr"));
        }
        let bad = |text: String| format!("{text:?} is no address of a machine: write one as 127.0.0.1 or ::1");
        let read = |text: String| parse_host_addr(&text).ok_or_else(|| de::Error::custom(bad(text)));
        let host_addr = host_addr.map(read).transpose()?.flatten();
        if port == 0 || host_port == Some(0) {
            return Err(de::Error::custom("port 0 cannot be published: write 1 to 65535"));
        }
        Ok(Port(PortSpec { proto, port, host_port, host_addr, wake_on: wake, private }))
    }
}

struct VolumeForm;

impl<'de> Visitor<'de> for VolumeForm {
    type Value = VolumeText;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a volume as \"SRC:DST[:ro]\", or a table with the keys source and target")
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<VolumeText, E> {
        VolumeText::parse(text).map_err(E::custom)
    }
    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<VolumeText, A::Error> {
        let table = VolumeTable::deserialize(de::value::MapAccessDeserializer::new(map))?;
        let volume = VolumeText { source: table.source, target: table.target, read_only: table.read_only };
        volume.resolve(Path::new("/")).map_err(de::Error::custom)?;
        Ok(volume)
    }
}

impl<'de> Deserialize<'de> for Port {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(PortForm)
    }
}

impl Serialize for Port {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&self.0)
    }
}

impl JsonSchema for Port {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "Port".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let table = generator.subschema_for::<PortTable>();
        json_schema!({ "anyOf": [{ "type": ["string", "integer"] }, table] })
    }
}

impl<'de> Deserialize<'de> for VolumeText {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(VolumeForm)
    }
}

impl Serialize for VolumeText {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&format!("{}:{}{}", self.source, self.target, if self.read_only { ":ro" } else { "" }))
    }
}

impl JsonSchema for VolumeText {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "Volume".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let table = generator.subschema_for::<VolumeTable>();
        json_schema!({ "anyOf": [{ "type": "string" }, table] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_as_the_same() {
        for bytes in [0, 1, 1023, 1024, 64 << 20, 3 << 30, (1 << 30) + 1] {
            assert_eq!(parse_size(&size_text(bytes)), Ok(bytes));
        }
        for ms in [0, 1, 999, 1000, 90_000, 3_600_000, 86_400_000, 86_400_001] {
            assert_eq!(parse_duration_ms(&time_text(ms)), Ok(ms));
        }
    }

    #[test]
    fn volumes_of_the_files_directory() {
        let volume = |text: &str| VolumeText::parse(text).unwrap().resolve(Path::new("/srv/app")).unwrap().to_string();
        assert_eq!(volume("./data:/data:ro"), "/srv/app/data:/data:ro");
        assert_eq!(volume("../x:/x"), "/srv/x:/x");
        assert_eq!(volume("db:/db"), "db:/db");
        assert!(VolumeText::parse("data").is_err());
    }
}
