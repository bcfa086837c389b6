//! The engine: what is done to one proc on this machine, each as one step that another crate has
//! decided on.
//!
//! | module | owns |
//! | --- | --- |
//! | [`start`], [`hibernate`], [`park`], [`wake`], [`stop`] | the work of one transition each |
//! | [`renew`] | what was held of a proc and is lost, made anew |
//! | [`host`], [`namespaces`], [`upkeep`] | what procs have of their machine: pools, the wake plane, names |
//! | [`fd_store`] | descriptors that must survive the daemon, in the keeper |
//! | [`volumes`], [`pins`] | files of the host that procs have, files that their image lacks |
//! | [`secrets`] | what procs are told in files that are on the disk only sealed |
//! | [`metering`] | what each proc has used, for its meter |
//! | [`plans`] | how a wake will be done |
//! | [`descriptors`], [`watches`], [`owners`], [`inotify`], [`lifted`] | what a program has and waits for |
//! | [`input`] | the standard input of a program |
//! | [`exec_ends`], [`exits`] | how processes end |
//! | [`observe`] | traces of wakes |
//! | [`blocking`], [`tickets`] | work that may take its time, uses that keep a proc awake |
//!
//! Never queues, never decides when: that is the supervisor's. Knows no tasks of procs.
#![forbid(unsafe_code)]

pub mod blocking;
pub mod cause;
pub mod descriptors;
pub mod exec_ends;
pub mod exits;
pub mod fd_store;
pub mod files;
pub mod hibernate;
pub mod host;
pub mod inotify;
pub mod input;
pub mod lifted;
pub mod metering;
pub mod namespaces;
pub mod observe;
pub mod owners;
pub mod page_out;
pub mod park;
pub mod pins;
pub mod plans;
pub mod ports;
pub mod renew;
pub mod secrets;
pub mod start;
pub mod stop;
mod survey;
pub mod suspend;
pub mod sysfs;
mod terminals;
pub mod tickets;
pub mod tmpfs;
pub mod upkeep;
pub mod volumes;
pub mod wake;
pub mod watches;
