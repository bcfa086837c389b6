//! `kip token`: which clients are let in by TCP.

use crate::output::show;
use clap::Subcommand;
use kip_client::Client;
use kip_text::{now_ms, table, utc};
use kip_types::ProcName;
use kip_types::api::{NewToken, Scope, TokenRequest, TokenView};
use kip_types::spec::parse_duration_ms;
use serde::Serialize;

#[derive(Debug, Subcommand)]
pub enum TokenCommand {
    /// Make a token and print it, this once
    Create {
        /// Name of the token
        name: ProcName,
        /// read: see everything, logs included, except values of environments; write: do
        /// everything, as root could
        #[arg(long, value_parser = parse_scope, default_value = "write")]
        scope: Scope,
        /// Expire the token after this time
        #[arg(long, value_name = "DUR", value_parser = parse_duration_ms)]
        expires: Option<u64>,
    },
    /// List tokens by name; Kip does not keep the tokens themselves
    Ls,
    /// Remove a token: Kip refuses clients that use it from now on
    Rm {
        /// Name of the token
        name: ProcName,
    },
}

fn parse_scope(text: &str) -> Result<Scope, String> {
    match text {
        "read" => Ok(Scope::Read),
        "write" => Ok(Scope::Write),
        _ => Err("write read or write".to_owned()),
    }
}

#[derive(Serialize)]
struct Removed {
    removed: ProcName,
}

/// Carries out one of them.
pub async fn call(client: &Client, command: TokenCommand, json: bool) -> anyhow::Result<()> {
    match command {
        TokenCommand::Create { name, scope, expires } => {
            let request = TokenRequest { name, scope, expires_in_ms: expires };
            // The token alone, so that it can go into a file.
            show(&client.create_token(&request).await?, json, |made: &NewToken| format!("{}\n", made.token))
        }
        TokenCommand::Ls => show(&client.tokens().await?, json, |views| ls(views)),
        TokenCommand::Rm { name } => {
            client.remove_token(&name).await?;
            show(&Removed { removed: name }, json, |done| format!("token {} removed\n", done.removed))
        }
    }
}

fn ls(views: &[TokenView]) -> String {
    if views.is_empty() {
        return "there are no tokens\n".to_owned();
    }
    let mut rows = vec![["NAME", "SCOPE", "CREATED", "EXPIRES"].map(str::to_owned).to_vec()];
    rows.extend(views.iter().map(|view| {
        let expires = match view.expires_at_ms {
            None => "never".to_owned(),
            Some(at) if at <= now_ms() => "expired".to_owned(),
            Some(at) => utc(at),
        };
        let scope = if view.scope == Scope::Read { "read" } else { "write" };
        vec![view.name.to_string(), scope.to_owned(), utc(view.created_at_ms), expires]
    }));
    table(&rows)
}
