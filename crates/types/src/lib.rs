//! Words of the system: ids, specs, the proc's lifecycle and the messages of the API.
//!
//! Owns every type that crosses a crate's border and the pure lifecycle function
//! [`lifecycle::step`]. Never does I/O, never reads a clock, never holds a lock.
#![forbid(unsafe_code)]

pub mod api;
pub mod backup;
mod chain;
pub mod generation_id;
pub mod image;
pub mod keys;
pub mod life;
pub mod lifecycle;
pub mod name;
mod nearest;
pub mod profile;
pub mod runtime;
pub mod scale;
pub mod spec;
pub mod suspend;
pub mod tree;
pub mod volume;

pub use api::{Event, ProcView, Refusal, RunRequest};
pub use chain::chain;
pub use life::Restart;
pub use lifecycle::{Generation, State, StateName, Tier};
pub use name::{CheckpointTag, CurrentName, ProcName, Realm, TemplateId};
pub use nearest::nearest;
pub use spec::{Clock, Fallback, Hibernate, Image, Lazy, Limits, PortSpec, Protocol, Spec, Timing, WakeOn};
pub use suspend::SuspendedBy;
pub use volume::{VolumeName, VolumeSource, VolumeSpec};
