//! Rewrites what an archived proc would wake from, as an attacker with the store and the keys
//! could; for tests.
//!
//! `tamper DATA STORE NAME WHAT`, while no daemon runs: NAME's images ask for WHAT from then on,
//! `nothing` for the same as before, `portable` for no more of a processor than every one has.
#![forbid(unsafe_code)]

use kip_archive::front::FrontManifest;
use kip_archive::front::read::{FrontEvent, FrontReader};
use kip_archive::front::write::FrontWriter;
use kip_archive::head::Head;
use kip_archive::ids::ProcId;
use kip_archive::keys::Keyring;
use kip_archive::names::{FrontRef, ObjectName};
use kip_criu_images::fields::{
    core_entry, creds_entry, mnt_entry, thread_core_entry, thread_info_x86, uid_gid_extent, user_x86_fpregs_entry,
    userns_entry,
};
use kip_criu_images::{CHECKPOINT, Images, Malformed, Message};
use kip_store::{Key, Settings, Store};
use kip_types::Realm;
use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::path::Path;
use std::sync::Arc;

/// A change of one image.
type Change = fn(&mut Message) -> Result<(), Malformed>;

fn credentials(core: &mut Message, change: impl Fn(&mut Message)) -> Result<(), Malformed> {
    core.edit_messages(core_entry::THREAD_CORE, |own| {
        own.edit_messages(thread_core_entry::CREDS, |creds| {
            change(creds);
            Ok::<_, Malformed>(())
        })
    })
}

/// The image to change and how.
fn change_of(what: &str) -> Option<(&'static str, Change)> {
    Some(match what {
        "user" => ("core-2.img", |core| credentials(core, |creds| creds.set_varint(creds_entry::EUID, 70_000))),
        "capabilities" => {
            ("core-2.img", |core| credentials(core, |creds| creds.set_varint(creds_entry::CAP_EFF, 0xffff_ffff)))
        }
        "privileges" => {
            ("core-2.img", |core| credentials(core, |creds| creds.set_varint(creds_entry::NO_NEW_PRIVS, 0)))
        }
        "filter" => ("core-2.img", |core| {
            core.edit_messages(core_entry::THREAD_CORE, |own| {
                own.set_varint(thread_core_entry::SECCOMP_MODE, 0);
                own.remove(thread_core_entry::SECCOMP_FILTER);
                Ok::<_, Malformed>(())
            })
        }),
        "ids" => ("userns", |map| {
            map.edit_messages(userns_entry::UID_MAP, |extent| {
                extent.set_varint(uid_gid_extent::LOWER_FIRST, 0);
                Ok::<_, Malformed>(())
            })
        }),
        "mount" => ("mountpoints", |mount| {
            mount.set_bytes(mnt_entry::MOUNTPOINT, b"/etc".to_vec());
            Ok(())
        }),
        _ => return None,
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [data, store, name, what] = &words[..] else { return Err("tamper DATA STORE NAME WHAT".into()) };
    let (data, dir) = (Path::new(data), Path::new(data).join("procs").join(name));
    let realm = Realm::default();
    let keys = Arc::new(Keyring::load(&data.join("archive"), &realm)?);
    let proc: ProcId = fs::read_to_string(dir.join("archive-id"))?.trim().parse()?;
    let known = dir.join("archived.json");
    let mut archived: serde_json::Value = serde_json::from_slice(&fs::read(&known)?)?;
    let front: FrontRef = serde_json::from_value(archived["front"].clone())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let _inside = runtime.enter();
    let store = Store::open(store, Settings::default())?;
    let key = |front| Key::new(ObjectName::Front { realm: realm.clone(), proc, front }.to_string()).expect("a name");
    let bytes = runtime.block_on(async {
        use futures_util::TryStreamExt as _;
        store.get(&key(front)).await?.try_collect::<Vec<_>>().await
    })?;
    let mut reader = FrontReader::new(Arc::clone(&keys), proc, front);
    let events = reader.push(&bytes.concat())?;
    let (new, bytes) = rewrite(&keys, proc, events, what)?;
    archived["front"] = serde_json::to_value(new)?;
    fs::write(&known, serde_json::to_vec(&archived)?)?;
    let head_key = Key::new(ObjectName::Head { realm: realm.clone(), proc }.to_string()).expect("a name");
    runtime.block_on(async {
        store.put(&key(new), bytes.into()).await?;
        let (sealed, version) = store.read_reference(&head_key).await?.ok_or("there is no head")?;
        let head = Head::open(&keys, proc, None, &sealed)?;
        // No owner would follow a generation by itself.
        let head = Head { current: Some(new), ..head.again() };
        store.swap_reference(&head_key, Some(&version), head.seal(&keys)?.into()).await?;
        Ok::<_, Box<dyn Error>>(())
    })
}

/// Changes the first entry of the images whose names begin so.
fn edit(
    archive: &mut Vec<u8>,
    prefix: &str,
    change: impl Fn(&mut Message) -> Result<(), Malformed>,
) -> Result<(), Box<dyn Error>> {
    let mut images = Images::of_files([(CHECKPOINT.to_owned(), std::mem::take(archive))].into())?;
    let names: Vec<String> = images.names().filter(|name| name.starts_with(prefix)).map(str::to_owned).collect();
    if names.is_empty() {
        return Err("there is no such image".into());
    }
    for name in names {
        let mut image = images.image(&name)?;
        change(image.entries.first_mut().ok_or("the image is empty")?)?;
        images.put(&image);
    }
    *archive = images.pack();
    Ok(())
}

fn rewrite(
    keys: &Keyring,
    proc: ProcId,
    events: Vec<FrontEvent>,
    what: &str,
) -> Result<(FrontRef, Vec<u8>), Box<dyn Error>> {
    let mut manifest: Option<FrontManifest> = None;
    let mut files: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    for event in &events {
        match event {
            FrontEvent::Manifest(found) => manifest = Some((**found).clone()),
            FrontEvent::Metadata { name, bytes, .. } => files.entry(name.clone()).or_default().extend(bytes),
            _ => {}
        }
    }
    let mut manifest = manifest.ok_or("there is no manifest")?;
    let archive = files.get_mut(CHECKPOINT).ok_or("there are no images")?;
    if let Some((prefix, change)) = change_of(what) {
        edit(archive, prefix, change)?;
    } else if what == "processor" {
        // No processor has all three.
        manifest.cpu_features.extend(["3dnow", "xop", "amx_tile"].map(str::to_owned));
    } else if what == "portable" {
        manifest.cpu_features.clear();
        edit(archive, "core-", |core| {
            // Registers beyond those that every processor has.
            core.edit_messages(core_entry::THREAD_INFO, |thread| {
                thread.edit_messages(thread_info_x86::FPREGS, |fpu| {
                    fpu.remove(user_x86_fpregs_entry::XSAVE);
                    Ok::<_, Malformed>(())
                })
            })
        })?;
    } else if what != "nothing" {
        return Err(format!("{what}: there is no such change").into());
    }
    for file in &mut manifest.metadata {
        file.size = files[&file.name].len() as u64;
    }
    let mut front = FrontWriter::begin(keys, proc, &manifest)?;
    let metadata =
        |front: &mut FrontWriter| manifest.metadata.iter().try_for_each(|file| front.metadata(&files[&file.name]));
    let mut is_written = false;
    for event in events {
        if !is_written
            && matches!(
                event,
                FrontEvent::EagerPages { .. } | FrontEvent::Eager | FrontEvent::SetPages { .. } | FrontEvent::End
            )
        {
            metadata(&mut front)?;
            is_written = true;
        }
        let split = |pages: Vec<(u64, Vec<u8>)>| -> (Vec<u64>, Vec<u8>) {
            let (addresses, bytes): (Vec<u64>, Vec<Vec<u8>>) = pages.into_iter().unzip();
            (addresses, bytes.concat())
        };
        match event {
            FrontEvent::Sets(sets) => front.sets(&sets)?,
            FrontEvent::PageTable(table) => front.page_table(&table)?,
            FrontEvent::Files(files) => front.files(&files)?,
            FrontEvent::EagerPages { space, pages } => {
                let (addresses, bytes) = split(pages);
                front.eager_pages(space, &addresses, &bytes)?;
            }
            FrontEvent::SetPages { space, pages } => {
                let (addresses, bytes) = split(pages);
                front.set_pages(space, &addresses, &bytes)?;
            }
            FrontEvent::Manifest(_) | FrontEvent::Metadata { .. } | FrontEvent::Eager | FrontEvent::End => {}
        }
    }
    let new = front.front();
    Ok((new, front.end()?))
}
