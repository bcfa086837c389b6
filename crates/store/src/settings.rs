//! How patient a store is, how often it tries and how much it does at once. Settings are fixed once
//! a store is open.

use std::fmt;
use std::time::Duration;

/// How a store behaves. A directory store uses `chunk_bytes`, `operation_timeout` and
/// `answer_timeout` (for its locks) only.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Longest wait for a connection; agreeing on TLS counts as waiting for an answer. Default 3 s.
    pub connect_timeout: Duration,
    /// Longest wait for the first byte of an answer, and then for each further one; and of a
    /// request that carries bytes, for each further one to be taken. So a slow way is no trouble,
    /// one on which nothing moves is. Default 15 s.
    pub answer_timeout: Duration,
    /// Longest that an operation on less than an object takes in all, with all its attempts and
    /// waits: the size of an object, a page of a listing, a deletion, a check. Default 2 min.
    pub operation_timeout: Duration,
    /// Bytes per second in all below which a request that carries bytes is given up though they
    /// move. Default 4 KiB/s.
    pub least_upload_rate: u64,
    /// How often a request is sent in all before its trouble is reported; of a stream that breaks,
    /// how often in a row without a byte gained. Default 6.
    pub attempts: u32,
    /// Wait before the second attempt; it doubles with each one. A random half of it is left out,
    /// so that clients that failed together do not return together. Default 50 ms.
    pub first_backoff: Duration,
    /// The wait never grows beyond this. Default 3 s.
    pub longest_backoff: Duration,
    /// When a slow first byte is asked for a second time. Default [`Hedge::Auto`].
    pub hedge: Hedge,
    /// Most requests under way at once that bring bytes or carry no more than 64 KiB. Those of
    /// [`crate::Store::in_background`] wait for all others. A second request for a slow first byte
    /// is only sent while there is room. A stream counts until its first bytes came. Default 32.
    pub most_requests: usize,
    /// Most requests under way at once that carry more than 64 KiB up. They have room of their own,
    /// so that no upload, however slow, keeps a read waiting. Default 8.
    pub most_uploads: usize,
    /// An object longer than two parts goes up in parts of this many bytes, several at once. S3
    /// wants at least 5 MiB. Default 8 MiB; grows for objects of more than 10,000 parts.
    pub part_bytes: usize,
    /// Bytes that a stream from a directory store reads at a time. Default 1 MiB.
    pub chunk_bytes: usize,
    /// Credentials for `s3://`. Default none: they are looked for where [`crate::Store::open`]
    /// says.
    pub credentials: Option<Credentials>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            connect_timeout: Duration::from_secs(3),
            answer_timeout: Duration::from_secs(15),
            operation_timeout: Duration::from_secs(120),
            least_upload_rate: 4 << 10,
            attempts: 6,
            first_backoff: Duration::from_millis(50),
            longest_backoff: Duration::from_secs(3),
            hedge: Hedge::Auto,
            most_requests: 32,
            most_uploads: 8,
            part_bytes: 8 << 20,
            chunk_bytes: 1 << 20,
            credentials: None,
        }
    }
}

/// When a read whose first byte does not come is sent a second time. Whichever answers first is
/// used, the other dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hedge {
    /// After three times the median of the last first bytes, but not before [`Hedge::SOONEST`];
    /// after [`Hedge::UNKNOWN`] as long as fewer than four were seen.
    Auto,
    /// After this long.
    After(Duration),
    /// Never.
    Off,
}

impl Hedge {
    /// Soonest second request of [`Hedge::Auto`].
    pub const SOONEST: Duration = Duration::from_millis(50);
    /// Second request of [`Hedge::Auto`] as long as too little is known; a first request also makes
    /// its connection.
    pub const UNKNOWN: Duration = Duration::from_millis(250);

    /// How long to wait, knowing the median of the last first bytes.
    pub(crate) fn delay(self, median: Option<Duration>) -> Option<Duration> {
        match self {
            Hedge::Auto => Some(median.map_or(Self::UNKNOWN, |median| (median * 3).max(Self::SOONEST))),
            Hedge::After(delay) => Some(delay),
            Hedge::Off => None,
        }
    }
}

/// A key of an S3 account.
#[derive(Clone)]
pub struct Credentials {
    /// `AWS_ACCESS_KEY_ID`.
    pub key_id: String,
    /// `AWS_SECRET_ACCESS_KEY`.
    pub secret: String,
    /// `AWS_SESSION_TOKEN`, of credentials that end.
    pub session_token: Option<String>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("key_id", &self.key_id).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_request_waits_for_what_is_usual() {
        let ms = Duration::from_millis;
        assert_eq!(Hedge::Auto.delay(None), Some(ms(250)));
        assert_eq!(Hedge::Auto.delay(Some(ms(2))), Some(ms(50)));
        assert_eq!(Hedge::Auto.delay(Some(ms(40))), Some(ms(120)));
        assert_eq!(Hedge::After(ms(7)).delay(Some(ms(40))), Some(ms(7)));
        assert_eq!(Hedge::Off.delay(Some(ms(40))), None);
    }

    #[test]
    fn a_secret_is_not_printed() {
        let credentials =
            Credentials { key_id: "id".into(), secret: "hush".into(), session_token: Some("hush".into()) };
        let shown = format!("{:?}", Settings { credentials: Some(credentials), ..Settings::default() });
        assert!(shown.contains("\"id\"") && !shown.contains("hush"), "{shown}");
    }
}
