//! `kip-launch`: started by the daemon with a SEQPACKET socket as its standard input. Not for
//! people.
#![forbid(unsafe_code)]

use rustix::fs::{Mode, OFlags};
use std::os::fd::AsFd;
use std::process::ExitCode;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("kip-launch: {e}; it is started by kip, not by hand");
            ExitCode::FAILURE
        }
    }
}

fn run() -> std::io::Result<()> {
    let socket = rustix::io::fcntl_dupfd_cloexec(std::io::stdin().as_fd(), 3)?;
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    drop(null);
    rustix::net::sockopt::socket_type(&socket)?;
    kip_sandbox::launch::serve(socket)
}
