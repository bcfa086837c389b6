//! What can go wrong, in words for people: one line that says what, where and what to do.
//!
//! [`StoreFailure`] is the store's own trouble and the same for every operation; the error of an
//! operation adds what only it can meet. Nothing here decides to try again, but
//! [`StoreFailure::is_temporary`] says whether that could help.

use crate::key::Key;
use crate::wire::{Answer, Cause, Misfortune, TransportError};
use http::StatusCode;
use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The store cannot do it.
#[derive(Debug, thiserror::Error)]
pub enum StoreFailure {
    /// No connection.
    #[error(
        "store {store} cannot be reached at {endpoint}: is the endpoint right, is it up, does the network lead there?"
    )]
    Unreachable {
        /// As in the URL.
        store: Arc<str>,
        /// Where.
        endpoint: Arc<str>,
        /// Why.
        #[source]
        source: Cause,
    },
    /// The server is not what it claims to be.
    #[error(
        "store {store} is not trusted: the TLS certificate of {endpoint} is not signed by an authority of this machine"
    )]
    Certificate {
        /// As in the URL.
        store: Arc<str>,
        /// Where.
        endpoint: Arc<str>,
        /// Why.
        #[source]
        source: Cause,
    },
    /// It says nothing.
    #[error("store {store} did not answer at {endpoint} within {waited_ms} ms")]
    TimedOut {
        /// As in the URL.
        store: Arc<str>,
        /// Where.
        endpoint: Arc<str>,
        /// How long the last attempt waited.
        waited_ms: u64,
    },
    /// It stopped in the middle.
    #[error("the connection to store {store} at {endpoint} broke in the middle")]
    Broken {
        /// As in the URL.
        store: Arc<str>,
        /// Where.
        endpoint: Arc<str>,
        /// Why.
        #[source]
        source: Cause,
    },
    /// Too much to do, or ill.
    #[error("store {store} is overloaded or ill: {endpoint} answered {status} {code}")]
    Busy {
        /// As in the URL.
        store: Arc<str>,
        /// Where.
        endpoint: Arc<str>,
        /// HTTP status.
        status: u16,
        /// The store's word for it.
        code: String,
    },
    /// None were found.
    #[error(
        "there are no credentials for store {store}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give this \
         machine a role"
    )]
    NoCredentials {
        /// As in the URL.
        store: Arc<str>,
    },
    /// They are not accepted.
    #[error(
        "store {store} does not accept the credentials ({code}): check the key, its secret and whether it has ended"
    )]
    WrongCredentials {
        /// As in the URL.
        store: Arc<str>,
        /// The store's word for it.
        code: String,
    },
    /// They do not allow this.
    #[error(
        "store {store} forbids this with these credentials ({code}): allow them to get, put, delete and list there"
    )]
    Forbidden {
        /// As in the URL.
        store: Arc<str>,
        /// The store's word for it.
        code: String,
    },
    /// There is none of this name.
    #[error("bucket {bucket:?} does not exist at {endpoint}: create it, or correct the URL")]
    NoBucket {
        /// Its name.
        bucket: Arc<str>,
        /// Where.
        endpoint: Arc<str>,
    },
    /// It lies elsewhere.
    #[error("store {store} lies in another region{}: add region= to its URL", .region.as_ref().map(|r| format!(", {r}")).unwrap_or_default())]
    WrongRegion {
        /// As in the URL.
        store: Arc<str>,
        /// Where it lies, if the store says.
        region: Option<String>,
    },
    /// Signatures carry the time.
    #[error("the clock of this machine differs too much from that of {endpoint}: set it, for example with NTP")]
    ClockSkew {
        /// Where.
        endpoint: Arc<str>,
    },
    /// A no that has no other name here.
    #[error("store {store} refused: {endpoint} answered {status} {code}: {message}")]
    Refused {
        /// As in the URL.
        store: Arc<str>,
        /// Where.
        endpoint: Arc<str>,
        /// HTTP status.
        status: u16,
        /// The store's word for it.
        code: String,
        /// The store's sentence.
        message: String,
    },
    /// An answer that makes no sense.
    #[error("store {store} gave an answer that cannot be understood: is {endpoint} an object store?")]
    Unintelligible {
        /// As in the URL.
        store: Arc<str>,
        /// Where.
        endpoint: Arc<str>,
        /// Why.
        #[source]
        source: Cause,
    },
    /// No space, or no quota, in a directory.
    #[error("no space is left for {path}: free some, or raise the quota")]
    DiskFull {
        /// Which file.
        path: PathBuf,
    },
    /// A directory's permissions.
    #[error("no permission for {path}: the user that Kip runs as must be able to read and write there")]
    NotPermitted {
        /// Which file.
        path: PathBuf,
    },
    /// A directory on a read-only file system.
    #[error("{path} lies on a read-only file system: mount it for writing")]
    ReadOnly {
        /// Which file.
        path: PathBuf,
    },
    /// The directory itself went away.
    #[error("directory {path} of the store is gone: is its file system mounted?")]
    DirectoryGone {
        /// Which.
        path: PathBuf,
    },
    /// `a` and `a/b` in a directory.
    #[error("{path} cannot be made: in a directory an object cannot also be the beginning of another object's key")]
    NameTaken {
        /// Which file.
        path: PathBuf,
    },
    /// Another process holds a reference's lock and does not let go.
    #[error("{path} was locked by another process for {waited_ms} ms: does it hang?")]
    Locked {
        /// The lock.
        path: PathBuf,
        /// How long was waited.
        waited_ms: u64,
    },
    /// A file system without locks.
    #[error("the file system of {path} has no locks: mount it with them, or keep the store elsewhere")]
    NoLocks {
        /// The directory of the store.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A file system that does not come back.
    #[error("the file system of {path} did not answer within {waited_ms} ms: is its server up?")]
    Hangs {
        /// The directory of the store.
        path: PathBuf,
        /// How long was waited.
        waited_ms: u64,
    },
    /// An operation as a whole took too long; what kept it, if anything did, stands in the log.
    #[error("store {store} did not bring this to an end within {waited_ms} ms: is it overloaded, is the network slow?")]
    TookTooLong {
        /// As in the URL.
        store: Arc<str>,
        /// How long was waited, attempts and waits together.
        waited_ms: u64,
    },
    /// A task of the store's own came to no end. Nothing to be done about it but to start Kip
    /// again.
    #[error("work on store {store} was cut off: Kip is shutting down, or this is a bug")]
    Ended {
        /// As in the URL.
        store: Arc<str>,
        /// Why.
        #[source]
        source: Cause,
    },
    /// The file system's word.
    #[error("file {path} of the store cannot be read or written")]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl StoreFailure {
    /// Whether the same request may succeed later by itself. Requests whose errors cannot pass are
    /// not tried again.
    pub fn is_temporary(&self) -> bool {
        matches!(
            self,
            StoreFailure::Unreachable { .. }
                | StoreFailure::TimedOut { .. }
                | StoreFailure::Broken { .. }
                | StoreFailure::Busy { .. }
                | StoreFailure::Locked { .. }
                | StoreFailure::Hangs { .. }
                | StoreFailure::TookTooLong { .. }
        )
    }

    /// Whether the store may have acted, or may still act, on a request that ended so.
    pub(crate) fn may_have_acted(&self) -> bool {
        match self {
            StoreFailure::TimedOut { .. } | StoreFailure::Broken { .. } | StoreFailure::Unintelligible { .. } => true,
            // A 503 without a code of the store's own is from a proxy before the store, which may
            // have passed the request on.
            StoreFailure::Busy { status: 503, code, .. } => code.is_empty(),
            StoreFailure::Busy { status, .. } => *status != 429,
            _ => false,
        }
    }

    /// What a file operation's error means.
    pub(crate) fn of_file(path: &Path, source: io::Error) -> StoreFailure {
        use io::ErrorKind::{
            DirectoryNotEmpty, IsADirectory, NotADirectory, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem,
            StorageFull,
        };
        let path = path.to_owned();
        match source.kind() {
            StorageFull | QuotaExceeded => StoreFailure::DiskFull { path },
            PermissionDenied => StoreFailure::NotPermitted { path },
            ReadOnlyFilesystem => StoreFailure::ReadOnly { path },
            NotADirectory | IsADirectory | DirectoryNotEmpty => StoreFailure::NameTaken { path },
            _ => StoreFailure::Io { path, source },
        }
    }
}

/// A read gives nothing, or no more.
#[derive(Debug, thiserror::Error)]
pub enum GetError {
    /// There is none.
    #[error("store {store} has no object {key}")]
    Missing {
        /// As in the URL.
        store: Arc<str>,
        /// Which.
        key: Key,
    },
    /// The object is shorter.
    #[error(
        "bytes {start} to {end} of {key} in store {store} lie beyond its end{}",
        .size.map(|size| format!(", it has {size}")).unwrap_or_default()
    )]
    BeyondEnd {
        /// As in the URL.
        store: Arc<str>,
        /// Which.
        key: Key,
        /// First byte asked for.
        start: u64,
        /// First byte not asked for.
        end: u64,
        /// Bytes of the object, if the store said.
        size: Option<u64>,
    },
    /// What came is of one object, what would follow of another.
    #[error("object {key} of store {store} was replaced or deleted while it was read: read it again from the start")]
    Changed {
        /// As in the URL.
        store: Arc<str>,
        /// Which.
        key: Key,
    },
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreFailure),
}

/// An object was not written, or it is not known whether it was: after a temporary failure it may
/// be there, whole.
#[derive(Debug, thiserror::Error)]
pub enum PutError {
    /// It is in its place, or may be, but whether it stays or whether it is this one could not be
    /// learned.
    #[error(
        "whether object {key} of store {store} was written is not known: write it again, under another key if it must not be replaced"
    )]
    Unknown {
        /// As in the URL.
        store: Arc<str>,
        /// Which.
        key: Key,
        /// What hid it.
        #[source]
        source: Box<StoreFailure>,
    },
    /// A [`crate::Writer`] whose earlier bytes were not taken. Nothing was written.
    #[error("object {key} of store {store} lacks bytes that could not be written: begin it again")]
    Incomplete {
        /// As in the URL.
        store: Arc<str>,
        /// Which.
        key: Key,
    },
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreFailure),
}

/// A reference cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadReferenceError {
    /// Something else wrote there.
    #[error("object {key} of store {store} is no reference: it was not written by swapping")]
    NotAReference {
        /// As in the URL.
        store: Arc<str>,
        /// Which.
        key: Key,
    },
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreFailure),
}

/// A reference was not changed, but for [`SwapError::Superseded`] and [`SwapError::Unknown`], which
/// say what is known.
#[derive(Debug, thiserror::Error)]
pub enum SwapError {
    /// Another value stands than the one expected. The own value never stood.
    #[error("reference {key} of store {store} has another version than expected: read it again")]
    Conflict {
        /// As in the URL.
        store: Arc<str>,
        /// Which.
        key: Key,
    },
    /// Another value stands, and an answer was lost before: the own value may have stood in between
    /// and been read.
    #[error(
        "reference {key} of store {store} has another version now; whether this change stood before it is not known"
    )]
    Superseded {
        /// As in the URL.
        store: Arc<str>,
        /// Which.
        key: Key,
    },
    /// An answer was lost and the store could not be asked, or a request that was sent may still
    /// arrive.
    #[error(
        "whether reference {key} of store {store} was changed is not known: read it again before relying on either"
    )]
    Unknown {
        /// As in the URL.
        store: Arc<str>,
        /// Which.
        key: Key,
        /// What hid it.
        #[source]
        source: Box<StoreFailure>,
    },
    /// Something else wrote there.
    #[error("object {key} of store {store} is no reference: it was not written by swapping")]
    NotAReference {
        /// As in the URL.
        store: Arc<str>,
        /// Which.
        key: Key,
    },
    /// The store. The reference is as it was.
    #[error(transparent)]
    Store(#[from] StoreFailure),
}

macro_rules! temporary_if_the_store_is {
    ($($error:ident),*) => {$(
        impl $error {
            /// Whether the same request may succeed later by itself.
            pub fn is_temporary(&self) -> bool {
                matches!(self, $error::Store(failure) if failure.is_temporary())
            }
        }
    )*};
}
temporary_if_the_store_is!(GetError, PutError, ReadReferenceError, SwapError);

/// What became of one request, as far as an operation may care.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// 404 for the object.
    Missing,
    /// 412: the condition does not hold.
    Condition,
    /// 416; how long the object is.
    BeyondEnd(Option<u64>),
    /// 404 for the upload.
    NoUpload,
    /// Everything that is the same for all.
    Store(StoreFailure),
}

/// The names of a store for messages.
#[derive(Debug, Clone)]
pub(crate) struct Names {
    /// For example `s3://bucket/prefix`.
    pub(crate) store: Arc<str>,
    /// For example `http://127.0.0.1:7070`.
    pub(crate) endpoint: Arc<str>,
    /// The bucket, or container.
    pub(crate) bucket: Arc<str>,
}

impl Names {
    pub(crate) fn timed_out(&self, waited: std::time::Duration) -> Trouble {
        let waited_ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
        Trouble::Store(StoreFailure::TimedOut { store: self.store.clone(), endpoint: self.endpoint.clone(), waited_ms })
    }

    pub(crate) fn broken(&self, source: Cause) -> Trouble {
        Trouble::Store(StoreFailure::Broken { store: self.store.clone(), endpoint: self.endpoint.clone(), source })
    }

    /// What `object_store` met.
    pub(crate) fn trouble(&self, error: object_store::Error) -> Trouble {
        let Some(misfortune) = find(&error) else {
            let (store, endpoint, source) = (self.store.clone(), self.endpoint.clone(), Cause::new(error));
            return Trouble::Store(StoreFailure::Unintelligible { store, endpoint, source });
        };
        let (store, endpoint) = (self.store.clone(), self.endpoint.clone());
        match misfortune.what.clone() {
            TransportError::Connect(_) if !misfortune.with_the_store => {
                Trouble::Store(StoreFailure::NoCredentials { store })
            }
            TransportError::Connect(source) => Trouble::Store(StoreFailure::Unreachable { store, endpoint, source }),
            TransportError::Certificate(source) => {
                Trouble::Store(StoreFailure::Certificate { store, endpoint, source })
            }
            TransportError::Broken(source) => self.broken(source),
            TransportError::Stalled(waited) => self.timed_out(waited),
            what @ TransportError::Senseless => {
                Trouble::Store(StoreFailure::Unintelligible { store, endpoint, source: Cause::new(what) })
            }
            TransportError::Answered(answer) if misfortune.with_the_store => self.answered(answer),
            TransportError::Answered(answer) => Trouble::Store(self.credentials_answered(answer)),
        }
    }

    fn credentials_answered(&self, answer: Answer) -> StoreFailure {
        let store = self.store.clone();
        match answer.status {
            StatusCode::NOT_FOUND => StoreFailure::NoCredentials { store },
            status if is_passing(status, &answer.code) => self.busy(answer),
            status if answer.code.is_empty() => StoreFailure::WrongCredentials { store, code: status.to_string() },
            _ => StoreFailure::WrongCredentials { store, code: answer.code },
        }
    }

    fn busy(&self, answer: Answer) -> StoreFailure {
        let (store, endpoint) = (self.store.clone(), self.endpoint.clone());
        StoreFailure::Busy { store, endpoint, status: answer.status.as_u16(), code: answer.code }
    }

    /// S3's codes: <https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html>.
    fn answered(&self, answer: Answer) -> Trouble {
        let (store, endpoint) = (self.store.clone(), self.endpoint.clone());
        Trouble::Store(match (answer.code.as_str(), answer.status.as_u16()) {
            ("NoSuchBucket" | "ContainerNotFound", _) => {
                StoreFailure::NoBucket { bucket: self.bucket.clone(), endpoint }
            }
            ("NoSuchUpload", _) => return Trouble::NoUpload,
            // Azure's, for what others answer with 412.
            ("BlobAlreadyExists", _) => return Trouble::Condition,
            ("RequestTimeTooSkewed", _) => StoreFailure::ClockSkew { endpoint },
            ("PermanentRedirect" | "TemporaryRedirect" | "IllegalLocationConstraintException", _) | (_, 301 | 307) => {
                StoreFailure::WrongRegion { store, region: answer.bucket_region }
            }
            ("AuthorizationHeaderMalformed", _) if answer.bucket_region.is_some() => {
                StoreFailure::WrongRegion { store, region: answer.bucket_region }
            }
            (
                "InvalidAccessKeyId"
                | "SignatureDoesNotMatch"
                | "ExpiredToken"
                | "InvalidToken"
                | "TokenRefreshRequired"
                | "AuthorizationHeaderMalformed"
                | "AuthenticationFailed"
                | "XAdminUserNotFound",
                _,
            ) => StoreFailure::WrongCredentials { store, code: answer.code },
            (_, 401) => StoreFailure::WrongCredentials { store, code: "401".into() },
            (code, _) if is_passing(answer.status, code) => self.busy(answer),
            (code, 403) => {
                let code = if code.is_empty() { "403" } else { code };
                StoreFailure::Forbidden { store, code: code.to_owned() }
            }
            // Not every 404 speaks of the object: to call it missing is to call what lies there
            // lost.
            ("NoSuchKey" | "NoSuchVersion" | "BlobNotFound" | "ResourceNotFound", 404) => return Trouble::Missing,
            ("", 404) if answer.to_head => return Trouble::Missing,
            (_, 304 | 412) => return Trouble::Condition,
            (_, 416) => return Trouble::BeyondEnd(answer.object_size),
            (_, status) => {
                StoreFailure::Refused { store, endpoint, status, code: answer.code, message: answer.message }
            }
        })
    }
}

/// Whether an answer speaks of now and not of ever. 409: another conditional request is under way.
fn is_passing(status: StatusCode, code: &str) -> bool {
    let codes = [
        "SlowDown",
        "ServiceUnavailable",
        "InternalError",
        "RequestTimeout",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "ConditionalRequestConflict",
        "OperationAborted",
    ];
    let statuses = [408, 409, 425, 429, 500, 502, 503, 504];
    codes.contains(&code) || statuses.contains(&status.as_u16())
}

fn find<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a Misfortune> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(misfortune) = error.downcast_ref() {
            return Some(misfortune);
        }
        next = error.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Names {
        Names { store: "s3://b/p".into(), endpoint: "https://s3.x".into(), bucket: "b".into() }
    }

    fn answer(status: u16, code: &str) -> Answer {
        Answer {
            status: StatusCode::from_u16(status).unwrap(),
            code: code.into(),
            message: "sentence".into(),
            to_head: false,
            bucket_region: None,
            object_size: None,
        }
    }

    fn failure(status: u16, code: &str) -> StoreFailure {
        match names().answered(answer(status, code)) {
            Trouble::Store(failure) => failure,
            other => panic!("{status} {code}: {other:?}"),
        }
    }

    #[test]
    fn what_passes_is_told_from_what_stays() {
        let passing =
            [(503, "SlowDown"), (500, "InternalError"), (429, ""), (502, ""), (400, "RequestTimeout"), (409, "")];
        for (status, code) in passing.into_iter().chain([(200, "InternalError"), (200, "SlowDown")]) {
            assert!(failure(status, code).is_temporary(), "{status} {code}");
        }
        let staying = [
            (403, "AccessDenied"),
            (403, "RequestTimeTooSkewed"),
            (403, "SignatureDoesNotMatch"),
            (400, "ExpiredToken"),
            (401, ""),
            (404, "NoSuchBucket"),
            (301, "PermanentRedirect"),
            (400, "InvalidRequest"),
            (501, "NotImplemented"),
            (403, ""),
        ];
        for (status, code) in staying {
            assert!(!failure(status, code).is_temporary(), "{status} {code}");
        }
    }

    #[test]
    fn each_failure_is_one_line_that_says_what_to_do() {
        let line = |status, code| failure(status, code).to_string();
        assert_eq!(
            line(404, "NoSuchBucket"),
            "bucket \"b\" does not exist at https://s3.x: create it, or correct the URL"
        );
        assert!(line(403, "RequestTimeTooSkewed").contains("clock"));
        assert!(line(403, "InvalidAccessKeyId").contains("does not accept the credentials (InvalidAccessKeyId)"));
        assert!(line(403, "AccessDenied").contains("forbids"));
        assert!(line(503, "SlowDown").contains("https://s3.x answered 503 SlowDown"));
        let region = Names::answered(&names(), Answer { bucket_region: Some("eu-1".into()), ..answer(301, "") });
        assert!(matches!(&region, Trouble::Store(f) if f.to_string().contains("another region, eu-1: add region=")));
    }

    #[test]
    fn answers_about_the_object_are_no_failures_of_the_store() {
        assert!(matches!(names().answered(answer(404, "NoSuchKey")), Trouble::Missing));
        assert!(matches!(names().answered(Answer { to_head: true, ..answer(404, "") }), Trouble::Missing));
        assert!(matches!(failure(404, ""), StoreFailure::Refused { status: 404, .. }));
        assert!(matches!(failure(404, "XAdminUserNotFound"), StoreFailure::WrongCredentials { .. }));
        assert!(matches!(names().answered(answer(404, "NoSuchUpload")), Trouble::NoUpload));
        assert!(matches!(names().answered(answer(412, "PreconditionFailed")), Trouble::Condition));
        assert!(matches!(names().answered(answer(409, "BlobAlreadyExists")), Trouble::Condition));
        assert!(matches!(names().answered(answer(416, "InvalidRange")), Trouble::BeyondEnd(None)));
    }

    #[test]
    fn a_machine_without_credentials_is_told_from_a_store_that_is_away() {
        let met = |with_the_store, what| {
            let source = Box::new(Misfortune { with_the_store, what });
            match names().trouble(object_store::Error::Generic { store: "S3", source }) {
                Trouble::Store(failure) => failure,
                other => panic!("{other:?}"),
            }
        };
        let refused = || TransportError::Connect(Cause::new(io::Error::from(io::ErrorKind::ConnectionRefused)));
        assert!(matches!(met(true, refused()), StoreFailure::Unreachable { .. }));
        let missing = met(false, refused());
        assert!(missing.to_string().contains("AWS_ACCESS_KEY_ID") && !missing.is_temporary(), "{missing}");
        assert!(matches!(met(false, TransportError::Answered(answer(404, ""))), StoreFailure::NoCredentials { .. }));
        assert!(matches!(met(false, TransportError::Answered(answer(503, ""))), StoreFailure::Busy { .. }));
        assert!(matches!(met(false, TransportError::Answered(answer(403, ""))), StoreFailure::WrongCredentials { .. }));
    }

    #[test]
    fn only_a_request_that_never_counted_surely_did_nothing() {
        assert!(failure(500, "InternalError").may_have_acted());
        assert!(!failure(503, "SlowDown").may_have_acted());
        assert!(!failure(403, "AccessDenied").may_have_acted());
        let Trouble::Store(timed_out) = names().timed_out(std::time::Duration::from_millis(1500)) else { panic!() };
        assert!(timed_out.may_have_acted() && timed_out.to_string().ends_with("within 1500 ms"));
    }

    #[test]
    fn files_have_their_own_words() {
        let of = |errno: i32| StoreFailure::of_file(Path::new("/x"), io::Error::from_raw_os_error(errno));
        assert!(matches!(of(28), StoreFailure::DiskFull { .. }));
        assert!(matches!(of(122), StoreFailure::DiskFull { .. }));
        assert!(matches!(of(13), StoreFailure::NotPermitted { .. }));
        assert!(matches!(of(30), StoreFailure::ReadOnly { .. }));
        assert!(matches!(of(20), StoreFailure::NameTaken { .. }));
        assert!(matches!(of(21), StoreFailure::NameTaken { .. }));
        assert!(matches!(of(5), StoreFailure::Io { .. }));
    }
}
