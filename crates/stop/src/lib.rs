//! Threads of other processes stopped by ptrace(2), made to execute system calls, and let go again
//! without their program having noticed.
//!
//! Owns the way a thread leaves a call and begins it anew with what is left of its time-out
//! ([`stop`], `timeouts`), what a stopped process is asked for ([`timers`]), and the limits that
//! are lifted for that ([`limits`]). Never moves a program's memory, never decides when a program
//! stops.
//!
//! A trace belongs to the thread that made it: while a program stands still the thread that stopped
//! it lives, and if it dies the kernel lets the program run. Between the stop of a thread and the
//! moment it is put back onto its call a program can see EINTR then, so only `kip-pager` stops
//! threads, which lives on when the daemon is killed.
#![forbid(unsafe_code)]

pub mod limits;
mod scratch;
mod stopped;
mod timeouts;
pub mod timers;

pub use scratch::{Scratch, call};
pub use stopped::{StopError, Stopped, StoppedProcess, ended, find_ends, note_ends, stop, stop_quiescent};
