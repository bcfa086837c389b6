//! Whether a proc could be started, found out by starting one like it without running its program:
//! before another one goes for it.
//!
//! The rehearsal has a name, a slot and a directory of its own, goes the way of every start (image,
//! tarball, limits, volumes, user, working directory), and ends when the kernel has exec'd the
//! program, before its first instruction. It is no proc for clients or other procs, publishes
//! nothing, and changes no volume. Crash: it has the mark of a trial and was never established, so
//! recovery removes it.

use crate::replace::until_settled;
use crate::worker::Worker;
use crate::worker::check_spec;
use async_trait::async_trait;
use kip_engine::blocking::blocking;
use kip_engine::{secrets, start, stop, volumes};
use kip_image::digest::Hasher;
use kip_net::reserve::{self, At, ReserveError};
use kip_service::TrialService;
use kip_supervisor::probe;
use kip_types::api::{
    CheckRequest, CheckView, Code, ContentKey, ContentView, ContentsView, PortView, Refusal, RunRequest,
};
use kip_types::chain;
use kip_types::keys::Hex;
use kip_types::life::Restart;
use kip_types::spec::{Protocol, addresses_meet};
use kip_types::{Image, ProcName, Spec, State, VolumeSource};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

/// Read at once of a tarball.
const PIECE: usize = 1 << 20;

/// Digest of the tarball that a spec names; none without one, or without such a file, which others
/// tell.
pub(crate) fn tar_digest(spec: &Spec) -> Result<Option<String>, Refusal> {
    let Image::Tar(path) = &spec.image else { return Ok(None) };
    if !path.is_file() {
        return Ok(None);
    }
    let failed = |e: io::Error| {
        Refusal::new(Code::Failed, format!("{} cannot start: its tarball {}: {e}", spec.name, path.display()))
    };
    digest_of(path).map(Some).map_err(failed)
}

fn digest_of(path: &Path) -> io::Result<String> {
    let (mut file, mut hasher, mut piece) = (File::open(path)?, Hasher::default(), vec![0; PIECE]);
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(hasher.finish().to_string()),
            n => hasher.update(&piece[..n]),
        }
    }
}

impl Worker {
    fn ports_are_free(&self, spec: &Spec, gone: &[ProcName]) -> Result<(), Refusal> {
        // Where those that go have such a port: at one address, or at all of them.
        let theirs = |proto: Protocol, port: u16| -> Vec<Option<IpAddr>> {
            let of = |name: &ProcName| {
                let Ok(handle) = self.handle(name) else { return Vec::new() };
                let record = handle.status.borrow().record.clone();
                let ended = matches!(record.state, State::Stopped { .. } | State::Elsewhere { .. });
                let same = |p: &&PortView| !ended && (p.proto, p.host_port) == (proto, Some(port));
                let spec = handle.proc.spec();
                let probes = spec.probes.iter().filter(|p| (Protocol::Tcp, p.host_port) == (proto, port));
                record.ports.iter().filter(same).map(PortView::only_at).chain(probes.map(|_| None)).collect()
            };
            gone.iter().flat_map(of).collect()
        };
        // Where a proc that goes has all of the addresses that are wanted, no other program has one
        // of them.
        let stays = |proto: Protocol, at: Option<IpAddr>, port: u16, theirs: &[Option<IpAddr>]| {
            let all = theirs.iter().any(|their| their.is_none() || *their == at);
            let some: Vec<IpAddr> = theirs.iter().copied().flatten().collect();
            if all { None } else { reserve::taken_but_at(proto, port, &some) }
        };
        for (wanted, port) in spec.ports.iter().filter_map(|wanted| Some((wanted, wanted.host_port?))) {
            let at = wanted.host_addr.map_or(At::All, At::Only);
            let Err(taken) = reserve::reserve(wanted.proto, at, Some(port)) else { continue };
            let theirs = theirs(wanted.proto, port);
            let in_the_way = matches!(taken, ReserveError::Taken { .. })
                && theirs.iter().any(|their| addresses_meet(*their, wanted.host_addr));
            let owner = self.machine.owner_of_port(wanted, port, gone);
            let taken = match in_the_way && owner.is_none() {
                true => stays(wanted.proto, wanted.host_addr, port, &theirs),
                false => Some(taken),
            };
            if let Some(e) = taken {
                return Err(e.refusal(&spec.name, owner, wanted.proto, port));
            }
        }
        let mut free = spec.clone();
        free.probes.clear();
        for probe in &spec.probes {
            match theirs(Protocol::Tcp, probe.host_port).as_slice() {
                [] => free.probes.push(probe.clone()),
                theirs => {
                    if let Some(e) = stays(Protocol::Tcp, None, probe.host_port, theirs) {
                        return Err(probe::is_taken(&spec.name, &e));
                    }
                }
            }
        }
        probe::listen(&free).map(drop)
    }

    /// One like it, with nothing of what others would see.
    fn rehearsed(&self, mut spec: Spec) -> Result<Spec, Refusal> {
        (spec.trial, spec.name) = (true, self.trial_name()?);
        (spec.restart, spec.asked, spec.file, spec.network) = (Restart::No, None, None, None);
        spec.aliases.clear();
        spec.ports.clear();
        spec.probes.clear();
        // A new volume gets what it covers, so that without it the same files are there.
        spec.volumes.retain(|volume| !volumes::is_new(&self.machine, &volume.source));
        for volume in spec.volumes.iter_mut().filter(|volume| volume.source != VolumeSource::Secrets) {
            volume.read_only = true;
        }
        Ok(spec)
    }

    async fn rehearse(&self, spec: Spec, secrets: BTreeMap<String, Hex>) -> Result<(), Refusal> {
        let (worker, _claimed_name) = (self.clone(), self.claim_name(&spec.name)?);
        let (proc, prepared, _, claim) = blocking(move || worker.create(spec, secrets)).await?;
        let rehearsing = Arc::clone(&proc);
        let done = blocking(move || start::rehearse(&rehearsing, prepared)).await;
        drop(claim);
        if let Err(refusal) = stop::remove(&proc).await {
            tracing::warn!(proc = %proc.name, error = refusal.message, "a rehearsal is left; the next daemon removes it");
        }
        done
    }
}

#[async_trait]
impl TrialService for Worker {
    async fn check(&self, request: CheckRequest) -> Result<CheckView, Refusal> {
        self.try_out(request).await
    }

    async fn validate(&self, request: RunRequest, mut instead_of: Vec<ProcName>) -> Result<(), Refusal> {
        let (spec, _in_use) = self.complete(request.spec).await?;
        check_spec(&spec)?;
        instead_of.push(spec.name.clone());
        for going in instead_of.iter().filter_map(|name| self.handle(name).ok()) {
            // A start that is under way has not recorded yet which ports it has.
            until_settled(&going).await;
        }
        let worker = self.clone();
        let spec = blocking(move || worker.ports_are_free(&spec, &instead_of).map(|()| spec)).await?;
        let (wanted, rehearsed) = (spec.name.clone(), self.rehearsed(spec)?);
        let own = rehearsed.name.to_string();
        let done = self.rehearse(rehearsed, request.secrets).await;
        // The client that asked knows nothing of that name.
        done.map_err(|refusal| Refusal { message: refusal.message.replace(&own, wanted.as_str()), ..refusal })
    }

    async fn compare(&self, request: RunRequest) -> Result<ContentsView, Refusal> {
        let RunRequest { spec, secrets, .. } = request;
        let proc = self.handle(&spec.name)?.proc;
        blocking(move || {
            let mut differ = Vec::new();
            let (is, wanted) = (proc.spec().tar_digest.clone(), tar_digest(&spec)?);
            // Of an older daemon's proc it is not known.
            if is.is_some() && wanted.is_some() && is != wanted {
                differ.push(ContentView { key: ContentKey::Tar, is, wanted });
            }
            let names = secrets::differing(&proc, &secrets).unwrap_or_else(|e| {
                tracing::info!(proc = %proc.name, error = chain(&e), "its secrets cannot be opened: others take their place");
                secrets.keys().cloned().collect()
            });
            differ.extend(names.into_iter().map(|name| {
                let (is, wanted) = (None, None);
                ContentView { key: ContentKey::Secret(name), is, wanted }
            }));
            Ok(ContentsView { differ })
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tarball_is_known_by_all_of_its_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.tar");
        let mut bytes = vec![7; PIECE + 1];
        std::fs::write(&file, &bytes).unwrap();
        let before = digest_of(&file).unwrap();
        assert_eq!(before, kip_image::Digest::of(&bytes).to_string());
        bytes[PIECE] = 8;
        std::fs::write(&file, &bytes).unwrap();
        assert_ne!(digest_of(&file).unwrap(), before);
    }
}
