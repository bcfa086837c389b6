//! Scaling of procs that are not there.

use super::*;
use async_trait::async_trait;
use kip_types::life::Check;

/// Procs that do what a test says.
#[derive(Default)]
struct Fake {
    groups: Mutex<Vec<Group>>,
    refuses_hot: bool,
    template: bool,
    connected: Mutex<BTreeSet<String>>,
    done: Mutex<Vec<String>>,
    said: Mutex<Vec<String>>,
}

fn name(text: &str) -> ProcName {
    text.parse().unwrap()
}

fn member(text: &str, id: u64, state: MemberState) -> Member {
    Member { name: name(text), id, state, cpus: 1.0, usage: LoadCounters::default() }
}

#[async_trait]
impl Fleet for Fake {
    async fn groups(&self) -> Vec<Group> {
        self.groups.lock().clone()
    }

    async fn add(&self, primary: &ProcName, method: CloneMethod) -> Result<ProcName, String> {
        if self.refuses_hot && method == CloneMethod::Hot {
            return Err("it has an io_uring".to_owned());
        }
        let mut groups = self.groups.lock();
        let replicas = &mut groups[0].replicas;
        let new = format!("{primary}-{}", replicas.len() + 1);
        replicas.push(member(&new, 10 + replicas.len() as u64, MemberState::Up));
        self.done.lock().push(format!("{method:?} {new}"));
        Ok(name(&new))
    }

    async fn remove(&self, replica: &ProcName) -> Result<(), String> {
        self.groups.lock()[0].replicas.retain(|member| member.name != *replica);
        self.done.lock().push(format!("remove {replica}"));
        Ok(())
    }

    async fn spread(&self, _: &ProcName, over: &[ProcName]) -> Result<(), String> {
        let over: Vec<&str> = over.iter().map(ProcName::as_str).collect();
        let (line, mut done) = (format!("spread {}", over.join(" ")), self.done.lock());
        if done.iter().rfind(|line| line.starts_with("spread")) != Some(&line) {
            done.push(line);
        }
        Ok(())
    }

    async fn has_connections(&self, name: &ProcName) -> bool {
        self.connected.lock().contains(name.as_str())
    }

    async fn keep_awake(&self, name: &ProcName, awake: bool) {
        if awake {
            self.done.lock().push(format!("awake {name}"));
        }
    }

    async fn start(&self, name: &ProcName) -> Result<(), String> {
        self.done.lock().push(format!("start {name}"));
        Ok(())
    }

    async fn probe(&self, _: &ProcName, _: &Check) -> Option<bool> {
        None
    }

    async fn has_template(&self, _: &ProcName) -> bool {
        self.template
    }

    fn tell(&self, _: &ProcName, detail: String) {
        self.said.lock().push(detail);
    }

    fn is_closing(&self) -> bool {
        false
    }
}

fn fake(scaling: Option<Scaling>, replicas: Vec<Member>) -> Fake {
    let primary = Some(member("web", 1, MemberState::Up));
    Fake { groups: Mutex::new(vec![Group { key: name("web"), primary, scaling, replicas }]), ..Fake::default() }
}

fn from(min: u32, max: u32) -> Option<Scaling> {
    Some(Scaling { min, max, calm_ms: 0, ..Scaling::default() })
}

/// One look after the other; what was done.
async fn looks(fake: Fake, count: usize) -> (Vec<String>, Vec<String>) {
    let (scaler, fleet) = (Arc::new(Scaler::default()), Arc::new(fake));
    let shared: Arc<dyn Fleet> = fleet.clone();
    for _ in 0..count {
        scaler.look(&shared).await;
        while !scaler.at_work.lock().is_empty() {
            tokio::task::yield_now().await;
        }
    }
    (fleet.done.lock().clone(), fleet.said.lock().clone())
}

// promise scaling: by `--method auto` a new one begins from a template, from the proc, or with a
//   start where the proc cannot be cloned or thrashes
#[tokio::test]
async fn the_method_is_chosen() {
    let first = async |fake: Fake| looks(fake, 1).await.0[0].clone();
    assert_eq!(first(fake(from(2, 2), vec![])).await, "Hot web-1");
    assert_eq!(first(Fake { template: true, ..fake(from(2, 2), vec![]) }).await, "Warm web-1");
    let (done, said) = looks(Fake { refuses_hot: true, ..fake(from(2, 2), vec![]) }, 1).await;
    assert_eq!(done[..2], ["Cold web-1", "spread web web-1"]);
    assert_eq!(said, ["web-1 is added (cold, for it has an io_uring): at least 2 are asked for"]);
    let thrashing = fake(from(2, 2), vec![]);
    let mut pass = Pass {
        fleet: &thrashing,
        group: thrashing.groups.lock()[0].clone(),
        known: Known::default(),
        now: Instant::now(),
    };
    let load = Load { refaults: THRASHES + 1.0, ..Load::default() };
    pass.known.seen.insert(1, Seen { at: pass.now, usage: LoadCounters::default(), load, lonely: None });
    let (primary, scaling) = (pass.group.primary.clone().unwrap(), from(2, 2).unwrap());
    assert_eq!(pass.make(&primary, &scaling).await.unwrap().1, "cold, for it thrashes");
}

// promise scaling: what is taken away is removed once it is parked and has no connection, and is
//   the first to be put back
#[tokio::test]
async fn what_is_taken_away_goes_when_it_is_quiet() {
    let parked = || vec![member("web-1", 2, MemberState::Down)];
    assert_eq!(looks(fake(from(0, 4), parked()), 1).await.0, ["spread web", "remove web-1"]);
    let busy = fake(from(0, 4), parked());
    busy.connected.lock().insert("web-1".to_owned());
    assert_eq!(looks(busy, 3).await.0, ["spread web"]);
    let (done, said) = looks(fake(from(2, 4), parked()), 1).await;
    assert_eq!(done, ["spread web web-1", "awake web", "awake web-1"]);
    assert_eq!(said, ["web-1 is back: at least 2 are asked for"]);
}

#[tokio::test]
async fn one_that_has_ended_is_replaced() {
    let (done, _) = looks(fake(from(2, 2), vec![member("web-1", 2, MemberState::Ended)]), 1).await;
    assert_eq!(done[..4], ["spread web", "remove web-1", "Hot web-1", "spread web web-1"]);
}

// promise scaling: replicas of a proc that is scaled no more, or is gone, are removed
#[tokio::test]
async fn replicas_without_a_proc_are_removed() {
    let replicas = || vec![member("web-1", 2, MemberState::Up), member("web-2", 3, MemberState::Down)];
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
        while !scaler.at_work.lock().is_empty() {
            tokio::task::yield_now().await;
        }
        fleet.done.lock().iter().filter(|line| line.starts_with("start")).count()
    };
    assert_eq!(look(MemberState::Ended).await, 0, "it had ended before");
    assert_eq!(look(MemberState::Up).await, 0);
    assert_eq!(look(MemberState::Ended).await, 1);
    assert_eq!(look(MemberState::Ended).await, 1, "not twice in a second");
    assert_eq!(look(MemberState::Up).await, 1);
    scaler.owner_ends(&name("web"));
    assert_eq!(look(MemberState::Ended).await, 1);
    scaler.owner_starts(&name("web"));
    assert_eq!(look(MemberState::Up).await, 1);
}
