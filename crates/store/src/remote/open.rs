//! Makes the client of a bucket from its address: endpoint, region, credentials.
//!
//! Touches no network. What is taken from the environment is listed here and nowhere else.

use super::profile::{self, Profile};
use super::{Cloud, Remote};
use crate::address::{Bucket, Kind, OpenError, endpoint};
use crate::failure::Names;
use crate::settings::Settings;
use crate::wire::{Connector, Patience};
use http::Uri;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::{ClientOptions, RetryConfig};
use std::sync::Arc;
use std::time::Duration;

/// Where credentials and their like may come from, in the words of `object_store`.
const FROM_THE_ENVIRONMENT: [(&str, AmazonS3ConfigKey); 9] = [
    ("AWS_ACCESS_KEY_ID", AmazonS3ConfigKey::AccessKeyId),
    ("AWS_SECRET_ACCESS_KEY", AmazonS3ConfigKey::SecretAccessKey),
    ("AWS_SESSION_TOKEN", AmazonS3ConfigKey::Token),
    ("AWS_WEB_IDENTITY_TOKEN_FILE", AmazonS3ConfigKey::WebIdentityTokenFile),
    ("AWS_ROLE_ARN", AmazonS3ConfigKey::RoleArn),
    ("AWS_ROLE_SESSION_NAME", AmazonS3ConfigKey::RoleSessionName),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", AmazonS3ConfigKey::ContainerCredentialsRelativeUri),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI", AmazonS3ConfigKey::ContainerCredentialsFullUri),
    ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", AmazonS3ConfigKey::ContainerAuthorizationTokenFile),
];

/// Opens a bucket; `url` as given, for messages.
pub(crate) fn open(url: &str, bucket: Bucket, settings: Settings) -> Result<Remote, OpenError> {
    let setup = |source| OpenError::Setup { url: url.to_owned(), source };
    let (cloud, endpoint) = match bucket.kind {
        Kind::S3 => s3(url, &bucket, &settings)?,
        Kind::Gcs => gcs(url, &bucket, &settings)?,
        Kind::Azure => azure(url, &bucket, &settings)?,
    };
    let names =
        Names { store: bucket.shown.as_str().into(), endpoint: endpoint.into(), bucket: bucket.name.as_str().into() };
    Ok(Remote::new(cloud.map_err(setup)?, names, &bucket.prefix, settings))
}

type Opened = (object_store::Result<Arc<dyn Cloud>>, String);

pub(super) fn from_environment(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn connector(endpoint: &str, settings: &Settings) -> Connector {
    let store = endpoint.parse::<Uri>().ok().and_then(|uri| uri.authority().cloned());
    let patience = Patience { idle: settings.answer_timeout, least_rate: settings.least_upload_rate };
    Connector { store, connect_timeout: settings.connect_timeout, patience }
}

fn options(endpoint: &str) -> ClientOptions {
    // Time limits are ours, per attempt.
    ClientOptions::new().with_allow_http(endpoint.starts_with("http://")).with_timeout_disabled()
}

fn once() -> RetryConfig {
    RetryConfig { max_retries: 0, retry_timeout: Duration::ZERO, ..RetryConfig::default() }
}

fn s3(url: &str, bucket: &Bucket, settings: &Settings) -> Result<Opened, OpenError> {
    // With other credentials, a profile's are not needed.
    let elsewhere = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_WEB_IDENTITY_TOKEN_FILE"];
    let wanted = settings.credentials.is_none() && elsewhere.iter().all(|name| from_environment(name).is_none());
    let profile = if settings.credentials.is_none() { profile::read(url, wanted)? } else { Profile::default() };
    let region = bucket.region.clone();
    let region = region.or_else(|| from_environment("AWS_REGION")).or_else(|| from_environment("AWS_DEFAULT_REGION"));
    let region = region.or(profile.region);
    let region = region.unwrap_or_else(|| "us-east-1".to_owned());
    let endpoint = match &bucket.endpoint {
        Some(endpoint) => endpoint.clone(),
        None => endpoint_from_environment(url)?.unwrap_or_else(|| format!("https://s3.{region}.amazonaws.com")),
    };
    let mut builder = AmazonS3Builder::new();
    let given = settings.credentials.as_ref().or(profile.credentials.as_ref().filter(|_| wanted));
    match given {
        Some(given) => {
            builder = builder.with_access_key_id(&given.key_id).with_secret_access_key(&given.secret);
            if let Some(token) = &given.session_token {
                builder = builder.with_token(token);
            }
        }
        None => {
            for (name, key) in FROM_THE_ENVIRONMENT {
                if let Some(value) = from_environment(name) {
                    builder = builder.with_config(key, value);
                }
            }
        }
    }
    let built = builder
        .with_bucket_name(&bucket.name)
        .with_region(region)
        .with_endpoint(&endpoint)
        .with_http_connector(connector(&endpoint, settings))
        .with_client_options(options(&endpoint))
        .with_retry(once())
        // One DELETE for one object: every store knows it, and its answer is clear.
        .with_disable_bulk_delete(true)
        .build();
    Ok((built.map(|client| Arc::new(client) as Arc<dyn Cloud>), endpoint))
}

/// Without TLS only where the URL says so: an environment is inherited by accident.
fn endpoint_from_environment(url: &str) -> Result<Option<String>, OpenError> {
    for variable in ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"] {
        let Some(value) = from_environment(variable) else { continue };
        let endpoint = endpoint(url, &value)?;
        if !endpoint.starts_with("https://") {
            return Err(OpenError::PlainEndpoint { url: url.to_owned(), endpoint, variable });
        }
        return Ok(Some(endpoint));
    }
    Ok(None)
}

#[cfg(feature = "gcs")]
fn gcs(_: &str, bucket: &Bucket, settings: &Settings) -> Result<Opened, OpenError> {
    let endpoint = bucket.endpoint.clone().unwrap_or_else(|| "https://storage.googleapis.com".to_owned());
    let mut builder = object_store::gcp::GoogleCloudStorageBuilder::from_env();
    if bucket.endpoint.is_some() {
        builder = builder.with_base_url(&endpoint);
    }
    let built = builder
        .with_bucket_name(&bucket.name)
        .with_http_connector(connector(&endpoint, settings))
        .with_client_options(options(&endpoint))
        .with_retry(once())
        .build();
    Ok((built.map(|client| Arc::new(client) as Arc<dyn Cloud>), endpoint))
}

#[cfg(not(feature = "gcs"))]
fn gcs(url: &str, _: &Bucket, _: &Settings) -> Result<Opened, OpenError> {
    Err(OpenError::NotBuilt { url: url.to_owned(), feature: "gcs" })
}

#[cfg(feature = "azure")]
fn azure(url: &str, bucket: &Bucket, settings: &Settings) -> Result<Opened, OpenError> {
    let account = from_environment("AZURE_STORAGE_ACCOUNT_NAME");
    let named = || account.as_ref().map(|account| format!("https://{account}.blob.core.windows.net"));
    let endpoint = bucket.endpoint.clone().or_else(named).ok_or_else(|| OpenError::Part {
        url: url.to_owned(),
        what: "its account is not known: set AZURE_STORAGE_ACCOUNT_NAME".to_owned(),
    })?;
    let mut builder = object_store::azure::MicrosoftAzureBuilder::from_env();
    if bucket.endpoint.is_some() {
        builder = builder.with_endpoint(endpoint.clone());
    }
    let built = builder
        .with_container_name(&bucket.name)
        .with_http_connector(connector(&endpoint, settings))
        .with_client_options(options(&endpoint))
        .with_retry(once())
        .build();
    Ok((built.map(|client| Arc::new(client) as Arc<dyn Cloud>), endpoint))
}

#[cfg(not(feature = "azure"))]
fn azure(url: &str, _: &Bucket, _: &Settings) -> Result<Opened, OpenError> {
    Err(OpenError::NotBuilt { url: url.to_owned(), feature: "azure" })
}
