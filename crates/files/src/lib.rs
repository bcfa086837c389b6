//! Files as a tar stream and back, of a proc and of the host: what both ends of `kip cp` do. And
//! all files of a file system in memory as one file.
//!
//! | module | what |
//! | --- | --- |
//! | [`tree`] | a path, resolved by descriptors below a root, across mounts that are attached nowhere |
//! | [`mod@pack`] | what is at a path as a tar stream |
//! | [`mod@unpack`] | a tar stream into a directory, with the rules of `docker cp` |
//! | [`interpreter`] | what a program that is there lacks to be executed |
//! | [`whole`] | all of a file system in memory as one file, and back |
//!
//! Links and names in a tree are its program's to choose, and those of an archive its sender's:
//! neither is trusted. No path is given to the kernel whole; each part is opened below the
//! directory before it, and no link is followed but by this code, which stays below the root. Knows
//! no procs and no API, and never decides which files are to be copied.
#![forbid(unsafe_code)]

pub mod error;
pub mod interpreter;
pub mod pack;
pub mod tree;
pub mod unpack;
pub mod whole;

pub use error::FilesError;
