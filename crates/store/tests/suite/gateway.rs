//! A real S3 server of a test's own: versitygw over a temporary directory, on a free port of the
//! loopback interface.

use crate::settings;
use kip_store::{Settings, Store, StoreFailure};
use std::ffi::OsStr;
use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

pub const KEY_ID: &str = "kip-test";
pub const SECRET: &str = "kip-test-secret";
pub const BUCKET: &str = "blobs";

pub struct Gateway {
    process: Child,
    dir: tempfile::TempDir,
    pub address: SocketAddr,
}

/// `KIP_VERSITYGW`, what `scripts/setup` installed, or the first in `PATH`.
fn program() -> Option<PathBuf> {
    let workspace =
        Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/store lies in the workspace");
    let named = std::env::var_os("KIP_VERSITYGW").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&path).map(|dir| dir.join("versitygw"));
    named.into_iter().chain([workspace.join(".kip/bin/versitygw")]).chain(in_path).find(|program| program.is_file())
}

impl Gateway {
    /// A server that answers.
    pub async fn start() -> Gateway {
        Gateway::start_with(&[]).await
    }

    /// One that speaks TLS only.
    pub async fn with_tls(certificate: &Path, key: &Path) -> Gateway {
        Gateway::start_with(&[("--cert", certificate), ("--key", key)]).await
    }

    async fn start_with(more: &[(&str, &Path)]) -> Gateway {
        let program = program().expect("the tests need versitygw, which scripts/setup test installs");
        // Another process may take a port between finding it free and using it.
        for _ in 0..10 {
            if let Some(gateway) = Gateway::try_start(&program, more).await {
                return gateway;
            }
        }
        panic!("{} does not start; its log is above", program.display());
    }

    async fn try_start(program: &Path, more: &[(&str, &Path)]) -> Option<Gateway> {
        let dir = tempfile::tempdir().expect("a temporary directory");
        // A bucket that only this server has: another one may have been quicker to take the port,
        // and would answer.
        static STARTED: AtomicUsize = AtomicUsize::new(0);
        let own = format!("own-{}-{}", std::process::id(), STARTED.fetch_add(1, Ordering::Relaxed));
        for bucket in [BUCKET, &own] {
            fs::create_dir_all(dir.path().join("data").join(bucket)).expect("a bucket");
        }
        let address = free_address();
        let log_path = dir.path().join("log");
        let log = fs::File::create(&log_path).expect("a log");
        let process = Command::new(program)
            .args(["--quiet", "--keep-alive", "--port", &address.to_string()])
            .args(more.iter().flat_map(|(name, path)| [OsStr::new(name), path.as_os_str()]))
            .arg("posix")
            .arg(dir.path().join("data"))
            .env_clear()
            .env("ROOT_ACCESS_KEY", KEY_ID)
            .env("ROOT_SECRET_KEY", SECRET)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("the log twice"))
            .stderr(log)
            .spawn()
            .expect("versitygw can be executed");
        let mut gateway = Gateway { process, dir, address };
        let scheme = if more.is_empty() { "http" } else { "https" };
        let url = format!("s3://{own}?endpoint={scheme}://{address}");
        let store = Store::open(&url, Settings { attempts: 1, ..settings() }).expect("a URL of the tests");
        let since = Instant::now();
        while let Err(failure) = store.check().await {
            // That it is not trusted shows that it is there.
            if matches!(failure, StoreFailure::Certificate { .. }) {
                break;
            }
            if gateway.process.try_wait().expect("own child").is_some() {
                println!("{}", fs::read_to_string(&log_path).unwrap_or_default());
                return None;
            }
            assert!(since.elapsed() < Duration::from_secs(120), "versitygw runs but does not answer: {failure}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Some(gateway)
    }

    /// Its bucket, with more of a path and of parameters.
    pub fn url(&self, more: &str) -> String {
        url_at(self.address, more)
    }

    pub fn store(&self, prefix: &str) -> Store {
        Store::open(&self.url(prefix), settings()).expect("a URL of the tests")
    }

    /// Parts of uploads that are neither completed nor aborted.
    pub fn unfinished_uploads(&self) -> usize {
        fn files(dir: &Path) -> usize {
            let Ok(entries) = fs::read_dir(dir) else { return 0 };
            let paths = entries.flatten().map(|entry| entry.path());
            paths.map(|path| if path.is_dir() { files(&path) } else { 1 }).sum()
        }
        files(&self.dir.path().join("data").join(BUCKET).join(".sgwtmp/multipart"))
    }
}

pub fn url_at(address: SocketAddr, prefix: &str) -> String {
    format!("s3://{BUCKET}/{prefix}?endpoint=http://{address}")
}

/// Where nothing listens.
pub fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port")
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.process.kill().expect("own child");
        self.process.wait().expect("own child");
    }
}
