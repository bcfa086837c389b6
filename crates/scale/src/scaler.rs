//! The look at every scaled proc once a second, and what follows from it.

use crate::decide::{Decision, Trend, decide};
use crate::fleet::{Fleet, Group, Member, MemberState};
use crate::load::{Load, LoadCounters};
use kip_types::ProcName;
use kip_types::api::clone::CloneMethod;
use kip_types::scale::{ScaleMethod, Scaling};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Between looks.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Between runs of the owner's probe.
const PROBE_EVERY: Duration = Duration::from_secs(3);
/// After a replica could not be made.
const AGAIN_AFTER: Duration = Duration::from_secs(10);
/// Before a proc that has ended is started again; twice as long each time, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// So many calm times without a connection end a replica that is not parked.
const NEVER_PARKED: u32 = 5;
/// Pages that a proc has to read again, a second, above which it thrashes: 8 MiB. What is copied of
/// its memory then is what it does not need.
const THRASHES: f64 = 2048.0;

/// What is known of the replicas of procs.
#[derive(Debug, Default)]
pub struct Scaler {
    groups: Mutex<BTreeMap<ProcName, Known>>,
    /// Those that are being looked at.
    at_work: Mutex<BTreeSet<ProcName>>,
    /// Procs whose owners have ended them.
    ended: Mutex<BTreeSet<ProcName>>,
}

/// What is known of the replicas of one proc, by their ids.
#[derive(Debug, Clone, Default)]
struct Known {
    /// The proc itself.
    primary: Option<u64>,
    trend: Trend,
    /// Those that get new connections.
    rotation: Vec<u64>,
    /// The proc itself could serve at some look.
    was_up: bool,
    seen: BTreeMap<u64, Seen>,
    last: Option<String>,
    /// No replica is made before.
    not_before: Option<Instant>,
    probed: Option<(Instant, Option<bool>)>,
    /// When the proc itself may be started again, and the pause before that.
    starts: Option<(Instant, Duration)>,
}

#[derive(Debug, Clone)]
struct Seen {
    at: Instant,
    usage: LoadCounters,
    load: Load,
    /// Out of rotation and without connections since then.
    lonely: Option<Instant>,
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

    /// The owner of a proc starts it.
    pub fn owner_starts(&self, key: &ProcName) {
        self.ended.lock().remove(key);
    }

    /// Looks at all groups. One whose last look has not ended is left out.
    async fn look(self: &Arc<Scaler>, fleet: &Arc<dyn Fleet>) {
        let groups = fleet.groups().await;
        let at_work = self.at_work.lock().clone();
        self.groups.lock().retain(|key, _| groups.iter().any(|group| group.key == *key) || at_work.contains(key));
        self.ended.lock().retain(|key| groups.iter().any(|group| group.key == *key));
        for mut group in groups {
            if let Some(primary) = &mut group.primary
                && primary.state == MemberState::Ended
                && self.ended.lock().contains(&group.key)
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
                let mut pass = Pass { fleet: &*fleet, group, known, now: Instant::now() };
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
struct Pass<'a> {
    fleet: &'a dyn Fleet,
    group: Group,
    known: Known,
    now: Instant,
}

impl Pass<'_> {
    /// Returns whether the group is scaled any more.
    async fn run(&mut self) -> bool {
        let primary = self.group.primary.clone();
        // Another proc may have the name of one that was removed.
        let id = primary.as_ref().map(|primary| primary.id);
        if self.known.primary != id {
            self.known = Known { primary: id, ..Known::default() };
        }
        let scaled = self.group.scaling.clone().filter(|scaling| scaling.max > 1 || scaling.min > 0);
        // One that had ended before this daemon was there may have been ended by its owner.
        let is_over = |p: &Member| match p.state {
            MemberState::Ended => !self.known.was_up,
            state => state == MemberState::Stopped,
        };
        let (Some(primary), Some(scaling)) = (primary.filter(|p| !is_over(p)), scaled) else {
            self.dissolve().await;
            return false;
        };
        self.known.was_up = true;
        self.measure();
        self.choose_rotation(&primary);
        self.bury().await;
        self.start_again(&primary).await;
        let wants_more = self.ask(&primary, &scaling).await;
        let loads: Vec<Load> = self.known.rotation.iter().map(|id| self.known.seen[id].load).collect();
        if !loads.is_empty() {
            match decide(&scaling, &loads, wants_more, &mut self.known.trend, self.now) {
                Decision::Stay => {}
                Decision::Add(count, why) => self.add(&primary, &scaling, count, &why).await,
                Decision::Remove(why) => self.take_away(&primary, &why),
            }
        }
        self.spread(&primary).await;
        self.keep_awake(scaling.min as usize).await;
        self.remove_quiet(&primary, &scaling).await;
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
        self.keep_awake(0).await;
        if let Some(primary) = &self.group.primary
            && let Err(why) = self.fleet.spread(&primary.name, &[]).await
        {
            tracing::warn!(proc = %primary.name, why, "connections are still spread");
            return;
        }
        for replica in &self.group.replicas {
            if let Err(why) = self.fleet.remove(&replica.name).await {
                tracing::info!(proc = %replica.name, why, "a replica stays for now");
            }
        }
    }

    /// Removes replicas that have ended. That there are enough is decided by what is left.
    async fn bury(&mut self) {
        let is_over = |member: &Member| matches!(member.state, MemberState::Ended | MemberState::Stopped);
        let over: Vec<_> = self.group.replicas.iter().filter(|member| is_over(member)).cloned().collect();
        for replica in over {
            // First no connection may lead there.
            if let Some(primary) = self.group.primary.clone() {
                self.spread(&primary).await;
                self.decided(&primary, format!("{} has ended and is removed", replica.name));
            }
            if let Err(why) = self.fleet.remove(&replica.name).await {
                tracing::info!(proc = %replica.name, why, "a replica that has ended stays for now");
            }
            self.group.replicas.retain(|member| member.id != replica.id);
        }
    }

    /// Starts the proc itself again if it has ended: it is a replica like the others.
    async fn start_again(&mut self, primary: &Member) {
        if primary.state != MemberState::Ended {
            return;
        }
        let (at, pause) = self.known.starts.unwrap_or((self.now, FIRST_PAUSE));
        if self.now < at {
            return;
        }
        self.known.starts = Some((self.now + pause, (pause * 2).min(LONGEST_PAUSE)));
        let said = match self.fleet.start(&primary.name).await {
            Ok(()) => format!("{} has ended and is started again", primary.name),
            Err(why) => format!("{} has ended and cannot be started: {why}", primary.name),
        };
        self.decided(primary, said);
    }

    fn measure(&mut self) {
        let members: Vec<Member> = self.members().cloned().collect();
        let seen = &mut self.known.seen;
        seen.retain(|id, _| members.iter().any(|member| member.id == *id));
        for member in members {
            let before = seen.get(&member.id);
            let load = match before {
                Some(before) => member.usage.since(&before.usage, self.now - before.at, member.cpus),
                None => Load { queued: member.usage.queued, ..Load::default() },
            };
            let lonely = before.and_then(|before| before.lonely);
            seen.insert(member.id, Seen { at: self.now, usage: member.usage, load, lonely });
        }
    }

    /// Those that were in rotation and can serve; at first all that are in memory. The proc itself
    /// always.
    fn choose_rotation(&mut self, primary: &Member) {
        let serves = |member: &&Member| matches!(member.state, MemberState::Up | MemberState::Down);
        let members: Vec<&Member> = self.members().filter(serves).collect();
        let is_new = self.known.rotation.is_empty();
        let was = |member: &&&Member| match is_new {
            true => member.state == MemberState::Up,
            false => self.known.rotation.contains(&member.id),
        };
        let is_in = |member: &&&Member| member.id == primary.id || was(member);
        self.known.rotation = members.iter().filter(is_in).map(|member| member.id).collect();
    }

    /// Whether the owner's probe wants more.
    async fn ask(&mut self, primary: &Member, scaling: &Scaling) -> Option<bool> {
        let check = scaling.probe.as_ref()?;
        if let Some((at, known)) = self.known.probed
            && self.now - at < PROBE_EVERY
        {
            return known;
        }
        let wants = self.fleet.probe(&primary.name, check).await.map(|fine| !fine);
        self.known.probed = Some((self.now, wants));
        wants
    }

    /// Puts back what was taken away, then makes more.
    async fn add(&mut self, primary: &Member, scaling: &Scaling, count: u32, why: &str) {
        let out = |state: MemberState| {
            let aside = |member: &&Member| member.state == state && !self.known.rotation.contains(&member.id);
            self.group.replicas.iter().filter(aside).cloned().collect::<Vec<_>>()
        };
        let mut aside = out(MemberState::Up);
        aside.extend(out(MemberState::Down));
        let mut left = count;
        for member in aside.into_iter().take(count as usize) {
            self.decided(primary, format!("{} is back: {why}", member.name));
            self.known.rotation.push(member.id);
            left -= 1;
        }
        if self.known.not_before.is_some_and(|at| self.now < at) {
            return;
        }
        for _ in 0..left {
            // Some that are aside may be beyond what there may be.
            if self.group.replicas.len() as u32 + 1 >= scaling.max {
                return;
            }
            match self.make(primary, scaling).await {
                Ok((name, how)) => self.decided(primary, format!("{name} is added ({how}): {why}")),
                Err(refused) => {
                    self.known.not_before = Some(Instant::now() + AGAIN_AFTER);
                    self.decided(primary, format!("no replica is added ({why}): {refused}"));
                    return;
                }
            }
        }
    }

    /// A new replica, which is in rotation from the next look on.
    async fn make(&mut self, primary: &Member, scaling: &Scaling) -> Result<(ProcName, String), String> {
        let thrashes = self.known.seen.get(&primary.id).is_some_and(|seen| seen.load.refaults > THRASHES);
        let method = match scaling.method {
            ScaleMethod::Hot => CloneMethod::Hot,
            ScaleMethod::Warm => CloneMethod::Warm,
            ScaleMethod::Cold => CloneMethod::Cold,
            ScaleMethod::Auto if self.fleet.has_template(&primary.name).await => CloneMethod::Warm,
            ScaleMethod::Auto if thrashes => CloneMethod::Cold,
            ScaleMethod::Auto => CloneMethod::Hot,
        };
        let (name, how) = match self.fleet.add(&primary.name, method).await {
            Ok(name) => (name, how(method, thrashes)),
            Err(refused) if scaling.method == ScaleMethod::Auto && method != CloneMethod::Cold => {
                let name = self.fleet.add(&primary.name, CloneMethod::Cold).await?;
                (name, format!("cold, for {refused}"))
            }
            Err(refused) => return Err(refused),
        };
        let groups = self.fleet.groups().await;
        let of_it = groups.into_iter().find(|group| group.key == self.group.key);
        if let Some(new) = of_it.and_then(|group| group.replicas.into_iter().find(|member| member.name == name)) {
            self.known.rotation.push(new.id);
            self.group.replicas.push(new);
        }
        Ok((name, how))
    }

    /// The newest one gets no new connections any more.
    fn take_away(&mut self, primary: &Member, why: &str) {
        let newest = self.known.rotation.iter().rposition(|id| *id != primary.id);
        let Some(id) = newest.map(|at| self.known.rotation.remove(at)) else { return };
        if let Some(name) = self.group.replicas.iter().find(|member| member.id == id).map(|m| m.name.clone()) {
            self.decided(primary, format!("{name} gets no new connections: {why}"));
        }
    }

    async fn spread(&mut self, primary: &Member) {
        let name = |id: &u64| self.members().find(|member| member.id == *id).map(|m| m.name.clone());
        let over: Vec<ProcName> = self.known.rotation.iter().filter_map(name).collect();
        if let Err(why) = self.fleet.spread(&primary.name, &over).await {
            self.decided(primary, format!("connections cannot be spread: {why}"));
        }
    }

    /// So many are awake, or are woken; others sleep when they are idle.
    async fn keep_awake(&self, count: usize) {
        let awake: Vec<u64> = self.known.rotation.iter().take(count).copied().collect();
        for member in self.members() {
            self.fleet.keep_awake(&member.name, awake.contains(&member.id)).await;
        }
    }

    /// Removes those that are out of rotation once they are parked and have no connections; those
    /// that are not parked, for they tick or never sleep, after a longer time without any.
    async fn remove_quiet(&mut self, primary: &Member, scaling: &Scaling) {
        let is_out = |member: &&Member| !self.known.rotation.contains(&member.id);
        let out: Vec<Member> = self.group.replicas.iter().filter(is_out).cloned().collect();
        let long = Duration::from_millis(scaling.calm_ms) * NEVER_PARKED;
        for member in out {
            let is_parked = member.state == MemberState::Down;
            let has_connections = self.fleet.has_connections(&member.name).await;
            let Some(seen) = self.known.seen.get_mut(&member.id) else { continue };
            seen.lonely = if has_connections { None } else { Some(seen.lonely.unwrap_or(self.now)) };
            if seen.lonely.is_none_or(|since| !is_parked && self.now - since < long) {
                continue;
            }
            match self.fleet.remove(&member.name).await {
                Ok(()) => self.decided(primary, format!("{} is removed: it had nothing to do", member.name)),
                Err(why) => tracing::info!(proc = %member.name, why, "a replica stays for now"),
            }
        }
    }
}

/// How a replica was made, in words.
fn how(method: CloneMethod, thrashes: bool) -> String {
    let word = match method {
        CloneMethod::Hot => "hot",
        CloneMethod::Warm => "warm",
        CloneMethod::Cold if thrashes => "cold, for it thrashes",
        CloneMethod::Cold => "cold",
    };
    word.to_owned()
}

#[cfg(test)]
#[path = "scaler_tests.rs"]
mod tests;
