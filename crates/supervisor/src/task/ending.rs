//! How a proc ends: its program by itself, and then perhaps another start; by request; for good.

use super::*;
use kip_engine::cause::{WakeCause, WakeCommand};
use kip_types::chain;

/// A start again for which there is no room is tried again after this.
const ROOM_AGAIN_MS: u64 = 5_000;
/// The kernel does not say which process of a cgroup it has killed for want of memory. A program
/// that is killed was so if that is no longer ago: any look at the proc may have counted it before
/// the program's end is known here.
const KILLED_WITHIN: Duration = Duration::from_secs(5);
/// However the machine's clock was set meanwhile, a start again waits no longer.
const LONGEST_WAIT: Duration = Duration::from_millis(kip_types::life::LONGEST_PAUSE_MS);

impl Task {
    /// The program ended by itself.
    pub(super) async fn on_exit(&mut self) {
        self.leave_hibernation();
        (self.phase, self.starting) = (Phase::Down, None);
        let exit = kip_engine::exits::reported_exit(&self.proc).unwrap_or(Exit::Unknown);
        self.proc.sample_cpu();
        let out_of_memory = exit == Exit::Signal(9) && self.proc.meter.was_killed_within(KILLED_WITHIN);
        self.proc.shared.metrics.ended(exit, out_of_memory);
        if out_of_memory {
            // It is there before the program is known to have ended, as its own last lines are.
            let limit = self.proc.spec().limits.memory_bytes;
            let limit = limit.map_or_else(String::new, |bytes| format!(" at its limit of {} MiB", bytes >> 20));
            self.proc.shared.remark(&self.proc, &format!("the kernel has ended the program: out of memory{limit}"));
        }
        let restart = self.proc.spec().restart;
        let next = self.record.after_end(restart, exit, now_ms()).unwrap_or_else(|_| self.record.clone());
        let next = Record { out_of_memory, ..next };
        let network = NetworkFate::after(&next.state);
        // With a policy before anything of it is gone: the next daemon could not tell any more how
        // it ended. Clients see it when all that the program wrote is in its log.
        if !restart.is_no()
            && let Err(e) = self.proc.write_record(&next, record::Durability::Rename)
        {
            tracing::warn!(proc = %self.proc.name, error = chain(&e), "how a program ended is not on disk yet");
        }
        stop::release(&self.proc, network).await;
        let _ = kip_snapshot::sweep(&self.proc.dir, None);
        let detail = next.exit_words().unwrap_or_else(|| exit.to_string());
        self.keep(next);
        self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Exited, detail);
        self.report_restart();
        self.answer_queue().await;
    }

    fn report_restart(&self) {
        if let State::Restarting { at_ms, .. } = self.record.state {
            let detail =
                format!("in {} ms, {} so far", at_ms.saturating_sub(now_ms()), self.record.restarts.saturating_sub(1));
            self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Restarting, detail);
        }
    }

    /// When it is to be started again; never while the daemon ends, or after another proc has taken
    /// its place.
    pub(super) fn restarts_at(&self) -> Option<Instant> {
        let State::Restarting { at_ms, .. } = self.record.state else { return None };
        let left = Duration::from_millis(at_ms.saturating_sub(now_ms())).min(LONGEST_WAIT);
        (!self.ending && !self.proc.spec().trial).then(|| Instant::now() + left)
    }

    /// Starts it again, on its files, with its address and its ports. What fails counts like a
    /// program that ended at once.
    pub(super) async fn restart(&mut self) {
        let State::Restarting { exit, .. } = self.record.state else { return };
        if let Err(refusal) = self.proc.shared.pressure.admit_new(&self.proc.name).await {
            self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Pressure, refusal.message);
            let state = State::Restarting { exit, at_ms: now_ms() + ROOM_AGAIN_MS };
            return self.keep(Record { state, ..self.record.clone() });
        }
        self.proc.shared.metrics.restarted();
        if let Err(refusal) = self.begin(false, true).await {
            tracing::info!(proc = %self.proc.name, reason = refusal.message, "cannot be started again");
            self.report_restart();
        }
    }

    pub(super) async fn stop(&mut self, grace: Duration, network: NetworkFate) -> Result<(), Refusal> {
        if matches!(self.record.state, State::Stopped { .. }) {
            return self.stay_stopped(network).await;
        }
        self.refuse_if_elsewhere()?;
        if self.sleeps() && !grace.is_zero() {
            // A program that is to end in order has to run for that; one that cannot be woken is
            // ended as it is.
            self.admit_to_stop().await?;
            let _ = self.wake_on_request(WakeCause::Request(WakeCommand::Stop)).await;
            self.pressed.grant = None;
        }
        if network == NetworkFate::Left && matches!(self.record.state, State::Elsewhere { .. }) {
            // All are to end, and it is found to be none of ours.
            return Ok(());
        }
        self.refuse_if_elsewhere()?;
        if matches!(self.record.state, State::Archived { .. }) {
            self.take_back().await?;
        }
        self.end(grace, network).await
    }

    /// One that stands aside is not started again if another request ends it.
    async fn stay_stopped(&mut self, network: NetworkFate) -> Result<(), Refusal> {
        let starts_again = match network {
            NetworkFate::Kept => true,
            NetworkFate::Left => self.proc.spec().restart == Restart::Always,
            NetworkFate::Removed | NetworkFate::Reserved => false,
        };
        if !self.record.stands_aside || starts_again {
            return Ok(());
        }
        stop::release(&self.proc, network).await;
        self.write(Record { stands_aside: false, ..self.record.clone() }, record::Durability::Fsync)
    }

    /// As it is, asleep or not.
    async fn end(&mut self, grace: Duration, network: NetworkFate) -> Result<(), Refusal> {
        self.leave_queue();
        let before = match self.record.state {
            State::Restarting { exit, .. } => exit,
            _ => None,
        };
        self.starting = None;
        if let State::Hot { init, .. } = self.record.state {
            // What counts its connections goes with it.
            self.proc.sample_meter(init);
        }
        let next = self.record.after(Input::Stop).map_err(|e| self.unfit(&e))?;
        let stands_aside = network == NetworkFate::Kept;
        self.write(Record { stands_aside, ..next }, record::Durability::Fsync)?;
        fault::reach("stop-intent");
        kip_engine::watches::unwatch_sockets(&self.proc);
        self.phase = Phase::Down;
        let exit = stop::end(&self.proc, self.record.program, grace).await;
        fault::reach("stop-killed");
        stop::release(&self.proc, network).await;
        let _ = kip_snapshot::sweep(&self.proc.dir, None);
        let exit = exit.or(before);
        self.ending = network == NetworkFate::Left;
        // The end of all procs is not meant for this one: the next daemon starts it again.
        let ended = match self.ending && self.proc.spec().restart == Restart::Always {
            true => Input::ExitedForNow { exit, at_ms: now_ms() },
            false => Input::Exited(exit),
        };
        self.advance(ended, record::Durability::Fsync)?;
        fault::reach("stop-recorded");
        let how = exit.map_or_else(|| "while parked".to_owned(), |e| e.to_string());
        self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Stopped, how);
        Ok(())
    }

    pub(super) async fn remove(&mut self, force: bool) -> Result<(), Refusal> {
        let elsewhere = matches!(self.record.state, State::Elsewhere { .. });
        if !elsewhere && !matches!(self.record.state, State::Stopped { .. }) {
            if !force {
                return Err(Refusal::new(
                    Code::State,
                    format!(
                        "{0} is {1}: `kip stop {0}` first, or `kip rm --force {0}`",
                        self.proc.name,
                        self.record.state.name()
                    ),
                ));
            }
            // An archived one too, although its store may be gone for good.
            self.end(Duration::ZERO, NetworkFate::Removed).await?;
        }
        if !elsewhere {
            self.retire_all().await;
        }
        self.remove_all().await?;
        self.probes.end().await;
        self.proc.shared.events.emit(Some(&self.proc.name), EventKind::Removed, "");
        Ok(())
    }

    /// Removes all that there is of it.
    pub(super) async fn remove_all(&mut self) -> Result<(), Refusal> {
        stop::remove(&self.proc).await?;
        (self.removed.0)(&self.proc);
        Ok(())
    }
}
