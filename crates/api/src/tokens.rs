//! Tokens, which let clients in by TCP: `DIR/tokens.json`.
//!
//! A token is 256 random bits that are shown once. Kept is its hash, which leads nowhere: 256 bits
//! cannot be guessed. The file is replaced whole, so a crash leaves the tokens before or those
//! after.

use crate::lock::DataLock;
use kip_types::api::{Code, NewToken, Refusal, Scope, TokenRequest, TokenView};
use kip_types::name::ProcName;
use parking_lot::Mutex;
use ring::rand::{SecureRandom, SystemRandom};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// What every token begins with, so that it is known as one where it is lost.
const PREFIX: &str = "kip_";

/// A token as it is kept.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Kept {
    #[serde(flatten)]
    view: TokenView,
    /// BLAKE3 of its text, hexadecimal.
    hash: String,
}

/// The tokens could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TokensError {
    /// The file could not be read.
    #[error("cannot read the tokens in {}", .path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file is not what was written.
    #[error("{} is damaged: remove it, then make new tokens with `kip token create`", .path.display())]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
}

/// The tokens of a data directory.
#[derive(Debug)]
pub struct Tokens {
    path: PathBuf,
    kept: Mutex<Vec<Kept>>,
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

impl Tokens {
    /// Reads those that are there.
    pub fn open(lock: &DataLock) -> Result<Tokens, TokensError> {
        let path = lock.data().join("tokens.json");
        let kept = match std::fs::read(&path) {
            Ok(text) => {
                serde_json::from_slice(&text).map_err(|source| TokensError::Damaged { path: path.clone(), source })?
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(source) => return Err(TokensError::Read { path, source }),
        };
        Ok(Tokens { path, kept: Mutex::new(kept) })
    }

    pub(crate) fn list(&self) -> Vec<TokenView> {
        self.kept.lock().iter().map(|kept| kept.view.clone()).collect()
    }

    pub(crate) fn create(&self, request: TokenRequest) -> Result<NewToken, Refusal> {
        let mut bits = [0; 32];
        let random = SystemRandom::new().fill(&mut bits);
        random.map_err(|_| Refusal::new(Code::Failed, "the kernel gives no random bytes"))?;
        let token = format!("{PREFIX}{}", bits.map(|byte| format!("{byte:02x}")).concat());
        let now = now_ms();
        let expires_at_ms = request.expires_in_ms.map(|ms| now.saturating_add(ms));
        let view = TokenView { name: request.name, scope: request.scope, created_at_ms: now, expires_at_ms };
        let hash = blake3::hash(token.as_bytes()).to_hex().to_string();
        self.change(|kept| {
            if kept.iter().any(|other| other.view.name == view.name) {
                return Err(Refusal::new(Code::Taken, format!("there is a token {} already", view.name))
                    .with_hint("give another name, or remove it with `kip token rm`"));
            }
            kept.push(Kept { view: view.clone(), hash });
            kept.sort_by(|a, b| a.view.name.cmp(&b.view.name));
            Ok(())
        })?;
        Ok(NewToken { token, view })
    }

    pub(crate) fn remove(&self, name: &ProcName) -> Result<(), Refusal> {
        self.change(|kept| {
            let before = kept.len();
            kept.retain(|one| one.view.name != *name);
            match kept.len() < before {
                true => Ok(()),
                false => Err(Refusal::new(Code::Unknown, format!("there is no token {name}"))),
            }
        })
    }

    /// Changes them in the file first.
    fn change(&self, how: impl FnOnce(&mut Vec<Kept>) -> Result<(), Refusal>) -> Result<(), Refusal> {
        let mut kept = self.kept.lock();
        let mut changed = kept.clone();
        how(&mut changed)?;
        write(&self.path, &changed)
            .map_err(|e| Refusal::new(Code::Failed, format!("cannot write {}: {e}", self.path.display())))?;
        *kept = changed;
        Ok(())
    }

    /// What the holder of `token` may do. All hashes are compared, each in constant time.
    pub(crate) fn scope(&self, token: &str) -> Result<Scope, Refusal> {
        let hash = blake3::hash(token.as_bytes());
        let kept = self.kept.lock();
        let mut found = None;
        for one in kept.iter() {
            if blake3::Hash::from_hex(&one.hash).is_ok_and(|other| other == hash) {
                found = Some(one);
            }
        }
        let Some(found) = found else {
            return Err(Refusal::new(Code::Unauthorized, "this daemon does not know the token")
                .with_hint("`kip token create NAME` on its machine makes one"));
        };
        if found.view.expires_at_ms.is_some_and(|at| at <= now_ms()) {
            return Err(Refusal::new(Code::Unauthorized, format!("the token {} has expired", found.view.name))
                .with_hint("`kip token create` on the daemon's machine makes another"));
        }
        Ok(found.view.scope)
    }
}

/// Durable: temporary file, sync, rename, sync of the directory.
fn write(path: &Path, kept: &[Kept]) -> io::Result<()> {
    let beside = path.with_extension("json.new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
    file.write_all(&serde_json::to_vec(kept).expect("tokens are JSON"))?;
    file.sync_all()?;
    std::fs::rename(&beside, path)?;
    File::open(path.parent().expect("the file lies in the data directory"))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_outlive_the_daemon_and_are_kept_as_hashes() {
        let dir = tempfile::tempdir().unwrap();
        let lock = DataLock::take(dir.path(), None).unwrap();
        let request =
            |name: &str, ms| TokenRequest { name: name.parse().unwrap(), scope: Scope::Read, expires_in_ms: ms };
        let tokens = Tokens::open(&lock).unwrap();
        let made = tokens.create(request("ci", None)).unwrap();
        assert_eq!(made.token.len(), PREFIX.len() + 64);
        assert_eq!(tokens.create(request("ci", None)).map(drop).unwrap_err().code, Code::Taken);
        let old = tokens.create(request("old", Some(0))).unwrap();
        drop(tokens);
        let text = std::fs::read_to_string(dir.path().join("tokens.json")).unwrap();
        assert!(!text.contains(&made.token[PREFIX.len()..]), "{text}");
        let tokens = Tokens::open(&lock).unwrap();
        assert_eq!(tokens.scope(&made.token).unwrap(), Scope::Read);
        assert!(tokens.scope(&old.token).unwrap_err().message.contains("expired"));
        assert_eq!(tokens.scope("kip_0").unwrap_err().code, Code::Unauthorized);
        tokens.remove(&made.view.name).unwrap();
        assert_eq!(tokens.scope(&made.token).unwrap_err().code, Code::Unauthorized);
        std::fs::write(dir.path().join("tokens.json"), "[").unwrap();
        assert!(Tokens::open(&lock).unwrap_err().to_string().contains("tokens.json is damaged"));
    }
}
