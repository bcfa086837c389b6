//! A proc gets another name, or takes the place of another proc: its name, its ports, its probes.
//!
//! Neither stops a program nor wakes it. The spec on disk decides: a crash before it is written
//! leaves the old names, one after it the new ones, and the next daemon makes the rules by what is
//! recorded. A proc whose place was taken is a trial from then on, which the next daemon removes
//! (`recover`).

use super::update::write_spec;
use super::*;
use kip_engine::blocking::blocking;
use kip_engine::ports;
use kip_net::nat::Published;
use kip_types::api::PortView;
use kip_types::{ProcName, Spec};

/// What a proc gets that takes another one's place.
#[derive(Debug)]
pub struct TakenPlace {
    /// Its spec from now on.
    pub spec: Spec,
    /// Its ports, which it holds already.
    pub ports: Vec<PortView>,
    /// The other proc.
    pub of: Arc<Proc>,
    /// The other proc's ports.
    pub their_ports: Vec<PortView>,
    /// It runs or sleeps, so it has a link to the machine.
    pub runs: bool,
}

/// A spec under another name, without what else others know the proc by. Its host name stays.
pub fn hidden(spec: &Spec, name: ProcName) -> Spec {
    let mut hidden = Spec { hostname: Some(spec.hostname().to_owned()), name, trial: true, ..spec.clone() };
    (hidden.restart, hidden.remove, hidden.file) = (Restart::No, false, None);
    // Asleep it could not be seen to be ready.
    hidden.timing.never = true;
    hidden.aliases.clear();
    hidden.probes.clear();
    for port in &mut hidden.ports {
        (port.private, port.host_port, port.host_addr) = (true, None, None);
    }
    hidden
}

impl Task {
    pub(super) async fn rename(&mut self, name: ProcName) -> Result<(), Refusal> {
        self.refuse_if_elsewhere()?;
        let (is, before) = (self.proc.spec(), self.proc.name.clone());
        let mut becomes = Spec { hostname: Some(is.hostname().to_owned()), name: name.clone(), ..Spec::clone(&is) };
        if let Some(asked) = &mut becomes.asked {
            asked.spec.name = name.clone();
        }
        let (proc, written) = (Arc::clone(&self.proc), becomes.clone());
        blocking(move || write_spec(&proc, &written)).await?;
        fault::reach("rename-recorded");
        self.proc.set_spec(becomes);
        self.proc.name.change(name);
        self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Renamed, format!("it was {before}"));
        Ok(())
    }

    /// From now on clients reach this proc in place of the other one, which gets this one's name.
    pub(super) async fn take_place(&mut self, place: TakenPlace) -> Result<(), Refusal> {
        let TakenPlace { spec, ports, of, their_ports, runs } = place;
        if self.record.state.tier().is_none() {
            let message = format!("{} ended before it could take over", self.proc.name);
            return Err(Refusal::new(Code::Failed, message));
        }
        let (is, was) = (self.proc.spec(), self.record.clone());
        // What is recorded of a trial's ports leads nowhere.
        self.write(Record { ports: ports.clone(), ..was.clone() }, record::Durability::Fsync)?;
        fault::reach("replace-ports");
        let (proc, other, becomes, before) = (Arc::clone(&self.proc), Arc::clone(&of), spec.clone(), Arc::clone(&is));
        let switched = blocking(move || {
            write_spec(&proc, &becomes)?;
            fault::reach("replace-recorded");
            let theirs = ports::published(&other, &PortView::all_unpublished(&their_ports));
            let theirs = Published { network: theirs.network.filter(|_| runs), ..theirs };
            let switched = proc.shared.nat.publish_all(vec![theirs, ports::published(&proc, &ports)]);
            switched.map_err(|e| {
                if let Err(refusal) = write_spec(&proc, &before) {
                    tracing::error!(proc = %proc.name, error = refusal.message, "its name is not taken back on disk");
                }
                let message = format!("the ports of {} cannot pass to it: {}", becomes.name, chain(&e));
                Refusal::new(Code::Failed, message)
            })
        });
        if let Err(refusal) = switched.await {
            self.keep(was);
            return Err(refusal);
        }
        let (hidden, name, timing) = (self.proc.name.clone(), spec.name.clone(), spec.timing);
        self.proc.set_spec(spec);
        self.go_by(&is.timing, &timing);
        // A start that begins now publishes nothing.
        of.set_spec(self::hidden(&of.spec(), hidden.clone()));
        of.name.change(hidden);
        self.proc.name.change(name);
        fault::reach("replace-switched");
        self.proc.shared.events.emit(
            Some(&self.proc.name),
            EventKind::Replaced,
            format!("{} is about to end", of.name),
        );
        Ok(())
    }

    /// Another proc has its place; this one is about to end.
    pub(super) async fn leave_place(&mut self) {
        self.probes.end().await;
        let spec = hidden(&self.proc.spec(), self.proc.name.clone());
        let (proc, written) = (Arc::clone(&self.proc), spec.clone());
        if let Err(refusal) = blocking(move || write_spec(&proc, &written)).await {
            tracing::warn!(proc = %self.proc.name, error = refusal.message, "the next daemon finds out that it was replaced");
        }
        self.proc.set_spec(spec);
        self.keep(Record { ports: PortView::all_unpublished(&self.record.ports), ..self.record.clone() });
        fault::reach("replace-left");
    }

    /// A proc that is stopped holds no port, unless it stands aside.
    pub(super) async fn take_ports_again(&mut self, mut ports: Vec<PortView>) {
        if matches!(self.record.state, State::Stopped { .. }) && !self.record.stands_aside {
            return;
        }
        ports.retain(|view| self.record.ports.contains(view));
        let proc = Arc::clone(&self.proc);
        blocking(move || ports::take_again(&proc, &ports)).await;
    }

    /// Other tasks answer at its probes from now on.
    pub(super) async fn replace_probes(&mut self, probes: Probes) {
        self.probes.end().await;
        self.probes = probes;
    }
}
