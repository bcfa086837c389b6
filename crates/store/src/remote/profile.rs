//! Credentials from the files of the AWS tools: `~/.aws/credentials` and `~/.aws/config`.
//!
//! Knows keys and the region of a profile, as they stand there; what these files can say beside
//! that (roles to assume, programs to ask, single sign-on) is named and refused. Read once, when a
//! store is opened.

use super::open::from_environment;
use crate::address::OpenError;
use crate::settings::Credentials;
use configparser::ini::{Ini, IniDefault};
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};

/// What asks for more than keys.
const BEYOND_KEYS: [&str; 6] =
    ["role_arn", "credential_process", "sso_session", "sso_start_url", "web_identity_token_file", "credential_source"];

/// What a profile says.
#[derive(Debug, Default)]
pub(super) struct Profile {
    pub(super) credentials: Option<Credentials>,
    pub(super) region: Option<String>,
}

type Section = HashMap<String, Option<String>>;

/// The profile of the environment: `AWS_PROFILE`, or `default`. One that is asked for must have
/// what is `wanted`.
pub(super) fn read(url: &str, wanted: bool) -> Result<Profile, OpenError> {
    let asked = from_environment("AWS_PROFILE");
    let name = asked.as_deref().unwrap_or("default");
    let (keys, config) =
        (place("AWS_SHARED_CREDENTIALS_FILE", ".aws/credentials"), place("AWS_CONFIG_FILE", ".aws/config"));
    let in_config = if name == "default" { name.to_owned() } else { format!("profile {name}") };
    // A key in the first counts before one in the second.
    let mut found = Section::new();
    for (path, section) in [(&config, in_config.as_str()), (&keys, name)] {
        let Some(path) = path else { continue };
        found.extend(sections(path)?.remove(section).unwrap_or_default());
    }
    let value = |key: &str| found.get(key).cloned().flatten().filter(|value| !value.is_empty());
    let region = value("region");
    let credentials = match (value("aws_access_key_id"), value("aws_secret_access_key")) {
        (Some(key_id), Some(secret)) => Some(Credentials { key_id, secret, session_token: value("aws_session_token") }),
        (None, None) => None,
        _ => {
            let what = "has one of aws_access_key_id and aws_secret_access_key only: it takes both".to_owned();
            return Err(OpenError::Profile { url: url.to_owned(), profile: name.to_owned(), what });
        }
    };
    if credentials.is_none() && wanted {
        let beyond = BEYOND_KEYS.iter().find(|key| value(key).is_some());
        let what = match beyond {
            Some(key) => format!("has {key}, which Kip does not follow: give it keys, or set AWS_ACCESS_KEY_ID"),
            None if asked.is_none() => return Ok(Profile { credentials, region }),
            None => {
                let files: Vec<String> =
                    [keys, config].iter().flatten().map(|path| path.display().to_string()).collect();
                format!("is asked for by AWS_PROFILE and has no keys in {}", files.join(" or "))
            }
        };
        return Err(OpenError::Profile { url: url.to_owned(), profile: name.to_owned(), what });
    }
    Ok(Profile { credentials, region })
}

fn place(variable: &str, at_home: &str) -> Option<PathBuf> {
    from_environment(variable)
        .map(PathBuf::from)
        .or_else(|| from_environment("HOME").map(|home| Path::new(&home).join(at_home)))
}

/// A file that is not there has none.
fn sections(path: &Path) -> Result<HashMap<String, Section>, OpenError> {
    let fault = |what: String| OpenError::ProfileFile { path: path.to_owned(), what };
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(HashMap::new());
        }
        Err(e) => return Err(fault(e.to_string())),
    };
    let mut settings = IniDefault::default();
    settings.case_sensitive = true;
    settings.delimiters = vec!['='];
    // Secrets may have these in them.
    settings.inline_comment_symbols = Some(Vec::new());
    // What is indented belongs to the setting above it: none of those is a key or a region.
    let own: Vec<&str> = text.lines().filter(|line| !line.starts_with([' ', '\t'])).collect();
    Ini::new_from_defaults(settings).read(own.join("\n")).map_err(fault)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<HashMap<String, Section>, OpenError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        sections(file.path())
    }

    #[test]
    fn sections_are_read_as_they_stand() {
        let read = of(
            "# mine\n[default]\naws_access_key_id = A\naws_secret_access_key=b/c+d=#;e\n\n[Other one]\nregion = x\n",
        )
        .unwrap();
        assert_eq!(read["default"]["aws_secret_access_key"].as_deref(), Some("b/c+d=#;e"));
        assert_eq!(read["default"]["aws_access_key_id"].as_deref(), Some("A"));
        assert_eq!(read["Other one"]["region"].as_deref(), Some("x"));
        assert!(sections(Path::new("/nowhere/at/all")).unwrap().is_empty());
    }

    #[test]
    fn nested_settings_of_a_profile_are_no_settings_of_its_own() {
        let read = of("[default]\nregion = a\ns3 =\n  max_concurrent_requests = 20\n  region = b\n").unwrap();
        assert_eq!(read["default"]["region"].as_deref(), Some("a"));
    }

    #[test]
    fn what_is_no_such_file_is_said_so() {
        let error = of("[default\nx").unwrap_err().to_string();
        assert!(error.contains("cannot be read"), "{error}");
    }
}
