//! Open directories of proc(5) in images: CRIU 4.2 writes a slash over the end of the path
//! `/proc/PID`, and what lay behind it in its memory follows. [`mend_proc_paths`] puts the path
//! right, by the link that the frozen process has. Changes nothing else.

use kip_criu_images::fields::{file_entry, fs_entry, reg_file_entry};
use kip_criu_images::processes::places;
use kip_criu_images::{CheckpointImageError, FieldValue, Images, Malformed, Message};
use std::collections::BTreeMap;

/// Puts paths right; `link` says where a link of a process (by its number inside) below its
/// directory in proc(5) leads.
///
/// # Errors
/// An image is missing or damaged.
pub fn mend_proc_paths(
    images: &mut Images,
    link: &dyn Fn(u32, &str) -> Option<String>,
) -> Result<(), CheckpointImageError> {
    let mut files = images.image("files.img")?;
    let damaged = files.damaged();
    let is_below = |name: &str| process_of(name).is_some_and(|process| name.len() > process.len());
    let mut suspects = Vec::new();
    for (place, file) in files.entries.iter().enumerate() {
        let reg = file.message(file_entry::REG).map_err(&damaged)?;
        let name = reg.and_then(|reg| reg.bytes(reg_file_entry::NAME).map(<[u8]>::to_vec));
        let name = name.map(|name| String::from_utf8_lossy(&name).into_owned());
        let name = name.filter(|name| is_below(name));
        suspects.extend(name.map(|name| (place, file.number(file_entry::ID), name)));
    }
    if suspects.is_empty() {
        return Ok(());
    }
    let mut links: BTreeMap<u64, (u32, String)> = BTreeMap::new();
    for (pid, name) in images.numbered("fs") {
        links.extend(images.first(&name)?.map(|fs| (fs.number(fs_entry::CWD_ID), (pid, "cwd".to_owned()))));
    }
    links.extend(places(images)?.into_iter().map(|(id, (pid, fd))| (id, (pid, format!("fd/{fd}")))));
    let mut changed = false;
    for (place, id, name) in suspects {
        let target = links.get(&id).and_then(|(pid, at)| link(*pid, at));
        let Some(right) = target.filter(|target| process_of(&name) == Some(target.as_str())) else { continue };
        rename(&mut files.entries[place], &right).map_err(&damaged)?;
        changed = true;
    }
    if changed {
        images.put(&files);
    }
    Ok(())
}

/// Gives a regular file of the images another name.
pub(crate) fn rename(file: &mut Message, name: &str) -> Result<(), Malformed> {
    file.edit_messages(file_entry::REG, |reg| {
        for (_, value) in reg.0.iter_mut().filter(|(number, _)| *number == reg_file_entry::NAME) {
            *value = FieldValue::Bytes(name.into());
        }
        Ok(())
    })
}

/// `/proc/PID` of a path below it, or that is it.
fn process_of(path: &str) -> Option<&str> {
    let rest = path.strip_prefix("/proc/")?;
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    let ends = matches!(rest.as_bytes().get(digits), None | Some(b'/'));
    (digits > 0 && ends).then(|| &path[.."/proc/".len() + digits])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_processes_are_known_by_their_paths() {
        assert_eq!(process_of("/proc/17"), Some("/proc/17"));
        assert_eq!(process_of("/proc/17/\u{10}"), Some("/proc/17"));
        assert_eq!(process_of("/proc/17/task/17"), Some("/proc/17"));
        assert_eq!((process_of("/proc/meminfo"), process_of("/proc/1x"), process_of("/proc/")), (None, None, None));
    }
}
