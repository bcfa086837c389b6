//! `kip cp`: files from and to a proc, in whatever tier it is, without a wake.

use crate::names::{self, name};
use crate::output::{failed, show};
use anyhow::{Context, bail};
use clap::Args;
use kip_client::{Archive, CallError, Client, Pieces};
use kip_files::FilesError;
use kip_files::pack::PackSource;
use kip_files::tree::RootTree;
use kip_files::unpack::{self, UnpackLimits};
use kip_text::bytes;
use kip_types::api::{Code, FilesWritten, ReadFilesRequest, WriteFilesRequest};
use kip_types::name::ProcName;
use std::collections::HashSet;
use std::io::{self, BufWriter, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use tokio::sync::mpsc;

/// Bytes of a piece, and pieces that wait.
const PIECE: usize = 256 << 10;
const PIECES: usize = 4;

#[derive(Debug, Args)]
pub struct CpArgs {
    /// NAME:PATH in a proc, a path on this machine, or - for a tar archive on standard input
    #[arg(add = names::known(), value_name = "FROM")]
    pub from: String,
    /// The same; - for standard output. A directory takes what is copied, anything else is its new
    /// name
    #[arg(add = names::known(), value_name = "TO")]
    pub to: String,
    /// Copy what FROM leads to if it is a link
    #[arg(short = 'L', long)]
    pub follow_link: bool,
}

/// One end of a copy.
#[derive(Debug, PartialEq, Eq)]
enum End<'a> {
    Proc { name: &'a str, path: &'a str },
    Here(&'a str),
    Stream,
}

impl End<'_> {
    /// As docker reads it: what begins with a dot or a slash is a path here.
    fn read(text: &str) -> End<'_> {
        match text.split_once(':') {
            _ if text == "-" => End::Stream,
            Some((name, path)) if !text.starts_with(['.', '/']) => End::Proc { name, path },
            _ => End::Here(text),
        }
    }
}

/// Copies.
pub async fn cp(client: &Client, args: &CpArgs, json: bool) -> anyhow::Result<()> {
    let written = match (End::read(&args.from), End::read(&args.to)) {
        (End::Proc { name: proc, path }, to @ (End::Here(_) | End::Stream)) => {
            let request = ReadFilesRequest { path: path.to_owned(), follow: args.follow_link };
            let archive = client.read_files(&name(proc)?, &request).await?;
            match to {
                End::Here(to) => receive(archive, to).await?,
                _ => return pass_on(archive).await,
            }
        }
        (End::Here(from), End::Proc { name: proc, path }) => {
            let from = (absolute(from)?, args.follow_link);
            send(client, &name(proc)?, path, true, move |out| pack(&from.0, from.1, out)).await?
        }
        (End::Stream, End::Proc { name: proc, path }) => {
            send(client, &name(proc)?, path, false, |out| {
                io::copy(&mut io::stdin().lock(), out).map(drop).context("standard input cannot be read")
            })
            .await?
        }
        (End::Proc { .. }, End::Proc { .. }) => bail!("kip cp copies from a proc or to one, not between two"),
        _ => bail!("neither is in a proc: write NAME:PATH for one of them"),
    };
    show(&written, json, |done| {
        format!("copied {} {}, {}\n", done.entries, if done.entries == 1 { "file" } else { "files" }, bytes(done.bytes))
    })
}

/// As it was written but for the beginning: a slash or dot at the end has a meaning.
fn absolute(path: &str) -> anyhow::Result<PathBuf> {
    match path {
        "" => bail!("a path is empty"),
        path if path.starts_with('/') => Ok(path.into()),
        "." => Ok(std::env::current_dir()?.join("./.")),
        path => Ok(std::env::current_dir()?.join(path)),
    }
}

fn pack(from: &Path, follow: bool, out: &mut dyn Write) -> anyhow::Result<()> {
    let tree = RootTree::of_host().context("/ cannot be opened")?;
    let source = PackSource::find(&tree, from, follow)?;
    Ok(source.pack(&tree, &|_| 0, out)?)
}

/// Sends what `make` writes to a proc.
async fn send(
    client: &Client,
    proc: &ProcName,
    path: &str,
    rename: bool,
    make: impl FnOnce(&mut dyn Write) -> anyhow::Result<()> + Send + 'static,
) -> anyhow::Result<FilesWritten> {
    let (sender, pieces) = mpsc::channel(PIECES);
    let made = tokio::task::spawn_blocking(move || {
        let mut out = BufWriter::with_capacity(PIECE, Sending(sender.clone()));
        let made = make(&mut out).and_then(|()| Ok(out.flush()?));
        drop(out.into_parts());
        if made.is_err() {
            let _ = sender.blocking_send(Err(io::ErrorKind::Interrupted.into()));
        }
        made
    });
    let request = WriteFilesRequest { path: path.to_owned(), rename };
    let sent = client.write_files(proc, &request, Pieces(pieces)).await;
    if let Err(refused @ CallError::Refused(_)) = sent {
        return Err(refused.into());
    }
    let made = made.await?;
    // A daemon that refuses at once may close the connection before its answer is read. It says so
    // again to an archive with nothing in it.
    let is_pipe = |e: &(dyn std::error::Error + 'static)| {
        e.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
    };
    if let (Err(e), Err(_)) = (&made, &sent)
        && e.chain().any(is_pipe)
    {
        let nothing = client.write_files(proc, &request, Pieces(mpsc::channel(1).1)).await;
        if let Err(CallError::Refused(refusal)) = nothing
            && matches!(refusal.code, Code::State | Code::Unknown | Code::Forbidden)
        {
            return Err(CallError::Refused(refusal).into());
        }
    }
    // Where the archive could not be made, that is the reason.
    match (made, sent) {
        (_, Ok(written)) => Ok(written),
        (Err(e), Err(lost)) => Err(if e.is::<FilesError>() { e } else { lost.into() }),
        (Ok(()), Err(lost)) => Err(lost.into()),
    }
}

/// Unpacks an archive here. Links in it are made, and none is followed.
async fn receive(archive: Archive, to: &str) -> anyhow::Result<FilesWritten> {
    let to = absolute(to)?;
    let (sender, pieces) = mpsc::channel(PIECES);
    let unpacked = tokio::task::spawn_blocking(move || {
        let tree = RootTree::of_host()?;
        let busy = HashSet::new();
        let limits = UnpackLimits { bytes: u64::MAX, entries: u64::MAX };
        let request = unpack::UnpackRequest { to: &to, rename: true, follow: false, busy: &busy, limits };
        let done = unpack::unpack(&tree, &request, Receiving { pieces, piece: io::Cursor::default() });
        done.map_err(anyhow::Error::from)
    });
    let lost = forward(archive, sender).await.err();
    match (unpacked.await?, lost) {
        (Ok(done), None) => Ok(FilesWritten { bytes: done.bytes, entries: done.entries }),
        (_, Some(lost)) => Err(anyhow::Error::new(lost).context("the archive broke off: the daemon's log says why")),
        (Err(e), None) => Err(e),
    }
}

async fn forward(mut archive: Archive, to: mpsc::Sender<io::Result<Vec<u8>>>) -> Result<(), CallError> {
    loop {
        match archive.next().await {
            Ok(Some(piece)) if to.send(Ok(piece.to_vec())).await.is_ok() => {}
            Ok(_) => return Ok(()),
            Err(lost) => {
                let _ = to.send(Err(io::ErrorKind::UnexpectedEof.into())).await;
                return Err(lost);
            }
        }
    }
}

/// Writes an archive to standard output as it comes.
async fn pass_on(mut archive: Archive) -> anyhow::Result<()> {
    let mut out = io::stdout();
    if out.is_terminal() {
        bail!("an archive is not written to a terminal: send it to a file or a program");
    }
    while let Some(piece) = archive.next().await? {
        out.write_all(&piece).map_err(failed)?;
    }
    out.flush().map_err(failed)
}

struct Sending(mpsc::Sender<io::Result<Vec<u8>>>);

impl Write for Sending {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = self.0.blocking_send(Ok(bytes.to_owned()));
        sent.map(|()| bytes.len()).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Receiving {
    pieces: mpsc::Receiver<io::Result<Vec<u8>>>,
    piece: io::Cursor<Vec<u8>>,
}

impl Read for Receiving {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let n = self.piece.read(buffer)?;
            if n > 0 || buffer.is_empty() {
                return Ok(n);
            }
            match self.pieces.blocking_recv() {
                Some(piece) => self.piece = io::Cursor::new(piece?),
                None => return Ok(0),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_read_as_docker_reads_them() {
        assert_eq!(End::read("web:/srv"), End::Proc { name: "web", path: "/srv" });
        assert_eq!(End::read("web:"), End::Proc { name: "web", path: "" });
        for here in ["./web:/srv", "/a:b", "file", ".", "../x"] {
            assert_eq!(End::read(here), End::Here(here));
        }
        assert_eq!(End::read("-"), End::Stream);
    }

    #[test]
    fn the_end_of_a_path_stays() {
        let here = std::env::current_dir().unwrap();
        let text = |path: &str| absolute(path).unwrap().into_os_string().into_string().unwrap();
        assert_eq!(text("/a/."), "/a/.");
        assert!(text("a/").ends_with("a/") && text(".").ends_with("/."));
        assert!(Path::new(&text("a")).starts_with(here));
    }
}
