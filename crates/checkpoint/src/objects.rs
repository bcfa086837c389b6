//! Kernel objects that are held while their program does not exist.

/// A kernel object that outlives the tree, held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldObject {
    /// Its file id in the images.
    pub id: u64,
    /// See [`kip_criu_images::codes::kind`].
    pub kind: u64,
    /// A process that has it open, as numbered inside.
    pub pid: u32,
    /// Its descriptor there.
    pub fd: i32,
}
