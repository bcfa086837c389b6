//! `kip port`: where the ports of a proc are published.

use crate::names::{self, name};
use crate::output::show;
use crate::view::host_side;
use anyhow::bail;
use clap::Args;
use kip_client::Client;
use kip_types::api::PortView;
use kip_types::spec::Protocol;

#[derive(Debug, Args)]
pub struct PortArgs {
    /// Name of the proc
    #[arg(add = names::known())]
    pub name: String,
    // Not a doc comment: rustdoc would take the brackets for links.
    #[arg(help = "Only this port inside, PORT[/tcp|/udp]: prints its address on the host", value_parser = parse_inside)]
    pub port: Option<Inside>,
}

/// A port inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inside {
    port: u16,
    proto: Protocol,
}

fn parse_inside(text: &str) -> Result<Inside, String> {
    let (port, proto) = match text.split_once('/') {
        None | Some((_, "tcp")) => (text.split('/').next().unwrap_or(text), Protocol::Tcp),
        Some((port, "udp")) => (port, Protocol::Udp),
        Some(_) => return Err("write PORT, PORT/tcp or PORT/udp".to_owned()),
    };
    let port = port.parse::<u16>().ok().filter(|port| *port > 0).ok_or("write PORT, from 1 to 65535")?;
    Ok(Inside { port, proto })
}

/// Asks and shows.
pub async fn port(client: &Client, args: &PortArgs, json: bool) -> anyhow::Result<()> {
    let view = client.inspect(&name(&args.name)?).await?;
    let published: Vec<PortView> = view.ports.into_iter().filter(|port| port.host_port.is_some()).collect();
    let Some(Inside { port, proto }) = args.port else {
        return show(&published, json, |ports| lines(ports));
    };
    match published.iter().find(|view| (view.port, view.proto) == (port, proto)) {
        Some(view) => show(view, json, |view| format!("{}\n", host_side(view))),
        None => bail!("{proto} port {port} of {} is not published", view.name),
    }
}

/// As docker has it: `80/tcp -> 0.0.0.0:8080`.
fn lines(ports: &[PortView]) -> String {
    ports.iter().map(|port| format!("{}/{} -> {}\n", port.port, port.proto, host_side(port))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_written_as_docker_has_them() {
        let port = |proto, port, host: &str, host_port| PortView {
            proto,
            port,
            addr: [10, 213, 0, 1].into(),
            host_addr: host.parse().unwrap(),
            host_port: Some(host_port),
        };
        let all = [port(Protocol::Tcp, 80, "0.0.0.0", 8080), port(Protocol::Udp, 53, "::1", 53)];
        assert_eq!(lines(&all), "80/tcp -> 0.0.0.0:8080\n53/udp -> [::1]:53\n");
    }

    #[test]
    fn a_port_inside_has_a_protocol() {
        assert_eq!(parse_inside("80"), Ok(Inside { port: 80, proto: Protocol::Tcp }));
        assert_eq!(parse_inside("80/tcp"), parse_inside("80"));
        assert_eq!(parse_inside("53/udp"), Ok(Inside { port: 53, proto: Protocol::Udp }));
        for bad in ["0", "x", "80/sctp", "70000", "80/tcp/udp"] {
            assert!(parse_inside(bad).is_err(), "{bad}");
        }
    }
}
