//! The daemon that is spoken to: that of a data directory, or one that listens by TCP; and how one
//! does.

use anyhow::{Context, bail};
use clap::Args;
use kip_client::{Client, Remote};
use kip_daemon::{Certificate, Listen};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// The data directory that is meant when none is named.
pub const DATA: &str = "/var/lib/kip";

#[derive(Debug, Args)]
pub struct RemoteArgs {
    /// Connect to the daemon at https://HOST:PORT instead of one by its data directory (or set
    /// KIP_HOST)
    #[arg(long, global = true, display_order = 900, value_name = "URL", conflicts_with = "data")]
    pub host: Option<String>,
    /// PEM file: CA certificates to trust for --host, instead of this machine's (or set KIP_CA)
    #[arg(long, global = true, display_order = 900, value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// File whose first line is the token for --host (or set KIP_TOKEN to the token itself)
    #[arg(long, global = true, display_order = 900, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct ListenArgs {
    /// Serve the API over TCP as well, to clients with a token
    #[arg(long, value_name = "ADDR:PORT", requires = "how")]
    pub listen: Option<SocketAddr>,
    /// PEM file: certificate chain for --listen
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "listen"], group = "how")]
    pub tls_cert: Option<PathBuf>,
    /// PEM file: private key of --tls-cert
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Serve --listen without TLS; on a loopback address only
    #[arg(long, requires = "listen", group = "how")]
    pub listen_plain: bool,
}

impl ListenArgs {
    /// Where the API is offered by TCP, if that is asked for.
    pub fn wanted(self) -> Option<Listen> {
        let tls = self.tls_cert.zip(self.tls_key).map(|(chain, key)| Certificate { chain, key });
        Some(Listen { address: self.listen?, tls })
    }
}

/// The client for a command; `at_home_only` has why the command cannot be given to a daemon
/// elsewhere. A data directory that is named counts for more than the environment.
pub fn client(data: Option<&Path>, remote: RemoteArgs, at_home_only: Option<&str>) -> anyhow::Result<Client> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let text = |name| set(name).map(|value| value.into_string().map_err(|_| anyhow::anyhow!("{name} is not UTF-8")));
    let host = match (remote.host, data) {
        (Some(host), _) => Some(host),
        (None, Some(_)) => None,
        (None, None) => text("KIP_HOST").transpose()?,
    };
    let Some(host) = host else {
        return Ok(Client::new(std::path::absolute(data.unwrap_or(Path::new(DATA)))?));
    };
    if let Some(what) = at_home_only {
        bail!("{what} the daemon's machine: run it there, without --host and KIP_HOST");
    }
    let token = match &remote.token_file {
        Some(file) => {
            let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
            Some(text.lines().next().unwrap_or_default().to_owned())
        }
        None => text("KIP_TOKEN").transpose()?,
    };
    let token = token.with_context(|| {
        format!(
            "there is no token for {host}: set KIP_TOKEN or --token-file; `kip token create` on its machine makes one"
        )
    })?;
    let ca = remote.ca.or_else(|| set("KIP_CA").map(PathBuf::from));
    Ok(Client::remote(Remote::new(&host, ca.as_deref(), &token)?))
}
