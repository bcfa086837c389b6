//! System V IPC, sysvipc(7), in a plan: a new namespace gets what is in the images.
//!
//! Owns `struct setting` and `struct object`. What segments contain is with other shared memory
//! ([`super::memory`]).

use super::layout::{Span, Writer};
use super::{PlanError, unsupported};
use kip_criu_images::Images;
use kip_criu_images::system_v::{SystemV, SystemVKind, SystemVObject};

/// What is in the images, if all of it can be made again.
pub(super) fn read(images: &Images) -> Result<SystemV, PlanError> {
    let found = SystemV::read(images)?;
    if found.segments().any(|segment| segment.unusual) {
        return unsupported("System V memory of huge pages");
    }
    if found.segments().any(|segment| segment.locked) {
        return unsupported("System V memory that is locked");
    }
    Ok(found)
}

/// Its settings and objects.
pub(super) fn write(system_v: &SystemV, writer: &mut Writer) -> [Span; 2] {
    let settings: Vec<Vec<u64>> =
        system_v.settings.iter().map(|(name, text)| setting(writer, name, text).to_vec()).collect();
    let settings = writer.list(&settings);
    let objects: Vec<Vec<u64>> = system_v.objects.iter().map(|object| write_object(writer, object)).collect();
    [settings, writer.list(&objects)]
}

fn write_object(writer: &mut Writer, object: &SystemVObject) -> Vec<u64> {
    let (kind, next_id, size, contents) = match &object.kind {
        SystemVKind::Segment(segment) => (0, "shm_next_id", segment.size, Span::default()),
        SystemVKind::Semaphores(values) => {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let many = values.len() as u64;
            (1, "sem_next_id", many, Span(writer.bytes(&bytes), many))
        }
        SystemVKind::Queue { most, messages } => {
            let mut queued = Vec::new();
            for (kind, text) in messages {
                let bytes = [&kind.to_le_bytes()[..], text].concat();
                queued.push(vec![writer.bytes(&bytes), text.len() as u64]);
            }
            (2, "msg_next_id", *most, writer.list(&queued))
        }
    };
    let next_id = setting(writer, next_id, &object.id.to_string());
    let (owner, creator) = (object.owner, object.creator);
    let mut words = vec![kind, object.id, object.key, object.mode, owner.0, owner.1, creator.0, creator.1, size];
    words.extend([contents.0, contents.1]);
    words.extend(next_id);
    words
}

fn setting(writer: &mut Writer, name: &str, text: &str) -> [u64; 3] {
    [writer.string(&format!("/proc/sys/kernel/{name}")), writer.bytes(text.as_bytes()), text.len() as u64]
}
