//! Volumes that Kip keeps under a name, as their owner lists and removes them.

use crate::worker::Worker;
use async_trait::async_trait;
use kip_engine::blocking::blocking;
use kip_engine::volumes::{TRASH, directory, fill, size};
use kip_service::VolumeService;
use kip_types::api::{Code, Refusal};
use kip_types::volume::VolumeView;
use kip_types::{ProcName, VolumeName, VolumeSource, chain};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::PathBuf;

impl Worker {
    fn users(&self) -> BTreeMap<VolumeName, Vec<ProcName>> {
        let mut users: BTreeMap<VolumeName, Vec<ProcName>> = BTreeMap::new();
        let mut procs = self.machine.live_procs();
        procs.sort_by(|a, b| a.name.cmp(&b.name));
        for proc in procs {
            for volume in &proc.spec().volumes {
                if let VolumeSource::Named(name) = &volume.source {
                    let of_it = users.entry(name.clone()).or_default();
                    if of_it.last() != Some(&proc.name) {
                        of_it.push(proc.name.clone());
                    }
                }
            }
        }
        users
    }

    /// Gives the volume a name that no client can ask for.
    fn take_away(&self, name: &VolumeName) -> Result<PathBuf, Refusal> {
        let directory = directory(&self.machine.data);
        let claimed = self.machine.claims.0.lock();
        let users = self.users().remove(name).unwrap_or_default();
        if !users.is_empty() || claimed.contains(name) {
            let names: Vec<&str> = users.iter().map(ProcName::as_str).collect();
            let whose = if names.is_empty() { "a proc that is being made".to_owned() } else { names.join(", ") };
            let message = format!("volume {name} is in use by {whose}: remove what has it first (`kip rm`)");
            return Err(Refusal::new(Code::State, message));
        }
        let (path, trash) = (directory.join(name.as_str()), directory.join(format!("{TRASH}{name}")));
        let _ = fs::remove_dir_all(&trash);
        match fs::rename(&path, &trash) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Err(Refusal::new(
                Code::Unknown,
                format!("there is no volume {:?} (`kip volume ls` lists them)", name.as_str()),
            )),
            Err(e) => Err(Refusal::new(Code::Failed, format!("volume {name} cannot be removed: {e}"))),
            Ok(()) => {
                fill::forget(&self.machine.data, name);
                Ok(trash)
            }
        }
    }
}

#[async_trait]
impl VolumeService for Worker {
    async fn volumes(&self) -> Result<Vec<VolumeView>, Refusal> {
        let (data, mut users) = (self.machine.data.clone(), self.users());
        blocking(move || {
            let entries = match fs::read_dir(directory(&data)) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
                entries => entries.map_err(|e| {
                    Refusal::new(Code::Failed, format!("{} cannot be read: {e}", directory(&data).display()))
                })?,
            };
            let names = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<VolumeName>().ok());
            let mut views: Vec<VolumeView> = names
                .map(|name| {
                    let path = directory(&data).join(name.as_str());
                    VolumeView { bytes: size(&path), users: users.remove(&name).unwrap_or_default(), name, path }
                })
                .collect();
            views.sort_by(|a, b| a.name.cmp(&b.name));
            Ok(views)
        })
        .await
    }

    async fn remove_volume(&self, name: VolumeName) -> Result<(), Refusal> {
        let worker = self.clone();
        blocking(move || {
            let trash = worker.take_away(&name)?;
            fs::remove_dir_all(&trash).map_err(|e| {
                Refusal::new(
                    Code::Failed,
                    format!("volume {name} is removed, but {} is left: {}", trash.display(), chain(&e)),
                )
            })
        })
        .await
    }
}
