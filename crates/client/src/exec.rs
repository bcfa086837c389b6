//! The client's side of an exec: frames both ways on the connection that the daemon handed over
//! with 101.

use crate::CallError;
use crate::connect::{Connection, Sent};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use kip_types::api::{
    CHANNEL_END, CHANNEL_SIZE, CHANNEL_STDERR, CHANNEL_STDIN, CHANNEL_STDOUT, ExecEnd, FRAME_HEADER, FRAME_MAX,
    TerminalSize,
};
use std::io;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};

/// A program that runs inside a proc. Dropping both halves kills it. Both halves are to be used at
/// the same time: a program whose output is not read stops reading.
#[derive(Debug)]
pub struct Exec {
    /// Its standard input.
    pub input: ExecSender,
    /// Its outputs and its end.
    pub output: ExecReceiver,
}

/// Sends bytes to the program.
#[derive(Debug)]
pub struct ExecSender(WriteHalf<TokioIo<Upgraded>>);

/// Receives what the program writes.
#[derive(Debug)]
pub struct ExecReceiver {
    from: ReadHalf<TokioIo<Upgraded>>,
    _connection: Connection,
}

/// What came from the program.
#[derive(Debug)]
pub enum ExecReceived {
    /// Bytes of its standard output.
    Stdout(Vec<u8>),
    /// Bytes of its standard error.
    Stderr(Vec<u8>),
    /// It ended; nothing follows.
    End(ExecEnd),
}

pub(crate) async fn open(sent: Sent) -> Result<Exec, CallError> {
    let Sent { response, connection } = sent;
    let upgraded = hyper::upgrade::on(response).await.map_err(CallError::lost)?;
    let (reader, writer) = tokio::io::split(TokioIo::new(upgraded));
    Ok(Exec { input: ExecSender(writer), output: ExecReceiver { from: reader, _connection: connection } })
}

impl ExecSender {
    /// Sends `bytes`. An error means that the session is over; what became of it the output tells.
    pub async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        for piece in bytes.chunks(FRAME_MAX) {
            self.frame(CHANNEL_STDIN, piece).await?;
        }
        self.0.flush().await
    }

    /// End of file: the program reads no more. The session goes on.
    pub async fn end(&mut self) -> io::Result<()> {
        self.frame(CHANNEL_STDIN, &[]).await?;
        self.0.flush().await
    }

    /// The terminal has this size now.
    pub async fn resize(&mut self, size: TerminalSize) -> io::Result<()> {
        self.frame(CHANNEL_SIZE, &size.to_frame()).await?;
        self.0.flush().await
    }

    async fn frame(&mut self, channel: u8, payload: &[u8]) -> io::Result<()> {
        let length = u32::try_from(payload.len()).expect("frames are cut to FRAME_MAX");
        let mut frame = Vec::with_capacity(FRAME_HEADER + payload.len());
        frame.push(channel);
        frame.extend_from_slice(&length.to_be_bytes());
        frame.extend_from_slice(payload);
        self.0.write_all(&frame).await
    }
}

impl ExecReceiver {
    /// What comes next. Not cancel safe.
    pub async fn next(&mut self) -> Result<ExecReceived, CallError> {
        loop {
            let mut header = [0; FRAME_HEADER];
            self.from.read_exact(&mut header).await.map_err(CallError::Lost)?;
            let [channel, length @ ..] = header;
            let length = u32::from_be_bytes(length) as usize;
            if length > FRAME_MAX {
                return Err(foreign("a frame is too long"));
            }
            let mut payload = vec![0; length];
            self.from.read_exact(&mut payload).await.map_err(CallError::Lost)?;
            return match channel {
                // The daemon looks whether this client is still there.
                CHANNEL_STDOUT | CHANNEL_STDERR if payload.is_empty() => continue,
                CHANNEL_STDOUT => Ok(ExecReceived::Stdout(payload)),
                CHANNEL_STDERR => Ok(ExecReceived::Stderr(payload)),
                CHANNEL_END => serde_json::from_slice(&payload).map(ExecReceived::End).map_err(CallError::Foreign),
                _ => Err(foreign("a frame of an unknown channel")),
            };
        }
    }
}

fn foreign(what: &str) -> CallError {
    CallError::Foreign(serde::de::Error::custom(what))
}
