//! The machine goes down: a proc is parked, so that it is as it was after the next start, and
//! nothing wakes it meanwhile.

use super::*;

/// A proc that is refused for the moment, in the middle of something, is tried again after this.
const REST_AGAIN: Duration = Duration::from_millis(500);
/// And so many times: no proc is to hold up a machine that goes down.
const TRIES: u32 = 10;

impl Task {
    /// Returns whether the proc sleeps now; a stopped one does not. A proc that was awake is
    /// recorded as such.
    pub(super) async fn rest(&mut self, until: Instant) -> Result<bool, Refusal> {
        let was_awake = matches!(self.record.state, State::Hot { .. });
        self.record.wakes_again |= was_awake;
        for tried in 1.. {
            if !matches!(self.record.state, State::Hot { .. } | State::Hibernated { .. }) {
                break;
            }
            // Not if another that was parked before it has taken all the time there was.
            let over = tried == TRIES || Instant::now() + REST_AGAIN >= until;
            match self.park_on_request(By::Kip).await {
                Err(refusal) if over => {
                    self.record.wakes_again = false;
                    return Err(refusal);
                }
                Err(_) => tokio::time::sleep(REST_AGAIN).await,
                Ok(_) => {}
            }
        }
        // Whatever comes now is the next daemon's.
        kip_engine::watches::unwatch_sockets(&self.proc);
        self.leave_queue();
        Ok(matches!(self.record.state, State::Parked { .. } | State::Archived { .. }))
    }
}
