//! Published ports, in the short and the long form.

use super::context::Context;
use crate::place::{SourcePosition, Weight};
use crate::values::Port;
use crate::yaml::{Value, YamlNode};
use kip_types::spec::{PortSpec, Protocol, WakeOn, parse_host_addr};
use std::ops::RangeInclusive;

/// Reads `ports`.
pub fn ports(context: &mut Context<'_>, node: &YamlNode, key: &str) -> Vec<Port> {
    let mut all: Vec<(Port, SourcePosition)> = Vec::new();
    for one in context.list(node, key) {
        let form = match &one.value {
            Value::Map(_) => long(context, one, key),
            _ => context.text(one, key).and_then(|text| {
                short(&text).map_err(|message| context.fault(&one.place, format!("{key}: {message}"))).ok()
            }),
        };
        let Some(form) = form else { continue };
        for port in form.published(context, one, key) {
            publish(context, key, &mut all, port, &one.place);
        }
    }
    all.into_iter().map(|(port, _)| port).collect()
}

/// Adds a port with its place. One that is spelled twice, in two files perhaps, is there once.
fn publish(
    context: &mut Context<'_>,
    key: &str,
    all: &mut Vec<(Port, SourcePosition)>,
    port: Port,
    place: &SourcePosition,
) {
    let inside = |port: &Port| (port.0.proto, port.0.port);
    let Some((known, known_place)) = all.iter_mut().find(|(known, _)| inside(known) == inside(&port)) else {
        return all.push((port, place.clone()));
    };
    let ((proto, number), outside) = (inside(&port), |port: &Port| (port.0.host_addr, port.0.host_port));
    if outside(known) == outside(&port) {
        return;
    }
    let named = [&*known, &port].map(|port| port.0.host_port.is_some());
    if let [true, true] | [false, false] = named {
        let what = match place.file == known_place.file {
            true => "leave one out",
            false => "write `ports: !override` in the later file, or leave one out",
        };
        let message = format!(
            "{key}: {proto} port {number} is published twice, here and at {known_place}: Kip publishes it once, {what}"
        );
        return context.fault(place, message);
    }
    if port.0.host_port.is_some() {
        (*known, *known_place) = (port, place.clone());
    }
    let why = format!("{proto} port {number} is published at the port of the machine that is named, and at no other");
    context.lacks(place, Weight::Harmless, key, &why);
}

/// Reads `expose`: ports that only other services reach.
pub fn exposed(context: &mut Context<'_>, node: &YamlNode, key: &str, ports: &mut Vec<Port>) {
    for one in context.list(node, key) {
        let Some(text) = context.text(one, key) else { continue };
        let Ok(form) = short(&text) else {
            context.fault(&one.place, format!("{key}: {text:?} is no port: write a number from 1 to 65535"));
            continue;
        };
        for mut port in form.published(context, one, key) {
            port.0.private = true;
            if !ports.iter().any(|p| (p.0.proto, p.0.port) == (port.0.proto, port.0.port)) {
                ports.push(port);
            }
        }
    }
}

struct Form {
    address: Option<String>,
    host: Option<RangeInclusive<u16>>,
    inside: RangeInclusive<u16>,
    protocol: String,
}

impl Form {
    fn published(self, context: &mut Context<'_>, node: &YamlNode, key: &str) -> Vec<Port> {
        let host_addr = match self.address.as_deref() {
            None | Some("*") => None,
            Some(address) => {
                let Some(host_addr) = parse_host_addr(address) else {
                    let message = format!("{key}: {address:?} is no address of a machine: write one as 127.0.0.1");
                    context.fault(&node.place, message);
                    return Vec::new();
                };
                host_addr
            }
        };
        let proto = match self.protocol.as_str() {
            "tcp" => Protocol::Tcp,
            "udp" => Protocol::Udp,
            other => {
                let why = format!("Kip publishes tcp and udp, not {other}");
                context.lacks(&node.place, Weight::Changes, key, &why);
                return Vec::new();
            }
        };
        let host: Vec<Option<u16>> = match self.host {
            None => self.inside.clone().map(|_| None).collect(),
            Some(host) if host.len() == self.inside.len() => host.map(Some).collect(),
            Some(host) => {
                let why = "a host port out of a range cannot be asked for; Kip chooses any";
                let weight = if self.inside.len() == 1 { Weight::Harmless } else { Weight::Changes };
                context.lacks(&node.place, weight, key, why);
                host.take(self.inside.len()).map(|_| None).collect()
            }
        };
        let port = |(port, host_port)| {
            Port(PortSpec { proto, port, host_port, host_addr, wake_on: WakeOn::Connect, private: false })
        };
        self.inside.zip(host).map(port).collect()
    }
}

fn range(text: &str) -> Option<RangeInclusive<u16>> {
    let number = |text: &str| text.trim().parse::<u16>().ok().filter(|port| *port != 0);
    match text.split_once('-') {
        Some((first, last)) => {
            let (first, last) = (number(first)?, number(last)?);
            (first <= last).then_some(first..=last)
        }
        None => number(text).map(|port| port..=port),
    }
}

/// `[[ADDRESS:]HOST:]PORT[/PROTOCOL]`.
fn short(text: &str) -> Result<Form, String> {
    let bad = || format!("port {text:?} is not valid: write [ADDRESS:][HOST:]PORT[/tcp|/udp], for example \"8080:80\"");
    let (ports, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    let (rest, inside) = ports.rsplit_once(':').map_or((None, ports), |(rest, inside)| (Some(rest), inside));
    let (address, host) = match rest.map(|rest| rest.rsplit_once(':').map_or((None, rest), |(a, h)| (Some(a), h))) {
        None => (None, None),
        Some((address, "")) => (address, None),
        Some((address, host)) => (address, Some(range(host).ok_or_else(bad)?)),
    };
    let inside = range(inside).ok_or_else(bad)?;
    let address = address.filter(|a| !a.is_empty()).map(str::to_owned);
    Ok(Form { address, host, inside, protocol: protocol.to_ascii_lowercase() })
}

fn long(context: &mut Context<'_>, node: &YamlNode, key: &str) -> Option<Form> {
    let mut form = Form { address: None, host: None, inside: 0..=0, protocol: "tcp".to_owned() };
    let read = |text: &str| range(text).ok_or("write a port from 1 to 65535, or a range of them");
    for (name, place, value) in node.entries() {
        match name.as_str() {
            "target" => form.inside = context.parsed(value, key, read)?,
            "published" => form.host = context.parsed(value, key, read),
            "protocol" => form.protocol = context.text(value, key).unwrap_or_else(|| "tcp".to_owned()),
            "host_ip" => form.address = context.text(value, key),
            "mode" | "name" | "app_protocol" => {}
            other => context.fault(place, format!("{key} has no key {other}: known are target, published, protocol")),
        }
    }
    if form.inside == (0..=0) {
        context.fault(&node.place, format!("{key}: write target: PORT, the port inside"));
        return None;
    }
    Some(form)
}
