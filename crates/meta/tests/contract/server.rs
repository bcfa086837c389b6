//! A real etcd on loopback, in a temporary directory.

use kip_meta::{EtcdMeta, Meta};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(90);

/// An etcd that ends with the test.
pub struct EtcdServer {
    child: Child,
    dir: tempfile::TempDir,
    ports: [u16; 2],
}

impl EtcdServer {
    pub async fn start() -> EtcdServer {
        let dir = tempfile::tempdir().unwrap();
        // Both are held while they are chosen, so that they differ.
        let held = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let ports = held.each_ref().map(|socket| socket.local_addr().unwrap().port());
        drop(held);
        let server = EtcdServer { child: spawn(dir.path(), ports), dir, ports };
        server.ready().await;
        server
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.ports[0])
    }

    pub async fn connect(&self) -> EtcdMeta {
        EtcdMeta::connect(&[self.url()]).await.unwrap()
    }

    pub async fn ready(&self) {
        let since = Instant::now();
        loop {
            if let Ok(meta) = EtcdMeta::connect(&[self.url()]).await
                && meta.get(b"a").await.is_ok()
            {
                return;
            }
            assert!(since.elapsed() < SOON, "etcd does not answer at {}", self.url());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn start_again(&mut self) {
        self.child = spawn(self.dir.path(), self.ports);
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        self.kill();
    }
}

fn spawn(dir: &Path, ports: [u16; 2]) -> Child {
    let [client, peer] = ports.map(|port| format!("http://127.0.0.1:{port}"));
    Command::new("etcd")
        .args(["--name", "one", "--data-dir"])
        .arg(dir.join("etcd"))
        .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
        .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", &format!("one={peer}"), "--log-level", "fatal", "--logger", "zap"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("etcd starts: scripts/setup test installs it")
}
