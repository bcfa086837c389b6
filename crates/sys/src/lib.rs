//! The only crate with unsafe code: thin wrappers, each around one system call or one small family.
//!
//! A wrapper takes `BorrowedFd`, returns `OwnedFd`, names its man page and minimum kernel, and
//! holds no policy.
#![allow(unsafe_code)]

pub mod armed;
pub mod caps;
pub mod clock;
pub mod ends;
pub mod fault;
pub mod fdpass;
pub mod fsid;
pub mod inject;
pub mod kernel_file;
pub mod loops;
pub mod mount;
pub mod netns;
pub mod ns;
pub mod owner;
pub mod pagemap;
pub mod perf;
pub mod process;
pub mod publish;
pub mod ran;
pub mod random;
pub mod restart;
pub mod rseq;
pub mod shortened;
pub mod smaps;
pub mod sock;
pub mod status;
pub mod stub;
pub mod timed;
pub mod timens;
pub mod timer;
pub mod trace;
pub mod uffd;
pub mod watch;
pub mod within;
