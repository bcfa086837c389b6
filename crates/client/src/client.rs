//! The calls about procs and about the daemon; those about images, keys, snapshots, tokens and
//! volumes are beside this module.

use crate::connect::{self, Sent, Way, collect};
use crate::exec::{self, Exec};
use crate::{AnswerFeed, CallError, Remote};
use http_body_util::Full;
use hyper::body::Bytes;
use hyper::{Method, Request};
use kip_types::api::clone::{CloneAdvice, CloneRequest, ClonesView};
use kip_types::api::{
    AttachRequest, CheckRequest, CheckView, ContentsView, Detail, Details, DetailsRequest, DownRequest, DownView,
    EXEC_PROTOCOL, Event, EventsRequest, ExecRequest, Info, InspectRequest, LogLine, LogsRequest, Moved, ProcView,
    RemoveRequest, RenameRequest, RunRequest, SignalRequest, SleepRequest, StartRequest, StopRequest, UpdateRequest,
    ValidateRequest, WhyView,
};
use kip_types::name::ProcName;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Write as _;
use std::path::PathBuf;

/// Talks to one daemon.
#[derive(Debug, Clone)]
pub struct Client {
    pub(crate) way: Way,
}

impl Client {
    /// For the daemon of `data`. Does not connect yet.
    pub fn new(data: impl Into<PathBuf>) -> Client {
        Client { way: Way::Local(data.into()) }
    }

    /// For a daemon somewhere. Does not connect yet.
    pub fn remote(remote: Remote) -> Client {
        Client { way: Way::Remote(remote) }
    }

    /// The daemon may be on another machine.
    pub fn is_remote(&self) -> bool {
        matches!(self.way, Way::Remote(_))
    }

    /// Pid of the daemon as this process sees it; none if it is on another machine, or in a pid
    /// namespace that is not visible from here.
    pub async fn daemon_pid(&self) -> Result<Option<i32>, CallError> {
        let Way::Local(data) = &self.way else { return Ok(None) };
        let stream = connect::local(data).await?;
        Ok(stream.peer_cred().ok().and_then(|cred| cred.pid()).filter(|pid| *pid > 0))
    }

    /// Creates a proc.
    pub async fn run(&self, request: &RunRequest) -> Result<ProcView, CallError> {
        self.post("/v1/procs", request).await
    }

    /// Whether `request` could be run, as far as that can be known without running the program.
    pub async fn validate(&self, request: &ValidateRequest) -> Result<(), CallError> {
        collect(self.send(Method::POST, "/v1/validate", json(request)).await?).await?;
        Ok(())
    }

    /// Reports whether the tarball or secrets of the proc of that name differ from the request.
    pub async fn compare(&self, request: &RunRequest) -> Result<ContentsView, CallError> {
        self.post("/v1/compare", request).await
    }

    /// Tries whether such a proc can sleep.
    pub async fn check(&self, request: &CheckRequest) -> Result<CheckView, CallError> {
        self.post("/v1/check", request).await
    }

    /// All procs, sorted by name.
    pub async fn list(&self) -> Result<Vec<ProcView>, CallError> {
        self.get("/v1/procs").await
    }

    /// One proc; of its environment the names.
    pub async fn inspect(&self, name: &ProcName) -> Result<ProcView, CallError> {
        self.get(&format!("/v1/procs/{name}")).await
    }

    /// One proc, with the values of its environment.
    pub async fn inspect_with_env(&self, name: &ProcName) -> Result<ProcView, CallError> {
        self.get(&with_query(&format!("/v1/procs/{name}"), &InspectRequest { env: true })).await
    }

    /// A proc from within. Does not wake it.
    pub async fn details(&self, name: &ProcName, of: Detail) -> Result<Details, CallError> {
        let path = with_query(&format!("/v1/procs/{name}/details"), &DetailsRequest { of });
        Ok(match of {
            Detail::Files => Details::Files(self.get(&path).await?),
            Detail::Env => Details::Env(self.get(&path).await?),
            Detail::Sockets => Details::Sockets(self.get(&path).await?),
            Detail::Maps => Details::Maps(self.get(&path).await?),
        })
    }

    /// Starts a stopped proc again.
    pub async fn start(&self, name: &ProcName, how: &StartRequest) -> Result<ProcView, CallError> {
        self.post(&with_query(&format!("/v1/procs/{name}/start"), how), &Nothing {}).await
    }

    /// Ends a proc; `grace_ms` from its stop signal to SIGKILL, none for what its spec says.
    pub async fn stop(&self, name: &ProcName, grace_ms: Option<u64>) -> Result<ProcView, CallError> {
        self.post(&format!("/v1/procs/{name}/stop"), &StopRequest { grace_ms }).await
    }

    /// Changes what of a proc can be changed without a restart.
    pub async fn update(&self, name: &ProcName, change: &UpdateRequest) -> Result<ProcView, CallError> {
        parse(&collect(self.send(Method::PATCH, &format!("/v1/procs/{name}"), json(change)).await?).await?)
    }

    /// Makes a proc in place of the one of its name.
    pub async fn replace(&self, request: &RunRequest) -> Result<ProcView, CallError> {
        self.post(&format!("/v1/procs/{}/replace", request.spec.name), request).await
    }

    /// Gives a proc another name.
    pub async fn rename(&self, name: &ProcName, new: &ProcName) -> Result<ProcView, CallError> {
        self.post(&format!("/v1/procs/{name}/rename"), &RenameRequest { name: new.clone() }).await
    }

    /// Makes procs that go on from where a proc is.
    pub async fn clone_proc(&self, name: &ProcName, request: &CloneRequest) -> Result<ClonesView, CallError> {
        self.post(&format!("/v1/procs/{name}/clone"), request).await
    }

    /// How a clone of a proc would best be made just now.
    pub async fn clone_advice(&self, name: &ProcName) -> Result<CloneAdvice, CallError> {
        self.get(&format!("/v1/procs/{name}/clone")).await
    }

    /// Sends a signal to a proc's program.
    pub async fn signal(&self, name: &ProcName, request: &SignalRequest) -> Result<(), CallError> {
        collect(self.send(Method::POST, &format!("/v1/procs/{name}/signal"), json(request)).await?).await?;
        Ok(())
    }

    /// Removes a proc; with `force` ends it first.
    pub async fn remove(&self, name: &ProcName, force: bool) -> Result<(), CallError> {
        let path = with_query(&format!("/v1/procs/{name}"), &RemoveRequest { force });
        collect(self.send(Method::DELETE, &path, Bytes::new()).await?).await?;
        Ok(())
    }

    /// Sends a proc to a lower tier.
    pub async fn sleep(&self, name: &ProcName, how: SleepRequest) -> Result<Moved, CallError> {
        self.post(&format!("/v1/procs/{name}/sleep"), &how).await
    }

    /// Wakes a proc; with `id` one that is in the store, of that id, which gets the name. Ids are
    /// hexadecimal digits.
    pub async fn wake(&self, name: &ProcName, id: Option<&str>) -> Result<Moved, CallError> {
        let query = id.map(|id| format!("?id={id}")).unwrap_or_default();
        self.post(&format!("/v1/procs/{name}/wake{query}"), &Nothing {}).await
    }

    /// Why a proc is in the tier that it is in.
    pub async fn why(&self, name: &ProcName) -> Result<WhyView, CallError> {
        self.get(&format!("/v1/procs/{name}/why")).await
    }

    /// What a proc wrote.
    pub async fn logs(&self, name: &ProcName, which: &LogsRequest) -> Result<AnswerFeed<LogLine>, CallError> {
        let path = with_query(&format!("/v1/procs/{name}/logs"), which);
        Ok(AnswerFeed::new(self.send(Method::GET, &path, Bytes::new()).await?))
    }

    /// What happened.
    pub async fn events(&self, which: &EventsRequest) -> Result<AnswerFeed<Event>, CallError> {
        Ok(AnswerFeed::new(self.send(Method::GET, &with_query("/v1/events", which), Bytes::new()).await?))
    }

    /// Runs a program inside a proc.
    pub async fn exec(&self, name: &ProcName, request: &ExecRequest) -> Result<Exec, CallError> {
        self.in_frames(&format!("/v1/procs/{name}/exec"), request).await
    }

    /// What the proc's own program writes, and input for it. Dropping both halves leaves it alone.
    pub async fn attach(&self, name: &ProcName, request: &AttachRequest) -> Result<Exec, CallError> {
        self.in_frames(&format!("/v1/procs/{name}/attach"), request).await
    }

    async fn in_frames(&self, path: &str, body: &impl Serialize) -> Result<Exec, CallError> {
        let request = self
            .request(Method::POST, path)
            .header("connection", "upgrade")
            .header("upgrade", EXEC_PROTOCOL)
            .body(Full::new(json(body)))
            .expect("a name is a path segment and the rest is constant");
        exec::open(connect::send(&self.way, request).await?).await
    }

    /// About the daemon.
    pub async fn info(&self) -> Result<Info, CallError> {
        self.get("/v1/info").await
    }

    /// Ends all procs and the daemon, or parks them and ends the daemon.
    pub async fn down(&self, how: &DownRequest) -> Result<DownView, CallError> {
        self.post(&with_query("/v1/down", how), &Nothing {}).await
    }

    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, CallError> {
        parse(&collect(self.send(Method::GET, path, Bytes::new()).await?).await?)
    }

    pub(crate) async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &(impl Serialize + ?Sized),
    ) -> Result<T, CallError> {
        parse(&collect(self.send(Method::POST, path, json(body)).await?).await?)
    }

    pub(crate) async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Sent, CallError> {
        let request = self.request(method, path).body(Full::new(body));
        connect::send(&self.way, request.expect("a name is a path segment and the rest is constant")).await
    }

    pub(crate) fn request(&self, method: Method, path: &str) -> hyper::http::request::Builder {
        let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        match &self.way {
            Way::Local(_) => request.header("host", "kip"),
            Way::Remote(remote) => request.header("host", remote.host()).header("authorization", remote.bearer()),
        }
    }
}

/// The body of a request that has nothing to say.
#[derive(Serialize)]
pub(crate) struct Nothing {}

pub(crate) fn json(body: &(impl Serialize + ?Sized)) -> Bytes {
    serde_json::to_vec(body).expect("the API's types are JSON").into()
}

pub(crate) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, CallError> {
    serde_json::from_slice(body).map_err(CallError::Foreign)
}

/// Adds the flat fields of `query` that are not null.
pub(crate) fn with_query(path: &str, query: &impl Serialize) -> String {
    let fields = serde_json::to_value(query).expect("the API's types are JSON");
    let fields = fields.as_object().expect("a query is a struct");
    let text = |value: &serde_json::Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let given = fields
        .iter()
        .filter(|(_, value)| !value.is_null())
        .map(|(key, value)| format!("{key}={}", escaped(&text(value))));
    format!("{path}?{}", given.collect::<Vec<_>>().join("&"))
}

/// A value of a query, RFC 3986 2.1.
pub(crate) fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'-' | b'_' | b'~' => escaped.push(byte.into()),
            other => write!(escaped, "%{other:02X}").expect("a String takes anything"),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_escaped_but_for_what_is_plain() {
        assert_eq!(escaped("/srv/a b&c=ö%"), "/srv/a%20b%26c%3D%C3%B6%25");
    }
}
