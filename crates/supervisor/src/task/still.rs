//! A proc that stands still while its files are copied (`kip backup`): asleep, if it can be, and nothing that comes meanwhile is
//! looked at before that is over.

use super::*;
use kip_engine::cause::{Request, WakeCause};
use kip_sys::fault;

/// How a proc stands.
#[derive(Debug)]
pub struct Stilled {
    /// Its record.
    pub record: Record,
    /// Why it goes on running.
    pub runs: Option<String>,
}

/// Lets a proc go on when it is dropped.
#[derive(Debug)]
pub struct Still(#[allow(dead_code, reason = "it is dropped, that is all")] oneshot::Sender<()>);

impl Still {
    /// One, and what its proc is to wait for.
    pub fn new() -> (Still, oneshot::Receiver<()>) {
        let (still, over) = oneshot::channel();
        (Still(still), over)
    }
}

impl Task {
    /// Parks it if it runs, answers, and waits for the end. Then it is woken if it was awake.
    pub(super) async fn stand_still(&mut self, over: oneshot::Receiver<()>, reply: Reply<Stilled>) {
        let was_awake = matches!(self.record.state, State::Hot { .. });
        let runs = match &self.record.state {
            State::Hot { .. } | State::Hibernated { .. } if self.starting.is_some() => {
                Some(format!("{} is not ready yet", self.proc.name))
            }
            State::Hot { .. } | State::Hibernated { .. } => {
                self.pressed.sleep_cause = Some("a backup".to_owned());
                self.park_on_request(By::Kip).await.err().map(|refusal| refusal.message)
            }
            _ => None,
        };
        let stands = runs.is_none();
        self.publish();
        if reply.send(Ok(Stilled { record: self.record.clone(), runs })).is_ok() && stands {
            fault::reach("backup-still");
            // However it ends.
            let _ = over.await;
        }
        if was_awake && matches!(self.record.state, State::Parked { .. }) {
            self.wake_in_turn(WakeCause::Request(Request::Backup), Instant::now(), false).await;
        }
    }
}
