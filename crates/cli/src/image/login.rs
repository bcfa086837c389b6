//! The login for a registry: flags, else what `docker login` left in its configuration. Read here,
//! as the user that calls, and sent to the daemon with the one request.

use anyhow::{Context, bail};
use clap::Args;
use kip_types::image::RegistryLogin;
use kip_types::keys::Hidden;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::{self, BufRead, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// What `docker login` calls docker.io.
const DOCKER_IO: &str = "https://index.docker.io/v1/";

/// What helpers say where they have no login, github.com/docker/docker-credential-helpers,
/// credentials/error.go.
const KNOWS_NONE: &str = "credentials not found";
/// A refresh token, which Kip asks no one to change into another.
const IDENTITY: &str = "it is an identity token, which Kip cannot use: give --registry-auth USER:PASSWORD";

#[derive(Debug, Clone, Default, Args)]
pub struct LoginArgs {
    #[arg(
        help = "USER:PASSWORD, or USER with --password-stdin; without it what `docker login` left",
        long,
        value_name = "USER[:PASSWORD]"
    )]
    pub registry_auth: Option<String>,
    /// The password is the first line of standard input
    #[arg(long, requires = "registry_auth")]
    pub password_stdin: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct DockerConfig {
    auths: BTreeMap<String, Auth>,
    cred_helpers: BTreeMap<String, String>,
    creds_store: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Auth {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
}

impl std::fmt::Debug for Auth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Auth")
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Helped {
    username: String,
    secret: String,
}

impl LoginArgs {
    /// The login for a registry; none to ask it anonymously.
    pub fn find(&self, registry: &str) -> anyhow::Result<Option<RegistryLogin>> {
        let Some(given) = &self.registry_auth else { return from_docker(registry) };
        let (user, password) = match given.split_once(':') {
            Some((user, password)) => (user.to_owned(), password.to_owned()),
            None if self.password_stdin => {
                let mut line = String::new();
                std::io::stdin().lock().read_line(&mut line).context("reading the password from standard input")?;
                (given.clone(), line.trim_end_matches(['\r', '\n']).to_owned())
            }
            None => bail!("--registry-auth needs USER:PASSWORD, or USER with --password-stdin"),
        };
        Ok(Some(RegistryLogin { user, password: Hidden(password) }))
    }
}

/// `$DOCKER_CONFIG/config.json`, else `~/.docker/config.json`.
fn docker_config() -> Option<PathBuf> {
    let own = std::env::var_os("DOCKER_CONFIG").map(PathBuf::from);
    let dir = own.or_else(|| std::env::home_dir().map(|home| home.join(".docker")))?;
    Some(dir.join("config.json"))
}

fn from_docker(registry: &str) -> anyhow::Result<Option<RegistryLogin>> {
    let Some(path) = docker_config() else { return Ok(None) };
    let text = match std::fs::read(&path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        read => read.with_context(|| format!("reading {}", path.display()))?,
    };
    let config: DockerConfig =
        serde_json::from_slice(&text).with_context(|| format!("{} cannot be read", path.display()))?;
    login_of(&config, registry).with_context(|| format!("{}, login for {registry}", path.display()))
}

fn login_of(config: &DockerConfig, registry: &str) -> anyhow::Result<Option<RegistryLogin>> {
    let keys = keys_of(registry);
    let helper = keys.iter().find_map(|key| config.cred_helpers.get(key)).or(config.creds_store.as_ref());
    let stored = keys.iter().find_map(|key| config.auths.get_key_value(key));
    if let Some(helper) = helper {
        let key = stored.map_or(keys[0].as_str(), |(key, _)| key);
        return ask(helper, key);
    }
    let Some((_, auth)) = stored else { return Ok(None) };
    if auth.identitytoken.as_deref().is_some_and(|token| !token.is_empty()) {
        bail!("{IDENTITY}");
    }
    let login = |user: &str, password: &str| {
        Some(RegistryLogin { user: user.to_owned(), password: Hidden(password.to_owned()) })
    };
    if let Some(packed) = auth.auth.as_deref().filter(|a| !a.is_empty()) {
        let plain = decode(packed).and_then(|bytes| String::from_utf8(bytes).ok()).context("`auth` is not base64")?;
        let (user, password) = plain.split_once(':').context("`auth` is not USER:PASSWORD")?;
        return Ok(login(user, password.trim_end_matches('\0')));
    }
    Ok(auth.username.as_deref().and_then(|user| login(user, auth.password.as_deref().unwrap_or(""))))
}

/// The names under which a login may stand.
fn keys_of(registry: &str) -> Vec<String> {
    let mut keys = vec![registry.to_owned(), format!("https://{registry}"), format!("http://{registry}")];
    keys.extend([format!("https://{registry}/v1/"), format!("https://{registry}/v2/")]);
    if registry == "docker.io" {
        keys.splice(0..0, [DOCKER_IO.to_owned(), "index.docker.io".to_owned()]);
    }
    keys
}

/// Asks `docker-credential-NAME`, as its own documentation has it: the registry in, a login out.
fn ask(helper: &str, key: &str) -> anyhow::Result<Option<RegistryLogin>> {
    let program = format!("docker-credential-{helper}");
    let mut child = Command::new(&program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting {program}"))?;
    // One that answers, or fails, without reading what it is asked says so itself.
    let asked = child.stdin.take().expect("it is piped").write_all(key.as_bytes());
    asked.or_else(|e| if e.kind() == io::ErrorKind::BrokenPipe { Ok(()) } else { Err(e) })?;
    let done = child.wait_with_output()?;
    if !done.status.success() {
        // Its errors go to its standard output.
        let said = [&done.stdout, &done.stderr].map(|bytes| String::from_utf8_lossy(bytes).trim().to_owned());
        if said[0].contains(KNOWS_NONE) {
            return Ok(None);
        }
        let why = said.iter().find_map(|text| text.lines().next()).unwrap_or("it says nothing");
        bail!("{program} failed ({}): {why}", done.status);
    }
    let helped: Helped = serde_json::from_slice(&done.stdout).with_context(|| format!("the answer of {program}"))?;
    if helped.username == "<token>" {
        bail!("{IDENTITY}");
    }
    Ok(Some(RegistryLogin { user: helped.username, password: Hidden(helped.secret) }))
}

/// Base64, RFC 4648.
fn decode(text: &str) -> Option<Vec<u8>> {
    let (mut bits, mut have, mut bytes) = (0u32, 0, Vec::new());
    for c in text.trim().trim_end_matches('=').bytes() {
        let value = match c {
            b'A'..=b'Z' => c - b'A',
            b'a'..=b'z' => c - b'a' + 26,
            b'0'..=b'9' => c - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        (bits, have) = (bits << 6 | u32::from(value), have + 6);
        if have >= 8 {
            have -= 8;
            bytes.push((bits >> have) as u8);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logins_are_found_as_docker_writes_them() {
        let text = r#"{"auths":{"https://index.docker.io/v1/":{"auth":"dXNlcjpwYTpzcw=="},
            "127.0.0.1:5000":{"username":"me","password":"x"},"quay.io":{}}}"#;
        let config: DockerConfig = serde_json::from_str(text).unwrap();
        let found = |registry| login_of(&config, registry).unwrap().map(|login| (login.user, login.password.0));
        assert_eq!(found("docker.io"), Some(("user".into(), "pa:ss".into())));
        assert_eq!(found("127.0.0.1:5000"), Some(("me".into(), "x".into())));
        assert_eq!(found("quay.io"), None);
        assert_eq!(found("ghcr.io"), None);
        let token: DockerConfig =
            serde_json::from_str(r#"{"auths":{"a.b":{"auth":"dXNlcjo=","identitytoken":"x"}}}"#).unwrap();
        assert!(login_of(&token, "a.b").unwrap_err().to_string().contains("identity token"));
        let broken: DockerConfig = serde_json::from_str(r#"{"auths":{"a.b":{"auth":"???"}}}"#).unwrap();
        assert!(login_of(&broken, "a.b").is_err());
    }

    #[test]
    fn flags_go_before_files() {
        let args = LoginArgs { registry_auth: Some("me:se:cret".into()), password_stdin: false };
        let login = args.find("docker.io").unwrap().unwrap();
        assert_eq!((login.user.as_str(), login.password.0.as_str()), ("me", "se:cret"));
        assert!(LoginArgs { registry_auth: Some("me".into()), password_stdin: false }.find("x").is_err());
    }
}
