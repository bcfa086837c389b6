//! YAML as a tree that knows where everything stands. Anchors and merge keys are resolved; what a
//! scalar means is for the reader.

use crate::place::{Fault, SourcePosition};
use saphyr_parser::{Event, Parser, ScalarStyle, Span};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::path::Path;

/// More than this from anchors is a trap, not a description.
const MOST_NODES: usize = 100_000;
/// Deepest nesting.
const DEEPEST: usize = 100;

/// A value and where it stands.
#[derive(Debug, Clone, PartialEq)]
pub struct YamlNode {
    pub place: SourcePosition,
    pub value: Value,
    /// What it says of itself and of what earlier files say in its place.
    pub tag: Option<Tag>,
    read: Read,
}

/// Tags of Compose's override files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tag {
    /// `!reset`: neither this nor what earlier files say is there.
    Reset,
    /// `!override`: this is instead of what earlier files say.
    Override,
}

impl Tag {
    fn read(tag: Option<&saphyr_parser::Tag>) -> Option<Tag> {
        match tag.map(|tag| tag.suffix.as_str())? {
            "reset" => Some(Tag::Reset),
            "override" => Some(Tag::Override),
            _ => None,
        }
    }
}

/// What a reader has seen of a node.
#[derive(Debug, Clone, Default, PartialEq)]
struct Read {
    /// It was asked for by its key, or handed out with its siblings.
    taken: Cell<bool>,
    /// Keys that it was asked for, of a map.
    asked: RefCell<Vec<String>>,
}

/// A key that no reader asked for, of a map that was asked for others.
#[derive(Debug, PartialEq)]
pub struct Unread {
    pub place: SourcePosition,
    /// Keys that lead to it from the node that was looked through on.
    pub path: Vec<String>,
    /// What the map was asked for.
    pub asked: Vec<String>,
}

/// A key of a map and what it leads to.
pub type MapEntry = (String, SourcePosition, YamlNode);

#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Null,
    /// A scalar. One that is quoted is never a boolean, a number or nothing.
    Text {
        text: String,
        quoted: bool,
    },
    List(Vec<YamlNode>),
    Map(Vec<MapEntry>),
}

struct Loader<'a> {
    path: &'a Path,
    anchors: HashMap<usize, YamlNode>,
    nodes: usize,
}

/// Reads the first document of a text.
pub fn load(path: &Path, text: &str) -> Result<YamlNode, Fault> {
    let mut loader = Loader { path, anchors: HashMap::new(), nodes: 0 };
    let mut events = Parser::new_from_str(text);
    let mut next = || events.next();
    loop {
        match loader.event(&mut next)? {
            (Event::StreamStart | Event::DocumentStart(_), _) => {}
            (Event::StreamEnd | Event::DocumentEnd, span) => {
                return Ok(YamlNode::new(loader.place(&span), Value::Null));
            }
            (event, span) => return loader.node(event, span, &mut next, 0),
        }
    }
}

type Next<'a, 'i> = &'a mut dyn FnMut() -> Option<Result<(Event<'i>, Span), saphyr_parser::ScanError>>;

impl Loader<'_> {
    fn place(&self, span: &Span) -> SourcePosition {
        // Lines count from 1 there, columns from 0.
        SourcePosition {
            file: self.path.display().to_string().into(),
            line: span.start.line(),
            column: span.start.col() + 1,
        }
    }

    fn event<'i>(&self, next: Next<'_, 'i>) -> Result<(Event<'i>, Span), Fault> {
        match next() {
            Some(Ok(event)) => Ok(event),
            Some(Err(e)) => {
                let at = e.marker();
                let place = SourcePosition {
                    file: self.path.display().to_string().into(),
                    line: at.line(),
                    column: at.col() + 1,
                };
                Err(Fault::new(&place, format!("this is no YAML: {}", e.info())))
            }
            None => Ok((Event::StreamEnd, Span::default())),
        }
    }

    fn node<'i>(&mut self, event: Event<'i>, span: Span, next: Next<'_, 'i>, depth: usize) -> Result<YamlNode, Fault> {
        let place = self.place(&span);
        self.count(&place, 1, depth)?;
        let (value, anchor, tag) = match event {
            Event::Alias(id) => {
                let Some(node) = self.anchors.get(&id).cloned() else {
                    return Err(Fault::new(&place, "this refers to an anchor from within itself"));
                };
                self.count(&place, size(&node), depth)?;
                // Mistakes are told where the value stands, not where it is referred to.
                return Ok(node);
            }
            Event::Scalar(text, style, anchor, tag) => {
                let is_text = tag.as_ref().is_some_and(|tag| tag.is_yaml_core_schema() && tag.suffix == "str");
                let quoted = style != ScalarStyle::Plain || is_text;
                let null = !quoted && matches!(text.as_ref(), "" | "~" | "null" | "Null" | "NULL");
                (if null { Value::Null } else { Value::Text { text: text.into_owned(), quoted } }, anchor, tag)
            }
            Event::SequenceStart(anchor, tag) => {
                let mut list = Vec::new();
                loop {
                    match self.event(next)? {
                        (Event::SequenceEnd, _) => break,
                        (event, span) => list.push(self.node(event, span, next, depth + 1)?),
                    }
                }
                (Value::List(list), anchor, tag)
            }
            Event::MappingStart(anchor, tag) => (self.map(next, depth)?, anchor, tag),
            _ => return Err(Fault::new(&place, "the YAML ends in the middle")),
        };
        let node = YamlNode { tag: Tag::read(tag.as_deref()), ..YamlNode::new(place, value) };
        if anchor > 0 {
            self.anchors.insert(anchor, node.clone());
        }
        Ok(node)
    }

    fn map<'i>(&mut self, next: Next<'_, 'i>, depth: usize) -> Result<Value, Fault> {
        let mut entries: Vec<MapEntry> = Vec::new();
        let mut merged: Vec<YamlNode> = Vec::new();
        loop {
            let (event, span) = self.event(next)?;
            if event == Event::MappingEnd {
                break;
            }
            let key = self.node(event, span, next, depth + 1)?;
            let Value::Text { text: name, quoted } = key.value else {
                return Err(Fault::new(&key.place, "a key is a word: write KEY: VALUE"));
            };
            let (event, span) = self.event(next)?;
            let value = self.node(event, span, next, depth + 1)?;
            if name == "<<" && !quoted {
                merged.push(value);
                continue;
            }
            if let Some((_, first, _)) = entries.iter().find(|(known, ..)| *known == name) {
                return Err(Fault::new(&key.place, format!("the key {name} is there twice, first at {first}")));
            }
            entries.push((name, key.place, value));
        }
        for from in merged {
            merge(&mut entries, from)?;
        }
        Ok(Value::Map(entries))
    }

    fn count(&mut self, place: &SourcePosition, nodes: usize, depth: usize) -> Result<(), Fault> {
        self.nodes += nodes;
        if self.nodes > MOST_NODES || depth > DEEPEST {
            return Err(Fault::new(place, "there is too much in this file, or it is nested too deeply"));
        }
        Ok(())
    }
}

/// Adds what `<<` brings: keys that are there already stay.
fn merge(entries: &mut Vec<MapEntry>, from: YamlNode) -> Result<(), Fault> {
    match from.value {
        Value::Map(more) => {
            for entry in more {
                if !entries.iter().any(|(known, ..)| *known == entry.0) {
                    entries.push(entry);
                }
            }
            Ok(())
        }
        Value::List(maps) => maps.into_iter().try_for_each(|map| merge(entries, map)),
        _ => Err(Fault::new(&from.place, "<< takes a map, or a list of them")),
    }
}

fn size(node: &YamlNode) -> usize {
    match &node.value {
        Value::List(list) => 1 + list.iter().map(size).sum::<usize>(),
        Value::Map(map) => 1 + map.iter().map(|(_, _, value)| size(value)).sum::<usize>(),
        _ => 1,
    }
}

impl YamlNode {
    /// One that no reader has seen yet.
    pub fn new(place: SourcePosition, value: Value) -> YamlNode {
        YamlNode { place, value, tag: None, read: Read::default() }
    }

    /// The entries of a map, none of anything else, for a reader that looks at every key.
    pub fn entries(&self) -> &[MapEntry] {
        self.map().iter().for_each(|(_, _, value)| value.read.taken.set(true));
        self.map()
    }

    /// What a key leads to.
    pub fn get(&self, key: &str) -> Option<&YamlNode> {
        self.read.asked.borrow_mut().push(key.to_owned());
        let found = self.map().iter().find(|(known, ..)| known == key).map(|(_, _, value)| value);
        found.inspect(|value| value.read.taken.set(true))
    }

    fn map(&self) -> &[MapEntry] {
        if let Value::Map(entries) = &self.value { entries } else { &[] }
    }

    /// Keys below this node that no reader asked for, but for those that begin with `x-`. A map of
    /// which no reader asked for any key is its reader's affair: the reader has said what becomes
    /// of the whole.
    pub fn unread(&self) -> Vec<Unread> {
        let mut found = Vec::new();
        self.collect_unread(&mut Vec::new(), &mut found);
        found
    }

    fn collect_unread(&self, path: &mut Vec<String>, found: &mut Vec<Unread>) {
        if let Value::List(list) = &self.value {
            list.iter().for_each(|node| node.collect_unread(path, found));
        }
        let asked = self.read.asked.borrow();
        for (key, place, value) in self.map().iter().filter(|(key, ..)| !key.starts_with("x-")) {
            path.push(key.clone());
            if value.read.taken.get() {
                value.collect_unread(path, found);
            } else if !asked.is_empty() {
                found.push(Unread { place: place.clone(), path: path.clone(), asked: asked.clone() });
            }
            path.pop();
        }
    }

    /// Changes every scalar that is no key.
    pub fn each_text(&mut self, change: &mut dyn FnMut(&SourcePosition, &mut String)) {
        match &mut self.value {
            Value::Text { text, .. } => change(&self.place, text),
            Value::List(list) => list.iter_mut().for_each(|node| node.each_text(change)),
            Value::Map(map) => map.iter_mut().for_each(|(_, _, node)| node.each_text(change)),
            Value::Null => {}
        }
    }

    /// What it is, for people.
    pub fn kind(&self) -> &'static str {
        match self.value {
            Value::Null => "nothing",
            Value::Text { .. } => "a value",
            Value::List(_) => "a list",
            Value::Map(_) => "a map",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(node: Option<&YamlNode>) -> &str {
        match node.map(|n| &n.value) {
            Some(Value::Text { text, .. }) => text,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn places_anchors_and_merges() {
        let yaml = "x: &base\n  a: 1\n  b: two words\ny:\n  <<: *base\n  b: \"3\"\nz: [p, ~]\n";
        let root = load(Path::new("f"), yaml).unwrap();
        let y = root.get("y").unwrap();
        assert_eq!((text(y.get("a")), text(y.get("b"))), ("1", "3"));
        assert_eq!(y.get("b").unwrap().place.to_string(), "f:6:6");
        let Value::List(z) = &root.get("z").unwrap().value else { panic!() };
        assert_eq!((z[0].place.to_string().as_str(), &z[1].value), ("f:7:5", &Value::Null));
        assert_eq!(load(Path::new("f"), "").unwrap().value, Value::Null);
    }

    // promise files: no key of a Compose file is passed over: a key that has no effect is reported,
    //   also within others, as lacking or as a mistake; so are variables without a value; an
    //   external volume has to be there
    // held by: this, `kip_describe::compose::tests::what_kip_lacks_is_named_and_weighed`,
    //   `kip_describe::compose::tests::mistakes_are_told_with_their_place`,
    //   `kip_describe::compose::tests::volumes_of_others_are_known`,
    //   `tests/test_apply.py::test_what_compose_asks_for_and_kip_lacks_is_refused`,
    //   `kip_describe::environ::tests::environment_files`
    #[test]
    fn what_nobody_asked_for_is_known() {
        let yaml = "a: {b: 1, c: 2, x-d: 3}\ne: {f: 1}\ng: [{h: 1, i: 2}]\nk: 1\n";
        let root = load(Path::new("f"), yaml).unwrap();
        assert_eq!(root.unread(), [], "nobody looked");
        assert_eq!(root.entries().len(), 4);
        root.get("a").unwrap().get("b").unwrap();
        let Value::List(g) = &root.get("g").unwrap().value else { panic!() };
        assert_eq!((g[0].get("h").is_some(), g[0].get("z").is_some()), (true, false));
        let told: Vec<_> = root
            .unread()
            .iter()
            .map(|u| format!("{} {} of {}", u.place, u.path.join("."), u.asked.join(",")))
            .collect();
        assert_eq!(told, ["f:1:11 a.c of b", "f:3:12 g.i of h,z"]);
    }

    #[test]
    fn what_is_wrong_has_a_place() {
        let fault = |yaml: &str| load(Path::new("f"), yaml).unwrap_err().to_string();
        assert!(fault("a: 1\na: 2\n").starts_with("f:2:1: the key a is there twice, first at f:1:1"));
        assert!(fault("a: [1\nb: 2\n").starts_with("f:"));
        assert!(fault("a:\n\tb: 2\n").contains("no YAML"));
        assert!(fault("[a]: 2\n").starts_with("f:1:1: a key is a word"));
        let bomb = (1..9).fold("a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n".to_owned(), |text, n| {
            let m = n - 1;
            format!("{text}a{n}: &a{n} [*a{m},*a{m},*a{m},*a{m},*a{m},*a{m},*a{m},*a{m},*a{m},*a{m}]\n")
        });
        assert!(fault(&bomb).contains("too much"));
    }
}
