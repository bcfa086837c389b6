//! What others ask of a proc's task.

use super::archive::NotStored;
use super::{Asking, Copied, CopyRunning, FilesHeld, Probes, StillFor, Stilled, TakenPlace};
use kip_engine::cause::WakeCause;
use kip_engine::stop::NetworkFate;
use kip_engine::tickets::Ticket;
use kip_offload::Uploaded;
use kip_pager::protocol::Woken;
use kip_pressure::{Grant, Relieved};
use kip_records::state::Checked;
use kip_types::api::{PortView, Refusal, UpdateRequest};
use kip_types::spec::Clock;
use kip_types::{Generation, ProcName, Tier};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Answer to a request.
pub type Reply<T> = oneshot::Sender<Result<T, Refusal>>;

/// What can happen to a proc from outside.
#[allow(missing_docs, reason = "each command says in one line what its fields are for")]
#[derive(Debug)]
pub enum TaskCommand {
    /// Start it, for the first time or again.
    Start { wait_ready: bool, reply: Reply<()> },
    /// Start it again if it stands aside: its owner has not stopped it since. Answers whether.
    PutBack { reply: Reply<bool> },
    /// End it. It is woken first, so that the program can end in order, if `grace` is not zero.
    Stop { grace: Duration, network: NetworkFate, reply: Reply<()> },
    /// Remove all of it; it must be stopped or `force` be set. The task ends.
    Remove { force: bool, reply: Reply<()> },
    /// Change its spec, in whatever tier it is.
    Update { change: Box<UpdateRequest>, reply: Reply<()> },
    /// Give it another name.
    Rename { name: ProcName, reply: Reply<()> },
    /// Put it in the place of another proc.
    TakePlace { place: Box<TakenPlace>, reply: Reply<()> },
    /// Another one has taken its place: it is a trial from now on.
    LeavePlace { reply: Reply<()> },
    /// Reserve these ports again, which it let go for another one that does not take its place.
    TakePortsAgain { ports: Vec<PortView>, reply: Reply<()> },
    /// Have these answer at its probes.
    ReplaceProbes { probes: Probes, reply: Reply<()> },
    /// It has become ready after the start at `started_at_ms`, or has not in time, for that reason.
    Ready { started_at_ms: u64, result: Result<(), String> },
    /// A probe is about to ask it; answered with nothing if it does not run.
    Ask { reply: Reply<Option<Asking>> },
    /// What it was told, or why not.
    Checked { checked: Checked, reply: Reply<()> },
    /// Send it to a lower tier. Answers whether it was there already.
    Sleep { to: Tier, by: By, reply: Reply<bool> },
    /// Wake it. Answers whether it was running already.
    Wake { cause: WakeCause, reply: Reply<bool> },
    /// A descriptor in custody has something; `at` is when. With leave a hibernated proc is being
    /// woken for it already.
    Socket { cause: WakeCause, at: Instant, leave: Option<Grant> },
    /// It runs again after the hibernation `turn`; `by` is the place of the descriptor that the
    /// pager watched and that has woken it.
    Awake { turn: u64, woken: Woken, by: Option<usize> },
    /// It waits for a page of its snapshot that is damaged.
    Damaged { message: String },
    /// Ask the pager whether it still sleeps.
    InspectPager,
    /// A generation is in the store, or is not.
    Stored { generation: Generation, result: Result<Uploaded, NotStored> },
    /// Make it this data directory's, after it was recorded that it is to be. Once it is known
    /// whether it is or not, one that is not is removed here. `only_if_ours`: do not take it, but
    /// finish what was begun.
    TakeOver { only_if_ours: bool, reply: Reply<()> },
    /// Archive it for `cause` if it is parked; answers when that is done.
    ArchiveForRoom { cause: String, reply: Reply<bool> },
    /// Stand still, asleep if it can be, until `over` is done. Answers when it stands.
    StandStill { what_for: StillFor, over: oneshot::Receiver<()>, reply: Reply<Stilled> },
    /// If it runs: freeze it, have `copy` done, and let it run on, of which nothing is left here
    /// but the answer.
    CopyRunning { copy: CopyRunning, reply: Reply<Option<Copied>> },
    /// Have its files be looked at, or changed with `change`, without a wake; until `over` is done
    /// where it is asleep.
    HoldFiles { change: bool, over: oneshot::Receiver<()>, reply: Reply<FilesHeld> },
    /// Park it, until `until` at the latest, and leave it so: the daemon ends. Answers whether it
    /// sleeps, or why not. The task ends.
    Rest { until: Instant, reply: Reply<bool> },
    /// Make sure it runs and keep it from sleeping until the ticket is dropped.
    KeepAwake { cause: WakeCause, reply: Reply<Ticket> },
    /// Put it to sleep for `cause` unless it is wanted awake now; into `to`, or deeper where that
    /// cannot be.
    Relieve { to: Tier, cause: String, reply: Reply<Relieved> },
}

/// On whose word a proc is put to sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// The owner's, with what the owner says of the program's clock in this one sleep. Ticks may be
    /// gathered in it.
    Owner(Option<Clock>),
    /// Kip's own, for an upgrade, a backup or the end of the machine.
    Kip,
}
