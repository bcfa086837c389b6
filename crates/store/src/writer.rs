//! An object that is written while it is being made.

use crate::directory::FileWriter;
use crate::failure::PutError;
use crate::key::Key;
use crate::remote::upload::PartsWriter;
use bytes::Bytes;
use std::sync::Arc;

/// An object on its way into a store, from [`crate::Store::writer`]. It is there when
/// [`Writer::finish`] returns, whole; dropped before, it leaves what was there.
#[derive(Debug)]
pub struct Writer {
    pub(crate) store: Arc<str>,
    pub(crate) key: Key,
    pub(crate) to: Destination,
    /// Whether all that was given was taken.
    pub(crate) whole: bool,
}

#[derive(Debug)]
pub(crate) enum Destination {
    File(FileWriter),
    Parts(PartsWriter),
}

impl Writer {
    /// Takes the next bytes. Waits when too many are under way already, so what is held in memory
    /// stays bounded: in a bucket [`crate::Settings::most_uploads`] parts and two more, in a
    /// directory none. An error may be about earlier ones. After an error, or when this is dropped
    /// before it is done, the object cannot be finished.
    pub async fn write(&mut self, bytes: Bytes) -> Result<(), PutError> {
        let whole = std::mem::replace(&mut self.whole, false);
        match &mut self.to {
            _ if !whole => return Err(self.incomplete()),
            Destination::File(file) => file.write(bytes).await?,
            Destination::Parts(parts) => parts.write(bytes).await?,
        }
        self.whole = true;
        Ok(())
    }

    /// Makes all of it an object, over one that is there. Durable when it returns.
    pub async fn finish(self) -> Result<(), PutError> {
        match self.to {
            _ if !self.whole => Err(self.incomplete()),
            Destination::File(file) => file.finish().await,
            Destination::Parts(parts) => parts.finish().await,
        }
    }

    fn incomplete(&self) -> PutError {
        PutError::Incomplete { store: self.store.clone(), key: self.key.clone() }
    }
}
