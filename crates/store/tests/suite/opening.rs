//! How a store is found and trusted: environment, features, TLS. Each in a second run of this
//! program, since an environment is a process's own.

use crate::gateway::{BUCKET, Gateway, KEY_ID, SECRET, free_address};
use crate::{key, read, settings};
use kip_store::{OpenError, PutError, Settings, Store, StoreFailure};
use std::process::Command;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

/// Tells a second run which URL to use.
const URL: &str = "KIP_STORE_URL";
/// And what to expect.
const EXPECTED: &str = "KIP_STORE_EXPECTED";

fn from_the_environment() -> Settings {
    Settings { credentials: None, attempts: 2, ..settings() }
}

/// Runs a test of this program again in an environment of nothing but this.
fn again(test: &str, environment: &[(&str, &str)]) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("opening::{test}"), "--nocapture"])
        .env_clear()
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned();
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

// promise stores: credentials come from the environment, a profile of the AWS tools, or the
//   machine's role, in this order; a profile that cannot be used is named
// held by: this, `crates/store/tests/suite/opening.rs::credentials_come_from_a_profile`,
//   `crates/store/tests/suite/opening.rs::credentials_come_from_the_machine`
#[tokio::test(flavor = "multi_thread")]
async fn credentials_come_from_the_environment() {
    if let Ok(url) = std::env::var(URL) {
        let store = Store::open(&url, from_the_environment()).unwrap();
        store.put(&key("from/environment"), "x".into()).await.unwrap();
        assert_eq!(read(&store, &key("from/environment")).await.unwrap(), "x");
        return;
    }
    let gateway = Gateway::start().await;
    let environment = [("AWS_ACCESS_KEY_ID", KEY_ID), ("AWS_SECRET_ACCESS_KEY", SECRET), (URL, &gateway.url(""))];
    again("credentials_come_from_the_environment", &environment);
}

/// As the AWS tools write them; those of the environment count before them.
#[tokio::test(flavor = "multi_thread")]
async fn credentials_come_from_a_profile() {
    const ERROR: &str = "KIP_STORE_ERROR";
    if let Ok(url) = std::env::var(URL) {
        let opened = Store::open(&url, from_the_environment());
        if let Ok(words) = std::env::var(ERROR) {
            let error = opened.expect_err(&words).to_string();
            assert!(error.contains(&words), "{error}");
            return;
        }
        let store = opened.unwrap();
        store.put(&key("from/profile"), "x".into()).await.unwrap();
        assert_eq!(read(&store, &key("from/profile")).await.unwrap(), "x");
        return;
    }
    let gateway = Gateway::start().await;
    let home = tempfile::tempdir().unwrap();
    let at = |path: &str| home.path().join(path).to_str().unwrap().to_owned();
    std::fs::create_dir(at(".aws")).unwrap();
    let pair = format!("aws_access_key_id = {KEY_ID}\naws_secret_access_key = {SECRET}\n");
    std::fs::write(at(".aws/credentials"), format!("[default]\n{pair}[half]\naws_access_key_id = x\n")).unwrap();
    std::fs::write(at(".aws/config"), format!("[profile work]\n{pair}[profile role]\nrole_arn = arn:x\n")).unwrap();
    std::fs::write(at("wrong"), "[work]\naws_access_key_id = no\naws_secret_access_key = no\n").unwrap();
    std::fs::write(at("broken"), "[work\n").unwrap();
    let (url, home, wrong, broken) = (gateway.url(""), at(""), at("wrong"), at("broken"));
    let own = [("AWS_ACCESS_KEY_ID", KEY_ID), ("AWS_SECRET_ACCESS_KEY", SECRET)];
    type Variables<'a> = &'a [(&'a str, &'a str)];
    let cases: [(Variables<'_>, Option<&str>); 7] = [
        (&[], None),
        (&[("AWS_PROFILE", "work")], None),
        // The environment counts before a file.
        (&[own[0], own[1], ("AWS_SHARED_CREDENTIALS_FILE", &wrong)], None),
        (&[("AWS_PROFILE", "role")], Some("profile \"role\" has role_arn, which Kip does not follow")),
        (&[("AWS_PROFILE", "half")], Some("profile \"half\" has one of aws_access_key_id and")),
        (&[("AWS_PROFILE", "none")], Some("profile \"none\" is asked for by AWS_PROFILE and has no keys in")),
        (&[("AWS_CONFIG_FILE", &broken)], Some("broken, where credentials of stores may be, cannot be read")),
    ];
    for (variables, error) in cases {
        let mut environment = vec![("HOME", home.as_str()), (URL, &url)];
        environment.extend(variables);
        environment.extend(error.map(|words| (ERROR, words)));
        again("credentials_come_from_a_profile", &environment);
    }
}

/// Answers every request with this, on a port of its own.
async fn answering(status: &'static str, body: &'static str) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut client, _) = listener.accept().await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(client.read_u8().await.unwrap());
            }
            let length = body.len();
            let answer = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}");
            client.write_all(answer.as_bytes()).await.unwrap();
        }
    });
    address
}

/// The way of a role: credentials come over HTTP from the machine's own service.
#[tokio::test(flavor = "multi_thread")]
async fn credentials_come_from_the_machine() {
    if let Ok(url) = std::env::var(URL) {
        let store = Store::open(&url, from_the_environment()).unwrap();
        let result = store.put(&key("from/role"), "x".into()).await;
        match std::env::var(EXPECTED).unwrap().as_str() {
            "success" => assert_eq!(read(&store, &key("from/role")).await.unwrap(), "x"),
            "none" => {
                let error = result.expect_err("no credentials");
                assert!(matches!(error, PutError::Store(StoreFailure::NoCredentials { .. })), "{error:?}");
                assert!(error.to_string().contains("AWS_ACCESS_KEY_ID"), "{error}");
                assert_eq!(store.counters().retries, 0);
            }
            _ => {
                let error = result.expect_err("busy");
                assert!(matches!(error, PutError::Store(StoreFailure::Busy { .. })), "{error:?}");
                assert_eq!(store.counters().retries, 1);
            }
        }
        return;
    }
    let gateway = Gateway::start().await;
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    std::fs::write(&token, "token").unwrap();
    let given = "{\"AccessKeyId\":\"kip-test\",\"SecretAccessKey\":\"kip-test-secret\",\"Token\":\"\",\
        \"Expiration\":\"2999-01-01T00:00:00Z\"}";
    for (machine, expected) in [
        (answering("200 OK", given).await, "success"),
        (answering("404 Not Found", "").await, "none"),
        (answering("503 Service Unavailable", "").await, "busy"),
        (free_address(), "none"),
    ] {
        let uri = format!("http://{machine}/role");
        let environment = [
            ("AWS_CONTAINER_CREDENTIALS_FULL_URI", uri.as_str()),
            ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", token.to_str().unwrap()),
            (URL, &gateway.url("")),
            (EXPECTED, expected),
        ];
        again("credentials_come_from_the_machine", &environment);
    }
}

#[test]
fn an_endpoint_of_the_environment_needs_tls() {
    let url = "s3://bucket/prefix";
    if std::env::var(URL).is_ok() {
        let error = Store::open(url, settings()).expect_err("no TLS");
        assert!(matches!(error, OpenError::PlainEndpoint { .. }), "{error:?}");
        assert!(error.to_string().contains("http://127.0.0.1:9 from AWS_ENDPOINT_URL has no TLS"), "{error}");
        Store::open(&format!("{url}?endpoint=http://127.0.0.1:9"), settings()).unwrap();
        return;
    }
    let environment = [("AWS_ENDPOINT_URL", "http://127.0.0.1:9"), (URL, url)];
    again("an_endpoint_of_the_environment_needs_tls", &environment);
}

#[test]
fn half_a_pair_of_credentials_is_refused() {
    if std::env::var(URL).is_ok() {
        let error = Store::open("s3://bucket", from_the_environment()).expect_err("half a pair");
        assert!(matches!(error, OpenError::Setup { .. }), "{error:?}");
        return;
    }
    again("half_a_pair_of_credentials_is_refused", &[("AWS_ACCESS_KEY_ID", KEY_ID), (URL, "")]);
}

#[test]
#[cfg(not(any(feature = "gcs", feature = "azure")))]
fn a_store_that_was_left_out_of_the_build_is_said_so() {
    for (url, feature) in [("gs://bucket/x", "gcs"), ("az://container/x", "azure")] {
        let error = Store::open(url, settings()).expect_err(feature);
        assert!(error.to_string().starts_with(&format!("this Kip was built without {feature}: ")), "{error}");
    }
}

// promise stores: TLS to those who are trusted only
#[tokio::test(flavor = "multi_thread")]
async fn tls_is_spoken_to_those_who_are_trusted_only() {
    if let Ok(url) = std::env::var(URL) {
        let store = Store::open(&url, settings()).unwrap();
        store.put(&key("over/tls"), "x".into()).await.unwrap();
        assert_eq!(read(&store, &key("over/tls")).await.unwrap(), "x");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (cert, secret) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"])
        .args(["-subj", "/CN=kip test", "-addext", "subjectAltName=IP:127.0.0.1"])
        .args(["-addext", "basicConstraints=critical,CA:FALSE", "-keyout"])
        .arg(&secret)
        .arg("-out")
        .arg(&cert)
        .output();
    assert!(made.is_ok_and(|output| output.status.success()), "openssl makes no certificate");
    let gateway = Gateway::with_tls(&cert, &secret).await;
    let url = format!("s3://{BUCKET}/?endpoint=https://{}", gateway.address);
    let store = Store::open(&url, settings()).unwrap();
    let error = store.check().await.expect_err("signed by nobody");
    assert!(matches!(error, StoreFailure::Certificate { .. }), "{error:?}");
    assert!(!error.is_temporary() && store.counters().retries == 0);
    let environment = [("SSL_CERT_FILE", cert.to_str().unwrap()), (URL, &url)];
    again("tls_is_spoken_to_those_who_are_trusted_only", &environment);
}
