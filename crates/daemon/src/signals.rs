//! The signals that the daemon takes.

use kip_api::Tls;
use kip_types::chain;
use std::io;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGTERM, SIGINT and SIGHUP.
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    /// Takes them from here on.
    pub(crate) fn listen() -> io::Result<Signals> {
        let (terminate, interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        Ok(Signals { terminate, interrupt, hangup: signal(SignalKind::hangup())? })
    }

    /// Until one of those that end it. SIGHUP has the certificate read again.
    pub(crate) async fn end(&mut self, tls: Option<Tls>) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hangup.recv() => {}
            }
            match tls.as_ref().map(Tls::read_again) {
                None => tracing::info!("SIGHUP: there is nothing to be read again"),
                Some(Ok(())) => tracing::info!("SIGHUP: the certificate was read again"),
                Some(Err(e)) => tracing::error!(error = chain(&e), "SIGHUP: the certificate is as it was"),
            }
        }
    }
}
