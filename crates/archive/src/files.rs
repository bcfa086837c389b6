//! The filesystem difference of a proc: a directory tree into a list of entries and blocks of
//! packs, and back, exactly.
//!
//! [`tree`] is the list and its bytes, [`walk`] makes it of a directory, [`restore`] a directory of
//! it, [`compare`] tells two directories apart, [`rules`] says what a proc's files may be,
//! [`shift`] gives a directory other ids. The tree is a tenant's: nothing here follows a link,
//! looks at a name as a path, or leaves the directory it was given. Overlay's whiteouts and opaque
//! marks are devices and extended attributes like any other.

mod beneath;
pub mod compare;
pub mod restore;
pub mod rules;
pub mod shift;
pub mod tree;
pub mod walk;
