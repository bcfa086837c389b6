//! What a store says of its objects.

use crate::key::Key;
use std::time::SystemTime;

/// What [`crate::Store::put_if_absent`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placed {
    /// Nothing: the object is there now.
    New,
    /// An object, which stays as it was.
    AlreadyThere,
}

/// One object of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub key: Key,
    /// Bytes.
    pub size: u64,
    /// When it was written, by the clock of the store; in full seconds in a bucket.
    pub modified: SystemTime,
}
