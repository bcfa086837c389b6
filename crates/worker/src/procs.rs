//! The life of procs as the API asks for it: each request goes to the proc's task, and what it
//! answers is shown.

use crate::copied::{Purpose, check_kept};
use crate::templates::check_templated;
use crate::worker::{Worker, check_spec, grace_of, ready, taken};
use async_trait::async_trait;
use kip_engine::blocking::blocking;
use kip_engine::cause::{WakeCause, WakeCommand};
use kip_engine::stop::{self, NetworkFate};
use kip_insight::view;
use kip_service::{ExecSession, Feed, ProcService};
use kip_sessions::session::{self, KeepAwake};
use kip_sessions::{attach, exec};
use kip_supervisor::probe;
use kip_supervisor::task::{By, Handle, ProcStatus, TaskCommand};
use kip_types::api::clone::{CloneAdvice, CloneRequest, ClonesView};
use kip_types::api::{
    AttachRequest, Code, Detail, Details, ExecRequest, HealthView, LogLine, LogsRequest, MeterView, Moved, ProcView,
    Refusal, RemoveRequest, RenameRequest, RunRequest, SignalRequest, SleepRequest, StartRequest, StopRequest,
    UpdateRequest, WakeRequest, WhyView,
};
use kip_types::chain;
use kip_types::lifecycle::Exit;
use kip_types::spec::{Clock, parse_signal};
use kip_types::{ProcName, State, Tier};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::timeout;

#[async_trait]
impl ProcService for Worker {
    async fn run(&self, request: RunRequest) -> Result<ProcView, Refusal> {
        if let Some(refusal) = self.machine.rests() {
            return Err(refusal);
        }
        // Its layers are kept until the proc is known, which keeps them then.
        let (spec, _in_use) = self.complete(request.spec).await?;
        check_spec(&spec)?;
        check_templated(&spec)?;
        if spec.checkpoints.is_some() {
            check_kept(&spec, Purpose::Checkpoint)?;
        }
        let name = spec.name.clone();
        self.machine.pressure.admit_new(&name).await?;
        let claimed_name = self.claim_name(&name)?;
        let mut listeners = probe::listen(&spec)?;
        if spec.template.is_some() {
            // What begins from a template opens them itself.
            drop(std::mem::take(&mut listeners));
            if let Some(handle) = self.begun_from_template(&spec, &request.secrets).await {
                return Ok(blocking(move || view::proc_view(&handle)).await);
            }
            listeners = probe::listen(&spec)?;
        }
        let worker = self.clone();
        let (proc, prepared, record, claim) = blocking(move || worker.create(spec, request.secrets)).await?;
        let handle = self.adopt(proc, record, Some(prepared), listeners);
        drop(claimed_name);
        self.notify_network(&handle.proc.spec()).await;
        drop(claim);
        let started = handle.ask(|reply| TaskCommand::Start { wait_ready: request.wait_ready, reply }).await;
        if started.is_err() {
            self.forget(&handle.proc);
            self.notify_network(&handle.proc.spec()).await;
        }
        started?;
        if handle.proc.spec().remove {
            tokio::spawn(self.clone().remove_at_end(handle.clone(), true));
        }
        self.leave_template(handle.clone());
        ready(&handle).await?;
        Ok(blocking(move || view::proc_view(&handle)).await)
    }

    async fn names(&self) -> Result<Vec<ProcName>, Refusal> {
        Ok(self.procs.lock().keys().cloned().collect())
    }

    async fn list(&self) -> Result<Vec<ProcView>, Refusal> {
        let handles = self.handles();
        let views = blocking(move || {
            let mut views = view::proc_views(&handles);
            for view in &mut views {
                view.spec.asked = None;
                view.spec.hide_values();
            }
            views
        });
        Ok(views.await)
    }

    async fn inspect(&self, name: ProcName) -> Result<ProcView, Refusal> {
        let mut handle = self.handle(&name)?;
        handle.wait_until_stable().await;
        Ok(blocking(move || view::proc_view(&handle)).await)
    }

    async fn health(&self, name: ProcName) -> Result<HealthView, Refusal> {
        let handle = self.handle(&name)?;
        Ok(probe::health(&handle, &handle.proc.spec().probes).await)
    }

    async fn details(&self, name: ProcName, of: Detail) -> Result<Details, Refusal> {
        kip_insight::details(&mut self.handle(&name)?, of).await
    }

    async fn why(&self, name: ProcName) -> Result<WhyView, Refusal> {
        let mut handle = self.handle(&name)?;
        handle.wait_until_stable().await;
        let advised = async {
            if handle.proc.spec().trial {
                return None;
            }
            let template = tokio::time::timeout(LOOKS_FOR, self.template_for(&handle, false)).await;
            Some(kip_insight::advice(&handle, template.is_ok_and(|found| found.is_ok())).await)
        };
        // Both watch one that runs.
        let (why, clone) = tokio::join!(kip_insight::why(&handle), advised);
        Ok(WhyView { clone, ..why })
    }

    async fn meter(&self, name: ProcName, since_ms: Option<u64>) -> Result<MeterView, Refusal> {
        let mut handle = self.handle(&name)?;
        handle.wait_until_stable().await;
        Ok(blocking(move || view::meter_view(&handle, since_ms)).await)
    }

    async fn meters(&self, since_ms: Option<u64>) -> Result<Vec<MeterView>, Refusal> {
        let handles = self.handles();
        Ok(blocking(move || handles.iter().map(|handle| view::meter_view(handle, since_ms)).collect()).await)
    }

    async fn logs(&self, name: ProcName, which: LogsRequest) -> Result<Feed<LogLine>, Refusal> {
        kip_sessions::logs::read(self.handle(&name)?.proc.dir.join("logs"), which).await
    }

    async fn start(&self, name: ProcName, how: StartRequest) -> Result<ProcView, Refusal> {
        let handle = self.handle(&name)?;
        if matches!(handle.status.borrow().record.state, State::Stopped { .. } | State::Restarting { .. }) {
            self.machine.pressure.admit_new(&name).await?;
        }
        self.scaler.owner_starts(&handle.proc.key);
        // It may stand aside, or be about to, and both would write to one volume.
        let _begun = self.begin_on(&handle, &name).await?;
        handle.ask(|reply| TaskCommand::Start { wait_ready: how.wait_ready, reply }).await?;
        self.inspect(name).await
    }

    async fn stop(&self, name: ProcName, how: StopRequest) -> Result<ProcView, Refusal> {
        let network = NetworkFate::Removed;
        let handle = self.handle_to_stop(&name).await?;
        let grace = how.grace_ms.map_or_else(|| grace_of(&handle), Duration::from_millis);
        self.scaler.owner_ends(&handle.proc.key);
        let stopped = handle.ask(|reply| TaskCommand::Stop { grace, network, reply }).await;
        stopped.inspect_err(|_| self.scaler.owner_starts(&handle.proc.key))?;
        self.inspect(name).await
    }

    async fn update(&self, name: ProcName, change: UpdateRequest) -> Result<ProcView, Refusal> {
        let handle = self.handle(&name)?;
        let _begun = self.begin_on(&handle, &name).await?;
        handle.ask(|reply| TaskCommand::Update { change: Box::new(change), reply }).await?;
        self.inspect(name).await
    }

    async fn replace(&self, request: RunRequest) -> Result<ProcView, Refusal> {
        self.replaced(request).await
    }

    async fn rename(&self, name: ProcName, request: RenameRequest) -> Result<ProcView, Refusal> {
        self.renamed(name, request).await
    }

    async fn clone_proc(&self, name: ProcName, request: CloneRequest) -> Result<ClonesView, Refusal> {
        self.cloned(name, request).await
    }

    async fn clone_advice(&self, name: ProcName) -> Result<CloneAdvice, Refusal> {
        let source = self.handle(&name)?;
        Ok(kip_insight::advice(&source, self.template_for(&source, false).await.is_ok()).await)
    }

    async fn signal(&self, name: ProcName, request: SignalRequest) -> Result<(), Refusal> {
        let number =
            parse_signal(&request.signal).map_err(|e| Refusal::new(Code::Invalid, format!("{name}: {}", chain(&e))))?;
        if number == KILL {
            return self.stop(name, StopRequest { grace_ms: Some(0) }).await.map(drop);
        }
        let handle = self.handle(&name)?;
        let cause = WakeCause::Request(WakeCommand::Signal);
        let _awake = handle.ask(|reply| TaskCommand::KeepAwake { cause, reply }).await?;
        let (proc, program) = (Arc::clone(&handle.proc), handle.status.borrow().record.program);
        let sent = blocking(move || stop::signal(&proc, program, number)).await;
        sent.map_err(|e| {
            Refusal::new(Code::State, format!("{name} gets no signal: its program cannot be reached: {e}"))
        })
    }

    async fn remove(&self, name: ProcName, how: RemoveRequest) -> Result<(), Refusal> {
        let _stays = self.keep_in_place(&name).await;
        let handle = self.handle(&name)?;
        handle.ask(|reply| TaskCommand::Remove { force: how.force, reply }).await?;
        self.forget_with_checkpoints(&handle.proc).await;
        self.notify_network(&handle.proc.spec()).await;
        Ok(())
    }

    /// The clock of the request is the owner's word for this one sleep.
    async fn sleep(&self, name: ProcName, how: SleepRequest) -> Result<Moved, Refusal> {
        let SleepRequest { to, clock } = how;
        if to == Tier::Hot {
            return Err(Refusal::new(Code::Invalid, format!("hot is not asleep: `kip wake {name}`")));
        }
        if (to, clock) == (Tier::Hibernated, Some(Clock::Suspend)) {
            let message = format!(
                "{name} cannot be hibernated with a clock that stands: its threads stay in place, and its clocks go on; \
                 use `--to parked`, or leave out `--clock`"
            );
            return Err(Refusal::new(Code::Invalid, message));
        }
        let already = self.handle(&name)?.ask(|reply| TaskCommand::Sleep { to, by: By::Owner(clock), reply }).await?;
        Ok(Moved { proc: self.inspect(name).await?, already })
    }

    async fn wake(&self, name: ProcName, how: WakeRequest) -> Result<Moved, Refusal> {
        let name = match self.handle(&name) {
            Err(unknown) => self.take_over(&name, how.id.as_deref(), unknown).await?,
            Ok(_) if how.id.is_some() => return Err(taken(&name)),
            Ok(handle) => {
                self.take_over_again(&handle).await?;
                name
            }
        };
        let cause = WakeCause::Request(WakeCommand::Wake);
        let already = self.handle(&name)?.ask(|reply| TaskCommand::Wake { cause, reply }).await?;
        Ok(Moved { proc: self.inspect(name).await?, already })
    }

    async fn attach(&self, name: ProcName, request: AttachRequest) -> Result<ExecSession, Refusal> {
        let handle = self.handle(&name)?;
        let (proc, ended) = (Arc::clone(&handle.proc), ended(handle.status.clone()));
        attach::attach(&proc, &request, keep_awake(handle), Box::pin(ended)).await
    }

    async fn exec(&self, name: ProcName, request: ExecRequest) -> Result<ExecSession, Refusal> {
        let handle = self.handle(&name)?;
        let cause = WakeCause::Request(WakeCommand::Exec);
        let ticket = handle.ask(|reply| TaskCommand::KeepAwake { cause, reply }).await?;
        if request.terminal.is_none() && !request.detach {
            return exec::exec(handle.proc, request, ticket).await;
        }
        session::begin(Arc::clone(&handle.proc), request, ticket, keep_awake(handle)).await
    }
}

/// Wakes the proc for a client and keeps it awake.
fn keep_awake(handle: Handle) -> KeepAwake {
    Box::new(move || {
        let (handle, cause) = (handle.clone(), WakeCause::Request(WakeCommand::Exec));
        let asked = async move { handle.ask(|reply| TaskCommand::KeepAwake { cause, reply }).await };
        Box::pin(asked) as Pin<Box<dyn Future<Output = _> + Send>>
    })
}

/// How the program ended, once it has and is not started again by its restart policy.
async fn ended(mut status: watch::Receiver<ProcStatus>) -> Exit {
    let stopped = status.wait_for(|status| matches!(status.record.state, State::Stopped { .. })).await;
    match stopped.map(|status| status.record.state.clone()) {
        Ok(State::Stopped { exit: Some(exit) }) => exit,
        _ => Exit::Unknown,
    }
}

impl Worker {
    /// Removes a proc of which its owner wants that once its program has ended and no client is
    /// attached any more. `is_new`: a client may be about to attach.
    pub(crate) async fn remove_at_end(self, handle: Handle, is_new: bool) {
        let mut clients = handle.proc.console.clients();
        if is_new {
            let _ = timeout(ATTACHES_WITHIN, clients.wait_for(|clients| clients.ever > 0)).await;
        }
        let mut status = handle.status.clone();
        loop {
            // Without an exit it could not be started, after a wake that failed perhaps: what there
            // is of it is its owner's to remove.
            // Nor is it the end of one that stands aside for another.
            let is_over = |status: &ProcStatus| {
                matches!(status.record.state, State::Stopped { exit: Some(_) }) && !status.record.stands_aside
            };
            let ended = status.wait_for(is_over);
            if ended.await.is_err() {
                return;
            }
            let _ = clients.wait_for(|clients| clients.now == 0).await;
            // Another has its place, and removes it.
            if !handle.proc.spec().remove {
                return;
            }
            // By its own handle: meanwhile another proc may have its name.
            match handle.ask(|reply| TaskCommand::Remove { force: false, reply }).await {
                Ok(()) => {
                    self.forget_with_checkpoints(&handle.proc).await;
                    return self.notify_network(&handle.proc.spec()).await;
                }
                // Another has removed it.
                Err(refusal) if refusal.code == Code::Unknown => return,
                // Its owner has started it again, or something of it is in use.
                Err(refusal) => {
                    tracing::info!(proc = %handle.proc.name, error = refusal.message, "a proc that is to go at its end stays for now");
                    tokio::time::sleep(REMOVE_AGAIN).await;
                }
            }
        }
    }
}

/// SIGKILL, signal(7).
const KILL: i32 = 9;
/// From a removal that was refused to the next try.
const REMOVE_AGAIN: Duration = Duration::from_secs(2);
/// A client that has run a proc may take so long to attach to it, which may have ended by then.
const ATTACHES_WITHIN: Duration = Duration::from_secs(5);
/// `kip why` looks so long for a template of a proc's kind: a disk that is lost gives no answer.
const LOOKS_FOR: Duration = Duration::from_secs(3);
