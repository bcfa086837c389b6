//! The look at every scaled proc once a second, and what follows from it.

use crate::decide::{Decision, Trend, decide};
use crate::fleet::{Fleet, Group, Member, MemberState};
use crate::load::{Load, LoadCounters};
use kip_types::ProcName;
use kip_types::scale::Scaling;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Between looks.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Between runs of the owner's probe, and how long one may take.
const PROBE_EVERY: Duration = Duration::from_secs(3);
/// After a replica could not be made, and between wakes of one that is to be awake.
const AGAIN_AFTER: Duration = Duration::from_secs(10);
/// Before what has ended is made or started again; twice as long each time, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Ends that lie further back than this do not count.
const RAN_WELL: Duration = Duration::from_secs(300);
/// So many calm times without use end a replica that is not parked.
const NEVER_PARKED: u32 = 5;

/// What is known of the replicas of procs.
#[derive(Debug, Default)]
pub struct Scaler {
    groups: Mutex<BTreeMap<ProcName, Known>>,
    /// Those that are being looked at.
    at_work: Mutex<BTreeSet<ProcName>>,
    /// Procs whose owners have ended them.
    ended: Mutex<BTreeSet<ProcName>>,
    /// Replicas that are being made, by the proc; what has come of it, until it is looked at.
    making: Mutex<BTreeMap<u64, Option<Made>>>,
    /// Those that are being removed.
    removing: Mutex<BTreeSet<u64>>,
}

/// What a replica was made for, and what has come of it.
#[derive(Debug, Clone)]
struct Made {
    at: Instant,
    why: String,
    /// Its id, its name and how it was made.
    outcome: Result<(u64, ProcName, String), String>,
}

/// What is known of the replicas of one proc, by their ids.
#[derive(Debug, Clone, Default)]
struct Known {
    /// The proc itself.
    primary: Option<u64>,
    trend: Trend,
    /// Those that get new connections.
    rotation: Vec<u64>,
    /// Replicas that are still to be made, and why.
    wanted: Option<(u32, String)>,
    /// TCP ports at which they listen.
    ports: BTreeSet<u16>,
    /// The proc itself could serve at some look.
    was_up: bool,
    seen: BTreeMap<u64, Seen>,
    last: Option<String>,
    /// No replica is made before.
    not_before: Option<Instant>,
    probed: Option<(Instant, Option<bool>)>,
    /// Ends of replicas, and of the proc itself.
    ends: Ends,
    own_ends: Ends,
}

#[derive(Debug, Clone)]
struct Seen {
    at: Instant,
    used: LoadCounters,
    load: Load,
    /// Out of rotation and of no use since then.
    unused: Option<Instant>,
    woken: Option<Instant>,
}

impl Known {
    /// Whether a connection to a member is accepted: it sleeps, or listens where it has to.
    fn suits(&self, member: &Member) -> bool {
        let listens = || self.ports.iter().all(|port| member.listens.contains(port));
        member.state.serves() && (member.state != MemberState::Awake || listens())
    }
}

/// Ends that follow each other.
#[derive(Debug, Clone, Copy, Default)]
struct Ends {
    last: Option<Instant>,
    pause: Duration,
}

impl Ends {
    /// Another one: when what has ended may be made again.
    fn another(&mut self, now: Instant) -> Instant {
        let ran_well = self.last.is_none_or(|last| now - last > RAN_WELL);
        self.pause = if ran_well { FIRST_PAUSE } else { (self.pause * 2).min(LONGEST_PAUSE) };
        self.last = Some(now);
        now + self.pause
    }
}

/// Looks at the procs of a fleet once a second until it closes. To be called within a runtime.
pub fn watch(scaler: Arc<Scaler>, fleet: Arc<dyn Fleet>) {
    tokio::spawn(async move {
        while !fleet.is_closing() {
            tokio::time::sleep(LOOK_EVERY).await;
            scaler.look(&fleet).await;
        }
    });
}

impl Scaler {
    /// What the members of a proc's group do, by their ids, and whether new connections reach
    /// them.
    pub fn loads(&self, group: &ProcName) -> BTreeMap<u64, (Load, bool)> {
        let groups = self.groups.lock();
        let Some(known) = groups.get(group) else { return BTreeMap::new() };
        let of = |(id, seen): (&u64, &Seen)| (*id, (seen.load, known.rotation.contains(id)));
        known.seen.iter().map(of).collect()
    }

    /// What was decided last of a proc.
    pub fn last(&self, group: &ProcName) -> Option<String> {
        self.groups.lock().get(group)?.last.clone()
    }

    /// The owner of a proc ends it: its replicas go.
    pub fn owner_ends(&self, key: &ProcName) {
        self.ended.lock().insert(key.clone());
    }

    /// The owner of a proc starts it, or it has not ended.
    pub fn owner_starts(&self, key: &ProcName) {
        self.ended.lock().remove(key);
    }

    /// Whether its owner has ended a proc.
    pub fn is_ended(&self, key: &ProcName) -> bool {
        self.ended.lock().contains(key)
    }

    /// Looks at all groups. One whose last look has not ended is left out.
    async fn look(self: &Arc<Scaler>, fleet: &Arc<dyn Fleet>) {
        let began = Instant::now();
        let groups = fleet.groups().await;
        let at_work = self.at_work.lock().clone();
        self.groups.lock().retain(|key, _| groups.iter().any(|group| group.key == *key) || at_work.contains(key));
        for mut group in groups {
            if let Some(primary) = &mut group.primary
                && primary.state == MemberState::Ended
                && self.is_ended(&group.key)
            {
                primary.state = MemberState::Stopped;
            }
            if !self.at_work.lock().insert(group.key.clone()) {
                continue;
            }
            let (scaler, fleet) = (Arc::clone(self), Arc::clone(fleet));
            tokio::spawn(async move {
                let key = group.key.clone();
                let known = scaler.groups.lock().get(&key).cloned().unwrap_or_default();
                let mut pass = Pass { scaler: Arc::clone(&scaler), fleet, group, known, began, now: Instant::now() };
                let stays = pass.run().await;
                let known = pass.known;
                match stays {
                    true => drop(scaler.groups.lock().insert(key.clone(), known)),
                    false => drop(scaler.groups.lock().remove(&key)),
                }
                scaler.at_work.lock().remove(&key);
            });
        }
    }
}

/// One look at a group.
struct Pass {
    scaler: Arc<Scaler>,
    fleet: Arc<dyn Fleet>,
    group: Group,
    known: Known,
    /// What is known of the group is of this moment at least.
    began: Instant,
    now: Instant,
}

impl Pass {
    /// Returns whether the group is scaled any more.
    async fn run(&mut self) -> bool {
        let primary = self.group.primary.clone();
        // Another proc may have the name of one that was removed.
        let id = primary.as_ref().map(|primary| primary.id);
        if self.known.primary != id {
            self.known = Known { primary: id, ..Known::default() };
        }
        let scaled = self.group.scaling.clone().filter(|scaling| scaling.max > 1 || scaling.min > 0);
        // One that had ended before this daemon was there may have been ended by its owner; then
        // its replicas had gone, too.
        let is_over = |p: &Member| match p.state {
            MemberState::Ended => !self.known.was_up && self.group.replicas.is_empty(),
            state => state == MemberState::Stopped,
        };
        let (Some(primary), Some(scaling)) = (primary.filter(|p| !is_over(p)), scaled) else {
            self.dissolve().await;
            return false;
        };
        self.known.was_up = true;
        self.take_made(&primary);
        self.measure();
        self.choose_rotation(&primary);
        self.bury(&primary).await;
        self.start_again(&primary).await;
        let wants_more = self.ask(&primary, &scaling).await;
        self.decide(&primary, &scaling, wants_more);
        self.spread(&primary).await;
        self.keep_awake(scaling.min as usize).await;
        self.remove_unused(&primary, &scaling).await;
        self.make_one(&primary, &scaling);
        true
    }

    fn members(&self) -> impl Iterator<Item = &Member> {
        self.group.primary.iter().chain(&self.group.replicas)
    }

    fn decided(&mut self, primary: &Member, what: String) {
        if self.known.last.as_ref() != Some(&what) {
            self.fleet.tell(&primary.name, what.clone());
        }
        self.known.last = Some(what);
    }

    /// It is scaled no more.
    async fn dissolve(&mut self) {
        for member in self.members() {
            self.fleet.keep_awake(member.id, false).await;
        }
        if let Some(primary) = &self.group.primary
            && let Err(why) = self.fleet.spread(primary.id, &[]).await
        {
            tracing::warn!(proc = %primary.name, why, "connections are still spread");
            return;
        }
        for replica in &self.group.replicas {
            self.remove(replica);
        }
    }

    /// Begins to remove a replica: its end may take a while. Returns whether it had not begun.
    fn remove(&self, replica: &Member) -> bool {
        if !self.scaler.removing.lock().insert(replica.id) {
            return false;
        }
        let (scaler, fleet, replica) = (Arc::clone(&self.scaler), Arc::clone(&self.fleet), replica.clone());
        tokio::spawn(async move {
            if let Err(why) = fleet.remove(replica.id).await {
                tracing::info!(proc = %replica.name, why, "a replica stays for now");
            }
            scaler.removing.lock().remove(&replica.id);
        });
        true
    }

    fn measure(&mut self) {
        let members: Vec<Member> = self.members().cloned().collect();
        let seen = &mut self.known.seen;
        seen.retain(|id, _| members.iter().any(|member| member.id == *id));
        for member in members {
            let before = seen.get(&member.id);
            let load = match before {
                Some(before) => member.used.since(&before.used, self.now - before.at, member.cpus),
                None => Load { queued: member.used.queued, ..Load::default() },
            };
            let (unused, woken) = before.map_or((None, None), |before| (before.unused, before.woken));
            seen.insert(member.id, Seen { at: self.now, used: member.used, load, unused, woken });
        }
    }

    /// Those that were in rotation and can serve; at first all that are in memory. The proc itself
    /// comes back to it once it listens where the others do, and is in it if no other is.
    fn choose_rotation(&mut self, primary: &Member) {
        let going = self.scaler.removing.lock().clone();
        let stays = |member: &&Member| !going.contains(&member.id);
        let members: Vec<&Member> = self.group.primary.iter().chain(&self.group.replicas).filter(stays).collect();
        let known = &mut self.known;
        let is_new = known.rotation.is_empty();
        let was = |member: &Member| match is_new {
            true => matches!(member.state, MemberState::Awake | MemberState::Hibernated),
            false => known.rotation.contains(&member.id),
        };
        let mut rotation: Vec<&Member> = members.into_iter().filter(|m| m.state.serves() && was(m)).collect();
        // Where the proc itself listens is where all are to.
        if primary.state == MemberState::Awake && was(primary) && !primary.listens.is_empty() {
            known.ports = primary.listens.iter().copied().collect();
        }
        if rotation.iter().any(|member| known.suits(member)) {
            rotation.retain(|member| known.suits(member));
        }
        let is_out = rotation.iter().all(|member| member.id != primary.id);
        if is_out && primary.state.serves() && (known.suits(primary) || rotation.is_empty()) {
            rotation.insert(0, primary);
        }
        known.rotation = rotation.into_iter().map(|member| member.id).collect();
    }

    /// Removes replicas that have ended. That there are enough is decided by what is left.
    async fn bury(&mut self, primary: &Member) {
        let is_over = |member: &&Member| matches!(member.state, MemberState::Ended | MemberState::Stopped);
        let over: Vec<_> = self.group.replicas.iter().filter(is_over).cloned().collect();
        if over.is_empty() || !self.spread(primary).await {
            return;
        }
        let over: Vec<Member> = over.into_iter().filter(|replica| self.remove(replica)).collect();
        if !over.is_empty() {
            self.known.not_before = Some(self.known.ends.another(self.now));
        }
        for replica in over {
            self.decided(primary, format!("{} has ended and is removed", replica.name));
        }
    }

    /// Starts the proc itself again if it has ended: it is a replica like the others.
    async fn start_again(&mut self, primary: &Member) {
        let waits = self.known.own_ends.last.is_some_and(|last| self.now < last + self.known.own_ends.pause);
        if primary.state != MemberState::Ended || waits {
            return;
        }
        self.known.own_ends.another(self.now);
        let said = match self.fleet.start(primary.id).await {
            Ok(()) => format!("{} has ended and is started again", primary.name),
            Err(why) => format!("{} has ended and cannot be started: {why}", primary.name),
        };
        self.decided(primary, said);
    }

    /// Whether the owner's probe wants more.
    async fn ask(&mut self, primary: &Member, scaling: &Scaling) -> Option<bool> {
        let check = scaling.probe.as_ref()?;
        if let Some((at, known)) = self.known.probed
            && self.now - at < PROBE_EVERY
        {
            return known;
        }
        // One that is being put to sleep or woken may answer late.
        let asked = tokio::time::timeout(PROBE_EVERY, self.fleet.probe(primary.id, check)).await;
        let wants = asked.ok().flatten().map(|fine| !fine);
        self.known.probed = Some((self.now, wants));
        wants
    }

    fn decide(&mut self, primary: &Member, scaling: &Scaling, wants_more: Option<bool>) {
        let loads: Vec<Load> = self.known.rotation.iter().map(|id| self.known.seen[id].load).collect();
        if loads.is_empty() {
            return;
        }
        match decide(scaling, &loads, wants_more, &mut self.known.trend, self.now) {
            Decision::Stay => {}
            Decision::Add(count, why) => self.put_back(primary, count, why),
            Decision::Remove(why) => self.take_away(primary, &why),
        }
    }

    /// Puts back what was taken away; what is missing then is to be made.
    fn put_back(&mut self, primary: &Member, count: u32, why: String) {
        let rank = |member: &Member| match member.state {
            MemberState::Awake => 0,
            MemberState::Hibernated => 1,
            _ => 2,
        };
        let going = self.scaler.removing.lock().clone();
        let is_aside = |member: &&Member| {
            self.known.suits(member) && !self.known.rotation.contains(&member.id) && !going.contains(&member.id)
        };
        let mut aside: Vec<Member> = self.group.replicas.iter().filter(is_aside).cloned().collect();
        aside.sort_by_key(rank);
        aside.truncate(count as usize);
        let left = count - aside.len() as u32;
        for member in aside {
            self.decided(primary, format!("{} is back: {why}", member.name));
            self.known.rotation.push(member.id);
        }
        self.known.wanted = (left > 0).then_some((left, why));
    }

    /// The newest one gets no new connections any more.
    fn take_away(&mut self, primary: &Member, why: &str) {
        self.known.wanted = None;
        let newest = self.known.rotation.iter().rposition(|id| *id != primary.id);
        let Some(id) = newest.map(|at| self.known.rotation.remove(at)) else { return };
        if let Some(name) = self.group.replicas.iter().find(|member| member.id == id).map(|m| m.name.clone()) {
            self.decided(primary, format!("{name} gets no new connections: {why}"));
        }
    }

    /// Begins to make one of the replicas that are wanted, which takes a while.
    fn make_one(&mut self, primary: &Member, scaling: &Scaling) {
        let Some((count, why)) = self.known.wanted.clone() else { return };
        // Some that are aside may be beyond what there may be.
        if self.group.replicas.len() as u32 + 1 >= scaling.max {
            self.known.wanted = None;
            return;
        }
        // What is made of one that does not listen yet would not be known to be ready.
        let does_not_listen = primary.state == MemberState::Awake && primary.is_to_listen && primary.listens.is_empty();
        let waits = self.known.not_before.is_some_and(|at| self.now < at);
        if waits || does_not_listen || self.scaler.making.lock().contains_key(&primary.id) {
            return;
        }
        self.known.wanted = (count > 1).then(|| (count - 1, why.clone()));
        self.scaler.making.lock().insert(primary.id, None);
        let ports: Vec<u16> = self.known.ports.iter().copied().collect();
        let (scaler, fleet, id, method) =
            (Arc::clone(&self.scaler), Arc::clone(&self.fleet), primary.id, scaling.method);
        tokio::spawn(async move {
            let made = fleet.add(id, method, &ports).await;
            let outcome = made.map(|(new, how)| (new.id, new.name, how));
            scaler.making.lock().insert(id, Some(Made { at: Instant::now(), why, outcome }));
        });
    }

    /// Takes up what has come of one that was being made.
    fn take_made(&mut self, primary: &Member) {
        let made = {
            let mut making = self.scaler.making.lock();
            let Some(Some(made)) = making.get(&primary.id).cloned() else { return };
            let is_there = |id: &u64| self.group.replicas.iter().any(|replica| replica.id == *id);
            let is_missing = made.outcome.as_ref().is_ok_and(|(id, ..)| !is_there(id));
            // It may have come since the look began; else it has gone again already.
            if is_missing && made.at >= self.began {
                return;
            }
            making.remove(&primary.id);
            if is_missing {
                return;
            }
            made
        };
        let why = made.why;
        match made.outcome {
            Ok((id, name, how)) => {
                self.decided(primary, format!("{name} is added ({how}): {why}"));
                self.known.rotation.push(id);
            }
            Err(refused) => {
                self.known.wanted = None;
                self.known.not_before = Some(self.now + AGAIN_AFTER);
                self.decided(primary, format!("no replica is added ({why}): {refused}"));
            }
        }
    }

    /// Returns whether no connection leads elsewhere any more.
    async fn spread(&mut self, primary: &Member) -> bool {
        match self.fleet.spread(primary.id, &self.known.rotation).await {
            Ok(()) => true,
            Err(why) => {
                self.decided(primary, format!("connections cannot be spread: {why}"));
                false
            }
        }
    }

    /// So many are awake, or are woken; others sleep when they are idle.
    async fn keep_awake(&mut self, count: usize) {
        let wanted: Vec<u64> = self.known.rotation.iter().take(count).copied().collect();
        let members: Vec<Member> = self.members().cloned().collect();
        for member in members {
            let is_wanted = wanted.contains(&member.id);
            self.fleet.keep_awake(member.id, is_wanted).await;
            let sleeps = matches!(member.state, MemberState::Hibernated | MemberState::Parked);
            let Some(seen) = self.known.seen.get_mut(&member.id).filter(|_| is_wanted && sleeps) else { continue };
            if seen.woken.is_none_or(|woken| self.now - woken >= AGAIN_AFTER) {
                seen.woken = Some(self.now);
                self.fleet.wake(member.id).await;
            }
        }
    }

    /// Removes those that are out of rotation and parked once no client has had to do with them for
    /// a calm time; those that are not parked, for they tick or never sleep, after a longer one.
    async fn remove_unused(&mut self, primary: &Member, scaling: &Scaling) {
        // One that is being made is in no rotation yet.
        if self.scaler.making.lock().contains_key(&primary.id) {
            return;
        }
        let is_out = |member: &&Member| member.state.serves() && !self.known.rotation.contains(&member.id);
        let out: Vec<Member> = self.group.replicas.iter().filter(is_out).cloned().collect();
        let calm = Duration::from_millis(scaling.calm_ms);
        for member in out {
            let is_in_use = self.fleet.is_in_use(member.id).await;
            let Some(seen) = self.known.seen.get_mut(&member.id) else { continue };
            seen.unused = if is_in_use { None } else { Some(seen.unused.unwrap_or(self.now)) };
            let needed = if member.state == MemberState::Parked { calm } else { calm * NEVER_PARKED };
            if seen.unused.is_some_and(|since| self.now - since >= needed) && self.remove(&member) {
                self.decided(primary, format!("{} is removed: it had nothing to do", member.name));
            }
        }
    }
}

#[cfg(test)]
#[path = "scaler_tests.rs"]
mod tests;
