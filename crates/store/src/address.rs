//! URLs of stores: what they say, without looking whether it is there.

use crate::key::{Key, KeyError};
use std::path::PathBuf;
use url::Url;

/// A store cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Not a URL.
    #[error("{url:?} is no address of a store: give an absolute path, file:///dir or s3://bucket/prefix")]
    NotAnAddress {
        /// What was given.
        url: String,
    },
    /// A scheme that Kip does not know.
    #[error("store {url} has the scheme {scheme:?}: Kip knows file, s3, gs and az")]
    Scheme {
        /// What was given.
        url: String,
        /// Its scheme.
        scheme: String,
    },
    /// A scheme that was left out when Kip was built.
    #[error(
        "this Kip was built without {feature}: build it with --features {feature}, or use another store than {url}"
    )]
    NotBuilt {
        /// What was given.
        url: String,
        /// The feature of this crate.
        feature: &'static str,
    },
    /// Part of a URL.
    #[error("store {url}: {what}")]
    Part {
        /// What was given.
        url: String,
        /// What is wrong, and what would be right.
        what: String,
    },
    /// The path after the bucket.
    #[error("store {url} has a prefix that cannot begin a key")]
    Prefix {
        /// What was given.
        url: String,
        /// Why.
        #[source]
        source: KeyError,
    },
    /// An endpoint without TLS that the URL does not name.
    #[error(
        "the endpoint {endpoint} from {variable} has no TLS: where that is wanted, write it into the URL, \
         {url}?endpoint={endpoint}"
    )]
    PlainEndpoint {
        /// What was given.
        url: String,
        /// The endpoint.
        endpoint: String,
        /// The environment variable.
        variable: &'static str,
    },
    /// The directory is not there.
    #[error("directory {path} of the store does not exist: make it, or mount what it lies on")]
    NoDirectory {
        /// Which.
        path: PathBuf,
    },
    /// The directory cannot be used.
    #[error("directory {path} of the store cannot be opened")]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A profile of the AWS tools.
    #[error("store {url}: profile {profile:?} {what}")]
    Profile {
        /// What was given.
        url: String,
        /// Its name.
        profile: String,
        /// What is wrong with it.
        what: String,
    },
    /// A file of the AWS tools.
    #[error("{path}, where credentials of stores may be, cannot be read: {what}")]
    ProfileFile {
        /// Which.
        path: PathBuf,
        /// Why.
        what: String,
    },
    /// Half a pair of credentials, a file of certificates that cannot be read and the like.
    #[error("store {url} cannot be set up")]
    Setup {
        /// What was given.
        url: String,
        /// Why.
        #[source]
        source: object_store::Error,
    },
}

/// What a URL names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    Directory(PathBuf),
    Bucket(Bucket),
}

/// A bucket, or container, somewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bucket {
    pub(crate) kind: Kind,
    /// Its name.
    pub(crate) name: String,
    /// Before every key, without slashes at its ends; may be empty.
    pub(crate) prefix: String,
    /// `endpoint=`, without a slash at its end.
    pub(crate) endpoint: Option<String>,
    /// `region=`.
    pub(crate) region: Option<String>,
    /// The URL without its query, for messages.
    pub(crate) shown: String,
}

/// Whose protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    S3,
    Gcs,
    Azure,
}

impl Address {
    pub(crate) fn parse(text: &str) -> Result<Address, OpenError> {
        if text.starts_with('/') {
            return Ok(Address::Directory(PathBuf::from(text)));
        }
        let url = Url::parse(text).map_err(|_| OpenError::NotAnAddress { url: text.to_owned() })?;
        let kind = match url.scheme() {
            "file" => {
                return url
                    .to_file_path()
                    .map(Address::Directory)
                    .map_err(|()| part(text, "file: URLs name a path of this machine, file:///dir"));
            }
            "s3" => Kind::S3,
            "gs" => Kind::Gcs,
            "az" => Kind::Azure,
            scheme => return Err(OpenError::Scheme { url: text.to_owned(), scheme: scheme.to_owned() }),
        };
        bucket(text, &url, kind).map(Address::Bucket)
    }
}

fn part(url: &str, what: impl Into<String>) -> OpenError {
    OpenError::Part { url: url.to_owned(), what: what.into() }
}

fn bucket(text: &str, url: &Url, kind: Kind) -> Result<Bucket, OpenError> {
    let name = url.host_str().filter(|name| !name.is_empty()).ok_or_else(|| part(text, "it names no bucket"))?;
    if url.port().is_some() || !url.username().is_empty() || url.password().is_some() {
        return Err(part(
            text,
            "a bucket has neither port nor user; give endpoint=, and credentials by the environment",
        ));
    }
    let prefix = url.path().trim_matches('/').to_owned();
    if !prefix.is_empty() {
        Key::new(prefix.clone()).map_err(|source| OpenError::Prefix { url: text.to_owned(), source })?;
    }
    let (mut endpoint, mut region) = (None, None);
    for (name, value) in url.query_pairs() {
        match &*name {
            "endpoint" => endpoint = Some(self::endpoint(text, &value)?),
            "region" if kind == Kind::S3 && !value.is_empty() => region = Some(value.into_owned()),
            other => return Err(part(text, format!("{other:?} is none of its parameters: endpoint, region"))),
        }
    }
    let mut shown = url.clone();
    shown.set_query(None);
    let shown = shown.as_str().trim_end_matches('/').to_owned();
    Ok(Bucket { kind, name: name.to_owned(), prefix, endpoint, region, shown })
}

/// An endpoint, checked, without a slash at its end.
pub(crate) fn endpoint(url: &str, value: &str) -> Result<String, OpenError> {
    let parsed = Url::parse(value).ok().filter(|parsed| {
        matches!(parsed.scheme(), "http" | "https")
            && parsed.path() == "/"
            && parsed.query().is_none()
            && parsed.username().is_empty()
            && parsed.has_host()
    });
    let parsed =
        parsed.ok_or_else(|| part(url, format!("endpoint {value:?} is not http(s)://host or http(s)://host:port")))?;
    Ok(parsed.as_str().trim_end_matches('/').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bucket_of(text: &str) -> Bucket {
        match Address::parse(text).unwrap() {
            Address::Bucket(bucket) => bucket,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn paths_and_file_urls_are_directories() {
        for text in ["/var/lib/kip archive", "file:///var/lib/kip%20archive"] {
            assert_eq!(Address::parse(text).unwrap(), Address::Directory("/var/lib/kip archive".into()));
        }
        assert!(Address::parse("file://elsewhere/x").unwrap_err().to_string().contains("file:///dir"));
    }

    #[test]
    fn a_bucket_has_prefix_endpoint_and_region() {
        let bucket = bucket_of("s3://b/a/c/?endpoint=http://127.0.0.1:7070/&region=eu-1");
        assert_eq!((bucket.name.as_str(), bucket.prefix.as_str()), ("b", "a/c"));
        assert_eq!(bucket.endpoint.as_deref(), Some("http://127.0.0.1:7070"));
        assert_eq!((bucket.region.as_deref(), bucket.shown.as_str()), (Some("eu-1"), "s3://b/a/c"));
        assert_eq!(bucket_of("s3://b").prefix, "");
        assert_eq!(bucket_of("gs://b/x").kind, Kind::Gcs);
        assert_eq!(bucket_of("az://b/x").kind, Kind::Azure);
    }

    #[test]
    fn what_makes_no_sense_is_said() {
        for (text, word) in [
            ("bucket/prefix", "no address of a store"),
            ("", "no address of a store"),
            ("ftp://x/y", "Kip knows file, s3, gs and az"),
            ("s3:///x", "names no bucket"),
            ("s3://b/x?region=", "none of its parameters"),
            ("s3://b/x?regoin=eu", "\"regoin\" is none of its parameters"),
            ("s3://b/x?endpoint=127.0.0.1:7", "is not http(s)://host"),
            ("s3://b/x?endpoint=http://h/path", "is not http(s)://host"),
            ("s3://key:secret@b/x", "neither port nor user"),
            ("s3://b/a//b", "prefix that cannot begin a key"),
            ("s3://b/a%20b", "prefix that cannot begin a key"),
        ] {
            let error = Address::parse(text).expect_err(text).to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
