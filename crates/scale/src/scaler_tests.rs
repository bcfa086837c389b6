//! Scaling of procs that are not there.

use super::*;
use async_trait::async_trait;
use kip_types::life::Check;
use kip_types::scale::CloneMethod;

/// Procs that do what a test says.
#[derive(Default)]
struct Fake {
    groups: Mutex<Vec<Group>>,
    refuses: bool,
    connected: Mutex<BTreeSet<String>>,
    done: Mutex<Vec<String>>,
    said: Mutex<Vec<String>>,
}

fn name(text: &str) -> ProcName {
    text.parse().unwrap()
}

fn member(text: &str, id: u64, state: MemberState) -> Member {
    let listens = if state == MemberState::Awake { vec![80] } else { vec![] };
    Member { name: name(text), id, state, cpus: 1.0, used: LoadCounters::default(), listens, is_to_listen: true }
}

impl Fake {
    fn name_of(&self, id: u64) -> String {
        let groups = self.groups.lock();
        let mut all = groups.iter().flat_map(|group| group.primary.iter().chain(&group.replicas));
        all.find(|member| member.id == id).map_or("nothing".to_owned(), |member| member.name.to_string())
    }
}

#[async_trait]
impl Fleet for Fake {
    async fn groups(&self) -> Vec<Group> {
        self.groups.lock().clone()
    }

    async fn add(&self, primary: u64, method: CloneMethod, ports: &[u16]) -> Result<(Member, String), String> {
        assert_eq!(ports, [80]);
        if self.refuses {
            self.done.lock().push("refused".to_owned());
            return Err("there is no room".to_owned());
        }
        let primary = self.name_of(primary);
        let mut groups = self.groups.lock();
        let replicas = &mut groups[0].replicas;
        let new = format!("{primary}-{}", replicas.len() + 1);
        replicas.push(member(&new, 10 + replicas.len() as u64, MemberState::Awake));
        self.done.lock().push(format!("{method:?} {new}"));
        Ok((replicas[replicas.len() - 1].clone(), "warm".to_owned()))
    }

    async fn remove(&self, replica: u64) -> Result<(), String> {
        self.done.lock().push(format!("remove {}", self.name_of(replica)));
        self.groups.lock()[0].replicas.retain(|member| member.id != replica);
        Ok(())
    }

    async fn spread(&self, _: u64, over: &[u64]) -> Result<(), String> {
        let over: Vec<String> = over.iter().map(|id| self.name_of(*id)).collect();
        let (line, mut done) = (format!("spread {}", over.join(" ")), self.done.lock());
        if done.iter().rfind(|line| line.starts_with("spread")) != Some(&line) {
            done.push(line);
        }
        Ok(())
    }

    async fn is_in_use(&self, id: u64) -> bool {
        self.connected.lock().contains(&self.name_of(id))
    }

    async fn keep_awake(&self, id: u64, awake: bool) {
        if awake {
            self.done.lock().push(format!("awake {}", self.name_of(id)));
        }
    }

    async fn wake(&self, id: u64) {
        self.done.lock().push(format!("wake {}", self.name_of(id)));
    }

    async fn start(&self, id: u64) -> Result<(), String> {
        self.done.lock().push(format!("start {}", self.name_of(id)));
        Ok(())
    }

    async fn probe(&self, _: u64, _: &Check) -> Option<bool> {
        None
    }

    fn tell(&self, _: &ProcName, detail: String) {
        self.said.lock().push(detail);
    }

    fn is_closing(&self) -> bool {
        false
    }
}

fn fake(scaling: Option<Scaling>, replicas: Vec<Member>) -> Fake {
    let primary = Some(member("web", 1, MemberState::Awake));
    Fake { groups: Mutex::new(vec![Group { key: name("web"), primary, scaling, replicas }]), ..Fake::default() }
}

fn from(min: u32, max: u32) -> Option<Scaling> {
    Some(Scaling { min, max, calm_ms: 0, ..Scaling::default() })
}

/// Until all that was begun has ended.
async fn settle(scaler: &Scaler) {
    let is_made = || scaler.making.lock().values().all(Option::is_some);
    while !(scaler.at_work.lock().is_empty() && scaler.removing.lock().is_empty() && is_made()) {
        tokio::task::yield_now().await;
    }
}

/// One look after the other; what was done.
async fn looks(fake: Fake, count: usize) -> (Vec<String>, Vec<String>) {
    let (scaler, fleet) = (Arc::new(Scaler::default()), Arc::new(fake));
    let shared: Arc<dyn Fleet> = fleet.clone();
    for _ in 0..count {
        scaler.look(&shared).await;
        settle(&scaler).await;
    }
    (fleet.done.lock().clone(), fleet.said.lock().clone())
}

// promise scaling: where none can be made that is said once, and tried again 10 s later
#[tokio::test]
async fn one_that_cannot_be_made_is_tried_again_later() {
    let (done, said) = looks(fake(from(2, 2), vec![]), 2).await;
    assert_eq!(done[..4], ["spread web", "awake web", "Auto web-1", "spread web web-1"]);
    assert_eq!(said, ["web-1 is added (warm): at least 2 are asked for"]);
    let (done, said) = looks(Fake { refuses: true, ..fake(from(2, 2), vec![]) }, 3).await;
    assert_eq!(done.iter().filter(|line| *line == "refused").count(), 1);
    assert_eq!(said, ["no replica is added (at least 2 are asked for): there is no room"]);
}

// promise scaling: what is taken away is removed once it is parked and has no connection, and is
//   the first to be put back
#[tokio::test]
async fn what_is_taken_away_goes_when_it_is_quiet() {
    let parked = || vec![member("web-1", 2, MemberState::Parked)];
    assert_eq!(looks(fake(from(0, 4), parked()), 1).await.0, ["spread web", "remove web-1"]);
    let busy = fake(from(0, 4), parked());
    busy.connected.lock().insert("web-1".to_owned());
    assert_eq!(looks(busy, 3).await.0, ["spread web"]);
    let (done, said) = looks(fake(from(2, 4), parked()), 1).await;
    assert_eq!(done, ["spread web web-1", "awake web", "awake web-1", "wake web-1"]);
    assert_eq!(said, ["web-1 is back: at least 2 are asked for"]);
}

// promise scaling: one that has ended is taken out and replaced after a pause, which is twice as
//   long each time
#[tokio::test]
async fn one_that_has_ended_is_replaced() {
    let ended = || vec![member("web-1", 2, MemberState::Ended)];
    let (done, said) = looks(fake(from(2, 2), ended()), 1).await;
    assert_eq!(done, ["spread web", "awake web", "remove web-1"]);
    assert_eq!(said, ["web-1 has ended and is removed"]);
    let (mut ends, now) = (Ends::default(), Instant::now());
    let pauses: Vec<u64> = (0..8).map(|_| (ends.another(now) - now).as_secs()).collect();
    assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
    assert_eq!((ends.another(now + RAN_WELL * 2) - now).as_secs(), RAN_WELL.as_secs() * 2 + 1);
}

// promise scaling: a proc that was started again gets connections when it listens where the others
//   do
#[tokio::test]
async fn what_does_not_listen_gets_no_connections() {
    let (scaler, fleet) =
        (Arc::new(Scaler::default()), Arc::new(fake(from(2, 2), vec![member("web-1", 2, MemberState::Awake)])));
    let shared: Arc<dyn Fleet> = fleet.clone();
    let look = async |state: MemberState, listens: Vec<u16>| {
        {
            let mut groups = fleet.groups.lock();
            let web = groups[0].primary.as_mut().unwrap();
            (web.state, web.listens) = (state, listens);
        }
        scaler.look(&shared).await;
        settle(&scaler).await;
        fleet.done.lock().iter().rfind(|line| line.starts_with("spread")).cloned().unwrap()
    };
    assert_eq!(look(MemberState::Awake, vec![80]).await, "spread web web-1");
    assert_eq!(look(MemberState::Ended, vec![]).await, "spread web-1");
    assert_eq!(look(MemberState::Starting, vec![]).await, "spread web-1");
    assert_eq!(look(MemberState::Awake, vec![]).await, "spread web-1");
    assert_eq!(look(MemberState::Awake, vec![80]).await, "spread web web-1");
}

// promise scaling: replicas of a proc that is scaled no more, or is gone, are removed
#[tokio::test]
async fn replicas_without_a_proc_are_removed() {
    let replicas = || vec![member("web-1", 2, MemberState::Awake), member("web-2", 3, MemberState::Parked)];
    let removed = ["remove web-1", "remove web-2"];
    assert_eq!(looks(fake(None, replicas()), 2).await.0, ["spread ", removed[0], removed[1]]);
    let orphans = fake(None, replicas());
    orphans.groups.lock()[0].primary = None;
    assert_eq!(looks(orphans, 1).await.0, removed);
}

// promise scaling: a proc whose owner has stopped it, or that had ended before, is not started
//   again
#[tokio::test]
async fn only_what_ends_by_itself_is_started_again() {
    let (scaler, fleet) = (Arc::new(Scaler::default()), Arc::new(fake(from(1, 2), vec![])));
    let shared: Arc<dyn Fleet> = fleet.clone();
    let look = async |state: MemberState| {
        fleet.groups.lock()[0].primary.as_mut().unwrap().state = state;
        scaler.look(&shared).await;
        settle(&scaler).await;
        fleet.done.lock().iter().filter(|line| line.starts_with("start")).count()
    };
    assert_eq!(look(MemberState::Ended).await, 0, "it had ended before");
    assert_eq!(look(MemberState::Awake).await, 0);
    assert_eq!(look(MemberState::Ended).await, 1);
    assert_eq!(look(MemberState::Ended).await, 1, "not twice in a second");
    assert_eq!(look(MemberState::Awake).await, 1);
    scaler.owner_ends(&name("web"));
    assert_eq!(look(MemberState::Ended).await, 1);
    scaler.owner_starts(&name("web"));
    assert_eq!(look(MemberState::Awake).await, 1);
}

// promise scaling: a replica that has gone before it was looked at is made again
#[tokio::test]
async fn one_that_is_gone_at_once_is_made_again() {
    let (scaler, fleet) = (Arc::new(Scaler::default()), Arc::new(fake(from(2, 2), vec![])));
    let shared: Arc<dyn Fleet> = fleet.clone();
    for _ in 0..4 {
        scaler.look(&shared).await;
        settle(&scaler).await;
        fleet.groups.lock()[0].replicas.clear();
    }
    let made = fleet.done.lock().iter().filter(|line| line.starts_with("Auto")).count();
    assert!(made >= 2, "{:?}", fleet.done.lock());
}
