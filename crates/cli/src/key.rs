//! `kip key`: the realm's keys. Owns how a passphrase comes here, which is never by an argument,
//! and the file of exported keys; what is done with keys is the daemon's.

use crate::output::{print, print_json};
use anyhow::{Context, bail, ensure};
use clap::{Args, Subcommand};
use kip_client::Client;
use kip_text as text;
use kip_types::keys::{Hex, Hidden, ImportedKeysView, KeyView, KeysWrap};
use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcsetattr};
use serde::Serialize;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// A passphrase and its end, bytes.
const LONGEST: u64 = 64 << 10;

#[derive(Debug, Subcommand)]
pub enum KeyCommand {
    /// List keys, and the procs that need each
    Ls,
    /// Make a new key, which seals from now on; the old ones still open
    Rotate,
    /// Destroy a key that does not seal any more: what it sealed can never be read again
    Destroy(DestroyArgs),
    /// Write all keys to a new file, encrypted
    Export(FileArgs),
    /// Import keys from an exported file
    Import(FileArgs),
}

#[derive(Debug, Args)]
pub struct DestroyArgs {
    /// Id of the key, or its first 6 digits or more
    #[arg(value_name = "ID")]
    pub key: String,
    /// Destroy the key for good; without --yes the command only names the procs that would be lost
    #[arg(long)]
    pub yes: bool,
}

/// Without a flag the passphrase is asked for at the terminal.
#[derive(Debug, Args)]
pub struct FileArgs {
    /// The file
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Encrypt or decrypt with the passphrase in the first line of this file, `-` for standard
    /// input
    #[arg(long, value_name = "FILE", conflicts_with = "key_file")]
    pub passphrase_file: Option<PathBuf>,
    /// Encrypt or decrypt with the 32 bytes of this file
    #[arg(long, value_name = "FILE")]
    pub key_file: Option<PathBuf>,
}

#[derive(Serialize)]
struct Exported {
    file: PathBuf,
    realm: kip_types::Realm,
    keys: usize,
}

/// Carries out one of them.
pub async fn call(client: &Client, command: KeyCommand, json: bool) -> anyhow::Result<()> {
    match command {
        KeyCommand::Ls => show(&client.keys().await?, json, |keys| table(keys)),
        KeyCommand::Rotate => show(&client.rotate_keys().await?, json, |key| format!("{} seals from now on\n", key.id)),
        KeyCommand::Destroy(args) => {
            let is_id = args.key.chars().all(|c| c.is_ascii_hexdigit()) && !args.key.is_empty();
            ensure!(is_id, "there is no key {:?}: `kip key ls` lists them", args.key);
            let done = client.destroy_key(&args.key, args.yes).await?;
            show(&done, json, |done| format!("{} is destroyed\n", done.id))
        }
        KeyCommand::Export(args) => {
            // Before anything is typed.
            ensure!(!args.file.exists(), "{} is there already: give another name", args.file.display());
            let closed = client.export_keys(args.wrap(true)?).await?;
            write_new(&args.file, &closed.bytes.0).with_context(|| format!("cannot write {}", args.file.display()))?;
            let done = Exported { file: args.file, realm: closed.realm, keys: closed.keys };
            show(&done, json, |done| format!("{}: {} of realm {}\n", done.file.display(), count(done.keys), done.realm))
        }
        KeyCommand::Import(args) => {
            let closed = fs::read(&args.file).with_context(|| format!("cannot read {}", args.file.display()))?;
            let done = client.import_keys(args.wrap(false)?, closed).await;
            let done = done.with_context(|| format!("cannot import {}", args.file.display()))?;
            show(&done, json, imported)
        }
    }
}

fn show<T: Serialize>(value: &T, json: bool, human: impl FnOnce(&T) -> String) -> anyhow::Result<()> {
    if json { print_json(value) } else { print(&human(value)) }
}

fn count(keys: usize) -> String {
    if keys == 1 { "1 key".to_owned() } else { format!("{keys} keys") }
}

fn imported(done: &ImportedKeysView) -> String {
    let destroyed = match done.destroyed.len() {
        0 => String::new(),
        number => format!(", {number} destroyed"),
    };
    let current = done.current.as_deref().map_or("none", |id| id);
    format!("{} imported{destroyed}; {current} seals from now on\n", count(done.added.len()))
}

fn table(keys: &[KeyView]) -> String {
    let mut rows = vec![["KEY", "REALM", "STATE", "SINCE", "NEEDED-BY"].map(str::to_owned).to_vec()];
    rows.extend(keys.iter().map(|key| {
        let (state, since) = match (key.destroyed_at_ms, key.current) {
            (Some(at), _) => ("destroyed", Some(at)),
            (None, true) => ("seals", key.created_at_ms),
            (None, false) => ("opens", key.created_at_ms),
        };
        let names: Vec<&str> = key.procs.iter().map(|name| name.as_str()).collect();
        let names = if names.is_empty() { "-".to_owned() } else { text::short(&names.join(","), 40) };
        let since = since.map_or_else(|| "-".to_owned(), text::utc);
        vec![key.id.clone(), key.realm.to_string(), state.to_owned(), since, names]
    }));
    text::table(&rows)
}

/// Made by us, readable by root alone, and on the disk.
fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    // What is not whole is of no use.
    written.inspect_err(|_| drop(fs::remove_file(path)))
}

impl FileArgs {
    /// What closes the keys; with `is_new` a passphrase that is typed is asked for twice.
    pub fn wrap(&self, is_new: bool) -> anyhow::Result<KeysWrap> {
        if let Some(path) = &self.key_file {
            let key = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
            return Ok(KeysWrap::Key(Hex(key)));
        }
        let text = match &self.passphrase_file {
            Some(path) if path.as_os_str() == "-" => first_line(io::stdin().lock()).context("standard input")?,
            Some(path) => {
                let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
                first_line(io::BufReader::new(file)).with_context(|| path.display().to_string())?
            }
            None => typed(is_new)?,
        };
        Ok(KeysWrap::Passphrase(Hidden(text)))
    }
}

fn first_line(from: impl BufRead) -> anyhow::Result<String> {
    let mut line = String::new();
    from.take(LONGEST).read_line(&mut line).context("there is no passphrase that is text")?;
    let text = line.strip_suffix('\n').unwrap_or(&line);
    ensure!(!text.is_empty(), "there is no passphrase in the first line");
    Ok(text.to_owned())
}

/// The terminal: what is typed comes at once and is not shown. Dropped, all is as it was.
struct Unseen(Termios);

impl Unseen {
    fn take() -> anyhow::Result<Unseen> {
        let Ok(before) = tcgetattr(io::stdin()) else {
            bail!(
                "no passphrase is given and there is no terminal to ask at: --passphrase-file or --key-file gives one"
            );
        };
        let mut ours = before.clone();
        ours.local_modes -= LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
        ours.special_codes[SpecialCodeIndex::VMIN] = 1;
        ours.special_codes[SpecialCodeIndex::VTIME] = 0;
        tcsetattr(io::stdin(), OptionalActions::Now, &ours)?;
        Ok(Unseen(before))
    }
}

impl Drop for Unseen {
    fn drop(&mut self) {
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
    }
}

fn typed(is_new: bool) -> anyhow::Result<String> {
    let _unseen = Unseen::take()?;
    let ask = |what: &str| -> anyhow::Result<String> {
        let mut out = io::stderr().lock();
        write!(out, "{what}: ").and_then(|()| out.flush())?;
        let line = typed_line(io::stdin().lock().bytes());
        writeln!(out)?;
        line
    };
    let text = ask("passphrase")?;
    ensure!(!is_new || ask("again")? == text, "the two are not the same: nothing was done");
    Ok(text)
}

/// A line that a person types, with the keys that end and mend it.
fn typed_line(keys: impl Iterator<Item = io::Result<u8>>) -> anyhow::Result<String> {
    /// ascii(7).
    const BACKSPACE: u8 = 8;
    const DELETE: u8 = 127;
    /// Ctrl-C and Ctrl-D.
    const INTERRUPT: u8 = 3;
    const END: u8 = 4;
    let mut line = Vec::new();
    for key in keys {
        match key? {
            b'\n' | b'\r' => return String::from_utf8(line).context("the passphrase is not text"),
            INTERRUPT | END => break,
            BACKSPACE | DELETE => {
                // A whole character.
                while line.pop().is_some_and(|byte| byte & 0xc0 == 0x80) {}
            }
            byte => line.push(byte),
        }
    }
    bail!("no passphrase was given: nothing was done")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_passphrase_is_typed_and_mended() {
        let typed = |keys: &str| typed_line(keys.bytes().map(Ok)).ok();
        assert_eq!(typed("correct\n").as_deref(), Some("correct"));
        assert_eq!(typed("coü\u{7f}\u{7f}rrect\r").as_deref(), Some("crrect"));
        assert_eq!(typed("\u{8}a\n").as_deref(), Some("a"));
        assert_eq!((typed("abc\u{3}\n"), typed("abc"), typed("\u{4}")), (None, None, None));
    }

    #[test]
    fn a_passphrase_is_the_first_line() {
        assert_eq!(first_line(&b"two words \nmore\n"[..]).unwrap(), "two words ");
        assert_eq!(first_line(&b"no end"[..]).unwrap(), "no end");
        assert!(first_line(&b"\nmore"[..]).is_err() && first_line(&b""[..]).is_err());
        assert!(first_line(&[0xff, b'\n'][..]).is_err());
    }

    #[test]
    fn exported_keys_are_private_and_replace_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        write_new(&path, b"closed").unwrap();
        let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&path).unwrap().permissions());
        assert_eq!((mode & 0o777, fs::read(&path).unwrap()), (0o600, b"closed".to_vec()));
        assert_eq!(write_new(&path, b"other").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"closed");
    }

    #[test]
    fn keys_are_a_table() {
        let key = |id: &str, made, gone, current, procs: &[&str]| KeyView {
            id: id.into(),
            realm: Default::default(),
            created_at_ms: made,
            destroyed_at_ms: gone,
            current,
            procs: procs.iter().map(|name| name.parse().unwrap()).collect(),
        };
        let keys = [
            key("aa", None, Some(0), false, &[]),
            key("bb", Some(0), None, false, &["db", "web"]),
            key("cc", Some(0), None, true, &[]),
        ];
        let expected = "\
KEY  REALM    STATE      SINCE                     NEEDED-BY
aa   default  destroyed  1970-01-01T00:00:00.000Z  -
bb   default  opens      1970-01-01T00:00:00.000Z  db,web
cc   default  seals      1970-01-01T00:00:00.000Z  -
";
        assert_eq!(table(&keys), expected);
    }
}
