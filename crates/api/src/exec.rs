//! Carries an exec between a client's connection, in frames, and the worker's [`ExecSession`].
//!
//! The session lives as long as this task: when the client goes away, or the API ends, both its
//! ends are dropped and the worker kills the program. A program that does not read fills the
//! session's queue and then the client's socket, so memory stays bounded; whether the client is
//! still there is then seen by the empty frames sent to it.

use kip_service::{ExecInput, ExecOutput, ExecSession};
use kip_types::api::{
    CHANNEL_END, CHANNEL_SIZE, CHANNEL_STDERR, CHANNEL_STDIN, CHANNEL_STDOUT, FRAME_HEADER, FRAME_MAX, TerminalSize,
};
use std::io;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{mpsc, watch};

/// How often a silent session's client is looked for.
const PROBE_EVERY: Duration = Duration::from_secs(2);

/// Carries frames until the program ended, the client is gone or `ending` becomes true.
pub async fn carry(
    connection: impl AsyncRead + AsyncWrite + Send + Unpin,
    session: ExecSession,
    mut ending: watch::Receiver<bool>,
) {
    let (reader, writer) = tokio::io::split(connection);
    let ExecSession { input, output } = session;
    tokio::select! {
        _ = ending.wait_for(|ends| *ends) => {}
        gone = read_input(reader, input) => tracing::debug!(error = ?gone, "exec client is gone"),
        written = write_output(writer, output) => if let Err(e) = written {
            tracing::debug!(error = %e, "exec client is gone");
        },
    }
}

/// Returns only when the client is gone or breaks the protocol.
async fn read_input(mut from: impl AsyncRead + Unpin, input: mpsc::Sender<ExecInput>) -> io::Error {
    let mut input = Some(input);
    loop {
        let frame = match read_frame(&mut from).await {
            Ok(frame) => frame,
            Err(e) => return e,
        };
        match (frame, &input) {
            (None, _) => input = None,
            (Some(frame), Some(open)) => {
                // The program has closed its input or ended: what still comes is dropped.
                if open.send(frame).await.is_err() {
                    input = None;
                }
            }
            (Some(_), None) => {}
        }
    }
}

/// None is the end of the client's input.
async fn read_frame(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<ExecInput>> {
    let bad = || io::Error::new(io::ErrorKind::InvalidData, "a frame of another channel, or one that is too long");
    let mut header = [0; FRAME_HEADER];
    from.read_exact(&mut header).await?;
    let [channel, length @ ..] = header;
    let length = u32::from_be_bytes(length) as usize;
    if !matches!(channel, CHANNEL_STDIN | CHANNEL_SIZE) || length > FRAME_MAX {
        return Err(bad());
    }
    let mut payload = vec![0; length];
    from.read_exact(&mut payload).await?;
    match channel {
        CHANNEL_SIZE => TerminalSize::from_frame(&payload).map(|size| Some(ExecInput::Size(size))).ok_or_else(bad),
        _ if payload.is_empty() => Ok(None),
        _ => Ok(Some(ExecInput::Bytes(payload))),
    }
}

/// Returns after the last frame, or when the client is gone.
async fn write_output(mut to: impl AsyncWrite + Unpin, mut output: mpsc::Receiver<ExecOutput>) -> io::Result<()> {
    loop {
        match tokio::time::timeout(PROBE_EVERY, output.recv()).await {
            Err(_silent) => write_frame(&mut to, CHANNEL_STDOUT, &[]).await?,
            Ok(Some(ExecOutput::Stdout(bytes))) => write_pieces(&mut to, CHANNEL_STDOUT, &bytes).await?,
            Ok(Some(ExecOutput::Stderr(bytes))) => write_pieces(&mut to, CHANNEL_STDERR, &bytes).await?,
            Ok(Some(ExecOutput::End(end))) => {
                let end = serde_json::to_vec(&end).expect("the API's types are JSON");
                write_frame(&mut to, CHANNEL_END, &end).await?;
                return to.shutdown().await;
            }
            // The worker lost the session: the connection ends without an end frame and the client
            // says so.
            Ok(None) => return to.shutdown().await,
        }
    }
}

async fn write_pieces(to: &mut (impl AsyncWrite + Unpin), channel: u8, bytes: &[u8]) -> io::Result<()> {
    for piece in bytes.chunks(FRAME_MAX) {
        write_frame(to, channel, piece).await?;
    }
    Ok(())
}

async fn write_frame(to: &mut (impl AsyncWrite + Unpin), channel: u8, payload: &[u8]) -> io::Result<()> {
    let length = u32::try_from(payload.len()).expect("frames are cut to FRAME_MAX");
    let mut frame = Vec::with_capacity(FRAME_HEADER + payload.len());
    frame.push(channel);
    frame.extend_from_slice(&length.to_be_bytes());
    frame.extend_from_slice(payload);
    to.write_all(&frame).await?;
    to.flush().await
}
